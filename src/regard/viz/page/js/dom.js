// Small tools for building the page. Data reaches the document as text nodes and attributes only, never as markup.

let lastId = 0;

/** A name for an element that no other element has. */
export function freshId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}

/** An element: `el("p", { class: "quiet", text: "hello", on: { click: f } }, child, "text")`. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "aria") for (const [key, said] of Object.entries(value)) node.setAttribute(`aria-${key}`, said);
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

/** A check box with its label beside it. */
export function toggle(label, checked, onChange, props = {}) {
  const box = el("input", { type: "checkbox", checked, ...props, on: { change: () => onChange(box.checked) } });
  return el("label", { class: "toggle" }, box, el("span", { text: label }));
}

/** A few choices in one line, as radio buttons, so that the arrow keys work as everywhere. */
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

/** A slider that says its value; `format` writes a value for people. */
export function slider(label, { min, max, step = 1, value, format = String }, onInput) {
  const said = el("output", { class: "num", text: format(value) });
  const input = el("input", { type: "range", min, max, step, id: freshId("slider") });
  input.value = String(value);
  const tell = () => {
    said.textContent = format(Number(input.value));
    input.setAttribute("aria-valuetext", said.textContent);
  };
  tell();
  input.addEventListener("input", () => {
    tell();
    onInput(Number(input.value));
  });
  const box = el("div", { class: "field slider" }, el("label", { htmlFor: input.id }, label, " ", said), input);
  box.input = input;
  box.show = (shown) => {
    input.value = String(shown);
    tell();
  };
  return box;
}

/** Calls `f` once things have been quiet for `pause` milliseconds. */
export function debounce(f, pause) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...args), pause);
  };
}
