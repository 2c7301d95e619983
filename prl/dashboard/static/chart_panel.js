// Charts of one or several runs with one set of controls, kept up to date.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { h, replace } from "./dom.js";
import { number, shortNames } from "./format.js";
import { go, note } from "./router.js";

const COLORS = 8;

/** The controls that all charts of a page obey; they live in the address, so that a link shows the same. */
export class Controls {
  constructor(params) {
    this.smoothing = Math.min(0.99, Math.max(0, Number(params.get("smooth") ?? 0))) || 0;
    this.axis = ["step", "time", "relative"].includes(params.get("axis")) ? params.get("axis") : "step";
    this.log = params.get("log") === "1";
    this.range = zoomed(params.get("zoom"));
    this.flipped = new Set((params.get("logs") ?? "").split("|").filter(Boolean));
    this.wide = new Set((params.get("wide") ?? "").split("|").filter(Boolean));
    this.listeners = [];
  }

  toolbar(...more) {
    const told = h("b", { class: "mono" }, this.smoothing.toFixed(2));
    const slider = h("input", {
      type: "range",
      min: 0,
      max: 0.99,
      step: 0.01,
      value: this.smoothing,
      id: "smoothing",
      oninput: (event) => {
        told.textContent = Number(event.target.value).toFixed(2);
        this.set({ smoothing: Number(event.target.value) });
      },
    });
    const axis = h(
      "select",
      { id: "axis", onchange: (event) => this.set({ axis: event.target.value }) },
      [
        ["step", "step"],
        ["relative", "time since start"],
        ["time", "clock"],
      ].map(([value, text]) => h("option", { value, selected: value === this.axis }, text)),
    );
    const log = h("input", {
      type: "checkbox",
      id: "log",
      checked: this.log,
      onchange: (event) => this.set({ log: event.target.checked }),
    });
    this.whole = h(
      "button",
      { type: "button", id: "whole", hidden: !this.range, onclick: () => this.set({ range: null }) },
      "whole range",
    );
    return h(
      "div",
      { class: "toolbar sticky" },
      h("label", {}, "smoothing", slider, told),
      h("label", {}, "x axis", axis),
      h("label", {}, log, "log scale"),
      this.whole,
      more,
    );
  }

  set(changes) {
    Object.assign(this, changes);
    if ("axis" in changes) this.range = null;
    note({
      smooth: this.smoothing || null,
      axis: this.axis === "step" ? null : this.axis,
      log: this.log ? 1 : null,
      zoom: this.range?.join("~"),
      logs: [...this.flipped].join("|"),
      wide: [...this.wide].join("|"),
    });
    if (this.whole) this.whole.hidden = !this.range;
    for (const listener of this.listeners) listener("axis" in changes);
  }

  /** Put a chart into a set of charts, or take it out; returns whether it is in it now. */
  turn(set, title) {
    if (!set.delete(title)) set.add(title);
    this.set({});
    return set.has(title);
  }

  onChange(listener) {
    this.listeners.push(listener);
  }
}

function zoomed(text) {
  const ends = (text ?? "").split("~").map(Number);
  return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}

/** A card with one chart. `keys` are metric names, `runs` `{id, name}`: one curve for each pair. */
export class ChartCard {
  constructor({ title, hint = "", log = false, keys, runs, controls }) {
    this.keys = keys;
    this.runs = runs;
    this.controls = controls;
    this.title = title;
    this.usualLog = log;
    this.plot = h("div", { class: "plot" });
    this.legend = h("div", { class: "legend" });
    this.logButton = h(
      "button",
      {
        type: "button",
        title: "log scale of this chart",
        onclick: () => this.controls.turn(this.controls.flipped, title),
      },
      "log",
    );
    this.element = h(
      "section",
      { class: controls.wide.has(title) ? "chart wide" : "chart", "data-title": title },
      h(
        "header",
        {},
        h(
          "button",
          {
            type: "button",
            class: "title",
            title: `${keys.join("\n")}\n\nclick to enlarge`,
            onclick: () => this.enlarge(),
          },
          title,
        ),
        h("span", { class: "hint", title: hint }, hint),
        this.logButton,
      ),
      this.legend,
      this.plot,
    );
    this.chart = new Chart(
      this.plot,
      runs.length === 1 ? (step) => this.open(step) : null,
      (range) => controls.set({ range }),
    );
    this.series = [];
    controls.onChange((reload) => reload || this.draw());
  }

  enlarge() {
    this.element.classList.toggle("wide", this.controls.turn(this.controls.wide, this.title));
  }

  open(step) {
    go(["run", this.runs[0].id, "traces"], { step_from: Math.round(step), step_to: Math.round(step) });
  }

  /** `found`: run id -> metric name -> {x, y}; `starts`: run id -> its first moment. */
  update(found, starts) {
    const short = shortNames(this.keys);
    this.series = [];
    for (const [r, run] of this.runs.entries()) {
      for (const [k, key] of this.keys.entries()) {
        const points = found.get(run.id)?.[key];
        if (!points) continue;
        const several = this.keys.length > 1;
        const name = this.runs.length === 1 ? short[k] : several ? `${run.name} · ${short[k]}` : run.name;
        const color = (this.runs.length === 1 ? k : several ? r * this.keys.length + k : r) % COLORS;
        this.series.push({ name, color, start: starts.get(run.id) ?? 0, ...points });
      }
    }
    this.draw();
  }

  draw() {
    const { smoothing, axis, log, range } = this.controls;
    const own = this.usualLog !== this.controls.flipped.has(this.title);
    this.logButton.classList.toggle("on", own);
    this.logButton.setAttribute("aria-pressed", String(own));
    this.chart.update({ series: this.series, smoothing, axis, log: log || own, range });
    replace(
      this.legend,
      this.series.map((one) =>
        h(
          "span",
          { class: `s${one.color}`, title: one.name },
          h("i", {}, one.name),
          h("b", {}, number(one.y.at(-1))),
        ),
      ),
    );
  }
}

/** Points of many curves of several runs; asks only for runs that have something new. */
export class SeriesFeed {
  constructor(runs) {
    this.runs = runs;
    this.found = new Map();
    this.starts = new Map();
    this.revisions = new Map();
    this.asked = "";
  }

  /** True if anything changed. */
  async load(keys, axis, signal) {
    const asked = `${axis}|${keys.join("|")}`;
    if (asked !== this.asked) this.revisions.clear();
    this.asked = asked;
    const changed = await Promise.all(this.runs.map((run) => this.loadRun(run, keys, axis, signal)));
    return changed.some(Boolean);
  }

  async loadRun(run, keys, axis, signal) {
    const params = { axis: axis === "step" ? "step" : "time", revision: this.revisions.get(run.id) };
    const found = {};
    let revision = null;
    for (let start = 0; start < keys.length; start += 64) {
      const told = await get(
        `runs/${run.id}/series`,
        { ...params, key: keys.slice(start, start + 64) },
        signal,
      );
      if (told === null) return false;
      Object.assign(found, told.series);
      revision = told.revision;
    }
    this.found.set(run.id, found);
    if (revision !== null) this.revisions.set(run.id, revision);
    const firsts = Object.values(found)
      .filter((one) => one.x.length)
      .map((one) => one.x[0]);
    this.starts.set(run.id, firsts.length ? Math.min(...firsts) : 0);
    return true;
  }
}
