// How tokens are written and merged into words; follows regard/viz/maps.py.

const CONTROL = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}]/u;
const JOINERS = "\u200c\u200d";

function visibleCharacter(sign) {
  const code = sign.codePointAt(0);
  if (sign === " ") return "␣";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  if (/\p{Cs}/u.test(sign) || (code & 0xfffe) === 0xfffe) return "\ufffd";
  if (!JOINERS.includes(sign) && CONTROL.test(sign)) {
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  }
  return sign;
}

/** A text with every invisible character shown: space ␣, newline ␊, an empty token ∅. */
export function visible(text) {
  if (!text) return "∅";
  const shown = Array.from(text, visibleCharacter).join("");
  return /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
}

/** How the tokens of one axis are written, as the trace has worked it out. */
export function tokenLabels(tokens) {
  return tokens.map((token) => token.label);
}

/** The direction a label runs in, by its first strong character. */
export function direction(text) {
  const strong = /[\p{L}]/u.exec(text);
  return strong &&
    /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(strong[0])
    ? "rtl"
    : "ltr";
}

/** A label kept from reordering its neighbours where it runs from right to left. */
export function isolated(label) {
  return direction(label) === "rtl" ? `\u2068${label}\u2069` : label;
}

/** The places of the tokens of each word, in order; none is half given, half written. */
export function wordGroups(tokens) {
  const groups = [];
  tokens.forEach((token, i) => {
    const before = tokens[i - 1];
    const same = before?.word === token.word && before.given === token.given;
    if (!same || token.mark || before.mark) groups.push([]);
    groups[groups.length - 1].push(i);
  });
  return groups;
}

const STRAY = /⟨([89a-f][0-9a-f])⟩/g; // a byte that is no character by itself, here for a while U+DC80 to U+DCFF
const SHARED = /[\udcc2-\udcdf][\udc80-\udcbf]|[\udce0-\udcef][\udc80-\udcbf]{2}|[\udcf0-\udcf4][\udc80-\udcbf]{3}/gu;

/** What neighbouring pieces spell: a character whose bytes they share is whole again. */
export function joined(pieces) {
  if (pieces.length < 2) return pieces.join("");
  const text = pieces.map((one) => one.replace(STRAY, (_, hex) => String.fromCharCode(`0xdc${hex}`))).join("");
  return text.replace(SHARED, character).replace(/[\udc80-\udcff]/gu, (byte) => `⟨${hexOf(byte)}⟩`);
}

function character(bytes) {
  try {
    return decodeURIComponent(Array.from(bytes, (byte) => `%${hexOf(byte)}`).join(""));
  } catch {
    return bytes; // as long as a character, and yet none
  }
}

const hexOf = (byte) => (byte.codePointAt(0) & 0xff).toString(16);

/** The labels of words: the pieces of each joined, without the space they begin with. */
export function wordLabels(tokens, groups) {
  return groups.map((group) => {
    const text = joined(group.map((i) => tokens[i].piece));
    return visible(text.trim() ? text.trim() : text);
  });
}

/**
 * Merges pieces into words on both axes of [Q, K] weights: what is given to a word is the sum over its pieces, the row
 * of a word the mean over its pieces; so rows that summed to one still do.
 */
export function mergeWords(queryTokens, keyTokens, weights) {
  const queryGroups = wordGroups(queryTokens);
  const keyGroups = wordGroups(keyTokens);
  const merged = new Float32Array(queryGroups.length * keyGroups.length);
  queryGroups.forEach((rows, q) => {
    keyGroups.forEach((columns, k) => {
      let sum = 0;
      for (const row of rows) for (const column of columns) sum += weights[row * keyTokens.length + column];
      merged[q * keyGroups.length + k] = Math.min(sum / rows.length, 1);
    });
  });
  return {
    queries: wordLabels(queryTokens, queryGroups),
    keys: wordLabels(keyTokens, keyGroups),
    weights: merged,
    queryGroups,
    keyGroups,
  };
}

/** The tokens on the two axes of one entry of the header's `attention`. */
export function sides(header, attention) {
  return { queries: header.tokens[attention.queries], keys: header.tokens[attention.keys] };
}
