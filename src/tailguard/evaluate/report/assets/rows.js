// Rows: one line per thing, a dot for its value and a bar for its interval; further dots where there are several values.

const ROW = 34;
const LOW_ROW = 46; // on a phone the name stands above the row

class Rows extends Readable {
  draw(width) {
    const { spec } = this;
    const narrow = width < WIDE;
    const size = (narrow ? LOW_ROW : ROW) * tallness;
    const top = 22;
    const height = top + spec.rows.length * size + 30;
    const texts = spec.rows.map((row) => row.text.length);
    const names = spec.rows.map((row) => row.name.length);
    const left = narrow ? 6 : Math.min(Math.max(...names) * 6.9 + 16, width * 0.36);
    const right = narrow ? width - 8 : width - Math.max(...texts) * 6.6 - 18;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": this.figure.words(spec) });
    const values = spec.rows.flatMap((row) => [row.value, row.low, row.high, ...row.dots.map((dot) => dot.value)]);
    const rules = (spec.rules || []).map((rule) => rule.x);
    const reach = airy(span(values.concat(spec.include || [], rules)), false, false);
    this.x = makeScale("linear", reach, [left, right]);
    this.axis(chart, left, right, top, height - 30);
    this.places = spec.rows.map((row, i) => top + i * size + (narrow ? 32 : size / 2));
    spec.rows.forEach((row, i) => this.row(chart, row, this.places[i], width, narrow));
    this.hair = svg("g", {}, chart);
    chart.addEventListener("keydown", (event) => this.key(event));
    chart.addEventListener("blur", () => this.hide());
    if (this.svg) this.host.replaceChild(chart, this.svg);
    else this.host.insertBefore(chart, this.tip);
    this.svg = chart;
    this.now = -1;
  }

  axis(chart, left, right, top, bottom) {
    const made = linearTicks(...this.x.domain, Math.max(2, Math.floor((right - left) / 80)));
    for (const tick of made.ticks) {
      const at = px(this.x(tick));
      svg("line", { x1: at, x2: at, y1: top, y2: bottom, class: tick === 0 ? "grid zero" : "grid" }, chart);
      words(format(tick, this.spec.format, made.step), { x: at, y: bottom + 17, class: "tick middle" }, chart);
    }
    for (const rule of this.spec.rules || []) {
      const at = px(this.x(rule.x));
      svg("line", { x1: at, x2: at, y1: top - 4, y2: bottom, class: "rule" }, chart);
      const toLeft = at > (left + right) / 2;
      words(rule.label, { x: at + (toLeft ? -4 : 4), y: top - 9, class: toLeft ? "rule-label end" : "rule-label" }, chart);
    }
  }

  row(chart, row, y, width, narrow) {
    const group = svg("g", { class: "mark" }, chart);
    const name = narrow ? { x: 6, y: y - 14, class: "row-name" } : { x: this.x.domain ? this.x(this.x.domain[0]) - 12 : 0, y: y + 4, class: "row-name end" };
    words(row.name, name, group);
    words(row.text, { x: width - 4, y: narrow ? y - 14 : y + 4, class: "row-text end" }, group);
    if (row.low !== null && row.high !== null) {
      const ends = { x1: px(this.x(row.low)), x2: px(this.x(row.high)) };
      svg("line", { ...ends, y1: y, y2: y, class: `range c-${row.color}` }, group);
    }
    for (const dot of row.dots) {
      const look = dot.hollow ? " hollow" : "";
      svg("circle", { cx: px(this.x(dot.value)), cy: y, r: dot.hollow ? 4 : 3.5, class: `dot c-${dot.color}${look}` }, group);
    }
    if (row.value !== null) {
      svg("circle", { cx: px(this.x(row.value)), cy: y, r: 5.5, class: `dot c-${row.color}` }, group);
    }
  }

  follow(event) {
    const frame = this.svg.getBoundingClientRect();
    const y = (event.clientY - frame.top) * (this.svg.viewBox.baseVal.height / frame.height);
    this.point(nearest(this.places, y));
  }

  key(event) {
    const jump = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.hide();
    if (jump === undefined) return;
    event.preventDefault();
    this.point(Math.min(Math.max(this.now + jump, 0), this.spec.rows.length - 1), true);
  }

  point(i, aloud) {
    const row = this.spec.rows[i];
    this.now = i;
    this.hair.replaceChildren();
    const { width } = this.svg.viewBox.baseVal;
    svg("rect", { x: 0, y: this.places[i] - ROW / 2, width, height: ROW, class: "stripe" }, this.hair);
    this.tip.replaceChildren();
    element("div", "tip-x", this.tip, row.name);
    const add = (color, name, text) => {
      const line = element("div", "tip-row", this.tip);
      element("i", `c-${color}`, line);
      element("span", "", line, name);
      element("b", "", line, text);
    };
    if (row.value !== null) add(row.color, row.label || "value", format(row.value, this.spec.format));
    if (row.low !== null && row.high !== null) {
      add(row.color, "95% interval", `${format(row.low, this.spec.format)} to ${format(row.high, this.spec.format)}`);
    }
    for (const dot of row.dots.slice(0, 14)) add(dot.color, dot.name, format(dot.value, this.spec.format));
    this.tip.hidden = false;
    const ratio = this.svg.getBoundingClientRect().height / this.svg.viewBox.baseVal.height;
    this.tip.style.top = `${(this.places[i] + 20) * ratio}px`;
    this.tip.style.left = `${Math.max(0, (this.host.clientWidth - this.tip.offsetWidth) / 2)}px`;
    if (aloud) this.figure.say(this.tip.innerText.replace(/\s+/g, " "));
  }

  hide() {
    this.now = -1;
    if (this.hair) this.hair.replaceChildren();
    this.tip.hidden = true;
  }
}
