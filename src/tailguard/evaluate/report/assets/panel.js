// A panel is one chart with its axes: drawn for the width that it has, read by a cursor that mouse, finger and keys move.

const WIDE = 560; // from here on lines are labelled at their ends; below, the legend above does it
let tallness = 1; // of all charts; paper has less space than a screen
const LETTER = 6.3; // width of a small letter, for margins before anything is drawn

function element(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function span(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// How far the data reach, sideways and upwards; upwards only what lies in `part` of the axis, if one is given.
function extents(panel, part) {
  const rules = (panel.rules || []).filter((rule) => rule.y !== undefined && rule.y !== null).map((rule) => rule.y);
  const wide = panel.marks.flatMap((mark) => span(mark.x));
  const high = panel.marks.flatMap((mark) => {
    const [first, last] = inside(mark, part);
    return MARKS[mark.type].heights(mark).flatMap((column) => span(column.length === mark.x.length ? column.slice(first, last) : column));
  });
  return { x: span(wide.concat(panel.x.include || [])), y: span(high.concat(panel.y.include || [], rules)) };
}

// A little air above and below, and none where the data end at a natural border such as 0.
function airy([low, high], log, tight) {
  if (!Number.isFinite(low)) return [0, 1];
  if (log) {
    const factor = Math.pow(high / low || 1, 0.05) || 1;
    return low === high ? [low / 1.1, high * 1.1] : [low / factor, high * factor];
  }
  if (low === high) return [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const air = (high - low) * 0.05;
  return [tight && low === 0 ? 0 : low - air, tight && high === 0 ? 0 : high + air];
}

function axisY(panel, group, y, box) {
  const count = Math.max(3, Math.round((box.bottom - box.top) / 48));
  const made = panel.y.log ? logTicks(...y.domain, count) : linearTicks(...y.domain, count);
  for (const tick of made.ticks) {
    const at = px(y(tick));
    const zero = tick === 0 && !panel.y.log ? " zero" : "";
    svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: `grid${zero}` }, group);
    words(format(tick, panel.y.format, made.step), { x: box.left - 8, y: at + 3.5, class: "tick end" }, group);
  }
}

function axisX(panel, group, x, box) {
  const count = Math.max(2, Math.floor((box.right - box.left) / 66));
  const time = panel.x.kind === "time";
  const made = time ? timeTicks(...x.domain, count) : panel.x.kind === "log" ? logTicks(...x.domain, count) : linearTicks(...x.domain, count);
  svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "base" }, group);
  for (const tick of made.ticks) {
    const at = px(x(tick));
    const label = time ? timeLabel(tick, made.unit) : format(tick, panel.x.format, made.step);
    svg("line", { x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4, class: "base" }, group);
    words(label, { x: at, y: box.bottom + 17, class: "tick middle" }, group);
  }
  if (panel.x.label) words(panel.x.label, { x: (box.left + box.right) / 2, y: box.bottom + 34, class: "tick middle" }, group);
}

function tickWidth(panel, domain) {
  const made = panel.y.log ? logTicks(...domain, 5) : linearTicks(...domain, 5);
  return Math.max(...made.ticks.map((tick) => format(tick, panel.y.format, made.step).length), 2) * LETTER + 12;
}

const labelled = (panel) => panel.marks.filter((mark) => mark.label && mark.type === "line");

function endWidth(marks) {
  return marks.length ? Math.min(Math.max(...marks.map((mark) => mark.name.length)), 22) * LETTER + 18 : 14;
}

// Labels at the ends of lines, moved apart where they would lie on one another.
function endLabels(panel, group, y, box, edge) {
  const labels = labelled(panel).map((mark) => {
    const last = mark.y.reduce((found, value, i) => (value === null || mark.x[i] > edge ? found : i), 0);
    return { mark, at: y(mark.y[last]) };
  });
  labels.sort((a, b) => a.at - b.at);
  const gap = 14;
  labels.forEach((label, i) => {
    if (i > 0) label.at = Math.max(label.at, labels[i - 1].at + gap);
  });
  for (let i = labels.length - 1, floor = box.bottom; i >= 0; i -= 1, floor -= gap) {
    labels[i].at = Math.min(labels[i].at, floor);
  }
  for (const { mark, at } of labels) {
    const text = mark.name.length > 22 ? `${mark.name.slice(0, 21)}\u2026` : mark.name;
    const node = words(text, { x: box.right + 8, y: px(at + 3.5), class: `end-label c-${mark.color}` }, group);
    node.dataset.series = mark.name;
  }
}

let clips = 0;

// A finger leaves as soon as it has tapped, but wants to read: the next tap elsewhere clears (page.js).
function leave(event, reader) {
  if (event.pointerType !== "touch") reader.clear();
}

// What a pointer can read. `host` is the element, `spec` the data, `figure` hears where the cursor is.
class Readable {
  constructor(host, spec, figure) {
    this.host = host;
    this.spec = spec;
    this.figure = figure;
    this.tip = element("div", "tip", host);
    this.tip.hidden = true;
    this.svg = null;
    host.addEventListener("pointermove", (event) => this.follow(event));
    host.addEventListener("pointerdown", (event) => this.follow(event));
    host.addEventListener("pointerleave", (event) => leave(event, figure));
  }
}

class Panel extends Readable {
  constructor(host, spec, figure) {
    super(host, spec, figure);
    this.at = null;
    if (spec.x.kind === "time") enableZoom(this);
  }

