// Small things that several views need: how numbers are written, rows of bars, and tensors that open when clicked.
import { button, clear, el } from "./dom.js";
import { signedColour, signedRgb } from "./colours.js";
import { figure, legend } from "./figure.js";
import { heatMap } from "./heatmap.js";
import { svgCard, svgDocument, svgPalette, svgRect, svgText } from "./svg.js";
import { direction } from "./tokens.js";

/** 0.1234 -> "12.3 %"; what is not nothing never reads as nothing. */
export function percent(p) {
  if (p > 0 && p < 0.0005) return "< 0.1 %";
  return `${(100 * p).toFixed(p < 0.9995 ? 1 : 0)} %`;
}

/** +1.24, −15.9: three digits, and no sign on what rounds to nothing. */
export function signedNumber(value) {
  const size = Math.abs(value);
  const text = value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
  if (Number(text) === 0) return "0.00";
  return value > 0 ? `+${text}` : text.replace("-", "−");
}

export function exactNumber(value) {
  return value.toFixed(3).replace("-", "−");
}

/** A list that the address holds as JSON; what cannot be read is an empty one. */
export function listIn(state, name) {
  try {
    const list = JSON.parse(state.get(name, "[]"));
    return Array.isArray(list) ? list : [];
  } catch {
    return [];
  }
}

/** A context for pictures that go before the view does: `end()` takes away what they listen to. */
export function innerContext(context) {
  const ending = new AbortController();
  return {
    context: { ...context, signal: AbortSignal.any([context.signal, ending.signal]) },
    end: () => ending.abort(),
  };
}

/** A heat map that announces its cells, and listens for as long as its context lasts. */
export function mapIn(context, options) {
  const map = heatMap({ announce: context.announce, ...options });
  context.signal.addEventListener("abort", () => map.remove());
  return map;
}

export function extentOf(values) {
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value));
  return most || 1;
}

export function normOf(values) {
  let sum = 0;
  for (const value of values) sum += value * value;
  return Math.sqrt(sum);
}

/**
 * Bars in a figure, a row a number: `rows` are [{label, value, was, error, said, out, act}] where `was` is what to
 * compare with (a thin second bar), `error` half an error bar, `said` the number in words, `out` a row that is struck
 * out and `act` what happens when its label is pressed. `columns` name the table's columns after the label's.
 */
export function barFigure(context, { title, note, rows, columns, cells, name, key = [] }) {
  const low = Math.min(0, ...rows.map((row) => row.value - (row.error ?? 0)));
  const high = Math.max(...rows.map((row) => Math.max(row.value + (row.error ?? 0), row.was ?? 0)), low + 1e-9, 0);
  const at = (value) => (value - low) / (high - low);
  const list = el(
    "ol",
    { class: "bar-list" },
    rows.map((row) => barRow(row, at)),
  );
  const colours = key.length
    ? el(
        "p",
        { class: "bar-key quiet" },
        key.map(([kind, text]) => el("span", { class: `key-${kind}`, text })),
      )
    : null;
  return figure(context, {
    title,
    note,
    name,
    legend: colours,
    picture: list,
    table: () => ({ caption: title, columns, rows: rows.map(cells) }),
    svg: () => barDocument(title, rows, at, key),
  });
}

function barRow(row, at) {
  const room = el("span", { class: "bar-room", aria: { hidden: "true" } });
  const lay = (kind, from, to) => {
    const bar = el("span", { class: kind });
    bar.style.left = `${100 * Math.min(at(from), at(to))}%`;
    bar.style.width = `${100 * Math.abs(at(to) - at(from))}%`;
    room.append(bar);
  };
  lay(row.value < 0 ? "bar-now bar-against" : "bar-now", 0, row.value);
  if (row.was !== undefined) lay("bar-was", 0, row.was);
  if (row.error) lay("bar-error", row.value - row.error, row.value + row.error);
  lay("bar-zero", 0, 0);
  const name = row.act
    ? button(row.label, row.act, { class: "bar-name", aria: { label: row.actName ?? row.label } })
    : el("span", { class: "bar-name", text: row.label });
  name.dir = direction(row.label);
  return el(
    "li",
    { class: row.out ? "bar-line out" : "bar-line", data: { label: row.label, value: row.value } },
    name,
    room,
    el("span", { class: "bar-said num", text: row.said }),
  );
}

