// All heads: a thumbnail of every attention map; any of them opens as a matrix or as arcs.

import { button, clear, el, segmented, toggle } from "../dom.js";
import { arcs } from "../arcs.js";
import { PART_NAMES, PART_ORDER, attentions, maskedCells, readMap } from "../attention_map.js";
import { shareBar } from "../bars.js";
import { OKABE } from "../colours.js";
import { figure, legend } from "../figure.js";
import { heatMap } from "../heatmap.js";
import { topIndices } from "../numbers.js";
import { svgCard, svgDocument, svgHatch, svgPalette, svgPart, svgRect, svgText } from "../svg.js";
import { drawThumbnail, isPooled } from "../pixels.js";
import { anyOf } from "../state.js";
import { sides } from "../tokens.js";

const HEAD_STATS = [
  ["entropy", "entropy", "of the attention weights, in nats", OKABE[0]],
  ["diagonal", "diagonal", "weight on the same position of the other axis", OKABE[2]],
  ["special", "special tokens", "weight on BOS, EOS and other special tokens", OKABE[5]],
  ["punctuation", "punctuation", "weight on punctuation", OKABE[3]],
];

export const heads = {
  id: "heads",
  title: "All heads",
  about: "Every attention map of the model on this input, one row per layer. Click one to open it.",
  lacking: "This model has no attention to show.",
  needs: (header) => header !== null && header.attention.length > 0,
  async render(root, context) {
    const { header } = context.trace;
    const first = PART_ORDER.flatMap((part) => attentions(header, part))[0];
    context.trace.array(first.array).catch(() => {}); // starts the request while the page is built
    const opened = el("div");
    const grid = headGrid(context, (name) => context.state.set({ open: name }, { push: true }));
    const view = openHead(opened, context);
    root.append(opened, grid.element);
    context.state.subscribe((changed) => {
      if (changed.has("open")) {
        grid.press(context.state.get("open"));
        view.open(true).catch(context.failed);
      } else if (anyOf(changed, "shape", "words", "bright")) view.open(false).catch(context.failed);
    });
    grid.press(context.state.get("open"));
    await Promise.all([view.open(false), grid.first()]);
    return () => {
      grid.remove();
      view.remove();
    };
  },
};

/** The head that a field such as "decoder.0.cross_attn:2" (the third head of that attention) names. */
function headNamed(header, name) {
  const [, attention, head] = /^(.*):(\d+)$/.exec(name) ?? [];
  const entry = header.attention.find((one) => one.name === attention);
  return entry && Number(head) < entry.heads ? { entry, head: Number(head) } : null;
}

function statsText(stats) {
  return HEAD_STATS.map(([key, name]) => `${name} ${stats[key].toFixed(2)}`).join(", ");
}

function headLabel(entry, head) {
  return `${PART_NAMES[entry.part]}, layer ${entry.layer + 1}, head ${head + 1}`;
}

/** A bar for a statistic; entropy is shown relative to uniform attention. */
function statBar(key, value, keys, colour) {
  return shareBar(key === "entropy" ? value / Math.max(Math.log(keys), 1e-9) : value, colour);
}

// ---- the grid