  draw(width) {
    const spec = this.spec;
    const part = spec.x.kind === "time" ? this.figure.part : null;
    const reach = extents(spec, part);
    const domain = { x: part || reach.x, y: airy(reach.y, spec.y.log, spec.y.tight) };
    if (domain.x[0] === domain.x[1]) domain.x = [domain.x[0] - 0.5, domain.x[1] + 0.5];
    const ends = width >= WIDE ? labelled(spec) : [];
    const right = Math.max(endWidth(ends), width >= WIDE ? this.figure.right : 0);
    const height = spec.height * tallness * (width < WIDE ? Math.max(0.8, Math.min(1, width / WIDE + 0.25)) : 1);
    const foot = spec.hideX ? 8 : spec.x.label ? 42 : 26;
    const left = Math.max(tickWidth(spec, domain.y), this.figure.left);
    this.box = { left, right: width - right, top: 10, bottom: Math.round(height) - foot };
    this.x = makeScale(spec.x.kind === "log" ? "log" : "linear", domain.x, [this.box.left, this.box.right]);
    this.y = makeScale(spec.y.log ? "log" : "linear", domain.y, [this.box.bottom, this.box.top]);
    this.paint(width, Math.round(height), ends.length > 0);
  }

  paint(width, height, ends) {
    const { spec, box } = this;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": this.figure.words(spec) });
    const back = svg("g", {}, chart);
    axisY(spec, back, this.y, box);
    if (!spec.hideX) axisX(spec, back, this.x, box);
    const front = svg("g", {}, chart);
    const clipped = svg("g", this.figure.part ? { "clip-path": `url(#${this.clip(chart)})` } : {}, front);
    spec.marks.forEach((mark) => {
      const group = svg("g", { class: `mark ${this.figure.state(mark)}` }, clipped);
      MARKS[mark.type].draw(mark, group, this.x, this.y);
    });
    (spec.rules || []).forEach((rule) => drawRule(rule, front, this.x, this.y, box));
    if (ends) endLabels(spec, front, this.y, box, this.x.domain[1]);
    this.hair = svg("g", { class: "hair" }, chart);
    chart.addEventListener("keydown", (event) => this.key(event));
    chart.addEventListener("blur", () => this.figure.clear());
    if (this.svg) this.host.replaceChild(chart, this.svg);
    else this.host.insertBefore(chart, this.tip);
    this.svg = chart;
    this.tip.hidden = true;
  }

  // When zoomed in, lines continue beyond the axes and have to be clipped there.
  clip(chart) {
    const { left, right, top, bottom } = this.box;
    clips += 1;
    const path = svg("clipPath", { id: `clip-${clips}` }, chart);
    svg("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 8 }, path);
    return path.id;
  }

  select(from, to) {
    this.tip.hidden = true;
    this.hair.replaceChildren();
    const { top, bottom } = this.box;
    svg("rect", { x: Math.min(from, to), width: Math.abs(to - from), y: top, height: bottom - top, class: "chosen-part" }, this.hair);
  }

  follow(event) {
    const frame = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / frame.width;
    const at = (event.clientX - frame.left) * scale;
    if (at < this.box.left - 6 || at > this.box.right + 6) return this.figure.clear();
    return this.figure.point(this, this.x.invert(Math.min(Math.max(at, this.box.left), this.box.right)));
  }

  // Arrow keys walk over the points of the first mark that can be read.
  key(event) {
    const jump = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.figure.escape();
    const mark = this.spec.marks.find((one) => one.name && one.type !== "links");
    if (jump === undefined || !mark) return;
    event.preventDefault();
    const order = [...new Set(mark.x)].sort((a, b) => a - b);
    const here = this.at === null ? (jump > 0 ? -1 : order.length) : nearest(order, this.at);
    const next = order[Math.min(Math.max(here + jump, 0), order.length - 1)];
    this.figure.point(this, next, true);
  }

  xText(value) {
    const { kind, format: how } = this.spec.x;
    return kind === "time" ? timeText(value, REPORT.intraday) : format(value, how);
  }

  // Draw the cursor; returns what it reads, the largest value first.
  read(at) {
    this.at = at;
    this.hair.replaceChildren();
    const where = px(this.x(at));
    svg("line", { x1: where, x2: where, y1: this.box.top, y2: this.box.bottom, class: "cursor" }, this.hair);
    const found = [];
    for (const mark of this.spec.marks) {
      if (!mark.name || this.figure.state(mark) === "off") continue;
      const reading = MARKS[mark.type].read(mark, at, this.spec.y.format, (value) => this.xText(value));
      if (!reading) continue;
      found.push(reading);
      if (reading.value !== null && mark.type !== "bars") {
        const spot = { cx: px(this.x(reading.x)), cy: px(this.y(reading.value)), r: 3 };
        svg("circle", { ...spot, class: `dot c-${mark.color}` }, this.hair);
      }
    }
    return found.sort((a, b) => (b.value === null ? -1 : a.value === null ? 1 : b.value - a.value));
  }

  show(at, found) {
    this.tip.replaceChildren();
    if (!this.spec.marks.every((mark) => mark.type === "bars")) {
      const lead = this.spec.x.tip ? `${this.spec.x.tip} ` : "";
      element("div", "tip-x", this.tip, lead + this.xText(at));
    }
    for (const reading of found.slice(0, 14)) {
      const row = element("div", "tip-row", this.tip);
      element("i", `c-${reading.color}`, row);
      element("span", "", row, reading.name);
      element("b", "", row, reading.text);
    }
    this.tip.hidden = found.length === 0;
    const ratio = this.svg.getBoundingClientRect().width / this.svg.viewBox.baseVal.width;
    const where = this.x(at) * ratio;
    const space = this.host.clientWidth - this.tip.offsetWidth;
    const left = where + 14 + this.tip.offsetWidth <= this.host.clientWidth ? where + 14 : where - 14 - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(left, space))}px`;
  }

  hide() {
    this.at = null;
    if (this.hair) this.hair.replaceChildren();
    this.tip.hidden = true;
  }
}
