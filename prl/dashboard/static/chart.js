// One chart: axes, curves, values under the cursor.

import { h, replace, s, styled } from "./dom.js";
import { clock, number } from "./format.js";
import { durationLabel, durationTicks, extent, nearest, padded, scale, smooth, ticks } from "./scale.js";

const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;
const DRAG = 6;

/**
 * Curves in `host`. `update({series, log, axis, smoothing})` draws: a series is `{name, color, x, y, start}`,
 * `axis` "step", "time" (epoch seconds) or "relative" (seconds since `start` of its series).
 * `range` [from, to] is the part of the x axis that is shown; null shows all.
 * `onPick(x)` is told where the plot was clicked, `onZoom([from, to])` what was dragged over.
 */
export class Chart {
  constructor(host, onPick = null, onZoom = null) {
    this.host = host;
    this.tip = h("div", { class: "tip", hidden: true });
    this.svg = s("svg", { role: "img" });
    this.onPick = onPick;
    this.onZoom = onZoom;
    this.drag = null;
    this.data = null;
    replace(host, this.svg, this.tip);
    host.addEventListener("pointermove", (event) => this.hover(event));
    host.addEventListener("pointerleave", () => this.unhover());
    host.addEventListener("click", (event) => this.pick(event));
    if (onZoom) {
      host.addEventListener("pointerdown", (event) => this.grab(event));
      host.addEventListener("pointerup", (event) => this.release(event));
      host.addEventListener("pointerleave", () => this.letGo());
    }
    new ResizeObserver(() => this.draw()).observe(host);
  }

  update(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const [width, height] = [this.host.clientWidth, this.host.clientHeight];
    if (!this.data || !width) return;
    const { log: asked, axis, smoothing } = this.data;
    this.curves = this.data.series
      .filter((one) => one.x.length)
      .map((one) => {
        const x = axis === "relative" ? one.x.map((value) => value - one.start) : one.x;
        return within({ ...one, x, shown: smooth(one.y, smoothing) }, this.data.range);
      })
      .filter((one) => one.x.length);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const across = extent(
      this.curves.map((one) => one.x),
      false,
    );
    const heights = this.curves.map((one) => one.y);
    const positive = asked && extent(heights, true);
    const log = Boolean(positive); // where nothing is above zero the scale stays linear
    const up = positive || extent(heights, false);
    if (!across || !up) {
      replace(this.svg, s("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values yet"));
      this.across = null;
      return;
    }
    const right = across[1] > across[0] ? across[1] : across[0] + 1;
    this.across = scale(across[0], right, LEFT, width - RIGHT);
    this.up = scale(...padded(up, log), height - BOTTOM, TOP, log);
    replace(
      this.svg,
      this.axes(width, height),
      this.curves.flatMap((one) => this.curve(one)),
    );
    this.svg.setAttribute("aria-label", this.curves.map((one) => one.name).join(", "));
  }

  axes(width, height) {
    const parts = [];
    for (const value of ticks(this.up.low, this.up.high, 4, this.up.log)) {
      const y = this.up.place(value);
      if (y < TOP - 1 || y > height - BOTTOM + 1) continue;
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      parts.push(s("text", { x: LEFT - 5, y: y + 3, "text-anchor": "end" }, number(value)));
    }
    for (const [value, label] of this.marks(Math.max(2, Math.floor(width / 90)))) {
      const x = this.across.place(value);
      parts.push(s("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }));
      parts.push(s("text", { x, y: height - 6, "text-anchor": "middle" }, label));
    }
    parts.push(
      s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }),
    );
    return parts;
  }

  marks(count) {
    const { low, high } = this.across;
    if (this.data.axis === "relative")
      return durationTicks(low, high, count).map((value) => [value, durationLabel(value)]);
    if (this.data.axis === "time")
      return durationTicks(low, high, count).map((value) => [value, clock(value, high - low < 600)]);
    return ticks(low, high, count)
      .filter(Number.isInteger)
      .map((value) => [value, number(value)]);
  }

  curve(one) {
    const parts = [];
    if (this.data.smoothing)
      parts.push(s("path", { class: `raw s${one.color}`, d: this.path(one.x, one.y) }));
    parts.push(
      s("path", { class: `curve s${one.color}`, d: this.path(one.x, one.shown), "data-name": one.name }),
    );
    if (one.x.length === 1) {
      parts.push(
        s("circle", {
          class: `s${one.color}`,
          cx: this.across.place(one.x[0]),
          cy: this.up.place(one.shown[0]),
          r: 3,
        }),
      );
    }
    return parts;
  }

