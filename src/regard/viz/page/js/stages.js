// The stages of the walkthrough, which follows a text through a model; each is {id, title, about, side, show}.
//
// `show(content, context, selection)` draws one; `selection` has the trace and the selected token of each side.
import { choice, el } from "./dom.js";
import { figure, legend, mapFigure, mapIn } from "./figure.js";
import { chosenHead, headOptions, headWeights, mapTitle, maskedCells } from "./attention_map.js";
import { lensLine, lensStage } from "./logit_lens.js";
import { logitsStage, nextTokenStage } from "./next_token.js";
import { plural, thousands, topIndices } from "./numbers.js";
import { svgCard, svgDocument, svgPalette, svgRect, svgText } from "./svg.js";
import { tensorStrip } from "./tensors.js";
import { direction, sides, tokenLabels } from "./tokens.js";

const MAX_NAMED = 5; // tokens named in the sentence under a map

/** The stages of a model, from its trace: blocks in the order of the forward pass. */
export function walkStages(header) {
  const { stream, model } = header;
  const streams = ["source", "inputs"].filter((side) => header.axes[side].elements.length && stream.some((one) => one.side === side));
  const stages = [textStage(), tokensStage()];
  for (const side of streams) {
    const prefix = streams.length < 2 ? "" : side === "source" ? "Source: " : "Output: ";
    stages.push(embeddingStage(side, prefix));
    stages.push(...blocksOf(header, side).map((block) => blockStage(block, side)));
  }
  if (!streams.length) stages.push(...header.attention.map(attentionStage));
  if (header.layers.length) stages.push(lensStage());
  if (header.output.logits) stages.push(logitsStage());
  if (header.output.logits && model.output === "sequence") stages.push(nextTokenStage());
  return stages;
}

/** Entries of the residual stream by block, such as "encoder.0", in order. */
function blocksOf(header, side) {
  const blocks = new Map();
  for (const entry of header.stream.filter((one) => one.side === side)) {
    const [, name] = /^(.*?\.\d+)\./.exec(`${entry.name}.`) ?? [];
    if (name) blocks.set(name, [...(blocks.get(name) ?? []), entry]);
  }
  return [...blocks].map(([name, entries]) => ({ name, entries }));
}

function textStage() {
  return {
    id: "text",
    title: "Text",
    about: "The input, and the output recorded for it.",
    show(content, context, selection) {
      const { header } = selection.trace();
      content.append(
        el("blockquote", { class: "walk-text", dir: "auto", text: header.text.source || context.request.text }),
        el("p", { class: "quiet", text: header.text.target ? "Recorded output:" : "" }),
        el("blockquote", { class: "walk-text", dir: "auto", text: header.text.target.trim() }),
        el("p", { class: "quiet num", text: describeModel(header.model) }),
      );
    },
  };
}

function describeModel({ name, family, parameters, heads, width, vocabulary }) {
  const sizes = [`${thousands(parameters)} parameters`, `width ${width}`, `vocabulary of ${thousands(vocabulary)} tokens`];
  if (heads) sizes.splice(1, 0, `${plural(heads, "head")} per layer`);
  return `${name}: ${family}, ${sizes.join(", ")}.`;
}

function tokensStage() {
  return {
    id: "tokens",
    title: "Tokens and ids",
    about: "The text is split into tokens of the vocabulary; the model sees their ids.",
    show(content, context, selection) {
      const { header } = selection.trace();
      const both = header.axes.source.elements.length && header.axes.inputs.elements.length;
      const shown = both
        ? [["source", "Input"], ["inputs", "Output so far"]]
        : [[header.axes.inputs.elements.length ? "inputs" : "source", "Input"]];
      for (const [side, title] of shown) content.append(tokenCards(context, selection, side, title));
    },
  };
}

/** A figure of the tokens of one side with their ids. */
function tokenCards(context, selection, side, title) {
  const all = selection.trace().header.axes[side].elements;
  const tokens = side === "inputs" ? all.slice(0, selection.position("inputs") + 1) : all;
  const cards = tokenLabels(tokens).map((label, i) => [label, String(tokens[i].id)]);
  const card = ([label, id]) =>
    el(
      "li",
      { class: "token-card" },
      el("span", { class: "token-label", dir: direction(label), text: label }),
      el("span", { class: "token-id num", text: id }),
    );
  return figure(context, {
    title: `${title}: ${plural(tokens.length, "token")}`,
    picture: el("ol", { class: "token-cards" }, cards.map(card)),
    table: () => ({ columns: ["position", "token", "id"], rows: cards.map((texts, i) => [String(i), ...texts]) }),
    svg: () => cardPicture(title, cards),
    name: `tokens-${side}`,
  });
}

