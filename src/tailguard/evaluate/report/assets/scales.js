// Scales, ticks and number formats. Every number on the page goes through format(), so that a minus is a minus everywhere.

const MINUS = "\u2212";
const DAY = 86400;
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

// Nice steps are 1, 2, 2.5 and 5 times a power of ten.
function niceStep(span, count) {
  const raw = span / Math.max(count, 1);
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const ratio = raw / power;
  return power * (ratio <= 1.0001 ? 1 : ratio <= 2.0001 ? 2 : ratio <= 2.5001 ? 2.5 : ratio <= 5.0001 ? 5 : 10);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low, count);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) ticks.push(k * step);
  // Rounding the step up can leave a single tick, from which nobody can read a scale.
  if (ticks.length < 2 && count < 12) return linearTicks(low, high, count + 1);
  return { ticks, step };
}

function logTicks(low, high, count) {
  // Over less than a decade powers of ten would leave an empty axis: the ticks of a linear one are read just as well.
  if (high / low < 12) return linearTicks(low, high, count);
  const ticks = [];
  const between = high / low < 300 ? [1, 2, 5] : [1];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
    for (const factor of between) ticks.push(factor * Math.pow(10, k));
  }
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  const keep = Math.ceil(inside.length / Math.max(count, 1));
  return { ticks: inside.filter((_, i) => i % keep === 0), step: 0 };
}

const utc = (seconds) => new Date(seconds * 1000);

// Calendar ticks: whole years, months, days or hours, whichever gives about `count` of them.
function timeTicks(low, high, count) {
  const span = high - low;
  const ticks = [];
  for (const years of [10, 5, 2, 1]) {
    if (span / (years * 365.25 * DAY) >= Math.min(count, 3) - 1e-9 || (years === 1 && span > 2 * 365 * DAY)) {
      const least = Math.ceil(span / (365.25 * DAY) / count);
      const step = [1, 2, 5, 10, 20].find((years) => years >= least) || 50;
      for (let y = Math.ceil(utc(low).getUTCFullYear() / step) * step; Date.UTC(y, 0) / 1000 <= high; y += step) {
        if (Date.UTC(y, 0) / 1000 >= low) ticks.push(Date.UTC(y, 0) / 1000);
      }
      return { ticks, unit: "year" };
    }
  }
  const months = span / (30.44 * DAY);
  if (months >= 3) {
    const step = [1, 2, 3, 6, 12].find((one) => one >= months / count) || 12;
    const first = utc(low);
    for (let m = Math.ceil(first.getUTCMonth() / step) * step; ; m += step) {
      const at = Date.UTC(first.getUTCFullYear(), m) / 1000;
      if (at > high) break;
      if (at >= low) ticks.push(at);
    }
    return { ticks, unit: "month" };
  }
  const days = span / DAY;
  const unit = days >= 2 ? DAY : 3600;
  const sizes = days >= 2 ? [1, 2, 7, 14] : [1, 2, 3, 6, 12];
  const step = (sizes.find((one) => one >= span / unit / count) || sizes[sizes.length - 1]) * unit;
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  return { ticks, unit: days >= 2 ? "day" : "hour" };
}

function timeLabel(seconds, unit) {
  const date = utc(seconds);
  if (unit === "year") return String(date.getUTCFullYear());
  if (unit === "month") return date.getUTCMonth() === 0 ? String(date.getUTCFullYear()) : MONTHS[date.getUTCMonth()];
  if (unit === "day") return `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
  return `${String(date.getUTCHours()).padStart(2, "0")}:00`;
}

function timeText(seconds, intraday) {
  const date = utc(seconds);
  const day = `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]} ${date.getUTCFullYear()}`;
  const clock = `${String(date.getUTCHours()).padStart(2, "0")}:${String(date.getUTCMinutes()).padStart(2, "0")}`;
  return intraday ? `${day}, ${clock}` : day;
}

function grouped(text) {
  const [whole, rest] = text.split(".");
  const groups = whole.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  return rest === undefined ? groups : `${groups}.${rest}`;
}

function fixed(value, decimals) {
  const text = grouped(Math.abs(value).toFixed(decimals));
  return value < 0 && Number(Math.abs(value).toFixed(decimals)) !== 0 ? MINUS + text : text;
}

function decimalsFor(step) {
  if (!(step > 0)) return 0;
  const power = Math.floor(Math.log10(step) + 1e-9);
  const half = Math.abs(step / Math.pow(10, power) - 2.5) < 1e-6 ? 1 : 0;
  return Math.min(Math.max(0, half - power), 8);
}

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${fixed(value / 1e6, size % 1e6 === 0 ? 0 : 1)}M`;
  if (size >= 1e3) return `${fixed(value / 1e3, size % 1e3 === 0 ? 0 : 1)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(size / Math.pow(10, Math.floor(Math.log10(size))) % 1 < 1e-6 ? 0 : 1).replace(/-/g, MINUS);
  return String(Number(size.toPrecision(3))).replace(/^/, value < 0 ? MINUS : "");
}

// Without a step the value is one that somebody reads, with a step it is a tick of an axis.
function format(value, kind, step) {
  if (value === null || value === undefined || Number.isNaN(value)) return "none";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : `${MINUS}infinite`;
  const axis = step !== undefined;
  if (kind === "percent") {
    const digits = axis ? decimalsFor(step * 100) : value === 0 || value === 1 ? 0 : Math.abs(value) < 0.1 ? 2 : 1;
    return `${fixed(value * 100, digits)}%`;
  }
  if (kind === "multiple") return `${fixed(value, axis ? Math.max(decimalsFor(step), step < 1 ? 1 : 0) : 2)}\u00d7`;
  if (kind === "count") return compact(value);
  if (kind === "price") return axis ? fixed(value, decimalsFor(step)) : fixed(value, Math.abs(value) >= 1000 ? 0 : Math.abs(value) < 10 ? 4 : 2);
  if (axis) {
    if (step === 0 || step < 1e-3 || Math.abs(value) >= 1e5) return compact(value);
    return fixed(value, decimalsFor(step));
  }
  const size = Math.abs(value);
  if (kind === "number") return fixed(value, size < 100 ? 2 : 0);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/-/g, MINUS);
  return fixed(value, size > 0 && size < 0.1 ? 4 : size < 1 ? 3 : size < 100 ? 2 : 0);
}

function makeScale(kind, domain, range) {
  const [d0, d1] = kind === "log" ? domain.map(Math.log) : domain;
  const slope = (range[1] - range[0]) / (d1 - d0 || 1);
  const scale = (value) => range[0] + ((kind === "log" ? Math.log(value) : value) - d0) * slope;
  scale.invert = (pixel) => {
    const value = d0 + (pixel - range[0]) / slope;
    return kind === "log" ? Math.exp(value) : value;
  };
  scale.domain = domain;
  return scale;
}

// Position of the entry nearest to `value` in a sorted list.
function nearest(list, value) {
  let low = 0;
  let high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle;
    else high = middle;
  }
  return value - list[low] <= list[high] - value ? low : high;
}
