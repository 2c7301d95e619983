// Numbers and times as a table shows them.

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits + (size >= 1 ? 1 : 0))));
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function ago(epoch) {
  if (!epoch) return "–";
  const past = Math.max(0, Date.now() / 1000 - epoch);
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return `${Math.floor(past / 86400)} d ago`;
}

export function clock(epoch, withSeconds = true) {
  const date = new Date(epoch * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const text = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return withSeconds ? `${text}:${two(date.getSeconds())}` : text;
}

export function moment(epoch) {
  return epoch ? new Date(epoch * 1000).toLocaleString() : "–";
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  return value < 1048576 ? `${(value / 1024).toFixed(0)} kB` : `${(value / 1048576).toFixed(1)} MB`;
}

/** The part of metric names that tells curves of one chart apart. */
export function shortNames(names) {
  if (names.length < 2) return names.map((name) => name.split("/").slice(-2).join("/"));
  const parts = names.map((name) => name.split("/"));
  let start = 0;
  let end = 0;
  const shortest = Math.min(...parts.map((part) => part.length));
  while (start < shortest - 1 && parts.every((part) => part[start] === parts[0][start])) start += 1;
  while (end < shortest - start - 1 && parts.every((part) => part.at(-1 - end) === parts[0].at(-1 - end)))
    end += 1;
  return parts.map((part) => part.slice(start, part.length - end).join("/"));
}
