// Side by side: several runs, or several moments of one run, on the same input, with linked cursors.

import { shortNumber } from "../chart.js";
import { button, clear, el, field, segmented, select, slider } from "../dom.js";
import { figure, legend } from "../figure.js";
import { heatMap } from "../heatmap.js";
import { attentions, chosenEntry, chosenHead, goldCells, hasCross, readMap } from "../maps.js";
import { drawThumb } from "../thumb.js";
import { direction, sides } from "../tokens.js";

const MOST_PANES = 4;
const FRAME_PAUSE = 900; // milliseconds between two snapshots while they play

export const compare = {
  id: "compare",
  title: "Side by side",
  about: "The same input in several models, or at several moments of one model's training. Cursors are linked by word.",
  lacking: "These models have no attention to compare.",
  needs: (header) => header !== null && header.attention.length > 0,
  async render(root, context) {
    const panes = paneRow(context);
    const film = formingAttention(context);
    root.append(panes.element, film.element);
    context.state.subscribe((changed) => {
      if (["with", "same", "words"].some((name) => changed.has(name))) panes.draw().catch(context.failed);
      if (["snap", "words"].some((name) => changed.has(name))) film.follow().catch(context.failed);
    });
    await Promise.all([panes.draw(), film.draw()]);
    return () => {
      panes.remove();
      film.remove();
    };
  },
};

/** The part whose maps are compared: across two texts where there are two, else within the one. */
function comparedPart(header) {
  return hasCross(header) ? "cross" : attentions(header, "decoder").length ? "decoder" : "encoder";
}

/** The output that other models are made to write; those that guess gaps or classes write nothing. */
function forcedTarget(header) {
  return ["translate", "generate"].includes(header.model.task) ? header.text.target : null;
}

// ---- panes: `with` in the address is a list of [run, step or null, layer, head]

function startingPanes({ runs, run, request }) {
  const others = runs.filter((one) => one.id !== run.id && one.task === run.task);
  if (others.length)
    return [
      [run.id, request.step],
      [others[0].id, null],
    ];
  const early = (run.snapshots ?? []).find((step) => step !== request.step && step !== run.step);
  return early === undefined
    ? [[run.id, request.step]]
    : [
        [run.id, early],
        [run.id, request.step],
      ];
}

function readPanes(context) {
  try {
    const known = new Set(context.runs.map((run) => run.id));
    const panes = JSON.parse(context.state.get("with", "null"))?.filter(([id]) => known.has(id));
    if (panes?.length) return panes.slice(0, MOST_PANES);
  } catch {
    // A link cut short on its way: begin as if it said nothing.
  }
  return startingPanes(context);
}

