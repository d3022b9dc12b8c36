// A figure is one or more panels under one title: stacked over one time axis, or side by side as small multiples.

// The agent first, bands last, all else in the order of drawing.
function legendRank(mark) {
  return mark.type === "band" ? 2 : mark.color === "agent" ? 0 : 1;
}

class Figure {
  constructor(host, spec) {
    this.host = host;
    this.spec = spec;
    this.chosen = null; // the series that somebody has picked in the legend
    this.left = 0;
    this.right = 0;
    this.width = 0;
    this.part = null; // the stretch of time that is looked at closely
    this.legend(host);
    this.back = this.wayBack(host);
    this.frame = element("div", `panels columns-${Math.min(spec.columns, 3)}`, host);
    this.voice = element("div", "unseen", host);
    this.voice.setAttribute("aria-live", "polite");
    this.panels = spec.panels.map((one) => this.panel(one));
    new ResizeObserver(() => this.fit()).observe(this.frame);
  }

  panel(spec) {
    const box = element("div", "panel", this.frame);
    if (spec.title) element("p", "panel-title", box, spec.title);
    const plot = element("div", "plot", box);
    return spec.rows ? new Rows(plot, spec, this) : new Panel(plot, spec, this);
  }

  // Every series that has a name, once, the foremost first; a click brings one forward. A panel with a single series is named
  // by its title.
  legend(host) {
    const seen = new Map();
    for (const panel of this.spec.panels) {
      const named = (panel.marks || []).filter((mark) => mark.name && mark.legend !== false).reverse();
      named.sort((a, b) => legendRank(a) - legendRank(b));
      if (named.length > 1) for (const mark of named) seen.set(mark.name, mark);
      for (const entry of panel.key || []) seen.set(entry.name, entry);
    }
    if (seen.size < 2) return;
    const list = element("div", this.spec.choose ? "legend choose" : "legend", host);
    for (const [name, mark] of seen) {
      const item = element(this.spec.choose ? "button" : "span", "key", list);
      const swatch = element("i", `c-${mark.color}`, item);
      if (mark.type === "band") swatch.classList.add("wide");
      if (mark.strong) swatch.classList.add("strong");
      if (mark.type === "dots" || mark.type === "dot") swatch.classList.add(mark.hollow ? "open" : "round");
      item.append(name);
      if (!this.spec.choose) continue;
      item.type = "button";
      item.setAttribute("aria-pressed", "false");
      item.addEventListener("click", () => this.choose(name, list));
    }
  }

  choose(name, list) {
    this.chosen = this.chosen === name ? null : name;
    for (const item of list.children) item.setAttribute("aria-pressed", String(item.textContent === this.chosen));
    this.draw();
  }

  wayBack(host) {
    if (!this.spec.panels.some((panel) => panel.x && panel.x.kind === "time")) return null;
    const bar = element("div", "closer", host);
    element("span", "hint", bar, "Drag to zoom in");
    const back = element("button", "quiet", bar, "Reset zoom");
    back.type = "button";
    back.hidden = true;
    back.addEventListener("click", () => this.zoom(null));
    return back;
  }

  // Look at a part of the time, or at all of it again.
  zoom(part) {
    if (!part && !this.part) return;
    this.part = part;
    this.back.hidden = !part;
    this.clear();
    this.draw();
    if (part) this.say(`Showing ${part.map((at) => timeText(at, REPORT.intraday)).join(" to ")}`);
  }

  escape() {
    this.clear();
    this.zoom(null);
  }

  state(mark) {
    if (this.chosen === null || !mark.name) return "";
    return mark.name === this.chosen || mark.keep ? "chosen" : "faded";
  }

  words(panel) {
    return [this.spec.title, panel.title, panel.summary || this.spec.summary].filter(Boolean).join(". ");
  }

  fit() {
    const width = this.panels[0].host.clientWidth;
    if (width > 0 && Math.abs(width - this.width) > 0.5) this.draw(width);
  }

  draw(width) {
    this.width = width || this.width;
    this.left = 0;
    this.right = 0;
    if (this.width <= 0) return;
    // Stacked panels share their edges, so that a day stands above itself.
    const stacked = !(this.spec.columns > 1) && this.panels.length > 1 && this.panels.every((panel) => panel instanceof Panel);
    if (stacked) {
      this.left = Math.max(...this.panels.map(({ spec }) => tickWidth(spec, airy(extents(spec, spec.x.kind === "time" ? this.part : null).y, spec.y.log, false))));
      this.right = Math.max(...this.panels.map(({ spec }) => endWidth(labelled(spec))));
    }
    for (const panel of this.panels) panel.draw(this.width);
  }

  point(panel, at, aloud) {
    for (const other of this.panels) {
      if (other === panel || !(this.spec.shared && other instanceof Panel)) continue;
      other.read(at);
      other.tip.hidden = true;
    }
    const found = panel.read(at);
    panel.show(at, found);
    if (aloud) this.say(`${panel.xText(at)}: ${found.map((one) => `${one.name} ${one.text}`).join(", ")}`);
  }

  say(text) {
    this.voice.textContent = text;
  }

  clear() {
    for (const panel of this.panels) panel.hide();
  }

  // The numbers behind the figure, one row per point.
  csv() {
    const rows = [["panel", "series", "x", "y", "low", "high"]];
    const cell = (value) => (value === null || value === undefined ? "" : value);
    for (const panel of this.spec.panels) {
      const when = (value) => (panel.x && panel.x.kind === "time" ? utc(value).toISOString() : value);
      for (const row of panel.rows || []) {
        rows.push([panel.title, row.name, "", cell(row.value), cell(row.low), cell(row.high)]);
        for (const dot of row.dots) rows.push([panel.title, `${row.name}: ${dot.name}`, "", cell(dot.value), "", ""]);
      }
      for (const mark of panel.marks || []) {
        mark.x.forEach((value, i) => {
          const y = mark.y ? mark.y[i] : mark.to ? mark.to[i] : null;
          rows.push([panel.title, mark.name || "", when(value), cell(y), cell(mark.low && mark.low[i]), cell(mark.high && mark.high[i])]);
        });
      }
    }
    const quote = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replace(/"/g, '""')}"` : String(value));
    return `${rows.map((row) => row.map(quote).join(",")).join("\n")}\n`;
  }
}