function headGrid(context, open) {
  const { header } = context.trace;
  const thumbnails = []; // buttons by row, for the arrow keys
  const layers = []; // {entry, canvases, box}
  const parts = PART_ORDER.filter((part) => attentions(header, part).length);
  const sections = parts.map((part) => {
    const title = el("h4", { text: PART_NAMES[part] });
    return el("section", { class: "stack", aria: { label: PART_NAMES[part] } }, title, attentions(header, part).map(layerRow));
  });

  function layerRow(entry) {
    const canvases = [];
    const keys = sides(header, entry).keys.length;
    const line = Array.from({ length: entry.heads }, (_, head) => {
      const stats = entry.stats?.[head];
      const canvas = el("canvas", { width: 1, height: 1 });
      canvases.push(canvas);
      const label = `${headLabel(entry, head)}${stats ? `: ${statsText(stats)}` : ""}`;
      const name = `${entry.name}:${head}`;
      const props = { class: "thumb", tabIndex: -1, title: label, aria: { label, pressed: "false" }, data: { name } };
      const thumbnail = button("", () => open(name), props);
      const bars = stats && HEAD_STATS.map(([key, , , colour]) => statBar(key, stats[key], keys, colour));
      thumbnail.append(canvas, bars ? el("span", { class: "stat-bars", aria: { hidden: "true" } }, bars) : "");
      return thumbnail;
    });
    thumbnails.push(line);
    const name = el("span", { class: "layer-name quiet", text: `Layer ${entry.layer + 1}` });
    const box = el("div", { class: "layer" }, name, el("div", { class: "layer-heads" }, line));
    box.style.setProperty("--heads", Math.max(entry.heads, 4));
    layers.push({ entry, canvases, box });
    return box;
  }

  const anyPooled = layers.some(({ entry }) =>
    isPooled(...["queries", "keys"].map((side) => sides(header, entry)[side].length)),
  );
  const statKey = HEAD_STATS.map(([, name, about, colour]) => {
    const swatch = el("span", { class: "stat-swatch" });
    swatch.style.background = colour;
    return el("li", {}, swatch, el("b", { text: name }), ` ${about}`);
  });
  const weightKey = legend({ label: "attention weight", masked: header.masks?.length > 0 });
  const gridProps = { class: "head-grid", role: "group", aria: { label: "All heads; arrow keys move, Enter opens" } };
  const picture = el("div", gridProps, sections);
  const box = figure(context, {
    title: `${layers.reduce((sum, { entry }) => sum + entry.heads, 0)} heads`,
    note: anyPooled ? "Long maps are max-pooled: a pixel is the greatest weight of its block." : "",
    picture,
    legend: el("div", { class: "stack" }, weightKey, el("ul", { class: "stat-key" }, statKey)),
    name: "heads",
    table: () => ({
      caption: "Statistics of every head",
      columns: ["head", ...HEAD_STATS.map(([, name]) => name)],
      rows: layers.flatMap(({ entry }) =>
        (entry.stats ?? []).map((stats, head) => [
          headLabel(entry, head),
          ...HEAD_STATS.map(([stat]) => Number(stats[stat].toFixed(3))),
        ]),
      ),
    }),
    svg: async () => {
      await Promise.all(layers.map(drawLayer));
      return gridSvg(header, parts, layers);
    },
  });

  // Layers are fetched and drawn when they come near the screen, after the first one.
  const byBox = new Map(layers.map((layer) => [layer.box, layer]));
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        watch.unobserve(target);
        drawLayer(byBox.get(target)).catch((error) => !context.signal.aborted && context.failed(error));
      }
    },
    { rootMargin: "300px" },
  );

  function drawLayer(layer) {
    layer.drawn ??= drawHeads(layer);
    layer.drawn.catch(() => (layer.drawn = null));
    return layer.drawn;
  }

  async function drawHeads({ entry, canvases }) {
    const tensor = await context.trace.array(entry.array);
    const [, rows, columns] = tensor.shape;
    const masked = maskedCells(header, entry);
    canvases.forEach((canvas, head) => drawThumbnail(canvas, tensor.slice(head), tensor.scale, rows, columns, masked));
  }

  let [row, column] = [0, 0];
  thumbnails[0][0].tabIndex = 0;
  picture.addEventListener("focusin", (event) => {
    thumbnails[row][column].tabIndex = -1;
    row = thumbnails.findIndex((line) => line.includes(event.target));
    column = thumbnails[row].indexOf(event.target);
    event.target.tabIndex = 0;
    context.announce(event.target.getAttribute("aria-label") ?? "");
  });
  picture.addEventListener("keydown", (event) => {
    const moves = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      Home: [0, -column],
      End: [0, thumbnails[row].length],
    };
    const step = moves[event.key];
    if (!step) return;
    event.preventDefault();
    const line = thumbnails[Math.min(Math.max(row + step[0], 0), thumbnails.length - 1)];
    line[Math.min(Math.max(column + step[1], 0), line.length - 1)].focus();
  });

  return {
    element: box,
    async first() {
      try {
        await drawLayer(layers[0]);
      } finally {
        if (!context.signal.aborted) for (const { box: row } of layers) watch.observe(row);
      }
    },
    press(name) {
      for (const one of thumbnails.flat()) one.setAttribute("aria-pressed", String(one.dataset.name === name));
    },
    remove: () => watch.disconnect(),
  };
}

/** The grid as an SVG file. */
function gridSvg(header, parts, layers) {
  const { ink, quiet } = svgPalette();
  const [size, gap, left, pad] = [84, 12, 96, 28];
  const widest = Math.max(...layers.map(({ entry }) => entry.heads));
  const width = left + pad + widest * (size + gap);
  const drawn = [];
  let y = 66;
  for (const part of parts) {
    drawn.push(svgText(pad, y + 12, PART_NAMES[part], { fill: ink, "font-size": 13, "font-weight": 600 }));
    y += 26;
    for (const { entry, canvases } of layers.filter((layer) => layer.entry.part === part)) {
      drawn.push(svgText(pad, y + size / 2, `Layer ${entry.layer + 1}`, { fill: quiet, "font-size": 12 }));
      canvases.forEach((canvas, head) => {
        const at = { x: left + head * (size + gap), y, width: size, height: size };
        const sharp = { preserveAspectRatio: "none", "image-rendering": "pixelated" };
        drawn.push(svgRect(at.x, y, size, size, { fill: "url(#hatch)" }));
        drawn.push(svgPart("image", { ...at, href: canvas.toDataURL(), ...sharp }));
      });
      y += size + gap;
    }
    y += 8;
  }
  const title = `${header.model.name}: ${header.text.source || header.text.target}`;
  return svgDocument(width, y + 20, title, [...svgCard(width, y + 20, title), svgHatch(), ...drawn]);
}

