// The stations of the walk that show how a text passes through a model; each is {id, title, about, side, show}.
//
// `show(content, context, place)` draws one: `place` knows the trace and which token of each side is followed.
import { el, field, select } from "./dom.js";
import { cardPicture, mapIn, tensorStrip } from "./bits.js";
import { chooseStation, logitsStation } from "./choosing.js";
import { figure, legend } from "./figure.js";
import { lensStation, wouldSay } from "./lens.js";
import { chosenHead, headWeights, mapTitle, maskedCells } from "./maps.js";
import { direction, sides, tokenLabels } from "./tokens.js";

const MOST_NAMED = 5; // places named in the sentence under a map

/** The stations of a model, from what its trace holds: blocks in the order in which text passes them. */
export function walkStations(header) {
  const { tokens, stream, model } = header;
  const streams = ["source", "inputs"].filter((side) => tokens[side].length && stream.some((one) => one.side === side));
  const stations = [textStation(), tokensStation()];
  for (const side of streams) {
    const whose = streams.length < 2 ? "" : side === "source" ? "Source: " : "Output: ";
    stations.push(embeddingStation(side, whose));
    stations.push(...walkBlocks(header, side).map((block) => blockStation(block, side)));
  }
  if (!streams.length) stations.push(...header.attention.map(lookStation));
  if (header.layers.length) stations.push(lensStation());
  if (header.output.logits) stations.push(logitsStation());
  if (header.output.logits && ["generate", "translate"].includes(model.task)) stations.push(chooseStation());
  return stations;
}

/** Stream entries that belong to one block, such as "encoder.0", in order. */
function walkBlocks(header, side) {
  const blocks = new Map();
  header.stream
    .filter((one) => one.side === side)
    .forEach((entry) => {
      const found = /^(.*?\.\d+)\./.exec(`${entry.name}.`);
      if (!found) return;
      if (!blocks.has(found[1])) blocks.set(found[1], []);
      blocks.get(found[1]).push(entry);
    });
  return [...blocks].map(([name, entries]) => ({ name, entries }));
}

function textStation() {
  return {
    id: "text",
    title: "Text",
    about: "What goes in, and what has come out of it so far.",
    show(content, context, place) {
      const { header } = place.trace();
      content.append(
        el("blockquote", { class: "walk-text", dir: "auto", text: header.text.source || context.request.text }),
        el("p", { class: "quiet", text: header.text.target ? "Recorded output:" : "" }),
        el("blockquote", { class: "walk-text", dir: "auto", text: header.text.target.trim() }),
        el("p", { class: "quiet num", text: aboutModel(header.model) }),
      );
    },
  };
}

function aboutModel({ name, family, parameters, heads, width, vocabulary }) {
  const many = (count) => count.toLocaleString("en");
  const sizes = [`${many(parameters)} parameters`, `width ${width}`, `${many(vocabulary)} tokens in its vocabulary`];
  if (heads) sizes.splice(1, 0, heads === 1 ? "one head" : `${heads} heads a layer`);
  return `${name}: ${family}, ${sizes.join(", ")}.`;
}

function tokensStation() {
  return {
    id: "tokens",
    title: "Tokens and ids",
    about: "Text is cut into pieces of the vocabulary; each piece is a number from here on.",
    show(content, context, place) {
      const { header } = place.trace();
      const named =
        header.tokens.source.length && header.tokens.inputs.length
          ? [
              ["source", "What is read"],
              ["inputs", "What is written so far"],
            ]
          : [[header.tokens.inputs.length ? "inputs" : "source", "What is read"]];
      for (const [side, title] of named) {
        const all = header.tokens[side];
        const tokens = side === "inputs" ? all.slice(0, place.at("inputs") + 1) : all;
        const labels = tokenLabels(all);
        const cards = tokens.map((token, i) =>
          el(
            "li",
            { class: "token-card" },
            el("span", { class: "token-piece", dir: direction(labels[i]), text: labels[i] }),
            el("span", { class: "token-id num", text: String(token.id) }),
          ),
        );
        content.append(
          figure(context, {
            title: `${title}: ${tokens.length} tokens`,
            picture: el("ol", { class: "token-cards" }, cards),
            table: () => ({
              columns: ["place", "piece", "id"],
              rows: tokens.map((token, i) => [String(i), labels[i], token.id]),
            }),
            svg: () =>
              cardPicture(
                title,
                tokens.map((token, i) => [labels[i], String(token.id)]),
              ),
            name: `tokens-${side}`,
          }),
        );
      }
    },
  };
}

