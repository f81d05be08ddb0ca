// The colour scales of regard/viz/colours.py, whose anchors come with the data, and of
// regard/viz/explanations.py; a test holds the colours of both equal to Python's.

let scaleAnchors = [];
let packedBytes = null;

/** Sets the colours of weights: [red, green, blue] at equal steps from 0 to 1. */
export function setAnchors(anchors) {
  scaleAnchors = anchors;
  packedBytes = null;
}

const SPOKE_FOR = [0x00, 0x72, 0xb2];
const SPOKE_AGAINST = [0xd5, 0x5e, 0x00];
const SPOKE_NEITHER = [0xf2, 0xf2, 0xf2];

/** Okabe and Ito's colours for up to eight things that must be told apart. */
export const OKABE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

/** Python's rounding: halves go to the even neighbour. */
function roundHalfEven(number) {
  const below = Math.floor(number);
  const part = number - below;
  if (part !== 0.5) return Math.round(number);
  return below % 2 === 0 ? below : below + 1;
}

function between(low, high, part) {
  return low.map((a, i) => roundHalfEven(a + (high[i] - a) * part));
}

/** The colour of a weight as [red, green, blue]; weights outside 0..1 take the nearest end of the scale. */
export function rgb(weight) {
  const place = Math.min(Math.max(weight, 0), 1) * (scaleAnchors.length - 1);
  const below = Math.min(Math.floor(place), scaleAnchors.length - 2);
  return between(scaleAnchors[below], scaleAnchors[below + 1], place - below);
}

/** The colour of a number from -1 to 1: blue for, vermilion against. */
export function signedRgb(value) {
  return between(SPOKE_NEITHER, value > 0 ? SPOKE_FOR : SPOKE_AGAINST, Math.min(Math.abs(value), 1));
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

/** What a picture needs of a scale, by its name: colours of numbers already divided by their extent. */
export const SCALES = {
  weight: { rgb, colour, ink, low: 0, high: 1 },
  signed: { rgb: signedRgb, colour: signedColour, ink: signedInk, low: -1, high: 1 },
};

/** The 256 colours of weights carried as bytes, packed as little-endian RGBA pixels. */
export function byteColours() {
  packedBytes ??= Uint32Array.from({ length: 256 }, (_, byte) => packedPixel(rgb(byte / 255)));
  return packedBytes;
}

/** A colour as one little-endian RGBA pixel of an image. */
export function packedPixel([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}
