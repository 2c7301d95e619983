// The list of runs: what each is, how far it is, and which ones to compare.

import { get, repeat } from "./api.js";
import { sparkline } from "./chart.js";
import { h, keepingFocus, replace, sortHead, styled } from "./dom.js";
import { ago, moment, number } from "./format.js";
import { go, link, note } from "./router.js";

const MOST = 8;
const SPARKS = 60;
const REWARD = /^train\/agg\/effective\/(?!num_)[^/]+\/reward\/mean$/;

const COLUMNS = [
  ["name", "run", (run) => run.group + "/" + run.name],
  ["state", "state", (run) => run.state],
  ["step", "step", (run) => run.step ?? -1, "num"],
  ["reward", "reward", (run) => run.reward ?? -Infinity, "num"],
  ["curve", "", null],
  ["command", "job", (run) => run.command ?? ""],
  ["env", "environment", (run) => run.env ?? ""],
  ["algo", "algo", (run) => run.algo ?? ""],
  ["loss", "loss", (run) => run.loss ?? ""],
  ["model", "model", (run) => run.model ?? ""],
  ["lr", "lr", (run) => run.lr ?? 0, "num"],
  ["seed", "seed", (run) => run.seed ?? 0, "num"],
  ["heard", "last sign", (run) => run.heard ?? 0, "num"],
];

export async function runsPage(host, { params, signal, crumbs }) {
  crumbs("runs");
  document.title = "prl – runs";
  const view = new RunList(host, params, signal);
  await repeat(() => view.load(), 3, signal);
}

class RunList {
  constructor(host, params, signal) {
    this.signal = signal;
    this.runs = [];
    this.chosen = new Set((params.get("chosen") ?? "").split(",").filter(Boolean));
    this.sparks = new Map();
    this.sort = params.get("sort") ?? "heard";
    this.down = params.get("down") !== "0";
    this.search = h("input", {
      type: "search",
      id: "search",
      placeholder: "filter: words of name, env, algo, state …",
      "aria-label": "filter runs",
      size: 38,
      value: params.get("q") ?? "",
      oninput: () => {
        note({ q: this.search.value });
        this.draw();
      },
    });
    this.compare = h(
      "button",
      {
        type: "button",
        id: "compare",
        disabled: true,
        onclick: () => go(["compare"], { runs: [...this.chosen].join(",") }),
      },
      "compare",
    );
    this.count = h("span", { class: "muted" });
    this.table = h("div", { class: "panel" }, h("div", { class: "empty" }, "looking for runs …"));
    replace(
      host,
      h(
        "div",
        { class: "toolbar" },
        h("h1", {}, "Runs"),
        this.count,
        h("span", { class: "grow" }),
        this.search,
        this.compare,
      ),
      this.table,
    );
  }

  async load() {
    const told = await get("runs", {}, this.signal);
    const text = JSON.stringify(told);
    if (text === this.last) return;
    this.last = text;
    this.runs = told;
    keepingFocus(() => this.draw());
    await this.loadSparks();
  }

