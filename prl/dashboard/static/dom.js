// Building elements without markup strings: nothing that a run wrote can become code.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: class, on<Event> functions, value-like properties, everything else an attribute. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

export function replace(host, ...children) {
  host.replaceChildren(...flat(children));
  return host;
}

/** A style that depends on data; set through the object model, because the page forbids inline styles. */
export function styled(element, styles) {
  Object.assign(element.style, styles);
  return element;
}

/** The head of a column that a click, or Enter on it, sorts by. `order`: "up", "down" or null. */
export function sortHead(text, kind, order, act) {
  const told = { up: "ascending", down: "descending" }[order] ?? "none";
  const arrow = { up: " ↑", down: " ↓" }[order] ?? "";
  return h(
    "th",
    { class: `sort ${kind ?? ""}`, "aria-sort": told },
    h("button", { type: "button", "data-key": `sort ${text}`, onclick: act }, text, arrow),
  );
}

/** Draw anew, and give the focus back to what had it: elements are known by their `data-key`. */
export function keepingFocus(draw) {
  const key = document.activeElement?.dataset?.key;
  draw();
  if (key) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

const PROPERTIES = new Set(["value", "checked", "disabled", "selected"]);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(3).filter((child) => child !== undefined && child !== null && child !== false);
}
