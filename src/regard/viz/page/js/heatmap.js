// A heat map: cells on a canvas, labels as text, and one element over the focused cell.
//
// A screen reader sees a grid with that one cell; the keyboard sees one tab stop that the arrow keys move.

import { clear, drawOnChange, el } from "./dom.js";
import { SCALES, pixelColours } from "./colours.js";
import { drawPixels } from "./pixels.js";
import { direction, isolated } from "./tokens.js";
import { canvasHatch, svgCard, svgDocument, svgGroup, svgHatch, svgPalette, svgPart, svgRect, svgText } from "./svg.js";
import { textWidth } from "./svg.js";
import { shortNumber, topIndices } from "./numbers.js";

const LABEL_SIZE = 13;
const MIN_LABEL = 12; // pixels; where cells are smaller, only some labels are shown
const MIN_SHOWN = 0.05; // cells below this share of the scale have no number
const MAX_TABLE_COLUMNS = 64; // tables of wider maps list the greatest values of each row
const TOP_OF_ROW = 8;
const DASHES = [5, 3]; // of the gold alignment's outlines; the outline under the pointer is solid

/** The smallest size of a cell; a map that needs more space scrolls. */
function minCell(columns) {
  return columns <= 80 ? 14 : columns <= 200 ? 6 : 2;
}

/** The layout: cells of `across` x `down` pixels with `gap` pixels between them, and the labels around them. */
function layOut({ rows, columns, maxCell, corner }, width) {
  const rowWidth = Math.min(
    Math.max(...rows.map((row) => textWidth(row, LABEL_SIZE)), textWidth(corner, 11)),
    width < 480 ? 92 : 160,
  );
  const left = Math.ceil(rowWidth) + 14;
  const available = Math.max(width - left - 4, 40);
  const fitting = Math.floor(available / columns.length);
  const least = minCell(columns.length);
  const down = Math.max(least, Math.min(maxCell, fitting), Math.min(maxCell, rows.length <= 24 ? 20 : least));
  const widest = Math.min(Math.max(...columns.map((column) => textWidth(column, LABEL_SIZE))), 140);
  let across = Math.max(least, Math.min(maxCell, fitting));
  let angle = 0;
  const horizontal = Math.ceil(Math.max(across, widest + 14, Math.min(down * 1.5, fitting)));
  if (horizontal <= 96 && horizontal * columns.length <= available) across = horizontal;
  else if (across >= 20) angle = -45;
  else angle = -90;
  const slant = (-angle * Math.PI) / 180;
  const headHeight = Math.ceil(angle ? widest * Math.sin(slant) + 14 : 22);
  const overhang =
    angle === -45 ? Math.max(0, Math.ceil(textWidth(columns.at(-1), LABEL_SIZE) * Math.cos(slant) - across / 2)) : 0;
  const small = Math.min(across, down);
  return {
    left,
    top: headHeight + 6,
    across,
    down,
    angle,
    gap: small >= 24 ? 3 : small >= 10 ? 1 : 0,
    radius: small >= 24 ? 5 : small >= 10 ? 2 : 0,
    rowStep: Math.ceil(MIN_LABEL / down),
    columnStep: Math.ceil(MIN_LABEL / across),
    width: left + across * columns.length + overhang,
    height: headHeight + 6 + down * rows.length,
    numbers: small >= 30 && across >= 34,
  };
}

/** The rectangle of a cell relative to the first one: x, y, width, height. */
function cellRect({ across, down, gap }, r, c) {
  return [c * across + gap / 2, r * down + gap / 2, across - gap, down - gap];
}

/** The strokes of an outline, [colour, width, dashes]: a light one below a dashed dark one. */
function outlineStrokes({ down }) {
  const { card, ink } = svgPalette();
  const width = Math.max(1, Math.min(2.4, down / 8));
  return [
    [card, width * 2.2, []],
    [ink, width, DASHES],
  ];
}

