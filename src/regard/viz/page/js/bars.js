// Bar charts: a list of labelled bars in a figure, and single bars.
import { button, el } from "./dom.js";
import { signedColour } from "./colours.js";
import { figure } from "./figure.js";
import { svgCard, svgDocument, svgPalette, svgRect, svgText } from "./svg.js";
import { direction } from "./tokens.js";

/** A bar that fills this share (0 to 1) of its track. */
export function shareBar(share, colour) {
  const bar = el("span", { class: "share-bar" });
  Object.assign(bar.style, { width: `${Math.min(Math.max(share, 0), 1) * 100}%`, background: colour });
  return el("span", { class: "share-track" }, bar);
}

/**
 * A figure of bars. `rows` are [{label, value, before, error, text, excluded, act, actLabel}]: `before` is a value to
 * compare with (a thin second bar), `error` half the length of an error bar, `text` the formatted value, `excluded` a
 * row that is struck out, `act` the action of a click on its label. `columns` and `cells` make the table.
 */
export function barFigure(context, { title, note, rows, columns, cells, name, key = [] }) {
  const low = Math.min(0, ...rows.map((row) => row.value - (row.error ?? 0)));
  const high = Math.max(...rows.map((row) => Math.max(row.value + (row.error ?? 0), row.before ?? 0)), low + 1e-9, 0);
  const scale = (value) => (value - low) / (high - low);
  const keyTexts = key.map(([kind, text]) => el("span", { class: `key-${kind}`, text }));
  return figure(context, {
    title,
    note,
    name,
    legend: key.length ? el("p", { class: "bar-key quiet" }, keyTexts) : null,
    picture: el("ol", { class: "bar-list" }, rows.map((row) => barRow(row, scale))),
    table: () => ({ caption: title, columns, rows: rows.map(cells) }),
    svg: () => barDocument(title, rows, scale, key),
  });
}

function barRow(row, scale) {
  const track = el("span", { class: "bar-track", aria: { hidden: "true" } });
  const add = (kind, from, to) => {
    const bar = el("span", { class: kind });
    bar.style.left = `${100 * Math.min(scale(from), scale(to))}%`;
    bar.style.width = `${100 * Math.abs(scale(to) - scale(from))}%`;
    track.append(bar);
  };
  add(row.value < 0 ? "bar-now bar-negative" : "bar-now", 0, row.value);
  if (row.before !== undefined) add("bar-before", 0, row.before);
  if (row.error) add("bar-error", row.value - row.error, row.value + row.error);
  add("bar-zero", 0, 0);
  const label = row.act
    ? button(row.label, row.act, { class: "bar-name", aria: { label: row.actLabel ?? row.label } })
    : el("span", { class: "bar-name", text: row.label });
  label.dir = direction(row.label);
  const props = { class: row.excluded ? "bar-line excluded" : "bar-line", data: { label: row.label, value: row.value } };
  return el("li", props, label, track, el("span", { class: "bar-text num", text: row.text }));
}

/** The same bars as an SVG file, with their key below. */
function barDocument(title, rows, scale, key) {
  const { ink, quiet, card } = svgPalette();
  const [left, trackWidth, line, top] = [160, 360, 28, 66];
  const [width, height] = [left + trackWidth + 190, top + rows.length * line + (key.length ? 48 : 20)];
  const parts = svgCard(width, height, title);
  const bar = (from, to, y, thickness, fill) => {
    const [a, b] = [scale(Math.min(from, to)), scale(Math.max(from, to))];
    const shape = { rx: Math.min(2, thickness / 2), fill };
    return svgRect(left + trackWidth * a, y, trackWidth * (b - a), thickness, shape);
  };
  rows.forEach((row, i) => {
    const y = top + i * line;
    parts.push(svgText(left - 10, y + 13, row.label, { fill: ink, "font-size": 13, "text-anchor": "end" }));
    parts.push(bar(0, row.value, y + 2, 12, signedColour(row.value < 0 ? -1 : 1)));
    if (row.before !== undefined) parts.push(bar(0, row.before, y + 16, 4, quiet));
    for (const [thickness, fill] of row.error ? [[6, card], [2, ink]] : [])
      parts.push(bar(row.value - row.error, row.value + row.error, y + 8 - thickness / 2, thickness, fill));
    parts.push(svgText(left + trackWidth + 10, y + 13, row.text, { fill: quiet, "font-size": 12 }));
  });
  key.forEach(([kind, text], i) => {
    const [x, y] = [left + 180 * i, top + rows.length * line + 16];
    const [rise, thickness, fill] = kind === "before" ? [6, 4, quiet] : [9, 10, signedColour(1)];
    parts.push(svgRect(x, y - rise, 18, thickness, { rx: 2, fill }));
    parts.push(svgText(x + 26, y, text, { fill: quiet, "font-size": 12 }));
  });
  return svgDocument(width, height, title, parts);
}
