// Alignment: the cross-attention of each output token.

import { choice, clear, el, toggle } from "../dom.js";
import { alignmentError, attentions, chosenEntry, chosenHead, goldCells, hasCross } from "../attention_map.js";
import { headOptions, layerOptions, meanEntry, readMap } from "../attention_map.js";
import { shareBar } from "../bars.js";
import { colour } from "../colours.js";
import { legend, mapFigure } from "../figure.js";
import { heatMap } from "../heatmap.js";
import { topIndices } from "../numbers.js";
import { anyOf } from "../state.js";
import { tokenStrip } from "../token_strip.js";
import { isolated } from "../tokens.js";

const MAX_BARS = 5;

export const align = {
  id: "align",
  title: "Alignment",
  about: "Each row is an output token; the colours show which source tokens it attended to when it was generated.",
  lacking: "This model has no cross-attention, so there is no alignment to show.",
  needs: hasCross,
  async render(root, context) {
    const view = alignmentView(root, context);
    await view.draw();
    context.state.subscribe((changed) => {
      if (anyOf(changed, "layer", "head", "words", "gold")) view.draw().catch(context.failed);
    });
    return view.remove;
  },
};

/** The controls above the map; they change the address, and the map follows it. */
function alignmentControls(header, state, entry, head) {
  const layers = layerOptions(header, "cross");
  if (layers.length > 1) layers.unshift(["mean", `Mean of ${layers.length} layers`]);
  const hasErrors = Boolean(header.gold?.aer?.[entry.name]);
  const heads = headOptions(entry);
  if (heads.length > 1 && hasErrors) heads.splice(1, 0, ["best", "Best-aligned head"]);
  const chosen = state.get("head") === "best" && hasErrors ? "best" : String(head);
  return el(
    "div",
    { class: "controls" },
    choice("Layer", layers, String(entry.layer), (layer) => state.set({ layer })),
    choice("Head", heads, chosen, (value) => state.set({ head: value })),
    toggle("Merge subwords into words", state.get("words") === "1", (on) => state.set({ words: on ? "1" : null })),
    header.gold
      ? toggle("Gold alignment", state.get("gold", "1") === "1", (on) => state.set({ gold: on ? "1" : "0" }))
      : null,
  );
}

function alignmentView(root, context) {
  const { trace, state, announce } = context;
  const { header } = trace;
  const controls = el("div");
  const pair = el("div", { class: "pair" });
  const bars = el("div", { class: "top-weights" });
  const key = legend({ label: "attention weight" });
  let map = null;
  let box = null;
  let draws = 0;

  async function draw() {
    const mine = ++draws;
    const layer = state.get("layer");
    const several = attentions(header, "cross").length > 1;
    const entry = layer === "mean" && several ? meanEntry(header, "cross") : chosenEntry(header, "cross", layer);
    const head = chosenHead(header, entry, state.get("head", "mean"));
    const shown = await readMap(trace, entry, head, state.get("words") === "1");
    if (mine !== draws) return;
    const focused = [...controls.querySelectorAll("select, input")].indexOf(document.activeElement);
    clear(controls).append(alignmentControls(header, state, entry, head));
    if (focused >= 0) controls.querySelectorAll("select, input")[focused]?.focus();
    const gold = header.gold && state.get("gold", "1") === "1" ? goldCells(header, entry, shown) : [];
    key.show({ gold: gold.length > 0, masked: Boolean(shown.masked) });
    const linked = linkedPair(shown);
    const settings = {
      ...shown,
      outlines: gold,
      name: `${shown.title}: output tokens attend to source tokens`,
      onFocus: linked.follow,
      rowLabel: linked.describeRow,
      columnLabel: linked.describeColumn,
    };
    const title = shown.title[0].toUpperCase() + shown.title.slice(1);
    if (map) map.update(settings);
    else {
      map = heatMap({ ...settings, announce, maxCell: 56 });
      const svgTitle = () => `${header.text.source} → ${header.text.target}`;
      box = mapFigure(context, map, { title, legend: key, name: "alignment", svgTitle });
      const aside = el("section", { class: "card stack", aria: { label: "Selected token" } }, pair, bars);
      root.append(controls, el("div", { class: "beside" }, box, aside));
    }
    box.retitle(title, errorNote(alignmentError(header, entry, head)));
    box.refresh();
  }

  /** Source and output above the map; pointing at a token of one shades the other. */
  function linkedPair({ rows, columns, values, scale }) {
    const weight = (r, c) => values[r * columns.length + c] * scale;
    const rowOf = (r) => columns.map((_, c) => weight(r, c));
    const columnOf = (c) => rows.map((_, r) => weight(r, c));
    const top = (weights, labels) =>
      topIndices(weights, 3)
        .map((i) => `${isolated(labels[i])} ${weights[i].toFixed(2)}`)
        .join(", ");
    const rowTitle = (r) => `${isolated(rows[r])} attends to`;
    const columnTitle = (c) => `${isolated(columns[c])} is attended to by`;
    const describeRow = (r) => `${rowTitle(r)} ${top(rowOf(r), columns)}`;
    const describeColumn = (c) => `${columnTitle(c)} ${top(columnOf(c), rows)}`;

    function follow(point) {
      const [r, c] = [point?.r ?? -1, point?.c ?? -1];
      if (r >= 0) showWeights(bars, rowTitle(r), rowOf(r), columns);
      else if (c >= 0) showWeights(bars, columnTitle(c), columnOf(c), rows);
      else clear(bars).append(el("p", { class: "hint", text: "Point at a token, or use the arrow keys in the map." }));
      target.mark(r);
      from.mark(c);
      from.shade(r >= 0 ? rowOf(r) : null);
      target.shade(r < 0 && c >= 0 ? columnOf(c) : null);
    }

    function pointAt(r, c) {
      const point = r < 0 && c < 0 ? null : { r, c };
      map?.mark(point);
      follow(point);
    }

    const strip = (label, tokens, describe, point) =>
      tokenStrip({ label, tokens, announce, describe, onPoint: (i) => point(i ?? -1), onPick: point });
    const from = strip("Source", columns, describeColumn, (c) => pointAt(-1, c));
    const target = strip("Output", rows, describeRow, (r) => pointAt(r, -1));
    const line = (name, { element }) =>
      el("div", { class: "pair-line" }, el("span", { class: "pair-name quiet", text: name }), element);
    clear(pair).append(line("Source", from), line("Output", target));
    follow(null);
    return { follow, describeRow, describeColumn };
  }

  return { draw, remove: () => map?.remove() };
}

/** The greatest weights of one row or column, as bars in the colours of the map. */
function showWeights(container, title, weights, labels) {
  const lines = topIndices(weights, MAX_BARS).map((i) =>
    el(
      "li",
      {},
      el("bdi", { class: "top-weights-name", text: labels[i] }),
      shareBar(Math.max(weights[i], 0.005), colour(weights[i])),
      el("span", { class: "num", text: weights[i].toFixed(2) }),
    ),
  );
  clear(container).append(el("p", { class: "top-weights-title", text: title }), el("ol", {}, lines));
}

function errorNote(error) {
  return error === undefined ? "" : `Alignment error rate on this sentence: ${error.toFixed(1)} (0 is perfect, 100 is all wrong).`;
}
