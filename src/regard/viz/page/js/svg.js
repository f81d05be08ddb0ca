// SVG pictures from one description: its parts become nodes on the page, or the text of a file.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
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
export const svgRect = (x, y, width, height, attributes = {}, children = []) =>
  svgPart("rect", { x, y, width, height, ...attributes }, children);
export const svgPath = (d, attributes = {}) => svgPart("path", { d, fill: "none", ...attributes });
export const svgLine = (x1, y1, x2, y2, attributes = {}) => svgPart("line", { x1, y1, x2, y2, ...attributes });
export const svgGroup = (attributes, children) => svgPart("g", attributes, children);

function rounded(value) {
  return typeof value === "number" ? String(Math.round(value * 100) / 100) : String(value);
}

function escape(text) {
  // Characters that XML cannot represent are dropped; labels show them by other characters.
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "")
    .replace(/[&<>"]/g, (character) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[character]);
}

function serialize(part) {
  if (typeof part === "string") return escape(part);
  const attributes = Object.entries(part.attributes)
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => ` ${name}="${escape(rounded(value))}"`);
  return `<${part.tag}${attributes.join("")}>${part.children.map(serialize).join("")}</${part.tag}>`;
}

export function svgNode(part) {
  if (typeof part === "string") return document.createTextNode(part);
  const node = document.createElementNS(SVG_NAMESPACE, part.tag);
  for (const [name, value] of Object.entries(part.attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, rounded(value));
  }
  node.append(...part.children.map(svgNode));
  return node;
}

function svgRoot(width, height, title, parts) {
  const size = { width, height, viewBox: `0 0 ${rounded(width)} ${rounded(height)}` };
  return svgPart("svg", { xmlns: SVG_NAMESPACE, ...size, role: "img", "aria-label": title, "font-family": FONTS }, parts);
}

/** A complete SVG file. */
export function svgDocument(width, height, title, parts) {
  return `${serialize(svgRoot(width, height, title, parts))}\n`;
}

/** The same picture as a node of the page. */
export function svgElement(width, height, title, parts) {
  const node = svgNode(svgRoot(width, height, title, parts));
  node.classList.add("drawing");
  return node;
}

/** The background and title of an exported picture. */
export function svgCard(width, height, title) {
  const { card, edge, ink } = svgPalette();
  return [
    svgRect(0.5, 0.5, width - 1, height - 1, { rx: 14, fill: card, stroke: edge }),
    svgText(28, 42, title, { fill: ink, "font-size": 16, "font-weight": 600 }),
  ];
}

/** Hatching for masked cells: the pattern of `fill: "url(#hatch)"`. */
export function svgHatch() {
  const line = svgPath("M 0 6 L 6 0", { stroke: svgPalette().quiet, "stroke-width": 1, "stroke-opacity": 0.55 });
  const size = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return svgPart("defs", {}, [svgPart("pattern", size, [line])]);
}

/** The same hatching as a fill style of a canvas. */
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

/** An SVG file with lines of text below it, wrapped to its width. */
export function svgCaptioned(file, lines) {
  const { page, quiet } = svgPalette();
  const [width, height] = sizeOf(file);
  const all = lines.flatMap((line) => wrapped(line, width - 56));
  const texts = all.map((line, i) => svgText(28, height + 20 + 18 * i, line, { fill: quiet, "font-size": 12 }));
  const background = svgRect(0, 0, width, height + 18 * all.length + 14, { fill: page });
  const title = /aria-label="([^"]*)"/.exec(file)[1];
  const open = serialize(svgRoot(width, background.attributes.height, "", [])).replace("</svg>", "");
  const named = open.replace('aria-label=""', () => `aria-label="${title}"`);
  return `${named}${serialize(background)}${file.trim()}${texts.map(serialize).join("")}</svg>\n`;
}

function wrapped(text, maxWidth) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (lines.at(-1) && textWidth(longer, 12) > maxWidth) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}

const sizeOf = (file) => ["width", "height"].map((side) => Number(new RegExp(`${side}="([\\d.]+)"`).exec(file)[1]));

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
  const sizes = documents.map(sizeOf);
  const width = Math.max(...sizes.map((size) => size[0])) + 2 * space;
  let y = space;
  const placed = documents.map((text, i) => {
    const put = text.replace("<svg ", `<svg x="${space}" y="${y}" `);
    y += sizes[i][1] + space;
    return put;
  });
  const background = serialize(svgRect(0, 0, width, y, { fill: svgPalette().page }));
  const size = `width="${width}" height="${y}" viewBox="0 0 ${width} ${y}"`;
  const open = `<svg xmlns="${SVG_NAMESPACE}" ${size} role="img" aria-label="${escape(title)}">`;
  return `${open}${background}${placed.join("")}</svg>\n`;
}
