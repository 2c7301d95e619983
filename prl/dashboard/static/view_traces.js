// The trace browser: every episode of a run, filtered and sorted by the server, a page at a time.

import { get, repeat } from "./api.js";
import { h, replace, sortHead, styled } from "./dom.js";
import { ago, moment, number, seconds } from "./format.js";
import { link, note } from "./router.js";

const PAGE = 50;
const FILTERS = ["step_from", "step_to", "env", "reward_from", "reward_to", "truncated", "error", "attempt"];

export async function tracesView(host, run, { params, signal }) {
  const view = new TraceTable(host, run, params, signal);
  await repeat(() => view.load(), 1, signal);
}

class TraceTable {
  constructor(host, run, params, signal) {
    Object.assign(this, { host, run, signal, revision: null });
    this.filters = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
    this.sort = params.get("sort") ?? "row";
    this.descending = params.get("descending") !== "false";
    this.start = Number(params.get("start") ?? 0);
    this.inputs = {};
    this.histogram = h("div");
    this.counts = h("span", { class: "muted", id: "counts" });
    this.pages = h("span", { class: "row" });
    this.table = h("div", { class: "panel" }, h("div", { class: "empty" }, "reading the index …"));
    replace(
      host,
      h("div", { class: "toolbar" }, this.filterInputs()),
      h("div", { class: "row" }, this.histogram, this.counts, h("span", { class: "grow" }), this.pages),
      h("p"),
      this.table,
    );
  }

  filterInputs() {
    const field = (name, text, size) =>
      (this.inputs[name] = h("input", {
        type: "text",
        inputmode: "decimal",
        size,
        id: name,
        placeholder: text,
        "aria-label": name,
        value: this.filters[name],
        onchange: (event) => this.set({ [name]: event.target.value.trim() }),
      }));
    const select = (name, options) =>
      (this.inputs[name] = h(
        "select",
        { id: name, "aria-label": name, onchange: (event) => this.set({ [name]: event.target.value }) },
        options.map(([value, text]) => h("option", { value, selected: value === this.filters[name] }, text)),
      ));
    const reset = h(
      "button",
      { type: "button", onclick: () => this.set(Object.fromEntries(FILTERS.map((name) => [name, ""]))) },
      "clear",
    );
    return [
      h("label", {}, "step", field("step_from", "from", 5), field("step_to", "to", 5)),
      h("label", {}, "environment", select("env", [["", "all"]])),
      h("label", {}, "reward", field("reward_from", "from", 5), field("reward_to", "to", 5)),
      h(
        "label",
        {},
        "truncated",
        select("truncated", [
          ["", "either"],
          ["true", "yes"],
          ["false", "no"],
        ]),
      ),
      h(
        "label",
        {},
        "error",
        select("error", [
          ["", "either"],
          ["none", "none"],
          ["any", "any"],
        ]),
      ),
      h("label", {}, "attempt", select("attempt", [["", "all"]])),
      reset,
    ];
  }

  set(changes) {
    Object.assign(this.filters, changes);
    for (const [name, value] of Object.entries(changes))
      if (this.inputs[name]) this.inputs[name].value = value;
    this.start = 0;
    this.ask();
  }

  ask(changes = {}) {
    Object.assign(this, changes);
    note({
      ...this.filters,
      sort: this.sort === "row" ? null : this.sort,
      descending: this.descending ? null : false,
      start: this.start || null,
    });
    this.revision = null;
    return this.load().catch((error) => replace(this.table, h("div", { class: "error" }, error.message)));
  }

  async load() {
    const asked = {
      ...this.filters,
      sort: this.sort,
      descending: this.descending,
      start: this.start,
      limit: PAGE,
    };
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const told = await get(
      `runs/${this.run.id}/episodes`,
      { ...asked, revision: this.revision },
      this.signal,
    );
    if (told === null || turn !== this.turn) return; // an answer to an earlier question may come last
    this.revision = told.share_read < 1 ? null : told.revision;
    this.draw(told);
  }

  draw(told) {
    this.options("env", told.envs);
    this.options("error", told.errors, 3);
    this.options("attempt", told.attempts.map(String));
    const progress = told.share_read < 1 ? ` · indexing ${Math.floor(told.share_read * 100)} %` : "";
    const counts = `${number(told.total)} of ${number(told.of)} episodes`;
    const flagged = `${number(told.failed)} failed · ${number(told.truncated)} truncated`;
    this.counts.textContent = `${counts} · ${flagged}${progress}`;
    replace(
      this.histogram,
      rewardHistogram(told.histogram, (from, to) => this.set({ reward_from: from, reward_to: to })),
    );
    const last = Math.max(0, Math.floor((told.total - 1) / PAGE) * PAGE);
    const step = (to, text, usable) =>
      h("button", { type: "button", disabled: !usable, onclick: () => this.ask({ start: to }) }, text);
    replace(
      this.pages,
      step(0, "⇤", this.start > 0),
      step(this.start - PAGE, "←", this.start > 0),
      h(
        "span",
        { class: "num" },
        told.total ? `${number(this.start + 1)}–${number(Math.min(this.start + PAGE, told.total))}` : "0",
      ),
      step(this.start + PAGE, "→", this.start + PAGE < told.total),
      step(last, "⇥", this.start < last),
    );
    if (!told.rows.length) {
      replace(this.table, h("div", { class: "empty" }, told.of ? "no episode matches" : "no episodes yet"));
      return;
    }
    replace(
      this.table,
      h(
        "table",
        { id: "episodes" },
        h("thead", {}, h("tr", {}, this.headings())),
        h(
          "tbody",
          {},
          told.rows.map((row) => this.row(row)),
        ),
      ),
    );
    this.host.dataset.ready = String(told.total);
  }

