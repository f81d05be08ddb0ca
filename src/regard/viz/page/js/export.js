// Export of the figures on screen as files.

import { svgCaptioned, svgStack } from "./svg.js";
import { el } from "./dom.js";

const MAX_CANVAS_SIDE = 8192; // pixels; browsers refuse much larger canvases

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** One SVG of all figures on screen, in document order. */
async function onScreen(figures) {
  const shown = figures.filter((box) => box.isConnected && box.exported.svg);
  shown.sort((a, b) => (a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1));
  if (!shown.length) throw new Error("There is no picture on screen to export.");
  const drawn = await Promise.all(
    shown.map(async ({ exported }) => svgCaptioned(await exported.svg(), exported.caption())),
  );
  return {
    name: shown[0].exported.name,
    text: drawn.length === 1 ? drawn[0] : svgStack(shown[0].exported.title(), drawn),
  };
}

export async function saveSvg(figures) {
  const { name, text } = await onScreen(figures);
  save(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
}

export async function savePng(figures) {
  const { name, text } = await onScreen(figures);
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = address;
  await image.decode();
  URL.revokeObjectURL(address);
  const times = Math.min(2, MAX_CANVAS_SIDE / Math.max(image.width, image.height));
  const canvas = el("canvas", { width: Math.round(image.width * times), height: Math.round(image.height * times) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  save(`${name}.png`, blob);
}

/** A standalone HTML file of this view and its data. */
export async function saveHtml(source, requests, hash) {
  save("regard.html", new Blob([await source.standalone(requests, hash)], { type: "text/html" }));
}
