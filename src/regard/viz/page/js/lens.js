// What a model would say if it stopped after each of its layers (the logit lens).
import { el } from "./dom.js";
import { colour, ink } from "./colours.js";
import { figure, legend } from "./figure.js";
import { percent } from "./bits.js";
import { svgCard, svgDocument, svgPalette, svgRect, svgText } from "./svg.js";
import { direction, tokenLabels, visible } from "./tokens.js";

const LENS_TITLE = "The likeliest next token after each addition";
const NEAR = 5; // tokens to either side of the followed one

/** The likeliest next tokens of one place, in a line. */
export function wouldSay(top) {
  return el(
    "p",
    { class: "would-say" },
    el("span", { class: "quiet", text: "If it stopped here it would say " }),
    top.slice(0, 3).flatMap(({ piece, p }) => [el("b", { text: visible(piece) }), ` ${percent(p)}  `]),
  );
}

export function lensStation() {
  return {
    id: "lens",
    title: "If it stopped here",
    about: "The stream is read with the last layer after each addition: what the model would say if it ended there.",
    side: "inputs",
    async show(content, context, place) {
      const { header } = place.trace();
      const layers = await place.trace().layers();
      const side = layers[0].side;
      const tokens = header.tokens[side];
      const labels = tokenLabels(tokens);
      const at = place.at(side);
      const asked = (i) => layers[0].top[i].length > 0; // of a very long text only the last tokens
      const near = labels.map((_, i) => i).filter((i) => Math.abs(i - at) <= NEAR && asked(i));
      const heading = (i) =>
        el("th", { scope: "col", class: i === at ? "followed" : "", dir: direction(labels[i]), text: labels[i] });
      const head = el("tr", {}, el("td", {}), near.map(heading));
      const body = layers.map((layer) =>
        el(
          "tr",
          {},
          el("th", { scope: "row", text: layer.label }),
          near.map((i) => lensCell(layer.top[i][0], i === at)),
        ),
      );
      const table = el("table", { class: "lens" }, el("thead", {}, head), el("tbody", {}, body));
      content.append(
        figure(context, {
          title: LENS_TITLE,
          note: `Columns: the token it has read; colours: how sure it is. Followed: ${labels[at]}.`,
          picture: el("div", { class: "scroller", tabIndex: 0, role: "region", aria: { label: LENS_TITLE } }, table),
          legend: legend({ scale: "weight", label: "probability", low: "0", high: "1" }),
          table: () => ({
            columns: ["after", ...near.map((i) => labels[i])],
            rows: layers.map((layer) => [layer.label, ...near.map((i) => lensWords(layer.top[i][0]))]),
          }),
          svg: () => lensPicture(layers, near, labels),
          name: "lens",
        }),
        el(
          "ol",
          { class: "lens-list" },
          layers.map((layer) =>
            el(
              "li",
              {},
              el("span", { class: "quiet", text: layer.label }),
              asked(at) ? wouldSay(layer.top[at]) : "not asked in so long a text",
            ),
          ),
        ),
      );
    },
  };
}

const lensWords = ({ piece, p }) => `${visible(piece)} ${percent(p)}`;

function lensCell({ piece, p }, followed) {
  const cell = el("td", { class: followed ? "followed" : "", title: percent(p), text: visible(piece) });
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
      const { piece, p } = layer.top[i][0];
      const x = left + c * across;
      parts.push(svgRect(x + 1, top + r * down + 1, across - 2, down - 2, { rx: 4, fill: colour(p) }));
      parts.push(
        svgText(x + across / 2, top + r * down + 18, visible(piece), { ...middle, fill: ink(p), "font-size": 12 }),
      );
    });
  });
  return svgDocument(width, height, LENS_TITLE, parts);
}