/** Cards of two lines each, several in a row, as an SVG file. */
function cardPicture(title, cards) {
  const { ink, quiet, edge } = svgPalette();
  const [across, down, perLine] = [92, 58, 9];
  const width = 56 + across * Math.min(perLine, Math.max(cards.length, 4));
  const height = 84 + down * Math.ceil(cards.length / perLine);
  const parts = svgCard(width, height, title);
  cards.forEach(([first, second], i) => {
    const [x, y] = [28 + across * (i % perLine), 62 + down * Math.floor(i / perLine)];
    const middle = { "text-anchor": "middle" };
    parts.push(
      svgRect(x, y, across - 8, down - 8, { rx: 6, fill: "none", stroke: edge }),
      svgText(x + across / 2 - 4, y + 22, first, { ...middle, fill: ink, "font-size": 14 }),
      svgText(x + across / 2 - 4, y + 40, second, { ...middle, fill: quiet, "font-size": 12 }),
    );
  });
  return svgDocument(width, height, title, parts);
}

/** An array [T, D] of a side as a tensor to show: `whole`, and the row of the selected token, `one`. */
async function streamTensor(selection, side, array, name, about) {
  const tensor = await selection.trace().array(array);
  return tensorOf(selection, side, tensor.data, tensor.shape[1], name, about);
}

function tensorOf(selection, side, values, columns, name, about) {
  const rows = tokenLabels(selection.trace().header.axes[side].elements).map((label, i) => `${i} ${label}`);
  const at = selection.position(side);
  return {
    whole: { name, about, rows, values, columns },
    one: { name, rows: [rows[at]], values: values.subarray(at * columns, (at + 1) * columns), columns },
  };
}

const stripOf = (context, { whole, one }) => tensorStrip(context, whole, one);

function sumLine(context, first, second, result) {
  const sign = (text) => el("span", { class: "sum-sign", aria: { hidden: "true" }, text });
  const [a, b, sum] = [first, second, result].map((tensor) => stripOf(context, tensor));
  return el("div", { class: "sum-line" }, a, sign("+"), b, sign("="), sum);
}

function embeddingStage(side, prefix) {
  return {
    id: `embedding-${side}`,
    title: prefix ? `${prefix}embedding` : "Embedding and position",
    about: "The token embedding and the position encoding are added; the sum is the start of the residual stream.",
    side,
    async show(content, context, selection) {
      const { header } = selection.trace();
      const tensor = (array, name, about) => streamTensor(selection, side, array, name, about);
      const label = tokenLabels(header.axes[side].elements)[selection.position(side)];
      const first = header.stream.find((one) => one.side === side);
      const known = header.embedding?.find((one) => one.side === side);
      const stream = await tensor(first.array, "residual stream", "Token embeddings plus position encodings.");
      if (known?.tokens && known.positions) {
        const kind = `Position encoding: ${header.model.positions}.`;
        const [token, position] = await Promise.all([
          tensor(known.tokens, `embedding of ${label}`, "The row of the embedding table of each token."),
          tensor(known.positions, `position ${selection.position(side)}`, kind),
        ]);
        content.append(sumLine(context, token, position, stream));
      } else {
        const why = `This model adds no position encoding to the embeddings (positions: ${header.model.positions}).`;
        content.append(el("p", { class: "hint", text: why }), stripOf(context, stream));
      }
      const hint =
        "Each strip is the vector of the selected token, blue above zero and orange below. " +
        "Click a strip for all tokens and every number.";
      content.append(el("p", { class: "hint", text: hint }));
    },
  };
}

const ADDITION_NAMES = { self_attn: "Self-attention", cross_attn: "Cross-attention", feed_forward: "Feed-forward" };

function blockStage(block, side) {
  const number = Number(block.name.split(".").at(-1)) + 1;
  const residual = block.entries[0].name !== block.name;
  return {
    id: block.name,
    title: `${side === "source" ? "Encoder" : "Decoder"} ${residual ? "block" : "layer"} ${number}`,
    about: residual
      ? "Attention gathers information from other tokens, feed-forward layers work on each token alone; both are added to the residual stream."
      : "A recurrent layer reads one token after another; its gates decide what is kept of the state.",
    side,
    async show(content, context, selection) {
      const attention = selection.trace().header.attention.find((one) => one.name.startsWith(`${block.name}.`));
      if (attention) content.append(headChoice(context, selection, attention));
      for (const entry of block.entries) content.append(await additionCard(context, selection, side, entry));
    },
  };
}

