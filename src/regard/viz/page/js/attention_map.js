// One attention map of a trace: a layer, a head or the mean of heads, subwords or words.

import { mergeWords, sides, tokenLabels } from "./tokens.js";

export const PART_NAMES = {
  cross: "cross-attention",
  encoder: "encoder self-attention",
  decoder: "decoder self-attention",
};
export const PART_ORDER = ["encoder", "decoder", "cross"];

/** The header's attention entries of one part, by layer. */
export function attentions(header, part) {
  return header.attention.filter((entry) => entry.part === part).sort((a, b) => a.layer - b.layer);
}

export function hasCross(header) {
  return header !== null && attentions(header, "cross").length > 0;
}

/** [value, label] options of the weights of a run: null is the best ones, a number a snapshot. */
export function weightOptions(steps) {
  return steps.map((step) => (step === null ? ["", "best"] : [String(step), `step ${step}`]));
}

/** [value, label] options of a part's layers. */
export function layerOptions(header, part) {
  return attentions(header, part).map(({ layer }) => [String(layer), `Layer ${layer + 1}`]);
}

/** [value, label] options of an attention's heads, the first of them all heads together. */
export function headOptions(entry, all = ["mean", `Mean of ${entry.heads} heads`]) {
  const heads = Array.from({ length: entry.heads }, (_, h) => [String(h), `Head ${h + 1}`]);
  return entry.heads > 1 ? [all, ...heads] : heads;
}

/** The alignment error rate of a head (or "mean") on this sentence; undefined without a gold alignment. */
export function alignmentError({ gold }, entry, head) {
  if (head !== "mean") return gold?.aer?.[entry.name]?.[head];
  return (entry.entries ? gold?.all : gold?.mean?.[entry.name]) ?? undefined;
}

/** The entry of this layer, or of the last layer of the part. */
export function chosenEntry(header, part, layer) {
  const entries = attentions(header, part);
  return entries.find((entry) => String(entry.layer) === String(layer)) ?? entries.at(-1);
}

/** The mean of all layers of a part, as an entry with the layer "mean". */
export function meanEntry(header, part) {
  const entries = attentions(header, part);
  const mask = entries.every((entry) => entry.mask === entries[0].mask) ? entries[0].mask : null;
  return { ...entries[0], name: "", layer: "mean", mask, entries };
}

/** The masked cells [Q, K] of an attention, 1 for masked; null where every query may attend to every key. */
export function maskedCells(header, entry) {
  const ranges = header.masks?.[entry.mask]; // for each query the keys it may attend to: start, stop, start, stop, ...
  if (!ranges) return null;
  const keys = header.axes[entry.keys].elements.length;
  const masked = new Uint8Array(ranges.length * keys).fill(1);
  ranges.forEach((edges, q) => {
    for (let i = 0; i < edges.length; i += 2) masked.fill(0, q * keys + edges[i], q * keys + edges[i + 1]);
  });
  return masked;
}

/** The same for words: a cell is masked if all its tokens are. */
function maskedWords(masked, keys, queryGroups, keyGroups) {
  const all = (rows, columns) => rows.every((q) => columns.every((k) => masked[q * keys + k]));
  return masked && Uint8Array.from(queryGroups.flatMap((rows) => keyGroups.map((columns) => all(rows, columns))));
}

/** The head that a field names: a number from 0, "best" (needs a gold alignment), or "mean". */
export function chosenHead(header, entry, head) {
  const errors = header.gold?.aer?.[entry.name];
  if (head === "best") return errors ? errors.indexOf(Math.min(...errors)) : "mean";
  const number = Number(head);
  return head !== "" && Number.isInteger(number) && number >= 0 && number < entry.heads
    ? number
    : entry.heads === 1
      ? 0
      : "mean";
}

export function mapTitle(entry, head) {
  const which = entry.heads === 1 ? "" : head === "mean" ? `, mean of ${entry.heads} heads` : `, head ${head + 1}`;
  const where = entry.entries ? `mean of ${entry.entries.length} layers` : `layer ${entry.layer + 1}`;
  return `${PART_NAMES[entry.part]}, ${where}${which}`;
}

/** The weights of one head as stored, or the mean over heads as numbers. */
export function headWeights(tensor, head) {
  if (head !== "mean") return { values: tensor.slice(head), scale: tensor.scale };
  const [count, rows, columns] = tensor.shape;
  const sum = new Float32Array(rows * columns);
  for (let h = 0; h < count; h++) {
    const part = tensor.slice(h);
    for (let i = 0; i < sum.length; i++) sum[i] += part[i];
  }
  return { values: sum.map((total) => (total * tensor.scale) / count), scale: 1 };
}

/** The same for one attention, or for the mean of several. */
export async function entryWeights(trace, entry, head) {
  if (!entry.entries) return headWeights(await trace.array(entry.array), head);
  const tensors = await Promise.all(entry.entries.map((one) => trace.array(one.array)));
  const [, rows, columns] = tensors[0].shape;
  const sum = new Float32Array(rows * columns);
  for (const { values, scale } of tensors.map((tensor) => headWeights(tensor, head))) {
    for (let i = 0; i < sum.length; i++) sum[i] += values[i] * scale;
  }
  return { values: sum.map((total) => total / tensors.length), scale: 1 };
}

/** The map of a head: labels, weights and masked cells, on tokens or merged into words. */
export async function readMap(trace, entry, head, words) {
  const { queries, keys } = sides(trace.header, entry);
  const { values, scale } = await entryWeights(trace, entry, head);
  const title = mapTitle(entry, head);
  const masked = maskedCells(trace.header, entry);
  if (!words) {
    const single = (tokens) => tokens.map((_, i) => [i]);
    return {
      rows: tokenLabels(queries),
      columns: tokenLabels(keys),
      values,
      scale,
      masked,
      queryGroups: single(queries),
      keyGroups: single(keys),
      title,
    };
  }
  const plain = scale === 1 ? values : Float32Array.from(values, (byte) => byte * scale);
  const merged = mergeWords(queries, keys, plain);
  return {
    rows: merged.queries,
    columns: merged.keys,
    values: merged.weights,
    scale: 1,
    masked: maskedWords(masked, keys.length, merged.queryGroups, merged.keyGroups),
    queryGroups: merged.queryGroups,
    keyGroups: merged.keyGroups,
    title,
  };
}

/** The cells of a map that the gold alignment links, as [row, column] pairs. */
export function goldCells(header, entry, map) {
  const links = header.gold?.links ?? [];
  const { queries, keys } = sides(header, entry);
  const ofWord = (tokens, groups, word) =>
    groups.flatMap((group, i) =>
      group.some((token) => tokens[token].group === word && !tokens[token].special) ? [i] : [],
    );
  return links.flatMap(([target, from]) =>
    ofWord(queries, map.queryGroups, target).flatMap((r) => ofWord(keys, map.keyGroups, from).map((c) => [r, c])),
  );
}
