// Pictures of an input that is no text: an image, a recording, an episode, a graph. Elements can be picked.

import { colour, pixelColours } from "./colours.js";
import { el, rovingFocus } from "./dom.js";
import { drawPixels } from "./pixels.js";
import { svgElement, svgGroup, svgLine, svgPalette, svgPart, svgPath, svgRect, svgText, textWidth } from "./svg.js";
import { wordGroups } from "./tokens.js";

export const PICTURED = ["patches", "frames", "steps", "nodes"]; // kinds of axes
const IMAGE_SIDE = 300; // pixels
const TIME_WIDTH = 680; // of a recording
const SPECTROGRAM = 130; // height
const ROW = 20; // height of a row of attention over time
const READABLE = 560; // minimum width of pictures with much text; a narrower window scrolls
const FRAME = 92; // width of a frame of an episode
const FRAMES_ACROSS = 7;
const GRAPH_SIDE = 480;
const CROWDED = 30; // nodes, above which only the one in the middle has a name
const OVERLAY = 0.62; // opacity of colours over an image
const MOST = 0.85; // that of the greatest of signed numbers
const NAMES = { patches: "patch", frames: "stretch at", steps: "step", nodes: "node" };

/**
 * The parts of an axis that are picked as one, as lists of elements: the tokens of a step together, others alone.
 * Elements that are not part of the input, such as a class token, are no units.
 */
export function unitsOf(axis) {
  const groups = axis.kind === "steps" ? wordGroups(axis.elements) : axis.elements.map((_, i) => [i]);
  return groups.filter(([first]) => !axis.elements[first].special);
}

export function unitLabels(axis, units = unitsOf(axis)) {
  if (axis.kind !== "steps") return units.map(([i]) => axis.elements[i].label);
  return units.map((group) => group.map((i) => axis.elements[i].text).join("").trim());
}

/** What a unit is called in a sentence: "patch 2,3", "step 4 left". */
export const unitName = (axis, label) => `${NAMES[axis.kind]} ${label}`;

/** The arrays that the picture of an axis needs, fetched from the trace. */
export async function axisArrays(trace, axis) {
  const names = Object.entries(axis.arrays ?? {});
  return Object.fromEntries(await Promise.all(names.map(async ([name, array]) => [name, await trace.array(array)])));
}

/**
 * An image [h, w, 3] as a data address; `weights` [h * w] are laid over it in colours, where they are numbers. Of
 * signed ones (from -1 to 1), those near 0 leave the image as it is.
 */
export function imageAddress(tensor, frame = null, weights = null, colours = "weight") {
  const [height, width] = tensor.shape.slice(-3);
  const [raw, scale] = [frame === null ? tensor.raw : tensor.slice(frame), tensor.scale];
  const colourOf = pixelColours(colours);
  const byte = (share) => Math.min(Math.max(Math.round(255 * share), 0), 255);
  const pack = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  const canvas = drawPixels(document.createElement("canvas"), height, width, (i) => {
    const pixel = [raw[3 * i] * scale, raw[3 * i + 1] * scale, raw[3 * i + 2] * scale].map(byte);
    if (!weights || Number.isNaN(weights[i])) return pack(pixel);
    const grey = (pixel[0] + pixel[1] + pixel[2]) / 3;
    const over = colourOf(weights[i]);
    const opacity = colours === "signed" ? MOST * Math.min(Math.abs(weights[i]), 1) : OVERLAY;
    return pack([0, 8, 16].map((shift) => Math.round((1 - opacity) * grey + opacity * ((over >>> shift) & 255))));
  });
  return canvas.toDataURL();
}

export const picture = (x, y, width, height, href) =>
  svgPart("image", { x, y, width, height, href, preserveAspectRatio: "none", "image-rendering": "pixelated" });

/** A part that can be picked: its shape is made by `draw(look)`, with an outline if it is selected or hidden. */
function unit(state, i, children) {
  const attributes = { "data-unit": i, class: "unit", role: "button", "aria-label": state.describe(i) };
  return svgGroup({ ...attributes, "aria-pressed": String(state.selected === i || state.hidden.has(i)) }, [
    svgPart("title", {}, [state.describe(i)]),
    ...children,
  ]);
}

function outlined(state, i, x, y, width, height) {
  const { accent, quiet } = svgPalette();
  const cover = { fill: state.hidden.has(i) ? "url(#hatch)" : "transparent" };
  const line = state.selected === i ? { stroke: accent, "stroke-width": 3 } : state.hidden.has(i) ? { stroke: quiet } : {};
  return svgRect(x, y, width, height, { ...cover, ...line });
}

// ---- each kind: { width, height, parts } of a state { axis, arrays, units, weights, extent, ... }