/** The same bars as an SVG file, with what the two kinds of bars are below them. */
function barDocument(title, rows, at, key) {
  const { ink, quiet, card } = svgPalette();
  const [left, wide, line, top] = [160, 360, 28, 66];
  const [width, height] = [left + wide + 190, top + rows.length * line + (key.length ? 48 : 20)];
  const parts = svgCard(width, height, title);
  const bar = (from, to, y, tall, fill) => {
    const [a, b] = [at(Math.min(from, to)), at(Math.max(from, to))];
    return svgRect(left + wide * a, y, wide * (b - a), tall, { rx: Math.min(2, tall / 2), fill });
  };
  rows.forEach((row, i) => {
    const y = top + i * line;
    parts.push(svgText(left - 10, y + 13, row.label, { fill: ink, "font-size": 13, "text-anchor": "end" }));
    parts.push(bar(0, row.value, y + 2, 12, signedColour(row.value < 0 ? -1 : 1)));
    if (row.was !== undefined) parts.push(bar(0, row.was, y + 16, 4, quiet));
    if (row.error) parts.push(...[[6, card], [2, ink]].map(([tall, fill]) =>
      bar(row.value - row.error, row.value + row.error, y + 8 - tall / 2, tall, fill)));
    parts.push(svgText(left + wide + 10, y + 13, row.said, { fill: quiet, "font-size": 12 }));
  });
  key.forEach(([kind, text], i) => {
    const [x, y] = [left + 180 * i, top + rows.length * line + 16];
    parts.push(svgRect(x, y - (kind === "was" ? 6 : 9), 18, kind === "was" ? 4 : 10, { rx: 2, fill: kind === "was" ? quiet : signedColour(1) }));
    parts.push(svgText(x + 26, y, text, { fill: quiet, "font-size": 12 }));
  });
  return svgDocument(width, height, title, parts);
}

/** Cards of two lines each, several in a row, as an SVG file. */
export function cardPicture(title, cards) {
  const { ink, quiet, edge } = svgPalette();
  const [across, down, perLine] = [92, 58, 9];
  const width = 56 + across * Math.min(perLine, Math.max(cards.length, 4));
  const height = 84 + down * Math.ceil(cards.length / perLine);
  const parts = svgCard(width, height, title);
  cards.forEach(([first, second], i) => {
    const [x, y] = [28 + across * (i % perLine), 62 + down * Math.floor(i / perLine)];
    const middle = { "text-anchor": "middle" };
    parts.push(
      svgRect(x, y, across - 8, down - 8, { rx: 6, fill: "none", stroke: edge }),
      svgText(x + across / 2 - 4, y + 22, first, { ...middle, fill: ink, "font-size": 14 }),
      svgText(x + across / 2 - 4, y + 40, second, { ...middle, fill: quiet, "font-size": 12 }),
    );
  });
  return svgDocument(width, height, title, parts);
}

/** Numbers as coloured pixels, a row of the picture for each row of the tensor. */
export function pixels(values, rows, columns, extent = extentOf(values)) {
  const canvas = el("canvas", { class: "pixels", width: columns, height: rows, aria: { hidden: "true" } });
  const ink = canvas.getContext("2d");
  const image = ink.createImageData(columns, rows);
  for (let i = 0; i < values.length; i++) image.data.set([...signedRgb(values[i] / extent), 255], 4 * i);
  ink.putImageData(image, 0, 0);
  return canvas;
}

/**
 * A tensor [R, C] as a strip of colours with its name and shape; a click opens it with every number.
 * `tensor` is {name, rows: [label], values: Float32Array, columns: C, column(c) -> label, about}.
 */