// ---- the opened head

/** The greatest weight of each row: on long inputs attention is spread widely, and a scale up to 1 shows no pattern. */
function rowMaxima({ rows, columns, values, scale }) {
  return rows.map((_, r) => {
    const row = values.subarray(r * columns.length, (r + 1) * columns.length);
    return row.reduce((most, value) => Math.max(most, value), 0) * scale || 1;
  });
}

function openHead(root, context) {
  const { trace, state, announce } = context;
  const { header } = trace;
  let shown = null;
  let draws = 0;

  async function open(moveTo) {
    const mine = ++draws;
    const chosen = headNamed(header, state.get("open"));
    if (!chosen) {
      shown?.remove();
      shown = null;
      return void clear(root);
    }
    const map = await readMap(trace, chosen.entry, chosen.head, state.get("words") === "1");
    if (mine !== draws) return;
    shown?.remove();
    const [asArcs, byRow] = [state.get("shape") === "arcs", state.get("bright") === "1"];
    shown = asArcs ? arcPicture(map) : matrixPicture(map, byRow);
    const high = byRow ? "row maximum" : "1";
    const box = figure(context, {
      title: map.title[0].toUpperCase() + map.title.slice(1),
      picture: shown.element,
      legend: asArcs ? null : legend({ label: "attention weight", masked: Boolean(map.masked), high }),
      name: "head",
      table: shown.table,
      svg: () => shown.svg(map.title),
    });
    const heading = box.querySelector("h3");
    heading.tabIndex = -1;
    const focused = [...root.querySelectorAll("input")].indexOf(document.activeElement);
    clear(root).append(el("div", { class: "beside" }, box, aside(chosen)));
    if (focused >= 0) root.querySelectorAll("input")[focused]?.focus();
    if (moveTo) {
      heading.focus({ preventScroll: true });
      root.scrollIntoView({ block: "nearest" });
      announce(`${map.title}: ${chosen.entry.stats ? statsText(chosen.entry.stats[chosen.head]) : ""}`);
    }
  }

  function matrixPicture(map, byRow) {
    return heatMap({ ...map, name: map.title, announce, rowExtents: byRow ? rowMaxima(map) : null });
  }

  function arcPicture(map) {
    const threshold = Number(state.get("from", "0.10"));
    const onThreshold = (value) => state.set({ from: value.toFixed(2) });
    const drawn = arcs({ map, threshold, name: map.title, announce, onThreshold });
    const topOfRow = (r) => {
      const weights = map.columns.map((_, c) => map.values[r * map.columns.length + c] * map.scale);
      return topIndices(weights, 5).map((c) => `${map.columns[c]} ${weights[c].toFixed(2)}`);
    };
    return {
      ...drawn,
      table: () => ({
        columns: ["token", "1", "2", "3", "4", "5"],
        rows: map.rows.map((label, r) => [label, ...topOfRow(r)]),
      }),
    };
  }

  function aside({ entry, head }) {
    const stats = entry.stats?.[head];
    const keys = sides(header, entry).keys.length;
    const shapes = [["matrix", "Matrix"], ["arcs", "Arcs"]];
    const statLine = ([key, name, about, colour]) =>
      el(
        "div",
        {},
        el("dt", {}, el("b", { text: name }), ` ${about}`),
        el("dd", {}, statBar(key, stats[key], keys, colour), el("span", { class: "num", text: stats[key].toFixed(2) })),
      );
    return el(
      "section",
      { class: "card stack", aria: { label: "Open head" } },
      el(
        "div",
        { class: "row end" },
        segmented("Show as", shapes, state.get("shape", "matrix"), (shape) => state.set({ shape })),
        button("Close", () => state.set({ open: null }, { push: true }), { class: "plain" }),
      ),
      state.get("shape") === "arcs"
        ? null
        : toggle("Scale each row to its maximum", state.get("bright") === "1", (on) =>
            state.set({ bright: on ? "1" : null }),
          ),
      stats ? el("dl", { class: "stats" }, HEAD_STATS.map(statLine)) : null,
      el("p", { class: "hint" }, "To see the output without this head, ablate it in ", context.viewLink("changes", "Interventions"), "."),
    );
  }

  return { open, remove: () => shown?.remove() };
}
