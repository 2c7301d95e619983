// Curves of a run: the curated ones, and every one.

import { get, repeat } from "./api.js";
import { ChartCard, Controls, SeriesFeed } from "./chart_panel.js";
import { h, replace } from "./dom.js";
import { number } from "./format.js";
import { note } from "./router.js";
import { markdown } from "./markdown.js";

const TILES = [
  ["reward", /^train\/agg\/effective\/(?!num_)[^/]+\/reward\/mean$/],
  ["truncated", /^train\/agg\/effective\/[^/]+\/is_truncated\/mean$/],
  ["failed", /^train\/agg\/all\/has_error\/mean$/],
  ["loss", /^loss\/mean$/],
  ["mismatch KL", /^mismatch_kl\/all\/mean$/],
  ["entropy", /^entropy\/all\/mean$/],
  ["gradient norm", /^optim\/grad_norm$/],
  ["trainer waits (s)", /^trainer\/time\/wait_for_batch$/],
  ["rollouts wait (s)", /^orchestrator\/time\/wait_for_policy$/],
  ["tokens/s", /^perf\/throughput$/],
];

export async function overviewView(host, run, { params, signal }) {
  const controls = new Controls(params);
  const tiles = h("div", { class: "tiles" });
  const body = h("div", {}, h("div", { class: "empty" }, "reading the metrics …"));
  replace(
    host,
    run.results ? h("div", { class: "panel pad doc" }, markdown(run.results)) : "",
    tiles,
    controls.toolbar(),
    body,
  );
  const feed = new SeriesFeed([run]);
  let cards = [];
  let shape = "";
  const load = async (force = false) => {
    const told = await get(`runs/${run.id}/metrics`, {}, signal);
    drawTiles(tiles, told.values);
    const fresh = JSON.stringify(told.charts.map((chart) => chart.keys));
    if (fresh !== shape) {
      shape = fresh;
      cards = drawSections(body, told.charts, [run], controls);
    }
    const keys = cards.flatMap((card) => card.keys);
    if (keys.length && ((await feed.load(keys, controls.axis, signal)) || force))
      cards.forEach((card) => card.update(feed.found, feed.starts));
    host.dataset.ready = "1";
  };
  controls.onChange((reload) => reload && load(true));
  await repeat(load, 2, signal);
}

function drawTiles(host, values) {
  const found = TILES.map(([text, pattern]) => [
    text,
    Object.keys(values).find((name) => pattern.test(name)),
  ]).filter(([, name]) => name);
  replace(
    host,
    found.map(([text, name]) =>
      h("div", { class: "tile", title: name }, h("span", {}, text), h("b", {}, number(values[name]))),
    ),
  );
}

/** Cards of curated charts below the headings of their sections. */
export function drawSections(host, charts, runs, controls) {
  const cards = [];
  const parts = [];
  for (const section of [...new Set(charts.map((chart) => chart.section))]) {
    const own = charts
      .filter((chart) => chart.section === section)
      .map((chart) => new ChartCard({ ...chart, runs, controls }));
    cards.push(...own);
    parts.push(
      h("h2", {}, section),
      h(
        "div",
        { class: "charts" },
        own.map((card) => card.element),
      ),
    );
  }
  replace(host, parts.length ? parts : h("div", { class: "empty" }, "no metrics yet"));
  return cards;
}

export async function metricsView(host, run, { params, signal }) {
  const controls = new Controls(params);
  const chooser = new MetricChooser([run], params, controls, signal);
  replace(host, controls.toolbar(chooser.search, chooser.all), chooser.element, chooser.charts);
  await repeat(() => chooser.load(), 2, signal);
}

/** Every metric name by a regular expression; a chosen one gets a chart. */
export class MetricChooser {
  constructor(runs, params, controls, signal) {
    Object.assign(this, { runs, controls, signal, values: {}, cards: new Map() });
    this.chosen = new Set((params.get("keys") ?? "").split(",").filter(Boolean));
    this.search = h("input", {
      type: "search",
      id: "metric-filter",
      size: 34,
      placeholder: "regular expression",
      "aria-label": "names of metrics, a regular expression",
      value: params.get("re") ?? "",
      oninput: () => {
        note({ re: this.search.value });
        this.draw();
      },
    });
    this.all = h("button", { type: "button", onclick: () => this.chooseShown() }, "chart all shown");
    this.element = h("div", { class: "panel pad names" });
    this.charts = h("div", { class: "charts" });
    this.feed = new SeriesFeed(runs);
    controls.onChange((reload) => reload && this.loadCurves(true));
  }

  async load() {
    const told = await Promise.all(this.runs.map((run) => get(`runs/${run.id}/metrics`, {}, this.signal)));
    this.values = Object.assign({}, ...told.map((one) => one.values).reverse());
    const names = Object.keys(this.values).join();
    if (names !== this.names) {
      this.names = names;
      this.draw();
    }
    await this.loadCurves();
  }

  shown() {
    let pattern = /./;
    this.search.classList.remove("bad");
    try {
      pattern = new RegExp(this.search.value || ".", "i");
    } catch {
      this.search.classList.add("bad");
    }
    return Object.keys(this.values)
      .sort()
      .filter((name) => pattern.test(name));
  }

  draw() {
    replace(
      this.element,
      this.shown().map((name) =>
        h(
          "label",
          { title: name },
          h("input", {
            type: "checkbox",
            checked: this.chosen.has(name),
            onchange: (event) => this.choose(name, event.target.checked),
          }),
          h("span", {}, name),
          h("b", { class: "num muted" }, number(this.values[name])),
        ),
      ),
    );
    this.drawCards();
  }

  choose(name, on) {
    if (on) this.chosen.add(name);
    else this.chosen.delete(name);
    note({ keys: [...this.chosen].join(",") });
    this.drawCards();
    this.loadCurves(true);
  }

  chooseShown() {
    for (const name of this.shown().slice(0, 48)) this.chosen.add(name);
    note({ keys: [...this.chosen].join(",") });
    this.draw();
    this.loadCurves(true);
  }

  drawCards() {
    const wanted = [...this.chosen].filter((name) => name in this.values);
    for (const name of wanted) {
      if (!this.cards.has(name))
        this.cards.set(
          name,
          new ChartCard({ title: name, keys: [name], runs: this.runs, controls: this.controls }),
        );
    }
    const elements = wanted.map((name) => this.cards.get(name).element);
    if (
      elements.length !== this.charts.childElementCount ||
      elements.some((one, i) => one !== this.charts.children[i])
    )
      replace(this.charts, elements);
  }

  async loadCurves(force = false) {
    const keys = [...this.chosen].filter((name) => this.cards.has(name));
    if (!keys.length) return;
    if ((await this.feed.load(keys, this.controls.axis, this.signal)) || force) {
      for (const key of keys) this.cards.get(key).update(this.feed.found, this.feed.starts);
    }
  }
}
