// The logs of all processes as one.

import { get, repeat } from "./api.js";
import { h, replace } from "./dom.js";
import { bytes, number } from "./format.js";
import { note } from "./router.js";

export async function logsView(host, run, { params, signal }) {
  const view = new LogView(host, run, params, signal);
  await repeat(() => view.load(), 2, signal);
}

class LogView {
  constructor(host, run, params, signal) {
    Object.assign(this, {
      host,
      run,
      signal,
      chosen: new Set((params.get("component") ?? "").split(",").filter(Boolean)),
      colors: new Map(),
    });
    const attempts = run.attempt_numbers;
    this.attempt = Number(params.get("attempt") ?? attempts.at(-1) ?? 1);
    this.level = params.get("level") ?? "DEBUG";
    this.text = params.get("text") ?? "";
    const select = (id, options, value, act) =>
      h(
        "select",
        { id, onchange: (event) => act(event.target.value) },
        options.map((one) =>
          h("option", { value: one, selected: String(one) === String(value) }, String(one)),
        ),
      );
    this.components = h("span", { class: "row" });
    this.count = h("span", { class: "muted" });
    this.lines = h("div", { class: "panel log", id: "log", tabindex: 0 });
    replace(
      host,
      h(
        "div",
        { class: "toolbar" },
        attempts.length > 1
          ? h(
              "label",
              {},
              "attempt",
              select("attempt", attempts, this.attempt, (value) => this.ask({ attempt: Number(value) })),
            )
          : "",
        h(
          "label",
          {},
          "from level",
          select("level", ["DEBUG", "INFO", "WARNING", "ERROR"], this.level, (value) =>
            this.ask({ level: value }),
          ),
        ),
        h("input", {
          type: "search",
          id: "log-text",
          placeholder: "text",
          "aria-label": "lines with this text",
          value: this.text,
          oninput: (event) => this.ask({ text: event.target.value }),
        }),
        this.components,
        h("span", { class: "grow" }),
        this.count,
      ),
      this.lines,
    );
  }

  ask(changes) {
    Object.assign(this, changes);
    note({
      attempt: this.attempt,
      level: this.level,
      text: this.text,
      component: [...this.chosen].join(","),
    });
    this.last = null;
    return this.load();
  }

  async load() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const told = await get(
      `runs/${this.run.id}/logs`,
      { attempt: this.attempt, level: this.level, text: this.text, component: [...this.chosen] },
      this.signal,
    );
    const text = JSON.stringify(told);
    if (text === this.last || turn !== this.turn) return; // an answer to an earlier question may come last
    this.last = text;
    this.draw(told);
  }

  draw(told) {
    const names = Object.keys(told.components);
    names.forEach((name, i) => this.colors.set(name, i % 8));
    replace(
      this.components,
      names.map((name) =>
        h(
          "button",
          {
            type: "button",
            class: this.chosen.has(name) ? "on" : "",
            title: bytes(told.components[name]),
            onclick: () => this.toggle(name),
          },
          name,
        ),
      ),
    );
    this.count.textContent =
      told.found > told.lines.length
        ? `the last ${number(told.lines.length)} of ${number(told.found)} lines`
        : `${number(told.found)} lines`;
    const bottom = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 30;
    replace(
      this.lines,
      told.lines.length
        ? told.lines.map(([time, name, level, text]) =>
            h(
              "div",
              { class: level },
              h("i", {}, time),
              h("b", { class: `s${this.colors.get(name) ?? 7}`, title: name }, name),
              h("span", {}, text),
            ),
          )
        : h("div", { class: "empty" }, "no line matches"),
    );
    if (bottom) this.lines.scrollTop = this.lines.scrollHeight;
    this.host.dataset.ready = String(told.lines.length);
  }

  toggle(name) {
    if (this.chosen.has(name)) this.chosen.delete(name);
    else this.chosen.add(name);
    this.ask({});
  }
}
