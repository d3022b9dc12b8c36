// Each kind of mark can draw itself into an SVG group, say what the cursor reads from it, and how high it reaches.
// Colours are CSS classes, so that light, dark and print need no redrawing.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (parent) parent.appendChild(node);
  return node;
}

function words(text, attributes, parent) {
  const node = svg("text", attributes, parent);
  node.textContent = text;
  return node;
}

const px = (value) => Math.round(value * 10) / 10;

// The pieces of a polyline, cut where a value is missing.
function tracePath(xs, ys, x, y, step) {
  let path = "";
  let open = false;
  for (let i = 0; i < xs.length; i += 1) {
    if (ys[i] === null) {
      open = false;
      continue;
    }
    const px0 = px(x(xs[i]));
    const py0 = px(y(ys[i]));
    path += open ? (step ? `H${px0}V${py0}` : `L${px0},${py0}`) : `M${px0},${py0}`;
    open = true;
  }
  return path;
}

function ribbonPath(xs, lows, highs, x, y) {
  const keep = xs.map((_, i) => i).filter((i) => lows[i] !== null && highs[i] !== null);
  if (keep.length === 0) return "";
  const there = keep.map((i) => `${px(x(xs[i]))},${px(y(highs[i]))}`);
  const back = keep.reverse().map((i) => `${px(x(xs[i]))},${px(y(lows[i]))}`);
  return `M${there.join("L")}L${back.join("L")}Z`;
}

function readSeries(mark, at, kind) {
  const i = nearest(mark.x, at);
  const value = mark.y[i];
  if (value === null || value === undefined) return null;
  return { name: mark.name, color: mark.color, text: format(value, kind), value, x: mark.x[i] };
}

const MARKS = {
  line: {
    draw(mark, group, x, y) {
      const path = tracePath(mark.x, mark.y, x, y, mark.step);
      svg("path", { d: path, class: `line c-${mark.color}${mark.dash ? " dash" : ""}${mark.thin ? " thin" : ""}` }, group);
    },
    read: readSeries,
    heights: (mark) => [mark.y],
  },
  area: {
    draw(mark, group, x, y) {
      const base = mark.x.map(() => mark.base || 0);
      svg("path", { d: ribbonPath(mark.x, base, mark.y, x, y), class: `area c-${mark.color}` }, group);
      svg("path", { d: tracePath(mark.x, mark.y, x, y, false), class: `line thin c-${mark.color}` }, group);
    },
    read: readSeries,
    heights: (mark) => [mark.y, [mark.base || 0]],
  },
  band: {
    draw(mark, group, x, y) {
      svg("path", { d: ribbonPath(mark.x, mark.low, mark.high, x, y), class: `band c-${mark.color}${mark.strong ? " strong" : ""}` }, group);
    },
    read(mark, at, kind) {
      const i = nearest(mark.x, at);
      if (mark.low[i] === null || mark.high[i] === null) return null;
      const text = `${format(mark.low[i], kind)} to ${format(mark.high[i], kind)}`;
      return { name: mark.name, color: mark.color, text, value: null, x: mark.x[i] };
    },
    heights: (mark) => [mark.low, mark.high],
  },
  bars: {
    draw(mark, group, x, y) {
      const zero = y(Math.max(0, y.domain[0]));
      mark.y.forEach((value, i) => {
        const left = x(mark.x[i]);
        const right = x(mark.x[i + 1]);
        const top = y(value);
        const box = { x: px(left + 0.5), y: px(Math.min(top, zero)), width: px(Math.max(right - left - 1, 0.5)) };
        svg("rect", { ...box, height: px(Math.abs(zero - top)), class: `bar c-${mark.color}` }, group);
      });
    },
    read(mark, at, kind, xText) {
      const i = mark.y.findIndex((_, k) => at >= mark.x[k] && at < mark.x[k + 1]);
      if (i < 0) return null;
      const name = `${mark.name}, ${xText(mark.x[i])} to ${xText(mark.x[i + 1])}`;
      return { name, color: mark.color, text: format(mark.y[i], kind), value: mark.y[i], x: (mark.x[i] + mark.x[i + 1]) / 2 };
    },
    heights: (mark) => [mark.y, [0]],
  },
  dots: {
    draw(mark, group, x, y) {
      mark.x.forEach((value, i) => {
        if (mark.y[i] === null) return;
        const hollow = mark.hollow ? " hollow" : "";
        svg("circle", { cx: px(x(value)), cy: px(y(mark.y[i])), r: mark.size || 3.5, class: `dot c-${mark.color}${hollow}` }, group);
      });
    },
    read(mark, at, kind) {
      let best = 0;
      mark.x.forEach((value, i) => {
        if (Math.abs(value - at) < Math.abs(mark.x[best] - at)) best = i;
      });
      if (mark.y[best] === null) return null;
      return { name: mark.name, color: mark.color, text: format(mark.y[best], kind), value: mark.y[best], x: mark.x[best] };
    },
    heights: (mark) => [mark.y],
  },
  links: {
    draw(mark, group, x, y) {
      mark.x.forEach((value, i) => {
        const from = [px(x(value)), px(y(mark.from[i]))];
        const to = [px(x(value)), px(y(mark.to[i]))];
        const bend = Math.min(18, Math.abs(to[1] - from[1]) / 3 + 3);
        const path = `M${from}C${from[0] + bend},${from[1]} ${to[0] + bend},${to[1]} ${to}`;
        svg("path", { d: path, class: `link c-${mark.color}` }, group);
        svg("circle", { cx: to[0], cy: to[1], r: 2, class: `dot c-${mark.color}` }, group);
      });
    },
    read: () => null,
    heights: (mark) => [mark.from, mark.to],
  },
};

// Reference lines carry their words with them, so that nobody has to look them up in a legend.
function drawRule(rule, group, x, y, box) {
  if (rule.y !== undefined && rule.y !== null) {
    const at = px(y(rule.y));
    svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "rule" }, group);
    if (rule.label) words(rule.label, { x: box.right - 2, y: at - 5, class: "rule-label end" }, group);
    return;
  }
  const at = px(x(rule.x));
  const toLeft = at > (box.left + box.right) / 2;
  svg("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "rule" }, group);
  if (rule.label) {
    words(rule.label, { x: at + (toLeft ? -5 : 5), y: box.top + 11, class: toLeft ? "rule-label end" : "rule-label" }, group);
  }
}
