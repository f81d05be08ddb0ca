"""The way from a text to the next token: tokens and ids, the residual stream, the logit lens, and the choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.interpret.trace import Trace
from regard.text.display import columns, labels, shorten, visible
from regard.text.tokenizers import join_tokens
from regard.viz import scene as scenes
from regard.viz.colours import Ramp
from regard.viz.grid import Grid
from regard.viz.scene import PAD, Item, Rect, Scene, SceneText, isolated, text_width, title_width
from regard.viz.terminal import Colour
from regard.viz.views.picture import Picture

MAX_TOKENS = 24  # the last tokens of a longer text are shown
MAX_LABEL = 16  # columns
BAR = 320.0
LINE = 26.0
BLUE = "#0072b2"


def walk(trace: Trace) -> Picture:
    """Draw the walkthrough, one panel per stage."""
    header = trace.header
    sides = ["source"] if _reads_only(header) else [s for s in ("source", "inputs") if header["axes"][s]["elements"]]
    steps = [_tokens(header, sides), *(_stream(header, side) for side in sides), _layers(trace), _choice(header)]
    panels = [step for step in steps if step is not None]
    keys = ("axes", "stream", "embedding", "output")
    return Picture(
        "walk",
        tuple(replace(panel, title=f"{i}. {panel.title}") for i, panel in enumerate(panels, 1)),
        lambda: {key: header[key] for key in keys if key in header} | {"layers": trace.layers},
    )


def _reads_only(header: Mapping[str, Any]) -> bool:
    """Whether the model predicts something about its input instead of generating token by token."""
    return header["model"]["output"] != "sequence"


def _last(items: Sequence[Any]) -> Sequence[Any]:
    return items[-MAX_TOKENS:]


def _note(count: int) -> str:
    return f"the last {MAX_TOKENS} of {count} tokens" if count > MAX_TOKENS else ""


def axis_labels(tokens: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the labels of tokens on an axis."""
    return tuple(shorten(label, MAX_LABEL) for label in labels([str(token["text"]) for token in tokens]))


# -- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boxes:
    """Rows of tokens in boxes, with their ids below."""

    title: str
    rows: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...]  # name, tokens, ids
    note: str = ""

    def scene(self) -> Scene:
        left = PAD + max(text_width(name, 12) for name, _, _ in self.rows) + 16
        items: list[Item] = []
        y, right = PAD + 40.0, 0.0
        for name, tokens, ids in self.rows:
            items.append(SceneText(left - 16, y + 19, name, 12, "quiet", "end"))
            x = left
            for token, number in zip(tokens, ids, strict=True):
                wide = max(text_width(token, 13), text_width(str(number), 11)) + 16
                items += [
                    Rect(x, y, wide, 28, "box", "rim", radius=7),
                    SceneText(x + wide / 2, y + 19, token, 13, anchor="middle"),
                    SceneText(x + wide / 2, y + 44, str(number), 11, "quiet", "middle"),
                ]
                x += wide + 6
            right, y = max(right, x), y + 68
        y += 18 if self.note else 0
        width = max(right, PAD + title_width(self.title)) + PAD
        head: list[Item] = [scenes.card(width, y + 6), scenes.title(self.title, width)]
        head += [SceneText(PAD, y - 14, self.note, 11, "quiet")] if self.note else []
        about = " ".join(f"{name}: {', '.join(isolated(token) for token in tokens)}." for name, tokens, _ in self.rows)
        return Scene(width, y + 6, self.title, about, (*head, *items))

    def text(self, *, width: int, colour: Colour) -> str:
        lines = [shorten(self.title, width), ""]
        margin = max(columns(name) for name, _, _ in self.rows)
        for name, tokens, ids in self.rows:
            above, below = " " * (margin - columns(name)) + name, " " * margin
            for token, number in zip(tokens, ids, strict=True):
                wide = max(columns(token), len(str(number)))
                if columns(above) + 2 + wide > width:
                    lines += [above.rstrip(), below.rstrip()]
                    above = below = " " * margin
                above += "  " + token + " " * (wide - columns(token))
                below += "  " + str(number).ljust(wide)
            lines += [above.rstrip(), below.rstrip()]
        return "\n".join([*lines, *([self.note] if self.note else [])]) + "\n"