const cellFontSize = ({ across }) => Math.min(12, across * 0.32);

export function heatMap(given) {
  const options = {
    scale: 1,
    colours: "weight",
    extent: 1,
    name: "heat map",
    corner: "attends to →",
    outlines: [],
    masked: null, // [R, C], 1 for masked cells, which are hatched
    digits: 2,
    maxCell: 44,
    announce: () => {},
    onFocus: () => {},
    ...given,
  };
  let layout = null;
  let at = { r: 0, c: 0 }; // the focused cell; -1 is a heading
  let pointed = null; // the cell under the pointer
  let marked = null; // the cell that a linked map points at

  const canvas = el("canvas", { aria: { hidden: "true" } });
  const heads = el("div", { class: "map-heads", aria: { hidden: "true" } });
  const sideLabels = el("div", { class: "map-sides", aria: { hidden: "true" } });
  const cell = el("div", { class: "map-cell", role: "gridcell", tabIndex: 0 });
  const row = el("div", { role: "row" }, cell);
  const ghost = el("div", { class: "map-ghost", aria: { hidden: "true" }, hidden: true });
  const tip = el("div", { class: "map-tip", aria: { hidden: "true" }, hidden: true });
  const plane = el("div", { class: "map-plane", role: "grid" }, heads, sideLabels, canvas, ghost, row, tip);
  const fewLabels = el("p", { class: "hint", hidden: true });
  const element = el("div", { class: "map" }, plane, fewLabels);

  const value = (r, c) => options.values[r * options.columns.length + c] * options.scale;
  const shareOf = (r, c) => value(r, c) / (options.rowExtents?.[r] ?? options.extent); // of the scale
  const isMasked = (r, c) => Boolean(options.masked?.[r * options.columns.length + c]);
  const format = (number, digits = options.digits) => number.toFixed(digits).replace("-", "−");

  function describe({ r, c }) {
    if (r < 0) return options.columnLabel?.(c) ?? `column ${isolated(options.columns[c])}`;
    if (c < 0) return options.rowLabel?.(r) ?? `row ${isolated(options.rows[r])}: ${topOfRow(r, 3).join(", ")}`;
    const text = isMasked(r, c) ? "masked" : format(value(r, c));
    return (
      options.label?.(r, c, value(r, c)) ?? `${isolated(options.rows[r])} → ${isolated(options.columns[c])}: ${text}`
    );
  }

  /** The greatest values of a row with their columns, as texts. */
  function topOfRow(r, count) {
    const sizes = options.columns.map((_, c) => Math.abs(value(r, c)));
    return topIndices(sizes, count).map((c) => `${isolated(options.columns[c])} ${format(value(r, c))}`);
  }

  function box({ r, c }) {
    const { left, top, across, down } = layout;
    return {
      x: c < 0 ? 0 : left + c * across,
      y: r < 0 ? 0 : top + r * down,
      w: c < 0 ? left - 6 : across,
      h: r < 0 ? top - 4 : down,
    };
  }

  function setBox(node, { x, y, w, h }) {
    Object.assign(node.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
  }

  function placeCell() {
    setBox(cell, box(at));
    cell.setAttribute("role", at.r < 0 ? "columnheader" : at.c < 0 ? "rowheader" : "gridcell");
    row.setAttribute("aria-rowindex", at.r + 2);
    cell.setAttribute("aria-colindex", at.c + 2);
    cell.setAttribute("aria-label", describe(at));
    cell.dataset.r = at.r;
    cell.dataset.c = at.c;
  }

  /** Highlights the labels of the current row and column, and outlines the cell under the pointer or a linked one. */
  function highlight() {
    if (!layout) return;
    const current = pointed ?? (document.activeElement === cell ? at : marked);
    for (const label of sideLabels.children)
      label.classList.toggle("lit", current !== null && Number(label.dataset.i) === current.r);
    for (const label of heads.children)
      label.classList.toggle("lit", current !== null && Number(label.dataset.i) === current.c);
    const shown = pointed ?? marked;
    ghost.hidden = shown === null || (shown.r < 0 && shown.c < 0);
    if (!ghost.hidden) {
      if (shown.r >= 0 && shown.c >= 0) setBox(ghost, box(shown));
      else outlineLine(shown);
    }
  }

  /** Outlines a whole row or column. */
  function outlineLine({ r, c }) {
    const { x, y } = box({ r: Math.max(r, 0), c: Math.max(c, 0) });
    const w = r >= 0 ? layout.across * options.columns.length : layout.across;
    const h = c >= 0 ? layout.down * options.rows.length : layout.down;
    setBox(ghost, { x, y, w, h });
  }

  function announceCell() {
    highlight();
    options.announce(describe(at));
    options.onFocus(at);
  }

  function move(r, c) {
    if (!layout) return;
    const { rows, columns } = options;
    const to = { r: Math.min(Math.max(r, -1), rows.length - 1), c: Math.min(Math.max(c, -1), columns.length - 1) };
    if (to.r < 0 && to.c < 0) return;
    at = to;
    placeCell();
    cell.scrollIntoView?.({ block: "nearest", inline: "nearest" });
    announceCell();
  }

  cell.addEventListener("keydown", (event) => {
    const { rows, columns } = options;
    const page = Math.max(1, Math.ceil(rows.length / 8));
    const whole = event.ctrlKey || event.metaKey;
    const moves = {
      ArrowUp: [at.r - 1, at.c],
      ArrowDown: [at.r + 1, at.c],
      ArrowLeft: [at.r, at.c - 1],
      ArrowRight: [at.r, at.c + 1],
      Home: [whole ? 0 : at.r, 0],
      End: [whole ? rows.length - 1 : at.r, columns.length - 1],
      PageUp: [Math.max(0, at.r - page), at.c],
      PageDown: [at.r + page, at.c],
    };
    if (!moves[event.key]) return;
    move(...moves[event.key]);
    event.preventDefault();
  });
  cell.addEventListener("focus", announceCell);
  cell.addEventListener("blur", highlight);

  function cellUnder(event) {
    const edge = plane.getBoundingClientRect();
    const overLabels = element.scrollLeft > 0 && event.clientX - element.getBoundingClientRect().left < layout.left;
    const c = overLabels ? -1 : Math.floor((event.clientX - edge.left - layout.left) / layout.across);
    const r = Math.floor((event.clientY - edge.top - layout.top) / layout.down);
    const under = { r: Math.max(r, -1), c: Math.max(c, -1) };
    const outside = under.r >= options.rows.length || under.c >= options.columns.length || (under.r < 0 && under.c < 0);
    return outside ? null : under;
  }

  function point(event) {
    if (!layout) return;
    const under = cellUnder(event);
    if (under?.r === pointed?.r && under?.c === pointed?.c) return;
    pointed = under;
    tip.hidden = under === null;
    if (under) {
      tip.textContent = describe(under);
      const { x, y, w } = box(under);
      const rightEdge = element.clientWidth + element.scrollLeft;
      tip.style.top = `${Math.max(y - 34, 0)}px`;
      const centred = Math.min(x + w / 2 - tip.offsetWidth / 2, rightEdge - tip.offsetWidth - 2);
      tip.style.left = `${Math.max(element.scrollLeft, centred)}px`;
    }
    highlight();
    options.onFocus(under ?? (document.activeElement === cell ? at : null));
  }

  plane.addEventListener("pointermove", (event) => event.pointerType !== "touch" && point(event));
  plane.addEventListener("pointerleave", () => {
    if (!pointed) return;
    pointed = null;
    tip.hidden = true;
    highlight();
    options.onFocus(document.activeElement === cell ? at : null);
  });
  plane.addEventListener("click", (event) => {
    const under = layout && cellUnder(event);
    if (!under) return;
    at = under;
    placeCell();
    cell.focus({ preventScroll: true });
  });

  function drawLabels() {
    const { left, top, across, down, angle, rowStep, columnStep } = layout;
    clear(heads);
    clear(sideLabels);
    Object.assign(sideLabels.style, { width: `${left - 6}px`, height: `${layout.height}px` });
    options.rows.forEach((text, i) => {
      if (i % rowStep) return;
      const label = el("span", { class: "map-label", data: { i }, dir: direction(text), title: text, text });
      Object.assign(label.style, { top: `${top + i * down}px`, lineHeight: `${Math.max(down, MIN_LABEL)}px` });
      sideLabels.append(label);
    });
    options.columns.forEach((text, i) => {
      if (i % columnStep) return;
      const label = el("span", {
        class: `map-head${angle ? (angle === -45 ? " slanted" : " upright") : ""}`,
        data: { i },
      });
      label.append(el("bdi", { dir: direction(text), title: text, text }));
      const wide = columnStep > 1 ? MIN_LABEL : across;
      Object.assign(label.style, { left: `${left + i * across}px`, width: `${wide}px`, height: `${top - 6}px` });
      heads.append(label);
    });
    const corner = el("span", { class: "map-corner", data: { i: -2 }, text: options.corner });
    corner.style.top = `${top - 24}px`;
    sideLabels.append(corner);
  }

  function pixels() {
    const { rows, columns, values, scale, extent, rowExtents, masked } = options;
    const colourOf = pixelColours(options.colours);
    const extentAt = (i) => rowExtents?.[Math.floor(i / columns.length)] ?? extent;
    return drawPixels(el("canvas"), rows.length, columns.length, (i) =>
      masked?.[i] ? 0 : colourOf((values[i] * scale) / extentAt(i)),
    );
  }

  function drawCells() {
    const { left, top, across, down, gap, radius } = layout;
    const { rows, columns } = options;
    const sharp = Math.min(window.devicePixelRatio || 1, 3);
    const [width, height] = [across * columns.length, down * rows.length];
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round(height * sharp);
    Object.assign(canvas.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
    Object.assign(canvas.dataset, { across, down, rows: rows.length, columns: columns.length });
    const paint = canvas.getContext("2d");
    paint.scale(sharp, sharp);
    const hatch = options.masked && canvasHatch(paint);
    if (!gap) {
      if (hatch) {
        paint.fillStyle = hatch;
        paint.fillRect(0, 0, width, height);
      }
      paint.imageSmoothingEnabled = false;
      paint.drawImage(pixels(), 0, 0, width, height);
    } else {
      const scale = SCALES[options.colours];
      paint.textAlign = "center";
      paint.textBaseline = "middle";
      paint.font = `${cellFontSize(layout)}px ${getComputedStyle(element).fontFamily}`;
      for (let r = 0; r < rows.length; r++) {
        for (let c = 0; c < columns.length; c++) {
          const share = shareOf(r, c);
          paint.fillStyle = isMasked(r, c) ? hatch : scale.colour(share);
          paint.beginPath();
          paint.roundRect(...cellRect(layout, r, c), radius);
          paint.fill();
          if (layout.numbers && Math.abs(share) >= MIN_SHOWN) {
            paint.fillStyle = scale.ink(share);
            paint.fillText(format(value(r, c)), (c + 0.5) * across, (r + 0.5) * down + 0.5);
          }
        }
      }
    }
    drawOutlines(paint);
  }

  function drawOutlines(paint) {
    for (const [stroke, width, dashes] of outlineStrokes(layout)) {
      paint.setLineDash(dashes);
      paint.strokeStyle = stroke;
      paint.lineWidth = width;
      for (const [r, c] of options.outlines) {
        paint.beginPath();
        paint.roundRect(...cellRect(layout, r, c), layout.radius);
        paint.stroke();
      }
    }
  }

  function draw() {
    const width = element.clientWidth;
    if (!width || !options.rows.length || !options.columns.length) return;
    layout = layOut(options, width);
    Object.assign(plane.style, { width: `${layout.width}px`, height: `${layout.height}px` });
    plane.setAttribute("aria-label", options.name);
    plane.setAttribute("aria-rowcount", options.rows.length + 1);
    plane.setAttribute("aria-colcount", options.columns.length + 1);
    at = { r: Math.min(at.r, options.rows.length - 1), c: Math.min(at.c, options.columns.length - 1) };
    const step = Math.max(layout.rowStep, layout.columnStep);
    fewLabels.hidden = step === 1;
    fewLabels.textContent = `One label in ${step} is shown; point at a cell, or use the arrow keys, for the others.`;
    drawLabels();
    drawCells();
    placeCell();
    highlight();
  }

  const stopDrawing = drawOnChange(element, draw);

  function table() {
    const { rows, columns } = options;
    if (columns.length <= MAX_TABLE_COLUMNS) {
      const cellText = (r, c) => (isMasked(r, c) ? "masked" : format(value(r, c), options.digits + 1));
      return {
        caption: options.name,
        columns: ["", ...columns],
        rows: rows.map((label, r) => [label, ...columns.map((_, c) => cellText(r, c))]),
      };
    }
    return {
      caption: `${options.name}: the ${TOP_OF_ROW} greatest values of each row`,
      columns: ["", ...Array.from({ length: TOP_OF_ROW }, (_, i) => `${i + 1}`)],
      rows: rows.map((label, r) => [label, ...topOfRow(r, TOP_OF_ROW)]),
    };
  }

  /** The map as an SVG file, laid out for a slide and not for its width on the page. */
  function svg(title) {
    const least = minCell(options.columns.length) * options.columns.length;
    const lay = layOut({ ...options, maxCell: 44 }, Math.max(720, least + 200));
    const [dx, dy] = [28, 62];
    const width = Math.max(lay.width + 2 * dx, 2 * dx + textWidth(title, 16, 600), lay.left + 2 * dx + 330);
    const height = dy + lay.height + 76;
    const { ink, quiet } = svgPalette();
    const moved = (x, y, children) => svgGroup({ transform: `translate(${x} ${y})` }, children);
    const cells = moved(dx + lay.left, dy + lay.top, [svgCells(lay), svgOutlines(lay)]);
    return svgDocument(width, height, title, [
      ...svgCard(width, height, title),
      options.masked ? svgHatch() : "",
      moved(dx, dy, [svgLabels(lay, ink, quiet)]),
      cells,
      svgLegend(dx + lay.left, dy + lay.height + 24, quiet),
    ]);
  }

  function svgLabels(lay, ink, quiet) {
    const middle = lay.down / 2 + 4.5;
    const sideText = options.rows.flatMap((text, r) =>
      r % lay.rowStep ? [] : [svgText(lay.left - 12, lay.top + r * lay.down + middle, shortened(text, lay.left - 14))],
    );
    const headText = options.columns.flatMap((text, c) => {
      if (c % lay.columnStep) return [];
      const x = lay.left + (c + 0.5) * lay.across + (lay.angle === -90 ? 4.5 : 0);
      const transform = lay.angle ? `rotate(${lay.angle} ${x} ${lay.top - 10})` : null;
      const anchor = lay.angle ? "start" : "middle";
      return [svgText(x, lay.top - 10, shortened(text, 140), { transform, "text-anchor": anchor })];
    });
    const face = { fill: ink, "font-size": LABEL_SIZE };
    return svgGroup({}, [
      svgGroup({ ...face, "text-anchor": "end" }, sideText),
      svgGroup(face, headText),
      svgText(lay.left - 12, lay.top - 10, options.corner, { fill: quiet, "font-size": 11, "text-anchor": "end" }),
    ]);
  }

  function shortened(text, maxWidth) {
    const characters = Array.from(text);
    while (characters.length > 1 && textWidth(characters.join(""), LABEL_SIZE) > maxWidth) characters.splice(-2, 2, "…");
    return characters.join("");
  }

  function svgCells(lay) {
    const { rows, columns } = options;
    if (!lay.gap) {
      const size = { width: lay.across * columns.length, height: lay.down * rows.length };
      const sharp = { preserveAspectRatio: "none", "image-rendering": "pixelated" };
      const image = svgPart("image", { ...size, href: pixels().toDataURL(), ...sharp });
      const behind = svgRect(0, 0, size.width, size.height, { fill: "url(#hatch)" });
      return svgGroup({}, options.masked ? [behind, image] : [image]);
    }
    const scale = SCALES[options.colours];
    const parts = [];
    for (let r = 0; r < rows.length; r++) {
      for (let c = 0; c < columns.length; c++) {
        const share = shareOf(r, c);
        const look = { rx: lay.radius, fill: isMasked(r, c) ? "url(#hatch)" : scale.colour(share) };
        parts.push(svgRect(...cellRect(lay, r, c), look, [svgPart("title", {}, [describe({ r, c })])]));
        if (!lay.numbers || Math.abs(share) < MIN_SHOWN) continue;
        const face = { fill: scale.ink(share), "font-size": cellFontSize(lay), "text-anchor": "middle" };
        parts.push(svgText((c + 0.5) * lay.across, (r + 0.5) * lay.down + 4, format(value(r, c)), face));
      }
    }
    return svgGroup({}, parts);
  }

  function svgOutlines(lay) {
    const outlined = outlineStrokes(lay).map(([stroke, width, dashes]) => {
      const look = { stroke, "stroke-width": width, "stroke-dasharray": dashes.join(" ") || null };
      const rects = options.outlines.map(([r, c]) => svgRect(...cellRect(lay, r, c), { rx: lay.radius }));
      return svgGroup({ fill: "none", ...look }, rects);
    });
    return svgGroup({}, outlined);
  }

  function svgLegend(x, y, quiet) {
    const { colour: colourOf, low, high } = SCALES[options.colours];
    const steps = 84;
    const cells = Array.from({ length: steps }, (_, i) => {
      const fill = colourOf(low + ((high - low) * i) / (steps - 1));
      return svgRect(Math.round(x) + i * (168 / steps), y, 168 / steps, 8, { fill, "shape-rendering": "crispEdges" });
    });
    const endLabel = (end) => shortNumber(end * options.extent);
    const ends = [endLabel(low), options.rowExtents ? "row max" : endLabel(high)];
    const keys = [
      options.outlines.length && [{ fill: "none", stroke: svgPalette().ink, "stroke-dasharray": "4 2" }, "gold"],
      options.masked && [{ fill: "url(#hatch)", stroke: svgPalette().edge }, "masked"],
    ].filter(Boolean);
    return svgGroup({ fill: quiet, "font-size": 11 }, [
      ...keys.flatMap(([look, text], i) => [
        svgRect(x + 190 + 70 * i, y - 2, 12, 12, { rx: 2, ...look }),
        svgText(x + 208 + 70 * i, y + 8, text),
      ]),
      ...cells,
      svgText(x, y + 23, ends[0]),
      svgText(x + 84, y + 23, options.legend ?? "attention weight", { "text-anchor": "middle" }),
      svgText(x + 168, y + 23, ends[1], { "text-anchor": "end" }),
    ]);
  }

  return {
    element,
    update(changes) {
      Object.assign(options, changes);
      draw();
    },
    mark(point) {
      marked = point;
      if (layout) highlight();
    },
    svg,
    table,
    remove() {
      stopDrawing();
      element.remove();
    },
  };
}