function patches(state) {
  const { axis, arrays, units, weights } = state;
  const size = IMAGE_SIDE / Math.max(axis.width, axis.height);
  const [width, height] = [axis.width * size, axis.height * size];
  const left = weights ? width + 24 : 0; // the image itself stands on the left of the one under the weights
  const pixels = weights && new Float32Array(axis.width * axis.height).fill(NaN);
  const boxes = units.map(([i]) => axis.elements[i].box);
  if (weights) {
    boxes.forEach(([x, y, w, h], i) => {
      for (let row = y; row < y + h; row++) pixels.fill(weights[i] / state.extent, row * axis.width + x, row * axis.width + x + w);
    });
  }
  const parts = [picture(left, 0, width, height, imageAddress(arrays.image, null, pixels))];
  if (weights) parts.unshift(picture(0, 0, width, height, imageAddress(arrays.image)));
  boxes.forEach(([x, y, w, h], i) => {
    parts.push(unit(state, i, [outlined(state, i, left + x * size, y * size, w * size, h * size)]));
  });
  return { width: left + width, height, parts };
}

function frames(state) {
  const { axis, arrays, units, rows } = state;
  const { ink, quiet, accent } = svgPalette();
  const left = Math.max(40, ...rows.map(({ label }) => Math.min(textWidth(label, 12), 120))) + 12;
  const x = (seconds) => left + (TIME_WIDTH * seconds) / axis.seconds;
  const times = units.map(([i]) => axis.elements[i].time);
  const parts = [picture(left, 0, TIME_WIDTH, SPECTROGRAM, spectrogramAddress(arrays.spectrogram))];
  const note = (y, text, more = {}) => parts.push(svgText(left - 8, y, text, { fill: quiet, "font-size": 12, "text-anchor": "end", ...more }));
  note(11, `${axis.top} kHz`);
  note(SPECTROGRAM, "0");
  let y = SPECTROGRAM + 10;
  if (state.ctc) y = spikes(state, parts, y + 22, (i) => (x(times[i][0]) + x(times[i][1])) / 2, left);
  for (const { label, weights, selected } of rows) {
    note(y + 14, label, { fill: selected ? accent : ink, "font-weight": selected ? 650 : 400 });
    times.forEach(([begin, end], i) => {
      const look = { fill: colour(weights[i] / state.extent), "shape-rendering": "crispEdges" };
      parts.push(svgRect(x(begin), y, x(end) - x(begin) + 0.5, ROW, look));
    });
    if (selected) parts.push(svgRect(left, y, TIME_WIDTH, ROW, { fill: "none", stroke: accent, "stroke-width": 2 }));
    y += ROW;
  }
  times.forEach(([begin, end], i) => {
    parts.push(unit(state, i, [outlined(state, i, x(begin), 0, x(end) - x(begin), SPECTROGRAM)]));
  });
  const step = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60].find((tick) => axis.seconds / tick <= 12) ?? 60;
  for (let mark = 0; mark <= axis.seconds; mark += step) {
    parts.push(svgLine(x(mark), y + 2, x(mark), y + 7, { stroke: quiet }));
    const text = `${Number(mark.toFixed(2))}${mark + step > axis.seconds ? " s" : ""}`;
    parts.push(svgText(x(mark), y + 20, text, { fill: quiet, "font-size": 12, "text-anchor": "middle" }));
  }
  return { width: left + TIME_WIDTH + 24, height: y + 26, parts, minWidth: READABLE };
}

/** CTC's probability of the blank and of each token, as curves; returns where the next part begins. */
function spikes({ ctc, tokens }, parts, top, middle, left) {
  const { ink, quiet, accent, edge } = svgPalette();
  const [height, [, count]] = [64, ctc.shape];
  const curve = (row, from, to, look) => {
    const at = (i) => (i >= from && i < to ? ctc.raw[row * count + i] * ctc.scale : 0);
    const points = Array.from({ length: count }, (_, i) => `${middle(i).toFixed(1)} ${(top + height * (1 - at(i))).toFixed(1)}`);
    parts.push(svgPath(`M ${points.join(" L ")}`, look));
  };
  parts.push(svgRect(left, top, TIME_WIDTH, height, { fill: "none", stroke: edge }));
  parts.push(svgText(left - 8, top + 10, "CTC", { fill: quiet, "font-size": 12, "text-anchor": "end" }));
  curve(0, 0, count, { stroke: quiet, "stroke-opacity": 0.5 });
  ctc.starts.forEach((start, t) => {
    const end = ctc.starts[t + 1] ?? count;
    curve(t + 1, start, end, { stroke: accent, "stroke-width": 1.6 });
    parts.push(svgText(middle(start), top - 4, tokens[t] ?? "", { fill: ink, "font-size": 12, "text-anchor": "middle" }));
  });
  return top + height + 14;
}

