// What the page shows, as fields of the address behind `#`, so that a link reopens the same view.

export function makeState(fallbackHash = "") {
  let fields = new URLSearchParams((location.hash || fallbackHash).replace(/^#/, ""));
  const listeners = new Set();

  function tell(before) {
    const names = new Set([...before.keys(), ...fields.keys()]);
    const changed = new Set([...names].filter((name) => before.get(name) !== fields.get(name)));
    if (changed.size) for (const listener of [...listeners]) listener(changed);
  }

  function become(changed, push) {
    const before = fields;
    fields = changed;
    try {
      if (push) history.pushState(null, "", `#${fields}`);
      else history.replaceState(null, "", `#${fields}`);
    } catch {
      // Pages inside a notebook's frame have no address of their own; the state then lives here alone.
    }
    tell(before);
  }

  addEventListener("hashchange", () => {
    const before = fields;
    fields = new URLSearchParams(location.hash.replace(/^#/, ""));
    tell(before);
  });

  return {
    get(name, fallback = "") {
      return fields.get(name) ?? fallback;
    },
    /** Sets fields (null removes one); `push` makes a step that the Back button undoes. */
    set(values, { push = false } = {}) {
      const changed = new URLSearchParams(fields);
      for (const [name, value] of Object.entries(values)) {
        if (value === null || value === undefined) changed.delete(name);
        else changed.set(name, String(value));
      }
      become(changed, push);
    },
    /** Goes where a link of the page points. */
    follow(hash) {
      become(new URLSearchParams(hash.replace(/^#/, "")), true);
    },
    /** The hash that would show the present state with some fields changed, for links. */
    link(values) {
      const other = new URLSearchParams(fields);
      for (const [name, value] of Object.entries(values)) {
        if (value === null) other.delete(name);
        else other.set(name, String(value));
      }
      return `#${other}`;
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}
