// The part of Markdown that reports use, as elements: headings, lists, tables, code, paragraphs, bold.

import { h } from "./dom.js";

export function markdown(text) {
  const lines = text.replaceAll("\r", "").split("\n");
  const parts = [];
  let at = 0;
  const take = (test) => {
    const taken = [];
    while (at < lines.length && test(lines[at])) taken.push(lines[at++]);
    return taken;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
    } else if (line.startsWith("```")) {
      at += 1;
      const code = take((one) => !one.startsWith("```"));
      at += 1;
      parts.push(h("pre", {}, code.join("\n")));
    } else if (/^#{1,6} /.test(line)) {
      at += 1;
      parts.push(h(line.startsWith("# ") ? "h1" : "h3", {}, inline(line.replace(/^#+ /, ""))));
    } else if (/^\s*[-*] /.test(line)) {
      parts.push(
        h(
          "ul",
          {},
          take((one) => /^\s*[-*] /.test(one)).map((one) =>
            h("li", {}, inline(one.replace(/^\s*[-*] /, ""))),
          ),
        ),
      );
    } else if (/^\|.*\|\s*$/.test(line)) {
      parts.push(table(take((one) => /^\|.*\|\s*$/.test(one))));
    } else {
      const own = take((one) => one.trim() && !/^(#{1,6} |```|\s*[-*] |\|.*\|\s*$)/.test(one));
      parts.push(h("p", {}, inline(own.join(" "))));
    }
  }
  return parts;
}

function table(lines) {
  const cells = (line) =>
    line
      .trim()
      .slice(1, -1)
      .split("|")
      .map((cell) => cell.trim());
  const [head, ...rest] = lines.filter((line) => !/^\|[\s:|-]+\|\s*$/.test(line)).map(cells);
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        head.map((cell) => h("th", {}, inline(cell))),
      ),
    ),
    h(
      "tbody",
      {},
      rest.map((row) =>
        h(
          "tr",
          {},
          row.map((cell) => h("td", {}, inline(cell))),
        ),
      ),
    ),
  );
}

function inline(text) {
  return text
    .split(/(`[^`]+`|\*\*[^*]+\*\*)/)
    .filter(Boolean)
    .map((part) => {
      if (part.startsWith("`")) return h("code", {}, part.slice(1, -1));
      return part.startsWith("**") ? h("b", {}, part.slice(2, -2)) : part;
    });
}
