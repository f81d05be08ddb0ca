// Curves in one plot: drawn as SVG, walked with the arrow keys, the same numbers in a table and in the saved file.

import { el } from "./dom.js";
import { OKABE } from "./colours.js";
import { figure } from "./figure.js";
import {
  svgCard,
  svgDocument,
  svgElement,
  svgGroup,
  svgLine,
  svgPalette,
  svgPath,
  svgRect,
  svgText,
  textWidth,
} from "./svg.js";

const PLOT = { left: 56, right: 16, top: 12, bottom: 44 };

/** About `count` round numbers from `low` to `high`. */
function ticks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step)
    found.push(Number(tick.toPrecision(12)));
  return found;
}

export function shortNumber(number) {
  const text = Math.abs(number) >= 1000 ? number.toFixed(0) : String(Number(number.toPrecision(3)));
  return text.replace("-", "−");
}

function extents({ x, series }) {
  const ys = series
    .flatMap((line) => [...line.values, ...(line.low ?? []), ...(line.high ?? [])])
    .filter(Number.isFinite);
  const low = Math.min(0, ...ys);
  const high = Math.max(...ys, low + 1e-9);
  return { left: Math.min(...x.values), right: Math.max(...x.values), low, high: high + (high - low) * 0.04 };
}

/** The parts of the plot and the functions from numbers to places. */
function plot(options, width, height) {
  const { ink, quiet, edge } = svgPalette();
  const { left, right, low, high } = extents(options);
  const atX = (value) => PLOT.left + ((value - left) / (right - left || 1)) * (width - PLOT.left - PLOT.right);
  const atY = (value) => height - PLOT.bottom - ((value - low) / (high - low)) * (height - PLOT.top - PLOT.bottom);
  const parts = [];
  for (const tick of ticks(low, high)) {
    parts.push(svgLine(PLOT.left, atY(tick), width - PLOT.right, atY(tick), { stroke: edge }));
    parts.push(
      svgText(PLOT.left - 8, atY(tick) + 4, shortNumber(tick), { fill: quiet, "font-size": 11, "text-anchor": "end" }),
    );
  }
  for (const tick of ticks(left, right, width < 480 ? 4 : 8)) {
    parts.push(
      svgText(atX(tick), height - PLOT.bottom + 16, shortNumber(tick), {
        fill: quiet,
        "font-size": 11,
        "text-anchor": "middle",
      }),
    );
  }
  parts.push(
    svgText((PLOT.left + width - PLOT.right) / 2, height - 8, options.x.label, {
      fill: quiet,
      "font-size": 12,
      "text-anchor": "middle",
    }),
  );
  options.series.forEach((line, i) => parts.push(...curve(line, i, options.x.values, atX, atY)));
  return { parts, atX, atY, ink };
}

function curve(line, i, xs, atX, atY) {
  const stroke = line.colour ?? OKABE[i % OKABE.length];
  const places = (values) => values.map((value, k) => [atX(xs[k]), atY(value)]).filter(([, y]) => Number.isFinite(y));
  const joined = (points) => points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L ");
  const parts = [];
  if (line.low && line.high) {
    const around = [...places(line.high), ...places(line.low).reverse()];
    parts.push(svgPath(`M ${joined(around)} Z`, { fill: stroke, "fill-opacity": 0.15, stroke: "none" }));
  }
  const dashes = line.dashed ? "6 4" : null;
  parts.push(
    svgPath(`M ${joined(places(line.values))}`, {
      stroke,
      "stroke-width": 2,
      "stroke-dasharray": dashes,
      "stroke-linejoin": "round",
    }),
  );
  return parts;
}

/** Names of the curves with a stroke of their colour, as parts of a picture `width` wide; also how high they are. */
function namesOf(series, width, y) {
  const { ink } = svgPalette();
  let [x, line] = [PLOT.left, y];
  const parts = [];
  series.forEach((one, i) => {
    const wide = 34 + textWidth(one.name, 12) + 18;
    if (x + wide > width && x > PLOT.left) [x, line] = [PLOT.left, line + 18];
    const stroke = one.colour ?? OKABE[i % OKABE.length];
    parts.push(
      svgLine(x, line - 4, x + 26, line - 4, {
        stroke,
        "stroke-width": 3,
        "stroke-dasharray": one.dashed ? "6 4" : null,
      }),
    );
    parts.push(svgText(x + 34, line, one.name, { fill: ink, "font-size": 12 }));
    x += wide;
  });
  return { parts, bottom: line };
}

