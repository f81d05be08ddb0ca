// Tensors: a strip of colours that opens to show every number.
import { button, clear, el } from "./dom.js";
import { pixelColours } from "./colours.js";
import { innerContext, mapFigure, mapIn, signedLegend } from "./figure.js";
import { exactNumber, extentOf, summary } from "./numbers.js";
import { drawPixels } from "./pixels.js";

const TENSOR_COLUMNS = 64; // features on one page

/** Values as coloured pixels, [rows, columns]. */
function pixels(values, rows, columns) {
  const [extent, colourOf] = [extentOf(values), pixelColours("signed")];
  const canvas = el("canvas", { class: "pixels", aria: { hidden: "true" } });
  return drawPixels(canvas, rows, columns, (i) => colourOf(values[i] / extent));
}

/**
 * A tensor [R, C] as a strip of colours with its name and shape; a click opens a dialog with every number.
 * `tensor` is {name, rows: [label], values: Float32Array, columns: C, about}; `shown` is the part in the strip.
 */
export function tensorStrip(context, tensor, shown = tensor) {
  const shape = tensor.rows.length === 1 ? `${tensor.columns}` : `${tensor.rows.length} × ${tensor.columns}`;
  const props = { class: "tensor", aria: { haspopup: "dialog" } };
  const strip = button("", () => openTensor(context, tensor), props);
  strip.append(
    el("span", { class: "tensor-name", text: tensor.name }),
    el("span", { class: "tensor-shape num", text: `${shape} · norm ${exactNumber(Math.hypot(...shown.values))}` }),
    pixels(shown.values, shown.rows.length, shown.columns),
  );
  return strip;
}

/** A tensor with all its numbers, in a dialog. */
function openTensor(context, tensor) {
  const extent = extentOf(tensor.values);
  openPages(context, {
    name: tensor.name,
    facts: `${tensor.rows.length} × ${tensor.columns}: ${summary(tensor.values)}`,
    pages: Math.ceil(tensor.columns / TENSOR_COLUMNS),
    turns: ["Previous features", "Next features"],
    page: (n, inner) => tensorFigure(inner, tensor, n * TENSOR_COLUMNS, extent),
  });
}

/** A dialog with pages of numbers; `page(n, context)` makes one, `turns` label the two buttons that change it. */
export function openPages(outer, { name, facts, pages, turns, page: make }) {
  const { context, end } = innerContext(outer);
  const dialog = el("dialog", { class: "tensor-dialog", aria: { label: `Tensor: ${name}` } });
  const opener = document.activeElement;
  const body = el("div");
  let page = 0;

  function turn(by) {
    page = (page + by + pages) % pages;
    clear(body).append(make(page, context));
  }

  const close = () => dialog.close();
  const turning = pages > 1 ? [button(turns[0], () => turn(-1)), button(turns[1], () => turn(1))] : [];
  const head = el("div", { class: "row" }, el("h3", { class: "tensor-title", text: name }), turning, button("Close", close));
  dialog.append(el("div", { class: "stack" }, head, el("p", { class: "quiet num", text: facts }), body));
  dialog.addEventListener("close", () => {
    end();
    dialog.remove();
    if (opener?.isConnected) opener.focus();
  });
  outer.signal.addEventListener("abort", close);
  document.body.append(dialog);
  dialog.showModal();
  turn(0);
}

/** One page of a tensor's columns. */
function tensorFigure(context, tensor, from, extent) {
  const to = Math.min(tensor.columns, from + TENSOR_COLUMNS);
  const values = new Float32Array(tensor.rows.length * (to - from));
  tensor.rows.forEach((_, r) => {
    values.set(tensor.values.subarray(r * tensor.columns + from, r * tensor.columns + to), r * (to - from));
  });
  const columns = Array.from({ length: to - from }, (_, c) => String(from + c));
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
  const all = to - from === tensor.columns;
  return mapFigure(context, map, {
    title: all ? `${tensor.columns} features` : `Features ${from} to ${to - 1} of ${tensor.columns}`,
    note: tensor.about,
    legend: signedLegend("value", extent),
    svgTitle: () => tensor.name,
    name: "tensor",
  });
}