function paneRow(context) {
  const { state } = context;
  const room = el("div", { class: "columns" });
  const tools = el("div", { class: "controls" });
  const element = el("div", { class: "stack" }, tools, room);
  let maps = []; // {map, seen, trace, entry}
  let asked = 0;

  const write = (panes) => state.set({ with: JSON.stringify(panes) });

  function link(from, point) {
    for (const other of maps) {
      if (other === from) continue;
      other.map.mark(point ? sameWords(from, other, point) : null);
    }
  }

  async function tracesOf(panes) {
    const ask = ([run, step], target) =>
      context.source.trace({ run, step: step ?? null, text: context.request.text, target, changes: [] });
    const first = await ask(panes[0], null);
    const target = state.get("same") === "1" ? forcedTarget(first.header) : null;
    return [first, ...(await Promise.all(panes.slice(1).map((pane) => ask(pane, target))))];
  }

  async function draw() {
    const mine = ++asked;
    const panes = readPanes(context);
    const found = await tracesOf(panes);
    const seen = await Promise.all(found.map((trace, i) => paneMap(trace, panes[i], state.get("words") === "1")));
    if (mine !== asked) return;
    const focus = element.contains(document.activeElement) ? document.activeElement.id : "";
    remove();
    buildTools(panes);
    clear(room);
    maps = seen.map((one) => ({ ...one }));
    maps.forEach((one, i) => room.append(pane(one, panes, i)));
    if (focus) document.getElementById(focus)?.focus();
  }

  async function paneMap(trace, [, , layer, head], words) {
    const { header } = trace;
    const entry = chosenEntry(header, comparedPart(header), layer ?? "");
    if (!entry) throw new Error(`${header.model.name} has no attention to compare.`);
    const which = chosenHead(header, entry, head ?? (header.gold?.aer?.[entry.name] ? "best" : "mean"));
    return { trace, entry, head: which, seen: await readMap(trace, entry, which, words) };
  }

  function buildTools(panes) {
    clear(tools).append(
      segmented(
        "Output",
        [
          ["0", "Each model's own"],
          ["1", "The first one's for all"],
        ],
        state.get("same", "0"),
        (same) => state.set({ same }),
      ),
      segmented(
        "Tokens",
        [
          ["0", "Pieces"],
          ["1", "Words"],
        ],
        state.get("words", "0"),
        (words) => state.set({ words }),
      ),
      panes.length < MOST_PANES
        ? button("Add a model", () => write([...panes, panes.at(-1).slice(0, 2)]), { id: "pane-add" })
        : "",
    );
  }

  function pane(one, panes, i) {
    const { header } = one.trace;
    const run = context.runs.find(({ id }) => id === panes[i][0]);
    const change = (place, value) => {
      const changed = panes.map((kept) => [...kept]);
      changed[i][place] = value;
      changed[i].length = place + 1; // what hangs on a choice falls with it
      write(changed);
    };
    const steps = [["", "best"], ...(run.snapshots ?? []).map((step) => [String(step), `step ${step}`])];
    const layers = attentions(header, one.entry.part).map(({ layer }) => [String(layer), `Layer ${layer + 1}`]);
    const headList = Array.from({ length: one.entry.heads }, (_, h) => [String(h), `Head ${h + 1}`]);
    if (one.entry.heads > 1) headList.unshift(["mean", "Mean of heads"]);
    const controls = el(
      "div",
      { class: "controls pane-controls" },
      field(
        "Model",
        select(
          context.runs.map(({ id, name }) => [id, name]),
          run.id,
          (id) => change(0, id),
          { id: `pane-${i}-run` },
        ),
      ),
      steps.length > 2
        ? field(
            "Weights",
            select(steps, panes[i][1] ?? "", (step) => change(1, step === "" ? null : Number(step)), {
              id: `pane-${i}-step`,
            }),
          )
        : null,
      layers.length > 1
        ? field(
            "Layer",
            select(layers, one.entry.layer, (layer) => setMap(layer, undefined), { id: `pane-${i}-layer` }),
          )
        : null,
      headList.length > 1
        ? field(
            "Head",
            select(headList, one.head, (head) => setMap(one.entry.layer, head), { id: `pane-${i}-head` }),
          )
        : null,
      panes.length > 1
        ? button("✕", () => write(panes.filter((_, k) => k !== i)), {
            class: "plain remove",
            aria: { label: `Remove ${run.name}, model ${i + 1}` },
          })
        : null,
    );
    function setMap(layer, head) {
      const changed = panes.map((kept) => [...kept]);
      changed[i] = [run.id, panes[i][1] ?? null, Number(layer), ...(head === undefined ? [] : [head])];
      write(changed);
    }
    const name = `${run.name}${header.model.step === null ? "" : `, step ${header.model.step}`}: ${one.seen.title}`;
    one.map = heatMap({
      rows: one.seen.rows,
      columns: one.seen.columns,
      values: one.seen.values,
      scale: one.seen.scale,
      outlines: goldCells(header, one.entry, one.seen),
      masked: one.seen.masked,
      name,
      announce: context.announce,
      onFocus: (point) => link(one, point),
    });
    const box = figure(context, {
      title: run.name,
      note: paneNote(one),
      picture: one.map.element,
      legend: legend({ label: "attention weight", gold: header.gold !== null, masked: Boolean(one.seen.masked) }),
      trace: one.trace,
      name: "side-by-side",
      table: () => one.map.table(),
      svg: () => one.map.svg(name),
    });
    box
      .querySelector("figcaption")
      .append(el("p", { class: "pane-said", dir: direction(header.text.target), text: header.text.target }));
    box.prepend(controls);
    return box;
  }

  function remove() {
    for (const { map } of maps) map?.remove();
    maps = [];
  }

  return { element, draw, remove };
}

function paneNote({ trace: { header }, entry, head, seen }) {
  const error = head === "mean" ? header.gold?.mean?.[entry.name] : header.gold?.aer?.[entry.name]?.[head];
  const score = Number.isFinite(header.text.score) ? `; score ${shortNumber(header.text.score)}` : "";
  return `${seen.title}${score}${error === undefined ? "" : `; alignment error rate ${error.toFixed(1)}`}`;
}

