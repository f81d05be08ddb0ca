// All heads: every map of the model at once, small; any of them opens as a matrix or as arcs.

import { button, clear, el, segmented, toggle } from "../dom.js";
import { OKABE } from "../colours.js";
import { arcs } from "../arcs.js";
import { figure, legend } from "../figure.js";
import { heatMap } from "../heatmap.js";
import { PART_NAMES, PART_ORDER, attentions, maskedCells, readMap } from "../maps.js";
import { drawThumb, isPooled } from "../thumb.js";
import { sides } from "../tokens.js";
import { svgCard, svgDocument, svgHatch, svgPalette, svgPart, svgRect, svgText } from "../svg.js";

const HEAD_STATS = [
  ["entropy", "entropy", "how widely it looks, in nats", OKABE[0]],
  ["diagonal", "diagonal", "share on the same place of the other axis", OKABE[2]],
  ["marks", "marks", "share on begin and end marks", OKABE[5]],
  ["punctuation", "punctuation", "share on punctuation", OKABE[3]],
];

export const heads = {
  id: "heads",
  title: "All heads",
  about: "Every attention map of the model on this input: a row a layer, a picture a head. Open one to read it.",
  lacking: "This model has no attention to show.",
  needs: (header) => header !== null && header.attention.length > 0,
  async render(root, context) {
    const { header } = context.trace;
    const first = PART_ORDER.flatMap((part) => attentions(header, part))[0];
    context.trace.array(first.array).catch(() => {}); // on its way while the page is being built
    const opened = el("div");
    const grid = headGrid(context, (name) => context.state.set({ open: name }, { push: true }));
    const room = headRoom(opened, context);
    root.append(opened, grid.element);
    context.state.subscribe((changed) => {
      if (changed.has("open")) {
        grid.press(context.state.get("open"));
        room.open(true).catch(context.failed);
      } else if (["shape", "words", "bright"].some((name) => changed.has(name))) room.open(false).catch(context.failed);
    });
    grid.press(context.state.get("open"));
    await Promise.all([room.open(false), grid.first()]);
    return () => {
      grid.remove();
      room.remove();
    };
  },
};

/** "decoder.0.cross_attn:2" for the third head of that attention. */
function headNamed(header, name) {
  const [, attention, head] = /^(.*):(\d+)$/.exec(name) ?? [];
  const entry = header.attention.find((one) => one.name === attention);
  return entry && Number(head) < entry.heads ? { entry, head: Number(head) } : null;
}

function statsSaid(stats) {
  return HEAD_STATS.map(([key, name]) => `${name} ${stats[key].toFixed(2)}`).join(", ");
}

function headLabel(entry, head) {
  return `${PART_NAMES[entry.part]}, layer ${entry.layer + 1}, head ${head + 1}`;
}

/** The part of a statistic between 0 and 1 that its bar shows; entropy against looking everywhere alike. */
function statShare(key, value, keys) {
  return key === "entropy" ? value / Math.max(Math.log(keys), 1e-9) : value;
}

// ---- the grid

