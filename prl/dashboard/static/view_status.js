// STATUS.md as it is appended to.

import { get, repeat } from "./api.js";
import { h, replace } from "./dom.js";
import { markdown } from "./markdown.js";

export async function statusView(host, run, { signal }) {
  const body = h("div", { class: "panel pad doc", id: "status" });
  replace(host, h("p"), body);
  let last = null;
  await repeat(
    async () => {
      const { text } = await get(`runs/${run.id}/status`, {}, signal);
      if (text === last) return;
      last = text;
      replace(body, text ? markdown(text) : h("div", { class: "empty" }, "no STATUS.md"));
      host.dataset.ready = "1";
    },
    3,
    signal,
  );
}