/** A figure of curves; `update` changes the options and draws again. */
export function lineChart(context, given) {
  let options = given;
  let at = 0;
  const room = el("div", { class: "chart" }); // a slider once there are values to slide over
  const box = figure(context, {
    title: options.title,
    note: options.note,
    picture: room,
    name: options.name ?? "curves",
    trace: options.trace,
    table: () => ({
      columns: [options.x.label, ...options.series.map((line) => line.name)],
      rows: options.x.values.map((x, i) => [
        shortNumber(x),
        ...options.series.map((line) => Number(line.values[i]?.toPrecision(4))),
      ]),
    }),
    svg: () => {
      const [width, height] = [720, 420];
      const names = namesOf(options.series, width - 56, 24);
      const inner = plot(options, width - 56, height - 90 - names.bottom + 24);
      const moved = (dy, parts) => svgGroup({ transform: `translate(28 ${dy})` }, parts);
      const parts = [moved(54, names.parts), moved(54 + names.bottom, inner.parts)];
      return svgDocument(width, height, options.title, [...svgCard(width, height, options.title), ...parts]);
    },
  });

  function saying(i) {
    const values = options.series.map((line) => `${line.name} ${shortNumber(line.values[i] ?? NaN)}`);
    return `${options.x.label} ${shortNumber(options.x.values[i])}: ${values.join(", ")}`;
  }

  function draw() {
    const width = Math.max(room.clientWidth, 260);
    if (!options.series.length || !options.x.values.length) return room.replaceChildren();
    at = Math.min(at, options.x.values.length - 1);
    const names = namesOf(options.series, width, 14);
    const height = Math.round(Math.min(300, Math.max(200, width * 0.5)));
    const inner = plot(options, width, height);
    const x = inner.atX(options.x.values[at]);
    const cursor = svgLine(x, PLOT.top, x, height - PLOT.bottom, {
      stroke: inner.ink,
      "stroke-width": 1,
      "stroke-dasharray": "2 3",
    });
    const here = options.series.map((line, i) =>
      svgRect(x - 3.5, inner.atY(line.values[at] ?? 0) - 3.5, 7, 7, {
        rx: 3.5,
        fill: line.colour ?? OKABE[i % OKABE.length],
      }),
    );
    const moved = svgGroup({ transform: `translate(0 ${names.bottom})` }, [
      ...inner.parts,
      svgGroup({ class: "chart-cursor" }, [cursor, ...here]),
    ]);
    const picture = svgElement(width, height + names.bottom, options.title, [...names.parts, moved]);
    picture.setAttribute("aria-hidden", "true");
    room.replaceChildren(picture, el("p", { class: "chart-said num", aria: { hidden: "true" }, text: saying(at) }));
    room.tabIndex = 0;
    room.setAttribute("role", "slider");
    room.setAttribute("aria-label", options.title);
    room.setAttribute("aria-valuemin", 0);
    room.setAttribute("aria-valuemax", options.x.values.length - 1);
    room.setAttribute("aria-valuenow", at);
    room.setAttribute("aria-valuetext", saying(at));
  }

  function move(to) {
    at = Math.min(Math.max(to, 0), options.x.values.length - 1);
    draw();
  }

  room.addEventListener("keydown", (event) => {
    const last = options.x.values.length - 1;
    const moves = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: last };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    move(moves[event.key]);
  });
  room.addEventListener("pointermove", (event) => {
    const { left, right } = extents(options);
    const edge = room.getBoundingClientRect();
    const share = (event.clientX - edge.left - PLOT.left) / (edge.width - PLOT.left - PLOT.right);
    const value = left + share * (right - left);
    const distance = (i) => Math.abs(options.x.values[i] - value);
    let nearest = 0;
    options.x.values.forEach((_, i) => distance(i) < distance(nearest) && (nearest = i));
    if (nearest !== at) move(nearest);
  });

  let drawnWidth = 0;
  const watch = new ResizeObserver(() => {
    if (room.clientWidth === drawnWidth) return;
    drawnWidth = room.clientWidth;
    draw();
  });
  watch.observe(room);
  addEventListener("regard-theme", draw);
  context.signal.addEventListener("abort", () => {
    watch.disconnect();
    removeEventListener("regard-theme", draw);
  });
  box.update = (changes) => {
    options = { ...options, ...changes };
    box.retitle(options.title, options.note);
    draw();
    box.refresh();
  };
  return box;
}
