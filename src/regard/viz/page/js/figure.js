// Figures: every picture has a title, a legend, a table of the same numbers, and can be exported.

import { clear, el } from "./dom.js";
import { SCALES } from "./colours.js";
import { heatMap } from "./heatmap.js";
import { plural, signedNumber } from "./numbers.js";
import { direction } from "./tokens.js";

const LEGEND_STEPS = 32;
export const CAUTION = "Attention weights show where a model looked; they do not by themselves explain its output.";

/** A colour bar with its label; `gold` adds a key for outlined cells, `masked` one for hatched cells. */
export function legend({ scale = "weight", label, low = "0", high = "1", gold = false, masked = false }) {
  const bar = el("canvas", { class: "legend-bar", width: LEGEND_STEPS, height: 1, aria: { hidden: "true" } });
  const paint = bar.getContext("2d");
  const { colour, low: from, high: to } = SCALES[scale];
  for (let i = 0; i < LEGEND_STEPS; i++) {
    paint.fillStyle = colour(from + ((to - from) * i) / (LEGEND_STEPS - 1));
    paint.fillRect(i, 0, 1, 1);
  }
  const swatch = (kind, text) => el("span", { class: `legend-${kind}` }, el("i"), text);
  const swatches = { gold: swatch("gold", "gold alignment"), masked: swatch("masked", "masked") };
  const number = (text) => el("span", { class: "num", text });
  const key = el("div", { class: "legend" }, number(low), bar, number(high), el("span", { text: label }));
  key.append(swatches.gold, swatches.masked);
  key.show = (shown) => Object.entries(shown).forEach(([kind, on]) => (swatches[kind].hidden = !on));
  key.show({ gold, masked });
  return key;
}

/** The colour bar of values between -extent and +extent. */
export function signedLegend(label, extent) {
  return legend({ scale: "signed", label, low: signedNumber(-extent), high: signedNumber(extent) });
}

function isNumeric(cell) {
  return typeof cell === "number" || /^[−+-]?[\d.]+$/.test(cell);
}

/** A table of a picture's numbers; the first cell of a row is its heading. */
export function tableOf({ caption, columns, rows }) {
  const heading = (text, scope) => el("th", { scope, dir: direction(String(text)), text });
  const value = (text) => el("td", { class: isNumeric(text) ? "num" : null, text });
  const head = el("tr", {}, columns.map((column) => heading(column, "col")));
  const body = rows.map(([first, ...rest]) => el("tr", {}, heading(first, "row"), rest.map(value)));
  const title = caption ? el("caption", { text: caption }) : null;
  const table = el("table", {}, title, el("thead", {}, head), el("tbody", {}, body));
  return el("div", { class: "table-box", tabIndex: 0, role: "region", aria: { label: caption ?? "table" } }, table);
}

/** The caption of a picture, as lines: model and weights, title, input and output. */
export function captionLines({ model, request, text, changes }, title = "") {
  const at = model.step === null ? "" : `step ${model.step}`;
  const weights = request.step === null ? `best${at && ` (${at})`}` : `step ${request.step}`;
  const quoted = (name, words) => (words.trim() ? `${name}: “${words.trim()}”` : "");
  const texts = [quoted("Text", text.source), quoted("Output", text.target)].filter(Boolean).join("  ");
  const changed = changes?.length ? `, with ${plural(changes.length, "intervention")}` : "";
  return [`Model: ${model.name} (${model.family}), weights: ${weights}${changed}`, title, texts].filter(Boolean);
}

/**
 * A figure that shows its picture, or its table while the page is set to tables. `trace` gives the caption of an
 * exported file; null for a picture that belongs to no model.
 */
export function figure(context, { title, note, picture, legend: key, table, svg, name, trace = context.trace }) {
  const tableView = el("div", { class: "figure-table" });
  const pictureView = el("div", { class: "picture" }, picture);
  const heading = el("h3", { text: title });
  const noteLine = el("p", { class: "quiet", text: note ?? "", hidden: !note });
  const caption = () => (trace ? captionLines(trace.header, heading.textContent) : []);
  const box = el("figure", { class: "card figure" }, el("figcaption", {}, heading, noteLine), pictureView);
  box.append(tableView, key ?? "");

  function refresh() {
    const asTable = context.state.get("table") === "1";
    pictureView.hidden = asTable;
    if (key) key.hidden = asTable;
    clear(tableView);
    if (asTable) {
      const { caption, ...rest } = table();
      tableView.append(tableOf({ caption: caption ?? heading.textContent, ...rest }));
    }
  }

  box.refresh = refresh;
  box.retitle = (newTitle, newNote) => {
    heading.textContent = newTitle;
    if (newNote === undefined) return;
    noteLine.textContent = newNote;
    noteLine.hidden = !newNote;
  };
  box.exported = { name: name ?? "picture", title: () => heading.textContent, svg, caption };
  const stop = context.state.subscribe((changed) => changed.has("table") && refresh());
  context.signal.addEventListener("abort", () => {
    stop();
    context.figures.delete(box);
  });
  context.figures.add(box);
  refresh();
  return box;
}

/** A figure of a heat map; `svgTitle()` is the title of the exported file. */
export function mapFigure(context, map, { svgTitle, ...options }) {
  return figure(context, { picture: map.element, table: map.table, svg: () => map.svg(svgTitle()), ...options });
}

/** A context for pictures that are replaced while their view stays: `end()` removes their listeners. */
export function innerContext(context) {
  const ending = new AbortController();
  return {
    context: { ...context, signal: AbortSignal.any([context.signal, ending.signal]) },
    end: () => ending.abort(),
  };
}

/** A heat map that announces its cells, and is removed when its context ends. */
export function mapIn(context, options) {
  const map = heatMap({ announce: context.announce, ...options });
  context.signal.addEventListener("abort", () => map.remove());
  return map;
}
