// The rollouts of one task beside each other, best first: what the better ones did that the others did not.

import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { number } from "./format.js";
import { link, note } from "./router.js";
import { drawTokens, legend, OVERLAYS } from "./tokens.js";
import { rewardBadge, versions } from "./view_traces.js";

export async function groupView(host, run, { parts, params, signal }) {
  const row = Number(parts[3]);
  const { members } = await get(`runs/${run.id}/episodes/${row}/group`, {}, signal);
  const known = new Set(OVERLAYS.map(([name]) => name));
  let overlay = known.has(params.get("overlay")) ? params.get("overlay") : "none";
  const grid = h("div", { class: "groups", id: "group" });
  const readout = h("div", { class: "readout" });
  const key = h("span");
  const rewards = members
    .flatMap((member) => member.traces.map((trace) => trace.reward))
    .filter((reward) => typeof reward === "number");
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
  const draw = async () => {
    replace(key, legend(overlay));
    const waiting = [];
    replace(
      grid,
      members.map((member) => column(run, member, overlay, readout, waiting, signal)),
    );
    await Promise.all(waiting);
  };
  const select = h(
    "select",
    {
      id: "overlay",
      onchange: (event) => {
        overlay = event.target.value;
        note({ overlay: overlay === "none" ? null : overlay });
        draw();
      },
    },
    OVERLAYS.map(([value, text]) => h("option", { value, selected: value === overlay }, text)),
  );
  const first = members[0];
  replace(
    host,
    h(
      "div",
      { class: "toolbar" },
      h("a", { href: link(["run", run.id, "traces"]) }, "all episodes"),
      h("b", {}, `group ${first.group}`),
      h(
        "span",
        { class: "muted" },
        `${members.length} rollouts of ${first.env}, step ${first.step}, mean reward ${number(mean)}`,
      ),
      h("span", { class: "grow" }),
      key,
      h("label", {}, "tokens", select),
    ),
    readout,
    prompt(first),
    grid,
  );
  await draw();
  host.dataset.ready = String(members.length);
}

/** What the members have in common is shown once. */
function prompt(member) {
  const given = member.traces[0].nodes.filter(
    (node, i, nodes) => !node.sampled && nodes.slice(0, i).every((before) => !before.sampled),
  );
  return h(
    "div",
    {},
    given.map((node) =>
      h("article", { class: "turn" }, h("header", {}, h("b", {}, node.role)), h("pre", {}, node.content)),
    ),
  );
}

function column(run, member, overlay, readout, waiting, signal) {
  const turns = member.traces.flatMap((trace, t) => {
    const firstSampled = trace.nodes.findIndex((node) => node.sampled);
    return trace.nodes.map((node, n) => {
      if (n < firstSampled && t === 0) return "";
      const body =
        overlay === "none" ? h("pre", {}, node.content || "(empty)") : h("div", { class: "tokens" }, "…");
      if (overlay !== "none")
        waiting.push(drawTokens(body, { run, row: member.row, trace: t, node: n, overlay, readout, signal }));
      return h(
        "div",
        { class: `turn ${node.sampled ? "sampled" : ""}` },
        h("header", {}, h("b", {}, node.role), member.traces.length > 1 ? trace.agent : ""),
        body,
      );
    });
  });
  const flags = member.traces.map((trace) => [
    trace.is_truncated ? h("span", { class: "tag warn" }, "truncated") : "",
    trace.error ? h("span", { class: "tag bad" }, trace.error.type) : "",
  ]);
  const head = h(
    "header",
    {},
    member.traces.map((trace) => rewardBadge(trace.reward)),
    h("span", { class: "muted" }, `advantage ${number(member.traces[0].advantage)}`),
    h("span", { class: "muted" }, versions(member.policy)),
    flags,
    h("span", { class: "grow" }),
    h("a", { href: link(["run", run.id, "episode", String(member.row)]) }, `episode ${member.row}`),
  );
  return h("section", { class: "member" }, head, turns);
}
