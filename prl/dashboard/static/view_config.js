// The resolved config of each attempt, and where configs differ.

import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { note } from "./router.js";

export async function configView(host, run, { params, signal }) {
  const attempts = run.attempt_numbers;
  const body = h("div");
  const search = h("input", {
    type: "search",
    id: "config-filter",
    placeholder: "filter paths and values",
    "aria-label": "filter paths and values",
    size: 34,
    value: params.get("q") ?? "",
    oninput: () => {
      note({ q: search.value });
      draw();
    },
  });
  let told = { values: {}, command: "" };
  const draw = () => {
    const word = search.value.toLowerCase();
    const rows = Object.entries(told.values).filter(([path, value]) =>
      `${path} ${value}`.toLowerCase().includes(word),
    );
    replace(
      body,
      told.command ? h("pre", { class: "panel pad" }, told.command.trim()) : "",
      h(
        "div",
        { class: "panel diff" },
        h(
          "table",
          { id: "config" },
          h(
            "tbody",
            {},
            rows.map(([path, value]) => h("tr", {}, h("td", { class: "muted" }, path), h("td", {}, value))),
          ),
        ),
      ),
    );
  };
  const asked = Number(params.get("attempt"));
  const first = attempts.includes(asked) ? asked : attempts.at(-1);
  const load = async (attempt) => {
    told = await get(`runs/${run.id}/config`, { attempt }, signal);
    draw();
  };
  const choose = h(
    "select",
    {
      id: "attempt",
      "aria-label": "attempt",
      onchange: (event) => {
        note({ attempt: event.target.value });
        load(event.target.value);
      },
    },
    attempts.map((one) => h("option", { value: one, selected: one === first }, `attempt ${one}`)),
  );
  const changes = h("div");
  replace(host, h("div", { class: "toolbar" }, attempts.length > 1 ? choose : "", search), changes, body);
  if (!attempts.length) {
    replace(body, h("div", { class: "empty" }, "this run has no config"));
    return;
  }
  if (attempts.length > 1) {
    const diff = await get(`runs/${run.id}/attempts/diff`, {}, signal);
    replace(
      changes,
      h("h2", {}, "What changed between attempts"),
      diffTable(
        diff.rows,
        diff.attempts.map((one) => `attempt ${one}`),
      ),
    );
  }
  await load(first);
  host.dataset.ready = "1";
}

/** Paths with one column a config; values that differ from the first column's are marked. */
export function diffTable(rows, names) {
  if (!rows.length) return h("div", { class: "panel empty" }, "nothing differs");
  return h(
    "div",
    { class: "panel diff" },
    h(
      "table",
      { id: "diff" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "path"),
          names.map((name) => h("th", {}, name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            h("td", { class: "muted" }, row.path),
            row.values.map((value) => h("td", { class: value === row.values[0] ? "" : "odd" }, value ?? "–")),
          ),
        ),
      ),
    ),
  );
}
