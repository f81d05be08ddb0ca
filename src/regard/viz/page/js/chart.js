// Line charts: drawn as SVG, with a cursor that the arrow keys move, a table, and an exported file.

import { drawOnChange, el } from "./dom.js";
import { OKABE } from "./colours.js";
import { figure } from "./figure.js";
import { shortNumber } from "./numbers.js";
import { svgCard, svgDocument, svgElement, svgGroup, svgLine, svgPalette, svgPath, svgRect, svgText } from "./svg.js";
import { textWidth } from "./svg.js";

const PLOT = { left: 56, right: 16, top: 12, bottom: 44 };

/** About `count` round numbers from `low` to `high`. */
function ticks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough);
  const result = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step)
    result.push(Number(tick.toPrecision(12)));
  return result;
}

function extents({ x, series }) {
  const ys = series
    .flatMap((line) => [...line.values, ...(line.low ?? []), ...(line.high ?? [])])
    .filter(Number.isFinite);
  const low = Math.min(0, ...ys);
  const high = Math.max(...ys, low + 1e-9);
  return { left: Math.min(...x.values), right: Math.max(...x.values), low, high: high + (high - low) * 0.04 };
}

const strokeOf = (line, i) => line.colour ?? OKABE[i % OKABE.length];
const dashesOf = (line) => (line.dashed ? "6 4" : null);

/** The parts of the plot, and the functions from values to coordinates. */
function plot(options, width, height) {
  const { ink, quiet, edge } = svgPalette();
  const { left, right, low, high } = extents(options);
  const atX = (value) => PLOT.left + ((value - left) / (right - left || 1)) * (width - PLOT.left - PLOT.right);
  const atY = (value) => height - PLOT.bottom - ((value - low) / (high - low)) * (height - PLOT.top - PLOT.bottom);
  const label = (x, y, text, size, anchor) => svgText(x, y, text, { fill: quiet, "font-size": size, "text-anchor": anchor });
  const parts = [];
  for (const tick of ticks(low, high)) {
    parts.push(svgLine(PLOT.left, atY(tick), width - PLOT.right, atY(tick), { stroke: edge }));
    parts.push(label(PLOT.left - 8, atY(tick) + 4, shortNumber(tick), 11, "end"));
  }
  for (const tick of ticks(left, right, width < 480 ? 4 : 8))
    parts.push(label(atX(tick), height - PLOT.bottom + 16, shortNumber(tick), 11, "middle"));
  parts.push(label((PLOT.left + width - PLOT.right) / 2, height - 8, options.x.label, 12, "middle"));
  options.series.forEach((line, i) => parts.push(...curve(line, i, options.x.values, atX, atY)));
  return { parts, atX, atY, ink };
}

function curve(line, i, xs, atX, atY) {
  const stroke = strokeOf(line, i);
  const points = (values) => values.map((value, k) => [atX(xs[k]), atY(value)]).filter(([, y]) => Number.isFinite(y));
  const joined = (coordinates) => coordinates.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join(" L ");
  const parts = [];
  if (line.low && line.high) {
    const around = [...points(line.high), ...points(line.low).reverse()];
    parts.push(svgPath(`M ${joined(around)} Z`, { fill: stroke, "fill-opacity": 0.15, stroke: "none" }));
  }
  const look = { stroke, "stroke-width": 2, "stroke-dasharray": dashesOf(line), "stroke-linejoin": "round" };
  return [...parts, svgPath(`M ${joined(points(line.values))}`, look)];
}

/** The names of the curves with a stroke of their colour, in a picture `width` wide, and where they end. */
function namesOf(series, width, y) {
  const { ink } = svgPalette();
  let [x, line] = [PLOT.left, y];
  const parts = [];
  series.forEach((one, i) => {
    const wide = 34 + textWidth(one.name, 12) + 18;
    if (x + wide > width && x > PLOT.left) [x, line] = [PLOT.left, line + 18];
    const look = { stroke: strokeOf(one, i), "stroke-width": 3, "stroke-dasharray": dashesOf(one) };
    parts.push(svgLine(x, line - 4, x + 26, line - 4, look));
    parts.push(svgText(x + 34, line, one.name, { fill: ink, "font-size": 12 }));
    x += wide;
  });
  return { parts, bottom: line };
}

/** A figure of curves; `update` changes the options and draws again. */
export function lineChart(context, given) {
  let options = given;
  let at = 0;
  const chart = el("div", { class: "chart" }); // a slider to a screen reader
  const box = figure(context, {
    title: options.title,
    note: options.note,
    picture: chart,
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

  function describe(i) {
    const values = options.series.map((line) => `${line.name} ${shortNumber(line.values[i] ?? NaN)}`);
    return `${options.x.label} ${shortNumber(options.x.values[i])}: ${values.join(", ")}`;
  }

  function draw() {
    const width = Math.max(chart.clientWidth, 260);
    if (!options.series.length || !options.x.values.length) return chart.replaceChildren();
    at = Math.min(at, options.x.values.length - 1);
    const names = namesOf(options.series, width, 14);
    const height = Math.round(Math.min(300, Math.max(200, width * 0.5)));
    const inner = plot(options, width, height);
    const x = inner.atX(options.x.values[at]);
    const look = { stroke: inner.ink, "stroke-width": 1, "stroke-dasharray": "2 3" };
    const cursor = svgLine(x, PLOT.top, x, height - PLOT.bottom, look);
    const here = options.series.map((line, i) =>
      svgRect(x - 3.5, inner.atY(line.values[at] ?? 0) - 3.5, 7, 7, { rx: 3.5, fill: strokeOf(line, i) }),
    );
    const moved = svgGroup({ transform: `translate(0 ${names.bottom})` }, [
      ...inner.parts,
      svgGroup({ class: "chart-cursor" }, [cursor, ...here]),
    ]);
    const picture = svgElement(width, height + names.bottom, options.title, [...names.parts, moved]);
    picture.setAttribute("aria-hidden", "true");
    chart.replaceChildren(picture, el("p", { class: "chart-text num", aria: { hidden: "true" }, text: describe(at) }));
    chart.tabIndex = 0;
    chart.role = "slider";
    const range = { valuemin: 0, valuemax: options.x.values.length - 1, valuenow: at, valuetext: describe(at) };
    for (const [name, value] of Object.entries({ label: options.title, ...range })) chart.setAttribute(`aria-${name}`, value);
  }

  function move(to) {
    at = Math.min(Math.max(to, 0), options.x.values.length - 1);
    draw();
  }

  chart.addEventListener("keydown", (event) => {
    const last = options.x.values.length - 1;
    const moves = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: last };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    move(moves[event.key]);
  });
  chart.addEventListener("pointermove", (event) => {
    const { left, right } = extents(options);
    const edge = chart.getBoundingClientRect();
    const share = (event.clientX - edge.left - PLOT.left) / (edge.width - PLOT.left - PLOT.right);
    const value = left + share * (right - left);
    const distance = (i) => Math.abs(options.x.values[i] - value);
    let nearest = 0;
    options.x.values.forEach((_, i) => distance(i) < distance(nearest) && (nearest = i));
    if (nearest !== at) move(nearest);
  });

  context.signal.addEventListener("abort", drawOnChange(chart, draw));
  box.update = (changes) => {
    options = { ...options, ...changes };
    box.retitle(options.title, options.note);
    draw();
    box.refresh();
  };
  return box;
}
