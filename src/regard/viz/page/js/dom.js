// Small tools for building the page. Data reaches the document as text nodes and attributes only, never as markup.

let lastId = 0;

/** An element id that is not in use. */
export function freshId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}

/** Creates an element: `el("p", { class: "quiet", text: "hello", on: { click: f } }, child, "text")`. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "aria") for (const [key, text] of Object.entries(value)) node.setAttribute(`aria-${key}`, text);
    else if (name in node && name !== "list" && name !== "role") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function clear(node) {
  node.replaceChildren();
  return node;
}

export function button(label, onClick, props = {}) {
  return el("button", { type: "button", ...props, on: { click: onClick, ...(props.on ?? {}) } }, label || null);
}

/** A control under its label. */
export function field(label, control, props = {}) {
  control.id ||= freshId("field");
  return el("div", { class: "field", ...props }, el("label", { htmlFor: control.id, text: label }), control);
}

/** A drop-down list; `options` are [value, label] pairs. */
export function select(options, value, onChange, props = {}) {
  const list = el("select", { ...props, on: { change: () => onChange(list.value) } });
  for (const [key, label] of options) list.append(el("option", { value: key, text: label }));
  list.value = String(value);
  return list;
}

/** A labelled drop-down list, or nothing where there is nothing to choose. */
export function choice(label, options, value, onChange, props = {}) {
  return options.length > 1 ? field(label, select(options, value, onChange, props)) : null;
}

/** A check box with its label beside it. */
export function toggle(label, checked, onChange) {
  const box = el("input", { type: "checkbox", checked, on: { change: () => onChange(box.checked) } });
  return el("label", { class: "toggle" }, box, el("span", { text: label }));
}

/** A few options in one line. They are radio buttons, so that the arrow keys work. */
export function segmented(label, options, value, onChange) {
  const name = freshId("choice");
  const choices = options.map(([key, text]) => {
    const radio = el("input", { type: "radio", name, value: key, checked: key === value });
    radio.addEventListener("change", () => radio.checked && onChange(key));
    return el("label", {}, radio, el("span", { text }));
  });
  const legend = el("legend", { text: label });
  return el("fieldset", { class: "segmented" }, legend, el("div", { class: "segments" }, choices));
}

/** A slider that shows its value; `format` turns a value into text. */
export function slider(label, { min, max, step = 1, value, format = String }, onInput) {
  const output = el("output", { class: "num", text: format(value) });
  const input = el("input", { type: "range", min, max, step, id: freshId("slider") });
  const show = (shown) => {
    input.value = String(shown);
    output.textContent = format(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  show(value);
  input.addEventListener("input", () => {
    show(input.value);
    onInput(Number(input.value));
  });
  const text = el("label", { htmlFor: input.id }, label, " ", output);
  return Object.assign(el("div", { class: "field slider" }, text, input), { show });
}

/** Calls `f` once `pause` milliseconds have passed without another call. */
export function debounce(f, pause) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...args), pause);
  };
}

/** Keeps one of `items` in the tab order; the keys [back, forward], Home and End move the focus between them. */
export function rovingFocus(container, items, [back, forward], onFocus) {
  let at = 0;
  items.forEach((item, i) => {
    item.tabIndex = i ? -1 : 0;
    item.addEventListener("focus", () => {
      items[at].tabIndex = -1;
      at = i;
      item.tabIndex = 0;
      onFocus(i);
    });
  });
  container.addEventListener("keydown", (event) => {
    const moves = { [forward]: at + 1, [back]: at - 1, Home: 0, End: items.length - 1 };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    items[Math.min(Math.max(moves[event.key], 0), items.length - 1)].focus();
  });
}

/** Calls `draw` when the width of `element` or the theme changes; returns a function that ends this. */
export function drawOnChange(element, draw) {
  let width = 0;
  const watch = new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    draw();
  });
  watch.observe(element);
  addEventListener("regard-theme", draw);
  return () => {
    watch.disconnect();
    removeEventListener("regard-theme", draw);
  };
}
