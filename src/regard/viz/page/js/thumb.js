// Small pictures of whole maps, made from the bytes as they are carried.

import { byteColours, packedPixel, rgb } from "./colours.js";

const THUMB_SIDE = 112; // pixels; longer maps show the greatest weight of each block, so that thin lines survive

/** The greatest of each block of an axis: where block i begins. */
function blocks(length) {
  const count = Math.min(length, THUMB_SIDE);
  return Array.from({ length: count + 1 }, (_, i) => Math.floor((i * length) / count));
}

/** Draws [rows, columns] weights into a canvas, a pixel a cell or a block of cells; masked ones stay clear. */
export function drawThumb(canvas, values, scale, rows, columns, masked = null) {
  const [ys, xs] = [blocks(rows), blocks(columns)];
  const [height, width] = [ys.length - 1, xs.length - 1];
  const image = new ImageData(width, height);
  const packed = new Uint32Array(image.data.buffer);
  const table = byteColours();
  const bytes = values instanceof Uint8Array && Math.abs(scale - 1 / 255) < 1e-9;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      let most = 0;
      let seen = !masked;
      for (let r = ys[y]; r < ys[y + 1]; r++) {
        for (let i = r * columns + xs[x]; i < r * columns + xs[x + 1]; i++) {
          if (values[i] > most) most = values[i];
          if (masked && !masked[i]) seen = true;
        }
      }
      if (seen) packed[y * width + x] = bytes ? table[most] : packedPixel(rgb(most * scale));
    }
  }
  canvas.width = width;
  canvas.height = height;
  canvas.classList.toggle("hatched", Boolean(masked));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

export function isPooled(rows, columns) {
  return Math.max(rows, columns) > THUMB_SIDE;
}