  shown() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const of = (run) =>
      [run.group, run.name, run.state, run.command, run.env, run.algo, run.loss, run.model]
        .join(" ")
        .toLowerCase();
    const value = COLUMNS.find(([name]) => name === this.sort)?.[2] ?? ((run) => run.heard);
    const sign = this.down ? -1 : 1;
    return this.runs
      .filter((run) => words.every((word) => of(run).includes(word)))
      .sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
  }

  draw() {
    const runs = this.shown();
    this.count.textContent =
      runs.length === this.runs.length ? `${runs.length}` : `${runs.length} of ${this.runs.length}`;
    if (!runs.length) {
      const text = this.runs.length
        ? "no run matches"
        : "no run here yet: start one with python -m prl, it will appear by itself";
      replace(this.table, h("div", { class: "empty" }, text));
      return;
    }
    const used = COLUMNS.filter(
      ([name, , value]) =>
        !value ||
        name === "name" ||
        this.runs.some((run) => run[name] !== undefined && run[name] !== null && run[name] !== ""),
    );
    const head = used.map(([name, text, value, kind]) =>
      value
        ? sortHead(text, kind, name === this.sort ? (this.down ? "down" : "up") : null, () => this.order(name))
        : h("th", { class: kind ?? "" }, text),
    );
    replace(
      this.table,
      h(
        "table",
        { id: "runs" },
        h("thead", {}, h("tr", {}, h("th"), head)),
        h(
          "tbody",
          {},
          runs.map((run) =>
            this.row(
              run,
              used.map(([name]) => name),
            ),
          ),
        ),
      ),
    );
    this.tellChosen();
  }

  row(run, names) {
    const box = h("input", {
      type: "checkbox",
      "aria-label": `choose ${run.name}`,
      "data-key": run.id,
      checked: this.chosen.has(run.id),
      onchange: (event) => this.choose(run.id, event.target.checked),
    });
    return h(
      "tr",
      { "data-run": run.id },
      h("td", {}, box),
      names.map((name) => this.cell(run, name)),
    );
  }

  cell(run, name) {
    switch (name) {
      case "name":
        return h(
          "td",
          { class: "name", title: run.path },
          run.group ? h("span", { class: "muted" }, `${run.group} / `) : "",
          h("a", { href: link(["run", run.id]), "data-key": `open ${run.id}` }, run.name),
          run.attempts > 1 ? h("span", { class: "muted" }, ` · attempt ${run.attempts}`) : "",
        );
      case "state":
        return h("td", {}, h("span", { class: `state ${run.state}` }, run.state));
      case "step":
        return h(
          "td",
          { class: "num" },
          run.step === null ? "–" : number(run.step),
          run.max_steps ? h("span", { class: "muted" }, ` / ${number(run.max_steps)}`) : "",
          bar(run),
        );
      case "curve":
        return h("td", { class: "curve" }, this.sparks.get(run.id)?.picture ?? "");
      case "heard":
        return h("td", { class: "num muted", title: moment(run.heard) }, ago(run.heard));
      case "reward":
      case "lr":
      case "seed":
        return h("td", { class: "num" }, number(run[name]));
      default:
        return h("td", {}, run[name] ?? "");
    }
  }

  order(name) {
    this.down = this.sort === name ? !this.down : true;
    this.sort = name;
    note({ sort: name, down: this.down ? null : 0 });
    keepingFocus(() => this.draw());
  }

  choose(id, on) {
    if (on) this.chosen.add(id);
    else this.chosen.delete(id);
    note({ chosen: [...this.chosen].join(",") });
    this.tellChosen();
  }

  tellChosen() {
    const n = this.chosen.size;
    this.compare.disabled = n < 2 || n > MOST;
    this.compare.textContent = n > MOST ? `compare (at most ${MOST})` : n ? `compare ${n}` : "compare";
  }

  /** Reward curves of the newest runs, one after the other: they must not hold up the list. */
  async loadSparks() {
    for (const run of this.runs.filter((one) => one.reward !== null).slice(0, SPARKS)) {
      if (this.signal.aborted) return;
      const known = this.sparks.get(run.id);
      if (known && known.step === run.step) continue;
      const { values } = await get(`runs/${run.id}/metrics`, {}, this.signal);
      const key = Object.keys(values).find((name) => REWARD.test(name));
      if (!key) continue;
      const told = await get(`runs/${run.id}/series`, { key, points: 60 }, this.signal);
      const { x, y } = told.series[key];
      this.sparks.set(run.id, { step: run.step, picture: sparkline(x, y) });
      const cell = this.table.querySelector(`tr[data-run="${run.id}"] td.curve`);
      if (cell) replace(cell, this.sparks.get(run.id).picture);
    }
  }
}

function bar(run) {
  if (!run.max_steps || run.step === null) return "";
  return h(
    "span",
    { class: "progress" },
    styled(h("i"), { width: `${Math.min(100, (100 * run.step) / run.max_steps)}%` }),
  );
}
