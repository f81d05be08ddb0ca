// SVG pictures from one description: parts become nodes on the page, or the text of a file.

const SVG_SPACE = "http://www.w3.org/2000/svg";
export const FONTS =
  "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif";

const PALETTES = {
  light: { page: "#f6f7f8", card: "#ffffff", edge: "#e3e6ea", ink: "#1b2027", quiet: "#5a6370", accent: "#c23c14" },
  dark: { page: "#0d0f12", card: "#14171c", edge: "#2a3039", ink: "#eceff3", quiet: "#98a2af", accent: "#ff7d4d" },
};

export function svgPalette() {
  return PALETTES[document.documentElement.dataset.theme] ?? PALETTES.light;
}

export function svgPart(tag, attributes = {}, children = []) {
  return { tag, attributes, children: Array.isArray(children) ? children.flat() : [children] };
}

export const svgText = (x, y, text, attributes = {}) => svgPart("text", { x, y, ...attributes }, [String(text)]);
export const svgRect = (x, y, width, height, attributes = {}) =>
  svgPart("rect", { x, y, width, height, ...attributes });
export const svgPath = (d, attributes = {}) => svgPart("path", { d, fill: "none", ...attributes });
export const svgLine = (x1, y1, x2, y2, attributes = {}) => svgPart("line", { x1, y1, x2, y2, ...attributes });
export const svgGroup = (attributes, children) => svgPart("g", attributes, children);

function neat(value) {
  return typeof value === "number" ? String(Math.round(value * 100) / 100) : String(value);
}

function escaped(text) {
  // Characters that XML has no way to write are left out; labels have made them visible before.
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "")
    .replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
}

function written(part) {
  if (typeof part === "string") return escaped(part);
  const attributes = Object.entries(part.attributes)
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => ` ${name}="${escaped(neat(value))}"`);
  return `<${part.tag}${attributes.join("")}>${part.children.map(written).join("")}</${part.tag}>`;
}

export function svgNode(part) {
  if (typeof part === "string") return document.createTextNode(part);
  const node = document.createElementNS(SVG_SPACE, part.tag);
  for (const [name, value] of Object.entries(part.attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, neat(value));
  }
  node.append(...part.children.map(svgNode));
  return node;
}

function wholePicture(width, height, title, parts) {
  const size = { width, height, viewBox: `0 0 ${neat(width)} ${neat(height)}` };
  return svgPart("svg", { xmlns: SVG_SPACE, ...size, role: "img", "aria-label": title, "font-family": FONTS }, parts);
}

/** A complete SVG file. */
export function svgDocument(width, height, title, parts) {
  return `${written(wholePicture(width, height, title, parts))}\n`;
}

/** The same picture as a node of the page, as wide as there is room. */
export function svgElement(width, height, title, parts) {
  const node = svgNode(wholePicture(width, height, title, parts));
  node.classList.add("drawing");
  return node;
}

/** A card with a title, as every exported picture begins; returns its parts and where the content may start. */
export function svgCard(width, height, title) {
  const { card, edge, ink } = svgPalette();
  return [
    svgRect(0.5, 0.5, width - 1, height - 1, { rx: 14, fill: card, stroke: edge }),
    svgText(28, 42, title, { fill: ink, "font-size": 16, "font-weight": 600 }),
  ];
}

/** Diagonal lines for masked cells: a pattern for `fill: "url(#hatch)"`. */
export function svgHatch() {
  const line = svgPath("M 0 6 L 6 0", { stroke: svgPalette().quiet, "stroke-width": 1, "stroke-opacity": 0.55 });
  const size = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return svgPart("defs", {}, [svgPart("pattern", size, [line])]);
}

/** The same lines as a fill of a canvas. */
export function canvasHatch(paint) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  Object.assign(ink, { strokeStyle: svgPalette().quiet, globalAlpha: 0.55 });
  ink.moveTo(0, 6);
  ink.lineTo(6, 0);
  ink.stroke();
  return paint.createPattern(tile, "repeat");
}

/** An SVG file with lines of text below it, broken to its width. */
export function svgCaptioned(file, lines) {
  const { page, quiet } = svgPalette();
  const [width, height] = svgSize(file);
  const broken = lines.flatMap((line) => brokenLines(line, width - 56));
  const texts = broken.map((line, i) => svgText(28, height + 20 + 18 * i, line, { fill: quiet, "font-size": 12 }));
  const ground = svgRect(0, 0, width, height + 18 * broken.length + 14, { fill: page });
  const title = /aria-label="([^"]*)"/.exec(file)[1];
  const open = written(wholePicture(width, ground.attributes.height, "", [])).replace("</svg>", "");
  const named = open.replace('aria-label=""', () => `aria-label="${title}"`);
  return `${named}${written(ground)}${file.trim()}${texts.map(written).join("")}</svg>\n`;
}

function brokenLines(text, room) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && textWidth(longer, 12) > room) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

const svgSize = (file) => ["width", "height"].map((side) => Number(new RegExp(`${side}="([\\d.]+)"`).exec(file)[1]));

let measuringContext = null;

/** The width of text in the page's face at this size, in pixels. */
export function textWidth(text, size, weight = 400) {
  measuringContext ??= document.createElement("canvas").getContext("2d");
  measuringContext.font = `${weight} ${size}px ${FONTS}`;
  return measuringContext.measureText(text).width;
}

/** Several SVG files as one, below each other. */
export function svgStack(title, documents) {
  const space = 20;
  const sizes = documents.map(svgSize);
  const width = Math.max(...sizes.map((size) => size[0])) + 2 * space;
  let y = space;
  const placed = documents.map((text, i) => {
    const put = text.replace("<svg ", `<svg x="${space}" y="${y}" `);
    y += sizes[i][1] + space;
    return put;
  });
  const ground = written(svgRect(0, 0, width, y, { fill: svgPalette().page }));
  const size = `width="${width}" height="${y}" viewBox="0 0 ${width} ${y}"`;
  const open = `<svg xmlns="${SVG_SPACE}" ${size} role="img" aria-label="${escaped(title)}">`;
  return `${open}${ground}${placed.join("")}</svg>\n`;
}