def _tokens(header: Mapping[str, Any], sides: Sequence[str]) -> Boxes:
    names = {"source": "input", "inputs": "output so far"} if len(sides) > 1 else {side: "input" for side in sides}
    texts = {side: header["axes"][side]["elements"] for side in sides if header["axes"][side]["kind"] == "tokens"}
    rows = [
        (names[side], axis_labels(_last(tokens)), tuple(token["id"] for token in _last(tokens)))
        for side, tokens in texts.items()
    ]
    return Boxes("Tokens and ids", tuple(rows), _note(max(map(len, texts.values()))))


# -- the stream -------------------------------------------------------------------------------------------------------


def _stream(header: Mapping[str, Any], side: str) -> Grid | None:
    """Return the norm of each token's vector: embedding, position, and the stream after every addition."""
    tokens = header["axes"][side]["elements"]
    rows: list[tuple[str, list[float]]] = []
    for part in header.get("embedding", []):
        if part["side"] == side:
            rows += [(name, part[key]) for name, key in (("embedding", "token_norms"), ("position", "position_norms"))
                     if part[key] is not None]  # fmt: skip
    rows += [(entry["label"], entry["norms"]) for entry in header["stream"] if entry["side"] == side]
    if not rows:
        return None
    values = np.array([_last(norms) for _, norms in rows], np.float64)
    both = bool(header["axes"]["source"]["elements"]) and not _reads_only(header)
    whose = (" of the source" if side == "source" else " of the output") if both else ""
    return Grid(
        values, tuple(name for name, _ in rows), axis_labels(_last(tokens)),
        f"Residual stream{whose}: norm after each addition", "after", "norm",
        Ramp(0.0, max(float(values.max()), 1e-9)), number=three, shown=0.0, note=_note(len(tokens)), longest=30,
        about="The norm of the residual stream of each token after each part of the model.",
    )  # fmt: skip


