// Up to eight runs beside each other: the same curves in one chart, and where their configs differ.

import { get, repeat } from "./api.js";
import { Controls, SeriesFeed } from "./chart_panel.js";
import { h, replace } from "./dom.js";
import { number } from "./format.js";
import { link } from "./router.js";
import { diffTable } from "./view_config.js";
import { drawSections, MetricChooser } from "./view_metrics.js";

const MOST = 8;

export async function comparePage(host, { params, signal, crumbs }) {
  const ids = (params.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST);
  crumbs(h("a", { href: "#/" }, "runs"), h("span", {}, "/"), h("span", {}, "compare"));
  document.title = "prl – compare";
  const runs = unlike(await Promise.all(ids.map((id) => get(`runs/${id}`, {}, signal))));
  const controls = new Controls(params);
  const chooser = new MetricChooser(runs, params, controls, signal);
  const diff = h("div");
  const body = h("div", {}, h("div", { class: "empty" }, "reading the metrics …"));
  const more = h(
    "details",
    {},
    h("summary", { class: "muted" }, "more metrics"),
    h("div", { class: "toolbar" }, chooser.search, chooser.all),
    chooser.element,
    chooser.charts,
  );
  replace(
    host,
    h("h1", {}, `Comparison of ${runs.length} runs`),
    table(runs),
    controls.toolbar(),
    body,
    more,
    h("h2", {}, "Where the configs differ"),
    diff,
  );
  get("diff", { run: ids }, signal).then((told) =>
    replace(
      diff,
      diffTable(
        told.rows,
        runs.map((run) => run.name),
      ),
    ),
  );
  const feed = new SeriesFeed(runs);
  let cards = [];
  let shape = "";
  const load = async (force = false) => {
    const told = await Promise.all(ids.map((id) => get(`runs/${id}/metrics`, {}, signal)));
    const charts = merged(told.map((one) => one.charts));
    const fresh = JSON.stringify(charts.map((chart) => chart.keys));
    if (fresh !== shape) {
      shape = fresh;
      cards = drawSections(body, charts, runs, controls);
    }
    const keys = [...new Set(cards.flatMap((card) => card.keys))];
    if (keys.length && ((await feed.load(keys, controls.axis, signal)) || force))
      cards.forEach((card) => card.update(feed.found, feed.starts));
    if (more.open) await chooser.load();
    host.dataset.ready = "1";
  };
  more.addEventListener("toggle", () => more.open && chooser.load());
  controls.onChange((reload) => reload && load(true));
  await repeat(load, 3, signal);
}

/** One list of charts, each with one key that says most, so that a colour is a run. */
function merged(lists) {
  const charts = new Map();
  for (const chart of lists.flat()) {
    const keys = preferred(chart.keys);
    const known = charts.get(chart.title);
    if (known) known.keys = preferred([...new Set([...known.keys, ...keys])]);
    else charts.set(chart.title, { ...chart, keys });
  }
  return [...charts.values()].flatMap((chart) =>
    chart.keys.length > 1
      ? chart.keys.map((key) => ({
          ...chart,
          title: `${chart.title}: ${key.split("/").slice(-3).join("/")}`,
          keys: [key],
        }))
      : [chart],
  );
}

function preferred(keys) {
  const means = keys.filter((key) => key.endsWith("/mean"));
  return means.length === 1 ? means : keys.filter((key) => !/\/(max|p90)$/.test(key));
}

/** Runs of sweeps share names (0, 1, …): those get the directory before it. */
function unlike(runs) {
  const same = new Set(runs.map((run) => run.name)).size < runs.length;
  return runs.map((run) => ({
    ...run,
    name: same || /^\d+$/.test(run.name) ? [run.group, run.name].filter(Boolean).join("/") : run.name,
  }));
}

function table(runs) {
  const columns = ["state", "step", "reward", "env", "algo", "loss", "model", "lr", "seed"];
  const cell = (run, name) =>
    name === "state"
      ? h("span", { class: `state ${run.state}` }, run.state)
      : typeof run[name] === "number"
        ? number(run[name])
        : (run[name] ?? "–");
  return h(
    "div",
    { class: "panel" },
    h(
      "table",
      { id: "compared" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "run"),
          columns.map((name) => h("th", {}, name)),
        ),
      ),
      h(
        "tbody",
        {},
        runs.map((run, i) =>
          h(
            "tr",
            {},
            h(
              "td",
              { class: "name" },
              h("i", { class: `swatch s${i}` }),
              h("a", { href: link(["run", run.id]) }, run.name),
            ),
            columns.map((name) => h("td", { class: "nowrap" }, cell(run, name))),
          ),
        ),
      ),
    ),
  );
}
