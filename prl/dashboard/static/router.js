// Where the page is, in the part of the address behind `#`.

/** `{parts, params}` of `#/run/<id>/<tab>?a=b`. */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return {
    parts: path.split("/").filter(Boolean).map(decodeURIComponent),
    params: new URLSearchParams(query),
  };
}

export function link(parts, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function go(parts, params = {}) {
  location.hash = link(parts, params);
}

/** Change parameters of the address without a step back for each. */
export function note(changes) {
  const { parts, params } = here();
  const merged = { ...Object.fromEntries(params), ...changes };
  history.replaceState(null, "", link(parts, merged));
}
