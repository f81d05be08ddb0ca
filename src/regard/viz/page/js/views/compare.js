// Side by side: the same input in several runs, or at several snapshots of one run, with linked cursors.

import { button, choice, clear, el, field, segmented, select, slider } from "../dom.js";
import { alignmentError, attentions, chosenEntry, chosenHead, goldCells, hasCross } from "../attention_map.js";
import { headOptions, layerOptions, readMap, weightOptions } from "../attention_map.js";
import { legend, mapFigure } from "../figure.js";
import { heatMap } from "../heatmap.js";
import { shortNumber } from "../numbers.js";
import { anyOf } from "../state.js";
import { drawThumbnail } from "../pixels.js";
import { direction, sides } from "../tokens.js";

const MAX_PANES = 4;
const FRAME_PAUSE = 900; // milliseconds between two snapshots while they play

export const compare = {
  id: "compare",
  title: "Side by side",
  about: "The same input in several models, or at several snapshots of one training run. Cursors are linked by word.",
  lacking: "These models have no attention to compare.",
  needs: (header) => header !== null && header.attention.length > 0,
  async render(root, context) {
    const panes = paneRow(context);
    const snapshots = snapshotPlayer(context);
    root.append(panes.element, snapshots.element);
    context.state.subscribe((changed) => {
      if (anyOf(changed, "with", "same", "words")) panes.draw().catch(context.failed);
      if (anyOf(changed, "snap", "words")) snapshots.follow().catch(context.failed);
    });
    await Promise.all([panes.draw(), snapshots.draw()]);
    return () => {
      panes.remove();
      snapshots.remove();
    };
  },
};

/** The part whose maps are compared: cross-attention where there is one, else self-attention. */
function comparedPart(header) {
  return hasCross(header) ? "cross" : attentions(header, "decoder").length ? "decoder" : "encoder";
}

/** The output that other models are forced to generate; null for tasks that generate no text. */
function forcedTarget(header) {
  return header.model.output === "sequence" ? header.text.target : null;
}

/** The field's head, by default the best-aligned one (or the mean without a gold alignment). */
function headOrBest(header, entry, head) {
  return chosenHead(header, entry, head || (header.gold?.aer?.[entry.name] ? "best" : "mean"));
}

function errorText(header, entry, head) {
  const error = alignmentError(header, entry, head);
  return error === undefined ? "" : `; alignment error rate ${error.toFixed(1)}`;
}

// ---- panes: the field `with` is a list of [run, step or null, layer, head]

function defaultPanes({ runs, run, request }) {
  const own = [run.id, request.step];
  const other = runs.find((one) => one.id !== run.id && one.task === run.task);
  if (other) return [own, [other.id, null]];
  const early = (run.snapshots ?? []).find((step) => step !== request.step && step !== run.step);
  return early === undefined ? [own] : [[run.id, early], own];
}

function readPanes(context) {
  try {
    const known = new Set(context.runs.map((run) => run.id));
    const panes = JSON.parse(context.state.get("with", "null"))?.filter(([id]) => known.has(id));
    if (panes?.length) return panes.slice(0, MAX_PANES);
  } catch {
    // A truncated link: use the defaults.
  }
  return defaultPanes(context);
}

