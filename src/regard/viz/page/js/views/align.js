// Alignment: where each word of the output looked in the source.

import { clear, el, field, select, toggle } from "../dom.js";
import { colour } from "../colours.js";
import { figure, legend } from "../figure.js";
import { heatMap } from "../heatmap.js";
import { attentions, chosenEntry, chosenHead, goldCells, hasCross, meanEntry, readMap } from "../maps.js";
import { isolated } from "../tokens.js";
import { tokenStrip } from "../strip.js";

const LOOKS = 5; // how many places of a row are named

export const align = {
  id: "align",
  title: "Alignment",
  about: "Each row is a token of the output; its colours say where in the source it looked while it was written.",
  lacking: "This model has no attention from an output to a source, so there is no alignment to show.",
  needs: hasCross,
  async render(root, context) {
    const room = alignRoom(root, context);
    await room.draw();
    context.state.subscribe((changed) => {
      if (["layer", "head", "words", "gold"].some((name) => changed.has(name))) room.draw().catch(context.failed);
    });
    return room.remove;
  },
};

/** The settings above the map; they write to the address, and the map follows the address. */
function alignControls(header, state, entry, head) {
  const layers = attentions(header, "cross").map(({ layer }) => [String(layer), `Layer ${layer + 1}`]);
  if (layers.length > 1) layers.unshift(["mean", `Mean of ${layers.length} layers`]);
  const errors = header.gold?.aer?.[entry.name];
  const heads = Array.from({ length: entry.heads }, (_, h) => [String(h), `Head ${h + 1}`]);
  if (entry.heads > 1) heads.unshift(["mean", `Mean of ${entry.heads} heads`]);
  if (entry.heads > 1 && errors) heads.splice(1, 0, ["best", "Best-aligned head"]);
  const chosen = state.get("head") === "best" && errors ? "best" : String(head);
  return el(
    "div",
    { class: "controls" },
    layers.length > 1
      ? field(
          "Layer",
          select(layers, String(entry.layer), (layer) => state.set({ layer })),
        )
      : null,
    heads.length > 1
      ? field(
          "Head",
          select(heads, chosen, (value) => state.set({ head: value })),
        )
      : null,
    toggle("Merge pieces into words", state.get("words") === "1", (on) => state.set({ words: on ? "1" : null })),
    header.gold
      ? toggle("Gold alignment", state.get("gold", "1") === "1", (on) => state.set({ gold: on ? "1" : "0" }))
      : null,
  );
}

