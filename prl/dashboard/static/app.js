// Which page is shown, and the colours.

import { h, replace } from "./dom.js";
import { here } from "./router.js";
import { runsPage } from "./page_runs.js";
import { runPage } from "./page_run.js";
import { comparePage } from "./page_compare.js";

const page = document.getElementById("page");
const crumbs = document.getElementById("crumbs");
let leave = new AbortController();

function choose(parts) {
  if (parts[0] === "run" && parts[1]) return runPage;
  if (parts[0] === "compare") return comparePage;
  return runsPage;
}

async function show() {
  leave.abort();
  leave = new AbortController();
  const { parts, params } = here();
  const host = h("div");
  replace(page, host);
  const context = { parts, params, signal: leave.signal, crumbs: (...items) => replace(crumbs, ...items) };
  try {
    await choose(parts)(host, context);
  } catch (error) {
    if (!context.signal.aborted) host.prepend(h("div", { class: "error" }, error.message));
  }
}

function theme() {
  let saved = null;
  try {
    saved = localStorage.getItem("prl-theme");
  } catch {
    /* a browser that stores nothing follows the system */
  }
  return saved ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function paint(name) {
  document.documentElement.dataset.theme = name;
}

paint(theme());
document.getElementById("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  paint(next);
  try {
    localStorage.setItem("prl-theme", next);
  } catch {
    /* it lasts until the page is closed */
  }
});
addEventListener("hashchange", show);
show();
