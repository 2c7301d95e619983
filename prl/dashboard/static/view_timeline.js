// Who waits for whom: trainer and orchestrator on one clock, with the rollouts in flight between them.

import { get, repeat } from "./api.js";
import { h, replace, s } from "./dom.js";
import { clock, seconds } from "./format.js";
import { note } from "./router.js";
import { durationTicks, scale } from "./scale.js";

const ROW = 34;
const LABEL = 104;
const FLIGHT = 56;
const KINDS = {
  "waits for rollouts": "wait",
  "waits for the trainer": "wait",
  trains: "work",
  "collects rollouts": "work",
  "collective and other": "rest",
};

export async function timelineView(host, run, { params, signal }) {
  let last = Number(params.get("last") ?? 20);
  const body = h("div", { class: "panel pad lanes" });
  const words = h("p", { id: "verdict" });
  const choose = h(
    "select",
    {
      id: "last",
      "aria-label": "steps shown",
      onchange: (event) => {
        last = Number(event.target.value);
        note({ last });
        load();
      },
    },
    [10, 20, 40, 100, 200].map((value) =>
      h("option", { value, selected: value === last }, `last ${value} steps`),
    ),
  );
  const key = h(
    "span",
    { class: "key muted" },
    h("i", { class: "wait" }),
    "waits",
    h("i", { class: "work" }),
    "works",
    h("i", { class: "minor" }),
    "packs, publishes, saves",
    h("i", { class: "rest" }),
    "other",
  );
  replace(host, h("div", { class: "toolbar" }, choose, key), words, body);
  const load = async () => {
    const told = await get(`runs/${run.id}/timeline`, { last }, signal);
    replace(words, told.lanes.length ? told.verdict : "");
    replace(
      body,
      told.lanes.length
        ? picture(told, body.clientWidth - 28)
        : h("div", { class: "empty" }, "no step was finished yet"),
    );
    host.dataset.ready = "1";
  };
  await repeat(load, 3, signal);
}

function picture(told, width) {
  const bars = told.lanes.flatMap((lane) => lane.steps.flatMap((step) => step.segments));
  const low = Math.min(...bars.map(([, begin]) => begin));
  const high = Math.max(...bars.map(([, begin, length]) => begin + length));
  const across = scale(low, high, LABEL, Math.max(LABEL + 100, width));
  const height = told.lanes.length * ROW + (told.in_flight ? FLIGHT : 0) + 24;
  const parts = durationTicks(0, high - low, Math.floor(width / 110)).map((value) => {
    const x = across.place(low + value);
    return [
      s("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height - 18 }),
      s("text", { x, y: height - 5, "text-anchor": "middle" }, clock(low + value)),
    ];
  });
  told.lanes.forEach((lane, i) => parts.push(laneParts(lane, i * ROW + 4, across)));
  if (told.in_flight) parts.push(flight(told.in_flight, told.lanes.length * ROW + 4, across));
  return s(
    "svg",
    {
      viewBox: `0 0 ${Math.max(LABEL + 100, width)} ${height}`,
      height,
      role: "img",
      "aria-label": "timeline",
    },
    parts,
  );
}

function laneParts(lane, top, across) {
  const parts = [s("text", { x: 0, y: top + 15 }, lane.name)];
  for (const step of lane.steps) {
    const first = step.segments[0];
    const end = step.segments.at(-1);
    for (const [what, begin, length] of step.segments) {
      const x = across.place(begin);
      const bar = s("rect", {
        class: `seg ${KINDS[what] ?? "minor"}`,
        x,
        y: top,
        width: Math.max(0.6, across.place(begin + length) - x),
        height: ROW - 14,
      });
      bar.append(s("title", {}, `step ${step.step}: ${lane.name} ${what}, ${seconds(length)}`));
      parts.push(bar);
    }
    const room = across.place(end[1] + end[2]) - across.place(first[1]);
    if (room > 22)
      parts.push(
        s(
          "text",
          { x: across.place(first[1]) + room / 2, y: top + ROW - 4, "text-anchor": "middle" },
          String(step.step),
        ),
      );
  }
  return parts;
}

function flight(told, top, across) {
  const most = Math.max(...told.y, 1);
  const rise = scale(0, most, top + FLIGHT - 10, top);
  const points = told.x
    .map((x, i) => `${across.place(x).toFixed(1)},${rise.place(told.y[i]).toFixed(1)}`)
    .join(" ");
  const base = rise.place(0);
  return [
    s("text", { x: 0, y: top + 15 }, "in flight"),
    s("text", { x: 0, y: top + 29 }, `at most ${most}`),
    s("polygon", {
      class: "flight",
      points: `${across.place(told.x[0])},${base} ${points} ${across.place(told.x.at(-1))},${base}`,
    }),
  ];
}
