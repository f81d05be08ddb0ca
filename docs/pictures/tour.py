"""Make the pictures of the tour: `python docs/pictures/tour.py [NAME ...]` writes docs/pictures/tour/NAME.svg.

Pictures of data are computed by the code of the tour: `chapter` runs the code blocks of a chapter and returns their
variables. The others are diagrams.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import torch
import torch.nn.functional as F

from regard.attention import (
    Additive,
    Bilinear,
    Causal,
    Dot,
    FixedBlocks,
    Mask,
    MaskTable,
    PackedQK,
    SameSegment,
    ScaledDot,
    Score,
    SegmentPositions,
    Segments,
    Strided,
    Window,
    plain_weights,
)
from regard.decoding.sampling import filter_tokens
from regard.models import build
from regard.models.recurrent import RecurrentSettings
from regard.models.transformer_settings import TransformerSettings
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import EncoderBlock
from regard.packed import PackedLayout, SeqBatch
from regard.recipes.schema import DecodingSettings
from regard.registry import ACTIVATIONS
from regard.text import BOS, EOS
from regard.viz import charts, grid, scene
from regard.viz.charts import Chart, Point, Series
from regard.viz.colours import colour, ink
from regard.viz.maps import Map

TOUR = Path(__file__).parents[1] / "tour.md"
HERE = Path(__file__).parent / "tour"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"  # as in regard.viz.charts
INK, QUIET, EDGE, CARD = "#1b2027", "#5f6874", "#e3e6ea", "#ffffff"  # the light card of regard.viz.svg
NIGHT = {"card": "#14171c", "edge": "#2a3039", "ink": "#eceff3", "quiet": "#98a2af", "box": "#1d2229"}
PALE = "#f4f6f8"


@functools.cache
def chapter(name: str) -> Any:
    """Run the code blocks of a chapter and return their variables."""
    text = TOUR.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(block, names)
    return SimpleNamespace(**names)


class Card:
    """A diagram in the style of the attention maps: a card with a title, boxes, arrows, text and small matrices."""

    def __init__(self, width: float, height: float, title: str, about: str) -> None:
        self.width, self.height, self.name, self.about = width, height, title, about
        self.parts: list[str] = []
        self.text(28, 42, title, size=16, anchor="start", weight=600)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        anchor: str = "middle",
        quiet: bool = False,
        weight: int = 400,
        fill: str = "",
    ) -> None:
        kind = "" if fill else ' class="quiet"' if quiet else ' class="ink"'
        paint = fill or (QUIET if quiet else INK)
        bold = f' font-weight="{weight}"' if weight != 400 else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{paint}"{kind}{bold}>'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, words: str = "", *, fill: str = "") -> None:
        """Draw a rounded box with centred text."""
        paint = f'fill="{fill}"' if fill else f'class="box" fill="{PALE}" stroke="#c3c9d1"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" {paint}/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, fill="#ffffff" if fill else "")

    def line(
        self, *places: tuple[float, float], arrow: bool = True, paint: str = "", width: float = 1.6, opacity: float = 1
    ) -> None:
        """Draw a line through points, with an arrow head at its end; grey unless `paint` gives a colour."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
        stroke = f'stroke="{paint}"' if paint else f'class="line" stroke="{QUIET}"'
        fade = f' stroke-opacity="{opacity:.2f}"' if opacity < 1 else ""
        self.parts.append(f'<path d="{path}" fill="none" {stroke} stroke-width="{width:.2f}"{fade}/>')
        if arrow:
            (x0, y0), (x1, y1) = places[-2:]
            long = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            ux, uy, size = (x1 - x0) / long, (y1 - y0) / long, 7.0
            tip = f"M{x1:g} {y1:g}"
            for side in (1, -1):
                tip += f"L{x1 - size * ux + side * 4 * uy:.2f} {y1 - size * uy - side * 4 * ux:.2f}"
            fill = f'fill="{paint}"' if paint else f'class="quiet" fill="{QUIET}"'
            self.parts.append(f'<path d="{tip}Z" {fill}{fade.replace("stroke", "fill")}/>')

    def bend(self, x0: float, y0: float, x1: float, y1: float, *, paint: str, width: float = 1.8) -> None:
        """Draw a curve that starts upwards and ends from the left."""
        path = f"M{x0:g} {y0:g}C{x0:g} {y1:g} {x0 + (x1 - x0) / 3:g} {y1:g} {x1:g} {y1:g}"
        self.parts.append(f'<path d="{path}" fill="none" stroke="{paint}" stroke-width="{width:g}"/>')

    def dot(self, x: float, y: float, sign: str, *, radius: float = 13, fill: str = GREEN) -> None:
        """Draw a character in a circle."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}"/>')
        self.text(x, y + 6, sign, fill="#ffffff", size=17)

    def bar(self, x: float, y: float, long: float, high: float, *, fill: str = BLUE) -> None:
        """Draw a horizontal bar; one of length zero stays visible as a line."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{max(long, 1.5):.2f}" height="{high:g}" rx="2" fill="{fill}"/>'
        )

    def cells(
        self,
        x: float,
        y: float,
        table: Sequence[Sequence[float]],
        across: float,
        down: float,
        *,
        scale: Callable[[float], tuple[str, str]],
        written: str = "",
    ) -> None:
        """Draw a matrix as coloured cells; `scale` returns fill and text colour, `written` is the number format."""
        gap = 2.0 if down >= 16 else 0.5
        for r, row in enumerate(table):
            for c, number in enumerate(row):
                fill, pen = scale(float(number))
                place = f'x="{x + c * across:.2f}" y="{y + r * down:.2f}"'
                size = f'width="{across - gap:g}" height="{down - gap:g}"'
                round_ = f' rx="{3 if down >= 16 else 0.5}"'
                self.parts.append(f'<rect {place} {size}{round_} fill="{fill}"/>')
                if written:
                    middle = x + (c + 0.5) * across - gap / 2, y + (r + 0.5) * down - gap / 2 + 4.5
                    self.text(*middle, format(number, written), size=13, fill=pen)

    def svg(self) -> str:
        n, own = NIGHT, ".regard-card"
        dark = (
            f"{own} .card {{ fill: {n['card']}; stroke: {n['edge']} }} {own} .ink {{ fill: {n['ink']} }} "
            f"{own} .quiet {{ fill: {n['quiet']} }} {own} .line {{ stroke: {n['quiet']} }} "
            f"{own} .box {{ fill: {n['box']}; stroke: #444c57 }}"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="regard-card" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" aria-label={quoteattr(self.name)} '
            f'font-family="{scene.FONTS}">\n<desc>{escape(self.about)}</desc>\n'
            f"<style>@media (prefers-color-scheme: dark) {{ {dark} }}</style>\n"
            f'<rect class="card" x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="14" '
            f'fill="{CARD}" stroke="{EDGE}"/>'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])


