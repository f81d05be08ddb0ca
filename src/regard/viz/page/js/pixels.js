// Small images of tensors and attention maps, one pixel per value or block of values.

import { pixelColours } from "./colours.js";

const THUMBNAIL_SIDE = 112; // pixels; longer maps are max-pooled, so that thin lines survive

/** Sets a canvas to [rows, columns] pixels; `pixel(i)` gives one as packed RGBA, 0 for transparent. */
export function drawPixels(canvas, rows, columns, pixel) {
  const image = new ImageData(columns, rows);
  const packed = new Uint32Array(image.data.buffer);
  for (let i = 0; i < packed.length; i++) packed[i] = pixel(i);
  Object.assign(canvas, { width: columns, height: rows });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** The first index of each block of an axis, and the end. */
function blockEdges(length) {
  const count = Math.min(length, THUMBNAIL_SIDE);
  return Array.from({ length: count + 1 }, (_, i) => Math.floor((i * length) / count));
}

/** Draws [rows, columns] weights into a canvas, one pixel per cell or block; masked cells stay transparent. */
export function drawThumbnail(canvas, values, scale, rows, columns, masked = null) {
  const [ys, xs] = [blockEdges(rows), blockEdges(columns)];
  const [height, width] = [ys.length - 1, xs.length - 1];
  const colourOf = pixelColours("weight");
  drawPixels(canvas, height, width, (pixel) => {
    const [y, x] = [Math.floor(pixel / width), pixel % width];
    let most = 0;
    let visible = !masked;
    for (let r = ys[y]; r < ys[y + 1]; r++) {
      for (let i = r * columns + xs[x]; i < r * columns + xs[x + 1]; i++) {
        if (values[i] > most) most = values[i];
        if (masked && !masked[i]) visible = true;
      }
    }
    return visible ? colourOf(most * scale) : 0;
  });
  canvas.classList.toggle("hatched", Boolean(masked));
}

export function isPooled(rows, columns) {
  return Math.max(rows, columns) > THUMBNAIL_SIDE;
}
