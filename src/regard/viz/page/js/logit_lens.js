// The logit lens: the predictions that the output layer makes from the residual stream after each addition.
import { el } from "./dom.js";
import { colour, ink } from "./colours.js";
import { figure, legend } from "./figure.js";
import { percent } from "./numbers.js";
import { svgCard, svgDocument, svgPalette, svgRect, svgText } from "./svg.js";
import { direction, tokenLabels, visible } from "./tokens.js";

const LENS_TITLE = "Most likely next token after each addition";
const NEAR = 5; // tokens to either side of the selected one

/** The most likely next tokens of one position, in a line. */
export function lensLine(top) {
  return el(
    "p",
    { class: "lens-line" },
    el("span", { class: "quiet", text: "Logit lens: " }),
    top.slice(0, 3).flatMap(({ text, p }) => [el("b", { text: visible(text) }), ` ${percent(p)}  `]),
  );
}

export function lensStage() {
  return {
    id: "lens",
    title: "Logit lens",
    about: "The output layer applied to the residual stream after each addition: the prediction if the model ended there.",
    side: "inputs",
    async show(content, context, selection) {
      const { header } = selection.trace();
      const layers = await selection.trace().layers();
      const side = layers[0].side;
      const tokens = header.axes[side].elements;
      const labels = tokenLabels(tokens);
      const selected = selection.position(side);
      const computed = (i) => layers[0].top[i].length > 0; // for very long inputs only the last tokens
      const near = labels.map((_, i) => i).filter((i) => Math.abs(i - selected) <= NEAR && computed(i));
      const heading = (i) =>
        el("th", { scope: "col", class: i === selected ? "selected" : "", dir: direction(labels[i]), text: labels[i] });
      const head = el("tr", {}, el("td", {}), near.map(heading));
      const body = layers.map((layer) =>
        el("tr", {}, el("th", { scope: "row", text: layer.label }), near.map((i) => lensCell(layer.top[i][0], i === selected))),
      );
      const table = el("table", { class: "lens" }, el("thead", {}, head), el("tbody", {}, body));
      content.append(
        figure(context, {
          title: LENS_TITLE,
          note: `Columns: the last input token. Colours: the probability of the prediction. Selected: ${labels[selected]}.`,
          picture: el("div", { class: "scroller", tabIndex: 0, role: "region", aria: { label: LENS_TITLE } }, table),
          legend: legend({ scale: "weight", label: "probability", low: "0", high: "1" }),
          table: () => ({
            columns: ["after", ...near.map((i) => labels[i])],
            rows: layers.map((layer) => [layer.label, ...near.map((i) => lensWords(layer.top[i][0]))]),
          }),
          svg: () => lensPicture(layers, near, labels),
          name: "lens",
        }),
      );
    },
  };
}

const lensWords = ({ text, p }) => `${visible(text)} ${percent(p)}`;

function lensCell({ text, p }, selected) {
  const cell = el("td", { class: selected ? "selected" : "", title: percent(p), text: visible(text) });
  cell.style.background = colour(p);
  cell.style.color = ink(p);
  return cell;
}

function lensPicture(layers, near, labels) {
  const palette = svgPalette();
  const [left, top, across, down] = [210, 96, 76, 28];
  const width = left + across * near.length + 28;
  const height = top + down * layers.length + 28;
  const face = { fill: palette.ink, "font-size": 13 };
  const middle = { "text-anchor": "middle" };
  const parts = svgCard(width, height, LENS_TITLE);
  near.forEach((i, c) => parts.push(svgText(left + (c + 0.5) * across, top - 10, labels[i], { ...face, ...middle })));
  layers.forEach((layer, r) => {
    parts.push(svgText(left - 12, top + r * down + 18, layer.label, { ...face, "text-anchor": "end" }));
    near.forEach((i, c) => {
      const { text, p } = layer.top[i][0];
      const x = left + c * across;
      parts.push(svgRect(x + 1, top + r * down + 1, across - 2, down - 2, { rx: 4, fill: colour(p) }));
      parts.push(
        svgText(x + across / 2, top + r * down + 18, visible(text), { ...middle, fill: ink(p), "font-size": 12 }),
      );
    });
  });
  return svgDocument(width, height, LENS_TITLE, parts);
}
