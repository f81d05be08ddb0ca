// A sentence as a line of tokens: point at one, or walk it with the arrow keys; each can carry a shade.

import { el } from "./dom.js";
import { colour, ink } from "./colours.js";
import { direction } from "./tokens.js";

export function tokenStrip({
  label,
  tokens,
  onPoint = () => {},
  onPick = () => {},
  announce = () => {},
  describe = null,
}) {
  let at = 0;
  const chips = tokens.map((text, i) => {
    const chip = el("button", {
      type: "button",
      class: "token",
      tabIndex: i === 0 ? 0 : -1,
      dir: direction(text),
      aria: { pressed: "false" },
      text,
    });
    chip.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && onPoint(i));
    chip.addEventListener("focus", () => {
      chips[at].tabIndex = -1;
      at = i;
      chip.tabIndex = 0;
      onPoint(i);
      if (describe) announce(describe(i));
    });
    chip.addEventListener("click", () => onPick(i));
    return chip;
  });
  const leftward = direction(tokens.find((text) => /\p{L}/u.test(text)) ?? "") === "rtl";
  const element = el("div", { class: "strip", role: "group", dir: leftward ? "rtl" : "ltr", aria: { label } }, chips);
  element.addEventListener("pointerleave", () => onPoint(null));
  element.addEventListener("focusout", (event) => !element.contains(event.relatedTarget) && onPoint(null));
  element.addEventListener("keydown", (event) => {
    const onward = leftward ? "ArrowLeft" : "ArrowRight";
    const back = leftward ? "ArrowRight" : "ArrowLeft";
    const moves = { [onward]: at + 1, [back]: at - 1, Home: 0, End: chips.length - 1 };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    chips[Math.min(Math.max(moves[event.key], 0), chips.length - 1)].focus();
  });
  return {
    element,
    /** Shades tokens by weights between 0 and 1; null takes the shades away. */
    shade(weights) {
      chips.forEach((chip, i) => {
        chip.style.background = weights ? colour(weights[i]) : "";
        chip.style.color = weights ? ink(weights[i]) : "";
      });
    },
    /** Marks one token as the one that looks, or is looked at. */
    mark(i) {
      chips.forEach((chip, k) => chip.setAttribute("aria-pressed", String(k === i)));
    },
  };
}
