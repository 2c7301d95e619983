// What failed, how often, where and when.

import { get, repeat } from "./api.js";
import { h, replace, styled } from "./dom.js";
import { number } from "./format.js";
import { link } from "./router.js";

export async function errorsView(host, run, { signal }) {
  const body = h("div");
  replace(host, body);
  await repeat(
    async () => {
      const told = await get(`runs/${run.id}/errors`, {}, signal);
      draw(body, run, told);
      host.dataset.ready = "1";
    },
    3,
    signal,
  );
}

function draw(host, run, told) {
  const failed = told.types.reduce((sum, kind) => sum + kind.count, 0);
  const share = told.episodes ? `${((100 * failed) / told.episodes).toFixed(2)} %` : "–";
  const cut = h(
    "a",
    { href: link(["run", run.id, "traces"], { truncated: true }) },
    `${number(told.truncated ?? 0)} truncated`,
  );
  const progress = told.share_read < 1 ? ` · indexing ${Math.floor(told.share_read * 100)} %` : "";
  const head = h(
    "p",
    { class: "muted" },
    `${number(failed)} errors in ${number(told.episodes)} episodes (${share}) · `,
    cut,
    progress,
  );
  if (!told.types.length) {
    replace(host, head, h("div", { class: "panel empty" }, "no rollout failed"));
    return;
  }
  const range = `steps ${told.edges[0]} to ${told.edges.at(-1) - 1}`;
  replace(
    host,
    head,
    h(
      "div",
      { class: "panel" },
      h(
        "table",
        { id: "errors" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "type"),
            h("th", { class: "num" }, "episodes"),
            h("th", {}, range),
            h("th", {}, "first, last step"),
            h("th", {}, "environments"),
            h("th", {}, "example"),
          ),
        ),
        h(
          "tbody",
          {},
          told.types.map((kind) => row(run, kind)),
        ),
      ),
    ),
  );
}

function row(run, kind) {
  const top = Math.max(...kind.by_step, 1);
  const bars = kind.by_step.map((count) =>
    styled(h("i", { title: number(count) }), { height: `${count ? Math.max(6, (100 * count) / top) : 0}%` }),
  );
  const envs = Object.entries(kind.envs)
    .map(([env, count]) => `${env} ${number(count)}`)
    .join(", ");
  return h(
    "tr",
    {},
    h("td", {}, h("a", { href: link(["run", run.id, "traces"], { error: kind.type }) }, kind.type)),
    h("td", { class: "num" }, number(kind.count)),
    h("td", {}, h("div", { class: "bars" }, bars)),
    h("td", {}, `${kind.first_step}, ${kind.last_step}`),
    h("td", {}, envs),
    h(
      "td",
      {},
      h("a", { href: link(["run", run.id, "episode", String(kind.example)]) }, `episode ${kind.example}`),
    ),
  );
}