/** What the tokens of a side are called, for rows of tensors. */
function rowNames(header, side) {
  return tokenLabels(header.tokens[side]).map((label, i) => `${i} ${label}`);
}

/** A recorded array [T, D] of a side, and its row at the followed token, both ready to be shown. */
async function streamTensor(place, side, array, name, about) {
  const trace = place.trace();
  const tensor = await trace.array(array);
  return streamOf(place, side, tensor.data, tensor.shape[1], name, about);
}

function streamOf(place, side, values, columns, name, about) {
  const { header } = place.trace();
  const rows = rowNames(header, side);
  const at = place.at(side);
  const column = (c) => String(c);
  return {
    whole: { name, about, rows, values, columns, column },
    one: { name, rows: [rows[at]], values: values.subarray(at * columns, (at + 1) * columns), columns, column },
  };
}

const stripOf = (context, { whole, one }) => tensorStrip(context, whole, one);

function sumLine(context, first, second, result) {
  return el(
    "div",
    { class: "sum-line" },
    stripOf(context, first),
    el("span", { class: "sum-sign", aria: { hidden: "true" }, text: "+" }),
    stripOf(context, second),
    el("span", { class: "sum-sign", aria: { hidden: "true" }, text: "=" }),
    stripOf(context, result),
  );
}

function embeddingStation(side, whose) {
  return {
    id: `embedding-${side}`,
    title: whose ? `${whose}embedding` : "Embedding and position",
    about:
      "Each id becomes a vector, and a vector that says where it stands is added. The sum is where the stream begins.",
    side,
    async show(content, context, place) {
      const { header } = place.trace();
      const label = tokenLabels(header.tokens[side])[place.at(side)];
      const first = header.stream.find((one) => one.side === side);
      const known = header.embedding?.find((one) => one.side === side);
      const stream = await streamTensor(
        place,
        side,
        first.array,
        "start of the stream",
        "Token vectors and places, added.",
      );
      if (known?.tokens && known.positions) {
        const kind = `Kind of positions: ${header.model.positions}.`;
        const [token, where] = await Promise.all([
          streamTensor(place, side, known.tokens, `vector of ${label}`, "A row of the embedding table for each token."),
          streamTensor(place, side, known.positions, `place ${place.at(side)}`, kind),
        ]);
        content.append(sumLine(context, token, where, stream));
      } else {
        const why =
          header.model.family === "recurrent"
            ? "A recurrent model reads in order, so it needs no places."
            : `This model adds no place here (positions: ${header.model.positions}).`;
        content.append(el("p", { class: "hint", text: why }), stripOf(context, stream));
      }
      content.append(
        el("p", {
          class: "hint",
          text:
            "Each strip is the vector of the followed token, blue above zero and orange " +
            "below. Press one to see all tokens and every number.",
        }),
      );
    },
  };
}

const ADDITION_NAMES = { own: "Attention", cross: "Cross-attention", feed_forward: "Feed-forward" };

function blockStation(block, side) {
  const number = Number(block.name.split(".").at(-1)) + 1;
  const residual = block.entries[0].name !== block.name;
  return {
    id: block.name,
    title: `${side === "source" ? "Encoder" : "Decoder"} ${residual ? "block" : "layer"} ${number}`,
    about: residual
      ? "Attention gathers from other tokens, feed-forward works on each token alone; what they find is added to the stream."
      : "A recurrent layer reads one token after another; its gates say what is kept of what came before.",
    side,
    async show(content, context, place) {
      const attention = place.trace().header.attention.find((one) => one.name.startsWith(`${block.name}.`));
      if (attention) content.append(headChoice(context, place, attention));
      for (const entry of block.entries) content.append(await additionCard(context, place, side, entry));
    },
  };
}

