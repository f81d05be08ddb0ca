// Attention drawn over an input that is no text: an image, a recording, an episode, a graph.

import { choice, clear, el } from "../dom.js";
import { PART_NAMES, PART_ORDER, attentions, chosenHead, entryWeights, headOptions, mapTitle, meanEntry } from "../attention_map.js";
import { shareBar } from "../bars.js";
import { colour } from "../colours.js";
import { PICTURED, axisArrays, drawElements, elementParts, elementPicture, unitLabels, unitName, unitsOf } from "../element_picture.js";
import { figure, legend } from "../figure.js";
import { shortNumber, topIndices } from "../numbers.js";
import { anyOf } from "../state.js";
import { svgCard, svgDocument, svgGroup } from "../svg.js";
import { tokenStrip } from "../token_strip.js";
import { wordGroups, wordLabels } from "../tokens.js";

const MAX_BARS = 6;
const MAX_ROWS = 40; // of a recording

/** Whether attention can be drawn over the input of a trace. */
const entriesOver = (header) => header.attention.filter((entry) => PICTURED.includes(header.axes[entry.keys].kind));

export const overlay = {
  id: "overlay",
  title: "On the input",
  about: "Attention drawn over the input. Click a part of the input to see what it attends to.",
  lacking: "The input of this model is a text: see the other views.",
  optional: true, // left out of the navigation where it does not apply
  needs: (header) => header !== null && entriesOver(header).length > 0,
  async render(root, context) {
    const view = overlayView(root, context);
    await view.draw();
    context.state.subscribe((changed) => {
      if (anyOf(changed, "part", "layer", "head", "at")) view.draw().catch(context.failed);
    });
  },
};

/** The attention that the address names: its part, layer (or the mean, or rollout) and head. */
function chosenAttention(header, state) {
  const parts = PART_ORDER.filter((part) => entriesOver(header).some((entry) => entry.part === part));
  const part = parts.includes(state.get("part")) ? state.get("part") : parts.at(-1); // cross-attention, if there is any
  const entries = attentions(header, part);
  const rollout = header.rollout?.find((entry) => entry.part === part) ?? null;
  const wanted = state.get("layer", "mean");
  const single = entries.find((entry) => String(entry.layer) === wanted);
  if (wanted === "rollout" && rollout) return { parts, part, entries, rollout, entry: rollout, head: 0 };
  const entry = single ?? (entries.length > 1 ? meanEntry(header, part) : entries[0]);
  return { parts, part, entries, rollout, entry, head: chosenHead(header, entry, state.get("head", "mean")) };
}

function titleOf({ part, entries, entry, head }) {
  if (entry.layer !== "rollout") return mapTitle(entry, head);
  return `${PART_NAMES[part]}, rollout through ${entries.length} layer${entries.length > 1 ? "s" : ""}`;
}

/** The weights [rows, columns] between groups of elements: columns are summed, rows averaged where predictions are made. */
function merged(values, scale, count, rowGroups, columnGroups, elements) {
  const weights = new Float32Array(rowGroups.length * columnGroups.length);
  rowGroups.forEach((group, r) => {
    const reading = group.filter((i) => elements[i].predicts !== false);
    const rows = reading.length ? reading : group;
    columnGroups.forEach((columns, c) => {
      let sum = 0;
      for (const row of rows) for (const column of columns) sum += values[row * count + column];
      weights[r * columnGroups.length + c] = (sum * scale) / rows.length;
    });
  });
  return weights;
}