function paneRow(context) {
  const { state } = context;
  const columns = el("div", { class: "columns" });
  const tools = el("div", { class: "controls" });
  const element = el("div", { class: "stack" }, tools, columns);
  let panes = []; // {map, shown, trace, entry, head}
  let draws = 0;

  const write = (choices) => state.set({ with: JSON.stringify(choices) });

  function link(from, point) {
    for (const other of panes) {
      if (other !== from) other.map.mark(point ? sameWords(from, other, point) : null);
    }
  }

  async function tracesOf(choices) {
    const ask = ([run, step], target) =>
      context.source.trace({ run, step: step ?? null, text: context.request.text, target, changes: [] });
    const first = await ask(choices[0], null);
    const target = state.get("same") === "1" ? forcedTarget(first.header) : null;
    return [first, ...(await Promise.all(choices.slice(1).map((pane) => ask(pane, target))))];
  }

  async function draw() {
    const mine = ++draws;
    const choices = readPanes(context);
    const traces = await tracesOf(choices);
    const read = await Promise.all(traces.map((trace, i) => readPane(trace, choices[i], state.get("words") === "1")));
    if (mine !== draws) return;
    const focus = element.contains(document.activeElement) ? document.activeElement.id : "";
    remove();
    buildTools(choices);
    panes = read;
    clear(columns).append(...panes.map((pane, i) => paneFigure(pane, choices, i)));
    if (focus) document.getElementById(focus)?.focus();
  }

  async function readPane(trace, [, , layer, head], words) {
    const { header } = trace;
    const entry = chosenEntry(header, comparedPart(header), layer ?? "");
    if (!entry) throw new Error(`${header.model.name} has no attention to compare.`);
    const chosen = headOrBest(header, entry, head);
    return { trace, entry, head: chosen, shown: await readMap(trace, entry, chosen, words) };
  }

  function buildTools(choices) {
    const outputs = [["0", "Each model's own"], ["1", "The first model's for all"]];
    const units = [["0", "Subwords"], ["1", "Words"]];
    clear(tools).append(
      segmented("Output", outputs, state.get("same", "0"), (same) => state.set({ same })),
      segmented("Tokens", units, state.get("words", "0"), (words) => state.set({ words })),
      choices.length < MAX_PANES
        ? button("Add a model", () => write([...choices, choices.at(-1).slice(0, 2)]), { id: "pane-add" })
        : "",
    );
  }

  function paneFigure(pane, choices, i) {
    const { entry, head, shown } = pane;
    const { header } = pane.trace;
    const [id, step = null] = choices[i];
    const run = context.runs.find((one) => one.id === id);
    const set = (...values) => write(choices.map((one, k) => (k === i ? values : one))); // drops what depends on them
    const list = (label, name, options, value, onChange) =>
      choice(label, options, value, onChange, { id: `pane-${i}-${name}` });
    const models = context.runs.map((one) => [one.id, one.name]);
    const steps = weightOptions([null, ...(run.snapshots ?? [])]);
    const remove = { class: "plain remove", aria: { label: `Remove ${run.name}, model ${i + 1}` } };
    const controls = el(
      "div",
      { class: "controls pane-controls" },
      field("Model", select(models, id, (value) => set(value), { id: `pane-${i}-run` })),
      steps.length > 2
        ? list("Weights", "step", steps, step ?? "", (value) => set(id, value === "" ? null : Number(value)))
        : null,
      list("Layer", "layer", layerOptions(header, entry.part), entry.layer, (value) => set(id, step, Number(value))),
      list("Head", "head", headOptions(entry), head, (value) => set(id, step, entry.layer, value)),
      choices.length > 1 ? button("✕", () => write(choices.filter((_, k) => k !== i)), remove) : null,
    );
    const name = `${run.name}${header.model.step === null ? "" : `, step ${header.model.step}`}: ${shown.title}`;
    pane.map = heatMap({
      ...shown,
      outlines: goldCells(header, entry, shown),
      name,
      announce: context.announce,
      onFocus: (point) => link(pane, point),
    });
    const score = Number.isFinite(header.text.score) ? `; score ${shortNumber(header.text.score)}` : "";
    const box = mapFigure(context, pane.map, {
      title: run.name,
      note: `${shown.title}${score}${errorText(header, entry, head)}`,
      legend: legend({ label: "attention weight", gold: header.gold !== null, masked: Boolean(shown.masked) }),
      trace: pane.trace,
      name: "side-by-side",
      svgTitle: () => name,
    });
    const output = el("p", { class: "pane-output", dir: direction(header.text.target), text: header.text.target });
    box.querySelector("figcaption").append(output);
    box.prepend(controls);
    return box;
  }

  function remove() {
    for (const { map } of panes) map?.remove();
    panes = [];
  }

  return { element, draw, remove };
}

/** The cell of another map with the same words; models may tokenize, and translate, differently. */
function sameWords(from, other, { r, c }) {
  const find = (i, fromTokens, fromGroups, tokens, groups) => {
    if (i < 0) return -1;
    const token = fromTokens[fromGroups[i][0]];
    const match = (candidate) =>
      token.special ? candidate.special && candidate.id === token.id : !candidate.special && candidate.group === token.group;
    const nth = fromGroups.slice(0, i).filter((group) => match(fromTokens[group[0]])).length;
    const matches = groups.flatMap((group, k) => (match(tokens[group[0]]) ? [k] : []));
    return matches[Math.min(nth, matches.length - 1)] ?? -1;
  };
  const [a, b] = [sides(from.trace.header, from.entry), sides(other.trace.header, other.entry)];
  const cell = {
    r: find(r, a.queries, from.shown.queryGroups, b.queries, other.shown.queryGroups),
    c: find(c, a.keys, from.shown.keyGroups, b.keys, other.shown.keyGroups),
  };
  return cell.r < 0 && cell.c < 0 ? null : cell;
}

