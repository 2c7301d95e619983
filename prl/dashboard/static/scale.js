// Axes: where ticks stand, how they read, and how values become places.

/** A scale of [low, high] onto [from, to]; `log` needs positive values. */
export function scale(low, high, from, to, log = false) {
  const f = log ? Math.log10 : (v) => v;
  const [a, b] = [f(low), f(high)];
  const span = b - a || 1;
  const place = (value) => from + ((f(value) - a) / span) * (to - from);
  const value = (at) => {
    const v = a + ((at - from) / (to - from)) * span;
    return log ? 10 ** v : v;
  };
  return { place, value, low, high, log };
}

/** The range of values with a little room; null if there are none. */
export function extent(lists, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null || !Number.isFinite(value) || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

export function padded([low, high], log) {
  if (log) {
    const room = Math.max(0.04 * Math.log10(high / low), 0.05);
    return [low / 10 ** room, high * 10 ** room];
  }
  const flat = high - low <= 1e-9 * Math.abs(high);
  const room = (flat ? 0 : (high - low) * 0.06) || Math.abs(high) * 0.1 || 1;
  const bottom = low >= 0 && low - room < 0 ? 0 : low - room;
  return [bottom, high + room];
}

export function ticks(low, high, count, log = false) {
  if (log) return logTicks(low, high, count);
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n += 1)
    found.push(Number((n * step).toPrecision(12)));
  return found;
}

function logTicks(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / count));
  const found = [];
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  if (found.length >= 2) return found;
  return ticks(low, high, count).filter((value) => value > 0);
}

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400,
];

/** Ticks of elapsed seconds at round minutes and hours. */
export function durationTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const step = TIME_STEPS.find((candidate) => candidate >= rough) ?? Math.ceil(rough / 86400) * 86400;
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
  return found;
}

export function durationLabel(value) {
  if (value === 0) return "0";
  if (value < 120 && value % 60) return `${Math.round(value)}s`;
  if (value < 7200 && value % 3600) return `${Math.round(value / 6) / 10}m`;
  return `${Math.round(value / 360) / 10}h`;
}

/** Exponential moving average without the pull to zero of its beginning; `weight` 0 leaves values alone. */
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let debt = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    debt *= weight;
    return mean / (1 - debt);
  });
}

/** Index of the entry of an ascending list that is nearest to `value`. */
export function nearest(list, value) {
  let low = 0;
  let high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
}