  path(x, y) {
    let text = "";
    let pen = "M";
    for (let i = 0; i < x.length; i += 1) {
      if (y[i] === null || (this.up.log && y[i] <= 0)) {
        pen = "M";
        continue;
      }
      text += `${pen}${this.across.place(x[i]).toFixed(1)},${this.up.place(y[i]).toFixed(1)}`;
      pen = "L";
    }
    return text;
  }

  at(event) {
    if (!this.across) return null;
    const box = this.host.getBoundingClientRect();
    return { x: this.across.value(event.clientX - box.left), left: event.clientX - box.left };
  }

  grab(event) {
    const at = this.at(event);
    if (!at || event.button !== 0) return;
    this.drag = { from: at.left, band: s("rect", { class: "zoom", y: TOP }) };
    this.drag.band.setAttribute("height", this.host.clientHeight - BOTTOM - TOP);
  }

  /** While a range is dragged over, its band; true if so. */
  stretch(left) {
    if (!this.drag || Math.abs(left - this.drag.from) < DRAG) return false;
    const [low, high] = [Math.min(left, this.drag.from), Math.max(left, this.drag.from)];
    this.drag.band.setAttribute("x", low);
    this.drag.band.setAttribute("width", high - low);
    this.svg.append(this.drag.band);
    return true;
  }

  release(event) {
    const [at, drag] = [this.at(event), this.drag];
    this.letGo();
    if (!at || !drag || Math.abs(at.left - drag.from) < DRAG) return;
    this.dragged = true; // the click that follows opens nothing
    setTimeout(() => (this.dragged = false), 0);
    this.onZoom([this.across.value(drag.from), at.x].sort((a, b) => a - b).map((x) => Number(x.toFixed(3))));
  }

  letGo() {
    this.drag?.band.remove();
    this.drag = null;
  }

  hover(event) {
    const at = this.at(event);
    if (!at || this.stretch(at.left)) return;
    const found = this.curves.map((one) => ({ one, i: nearest(one.x, at.x) }));
    const closest = found.reduce((a, b) =>
      Math.abs(a.one.x[a.i] - at.x) <= Math.abs(b.one.x[b.i] - at.x) ? a : b,
    );
    const x = closest.one.x[closest.i];
    this.unhover();
    const px = this.across.place(x);
    const marks = [
      s("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: this.host.clientHeight - BOTTOM }),
    ];
    const rows = [];
    for (const { one, i } of found) {
      const value = one.shown[i];
      if (value === null || (this.up.log && value <= 0)) continue;
      marks.push(
        s("circle", {
          class: `s${one.color}`,
          cx: this.across.place(one.x[i]),
          cy: this.up.place(value),
          r: 3.2,
        }),
      );
      const raw = this.data.smoothing ? ` (${number(one.y[i])})` : "";
      rows.push(
        h("div", {}, h("span", { class: `s${one.color}` }, one.name), h("b", {}, number(value, 4) + raw)),
      );
    }
    this.marksGroup = s("g", {}, marks);
    this.svg.append(this.marksGroup);
    replace(this.tip, h("b", { class: "muted" }, this.where(x)), rows);
    this.tip.hidden = false;
    const room = this.host.clientWidth - this.tip.offsetWidth;
    const left = at.left + 14 > room ? at.left - this.tip.offsetWidth - 14 : at.left + 14;
    styled(this.tip, { left: `${Math.max(0, left)}px`, top: "6px" });
  }

  where(x) {
    if (this.data.axis === "time") return clock(x);
    return this.data.axis === "relative" ? `after ${Math.round(x)} s` : `step ${number(x)}`;
  }

  unhover() {
    this.marksGroup?.remove();
    this.tip.hidden = true;
  }

  pick(event) {
    const at = this.at(event);
    if (!at || this.dragged || !this.onPick || this.data.axis !== "step") return;
    const one = this.curves[0];
    this.onPick(one.x[nearest(one.x, at.x)]);
  }
}

/** The points of a curve in a range of x. */
function within(one, range) {
  if (!range) return one;
  const kept = one.x.map((value, i) => i).filter((i) => one.x[i] >= range[0] && one.x[i] <= range[1]);
  const of = (list) => kept.map((i) => list[i]);
  return { ...one, x: of(one.x), y: of(one.y), shown: of(one.shown) };
}

/** A curve in a table cell. */
export function sparkline(x, y) {
  const up = extent([y], false);
  if (!up || x.length < 2) return h("span", { class: "spark" });
  const across = scale(x[0], x.at(-1), 1, 83);
  const rise = scale(up[0], up[1], 18, 2);
  const d = x
    .map((value, i) => `${i ? "L" : "M"}${across.place(value).toFixed(1)},${rise.place(y[i]).toFixed(1)}`)
    .join("");
  return s("svg", { class: "spark", viewBox: "0 0 84 20" }, s("path", { d }));
}
