// How tokens are shown and merged into words; follows regard/viz/maps.py.

const CONTROL = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}]/u;
const JOINERS = "\u200c\u200d";

function visibleCharacter(character) {
  const code = character.codePointAt(0);
  if (character === " ") return "␣";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  if (/\p{Cs}/u.test(character) || (code & 0xfffe) === 0xfffe) return "\ufffd";
  if (!JOINERS.includes(character) && CONTROL.test(character)) {
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  }
  return character;
}

/** A text with every invisible character shown: space ␣, newline ␊, an empty token ∅. */
export function visible(text) {
  if (!text) return "∅";
  const shown = Array.from(text, visibleCharacter).join("");
  return /^\p{M}/u.test(shown) ? `◌${shown}` : shown;
}

/** The labels of the tokens of one axis, as the trace gives them. */
export function tokenLabels(tokens) {
  return tokens.map((token) => token.label);
}

/** The text direction of a label, by its first strong character. */
export function direction(text) {
  const strong = /[\p{L}]/u.exec(text);
  return strong &&
    /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(strong[0])
    ? "rtl"
    : "ltr";
}

/** A right-to-left label with isolates around it, so that it does not reorder the text beside it. */
export function isolated(label) {
  return direction(label) === "rtl" ? `\u2068${label}\u2069` : label;
}

/** The indices of the tokens of each word, in order. No group mixes given and generated tokens. */
export function wordGroups(tokens) {
  const groups = [];
  tokens.forEach((token, i) => {
    const before = tokens[i - 1];
    const same = before?.group === token.group && before.given === token.given;
    if (!same || token.special || before.special) groups.push([]);
    groups[groups.length - 1].push(i);
  });
  return groups;
}

const BYTE_TOKEN = /⟨([89a-f][0-9a-f])⟩/g; // part of a UTF-8 sequence; mapped to U+DC80 to U+DCFF while joining
const UTF8_SEQUENCE = /[\udcc2-\udcdf][\udc80-\udcbf]|[\udce0-\udcef][\udc80-\udcbf]{2}|[\udcf0-\udcf4][\udc80-\udcbf]{3}/gu;

/** The text of neighbouring tokens; characters whose bytes are spread over several tokens are put together. */
export function joined(texts) {
  if (texts.length < 2) return texts.join("");
  const text = texts.map((one) => one.replace(BYTE_TOKEN, (_, hex) => String.fromCharCode(`0xdc${hex}`))).join("");
  return text.replace(UTF8_SEQUENCE, decodeBytes).replace(/[\udc80-\udcff]/gu, (byte) => `⟨${hexOf(byte)}⟩`);
}

function decodeBytes(bytes) {
  try {
    return decodeURIComponent(Array.from(bytes, (byte) => `%${hexOf(byte)}`).join(""));
  } catch {
    return bytes; // the length of a character, but not valid UTF-8
  }
}

const hexOf = (byte) => (byte.codePointAt(0) & 0xff).toString(16);

/** The labels of words: their tokens joined, without white space around them. */
export function wordLabels(tokens, groups) {
  return groups.map((group) => {
    const text = joined(group.map((i) => tokens[i].text));
    return visible(text.trim() ? text.trim() : text);
  });
}

/**
 * Merges subwords into words on both axes of [Q, K] weights: columns are summed and rows averaged over the tokens of a
 * word, so that rows still sum to one.
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
  return { queries: header.axes[attention.queries].elements, keys: header.axes[attention.keys].elements };
}
