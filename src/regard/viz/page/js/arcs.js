// Arcs: the two axes as lists, joined by lines as strong as the weights; all above a threshold, or one token's.

import { clear, el, slider } from "./dom.js";
import { direction, isolated } from "./tokens.js";
import { svgCard, svgDocument, svgElement, svgGroup, svgPalette, svgPath, svgText, textWidth } from "./svg.js";

const LINE = 26; // pixels from one token to the next
const MOST_ARCS = 1500; // more would be a grey field, and slow
const FAINTEST = 0.01; // of the arcs of one token

/** The arcs to draw: [row, column, weight], the strongest first. */
function strongArcs({ rows, columns, values, scale }, focused, threshold) {
  const arcs = [];
  for (let r = 0; r < rows.length; r++) {
    if (focused !== null && r !== focused) continue;
    for (let c = 0; c < columns.length; c++) {
      const weight = values[r * columns.length + c] * scale;
      if (weight >= (focused === null ? threshold : FAINTEST)) arcs.push([r, c, weight]);
    }
  }
  arcs.sort((a, b) => b[2] - a[2]);
  return { drawn: arcs.slice(0, MOST_ARCS), all: arcs.length };
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
  let at = 0;
  const middle = el("div", { class: "arc-lines", aria: { hidden: "true" } });
  const told = el("p", { class: "hint" });
  const weight = (r, c) => map.values[r * map.columns.length + c] * map.scale;
  const buttons = map.rows.map((text, r) => {
    const one = el("button", { type: "button", class: "arc-token", tabIndex: r ? -1 : 0, dir: direction(text), text });
    one.addEventListener("focus", () => {
      buttons[at].tabIndex = -1;
      at = r;
      one.tabIndex = 0;
      look(r);
      announce(saying(r));
    });
    one.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && look(r));
    return one;
  });
  const left = el(
    "div",
    { class: "arc-side arc-rows", role: "group", aria: { label: `${name}: tokens that look` } },
    buttons,
  );
  const right = el(
    "div",
    { class: "arc-side", aria: { hidden: "true" } },
    map.columns.map((text) => el("span", { class: "arc-token", dir: direction(text), text })),
  );
  const control = slider(
    "Show arcs from weight",
    { min: 0.02, max: 0.9, step: 0.02, value: threshold, format: (x) => x.toFixed(2) },
    (value) => {
      threshold = value;
      onThreshold(value);
      draw();
    },
  );
  const element = el("div", { class: "stack" }, control, el("div", { class: "arcs" }, left, middle, right), told);

  function saying(r) {
    const order = map.columns
      .map((_, c) => c)
      .sort((a, b) => weight(r, b) - weight(r, a))
      .slice(0, 3);
    const places = order.map((c) => `${isolated(map.columns[c])} ${weight(r, c).toFixed(2)}`);
    return `${isolated(map.rows[r])} looks at ${places.join(", ")}`;
  }

  function look(r) {
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
    const few =
      drawn.length < all ? `the ${drawn.length} strongest of ${all} arcs` : `${all} arc${all === 1 ? "" : "s"}`;
    told.textContent =
      focused === null
        ? `${few} from weight ${threshold.toFixed(2)} on; point at a token for its own.`
        : saying(focused);
  }

  left.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 };
    if (event.key === "Escape") look(null);
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    buttons[Math.min(Math.max(moves[event.key], 0), buttons.length - 1)].focus();
  });
  left.addEventListener("focusout", (event) => !left.contains(event.relatedTarget) && look(null));
  left.addEventListener("pointerleave", () => look(left.contains(document.activeElement) ? at : null));
  const watch = new ResizeObserver(draw);
  watch.observe(middle);
  addEventListener("regard-theme", draw);

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
    remove() {
      watch.disconnect();
      removeEventListener("regard-theme", draw);
    },
  };
}
