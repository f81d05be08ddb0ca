// Attention as arcs: the tokens of both axes as lists, joined by lines whose width shows the weight.

import { button, clear, drawOnChange, el, rovingFocus, slider } from "./dom.js";
import { plural, topIndices } from "./numbers.js";
import { direction, isolated } from "./tokens.js";
import { svgCard, svgDocument, svgElement, svgGroup, svgPalette, svgPath, svgText, textWidth } from "./svg.js";

const LINE = 26; // pixels from one token to the next
const MAX_ARCS = 1500; // more are unreadable, and slow
const MIN_FOCUSED = 0.01; // the least weight shown for the focused token

/** The arcs to draw, [row, column, weight] by descending weight, and how many there are in all. */
function strongArcs({ rows, columns, values, scale }, focused, threshold) {
  const arcs = [];
  for (let r = 0; r < rows.length; r++) {
    if (focused !== null && r !== focused) continue;
    for (let c = 0; c < columns.length; c++) {
      const weight = values[r * columns.length + c] * scale;
      if (weight >= (focused === null ? threshold : MIN_FOCUSED)) arcs.push([r, c, weight]);
    }
  }
  arcs.sort((a, b) => b[2] - a[2]);
  return { drawn: arcs.slice(0, MAX_ARCS), all: arcs.length };
}

function arcParts(arcs, width, stroke) {
  return arcs.map(([r, c, weight]) => {
    const [from, to] = [(r + 0.5) * LINE, (c + 0.5) * LINE];
    const d = `M 0 ${from} C ${width / 2} ${from}, ${width / 2} ${to}, ${width} ${to}`;
    return svgPath(d, { stroke, "stroke-width": 1 + 3 * weight, "stroke-opacity": 0.15 + 0.85 * weight });
  });
}

export function arcs({ map, threshold, onThreshold, announce, name }) {
  let focused = null;
  const middle = el("div", { class: "arc-lines", aria: { hidden: "true" } });
  const status = el("p", { class: "hint" });
  const weight = (r, c) => map.values[r * map.columns.length + c] * map.scale;
  const buttons = map.rows.map((text, r) => {
    const one = button(text, () => {}, { class: "arc-token", dir: direction(text) });
    one.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && setFocused(r));
    return one;
  });
  const leftProps = { class: "arc-side arc-rows", role: "group", aria: { label: `${name}: query tokens` } };
  const left = el("div", leftProps, buttons);
  rovingFocus(left, buttons, ["ArrowUp", "ArrowDown"], (r) => {
    setFocused(r);
    announce(describe(r));
  });
  const right = el(
    "div",
    { class: "arc-side", aria: { hidden: "true" } },
    map.columns.map((text) => el("span", { class: "arc-token", dir: direction(text), text })),
  );
  const control = slider(
    "Minimum weight",
    { min: 0.02, max: 0.9, step: 0.02, value: threshold, format: (x) => x.toFixed(2) },
    (value) => {
      threshold = value;
      onThreshold(value);
      draw();
    },
  );
  const element = el("div", { class: "stack" }, control, el("div", { class: "arcs" }, left, middle, right), status);

  function describe(r) {
    const top = topIndices(map.columns.map((_, c) => weight(r, c)), 3);
    const texts = top.map((c) => `${isolated(map.columns[c])} ${weight(r, c).toFixed(2)}`);
    return `${isolated(map.rows[r])} attends to ${texts.join(", ")}`;
  }

  function setFocused(r) {
    if (focused === r) return;
    focused = r;
    draw();
  }

  function draw() {
    const { drawn, all } = strongArcs(map, focused, threshold);
    const width = Math.max(middle.clientWidth, 60);
    const height = LINE * Math.max(map.rows.length, map.columns.length);
    clear(middle).append(svgElement(width, height, name, arcParts(drawn, width, svgPalette().accent)));
    [...right.children].forEach((node, c) => {
      node.style.opacity = focused === null ? "" : String(0.45 + 0.55 * Math.min(1, weight(focused, c) * 1.5));
    });
    const count = drawn.length < all ? `The ${drawn.length} strongest of ${all} arcs` : plural(all, "arc");
    status.textContent =
      focused === null
        ? `${count} with weight ${threshold.toFixed(2)} or more; point at a token to see only its arcs.`
        : describe(focused);
  }

  left.addEventListener("keydown", (event) => {
    if (event.key === "Escape") setFocused(null);
  });
  left.addEventListener("focusout", (event) => !left.contains(event.relatedTarget) && setFocused(null));
  left.addEventListener("pointerleave", () => {
    const r = buttons.indexOf(document.activeElement);
    setFocused(r < 0 ? null : r);
  });

  return {
    element,
    svg(title) {
      const { ink, accent } = svgPalette();
      const side = Math.min(220, Math.max(...[...map.rows, ...map.columns].map((text) => textWidth(text, 13))) + 12);
      const [inner, top] = [320, 66];
      const width = Math.max(2 * side + inner + 56, textWidth(title, 16, 600) + 56);
      const height = top + LINE * Math.max(map.rows.length, map.columns.length) + 28;
      const names = (texts, x, anchor) =>
        svgGroup(
          { fill: ink, "font-size": 13, "text-anchor": anchor },
          texts.map((text, i) => svgText(x, top + (i + 0.5) * LINE + 4.5, text)),
        );
      const lines = svgGroup(
        { transform: `translate(${28 + side} ${top})` },
        arcParts(strongArcs(map, focused, threshold).drawn, inner, accent),
      );
      const parts = [names(map.rows, 28 + side - 8, "end"), lines, names(map.columns, 28 + side + inner + 8, "start")];
      return svgDocument(width, height, title, [...svgCard(width, height, title), ...parts]);
    },
    remove: drawOnChange(middle, draw),
  };
}
