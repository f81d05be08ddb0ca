// A sentence as a line of tokens. Tokens can be pointed at, walked with the arrow keys, and shaded by weights.

import { button, el, rovingFocus } from "./dom.js";
import { colour, ink } from "./colours.js";
import { direction } from "./tokens.js";

const nothing = () => {};

export function tokenStrip({ label, tokens, onPoint = nothing, onPick = nothing, announce = nothing, describe = null }) {
  const chips = tokens.map((text, i) => {
    const chip = button(text, () => onPick(i), { class: "token", dir: direction(text), aria: { pressed: "false" } });
    chip.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && onPoint(i));
    return chip;
  });
  const rightToLeft = direction(tokens.find((text) => /\p{L}/u.test(text)) ?? "") === "rtl";
  const element = el("div", { class: "strip", role: "group", dir: rightToLeft ? "rtl" : "ltr", aria: { label } }, chips);
  const keys = ["ArrowLeft", "ArrowRight"];
  rovingFocus(element, chips, rightToLeft ? keys.reverse() : keys, (i) => {
    onPoint(i);
    if (describe) announce(describe(i));
  });
  element.addEventListener("pointerleave", () => onPoint(null));
  element.addEventListener("focusout", (event) => !element.contains(event.relatedTarget) && onPoint(null));
  return {
    element,
    /** Shades tokens by weights between 0 and 1; null removes the shades. */
    shade(weights) {
      chips.forEach((chip, i) => {
        chip.style.background = weights ? colour(weights[i]) : "";
        chip.style.color = weights ? ink(weights[i]) : "";
      });
    },
    /** Marks token `i` as pressed. */
    mark(i) {
      chips.forEach((chip, k) => chip.setAttribute("aria-pressed", String(k === i)));
    },
  };
}