/** A spectrogram [frames, bands] with time from left to right and high frequencies on top. */
function spectrogramAddress(tensor) {
  const [count, bands] = tensor.shape;
  const colourOf = pixelColours("weight");
  const canvas = drawPixels(document.createElement("canvas"), bands, count, (i) => {
    const [band, frame] = [bands - 1 - Math.floor(i / count), i % count];
    return colourOf(tensor.raw[frame * bands + band] * tensor.scale);
  });
  return canvas.toDataURL();
}

function steps(state) {
  const { axis, arrays, units, weights } = state;
  const { ink, quiet, edge } = svgPalette();
  const shape = arrays.frames?.shape;
  const tall = shape ? (FRAME * shape[1]) / shape[2] : 34;
  const [across, down] = [FRAME + 10, tall + 52];
  const parts = [];
  units.forEach((_, i) => {
    const [x, y] = [(i % FRAMES_ACROSS) * across, Math.floor(i / FRAMES_ACROSS) * down];
    const step = axis.steps[i];
    const shown = shape
      ? picture(x, y, FRAME, tall, imageAddress(arrays.frames, i))
      : svgText(x + 6, y + 21, step.state, { fill: quiet, "font-size": 11 });
    const share = weights ? weights[i] / state.extent : 0;
    parts.push(
      unit(state, i, [
        shown,
        weights ? svgRect(x, y + tall + 3, FRAME, 8, { fill: colour(share) }) : "",
        svgText(x, y + tall + 26, `step ${step.number}${weights ? `: ${weights[i].toFixed(2)}` : ""}`, { fill: ink, "font-size": 12 }),
        svgText(x, y + tall + 41, shortened(step.action, FRAME), { fill: quiet, "font-size": 12 }),
        svgRect(x, y, FRAME, tall, { fill: "none", stroke: edge }),
        outlined(state, i, x, y, FRAME, tall),
      ]),
    );
  });
  const rows = Math.ceil(units.length / FRAMES_ACROSS);
  const width = Math.min(units.length, FRAMES_ACROSS) * across;
  return { width, height: rows * down, parts, minWidth: Math.min(width, READABLE) };
}