def share(number: float) -> tuple[str, str]:
    """Return the fill of a weight between 0 and 1, and the text colour on it."""
    return colour(number), ink(number)


def yes_or_no(number: float) -> tuple[str, str]:
    return (BLUE, "#ffffff") if number else ("#dfe3e8", INK)


def signed(number: float, largest: float = 1.0) -> tuple[str, str]:
    """Return a fill (blue below zero, pale at zero, orange above) and the text colour on it."""
    part = max(-1.0, min(1.0, number / largest))
    end = (0xD5, 0x5E, 0x00) if part > 0 else (0x00, 0x72, 0xB2)
    mixed = [round(pale + (e - pale) * abs(part)) for pale, e in zip((0xF4, 0xF6, 0xF8), end, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed), "#ffffff" if abs(part) > 0.75 else INK


# -- attention, step by step -------------------------------------------------------------------------------------------


def smallest() -> str:
    here = chapter("The smallest attention")
    return grid.draw(Map(here.weights.numpy(), here.words, here.words, "Attention without parameters"))


def asking() -> str:
    here = chapter("Queries, keys and values")
    weights = plain_weights(here.q, here.k, MaskTable(), Dot())
    return grid.draw(Map(weights.numpy(), here.words, here.words, "An action asks for an animal"))


def bottleneck() -> str:
    card = Card(
        760, 452, "Through one vector, or from every word",
        "Above: four encoder states in a row, the last of which alone reaches the decoder. Below: every encoder state "
        "reaches the decoder's third step through a weighted sum.",
    )  # fmt: skip
    states, steps = [44 + 80 * i for i in range(4)], [424 + 80 * i for i in range(4)]
    for top, attends in ((84, False), (252, True)):
        said = "with attention: each step uses all states" if attends else "without attention: one vector, c"
        card.text(28, top, said, anchor="start", quiet=True, size=13)
        row = top + (96 if attends else 34)
        for xs, words, fill in (
            (states, ("the", "large", "cat", "sleeps"), BLUE),
            (steps, ("el", "gato", "grande", "duerme"), ORANGE),
        ):
            for x, word in zip(xs, words, strict=True):
                card.box(x, row, 56, 36, fill=fill)
                card.text(x + 28, row + 62, word)
            for left, right in itertools.pairwise(xs):
                card.line((left + 58, row + 18), (right - 2, row + 18))
        if attends:
            node = (steps[2] + 28, row - 52)
            for x in states:
                card.bend(x + 28, row - 3, node[0] - 14, node[1], paint=GREEN)
            card.line((node[0], node[1] + 14), (node[0], row - 3), paint=GREEN, width=2)
            card.dot(*node, "Σ", radius=16)
        else:
            card.line((states[-1] + 58, row + 18), (366, row + 18))
            card.dot(382, row + 18, "c")
            card.line((397, row + 18), (steps[0] - 2, row + 18))
    card.text(184, 434, "encoder", quiet=True, size=13)
    card.text(572, 434, "decoder", quiet=True, size=13)
    return card.svg()


def distance() -> str:
    """Plot the tour's gradient measurement and that of a Transformer, over several initialisations."""

    def reaching(settings: RecurrentSettings | TransformerSettings, words: int, seed: int) -> float:
        torch.manual_seed(seed)
        model = build(settings, 100, 100, shared=False)
        source = [4, *torch.randint(5, 100, (words - 1,)).tolist(), EOS]
        model(SeqBatch.from_lists([source], [[5, EOS]], bos=BOS)).backward()
        return float(model.source_embedding.table.grad[4].norm())

    one_way: dict[str, Any] = dict(size="tiny", bidirectional=False, dropout=0.0)
    kinds = {
        "Transformer": TransformerSettings(size="tiny", dropout=0.0),
        "LSTM with attention": RecurrentSettings(attention="bahdanau", **one_way),
        "LSTM without": RecurrentSettings(attention="none", **one_way),
    }
    lengths = (2, 5, 10, 20, 40, 80)
    lines = [spread_over_seeds(name, lengths, functools.partial(reaching, kind)) for name, kind in kinds.items()]
    return charts.svg(Chart("Gradient at the first source word", "words in the source", "gradient norm at the word",
                            tuple(lines), x_log=True, y_log=True, spread="band",
                            x_ticks=tuple((float(n), str(n)) for n in lengths),
                            note="random weights; geometric mean and range of 10 initialisations"))  # fmt: skip


def spread_over_seeds(name: str, xs: Sequence[int], measure: Callable[[int, int], float]) -> Series:
    """Return the geometric mean and the range of `measure(x, seed)` over ten seeds."""
    points = []
    for x in xs:
        logs = [math.log(measure(x, seed)) for seed in range(10)]
        points.append(Point(x, *(math.exp(n) for n in (sum(logs) / len(logs), min(logs), max(logs)))))
    return Series(name, tuple(points))


def scores() -> str:
    torch.manual_seed(3)
    query = torch.tensor([[1.0, 0.0]])
    degrees = torch.arange(-180, 181, 15)
    angle = degrees * torch.pi / 180
    keys = torch.stack([angle.cos(), angle.sin()], dim=-1)
    kinds: dict[str, Score] = {
        "dot": Dot(), "scaled dot": ScaledDot(), "bilinear, random": Bilinear(2, 2),
        "additive, random": Additive(2, 2, hidden=8),
    }  # fmt: skip
    lines = [
        Series.of(name, degrees.tolist(), score(query, keys)[0].detach().tolist()) for name, score in kinds.items()
    ]
    ticks = tuple((float(d), f"{d}°") for d in range(-180, 181, 60))
    return charts.svg(Chart("Score of a key against its angle to the query", "angle between key and query",
                            "score", tuple(lines), x_ticks=ticks))  # fmt: skip


def lookup() -> str:
    here = chapter("Softmax and the weighted sum")
    marks, values, weights = here.scores, here.values, here.weights
    out = weights @ values
    about = (
        "A query is scored against three keys; softmax makes weights of the scores, and the values are summed by them."
    )
    card = Card(720, 330, "A soft look-up", about)
    tops = [84, 152, 220]
    card.box(28, 152, 84, 40, "query", fill=ORANGE)
    for head, x in (("score", 310), ("weight", 424), ("value", 533)):
        card.text(x, 66, head, quiet=True, size=13)
    for i, top in enumerate(tops):
        card.line((114, 172), (176, top + 20))
        card.box(180, top, 84, 40, f"key {i + 1}", fill=BLUE)
        card.text(310, top + 25, f"{marks[i]:.0f}".replace("-", "−"), size=16)
        card.line((334, top + 20), (386, top + 20))
        card.cells(390, top + 2, [[float(weights[i])]], 70, 38, scale=share, written=".2f")
        card.box(486, top, 94, 40, f"({values[i, 0]:.0f}, {values[i, 1]:.0f})")
        card.text(473, top + 26, "×", quiet=True, size=16)
        card.line((582, top + 20), (626, 172), arrow=i == 1)
    card.text(360, 298, "softmax", quiet=True, size=13)
    card.line((360, 284), (360, 268))
    card.text(664, 168, f"({out[0]:.2f},", size=15)
    card.text(664, 187, f"{out[1]:.2f})", size=15)
    return card.svg()


def root() -> str:
    measured = chapter("Why the square root").measured
    widths = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    scores = {"q·k / √D": ScaledDot(), "q·k": Dot()}
    lines = tuple(
        Series.of(name, widths, [float(measured(score, width)[1]) for width in widths])
        for name, score in scores.items()
    )
    return charts.svg(Chart("Entropy of the softmax", "width D", "entropy of the weights over 16 keys, in bits",
                            lines, x_log=True, x_ticks=tuple((float(w), str(w)) for w in widths), y_range=(0, 4),
                            note="16 equal weights have 4 bits; a single weight of 1 has none"))  # fmt: skip


def heads() -> str:
    here = chapter("Heads")
    words, weights = here.words, here.seen.attention[""].sentence(0).detach()
    card = Card(800, 400, "Two heads, two questions", "Two attention maps side by side.")
    for left, name, table in ((88, "head 1: where is the same word?", weights[0]),
                              (468, "head 2: which word came before?", weights[1])):  # fmt: skip
        card.text(left, 84, name, anchor="start", quiet=True, size=13)
        for i, word in enumerate(words):
            card.text(left + (i + 0.5) * 56 - 1, 116, word)
            card.text(left - 12, 128 + (i + 0.5) * 48 + 4, word, anchor="end")
        card.cells(left, 128, table.tolist(), 56, 48, scale=share, written=".2f")
    return card.svg()


# -- masks and positions -----------------------------------------------------------------------------------------------


def masks() -> str:
    places = SegmentPositions.flat(PackedLayout([16]))
    two = SegmentPositions.flat(PackedLayout([9, 7]))
    kinds: list[tuple[str, Mask, SegmentPositions]] = [
        ("causal", Causal(), places),
        ("causal, four back", Causal() & Window(4), places),
        ("causal, two sentences", Causal() & SameSegment(), two),
        ("strided, 4", Strided(4), places),
        ("fixed, 4", FixedBlocks(4), places),
        ("segments of 4, memory of 3", Segments(4, 3), places),
    ]
    card = Card(772, 616, "Who may look at whom", "Six masks as grids; a filled cell may be attended to.")
    for i, (name, mask, at) in enumerate(kinds):
        left, top = 28 + 248 * (i % 3), 92 + 262 * (i // 3)
        card.text(left, top - 12, name, anchor="start", size=13)
        card.cells(left, top, mask.table(at, at).int().tolist(), 13.5, 13.5, scale=yes_or_no)
    card.text(28, 594, "rows are queries, columns are keys; blue: may attend", anchor="start", quiet=True, size=12)
    return card.svg()


def cross() -> str:
    here = chapter("Cross-attention")
    weights = here.seen.attention["decoder.0.cross_attn"].sentence(0)[0]
    read = (*(here.letter[i] for i in here.row), "</s>")
    written = (*(here.letter[i] for i in here.row[::-1]), "</s>")
    return grid.draw(Map(weights.detach().numpy(), written, read, "Cross-attention, letters backwards"))


def positions() -> str:
    length, width = 48, 32
    table = chapter("Positions").vectors("sinusoidal", length)
    alike = table @ table.T / (width / 2)
    card = Card(
        820, 440, "Sinusoidal positions", "Left: the vectors of 48 positions. Right: dot products of all pairs."
    )
    card.text(64, 78, "one row per position, one column per feature", anchor="start", size=13)
    card.cells(64, 90, table.tolist(), 10, 6.5, scale=signed)
    card.text(438, 78, "dot products of positions: constant along every diagonal", anchor="start", size=13)
    card.cells(438, 90, alike.tolist(), 6.5, 6.5, scale=share)
    for left in (64, 438):
        for place in (0, 47):
            card.text(left - 8, 90 + place * 6.5 + 8, str(place), anchor="end", quiet=True, size=11)
    for x, label in ((69, "0"), (379, "31"), (441, "0"), (747, "47")):
        card.text(x, 418, label, quiet=True, size=11)
    return card.svg()


# -- residuals, norms, output ------------------------------------------------------------------------------------------


def reaching(depth: int, how: str, seed: int) -> float:
    """Return the gradient norm at the input of `depth` encoder blocks, with or without residual connections."""
    torch.manual_seed(seed)
    blocks = [EncoderBlock(BlockConfig(width=32, heads=4, ffn_width=64)) for _ in range(depth)]
    first = torch.randn(8, 32, requires_grad=True)
    rows = PackedLayout([8])
    x, own = first, PackedQK(rows, rows)
    for b in blocks:
        if how == "whole":
            x = b(x, own)
        elif how == "norms":
            x = b.feed_forward(b.feed_forward_residual.norm(b.self_attn(b.self_attn_residual.norm(x), own)))
        else:
            x = b.feed_forward(b.self_attn(x, own))
    x[-1].sum().backward()
    assert first.grad is not None
    return float(first.grad.norm())


def depth() -> str:
    depths = (1, 2, 4, 8, 16, 32)
    kinds = {"with residuals": "whole", "norms alone": "norms", "neither": "bare"}
    lines = [
        spread_over_seeds(name, depths, lambda d, seed, how=how: reaching(d, how, seed)) for name, how in kinds.items()
    ]
    return charts.svg(Chart("Gradient at the first block", "blocks", "gradient norm at the input", tuple(lines),
                            x_log=True, y_log=True, x_ticks=tuple((float(d), str(d)) for d in depths), spread="band",
                            note="geometric mean and range of 10 random initialisations"))  # fmt: skip


def stream() -> str:
    card = Card(800, 300, "The residual stream", "A line from embedding to logits; layers read from it and add to it.")
    line = 226
    card.box(28, line - 20, 106, 40, "embedding", fill=BLUE)
    card.box(666, line - 20, 106, 40, "logits", fill=BLUE)
    card.line((136, line), (664, line), width=4, paint=BLUE)
    for left, name in ((160, "attention"), (420, "feed-forward")):
        card.line((left + 18, line - 2), (left + 18, 178), width=1.8)
        card.box(left - 14, 140, 64, 36, "norm")
        card.line((left + 18, 138), (left + 18, 98), (left + 58, 98))
        card.box(left + 60, 78, 116, 40, name, fill=ORANGE)
        card.line((left + 178, 98), (left + 202, 98), (left + 202, line - 15), width=1.8)
        card.dot(left + 202, line, "+")
    card.text(400, 276, "x ← x + f(norm(x)), block after block", quiet=True, size=13)
    return card.svg()


def norms() -> str:
    here = chapter("Layer norm and batch norm")
    card = Card(760, 350, "Down the columns, or along the rows", "A table of four people, raw and normalised twice.")
    tables = (
        (100, "as it is", here.x, ".0f", 250.0),
        (330, "batch norm ↓", here.over_people, ".2f", 2.0),
        (560, "layer norm →", here.over_features, ".2f", 2.0),
    )
    for left, name, table, written, largest in tables:
        card.text(left + 85, 84, name, weight=600)
        card.text(left + 42, 112, "age", quiet=True, size=13)
        card.text(left + 127, 112, "height", quiet=True, size=13)
        card.cells(left, 122, table.tolist(), 85, 44, scale=lambda n, most=largest: signed(n, most), written=written)
    for i, name in enumerate(here.people):
        card.text(88, 148 + 44 * i, name, anchor="end")
    card.text(415, 324, "each column: mean 0, deviation 1", quiet=True, size=12)
    card.text(645, 324, "each row: mean 0, deviation 1", quiet=True, size=12)
    return card.svg()


def activations() -> str:
    xs = [i / 4 for i in range(-16, 9)]
    lines = [Series.of(name, xs, ACTIVATIONS[name](torch.tensor(xs)).tolist()) for name in ("relu", "gelu", "silu")]
    return charts.svg(Chart("Activation functions", "z", "f(z)", tuple(lines)))


def last() -> str:
    here = chapter("The last layer")
    card = Card(
        640, 290, "From a vector to the next word", "Bars of four logits and of the probabilities made of them."
    )
    card.text(110, 84, "logits", anchor="start", quiet=True, size=13)
    card.text(390, 84, "probabilities", anchor="start", quiet=True, size=13)
    for i, (word, z, p) in enumerate(zip(here.words, here.logits, here.logits.softmax(-1), strict=True)):
        y = 100 + 42 * i
        card.text(98, y + 19, word, anchor="end")
        card.bar(110, y, 64 * float(z), 28)
        card.text(118 + 64 * float(z), y + 19, f"{z:.1f}", anchor="start", size=13)
        card.bar(390, y, 240 * float(p), 28, fill=ORANGE)
        card.text(398 + 240 * float(p), y + 19, f"{p:.2f}", anchor="start", size=13)
    card.line((314, 176), (370, 176))
    card.text(342, 166, "softmax", quiet=True, size=12)
    return card.svg()


# -- gates -------------------------------------------------------------------------------------------------------------


def gates() -> str:
    here = chapter("Gates")
    with torch.no_grad(), here.Recorder(here.model) as seen:  # the chapter has used its recorder again since
        here.model.logits(here.asked([here.read]))
    mean = seen.values["encoder.0.ahead.gates"][0, : len(here.read)].mean(-1)
    card = Card(760, 330, "What an LSTM lets in, keeps and shows", "Three gates over eight words, as a heat map.")
    for t, word in enumerate(here.read):
        card.text(160 + 70 * t + 34, 92, word, weight=600 if t in (2, 3) else 400)
    for g, name in enumerate(("input: let in", "forget: keep", "output: show")):
        card.text(148, 104 + 56 * g + 32, name, anchor="end", size=13)
    card.cells(160, 104, mean.T.tolist(), 70, 56, scale=share, written=".2f")
    card.text(160, 302, "mean over 16 features; 1 is open, 0 is shut", anchor="start", quiet=True, size=12)
    return card.svg()


def squeeze() -> str:
    here = chapter("Gates")
    card = Card(824, 320, "Squeeze, excite, scale", "The mean of a sentence becomes a gate for each feature.")
    large = float(here.x.abs().max())
    x, out = here.x[:4], here.out[:4]
    for left, name, table in ((40, "4 words, 6 features", x), (628, "each word × the gate", out)):
        card.text(left, 92, name, anchor="start", quiet=True, size=13)
        card.cells(left, 104, table.tolist(), 28, 28, scale=lambda n: signed(n, large))
    card.line((126, 222), (126, 248))
    card.text(136, 240, "mean", anchor="start", quiet=True, size=12)
    card.cells(40, 254, x.mean(0, keepdim=True).tolist(), 28, 28, scale=lambda n: signed(n, large))
    card.line((214, 267), (250, 267))
    card.box(254, 247, 80, 40, "W₁, relu", fill=ORANGE)
    card.line((336, 267), (362, 267))
    card.box(366, 247, 64, 40, "W₂, σ", fill=ORANGE)
    card.line((432, 267), (456, 267))
    card.cells(462, 250, here.gate[:1].tolist(), 44, 36, scale=share, written=".2f")
    card.line((580, 246), (580, 176))
    card.line((212, 160), (564, 160))
    card.dot(580, 160, "×")
    card.line((595, 160), (622, 160))
    card.text(390, 150, "each word", quiet=True, size=12)
    return card.svg()


# -- GPT and BERT ------------------------------------------------------------------------------------------------------


def lens() -> str:
    here = chapter("GPT, step by step")
    words = (" the", " mat", " sofa", " roof", " garden")
    ids = [here.tokenizer.encode(word)[0] for word in words]
    stages = ("embedding", "+ attention 1", "+ feed-forward 1", "+ attention 2", "+ feed-forward 2")
    table = []
    with torch.no_grad():
        for name in here.names:
            x = here.seen.values[f"{name}.stream"][-1]
            table.append(F.linear(here.model.decoder.norm(x), here.model.embedding.table).softmax(-1)[ids].tolist())
    card = Card(
        600, 400, "The logit lens after every sub-layer", "The probabilities of five words after each sub-layer."
    )
    card.text(28, 70, "“the cat sat on the …”", anchor="start", quiet=True, size=13)
    for c, word in enumerate(words):
        card.text(172 + 78 * c + 38, 106, word.strip())
    for r, stage in enumerate(stages):
        card.text(160, 118 + 48 * r + 28, stage, anchor="end", size=13)
    card.cells(172, 118, table, 78, 48, scale=share, written=".2f")
    card.text(172, 382, "probability of the next word, if the model ended here", anchor="start", quiet=True, size=12)
    return card.svg()


def temperature() -> str:
    here = chapter("GPT, step by step")
    kinds = (("τ = 1", 1.0, 0), ("τ = 0.5", 0.5, 0), ("τ = 2", 2.0, 0), ("τ = 1, top 2", 1.0, 2))
    words = ("mat", "sofa", "roof", "the rest")
    card = Card(820, 290, "Temperature and top-k", "Bars of the probabilities of the next word under four settings.")
    for k, (name, tau, top_k) in enumerate(kinds):
        shares, order = filter_tokens(here.chances.log()[None, None], DecodingSettings(temperature=tau, top_k=top_k))
        found = dict(zip(order[0, 0].tolist(), shares[0, 0].tolist(), strict=True))
        chance = [found.pop(here.tokenizer.encode(f" {word}")[0], 0.0) for word in words[:3]]
        left = 104 + 178 * k
        card.text(left, 84, name, anchor="start", weight=600)
        for i, (word, p) in enumerate(zip(words, [*chance, sum(found.values())], strict=True)):
            y = 100 + 40 * i
            if k == 0:
                card.text(left - 12, y + 18, word, anchor="end")
            card.bar(left, y, 110 * p, 26, fill=BLUE if i < 3 else "#8a94a0")
            card.text(left + 110 * p + 8, y + 18, f"{p:.2f}", anchor="start", size=13)
    return card.svg()


def gpt() -> str:
    here = chapter("GPT, step by step")
    texts = here.tokenizer.token_texts(here.ids)
    card = Card(
        776, 536, "The path of a prompt", "Text, tokens, ids, vectors, blocks, logits, probabilities, next token."
    )
    lefts = [150 + 98 * i for i in range(len(texts))]
    rows = {"tokens": 76, "ids": 122, "embedding": 170, "stream": 226, "block 1": 276, "block 2": 346}
    for name in ("tokens", "ids"):
        card.text(136, rows[name] + 22, name, anchor="end", quiet=True, size=13)
    card.text(136, rows["embedding"] + 22, "E[id] + P[i]", anchor="end", quiet=True, size=13)
    for n in (1, 2):
        card.text(136, rows[f"block {n}"] + 24, f"block {n} adds", anchor="end", quiet=True, size=13)
    for i, (left, text, token) in enumerate(zip(lefts, texts, here.ids, strict=True)):
        card.box(left, rows["tokens"], 90, 34, text.replace(" ", "␣"))
        card.text(left + 45, rows["ids"] + 22, str(token))
        card.box(left, rows["embedding"], 90, 34, f"E[{token}] + P[{i}]".replace(" ", ""), fill=BLUE)
        card.line((left + 45, rows["embedding"] + 36), (left + 45, rows["block 1"] - 3))
        card.line((left + 45, rows["block 1"] + 38), (left + 45, rows["block 2"] - 3))
    card.text(136, rows["stream"] + 20, "the stream ↓", anchor="end", quiet=True, size=13)
    for n in (1, 2):
        words = "causal self-attention, then feed-forward: each reads the stream and adds to it"
        card.box(lefts[0], rows[f"block {n}"], lefts[-1] + 90 - lefts[0], 36, words, fill=ORANGE)
    end = lefts[-1] + 45
    card.line((end, rows["block 2"] + 38), (end, 419))
    card.box(end - 54, 422, 108, 36, "logits", fill=GREEN)
    card.line((end - 56, 440), (534, 440))
    card.box(424, 422, 108, 36, "softmax", fill=GREEN)
    card.line((422, 440), (384, 440))
    chances, best = here.chances.topk(3)
    for i, (p, token) in enumerate(zip(chances, best, strict=True)):
        y = 402 + 28 * i
        card.text(212, y + 16, here.tokenizer.token_texts([BOS, int(token)])[1].strip(), anchor="end")
        card.bar(222, y, 130 * float(p), 20)
        card.text(230 + 130 * float(p), y + 16, f"{p:.2f}", anchor="start", size=13)
    card.text(28, 512, "One token is sampled and appended to the text; then the next step begins.",
              anchor="start", quiet=True, size=13)  # fmt: skip
    return card.svg()


def fill() -> str:
    gap, before = chapter("BERT, which sees both ways"), chapter("GPT, step by step")
    text = "the [MASK] sat on the sofa"
    known = {guess.text.strip(): guess.probability for guess in gap.fill([text], top=9)[0].guesses[0]}
    with torch.no_grad():
        after = before.SeqBatch.of([[]], [[*before.tokenizer.encode("the"), EOS]], begin=BOS)
        chances = before.model.logits(after)[-1].softmax(-1)
    said = {word: float(chances[before.tokenizer.encode(f" {word}")[0]]) for word in ("cat", "dog")}
    card = Card(720, 230, "the ___ sat on the sofa", "Probabilities of cat and dog, for GPT and for BERT, as bars.")
    for left, name, found in ((96, "GPT sees “the”", said), (436, "BERT sees all but the mask", known)):
        card.text(left, 88, name, anchor="start", quiet=True, size=13)
        for i, word in enumerate(("cat", "dog")):
            y, p = 104 + 44 * i, found.get(word, 0.0)
            card.text(left - 12, y + 20, word, anchor="end")
            card.bar(left, y, 190 * p, 30)
            card.text(left + 190 * p + 8, y + 20, f"{p:.2f}", anchor="start", size=13)
    return card.svg()


PICTURES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        smallest,
        bottleneck,
        distance,
        scores,
        lookup,
        asking,
        root,
        heads,
        masks,
        cross,
        positions,
        depth,
        stream,
        norms,
        activations,
        last,
        gates,
        squeeze,
        lens,
        temperature,
        gpt,
        fill,
    )
}


def main(names: Sequence[str]) -> None:
    HERE.mkdir(exist_ok=True)
    for name in names or PICTURES:
        (HERE / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")
        print(HERE / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