/** One place of the stream: where it looked, what it changed, and what the model would say now. */
async function additionCard(context, place, side, entry) {
  const { header } = place.trace();
  const part = entry.name.split(".").at(-1);
  const title = ADDITION_NAMES[part] ?? entry.label;
  const card = el("section", { class: "card stack addition", aria: { label: entry.label } }, el("h4", { text: title }));
  const within = (one) => one.name === entry.name || one.name.startsWith(`${entry.name}.`);
  const speaks = (one) => one.name === entry.name && one.side === side;
  const attention = header.attention.find(within);
  if (attention) card.append(await lookFigure(context, place, attention));
  const streams = header.stream.filter((one) => one.side === side);
  const earlier = streams[streams.indexOf(entry) - 1];
  const after = await streamTensor(place, side, entry.array, "stream after", `The stream after ${entry.label}.`);
  if (ADDITION_NAMES[part] && earlier) {
    const before = await streamTensor(place, side, earlier.array, "stream before", `The stream before ${entry.label}.`);
    const change = after.whole.values.map((value, i) => value - before.whole.values[i]);
    const about = "The stream after less the stream before; where a model normalises after adding, that too.";
    const added = streamOf(place, side, change, after.whole.columns, `${title.toLowerCase()} adds`, about);
    card.append(sumLine(context, before, added, after));
  } else {
    const gates = header.gates.filter(within);
    const strips = gates.map((gate) => streamTensor(place, side, gate.array, gateName(gate), "1 is open, 0 is shut."));
    card.append(...(await Promise.all(strips)).map((one) => stripOf(context, one)), stripOf(context, after));
  }
  if (header.layers.some(speaks)) {
    const top = (await place.trace().layers()).find(speaks).top[place.at(side)];
    if (top.length) card.append(wouldSay(top));
  }
  return card;
}

function gateName({ name, kind }) {
  const way = name.includes(".backward_cell.") ? ", reading backwards" : name.includes(".forward_cell.") ? ", reading forwards" : "";
  return `${kind} gate${way}`;
}

/** Where the followed token looks: the map, and its row in words. */
async function lookFigure(context, place, attention) {
  const trace = place.trace();
  const { queries, keys } = sides(trace.header, attention);
  // A row is named after the token that was read, also in cross-attention, whose rows are elsewhere named after the
  // token that is written next: the followed token keeps its name.
  const read = attention.queries === "target" ? trace.header.tokens.inputs : queries;
  const [rows, columns] = [tokenLabels(read), tokenLabels(keys)];
  const next = attention.queries === "target" ? `, to write ${tokenLabels(queries)[place.at("inputs")]},` : "";
  const head = chosenHead(trace.header, attention, context.state.get("head"));
  const { values, scale } = headWeights(await trace.array(attention.array), head);
  const at = place.at(attention.queries === "source" ? "source" : "inputs");
  const row = Float32Array.from(values.subarray(at * columns.length, (at + 1) * columns.length), (one) => one * scale);
  const order = Array.from(row.keys())
    .filter((k) => row[k] >= 0.005)
    .sort((a, b) => row[b] - row[a])
    .slice(0, MOST_NAMED);
  const name = mapTitle(attention, head);
  const masked = maskedCells(trace.header, attention);
  const map = mapIn(context, { rows, columns, values, scale, colours: "weight", name, maxCell: 26, masked });
  map.mark({ r: at, c: -1 });
  return figure(context, {
    title: name,
    note: `${rows[at]}${next} looks at ${order.map((k) => `${columns[k]} ${row[k].toFixed(2)}`).join(", ")}`,
    picture: map.element,
    legend: legend({ label: "attention weight", masked: Boolean(masked) }),
    trace,
    table: () => map.table(),
    svg: () => map.svg(name),
    name: attention.name,
  });
}

/** Which head's map is shown, of all attentions of a station. */
function headChoice(context, place, attention) {
  const names = Array.from({ length: attention.heads }, (_, h) => [h, `head ${h + 1}`]);
  const chosen = chosenHead(place.trace().header, attention, context.state.get("head"));
  const list = select([["mean", "mean of heads"], ...names], chosen, (head) => context.state.set({ head }));
  return el("div", { class: "controls", hidden: attention.heads < 2 }, field("Head", list));
}

/** For a model without a stream of its own (a recurrent one): its attention alone. */
function lookStation(attention) {
  return {
    id: attention.name,
    title: mapTitle(attention, "mean"),
    about: "Where each step looks before it writes.",
    side: attention.queries === "source" ? "source" : "inputs",
    async show(content, context, place) {
      content.append(headChoice(context, place, attention), await lookFigure(context, place, attention));
    },
  };
}