/** One addition to the residual stream: its attention map, the change, and the logit lens after it. */
async function additionCard(context, selection, side, entry) {
  const { header } = selection.trace();
  const tensor = (array, name, about) => streamTensor(selection, side, array, name, about);
  const part = entry.name.split(".").at(-1);
  const title = ADDITION_NAMES[part] ?? entry.label;
  const card = el("section", { class: "card stack addition", aria: { label: entry.label } }, el("h4", { text: title }));
  const within = (one) => one.name === entry.name || one.name.startsWith(`${entry.name}.`);
  const hasLens = (one) => one.name === entry.name && one.side === side;
  const attention = header.attention.find(within);
  if (attention) card.append(await attentionFigure(context, selection, attention));
  const streams = header.stream.filter((one) => one.side === side);
  const earlier = streams[streams.indexOf(entry) - 1];
  const after = await tensor(entry.array, "stream after", `The residual stream after ${entry.label}.`);
  if (ADDITION_NAMES[part] && earlier) {
    const before = await tensor(earlier.array, "stream before", `The residual stream before ${entry.label}.`);
    const change = after.whole.values.map((value, i) => value - before.whole.values[i]);
    const about = "The stream after minus the stream before; in post-norm models this includes the norm.";
    const added = tensorOf(selection, side, change, after.whole.columns, `${title.toLowerCase()} adds`, about);
    card.append(sumLine(context, before, added, after));
  } else {
    const gates = header.gates.filter(within);
    const strips = await Promise.all(gates.map((gate) => tensor(gate.array, gateName(gate), "1 is open, 0 is closed.")));
    card.append(...strips.map((one) => stripOf(context, one)), stripOf(context, after));
  }
  if (header.layers.some(hasLens)) {
    const top = (await selection.trace().layers()).find(hasLens).top[selection.position(side)];
    if (top.length) card.append(lensLine(top));
  }
  return card;
}

function gateName({ name, kind }) {
  const way = name.includes(".backward_cell.") ? ", backward" : name.includes(".forward_cell.") ? ", forward" : "";
  return `${kind} gate${way}`;
}

/** The attention map with the row of the selected token marked, and that row in words. */
async function attentionFigure(context, selection, attention) {
  const trace = selection.trace();
  const { queries, keys } = sides(trace.header, attention);
  // Rows are named after the input token, so that the selected token has one name in all maps; in other views rows of
  // cross-attention are named after the token that is predicted.
  const predicts = attention.queries === "target";
  const [rows, columns] = [tokenLabels(predicts ? trace.header.axes.inputs.elements : queries), tokenLabels(keys)];
  const at = selection.position(attention.queries === "source" ? "source" : "inputs");
  const next = predicts ? `, predicting ${tokenLabels(queries)[at]},` : "";
  const head = chosenHead(trace.header, attention, context.state.get("head"));
  const { values, scale } = headWeights(await trace.array(attention.array), head);
  const row = Float32Array.from(values.subarray(at * columns.length, (at + 1) * columns.length), (one) => one * scale);
  const top = topIndices(row, MAX_NAMED).filter((k) => row[k] >= 0.005);
  const name = mapTitle(attention, head);
  const masked = maskedCells(trace.header, attention);
  const map = mapIn(context, { rows, columns, values, scale, colours: "weight", name, maxCell: 26, masked });
  map.mark({ r: at, c: -1 });
  return mapFigure(context, map, {
    title: name,
    note: `${rows[at]}${next} attends to ${top.map((k) => `${columns[k]} ${row[k].toFixed(2)}`).join(", ")}`,
    legend: legend({ label: "attention weight", masked: Boolean(masked) }),
    trace,
    svgTitle: () => name,
    name: attention.name,
  });
}

/** A list of the heads whose map can be shown, for all attentions of a stage. */
function headChoice(context, selection, attention) {
  const chosen = chosenHead(selection.trace().header, attention, context.state.get("head"));
  const list = choice("Head", headOptions(attention), chosen, (head) => context.state.set({ head }));
  return el("div", { class: "controls", hidden: !list }, list);
}

/** The only stage of a recurrent model's attention, which has no residual stream. */
function attentionStage(attention) {
  return {
    id: attention.name,
    title: mapTitle(attention, "mean"),
    about: "The attention weights of each decoding step.",
    side: attention.queries === "source" ? "source" : "inputs",
    async show(content, context, selection) {
      content.append(headChoice(context, selection, attention), await attentionFigure(context, selection, attention));
    },
  };
}