  options(name, values, fixed = 1) {
    const select = this.inputs[name];
    const known = new Set([...select.options].map((option) => option.value));
    for (const value of values) {
      if (!known.has(value))
        select.append(h("option", { value, selected: value === this.filters[name] }, value));
    }
    if (name === "attempt") select.parentElement.hidden = select.options.length <= fixed + 1;
  }

  headings() {
    const columns = [
      ["row", "#"],
      [null, "task"],
      ["step", "step"],
      [null, "environment"],
      ["reward", "reward"],
      [null, "flags"],
      ["turns", "turns"],
      ["tokens", "tokens"],
      ["seconds", "time"],
      [null, "policy"],
      [null, "group"],
      [null, "finished"],
    ];
    const right = new Set(["row", "step", "reward", "turns", "tokens", "seconds"]);
    return columns.map(([name, text]) => {
      if (!name) return h("th", {}, text);
      const order = name === this.sort ? (this.descending ? "down" : "up") : null;
      const turn = { descending: this.sort === name ? !this.descending : true, sort: name, start: 0 };
      return sortHead(text, right.has(name) ? "num" : "", order, () => this.ask(turn));
    });
  }

  row(row) {
    const to = link(["run", this.run.id, "episode", String(row.row)]);
    const flags = [
      row.truncated ? h("span", { class: "tag warn" }, "truncated") : "",
      row.errors.map((name) => h("span", { class: "tag bad" }, name)),
    ];
    return h(
      "tr",
      {
        class: "link",
        onclick: (event) => {
          if (event.target.tagName !== "A") location.hash = to;
        },
      },
      h("td", { class: "num muted" }, h("a", { href: to }, String(row.row))),
      h("td", { class: "mono", title: row.task_key }, String(row.task_key).slice(0, 12)),
      h("td", { class: "num" }, number(row.step)),
      h("td", {}, row.env),
      h(
        "td",
        { class: "num" },
        row.rewards.map((reward) => rewardBadge(reward)),
      ),
      h("td", {}, flags),
      h("td", { class: "num" }, number(row.turns)),
      h("td", { class: "num" }, number(row.tokens)),
      h("td", { class: "num" }, seconds(row.seconds)),
      h("td", { class: "muted" }, versions(row.policy)),
      h(
        "td",
        {},
        h(
          "a",
          { href: link(["run", this.run.id, "group", String(row.row)]) },
          String(row.group).slice(0, 12),
        ),
      ),
      h("td", { class: "muted", title: moment(row.finished_at) }, ago(row.finished_at)),
    );
  }
}

export function versions(policy) {
  if (!policy) return "frozen";
  return policy[0] === policy[1] ? `v${policy[0]}` : `v${policy[0]}–${policy[1]}`;
}

/** A reward on a colour between red (0 or less) and green (1 or more). */
export function rewardBadge(reward) {
  if (typeof reward !== "number") return h("span", { class: "reward muted" }, reward ?? "–");
  const share = Math.min(1, Math.max(0, reward));
  return styled(h("span", { class: "reward" }, number(reward)), {
    background: `hsl(${Math.round(share * 130)} 60% 50% / .22)`,
  });
}

function rewardHistogram(told, choose) {
  if (!told) return h("span");
  const top = Math.max(...told.counts, 1);
  const bars = told.counts.map((count, i) =>
    styled(
      h("button", {
        type: "button",
        title: `${number(count)} with reward ${number(told.edges[i])} to ${number(told.edges[i + 1])}`,
        "aria-label": `reward from ${number(told.edges[i])}`,
        onclick: () => choose(String(told.edges[i]), String(told.edges[i + 1])),
      }),
      { height: `${count ? Math.max(4, (100 * count) / top) : 0}%` },
    ),
  );
  return h(
    "div",
    {},
    h("div", { class: "histogram" }, bars),
    h(
      "div",
      { class: "row muted" },
      number(told.edges[0]),
      h("span", { class: "grow" }, "reward"),
      number(told.edges.at(-1)),
    ),
  );
}