function overlayView(root, context) {
  const { trace, state, announce } = context;
  const { header } = trace;
  const controls = el("div");
  const strip = el("div", { class: "overlay-strip" });
  const bars = el("div", { class: "top-weights" });
  const advice = el("p", { class: "hint" }, "To hide a part of the input, see ", context.viewLink("changes", "Interventions"), ".");
  const scaleBox = el("div");
  const picture = elementPicture({ label: "The input, under attention weights; arrow keys move, Enter selects", onPick: pick, announce });
  let [box, draws, drawing, shown] = [null, 0, null, null];

  /** Selects the row of a query ("r3") or the column of a key ("c3"); the same again selects nothing. */
  const select = (at) => state.set({ at: state.get("at") === at ? null : at });

  function pick(i) {
    select(shown.isSelf ? `r${i}` : `c${i}`);
  }

  async function draw() {
    const mine = ++draws;
    const chosen = chosenAttention(header, state);
    const { entry, head } = chosen;
    const [queryAxis, keyAxis] = [header.axes[entry.queries], header.axes[entry.keys]];
    const [{ values, scale }, arrays, ctc] = await Promise.all([entryWeights(trace, entry, head), axisArrays(trace, keyAxis), readCtc(trace)]);
    if (mine !== draws) return;
    const isSelf = entry.queries === entry.keys;
    const units = unitsOf(keyAxis);
    const rowGroups = isSelf ? units : wordGroups(queryAxis.elements);
    const rows = isSelf ? unitLabels(keyAxis, units) : wordLabels(queryAxis.elements, rowGroups);
    const columns = unitLabels(keyAxis, units);
    const count = keyAxis.elements.length;
    const weights = merged(values, scale, count, rowGroups, units, queryAxis.elements);
    const predicting = queryAxis.elements.map((_, i) => i).filter((i) => isSelf && queryAxis.elements[i].predicts !== false);
    const whole = isSelf ? [predicting] : [queryAxis.elements.map((_, i) => i)];
    const mean = merged(values, scale, count, whole, units, queryAxis.elements);
    shown = { isSelf, rows, columns, weights, mean, keyAxis, units };
    const [, side, number] = /^([rc])(\d+)$/.exec(state.get("at")) ?? [];
    const last = keyAxis.kind === "steps" ? { side: "r", i: rows.length - 1 } : null; // the last decision
    const at = side && Number(number) < (side === "r" ? rows : columns).length ? { side, i: Number(number) } : last;
    clear(controls).append(attentionControls(chosen));
    showPicture(at, arrays, ctc, titleOf(chosen));
    showStrip(at);
    showBars(at);
  }

  function attentionControls({ parts, part, entries, rollout, entry, head }) {
    const layers = entries.map(({ layer }) => [String(layer), `Layer ${layer + 1}`]);
    if (layers.length > 1) layers.unshift(["mean", `Mean of ${layers.length} layers`]);
    if (rollout) layers.push(["rollout", "Rollout through all layers"]);
    const names = parts.map((one) => [one, PART_NAMES[one]]);
    return el(
      "div",
      { class: "controls" },
      choice("Attention", names, part, (value) => state.set({ part: value, layer: null, head: null, at: null })),
      choice("Layer", layers, String(entry.layer), (layer) => state.set({ layer })),
      entry.layer === "rollout" ? null : choice("Head", headOptions(entry), String(head), (value) => state.set({ head: value })),
    );
  }

  const rowOf = (r) => shown.weights.subarray(r * shown.columns.length, (r + 1) * shown.columns.length);
  const columnOf = (c) => Float32Array.from(shown.rows, (_, r) => shown.weights[r * shown.columns.length + c]);

  function showPicture(at, arrays, ctc, title) {
    const { isSelf, rows, columns, mean, keyAxis, units } = shown;
    const weights = at?.side === "r" ? rowOf(at.i) : mean;
    const isTime = keyAxis.kind === "frames";
    const many = isTime && !isSelf ? rows.slice(0, MAX_ROWS).map((label, r) => ({ label, weights: rowOf(r), selected: at?.side === "r" && at.i === r })) : [];
    const lines = isTime ? (many.length ? many : [{ label: "weight", weights, selected: false }]) : [];
    const all = keyAxis.kind === "nodes" ? shown.weights : many.length ? many.flatMap((one) => [...one.weights]) : weights;
    const node = at?.side === "r" ? at.i : (keyAxis.focus ?? -1);
    const seen = keyAxis.kind === "nodes" && node >= 0 ? rowOf(node) : all;
    const extent = seen.reduce((most, weight) => Math.max(most, weight), 0) || 1;
    const what = (i) => `${unitName(keyAxis, columns[i])}: ${weights[i].toFixed(3)}`;
    drawing = {
      axis: keyAxis,
      arrays,
      units,
      weights,
      matrix: keyAxis.kind === "nodes" ? shown.weights : null,
      rows: lines,
      ctc: isTime ? ctc : null,
      tokens: header.axes.target.elements.map((token) => token.label),
      extent,
      selected: at && (isSelf || at.side === "c") ? at.i : -1,
      describe: what,
    };
    picture.show(drawing);
    const width = `The half of an edge next to a node is as wide as its attention to the other; the widest is ${shortNumber(extent)}.`;
    const key = keyAxis.kind === "nodes" ? el("p", { class: "hint", text: width }) : null;
    clear(scaleBox).append(key ?? legend({ label: "attention weight", high: shortNumber(extent) }));
    const whose = at?.side === "r" ? `what ${isSelf ? unitName(keyAxis, rows[at.i]) : `“${rows[at.i]}”`} attends to` : isSelf && header.axes.target.elements.length === 1 ? "the attention of the position that the prediction is read from" : "mean over the output";
    if (!box) {
      box = figure(context, {
        title,
        picture: picture.element,
        legend: scaleBox,
        name: "overlay",
        table: () => ({ columns: ["part of the input", "attention weight"], rows: shown.columns.map((label, i) => [label, Number(drawing.weights[i].toFixed(4))]) }),
        svg: () => exported(box.querySelector("h3").textContent),
      });
      const aside = el("section", { class: "card stack", aria: { label: "Selected part" } }, strip, bars, advice);
      root.append(controls, el("div", { class: "beside" }, box, aside));
    }
    box.retitle(title[0].toUpperCase() + title.slice(1), `Shown: ${whose}.`);
    box.refresh();
  }

  function exported(title) {
    const drawn = drawElements(drawing);
    const [width, height] = [Math.max(drawn.width + 56, 420), drawn.height + 94];
    const parts = svgGroup({ transform: "translate(28 66)" }, elementParts(drawn));
    return svgDocument(width, height, title, [...svgCard(width, height, title), parts]);
  }

  /** The tokens of the output, of which one can be chosen; pointing at the input shades them. */
  function showStrip(at) {
    clear(strip);
    if (shown.isSelf) return;
    const describe = (r) => `${shown.rows[r]} attends most to ${topIndices(rowOf(r), 3).map((i) => shown.columns[i]).join(", ")}`;
    const line = tokenStrip({ label: "Output", tokens: shown.rows, announce, describe, onPick: (r) => select(`r${r}`) });
    if (at?.side === "r") line.mark(at.i);
    if (at?.side === "c") {
      const column = columnOf(at.i);
      const most = Math.max(...column) || 1;
      line.shade(column.map((weight) => weight / most));
    }
    strip.append(el("p", { class: "hint", text: "Click a word to see what it attends to, or a part of the input to see which words attend to it." }), line.element);
  }

  function showBars(at) {
    const { isSelf, rows, columns, keyAxis } = shown;
    const byColumn = at?.side === "c";
    const weights = byColumn ? columnOf(at.i) : at ? rowOf(at.i) : shown.mean;
    const labels = byColumn ? rows : columns;
    const title = byColumn
      ? `${unitName(keyAxis, columns[at.i])} is attended to by`
      : at
        ? `${isSelf ? unitName(keyAxis, rows[at.i]) : rows[at.i]} attends to`
        : "Greatest weights";
    const most = Math.max(...weights) || 1;
    const lines = topIndices(weights, MAX_BARS).map((i) =>
      el("li", {}, el("bdi", { class: "top-weights-name", text: labels[i] }), shareBar(Math.max(weights[i] / most, 0.005), colour(weights[i] / most)), el("span", { class: "num", text: weights[i].toFixed(2) })),
    );
    clear(bars).append(el("p", { class: "top-weights-title", text: title }), el("ol", {}, lines));
    if (at) announce(`${title} ${topIndices(weights, 3).map((i) => `${labels[i]} ${weights[i].toFixed(2)}`).join(", ")}`);
  }

  return { draw };
}

/** CTC's probabilities, with the frames where tokens begin; null where a model has none. */
async function readCtc(trace) {
  const about = trace.header.ctc;
  if (!about) return null;
  const tensor = await trace.array(about.array);
  return { shape: tensor.shape, raw: tensor.raw, scale: tensor.scale, starts: about.starts };
}