export function tensorStrip(context, tensor, shown = tensor) {
  const shape = tensor.rows.length === 1 ? `${tensor.columns}` : `${tensor.rows.length} × ${tensor.columns}`;
  const open = el("button", {
    class: "tensor",
    type: "button",
    aria: { haspopup: "dialog" },
    on: { click: () => openTensor(context, tensor) },
  });
  open.append(
    el("span", { class: "tensor-name", text: tensor.name }),
    el("span", { class: "tensor-shape num", text: `${shape} · length ${exactNumber(normOf(shown.values))}` }),
    pixels(shown.values, shown.rows.length, shown.columns),
  );
  return open;
}

const TENSOR_COLUMNS = 64; // features shown at once; a wider tensor has pages

/** A tensor with all its numbers, on top of the page until it is closed. */
function openTensor(context, tensor) {
  const { text, extent } = numberFacts(tensor.values);
  openPages(context, {
    name: tensor.name,
    facts: `${tensor.rows.length} × ${tensor.columns}: ${text}`,
    pages: Math.ceil(tensor.columns / TENSOR_COLUMNS),
    turns: ["Earlier features", "Later features"],
    page: (n, inner) => tensorFigure(inner, tensor, n * TENSOR_COLUMNS, extent),
  });
}

/** Pages of numbers in a dialog; `page(n, context)` makes one, `turns` are the names of the ways to the next. */
export function openPages(outer, { name, facts, pages, turns, page: make }) {
  const { context, end } = innerContext(outer);
  const dialog = el("dialog", { class: "tensor-dialog", aria: { label: `Tensor: ${name}` } });
  const back = document.activeElement;
  const body = el("div");
  let page = 0;

  function turn(by) {
    page = (page + by + pages) % pages;
    clear(body).append(make(page, context));
  }

  const close = () => dialog.close();
  dialog.append(
    el(
      "div",
      { class: "stack" },
      el(
        "div",
        { class: "row" },
        el("h3", { class: "tensor-title", text: name }),
        pages > 1 ? button(turns[0], () => turn(-1)) : null,
        pages > 1 ? button(turns[1], () => turn(1)) : null,
        button("Close", close),
      ),
      el("p", { class: "quiet num", text: facts }),
      body,
    ),
  );
  dialog.addEventListener("close", () => {
    end();
    dialog.remove();
    if (back && back.isConnected) back.focus();
  });
  outer.signal.addEventListener("abort", close);
  document.body.append(dialog);
  dialog.showModal();
  turn(0);
}

/** Some columns of a tensor, from this one on. */
function tensorFigure(context, tensor, from, extent) {
  const to = Math.min(tensor.columns, from + TENSOR_COLUMNS);
  const values = new Float32Array(tensor.rows.length * (to - from));
  tensor.rows.forEach((_, r) => {
    values.set(tensor.values.subarray(r * tensor.columns + from, r * tensor.columns + to), r * (to - from));
  });
  const columns = Array.from({ length: to - from }, (_, c) => tensor.column(from + c));
  const map = mapIn(context, {
    rows: tensor.rows,
    columns,
    values,
    colours: "signed",
    extent,
    digits: 3,
    maxCell: 22,
    legend: "value",
    name: tensor.name,
    corner: "feature →",
    label: (r, c, value) => `${tensor.rows[r]}, feature ${columns[c]}: ${exactNumber(value)}`,
  });
  return figure(context, {
    title:
      to - from < tensor.columns ? `Features ${from} to ${to - 1} of ${tensor.columns}` : `${tensor.columns} features`,
    note: tensor.about,
    picture: map.element,
    legend: legend({ scale: "signed", label: "value", low: signedNumber(-extent), high: signedNumber(extent) }),
    table: () => map.table(),
    svg: () => map.svg(tensor.name),
    name: "tensor",
  });
}

/** How many numbers there are, from where to where, and their mean. */
export function numberFacts(values) {
  let low = Infinity;
  let high = -Infinity;
  let sum = 0;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
    sum += value;
  }
  const mean = sum / values.length;
  return {
    extent: Math.max(Math.abs(low), Math.abs(high)) || 1,
    text: `${values.length.toLocaleString("en")} numbers, from ${exactNumber(low)} to ${exactNumber(high)}, mean ${exactNumber(mean)}`,
  };
}