function alignRoom(root, context) {
  const { trace, state, announce } = context;
  const { header } = trace;
  const controls = el("div");
  const pair = el("div", { class: "pair" });
  const bars = el("div", { class: "looks" });
  const caution = el(
    "p",
    { class: "hint" },
    "Attention is where the model looked, not by itself why it said what it said. ",
    "To measure which words mattered, see ",
    context.viewLink("explain", "Explain"),
    ".",
  );
  const key = legend({ label: "attention weight" });
  let map = null;
  let box = null;
  let asked = 0;

  async function draw() {
    const mine = ++asked;
    const layer = state.get("layer");
    const several = attentions(header, "cross").length > 1;
    const entry = layer === "mean" && several ? meanEntry(header, "cross") : chosenEntry(header, "cross", layer);
    const head = chosenHead(header, entry, state.get("head", "mean"));
    const seen = await readMap(trace, entry, head, state.get("words") === "1");
    if (mine !== asked) return;
    const kept = document.activeElement?.closest?.(".controls") === controls.firstChild ? focusedLabel(controls) : null;
    clear(controls).append(alignControls(header, state, entry, head));
    if (kept !== null) [...controls.querySelectorAll("select, input")][kept]?.focus();
    const gold = header.gold && state.get("gold", "1") === "1" ? goldCells(header, entry, seen) : [];
    key.show({ gold: gold.length > 0, masked: Boolean(seen.masked) });
    const linked = linkedPair(seen);
    const settings = {
      rows: seen.rows,
      columns: seen.columns,
      values: seen.values,
      scale: seen.scale,
      outlines: gold,
      masked: seen.masked,
      name: `${seen.title}: output tokens look at source tokens`,
      onFocus: linked.follow,
      rowLabel: (r) => linked.describeRow(r),
      columnLabel: (c) => linked.describeColumn(c),
    };
    const title = seen.title[0].toUpperCase() + seen.title.slice(1);
    if (map) map.update(settings);
    else {
      map = heatMap({ ...settings, announce, maxCell: 56 });
      box = figure(context, {
        title,
        picture: map.element,
        legend: key,
        name: "alignment",
        table: () => map.table(),
        svg: () => map.svg(`${header.text.source} → ${header.text.target}`),
      });
      const aside = el("section", { class: "card stack", aria: { label: "Where a word looks" } }, pair, bars, caution);
      root.append(controls, el("div", { class: "beside" }, box, aside));
    }
    box.retitle(title, errorSaid(header, entry, head));
    box.refresh();
  }

  /** The two sentences above the map; pointing at a token of either shades the other. */
  function linkedPair(seen) {
    const weight = (r, c) => seen.values[r * seen.columns.length + c] * seen.scale;
    const rowOf = (r) => seen.columns.map((_, c) => weight(r, c));
    const columnOf = (c) => seen.rows.map((_, r) => weight(r, c));
    const top = (weights, labels) =>
      weights
        .map((w, i) => [w, labels[i]])
        .sort((a, b) => b[0] - a[0])
        .slice(0, 3)
        .map(([w, label]) => `${isolated(label)} ${w.toFixed(2)}`)
        .join(", ");
    const describeRow = (r) => `${isolated(seen.rows[r])} looks at ${top(rowOf(r), seen.columns)}`;
    const describeColumn = (c) => `${isolated(seen.columns[c])} is looked at by ${top(columnOf(c), seen.rows)}`;

    function follow(point) {
      const [r, c] = [point?.r ?? -1, point?.c ?? -1];
      if (r >= 0) showLooks(bars, `${isolated(seen.rows[r])} looks at`, rowOf(r), seen.columns);
      else if (c >= 0) showLooks(bars, `${isolated(seen.columns[c])} is looked at by`, columnOf(c), seen.rows);
      else
        clear(bars).append(el("p", { class: "hint", text: "Point at a word, or walk the map with the arrow keys." }));
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

    const from = tokenStrip({
      label: "Source",
      tokens: seen.columns,
      announce,
      describe: describeColumn,
      onPoint: (c) => pointAt(-1, c ?? -1),
      onPick: (c) => pointAt(-1, c),
    });
    const target = tokenStrip({
      label: "Output",
      tokens: seen.rows,
      announce,
      describe: describeRow,
      onPoint: (r) => pointAt(r ?? -1, -1),
      onPick: (r) => pointAt(r, -1),
    });
    const line = (name, strip) =>
      el("div", { class: "pair-line" }, el("span", { class: "pair-name quiet", text: name }), strip.element);
    clear(pair).append(line("Source", from), line("Output", target));
    follow(null);
    return { follow, describeRow, describeColumn };
  }

  return { draw, remove: () => map?.remove() };
}

/** The strongest places of one row or column, as bars in the colours of the map. */
function showLooks(room, title, weights, labels) {
  const order = weights
    .map((_, i) => i)
    .sort((a, b) => weights[b] - weights[a])
    .slice(0, LOOKS);
  const lines = order.map((i) => {
    const bar = el("span", { class: "look-bar" });
    bar.style.width = `${Math.max(weights[i] * 100, 0.5)}%`;
    bar.style.background = colour(weights[i]);
    return el(
      "li",
      {},
      el("bdi", { class: "look-name", text: labels[i] }),
      el("span", { class: "look-room" }, bar),
      el("span", { class: "num", text: weights[i].toFixed(2) }),
    );
  });
  clear(room).append(el("p", { class: "look-title", text: title }), el("ol", {}, lines));
}

/** Which of the controls has the focus, so that it keeps it when they are built again. */
function focusedLabel(controls) {
  const place = [...controls.querySelectorAll("select, input")].indexOf(document.activeElement);
  return place < 0 ? null : place;
}

function errorSaid(header, entry, head) {
  const mean = entry.entries ? header.gold?.all : header.gold?.mean?.[entry.name];
  const error = head === "mean" ? mean : header.gold?.aer?.[entry.name]?.[head];
  if (error === undefined || error === null) return "";
  return `Alignment error rate on this sentence: ${error.toFixed(1)} (0 is perfect, 100 is all wrong).`;
}
