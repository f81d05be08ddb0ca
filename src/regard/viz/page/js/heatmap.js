// A heat map: cells on a canvas, labels as text, and one live cell over it that carries focus and meaning.
//
// To a screen reader it is a grid of which only the cell at hand exists; to a keyboard it is one tab stop with arrows.

import { el, clear } from "./dom.js";
import { SCALES, byteColours, packedPixel } from "./colours.js";
import { direction, isolated } from "./tokens.js";
import { canvasHatch, svgCard, svgDocument, svgGroup, svgHatch, svgPalette, svgPart, svgRect, svgText } from "./svg.js";
import { textWidth } from "./svg.js";

const LABEL_SIZE = 13;
const LEAST_LABEL = 12; // pixels that a label needs for itself; where cells are smaller, only some are written
const SHOWN = 0.05; // weights below this are not written into their cells
const BIG_TABLE = 64; // columns; tables of wider maps list the strongest places of each row
const STRONGEST = 8;
const DASHES = [5, 3]; // of the gold alignment's outlines: the pointer's is whole, and of another colour

/** How small cells may get before the map scrolls inside its own room. */
function leastCell(columns) {
  return columns <= 80 ? 14 : columns <= 200 ? 6 : 2;
}

/** Where everything lies: cells of `across` x `down` pixels, of which `gap` stays empty. */
function layOut({ rows, columns, maxCell, corner }, width) {
  const rowWidth = Math.min(
    Math.max(...rows.map((row) => textWidth(row, LABEL_SIZE)), textWidth(corner, 11)),
    width < 480 ? 92 : 160,
  );
  const left = Math.ceil(rowWidth) + 14;
  const room = Math.max(width - left - 4, 40);
  const least = leastCell(columns.length);
  const down = Math.max(
    least,
    Math.min(maxCell, Math.floor(room / columns.length)),
    Math.min(maxCell, rows.length <= 24 ? 20 : least),
  );
  const widest = Math.min(Math.max(...columns.map((column) => textWidth(column, LABEL_SIZE))), 140);
  let across = Math.max(least, Math.min(maxCell, Math.floor(room / columns.length)));
  let angle = 0;
  const level = Math.ceil(Math.max(across, widest + 14, Math.min(down * 1.5, Math.floor(room / columns.length))));
  if (level <= 96 && level * columns.length <= room) across = level;
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
    rowStep: Math.ceil(LEAST_LABEL / down),
    columnStep: Math.ceil(LEAST_LABEL / across),
    width: left + across * columns.length + overhang,
    height: headHeight + 6 + down * rows.length,
    numbers: small >= 30 && across >= 34,
  };
}