function shortened(text, width) {
  if (textWidth(text, 12) <= width) return text;
  let kept = text;
  while (kept && textWidth(`${kept}…`, 12) > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}

function nodes(state) {
  const { axis, units, matrix } = state;
  const { ink, quiet, accent, card } = svgPalette();
  const top = Math.min(...axis.elements.map(({ at }) => at[1])); // molecules are wider than high
  const place = axis.elements.map(({ at: [x, y] }) => [30 + x * (GRAPH_SIDE - 60), 22 + (y - top) * (GRAPH_SIDE - 60)]);
  const receiver = state.selected >= 0 ? state.selected : (axis.focus ?? -1); // whose attention is shown; -1: that of all
  const names = unitLabels(axis, units);
  const between = (a, b) => (matrix ? matrix[a * units.length + b] / state.extent : 0);
  const gone = new Set(state.hiddenEdges.map((ends) => [...ends].sort((a, b) => a - b).join(":")));
  const parts = [];
  axis.edges.forEach(([a, b], n) => {
    const isGone = gone.has([a, b].sort((one, other) => one - other).join(":"));
    const [[x1, y1], [x2, y2]] = [place[a], place[b]];
    const middle = [(x1 + x2) / 2, (y1 + y2) / 2];
    const half = (from, node, other) => {
      const shown = matrix && !isGone && (receiver < 0 || node === receiver);
      const weight = shown ? between(node, other) : 0;
      return svgLine(...from, ...middle, {
        stroke: shown ? accent : quiet,
        "stroke-width": 1 + 9 * weight,
        "stroke-opacity": shown ? 0.25 + 0.75 * weight : 0.5,
        "stroke-dasharray": isGone ? "3 4" : null,
      });
    };
    const about = state.describeEdge?.(a, b);
    const pick = about && { class: "unit", role: "button", "aria-label": about, "aria-pressed": String(isGone), "data-edge": n };
    const wide = svgLine(x1, y1, x2, y2, { stroke: "transparent", "stroke-width": 12 });
    parts.push(svgGroup(pick || {}, [svgPart("title", {}, [about || `${names[a]} and ${names[b]}`]), half([x1, y1], a, b), half([x2, y2], b, a), wide]));
  });
  const radius = axis.inside ? 14 : units.length <= CROWDED ? 11 : 7;
  units.forEach((_, i) => {
    const [x, y] = place[i];
    const isFocus = i === axis.focus;
    const own = receiver < 0 || i === receiver ? between(i, i) : 0;
    const look = {
      cx: x,
      cy: y,
      r: radius,
      fill: isFocus ? accent : card,
      stroke: state.selected === i || isFocus ? ink : own > 0.05 ? accent : quiet,
      "stroke-width": state.selected === i ? 3.5 : 1 + 4 * own,
    };
    const inside = axis.inside || (isFocus && units.length > CROWDED) || units.length <= CROWDED;
    const halo = { stroke: card, "stroke-width": 4, "paint-order": "stroke" }; // edges may cross the name
    const text = axis.inside
      ? svgText(x, y + 4, names[i], { fill: ink, "font-size": 11, "font-weight": 600, "text-anchor": "middle" })
      : svgText(x, y + radius + 14, names[i], { fill: isFocus ? ink : quiet, "font-size": 11, "text-anchor": "middle", ...halo });
    const hidden = state.hidden.has(i) ? [svgPart("circle", { cx: x, cy: y, r: radius, fill: "url(#hatch)" })] : [];
    parts.push(unit(state, i, [svgPart("circle", look), ...hidden, inside ? text : ""]));
  });
  return { width: GRAPH_SIDE, height: Math.max(...place.map(([, y]) => y)) + radius + 22, parts };
}

const DRAWN = { patches, frames, steps, nodes };

/**
 * The picture of an input as an SVG part: { width, height, parts, minWidth }. `state` has the axis, its arrays, its units, and
 * `weights` [units] (null: the input alone), `matrix` [units, units] of graphs, `rows` {label, weights, selected} of
 * recordings, `extent` (the greatest weight), `selected` (a unit or -1), `hidden` (units), `hiddenEdges` (pairs of
 * units), `describe(i)` and `describeEdge(a, b)` (null: edges cannot be picked).
 */
export function drawElements(state) {
  const usual = { weights: null, matrix: null, rows: [], ctc: null, extent: 1, selected: -1, hidden: new Set(), hiddenEdges: [] };
  return DRAWN[state.axis.kind]({ ...usual, describe: () => "", describeEdge: null, ...state });
}

/** The hatching of hidden parts, as a definition of the picture. */
const hatch = () => {
  const { card, quiet } = svgPalette();
  const lines = [
    svgRect(0, 0, 6, 6, { fill: card, "fill-opacity": 0.55 }),
    svgPath("M 0 6 L 6 0", { stroke: quiet, "stroke-width": 1.2 }),
  ];
  return svgPart("defs", {}, [svgPart("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, lines)]);
};

export const elementParts = (drawn) => [hatch(), ...drawn.parts];

/**
 * The picture on the page. A click, Enter or Space on a unit calls `onPick(i)`, on an edge `onPickEdge(a, b)`; the
 * arrow keys move between them. Dragging over a recording calls `onStretch(first, last)`.
 */
export function elementPicture({ label, onPick, onPickEdge = null, onStretch = null, announce }) {
  const element = el("div", { class: "element-picture", role: "group", aria: { label } });
  let [state, focused] = [null, null];

  function keyOf(node) {
    return node.dataset.unit !== undefined ? `unit ${node.dataset.unit}` : `edge ${node.dataset.edge}`;
  }

  function act(node) {
    focused = keyOf(node);
    if (node.dataset.unit !== undefined) onPick(Number(node.dataset.unit));
    else onPickEdge?.(...state.axis.edges[Number(node.dataset.edge)]);
  }

  function show(next) {
    const active = element.contains(document.activeElement) ? keyOf(document.activeElement) : focused;
    state = next;
    const drawn = drawElements(state);
    const svg = svgElement(drawn.width, drawn.height, label, elementParts(drawn));
    svg.style.minWidth = `${drawn.minWidth ?? 0}px`;
    svg.removeAttribute("role"); // its parts are buttons
    svg.removeAttribute("aria-label");
    element.replaceChildren(svg);
    const items = [...svg.querySelectorAll("[data-unit]"), ...svg.querySelectorAll("[data-edge]")];
    rovingFocus(svg, items, ["ArrowLeft", "ArrowRight"], (i) => announce(items[i].getAttribute("aria-label")));
    svg.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act(event.target);
    });
    let begun = null;
    for (const node of items) {
      node.addEventListener("pointerdown", () => (begun = node));
      node.addEventListener("click", () => act(node));
      node.addEventListener("pointerup", () => {
        if (!onStretch || !begun || begun === node || node.dataset.unit === undefined) return;
        const ends = [begun, node].map((one) => Number(one.dataset.unit));
        onStretch(Math.min(...ends), Math.max(...ends));
      });
    }
    const again = active && items.find((node) => keyOf(node) === active);
    if (again && document.activeElement === document.body) again.focus({ preventScroll: true });
  }

  return { element, show };
}
