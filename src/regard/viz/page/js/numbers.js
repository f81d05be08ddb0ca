// Formatting of numbers, and small reductions over arrays.

/** 0.1234 -> "12.3 %". A positive share is never shown as 0. */
export function percent(p) {
  if (p > 0 && p < 0.0005) return "< 0.1 %";
  return `${(100 * p).toFixed(p < 0.9995 ? 1 : 0)} %`;
}

/** +1.24, −15.9: three digits, without a sign on what rounds to zero. */
export function signedNumber(value) {
  const size = Math.abs(value);
  const text = value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
  if (Number(text) === 0) return "0.00";
  return value > 0 ? `+${text}` : text.replace("-", "−");
}

export function exactNumber(value) {
  return value.toFixed(3).replace("-", "−");
}

/** Three significant digits. */
export function shortNumber(number) {
  const text = Math.abs(number) >= 1000 ? number.toFixed(0) : String(Number(number.toPrecision(3)));
  return text.replace("-", "−");
}

export const thousands = (count) => count.toLocaleString("en");
export const plural = (count, noun) => `${thousands(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The greatest absolute value, or 1 where all are zero. */
export function extentOf(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
}

/** The indices of the `count` greatest values, in descending order. */
export function topIndices(values, count) {
  const order = Array.from(values.keys()).sort((a, b) => values[b] - values[a]);
  return order.slice(0, count);
}

/** Count, range and mean of some values, as text. */
export function summary(values) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const [low, high] = [Math.min, Math.max].map((pick) => values.reduce((a, b) => pick(a, b)));
  const range = `from ${exactNumber(low)} to ${exactNumber(high)}, mean ${exactNumber(total / values.length)}`;
  return `${plural(values.length, "number")}, ${range}`;
}