export function heatMap(given) {
  const options = {
    scale: 1,
    colours: "weight",
    extent: 1,
    name: "heat map",
    corner: "looks at →",
    outlines: [],
    masked: null, // ones where a cell is masked: hatched instead of coloured
    digits: 2,
    maxCell: 44,
    announce: () => {},
    onFocus: () => {},
    onOpen: () => {},
    ...given,
  };
  let layout = null;
  let at = { r: 0, c: 0 }; // the cell that has the focus when the map has it; -1 is a heading
  let pointed = null; // the cell under the pointer
  let marked = null; // the cell a linked map points at

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
  const shareOf = (r, c) => value(r, c) / (options.rowExtents?.[r] ?? options.extent); // of the scale's end
  const isMasked = (r, c) => Boolean(options.masked?.[r * options.columns.length + c]);
  const write = (number) => number.toFixed(options.digits).replace("-", "−");

  function saying({ r, c }) {
    if (r < 0) return options.columnLabel?.(c) ?? `column ${isolated(options.columns[c])}`;
    if (c < 0) return options.rowLabel?.(r) ?? `row ${isolated(options.rows[r])}: ${strongest(r)}`;
    const said = isMasked(r, c) ? "masked" : write(value(r, c));
    return (
      options.label?.(r, c, value(r, c)) ?? `${isolated(options.rows[r])} → ${isolated(options.columns[c])}: ${said}`
    );
  }

  /** The places of a row with the greatest numbers, in words. */
  function strongest(r, count = 3) {
    return places(r, count)
      .map((c) => `${isolated(options.columns[c])} ${write(value(r, c))}`)
      .join(", ");
  }

  function places(r, count) {
    const order = options.columns.map((_, c) => c);
    order.sort((a, b) => Math.abs(value(r, b)) - Math.abs(value(r, a)));
    return order.slice(0, count);
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

  function put(node, place) {
    const { x, y, w, h } = box(place);
    Object.assign(node.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
  }

  function placeCell() {
    put(cell, at);
    cell.setAttribute("role", at.r < 0 ? "columnheader" : at.c < 0 ? "rowheader" : "gridcell");
    row.setAttribute("aria-rowindex", at.r + 2);
    cell.setAttribute("aria-colindex", at.c + 2);
    cell.setAttribute("aria-label", saying(at));
    cell.dataset.r = at.r;
    cell.dataset.c = at.c;
  }

  /** Labels of the row and column at hand stand out; a linked map's cell is outlined. */
  function highlight() {
    if (!layout) return;
    const hand = pointed ?? (document.activeElement === cell ? at : marked);
    for (const label of sideLabels.children)
      label.classList.toggle("lit", hand !== null && Number(label.dataset.i) === hand.r);
    for (const label of heads.children)
      label.classList.toggle("lit", hand !== null && Number(label.dataset.i) === hand.c);
    const shown = pointed ?? marked;
    ghost.hidden = shown === null || (shown.r < 0 && shown.c < 0);
    if (!ghost.hidden) {
      if (shown.r >= 0 && shown.c >= 0) put(ghost, shown);
      else putLine(shown);
    }
  }

  /** The outline of a whole row or column. */
  function putLine({ r, c }) {
    const from = box({ r: Math.max(r, 0), c: Math.max(c, 0) });
    const wide = r >= 0 ? layout.across * options.columns.length : layout.across;
    const high = c >= 0 ? layout.down * options.rows.length : layout.down;
    const size = { left: `${from.x}px`, top: `${from.y}px`, width: `${wide}px`, height: `${high}px` };
    Object.assign(ghost.style, size);
  }

  function tell(place) {
    options.onFocus(place && { ...place, value: place.r >= 0 && place.c >= 0 ? value(place.r, place.c) : null });
  }

  function move(r, c) {
    if (!layout) return;
    const { rows, columns } = options;
    const to = { r: Math.min(Math.max(r, -1), rows.length - 1), c: Math.min(Math.max(c, -1), columns.length - 1) };
    if (to.r < 0 && to.c < 0) return;
    at = to;
    placeCell();
    cell.scrollIntoView?.({ block: "nearest", inline: "nearest" });
    highlight();
    options.announce(saying(at));
    tell(at);
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
    if (event.key === "Enter" || event.key === " ") tellOpen(at);
    else if (moves[event.key]) move(...moves[event.key]);
    else return;
    event.preventDefault();
  });
  cell.addEventListener("focus", () => {
    highlight();
    options.announce(saying(at));
    tell(at);
  });
  cell.addEventListener("blur", highlight);

  function tellOpen(place) {
    options.onOpen({ ...place, value: place.r >= 0 && place.c >= 0 ? value(place.r, place.c) : null });
  }

  function placeUnder(event) {
    const edge = plane.getBoundingClientRect();
    const sideways = element.scrollLeft > 0 && event.clientX - element.getBoundingClientRect().left < layout.left;
    const c = sideways ? -1 : Math.floor((event.clientX - edge.left - layout.left) / layout.across);
    const r = Math.floor((event.clientY - edge.top - layout.top) / layout.down);
    const place = { r: Math.max(r, -1), c: Math.max(c, -1) };
    const outside = place.r >= options.rows.length || place.c >= options.columns.length || (place.r < 0 && place.c < 0);
    return outside ? null : place;
  }

  function point(event) {
    if (!layout) return;
    const place = placeUnder(event);
    if (place?.r === pointed?.r && place?.c === pointed?.c) return;
    pointed = place;
    tip.hidden = place === null;
    if (place) {
      tip.textContent = saying(place);
      const { x, y, w } = box(place);
      const room = element.clientWidth + element.scrollLeft;
      tip.style.top = `${Math.max(y - 34, 0)}px`;
      const centred = Math.min(x + w / 2 - tip.offsetWidth / 2, room - tip.offsetWidth - 2);
      tip.style.left = `${Math.max(element.scrollLeft, centred)}px`;
    }
    highlight();
    tell(place ?? (document.activeElement === cell ? at : null));
  }

  plane.addEventListener("pointermove", (event) => event.pointerType !== "touch" && point(event));
  plane.addEventListener("pointerleave", () => {
    if (!pointed) return;
    pointed = null;
    tip.hidden = true;
    highlight();
    tell(document.activeElement === cell ? at : null);
  });
  plane.addEventListener("click", (event) => {
    const place = layout && placeUnder(event);
    if (!place) return;
    at = place;
    placeCell();
    cell.focus({ preventScroll: true });
    tellOpen(place);
  });

  function drawLabels() {
    const { left, top, across, down, angle, rowStep, columnStep } = layout;
    clear(heads);
    clear(sideLabels);
    Object.assign(sideLabels.style, { width: `${left - 6}px`, height: `${layout.height}px` });
    options.rows.forEach((text, i) => {
      if (i % rowStep) return;
      const label = el("span", { class: "map-label", data: { i }, dir: direction(text), title: text, text });
      Object.assign(label.style, { top: `${top + i * down}px`, lineHeight: `${Math.max(down, LEAST_LABEL)}px` });
      sideLabels.append(label);
    });
    options.columns.forEach((text, i) => {
      if (i % columnStep) return;
      const label = el("span", {
        class: `map-head${angle ? (angle === -45 ? " slanted" : " upright") : ""}`,
        data: { i },
      });
      label.append(el("bdi", { dir: direction(text), title: text, text }));
      const wide = columnStep > 1 ? LEAST_LABEL : across;
      Object.assign(label.style, { left: `${left + i * across}px`, width: `${wide}px`, height: `${top - 6}px` });
      heads.append(label);
    });
    const corner = el("span", { class: "map-corner", data: { i: -2 }, text: options.corner });
    corner.style.top = `${top - 24}px`;
    sideLabels.append(corner);
  }

  function pixels() {
    const { rows, columns, values, scale, extent, rowExtents, masked } = options;
    const image = new ImageData(columns.length, rows.length);
    const packed = new Uint32Array(image.data.buffer);
    const { rgb } = SCALES[options.colours];
    if (rowExtents) {
      const table = byteColours();
      for (let i = 0; i < packed.length; i++) {
        packed[i] = table[Math.round((255 * values[i] * scale) / rowExtents[Math.floor(i / columns.length)])];
      }
    } else if (values instanceof Uint8Array) {
      const table = Uint32Array.from({ length: 256 }, (_, byte) => packedPixel(rgb((byte * scale) / extent)));
      for (let i = 0; i < packed.length; i++) packed[i] = table[values[i]];
    } else {
      for (let i = 0; i < packed.length; i++) packed[i] = packedPixel(rgb((values[i] * scale) / extent));
    }
    masked?.forEach((one, i) => one && (packed[i] = 0)); // what lies behind is seen there
    const small = document.createElement("canvas");
    small.width = columns.length;
    small.height = rows.length;
    small.getContext("2d").putImageData(image, 0, 0);
    return small;
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
      paint.font = `${Math.min(12, across * 0.32)}px ${getComputedStyle(element).fontFamily}`;
      for (let r = 0; r < rows.length; r++) {
        for (let c = 0; c < columns.length; c++) {
          const share = shareOf(r, c);
          paint.fillStyle = isMasked(r, c) ? hatch : scale.colour(share);
          paint.beginPath();
          paint.roundRect(c * across + gap / 2, r * down + gap / 2, across - gap, down - gap, radius);
          paint.fill();
          if (layout.numbers && Math.abs(share) >= SHOWN) {
            paint.fillStyle = scale.ink(share);
            paint.fillText(write(value(r, c)), (c + 0.5) * across, (r + 0.5) * down + 0.5);
          }
        }
      }
    }
    drawOutlines(paint);
  }

  function drawOutlines(paint) {
    const { across, down, gap, radius } = layout;
    const { card, ink } = svgPalette();
    const line = Math.max(1, Math.min(2.4, down / 8));
    for (const [stroke, width, dashes] of [
      [card, line * 2.2, []],
      [ink, line, DASHES],
    ]) {
      paint.setLineDash(dashes);
      paint.strokeStyle = stroke;
      paint.lineWidth = width;
      for (const [r, c] of options.outlines) {
        paint.beginPath();
        paint.roundRect(c * across + gap / 2, r * down + gap / 2, across - gap, down - gap, radius);
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
    fewLabels.textContent = `One label in ${step} is written; point at a cell, or use the arrow keys, for the rest.`;
    drawLabels();
    drawCells();
    placeCell();
    highlight();
  }

  let drawnWidth = 0;
  const watch = new ResizeObserver(() => {
    if (element.clientWidth === drawnWidth) return;
    drawnWidth = element.clientWidth;
    draw();
  });
  watch.observe(element);
  addEventListener("regard-theme", draw);

  function table() {
    const { rows, columns } = options;
    if (columns.length <= BIG_TABLE) {
      return {
        caption: options.name,
        columns: ["", ...columns],
        rows: rows.map((label, r) => [
          label,
          ...columns.map((_, c) =>
            isMasked(r, c)
              ? "masked"
              : value(r, c)
                  .toFixed(options.digits + 1)
                  .replace("-", "−"),
          ),
        ]),
      };
    }
    return {
      caption: `${options.name}: the ${STRONGEST} greatest of each row`,
      columns: ["", ...Array.from({ length: STRONGEST }, (_, i) => `${i + 1}`)],
      rows: rows.map((label, r) => [label, ...places(r, STRONGEST).map((c) => `${columns[c]} ${write(value(r, c))}`)]),
    };
  }

  /** The map as an SVG file, laid out for a slide rather than for the room it has on the page. */
  function svg(title) {
    const lay = layOut(
      { ...options, maxCell: 44 },
      Math.max(720, leastCell(options.columns.length) * options.columns.length + 200),
    );
    const [dx, dy] = [28, 62];
    const width = Math.max(lay.width + 2 * dx, 2 * dx + textWidth(title, 16, 600), lay.left + 2 * dx + 330);
    const height = dy + lay.height + 76;
    const { ink, quiet } = svgPalette();
    const parts = [...svgCard(width, height, title), options.masked ? svgHatch() : ""];
    parts.push(
      svgGroup({ transform: `translate(${dx} ${dy})` }, [svgLabels(lay, ink, quiet), svgCells(lay), svgOutlines(lay)]),
    );
    parts.push(svgLegend(dx + lay.left, dy + lay.height + 24, quiet));
    return svgDocument(width, height, title, parts);
  }

  function svgLabels(lay, ink, quiet) {
    const middle = lay.down / 2 + 4.5;
    const sideText = options.rows
      .map((text, r) =>
        r % lay.rowStep
          ? null
          : svgText(lay.left - 12, lay.top + r * lay.down + middle, shortened(text, lay.left - 14)),
      )
      .filter(Boolean);
    const headText = options.columns
      .map((text, c) => {
        if (c % lay.columnStep) return null;
        const x = lay.left + (c + 0.5) * lay.across + (lay.angle === -90 ? 4.5 : 0);
        const turn = lay.angle ? `rotate(${lay.angle} ${x} ${lay.top - 10})` : null;
        return svgText(x, lay.top - 10, shortened(text, 140), {
          transform: turn,
          "text-anchor": lay.angle ? "start" : "middle",
        });
      })
      .filter(Boolean);
    const face = { fill: ink, "font-size": LABEL_SIZE };
    return svgGroup({}, [
      svgGroup({ ...face, "text-anchor": "end" }, sideText),
      svgGroup(face, headText),
      svgText(lay.left - 12, lay.top - 10, options.corner, { fill: quiet, "font-size": 11, "text-anchor": "end" }),
    ]);
  }

  function shortened(text, room) {
    const signs = Array.from(text);
    while (signs.length > 1 && textWidth(signs.join(""), LABEL_SIZE) > room) signs.splice(-2, 2, "…");
    return signs.join("");
  }

  function svgCells(lay) {
    const { rows, columns } = options;
    if (!lay.gap) {
      const size = { width: lay.across * columns.length, height: lay.down * rows.length };
      const sharp = { preserveAspectRatio: "none", "image-rendering": "pixelated" };
      const image = svgPart("image", { x: lay.left, y: lay.top, ...size, href: pixels().toDataURL(), ...sharp });
      const behind = svgRect(lay.left, lay.top, size.width, size.height, { fill: "url(#hatch)" });
      return svgGroup({}, options.masked ? [behind, image] : [image]);
    }
    const scale = SCALES[options.colours];
    const parts = [];
    for (let r = 0; r < rows.length; r++) {
      for (let c = 0; c < columns.length; c++) {
        const share = shareOf(r, c);
        const [x, y] = [lay.left + c * lay.across, lay.top + r * lay.down];
        const size = [lay.across - lay.gap, lay.down - lay.gap];
        const name = svgPart("title", {}, [saying({ r, c })]);
        parts.push(
          svgPart(
            "rect",
            {
              x: x + lay.gap / 2,
              y: y + lay.gap / 2,
              width: size[0],
              height: size[1],
              rx: lay.radius,
              fill: isMasked(r, c) ? "url(#hatch)" : scale.colour(share),
            },
            [name],
          ),
        );
        if (lay.numbers && Math.abs(share) >= SHOWN) {
          const face = {
            fill: scale.ink(share),
            "font-size": Math.min(12, lay.across * 0.32),
            "text-anchor": "middle",
          };
          parts.push(svgText(x + lay.across / 2, y + lay.down / 2 + 4, write(value(r, c)), face));
        }
      }
    }
    return svgGroup({}, parts);
  }

  function svgOutlines(lay) {
    const { card, ink } = svgPalette();
    const line = Math.max(1, Math.min(2.4, lay.down / 8));
    const outline = (stroke, width, dashes) =>
      options.outlines.map(([r, c]) =>
        svgRect(
          lay.left + c * lay.across + lay.gap / 2,
          lay.top + r * lay.down + lay.gap / 2,
          lay.across - lay.gap,
          lay.down - lay.gap,
          {
            rx: lay.radius,
            fill: "none",
            stroke,
            "stroke-width": width,
            "stroke-dasharray": dashes,
          },
        ),
      );
    return svgGroup({}, [...outline(card, line * 2.2), ...outline(ink, line, DASHES.join(" "))]);
  }

  function svgLegend(x, y, quiet) {
    const { colour: colourOf, low, high } = SCALES[options.colours];
    const steps = 84;
    const cells = Array.from({ length: steps }, (_, i) => {
      const fill = colourOf(low + ((high - low) * i) / (steps - 1));
      return svgRect(Math.round(x) + i * (168 / steps), y, 168 / steps, 8, { fill, "shape-rendering": "crispEdges" });
    });
    const written = (end) => String(Number((end * options.extent).toPrecision(3))).replace("-", "−");
    const ends = [written(low), options.rowExtents ? "row max" : written(high)];
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
    mark(place) {
      marked = place;
      if (layout) highlight();
    },
    focus(r, c) {
      at = { r, c };
      if (layout) placeCell();
      cell.focus();
    },
    value,
    svg,
    table,
    remove() {
      watch.disconnect();
      removeEventListener("regard-theme", draw);
      element.remove();
    },
  };
}
