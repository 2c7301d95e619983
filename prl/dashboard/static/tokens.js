// A message token by token, coloured by what is known of each.

import { get } from "./api.js";
import { h, replace, styled } from "./dom.js";
import { number } from "./format.js";

export const OVERLAYS = [
  ["none", "text"],
  ["mask", "loss mask"],
  ["advantages", "advantage"],
  ["logprobs", "logprob"],
  ["gap", "logprob gap (trainer − sampler)"],
];
const RED = "214 69 65";
const GREEN = "38 132 96";
const BLUE = "47 95 208";

/** Draws the tokens of a message into `host`. `readout` shows the token under the pointer. */
export async function drawTokens(host, { run, row, trace, node, overlay, readout, signal }) {
  const told = await get(`runs/${run.id}/episodes/${row}/tokens`, { trace, node }, signal);
  const values = overlay === "mask" ? told.mask : told[overlay];
  const top = Math.max(...values.map((value) => (value === null ? 0 : Math.abs(value))), 1e-9);
  const spans = told.ids.map((id, i) => {
    const text = shown(told.texts[i]);
    const span = h(
      "span",
      { class: `${told.mask[i] ? "" : "off"} ${/^<\|.*\|>$/.test(text) ? "special" : ""}` },
      text,
    );
    span.addEventListener("pointerenter", () => replace(readout, describe(told, i)));
    return styled(span, { background: color(overlay, values[i], top) });
  });
  const known = values.some((value) => value !== null);
  const missing = known || !told.mask.includes(1) ? "" : h("div", { class: "muted" }, missingText(overlay));
  const cut = told.left_out
    ? h("div", { class: "muted" }, `${number(told.left_out)} more tokens are not shown`)
    : "";
  const names = told.tokenizer
    ? ""
    : h("div", { class: "muted" }, "the model's tokenizer is not on this machine: ids are shown");
  replace(host, spans, missing, cut, names);
  host.dataset.overlay = overlay;
}

export function legend(overlay) {
  if (overlay === "none") return "";
  if (overlay === "mask")
    return h("span", { class: "muted" }, h("i", { class: "scale flag" }), " trained on");
  const two = overlay !== "logprobs";
  return h(
    "span",
    { class: "muted" },
    two ? "lowest " : "unlikely ",
    h("i", { class: `scale ${two ? "two" : "one"}` }),
    two ? " highest, by size" : " certain",
  );
}

function color(overlay, value, top) {
  if (value === null || value === undefined) return "";
  if (overlay === "mask") return value ? `rgb(${BLUE} / .3)` : "";
  if (overlay === "logprobs") return `rgb(${RED} / ${(Math.min(1, -value / 5) * 0.75).toFixed(3)})`;
  const strength = Math.min(1, Math.abs(value) / top) * 0.75;
  return `rgb(${value < 0 ? RED : GREEN} / ${strength.toFixed(3)})`;
}

function shown(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
}

function describe(told, i) {
  const parts = [
    `token ${i}`,
    `id ${told.ids[i]}`,
    JSON.stringify(told.texts[i]),
    told.mask[i] ? "sampled" : "context",
  ];
  for (const [name, text] of [
    ["advantages", "advantage"],
    ["logprobs", "logprob"],
    ["trainer", "trainer"],
    ["gap", "gap"],
  ]) {
    if (told[name][i] !== null) parts.push(`${text} ${number(told[name][i], 4)}`);
  }
  return parts.join("   ");
}

function missingText(overlay) {
  if (overlay === "advantages")
    return "no credit: this message was never trained on, or nothing in it was sampled";
  if (overlay === "gap")
    return "no trainer logprobs: not trained on, or beyond tracking.token_logprobs of its step";
  return "nothing was sampled here";
}
