// One episode: what was said, by whom, and what each token was worth.

import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { moment, number, seconds } from "./format.js";
import { link, note } from "./router.js";
import { drawTokens, legend, OVERLAYS } from "./tokens.js";
import { rewardBadge, versions } from "./view_traces.js";

export async function episodeView(host, run, { parts, params, signal }) {
  const row = Number(parts[3]);
  const episode = await get(`runs/${run.id}/episodes/${row}`, {}, signal);
  const view = new Transcript(run, episode, params.get("overlay") ?? "none", signal);
  const to = (number_) =>
    link(["run", run.id, "episode", String(number_)], {
      overlay: view.overlay === "none" ? null : view.overlay,
    });
  const step = (number_, text) =>
    number_ >= 0 && number_ < episode.rows
      ? h("a", { href: to(number_), title: `episode ${number_}` }, text)
      : h("span", { class: "muted" }, text);
  replace(
    host,
    h(
      "div",
      { class: "toolbar" },
      h("a", { href: link(["run", run.id, "traces"]) }, "all episodes"),
      step(row - 1, "← older"),
      step(row + 1, "newer →"),
      h("b", {}, `episode ${row}`),
      h("a", { href: link(["run", run.id, "group", String(row)]) }, `group ${episode.group}`),
      h("span", { class: "grow" }),
      view.chooser(),
    ),
    view.readout,
    h("div", { class: "episode" }, view.element, side(run, episode)),
  );
  await view.draw();
  host.dataset.ready = "1";
}

/** The messages of all traces of an episode under one overlay. */
class Transcript {
  constructor(run, episode, overlay, signal) {
    Object.assign(this, { run, episode, signal });
    this.overlay = OVERLAYS.some(([name]) => name === overlay) ? overlay : "none";
    this.element = h("div");
    this.readout = h("div", { class: "readout" });
    this.legend = h("span");
  }

  chooser() {
    const select = h(
      "select",
      { id: "overlay", onchange: (event) => this.choose(event.target.value) },
      OVERLAYS.map(([value, text]) => h("option", { value, selected: value === this.overlay }, text)),
    );
    return [this.legend, h("label", {}, "tokens", select)];
  }

  choose(overlay) {
    this.overlay = overlay;
    note({ overlay: overlay === "none" ? null : overlay });
    return this.draw();
  }

  async draw() {
    replace(this.legend, legend(this.overlay));
    replace(this.readout, this.overlay === "none" ? "" : "point at a token");
    const waiting = [];
    const parts = this.episode.traces.map((trace, t) => {
      const several = this.episode.traces.length > 1 || trace.branches.length > 1;
      const head = several
        ? h("h2", {}, `${trace.agent} · ${branches(trace)}reward ${number(trace.reward)}`)
        : "";
      return [
        head,
        trace.error ? h("div", { class: "error" }, `${trace.error.type}: ${trace.error.message}`) : "",
        trace.nodes.map((node, n) => this.turn(t, n, node, waiting)),
      ];
    });
    replace(this.element, parts);
    await Promise.all(waiting);
  }

  turn(t, n, node, waiting) {
    const linear = node.parent === null || node.parent === n - 1;
    const head = h(
      "header",
      {},
      h("b", {}, node.role),
      node.sampled ? h("span", { class: "tag" }, "sampled") : "",
      linear ? "" : h("span", { class: "tag" }, `after message ${node.parent}`),
      h("span", { class: "grow" }),
      `${number(node.tokens)} tokens`,
    );
    const body =
      this.overlay === "none" ? h("pre", {}, node.content || "(empty)") : h("div", { class: "tokens" }, "…");
    if (this.overlay !== "none") {
      waiting.push(
        drawTokens(body, {
          run: this.run,
          row: this.episode.row,
          trace: t,
          node: n,
          overlay: this.overlay,
          readout: this.readout,
          signal: this.signal,
        }),
      );
    }
    return h(
      "article",
      { class: `turn ${node.sampled ? "sampled" : ""}`, "data-role": node.role },
      head,
      body,
    );
  }
}

function branches(trace) {
  return trace.branches.length > 1 ? `${trace.branches.length} branches · ` : "";
}

function side(run, episode) {
  const facts = [
    ["environment", episode.env],
    ["step", episode.step],
    ["attempt", episode.attempt],
    ["policy", versions(episode.policy)],
    ["task", episode.task_key],
    ["started", moment(episode.started_at)],
    ["took", seconds(episode.finished_at - episode.started_at)],
  ];
  return h(
    "aside",
    { class: "side" },
    card("Episode", facts),
    episode.traces.map((trace) => traceCards(trace)),
    card("Task", rows(episode.task)),
  );
}

function traceCards(trace) {
  const head = [
    ["reward", rewardBadge(trace.reward)],
    ["advantage", number(trace.advantage)],
    ["trained at step", trace.trained_at ?? "never"],
    ["turns", trace.num_turns],
    ["stopped by", trace.stop_condition ?? "–"],
    ["truncated", trace.is_truncated ? "yes" : "no"],
  ];
  return [
    card(`Agent ${trace.agent}`, head),
    card("Rewards", rows(trace.rewards)),
    card("Metrics", rows(trace.metrics)),
    card(
      "Timing",
      Object.entries(trace.timing).map(([name, value]) => [name, seconds(value)]),
    ),
    card("Info", rows(trace.info)),
  ];
}

function rows(table) {
  return Object.entries(table ?? {})
    .filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length))
    .map(([name, value]) => [
      name,
      typeof value === "number"
        ? number(value, 4)
        : typeof value === "string"
          ? value
          : JSON.stringify(value),
    ]);
}

function card(title, entries) {
  if (!entries.length) return "";
  return h(
    "div",
    { class: "panel" },
    h("h3", {}, title),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        entries.map(([name, value]) =>
          h("tr", {}, h("td", { class: "muted" }, name), h("td", {}, value ?? "–")),
        ),
      ),
    ),
  );
}
