// One run: its head, and a tab for each thing that one asks about it.

import { get, repeat } from "./api.js";
import { h, replace } from "./dom.js";
import { ago, moment, number } from "./format.js";
import { link } from "./router.js";
import { configView } from "./view_config.js";
import { episodeView } from "./view_episode.js";
import { errorsView } from "./view_errors.js";
import { groupView } from "./view_group.js";
import { logsView } from "./view_logs.js";
import { metricsView, overviewView } from "./view_metrics.js";
import { statusView } from "./view_status.js";
import { timelineView } from "./view_timeline.js";
import { tracesView } from "./view_traces.js";

const TABS = [
  ["overview", "Overview", overviewView],
  ["metrics", "All metrics", metricsView],
  ["traces", "Traces", tracesView],
  ["timeline", "Who waits", timelineView],
  ["errors", "Errors", errorsView],
  ["logs", "Logs", logsView],
  ["config", "Config", configView],
  ["status", "Status", statusView],
];
const INNER = { episode: episodeView, group: groupView };

export async function runPage(host, context) {
  const [, id, tab = "overview"] = context.parts;
  const head = h("div");
  const body = h("div", { id: "view", "data-tab": tab });
  const active = tab in INNER ? "traces" : tab;
  const tabs = h(
    "nav",
    { class: "tabs", "aria-label": "views of this run" },
    TABS.map(([name, text]) =>
      h(
        "a",
        {
          href: link(["run", id, name]),
          class: name === active ? "on" : "",
          "aria-current": name === active ? "page" : null,
        },
        text,
      ),
    ),
  );
  replace(host, head, tabs, body);
  const run = await get(`runs/${id}`, {}, context.signal);
  context.crumbs(
    h("a", { href: "#/" }, "runs"),
    h("span", {}, "/"),
    run.group ? h("span", {}, `${run.group} /`) : "",
    h("a", { href: link(["run", id]) }, run.name),
  );
  document.title = `${run.name} – prl`;
  drawHead(head, run);
  repeat(async () => drawHead(head, await get(`runs/${id}`, {}, context.signal)), 5, context.signal);
  const view = INNER[tab] ?? TABS.find(([name]) => name === tab)?.[2] ?? overviewView;
  await view(body, run, context);
}

function drawHead(host, run) {
  const facts = [
    ["job", run.command],
    ["environment", run.env],
    ["algo", run.algo],
    ["loss", run.loss],
    ["model", run.model],
    ["lr", run.lr === null ? null : number(run.lr)],
    ["seed", run.seed],
    ["attempts", run.attempts > 1 ? run.attempts : null],
  ];
  const steps =
    run.step === null
      ? "no step yet"
      : `step ${number(run.step)}${run.max_steps ? ` of ${number(run.max_steps)}` : ""}`;
  replace(
    host,
    h(
      "div",
      { class: "row" },
      h("h1", {}, run.name),
      h("span", { class: `state ${run.state}` }, run.state),
      h("b", {}, steps),
      h("span", { class: "muted", title: moment(run.heard) }, `last sign ${ago(run.heard)}`),
    ),
    h(
      "div",
      { class: "facts" },
      facts
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => h("span", {}, `${name} `, h("b", {}, String(value)))),
      h("span", { class: "mono" }, run.path),
    ),
  );
}
