// Asking the server. It only reads, and so does this.

/** JSON of `/api/<path>`; null where the server says that nothing is new (204). */
export async function get(path, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === undefined || value === null || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  const text = query.toString();
  const answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal });
  if (answer.status === 204) return null;
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Error(
      told.error ?? (typeof told.detail === "string" ? told.detail : `the server answers ${answer.status}`),
    );
  }
  return answer.json();
}

/** Calls `task` now and then every `seconds` while the page is visible and `signal` is not aborted. */
export async function repeat(task, seconds, signal) {
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        await task();
        tellLive("");
      } catch (error) {
        if (signal.aborted) return;
        tellLive(error instanceof TypeError ? "the server cannot be reached" : error.message);
      }
    }
    await pause(seconds, signal);
  }
}

function pause(seconds, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, seconds * 1000);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        done();
      },
      { once: true },
    );
  });
}

function tellLive(text) {
  document.getElementById("live").textContent = text;
}
