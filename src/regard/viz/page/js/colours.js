// The colour scales of regard/viz/colours.py, whose anchors come with the data, and of regard/viz/explanations.py.
// A test compares both with Python's.

let scaleAnchors = [];
let pixelTables = {};

/** Sets the colours of weights: [red, green, blue] at equal steps from 0 to 1. */
export function setAnchors(anchors) {
  scaleAnchors = anchors;
  pixelTables = {};
}

const POSITIVE = [0x00, 0x72, 0xb2];
const NEGATIVE = [0xd5, 0x5e, 0x00];
const NEUTRAL = [0xf2, 0xf2, 0xf2];

/** The colour-blind safe palette of Okabe and Ito. */
export const OKABE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

/** Rounds half to even, as Python does. */
function roundHalfEven(number) {
  const below = Math.floor(number);
  const part = number - below;
  if (part !== 0.5) return Math.round(number);
  return below % 2 === 0 ? below : below + 1;
}

function between(low, high, part) {
  return low.map((a, i) => roundHalfEven(a + (high[i] - a) * part));
}

/** The colour of a weight as [red, green, blue]; clamped to 0..1. */
export function rgb(weight) {
  const position = Math.min(Math.max(weight, 0), 1) * (scaleAnchors.length - 1);
  const below = Math.min(Math.floor(position), scaleAnchors.length - 2);
  return between(scaleAnchors[below], scaleAnchors[below + 1], position - below);
}

/** The colour of a number from -1 to 1: blue above zero, vermilion below. */
export function signedRgb(value) {
  return between(NEUTRAL, value > 0 ? POSITIVE : NEGATIVE, Math.min(Math.abs(value), 1));
}

export function css(channels) {
  return `#${channels.map((channel) => channel.toString(16).padStart(2, "0")).join("")}`;
}

export const colour = (weight) => css(rgb(weight));
export const signedColour = (value) => css(signedRgb(value));

function luminance(channels) {
  const [red, green, blue] = channels.map((byte) => {
    const c = byte / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

const inkOn = (channels) => (luminance(channels) > 0.179 ? "#000000" : "#ffffff");
export const ink = (weight) => inkOn(rgb(weight));
export const signedInk = (value) => inkOn(signedRgb(value));

/** Colour scales by name; they take numbers already divided by their extent. */
export const SCALES = {
  weight: { rgb, colour, ink, low: 0, high: 1 },
  signed: { rgb: signedRgb, colour: signedColour, ink: signedInk, low: -1, high: 1 },
};

/** The colour of a share as a little-endian RGBA pixel, from a table in steps of 1/255. */
export function pixelColours(name) {
  const { rgb: colourOf, low, high } = SCALES[name];
  pixelTables[name] ??= Uint32Array.from({ length: 255 * (high - low) + 1 }, (_, i) => {
    const [red, green, blue] = colourOf(low + i / 255);
    return (255 << 24) | (blue << 16) | (green << 8) | red;
  });
  const table = pixelTables[name];
  return (share) => table[Math.round(255 * (Math.min(Math.max(share, low), high) - low))];
}
