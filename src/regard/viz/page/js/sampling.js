// Sampling of the next token, as in decoding/sampling.py: temperature, then top-k, then top-p. A test compares the two.

const WORD = (1n << 64n) - 1n;

/** The tokens that can be sampled, most likely first: [{id, p}]; `forbidden` ids are never generated. */
export function keptTokens(logits, { temperature, topK, topP }, forbidden = []) {
  const never = new Set(forbidden);
  let order = Array.from(logits.keys()).filter((id) => !never.has(id));
  order.sort((a, b) => logits[b] - logits[a] || a - b);
  if (topK > 0) order = order.slice(0, topK);
  const best = logits[order[0]];
  const weights = order.map((id) => Math.exp((logits[id] - best) / temperature));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const kept = [];
  let before = 0;
  for (const [rank, id] of order.entries()) {
    if (topP < 1 && before >= topP) break; // a token is kept if those before it have less than top-p
    const p = weights[rank] / total;
    kept.push({ id, p });
    before += p;
  }
  const share = kept.reduce((sum, token) => sum + token.p, 0);
  return kept.map((token) => ({ id: token.id, p: token.p / share }));
}

/** The token at this number between 0 and 1 in the cumulative distribution. */
export function tokenAt(kept, uniform) {
  let edge = 0;
  for (const token of kept) {
    edge += token.p;
    if (uniform < edge) return token;
  }
  return kept[kept.length - 1];
}

/** The uniform number with which `regard generate --seed SEED` samples token `step` of its first prompt. */
export function drawnNumber(seed, step) {
  const line = [0n, 0n, 0n].reduce((word, part) => scrambled(word ^ part), 0n); // prompt 0, sample 0, turn 0
  const key = scrambled(scrambled(scrambled(BigInt.asUintN(64, BigInt(seed))) ^ line));
  return Number(scrambled(key ^ BigInt(step)) >> 40n) * 2 ** -24;
}

function scrambled(word) {
  word = (word + 0x9e3779b97f4a7c15n) & WORD;
  word = ((word ^ (word >> 30n)) * 0xbf58476d1ce4e5b9n) & WORD;
  word = ((word ^ (word >> 27n)) * 0x94d049bb133111ebn) & WORD;
  return word ^ (word >> 31n);
}