def three(value: float) -> str:
    """Format a number with three digits: 0.12, 1.20, 12.3, 123."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


# -- the logit lens ---------------------------------------------------------------------------------------------------


PREDICTIONS = {  # by output: title of the logit lens, label of its columns, title of the choice
    "fills": ("Logit lens: the most likely token at each position", "at →", "Filled mask"),
    "class": ("Logit lens: the most likely class", "", "Class"),
}
NEXT_TOKEN = ("Logit lens: the most likely next token", "after →", "Next token")


def _layers(trace: Trace) -> Grid | None:
    """Return the most likely token after each layer, coloured by its probability, and the output in the last row."""
    header, layers = trace.header, [layer for layer in trace.layers if any(layer["top"])]
    if not layers:
        return None
    title, corner, _ = PREDICTIONS.get(header["model"]["output"], NEXT_TOKEN)
    one = header["model"]["output"] == "class"  # one prediction for the whole input
    selected = slice(0, 1) if one else slice(-MAX_TOKENS, None)
    words, values = [], []
    for layer in layers:
        tops: list[dict[str, Any]] = [row[0] if row else {"text": "", "p": 0.0} for row in layer["top"][selected]]
        words.append(tuple(_cell_text(top["text"]) for top in tops))
        values.append([top["p"] for top in tops])
    words.append(tuple(_cell_text(token["text"]) for token in header["axes"]["target"]["elements"][selected]))
    values.append([p or 0.0 for p in header["output"]["p"][selected]])  # None for a token outside the output vocabulary
    names = (*(str(layer["label"]) for layer in layers), "output")
    heads = ("class",) if one else axis_labels(_last(header["axes"]["inputs"]["elements"]))
    return Grid(
        np.array(values, np.float64).clip(0.0, 1.0), names, heads,
        title, corner, "probability", words=tuple(words), longest=30,
        tip=lambda r, c: f"{names[r]}: {isolated(words[r][c])} {values[r][c]:.3g}",
        note="" if one else _note(len(header["axes"]["target"]["elements"])),
        about="The most likely token after each layer.",
    )  # fmt: skip


def _cell_text(token: str) -> str:
    """Return a token for a cell, without the space before a word."""
    return shorten(visible(token.strip() or token), MAX_LABEL)


# -- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """Probabilities as bars; the chosen one has another colour and a note."""

    title: str
    names: tuple[str, ...]
    shares: tuple[float, ...]
    chosen: int | None
    note: str = ""

    def _percent(self, i: int) -> str:
        share = 100 * self.shares[i]
        return f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"

    def scene(self) -> Scene:
        left = PAD + max(text_width(name, 13) for name in self.names) + 14
        top = PAD + 44.0
        bottom = top + LINE * len(self.names)
        wide = [left + BAR + 130, PAD + title_width(self.title), PAD + text_width(self.note, 11)]
        width, height = max(wide) + PAD, bottom + 14 + (22 if self.note else 0)
        items: list[Item] = [scenes.card(width, height), scenes.title(self.title, width)]
        for i, (name, share) in enumerate(zip(self.names, self.shares, strict=True)):
            y = top + i * LINE
            paint = BLUE if i == self.chosen else "rim"
            note = " ← chosen" if i == self.chosen else ""
            items += [
                SceneText(left - 14, y + LINE / 2 + 4.5, name, 13, anchor="end"),
                Rect(
                    left, y + 4, max(share * BAR, 1.5), LINE - 8, paint, radius=3, tip=f"{isolated(name)}: {share:.6g}"
                ),
                SceneText(left + max(share * BAR, 1.5) + 10, y + LINE / 2 + 4, self._percent(i) + note, 12, "quiet"),
            ]
        items += [SceneText(PAD, bottom + 22, self.note, 11, "quiet")] if self.note else []
        shares = ", ".join(f"{isolated(name)} {share:.3g}" for name, share in zip(self.names, self.shares, strict=True))
        return Scene(width, height, self.title, f"Probabilities: {shares}.", tuple(items))

    def text(self, *, width: int, colour: Colour) -> str:
        margin = max(columns(name) for name in self.names)
        longest = max(1, min(40, width - margin - 18))  # leaves space for the percentage and the note
        lines = [shorten(self.title, width), ""]
        for i, (name, share) in enumerate(zip(self.names, self.shares, strict=True)):
            note = " ← chosen" if i == self.chosen else ""
            bar = "█" * round(share * longest) or "▏"
            lines.append(shorten(" " * (margin - columns(name)) + f"{name} {bar} {self._percent(i)}{note}", width))
        return "\n".join(lines) + "\n"


def _before(target: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the text of the last tokens before a step; the first one must not begin inside a UTF-8 character."""
    first = max(0, step - 6)
    while first and re.match("⟨[89ab]", target[first]["text"]):
        first -= 1
    return join_tokens([token["text"] for token in target[first:step] if not token["special"]]).strip()


def _choice(header: Mapping[str, Any]) -> Bars:
    """Return the most likely tokens at the generated step with the least probable token."""
    target, output = header["axes"]["target"]["elements"], header["output"]
    steps = [t for t, token in enumerate(target) if not token["given"]] or [len(target) - 1]
    steps = steps[:1] if header["model"]["output"] == "class" else steps
    step = min(steps, key=lambda t: output["p"][t] or 0.0)
    top = output["top"][step]
    names = tuple(shorten(label, MAX_LABEL) for label in labels(["", *(str(one["text"]) for one in top)])[1:])
    ids = [one["id"] for one in top]
    chosen = ids.index(target[step]["id"]) if target[step]["id"] in ids else None
    before = _before(target, step)
    after = f" after “{scenes.clean(before)}”" if before else ""
    note = "the step with the least probable token" if len(steps) > 1 else ""
    return Bars(
        f"{PREDICTIONS.get(header['model']['output'], NEXT_TOKEN)[2]}{after}",
        names,
        tuple(one["p"] for one in top),
        chosen,
        note,
    )
