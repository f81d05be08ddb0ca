// The state of the page, as fields of the address behind `#`, so that a link reopens the same view.

const parse = (hash) => new URLSearchParams(hash.replace(/^#/, ""));

export function makeState(fallbackHash = "") {
  let fields = parse(location.hash || fallbackHash);
  const listeners = new Set();

  function replaceFields(changed) {
    const before = fields;
    fields = changed;
    const names = new Set([...before.keys(), ...fields.keys()]);
    const different = new Set([...names].filter((name) => before.get(name) !== fields.get(name)));
    if (different.size) for (const listener of [...listeners]) listener(different);
  }

  function navigate(changed, push) {
    try {
      history[push ? "pushState" : "replaceState"](null, "", `#${changed}`);
    } catch {
      // A page inside a notebook's frame has no address of its own; the state is then kept in memory only.
    }
    replaceFields(changed);
  }

  /** The present fields with some changed; null removes one. */
  function withFields(values) {
    const changed = new URLSearchParams(fields);
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined) changed.delete(name);
      else changed.set(name, String(value));
    }
    return changed;
  }

  addEventListener("hashchange", () => replaceFields(parse(location.hash)));

  return {
    get: (name, fallback = "") => fields.get(name) ?? fallback,
    /** Sets fields (null removes one); with `push` the Back button undoes it. */
    set: (values, { push = false } = {}) => navigate(withFields(values), push),
    /** Goes to the target of a link of the page. */
    follow: (hash) => navigate(parse(hash), true),
    /** The hash of the present state with some fields changed, for links. */
    link: (values) => `#${withFields(values)}`,
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/** Whether one of these fields has changed. */
export const anyOf = (changed, ...names) => names.some((name) => changed.has(name));

/** A list that the address holds as JSON; an empty one where it cannot be parsed. */
export function listIn(state, name) {
  try {
    const list = JSON.parse(state.get(name, "[]"));
    return Array.isArray(list) ? list : [];
  } catch {
    return [];
  }
}