function headGrid(context, open) {
  const { header } = context.trace;
  const thumbs = []; // rows of buttons, as they are walked
  const layers = []; // {entry, canvases, box}
  const parts = PART_ORDER.filter((part) => attentions(header, part).length);
  const sections = parts.map((part) => {
    const rows = attentions(header, part).map((entry) => layerRow(entry));
    return el(
      "section",
      { class: "stack", aria: { label: PART_NAMES[part] } },
      el("h4", { text: PART_NAMES[part] }),
      rows,
    );
  });

  function layerRow(entry) {
    const canvases = [];
    const { keys } = sides(header, entry);
    const line = Array.from({ length: entry.heads }, (_, head) => {
      const stats = entry.stats?.[head];
      const canvas = el("canvas", { width: 1, height: 1 });
      canvases.push(canvas);
      const said = `${headLabel(entry, head)}${stats ? `: ${statsSaid(stats)}` : ""}`;
      const thumb = button("", () => open(`${entry.name}:${head}`), {
        class: "thumb",
        tabIndex: -1,
        title: said,
        aria: { label: said, pressed: "false" },
        data: { name: `${entry.name}:${head}` },
      });
      thumb.append(canvas, ...(stats ? [statBars(stats, keys.length)] : []));
      return thumb;
    });
    thumbs.push(line);
    const box = el(
      "div",
      { class: "layer" },
      el("span", { class: "layer-name quiet", text: `Layer ${entry.layer + 1}` }),
      el("div", { class: "layer-heads" }, line),
    );
    box.style.setProperty("--heads", Math.max(entry.heads, 4));
    layers.push({ entry, canvases, box });
    return box;
  }

  const anyPooled = layers.some(({ entry }) =>
    isPooled(...["queries", "keys"].map((side) => sides(header, entry)[side].length)),
  );
  const key = el(
    "div",
    { class: "stack" },
    legend({ label: "attention weight", masked: header.masks?.length > 0 }),
    el(
      "ul",
      { class: "stat-key" },
      HEAD_STATS.map(([, name, about, colour]) => {
        const swatch = el("span", { class: "stat-swatch" });
        swatch.style.background = colour;
        return el("li", {}, swatch, el("b", { text: name }), ` ${about}`);
      }),
    ),
  );
  const picture = el(
    "div",
    { class: "head-grid", role: "group", aria: { label: "All heads; arrow keys walk, Enter opens" } },
    sections,
  );
  const box = figure(context, {
    title: `${layers.reduce((sum, { entry }) => sum + entry.heads, 0)} heads`,
    note: anyPooled ? "Long maps are drawn smaller: a point is the greatest weight of its block." : "",
    picture,
    legend: key,
    name: "heads",
    table: () => ({
      caption: "Every head, with its four numbers",
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

  // Layers are fetched and drawn when they come near the screen; the first is there before any other is asked for.
  const byBox = new Map(layers.map((layer) => [layer.box, layer]));
  const watch = new IntersectionObserver(
    (seen) => {
      for (const { isIntersecting, target } of seen) {
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
    canvases.forEach((canvas, head) => drawThumb(canvas, tensor.slice(head), tensor.scale, rows, columns, masked));
  }

  let [row, column] = [0, 0];
  thumbs[0][0].tabIndex = 0;
  picture.addEventListener("focusin", (event) => {
    thumbs.forEach((line, r) =>
      line.forEach((thumb, c) => {
        thumb.tabIndex = thumb === event.target ? 0 : -1;
        if (thumb === event.target) [row, column] = [r, c];
      }),
    );
    context.announce(event.target.getAttribute("aria-label") ?? "");
  });
  picture.addEventListener("keydown", (event) => {
    const moves = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      Home: [0, -column],
      End: [0, thumbs[row].length],
    };
    const step = moves[event.key];
    if (!step) return;
    event.preventDefault();
    const line = thumbs[Math.min(Math.max(row + step[0], 0), thumbs.length - 1)];
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
      for (const thumb of thumbs.flat()) thumb.setAttribute("aria-pressed", String(thumb.dataset.name === name));
    },
    remove: () => watch.disconnect(),
  };
}

function statBars(stats, keys) {
  return el(
    "span",
    { class: "stat-bars", aria: { hidden: "true" } },
    HEAD_STATS.map(([key, , , colour]) => {
      const bar = el("span", {});
      bar.style.width = `${Math.min(Math.max(statShare(key, stats[key], keys), 0), 1) * 100}%`;
      bar.style.background = colour;
      return el("span", { class: "stat-room" }, bar);
    }),
  );
}

/** The grid as a file. */
function gridSvg(header, parts, layers) {
  const { ink, quiet } = svgPalette();
  const [size, gap, left, pad] = [84, 12, 96, 28];
  const widest = Math.max(...layers.map(({ entry }) => entry.heads));
  const width = left + pad + widest * (size + gap);
  const pieces = [];
  let y = 66;
  for (const part of parts) {
    pieces.push(svgText(pad, y + 12, PART_NAMES[part], { fill: ink, "font-size": 13, "font-weight": 600 }));
    y += 26;
    for (const { entry, canvases } of layers.filter((layer) => layer.entry.part === part)) {
      pieces.push(svgText(pad, y + size / 2, `Layer ${entry.layer + 1}`, { fill: quiet, "font-size": 12 }));
      canvases.forEach((canvas, head) => {
        const at = { x: left + head * (size + gap), y, width: size, height: size };
        const sharp = { preserveAspectRatio: "none", "image-rendering": "pixelated" };
        pieces.push(svgRect(at.x, y, size, size, { fill: "url(#hatch)" }));
        pieces.push(svgPart("image", { ...at, href: canvas.toDataURL(), ...sharp }));
      });
      y += size + gap;
    }
    y += 8;
  }
  const title = `${header.model.name}: ${header.text.source || header.text.target}`;
  return svgDocument(width, y + 20, title, [...svgCard(width, y + 20, title), svgHatch(), ...pieces]);
}

// ---- the head that is open

/** The greatest weight of each row; in long inputs rows look widely, and their pattern would be all dark. */
function strongestOfRows({ rows, columns, values, scale }) {
  return rows.map((_, r) => {
    const row = values.subarray(r * columns.length, (r + 1) * columns.length);
    return row.reduce((most, value) => Math.max(most, value), 0) * scale || 1;
  });
}

function headRoom(root, context) {
  const { trace, state, announce } = context;
  const { header } = trace;
  let shown = null;
  let asked = 0;

  async function open(moveTo) {
    const mine = ++asked;
    const chosen = headNamed(header, state.get("open"));
    if (!chosen) {
      shown?.remove();
      shown = null;
      return void clear(root);
    }
    const map = await readMap(trace, chosen.entry, chosen.head, state.get("words") === "1");
    if (mine !== asked) return;
    shown?.remove();
    const asArcs = state.get("shape") === "arcs";
    shown = asArcs ? arcPicture(map) : matrixPicture(map);
    const key = asArcs
      ? null
      : legend({
          label: "attention weight",
          masked: Boolean(map.masked),
          high: state.get("bright") === "1" ? "the strongest of the row" : "1",
        });
    const box = figure(context, {
      title: map.title[0].toUpperCase() + map.title.slice(1),
      picture: shown.element,
      legend: key,
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
      announce(`${map.title}: ${chosen.entry.stats ? statsSaid(chosen.entry.stats[chosen.head]) : ""}`);
    }
  }

  function matrixPicture(map) {
    return heatMap({
      ...map,
      name: map.title,
      announce,
      rowExtents: state.get("bright") === "1" ? strongestOfRows(map) : null,
    });
  }

  function arcPicture(map) {
    const threshold = Number(state.get("from", "0.10"));
    const drawn = arcs({
      map,
      threshold,
      name: map.title,
      announce,
      onThreshold: (value) => state.set({ from: value.toFixed(2) }),
    });
    const values = (r) => map.columns.map((_, c) => map.values[r * map.columns.length + c] * map.scale);
    const strongest = (r) =>
      values(r)
        .map((w, c) => [w, c])
        .sort((a, b) => b[0] - a[0])
        .slice(0, 5);
    return {
      ...drawn,
      table: () => ({
        columns: ["token", "1", "2", "3", "4", "5"],
        rows: map.rows.map((label, r) => [label, ...strongest(r).map(([w, c]) => `${map.columns[c]} ${w.toFixed(2)}`)]),
      }),
    };
  }

  function aside({ entry, head }) {
    const stats = entry.stats?.[head];
    const keys = sides(header, entry).keys.length;
    return el(
      "section",
      { class: "card stack", aria: { label: "The open head" } },
      el(
        "div",
        { class: "row end" },
        segmented(
          "Drawn as",
          [
            ["matrix", "Matrix"],
            ["arcs", "Arcs"],
          ],
          state.get("shape", "matrix"),
          (shape) => state.set({ shape }),
        ),
        button("Close", () => state.set({ open: null }, { push: true }), { class: "plain" }),
      ),
      state.get("shape") === "arcs"
        ? null
        : toggle("Stretch each row to its strongest weight", state.get("bright") === "1", (on) =>
            state.set({ bright: on ? "1" : null }),
          ),
      stats
        ? el(
            "dl",
            { class: "stats" },
            HEAD_STATS.map(([key, name, about, colour]) => {
              const bar = el("span", { class: "look-bar" });
              bar.style.width = `${Math.min(statShare(key, stats[key], keys), 1) * 100}%`;
              bar.style.background = colour;
              return el(
                "div",
                {},
                el("dt", {}, el("b", { text: name }), ` ${about}`),
                el(
                  "dd",
                  {},
                  el("span", { class: "look-room" }, bar),
                  el("span", { class: "num", text: stats[key].toFixed(2) }),
                ),
              );
            }),
          )
        : null,
      el(
        "p",
        { class: "hint" },
        "What happens without this head? Switch it off in ",
        context.viewLink("changes", "Interventions"),
        ".",
      ),
    );
  }

  return { open, remove: () => shown?.remove() };
}
