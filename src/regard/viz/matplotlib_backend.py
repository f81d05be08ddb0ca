"""A scene as a PNG or a PDF, drawn by matplotlib (the extra `pictures`): the same things in the same places as its SVG.

matplotlib shapes Arabic and orders Hebrew from version 3.11 on, which is the oldest that will do.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import UserError
from regard.viz.scene import Cells, Item, Line, Palette, Rect, Scene, SceneText, Theme, isolated, palette_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

Format = Literal["png", "pdf"]

UNITS = 96.0  # of a scene to the inch, as in SVG
SHARP = 192  # dots of a PNG to the inch: two to the unit, as good screens have them
FAMILIES = ("Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "Arial", "Liberation Sans", "DejaVu Sans")


def needed(kind: str) -> None:
    """A file of this kind needs matplotlib: a mistake of the user's, where it is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError(f"a {kind} needs matplotlib: pip install 'regard[pictures]' (an .svg needs nothing)")


def draw(scene: Scene, format: Format, *, theme: Theme = "auto") -> tuple[bytes, str]:
    """The file's bytes, and the signs for which no font of this machine has a shape (drawn as a box each)."""
    needed(f".{format}")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    palette = palette_of(theme)
    fonts, missing = _fonts(item.text for item, _, _ in scene.flat() if isinstance(item, SceneText))
    settings: dict[Any, Any] = {
        "font.family": fonts,
        "pdf.fonttype": 42,
        "axes.unicode_minus": False,
    }  # 42: text that can be searched
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # said once, by the caller
        figure = Figure(figsize=(scene.width / UNITS, scene.height / UNITS), dpi=UNITS, facecolor="none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        for order, (item, x, y) in enumerate(scene.flat()):
            _add(axes, item, x, y, palette, order)
        file = io.BytesIO()
        undated = {"Software": None} if format == "png" else {"CreationDate": None, "Creator": None, "Producer": None}
        figure.savefig(file, format=format, dpi=SHARP, transparent=True, metadata=undated)
    return file.getvalue(), missing


def _add(axes: Axes, item: Item, x: float, y: float, palette: Palette, order: int) -> None:
    if isinstance(item, SceneText):
        axes.text(
            item.x + x, item.y + y, isolated(item.text),
            fontsize=item.size * 72 / UNITS, color=_paint(item.fill, palette), parse_math=False,
            ha={"start": "left", "middle": "center", "end": "right"}[item.anchor], va="baseline",
            fontweight=700 if item.bold else 400, rotation=-item.turn, rotation_mode="anchor", zorder=order,
        )  # fmt: skip
    elif isinstance(item, Rect):
        _patch(axes, _rounded(item.x + x, item.y + y, item.width, item.height, item.radius),
               item.fill, item.stroke, item.line, palette, order)  # fmt: skip
    elif isinstance(item, Line):
        _patch(axes, _strokes(item, x, y), item.fill, item.stroke, item.line, palette, order, item.dash, item.opacity)
    elif isinstance(item, Cells):
        _matrix(axes, item, x, y, order)


def _paint(colour: str, palette: Palette) -> str:
    return str(getattr(palette, colour, colour))


def _patch(
    axes: Axes,
    outline: Outline,
    fill: str,
    stroke: str,
    line: float,
    palette: Palette,
    order: int,
    dash: tuple[float, ...] = (),
    opacity: float = 1.0,
) -> None:
    from matplotlib.patches import PathPatch

    points = line * 72 / UNITS  # dashes are counted in widths of the line, and wanted in units
    style = (0, tuple(d / line for d in dash)) if dash else "solid"
    axes.add_patch(
        PathPatch(outline, facecolor=_paint(fill, palette), edgecolor=_paint(stroke, palette),
                  linewidth=points if stroke != "none" else 0.0, linestyle=style, joinstyle="round", capstyle="butt",
                  alpha=opacity if opacity < 1 else None, zorder=order, clip_on=False)
    )  # fmt: skip


def _rounded(x: float, y: float, width: float, height: float, radius: float) -> Outline:
    """A rectangle whose corners are quarter circles (as one cubic curve each, off by 0.03 % of the radius)."""
    from matplotlib.path import Path as Outline

    r = min(radius, width / 2, height / 2)
    right, foot, k = x + width, y + height, r * (1 - 0.5522847498)
    if r <= 0:
        return Outline([(x, y), (right, y), (right, foot), (x, foot), (x, y)], closed=True)
    places = [
        (x + r, y), (right - r, y), (right - k, y), (right, y + k), (right, y + r),
        (right, foot - r), (right, foot - k), (right - k, foot), (right - r, foot),
        (x + r, foot), (x + k, foot), (x, foot - k), (x, foot - r),
        (x, y + r), (x, y + k), (x + k, y), (x + r, y), (x + r, y),
    ]  # fmt: skip
    corner = [Outline.LINETO, *[Outline.CURVE4] * 3]
    return Outline(places, [Outline.MOVETO, *corner * 4, Outline.CLOSEPOLY])


def _strokes(item: Line, x: float, y: float) -> Outline:
    from matplotlib.path import Path as Outline

    places, codes = [], []
    for stroke in item.strokes:
        moved = [(a + x, b + y) for a, b in stroke]
        places += [*moved, moved[0]] if item.closed else moved
        codes += [Outline.MOVETO, *[Outline.LINETO] * (len(moved) - 1), *[Outline.CLOSEPOLY] * item.closed]
    return Outline(places, codes)


def _matrix(axes: Axes, item: Cells, x: float, y: float, order: int) -> None:
    """Cells with gaps are shapes of their own; those without are an image, a pixel a cell, since shapes show seams."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Outline

    rows, columns = item.colours.shape[:2]
    left, top = item.x + x, item.y + y
    if item.gap and not item.many:
        shape = _rounded(item.gap / 2, item.gap / 2, item.across - item.gap, item.down - item.gap, item.radius)
        shapes = [
            Outline(np.add(shape.vertices, (left + c * item.across, top + r * item.down)), shape.codes)
            for r, c in np.ndindex(rows, columns)
        ]
        paints = item.colours.reshape(-1, 3) / 255
        axes.add_collection(PathCollection(shapes, facecolors=paints, edgecolors="none", zorder=order), autolim=False)
        return
    extent = (left, left + columns * item.across, top + rows * item.down, top)
    box = axes.axis()  # showing an image would move the view to it
    axes.imshow(item.colours, extent=extent, interpolation="nearest", aspect="auto", zorder=order)
    axes.axis(box)
    axes.set_axis_off()


def _fonts(texts: Iterable[str]) -> tuple[list[str], str]:
    """Families that have the signs of the texts between them, the usual ones first; and the signs that none has."""
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    chosen = [family for family in FAMILIES if family in there]
    wanted = {sign for text in texts for sign in text if sign.isprintable() and not sign.isspace()}
    for family in chosen:
        wanted -= _signs(family)
    if wanted:
        others = sorted(there - set(chosen), key=lambda name: ("Sans" not in name, name))
        for family in others:
            if "Last Resort" not in family and _signs(family) & wanted:
                chosen.append(family)
                wanted -= _signs(family)
            if not wanted:
                break
    return chosen, "".join(sorted(wanted))


@cache
def _signs(family: str) -> frozenset[str]:
    """The signs that the upright face of a family has a shape for."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    faces = [font for font in font_manager.fontManager.ttflist if font.name == family]
    face = min(faces, key=lambda font: (font.style != "normal", abs(int(_weight(font.weight)) - 400)))
    try:
        return frozenset(chr(code) for code in FT2Font(face.fname).get_charmap())
    except (OSError, RuntimeError):  # a font file that has gone since the list was made, or a broken one
        return frozenset()


def _weight(weight: int | str) -> int:
    from matplotlib.font_manager import weight_dict

    return weight if isinstance(weight, int) else weight_dict.get(weight, 400)
