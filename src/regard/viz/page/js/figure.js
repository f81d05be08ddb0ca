// Every picture stands in a figure: a title, a legend, its twin as a table, and a way to save it.

import { clear, el } from "./dom.js";
import { SCALES } from "./colours.js";
import { direction } from "./tokens.js";

const LEGEND_STEPS = 32;

/** What the colours of a scale stand for; with `gold` also the outlines, with `masked` the hatched cells. */
export function legend({ scale = "weight", label, low = "0", high = "1", gold = false, masked = false }) {
  const bar = el("canvas", { class: "legend-bar", width: LEGEND_STEPS, height: 1, aria: { hidden: "true" } });
  const paint = bar.getContext("2d");
  const { colour, low: from, high: to } = SCALES[scale];
  for (let i = 0; i < LEGEND_STEPS; i++) {
    paint.fillStyle = colour(from + ((to - from) * i) / (LEGEND_STEPS - 1));
    paint.fillRect(i, 0, 1, 1);
  }
  const said = el("span", { class: "legend-label", text: label });
  const swatch = (kind, text) => el("span", { class: `legend-${kind}` }, el("i"), text);
  const marks = { gold: swatch("gold", "gold alignment"), masked: swatch("masked", "masked: may not be seen") };
  const key = el(
    "div",
    { class: "legend" },
    el("span", { class: "num", text: low }),
    bar,
    el("span", { class: "num", text: high }),
    said,
    marks.gold,
    marks.masked,
  );
  key.show = (shown) => Object.entries(shown).forEach(([kind, on]) => (marks[kind].hidden = !on));
  key.show({ gold, masked });
  return key;
}

function isNumeric(cell) {
  return typeof cell === "number" || /^[−+-]?[\d.]+$/.test(cell);
}

/** A table of a picture's numbers; the first cell of a row is its heading. */
export function tableOf({ caption, columns, rows }) {
  const heading = (text, scope) => el("th", { scope, dir: direction(String(text)), text });
  const head = el(
    "tr",
    {},
    columns.map((column) => heading(column, "col")),
  );
  const body = rows.map(([first, ...rest]) =>
    el(
      "tr",
      {},
      heading(first, "row"),
      rest.map((cell) => el("td", { class: isNumeric(cell) ? "num" : null, text: cell })),
    ),
  );
  const table = el(
    "table",
    {},
    caption ? el("caption", { text: caption }) : null,
    el("thead", {}, head),
    el("tbody", {}, body),
  );
  return el("div", { class: "table-room", tabIndex: 0, role: "region", aria: { label: caption ?? "table" } }, table);
}

/** Of what a picture is, in lines: model and weights, what is shown, the texts. */
export function captionLines({ model, request, text, changes }, title = "") {
  const at = model.step === null ? "" : `step ${model.step}`;
  const weights = request.step === null ? `best${at && ` (${at})`}` : `step ${request.step}`;
  const quoted = (name, words) => (words.trim() ? `${name}: “${words.trim()}”` : "");
  const texts = [quoted("Text", text.source), quoted("Output", text.target)].filter(Boolean).join("  ");
  const changed = changes?.length ? `, with ${changes.length} change${changes.length > 1 ? "s" : ""}` : "";
  return [`Model: ${model.name} (${model.family}), weights: ${weights}${changed}`, title, texts].filter(Boolean);
}

/**
 * The figure of one picture; it shows the table instead while the page's switch says so. `trace` is what it shows, for
 * the caption of a saved file; null: no model's.
 */
export function figure(context, { title, note, picture, legend: key, table, svg, name, trace = context.trace }) {
  const twin = el("div", { class: "twin" });
  const room = el("div", { class: "picture" }, picture);
  const heading = el("h3", { text: title });
  const said = el("p", { class: "quiet", text: note ?? "", hidden: !note });
  const caption = () => (trace ? captionLines(trace.header, heading.textContent) : []);
  const box = el("figure", { class: "card figure" }, el("figcaption", {}, heading, said), room, twin, key ?? null);

  function refresh() {
    const asTable = context.state.get("table") === "1";
    room.hidden = asTable;
    if (key) key.hidden = asTable;
    clear(twin);
    if (asTable) {
      const { caption, ...rest } = table();
      twin.append(tableOf({ caption: caption ?? heading.textContent, ...rest }));
    }
  }

  box.refresh = refresh;
  box.retitle = (text, noted) => {
    heading.textContent = text;
    if (noted !== undefined) {
      said.textContent = noted;
      said.hidden = !noted;
    }
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
