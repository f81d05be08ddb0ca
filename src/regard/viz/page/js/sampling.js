// From logits to the next token, as decoding/sampling.py does it: temperature first, then the top-k likeliest, then the
// smallest set of these that reaches top-p of their probability. A test holds the two equal.

const WORD = (1n << 64n) - 1n;

/** Tokens a draw may fall on, likeliest first: [{id, p}]; ids that are never written stand in `forbidden`. */
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
    if (topP < 1 && before >= topP) break; // a token stays if those before it fall short
    const p = weights[rank] / total;
    kept.push({ id, p });
    before += p;
  }
  const share = kept.reduce((sum, token) => sum + token.p, 0);
  return kept.map((token) => ({ id: token.id, p: token.p / share }));
}

/** The token that owns this number between 0 and 1 when kept tokens lie end to end. */
export function tokenAt(kept, uniform) {
  let edge = 0;
  for (const token of kept) {
    edge += token.p;
    if (uniform < edge) return token;
  }
  return kept[kept.length - 1];
}

/** The number in [0, 1) that `regard generate --seed SEED` draws its first prompt's token number `step` with. */
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