// ---- snapshots: attention during training

function snapshotPlayer(context) {
  const { run, trace, state, source, signal } = context;
  const steps = source.live
    ? (run.snapshots ?? [])
    : (run.snapshots ?? []).filter((step) => source.requests.some((one) => one.run === run.id && one.step === step));
  const element = el("section", { class: "stack", aria: { label: "Attention during training" } });
  if (steps.length < 2) return { element, draw: async () => {}, follow: async () => {}, remove: () => {} };

  const { header } = trace;
  const entry = chosenEntry(header, comparedPart(header), state.get("layer"));
  const head = headOrBest(header, entry, state.get("head"));
  const frames = el("div", { class: "frames" });
  let map = null;
  let box = null;
  let playing = 0;

  const at = () => {
    const chosen = steps.indexOf(Number(state.get("snap")));
    return chosen < 0 ? steps.length - 1 : chosen;
  };
  const title = () => `Attention during training: step ${steps[at()]}`;
  const control = slider(
    "Training step",
    { min: 0, max: steps.length - 1, value: at(), format: (i) => String(steps[i]) },
    (i) => state.set({ snap: steps[i] }),
  );
  const play = button("Play", () => (playing ? stop() : start()), { class: "main" });

  function start() {
    play.textContent = "Stop";
    if (at() === steps.length - 1) state.set({ snap: steps[0] });
    playing = setInterval(() => {
      state.set({ snap: steps[at() + 1] });
      if (at() === steps.length - 1) stop();
    }, FRAME_PAUSE);
  }

  function stop() {
    clearInterval(playing);
    playing = 0;
    play.textContent = "Play";
  }

  async function readSnapshot(step) {
    const request = { run: run.id, step, text: context.request.text, changes: [] };
    // All snapshots are forced to the same output, so that the axes stay the same.
    const snapshot = await source.trace({ ...request, target: forcedTarget(header) });
    const same = snapshot.header.attention.find((one) => one.name === entry.name) ?? entry;
    return { snapshot, shown: await readMap(snapshot, same, head, state.get("words") === "1") };
  }

  async function follow() {
    const i = at();
    const { snapshot, shown } = await readSnapshot(steps[i]);
    if (signal.aborted || i !== at()) return;
    control.show(i);
    const outlines = goldCells(snapshot.header, entry, shown);
    const settings = { ...shown, outlines, name: `${run.name} at step ${steps[i]}: ${shown.title}` };
    if (map) map.update(settings);
    else map = heatMap({ ...settings, announce: context.announce });
    const forced = "All snapshots are forced to the same output, so that only the attention differs.";
    box?.retitle(title(), `${shown.title}${errorText(snapshot.header, entry, head)}. ${forced}`);
    box?.refresh();
    [...frames.children].forEach((frame, k) => frame.setAttribute("aria-pressed", String(k === i)));
  }

  async function draw() {
    await follow();
    box = mapFigure(context, map, {
      title: title(),
      legend: legend({ label: "attention weight", gold: header.gold !== null, masked: header.masks?.[entry.mask] }),
      name: "snapshots",
      svgTitle: () => `${run.name}, step ${steps[at()]}`,
    });
    const asideProps = { class: "card stack", aria: { label: "Snapshots" } };
    const aside = el("section", asideProps, control, el("div", { class: "row" }, play), frames);
    element.append(el("div", { class: "beside" }, box, aside));
    for (const step of steps) {
      const props = { class: "thumb", aria: { label: `step ${step}`, pressed: "false" } };
      const frame = button("", () => state.set({ snap: step }), props);
      frame.append(el("canvas", { width: 1, height: 1 }), el("span", { class: "num frame-step", text: step }));
      frames.append(frame);
    }
    await follow();
    drawFrames().catch(context.failed);
  }

  /** Draws the thumbnails one after another, after the large map. */
  async function drawFrames() {
    for (const [i, step] of steps.entries()) {
      const { rows, columns, values, scale, masked } = (await readSnapshot(step)).shown;
      if (signal.aborted) return;
      drawThumbnail(frames.children[i].firstChild, values, scale, rows.length, columns.length, masked);
    }
  }

  return {
    element,
    draw,
    follow,
    remove() {
      stop();
      map?.remove();
    },
  };
}
