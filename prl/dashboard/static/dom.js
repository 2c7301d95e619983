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
