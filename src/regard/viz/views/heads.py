"""Thumbnails of all heads, each with four statistics."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.interpret.trace import Trace
from regard.text.display import columns, shorten
from regard.viz import scene as scenes
from regard.viz.colours import WEIGHTS
from regard.viz.grid import colour_bar, short_number
from regard.viz.scene import MAX_RECTS, PAD, Cells, Item, Rect, Scene, SceneText, text_width
from regard.viz.terminal import Colour, painted, shade_of
from regard.viz.views.choice import PARTS, part_title
from regard.viz.views.picture import Picture

SIDE = 120.0  # side of a thumbnail
BESIDE, BELOW = 14.0, 44.0  # space beside and below a thumbnail; its statistics are below it
MAX_CELLS = 112  # along a side; longer maps are max-pooled
MARGIN = 64.0  # for the names of the layers
NOTE = (
    "entropy in nats (0: one token has all the weight); diagonal: weight within one position of it; special, punct.: "
    "weight on special tokens and punctuation"
)


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """One head: its weights, pooled if they were many, and its statistics."""

    weights: np.ndarray
    stats: Mapping[str, float]
    name: str

    def lines(self) -> list[str]:
        s = self.stats
        return [f"entropy {s['entropy']:.2f}", f"special {100 * s['special']:.0f} %",
                f"diagonal {100 * s['diagonal']:.0f} %", f"punct. {100 * s['punctuation']:.0f} %"]  # fmt: skip


def heads(trace: Trace) -> Picture:
    """Draw all heads of a trace, part by part."""
    order = {part: rank for rank, part in enumerate(("encoder", "decoder", "cross"))}
    rows = []
    for entry in sorted(trace.header["attention"], key=lambda entry: (order[entry["part"]], entry["layer"])):
        weights = trace.display(entry["array"]) * np.float32(_scale(trace, entry)["scale"])
        thumbnails = [
            Thumbnail(
                pooled(one, MAX_CELLS),
                stats,
                f"{PARTS[entry['part']].lower()}, layer {entry['layer'] + 1}, head {h + 1}",
            )
            for h, (one, stats) in enumerate(zip(weights, entry["stats"], strict=True))
        ]
        rows.append(Row(part_title(trace, entry["part"]), f"layer {entry['layer'] + 1}", tuple(thumbnails)))
    about = trace.header["model"]
    title = f"All heads of {about['name']}: {about['heads']} in each of {len(rows)} attentions"

    def numbers() -> dict[str, Any]:
        """Return the weights as stored: `value = weights * scale`."""
        return {
            "heads": [
                entry | {"weights": trace.display(entry["array"]).tolist(), **_scale(trace, entry)}
                for entry in trace.header["attention"]
            ]
        }

    return Picture("heads", (Multiples(title, tuple(rows)),), numbers)


def _scale(trace: Trace, entry: Mapping[str, Any]) -> dict[str, float]:
    return {"scale": trace.header["arrays"][entry["array"]]["scale"]}


def pooled(weights: np.ndarray, most: int) -> np.ndarray:
    """Max-pool a matrix to at most `most` cells per side."""
    for axis in (0, 1):
        every = math.ceil(weights.shape[axis] / most)
        if every > 1:
            starts = np.arange(0, weights.shape[axis], every)
            weights = np.maximum.reduceat(weights, starts, axis=axis)
    return weights


@dataclass(frozen=True, eq=False)
class Row:
    """The heads of one attention."""

    part: str
    layer: str
    heads: tuple[Thumbnail, ...]


@dataclass(frozen=True, eq=False)
class Multiples:
    """Rows of thumbnails under the names of their parts."""

    title: str
    rows: tuple[Row, ...]

    def _parts(self) -> Iterator[tuple[bool, Row]]:
        """Yield the rows, and whether each is the first of its part."""
        before = ""
        for row in self.rows:
            yield row.part != before, row
            before = row.part

    def scene(self) -> Scene:
        most = max(len(row.heads) for row in self.rows)
        left = PAD + MARGIN
        width = max(left + most * (SIDE + BESIDE) - BESIDE, PAD + text_width(NOTE, 11), PAD + 320) + PAD
        image = sum(head.weights.size for row in self.rows for head in row.heads) > 2 * MAX_RECTS
        items: list[Item] = []
        y = PAD + 34.0
        for first, row in self._parts():
            if first:
                items.append(SceneText(PAD, y + 14, row.part, 13, bold=True))
                y += 20
                items += [
                    SceneText(
                        left + (h + 0.5) * (SIDE + BESIDE) - BESIDE / 2, y + 20, f"head {h + 1}", 11, "quiet", "middle"
                    )
                    for h in range(len(row.heads))
                ]
                y += 30
            items.append(SceneText(left - 12, y + SIDE / 2 + 4, row.layer, 12, "quiet", "end"))
            for h, head in enumerate(row.heads):
                items += _thumbnail(head, left + h * (SIDE + BESIDE), y, image)
            y += SIDE + BELOW
        height = y + 66 + PAD
        items += [
            colour_bar(left, y + 8, WEIGHTS, "attention weight", short_number),
            SceneText(PAD, y + 66, NOTE, 11, "quiet"),
        ]
        card = (scenes.card(width, height), scenes.title(self.title, width))
        stats = (f"{head.name}: {', '.join(head.lines())}." for row in self.rows for head in row.heads)
        return Scene(width, height, scenes.clean(self.title), " ".join(stats), (*card, *items))

    def text(self, *, width: int, colour: Colour) -> str:
        """Format as many thumbnails side by side as fit, with their statistics below."""
        lines = [shorten(scenes.clean(self.title), width), ""]
        for row in self.rows:
            lines += [shorten(f"{row.part}, {row.layer}", width), ""]
            wide = max(13, min(24, row.heads[0].weights.shape[1]))
            across = max(1, width // (wide + 2))
            for start in range(0, len(row.heads), across):
                selected = row.heads[start : start + across]
                blocks = [_lines(head, f"head {start + h + 1}", wide, colour) for h, head in enumerate(selected)]
                lines += ["  ".join(parts).rstrip() for parts in zip(*blocks, strict=True)]
                lines.append("")
        return "\n".join([*lines, *textwrap.wrap(NOTE, width)]) + "\n"


def _thumbnail(head: Thumbnail, x: float, y: float, image: bool) -> list[Item]:
    rows, across = head.weights.shape
    cells = Cells(x, y, SIDE / across, SIDE / rows, WEIGHTS.rgbs(head.weights), image=image)
    stats = [
        SceneText(x + 66 * (i % 2), y + SIDE + 12 + 11 * (i // 2), line, 8.5, "quiet")
        for i, line in enumerate(head.lines())
    ]
    tip = f"{head.name}: {', '.join(head.lines())}"
    return [cells, Rect(x, y, SIDE, SIDE, stroke="edge", fill="none", tip=tip), *stats]


def _lines(head: Thumbnail, name: str, wide: int, colour: Colour) -> list[str]:
    """Format one thumbnail in `wide` columns, which small maps fill with wider cells."""
    coarse = pooled(head.weights, wide)
    coarse = np.repeat(coarse, max(1, wide // coarse.shape[1]), axis=1)
    lines = [_padded(name, wide)]
    for row in coarse:
        shown = "".join(
            shade_of(float(w)) if colour == "none" else painted(" ", WEIGHTS.rgb(float(w)), colour) for w in row
        )
        lines.append(shown + " " * (wide - len(row)))
    return [*lines, *(_padded(line, wide) for line in head.lines())]


def _padded(text: str, wide: int) -> str:
    return text[:wide] + " " * (wide - columns(text[:wide]))