/** The cell of another map that stands for the same words: models may cut words, and translate, differently. */
function sameWords(from, other, { r, c }) {
  const find = (i, fromTokens, fromGroups, tokens, groups) => {
    if (i < 0) return -1;
    const token = fromTokens[fromGroups[i][0]];
    const match = (candidate) =>
      token.mark ? candidate.mark && candidate.id === token.id : !candidate.mark && candidate.word === token.word;
    const nth = fromGroups.slice(0, i).filter((group) => match(fromTokens[group[0]])).length;
    const found = groups.flatMap((group, k) => (match(tokens[group[0]]) ? [k] : []));
    return found[Math.min(nth, found.length - 1)] ?? -1;
  };
  const [a, b] = [sides(from.trace.header, from.entry), sides(other.trace.header, other.entry)];
  const place = {
    r: find(r, a.queries, from.seen.queryGroups, b.queries, other.seen.queryGroups),
    c: find(c, a.keys, from.seen.keyGroups, b.keys, other.seen.keyGroups),
  };
  return place.r < 0 && place.c < 0 ? null : place;
}

// ---- snapshots: how attention formed

function formingAttention(context) {
  const { run, trace, state, source, signal } = context;
  const steps = source.live
    ? (run.snapshots ?? [])
    : (run.snapshots ?? []).filter((step) => source.requests.some((one) => one.run === run.id && one.step === step));
  const element = el("section", { class: "stack", aria: { label: "How attention formed" } });
  if (steps.length < 2) return { element, draw: async () => {}, follow: async () => {}, remove: () => {} };

  const { header } = trace;
  const entry = chosenEntry(header, comparedPart(header), state.get("layer"));
  const head = chosenHead(header, entry, state.get("head") || (header.gold?.aer?.[entry.name] ? "best" : "mean"));
  const strip = el("div", { class: "film" });
  let map = null;
  let box = null;
  let playing = 0;

  const at = () => {
    const chosen = steps.indexOf(Number(state.get("snap")));
    return chosen < 0 ? steps.length - 1 : chosen;
  };
  // Every snapshot is made to write the same output, so that the axes stay where they are.
  const traceAt = (step) =>
    source.trace({ run: run.id, step, text: context.request.text, target: forcedTarget(header), changes: [] });
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

  async function seenAt(step) {
    const snapshot = await traceAt(step);
    const same = snapshot.header.attention.find((one) => one.name === entry.name) ?? entry;
    return { snapshot, seen: await readMap(snapshot, same, head, state.get("words") === "1") };
  }

  async function follow() {
    const i = at();
    const { snapshot, seen } = await seenAt(steps[i]);
    if (signal.aborted || i !== at()) return;
    control.show(i);
    const settings = {
      rows: seen.rows,
      columns: seen.columns,
      values: seen.values,
      scale: seen.scale,
      outlines: goldCells(snapshot.header, entry, seen),
      masked: seen.masked,
      name: `${run.name} at step ${steps[i]}: ${seen.title}`,
    };
    if (map) map.update(settings);
    else map = heatMap({ ...settings, announce: context.announce });
    box?.retitle(`How attention formed: step ${steps[i]}`, formedNote(snapshot.header, entry, head, seen));
    box?.refresh();
    [...strip.children].forEach((frame, k) => frame.setAttribute("aria-pressed", String(k === i)));
  }

  async function draw() {
    await follow();
    box = figure(context, {
      title: `How attention formed: step ${steps[at()]}`,
      picture: map.element,
      legend: legend({ label: "attention weight", gold: header.gold !== null, masked: header.masks?.[entry.mask] }),
      name: "forming",
      table: () => map.table(),
      svg: () => map.svg(`${run.name}, step ${steps[at()]}`),
    });
    const aside = el(
      "section",
      { class: "card stack", aria: { label: "Snapshots" } },
      control,
      el("div", { class: "row" }, play),
      strip,
    );
    element.append(el("div", { class: "beside" }, box, aside));
    steps.forEach((step) => {
      const canvas = el("canvas", { width: 1, height: 1 });
      strip.append(
        button("", () => state.set({ snap: step }), {
          class: "thumb",
          aria: { label: `step ${step}`, pressed: "false" },
        }),
      );
      strip.lastChild.append(canvas, el("span", { class: "num frame-step", text: step }));
    });
    await follow();
    fillStrip().catch(context.failed);
  }

  /** The small pictures come one after another, behind the large one. */
  async function fillStrip() {
    for (const [i, step] of steps.entries()) {
      const { seen } = await seenAt(step);
      if (signal.aborted) return;
      drawThumb(strip.children[i].firstChild, seen.values, seen.scale, seen.rows.length, seen.columns.length, seen.masked);
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

function formedNote(header, entry, head, seen) {
  const error = head === "mean" ? header.gold?.mean?.[entry.name] : header.gold?.aer?.[entry.name]?.[head];
  const said = error === undefined ? "" : `; alignment error rate ${error.toFixed(1)}`;
  return `${seen.title}${said}. Every snapshot writes the same output here, so that only the attention changes.`;
}
