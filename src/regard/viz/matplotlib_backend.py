"""PNG and PDF files of a scene, drawn by matplotlib (the extra `pictures`) with the same layout as its SVG.

matplotlib 3.11 is required: it is the first version with text shaping for Arabic and Hebrew.
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

UNITS_PER_INCH = 96.0  # units of a scene, as in SVG
PNG_DPI = 192  # two pixels per unit
FAMILIES = ("Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "Arial", "Liberation Sans", "DejaVu Sans")


def require_matplotlib(kind: str) -> None:
    """Raise a `UserError` if matplotlib, which files of this kind need, is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError(f"a {kind} needs matplotlib: pip install 'regard[pictures]' (an .svg needs nothing)")


def draw(scene: Scene, format: Format, *, theme: Theme = "auto") -> tuple[bytes, str]:
    """Return the file's bytes, and the characters that no installed font has (each is drawn as a box)."""
    require_matplotlib(f".{format}")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    palette = palette_of(theme)
    fonts, missing = _fonts(item.text for item, _, _ in scene.flat() if isinstance(item, SceneText))
    settings: dict[Any, Any] = {
        "font.family": fonts,
        "pdf.fonttype": 42,  # embeds TrueType fonts, so that text can be searched
        "axes.unicode_minus": False,
    }
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # reported once, by the caller
        figure = Figure(
            figsize=(scene.width / UNITS_PER_INCH, scene.height / UNITS_PER_INCH), dpi=UNITS_PER_INCH, facecolor="none"
        )
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, scene.width)
        axes.set_ylim(scene.height, 0)
        for order, (item, x, y) in enumerate(scene.flat()):
            _add(axes, item, x, y, palette, order)
        file = io.BytesIO()
        undated = {"Software": None} if format == "png" else {"CreationDate": None, "Creator": None, "Producer": None}
        figure.savefig(file, format=format, dpi=PNG_DPI, transparent=True, metadata=undated)
    return file.getvalue(), missing


def _add(axes: Axes, item: Item, x: float, y: float, palette: Palette, order: int) -> None:
    if isinstance(item, SceneText):
        axes.text(
            item.x + x, item.y + y, isolated(item.text),
            fontsize=item.size * 72 / UNITS_PER_INCH, color=_paint(item.fill, palette), parse_math=False,
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

    points = line * 72 / UNITS_PER_INCH
    # matplotlib measures dashes in line widths, scenes in units.
    style = (0, tuple(d / line for d in dash)) if dash else "solid"
    axes.add_patch(
        PathPatch(outline, facecolor=_paint(fill, palette), edgecolor=_paint(stroke, palette),
                  linewidth=points if stroke != "none" else 0.0, linestyle=style, joinstyle="round", capstyle="butt",
                  alpha=opacity if opacity < 1 else None, zorder=order, clip_on=False)
    )  # fmt: skip


def _rounded(x: float, y: float, width: float, height: float, radius: float) -> Outline:
    """Return a rounded rectangle; each corner is a cubic curve, within 0.03 % of the radius of a circle."""
    from matplotlib.path import Path as Outline

    r = min(radius, width / 2, height / 2)
    right, foot, k = x + width, y + height, r * (1 - 0.5522847498)
    if r <= 0:
        return Outline([(x, y), (right, y), (right, foot), (x, foot), (x, y)], closed=True)
    points = [
        (x + r, y), (right - r, y), (right - k, y), (right, y + k), (right, y + r),
        (right, foot - r), (right, foot - k), (right - k, foot), (right - r, foot),
        (x + r, foot), (x + k, foot), (x, foot - k), (x, foot - r),
        (x, y + r), (x, y + k), (x + k, y), (x + r, y), (x + r, y),
    ]  # fmt: skip
    corner = [Outline.LINETO, *[Outline.CURVE4] * 3]
    return Outline(points, [Outline.MOVETO, *corner * 4, Outline.CLOSEPOLY])


def _strokes(item: Line, x: float, y: float) -> Outline:
    from matplotlib.path import Path as Outline

    points, codes = [], []
    for stroke in item.strokes:
        moved = [(a + x, b + y) for a, b in stroke]
        points += [*moved, moved[0]] if item.closed else moved
        codes += [Outline.MOVETO, *[Outline.LINETO] * (len(moved) - 1), *[Outline.CLOSEPOLY] * item.closed]
    return Outline(points, codes)


def _matrix(axes: Axes, item: Cells, x: float, y: float, order: int) -> None:
    """Draw cells with gaps as shapes, and cells without gaps as an image, since adjacent shapes would show seams."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Outline

    rows, columns = item.colours.shape[:2]
    left, top = item.x + x, item.y + y
    if item.gap and not item.is_image:
        shape = _rounded(item.gap / 2, item.gap / 2, item.across - item.gap, item.down - item.gap, item.radius)
        shapes = [
            Outline(np.add(shape.vertices, (left + c * item.across, top + r * item.down)), shape.codes)
            for r, c in np.ndindex(rows, columns)
        ]
        paints = item.colours.reshape(-1, 3) / 255
        axes.add_collection(PathCollection(shapes, facecolors=paints, edgecolors="none", zorder=order), autolim=False)
        return
    extent = (left, left + columns * item.across, top + rows * item.down, top)
    box = axes.axis()  # imshow changes the limits of the axes
    axes.imshow(item.colours, extent=extent, interpolation="nearest", aspect="auto", zorder=order)
    axes.axis(box)
    axes.set_axis_off()


def _fonts(texts: Iterable[str]) -> tuple[list[str], str]:
    """Return font families that cover the characters of the texts, and the characters that none covers."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    chosen = [family for family in FAMILIES if family in installed]
    wanted = {char for text in texts for char in text if char.isprintable() and not char.isspace()}
    for family in chosen:
        wanted -= _characters(family)
    if wanted:
        others = sorted(installed - set(chosen), key=lambda name: ("Sans" not in name, name))
        for family in others:
            if "Last Resort" not in family and _characters(family) & wanted:
                chosen.append(family)
                wanted -= _characters(family)
            if not wanted:
                break
    return chosen, "".join(sorted(wanted))


@cache
def _characters(family: str) -> frozenset[str]:
    """Return the characters that the regular face of a family covers."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    faces = [font for font in font_manager.fontManager.ttflist if font.name == family]
    face = min(faces, key=lambda font: (font.style != "normal", abs(int(_weight(font.weight)) - 400)))
    try:
        return frozenset(chr(code) for code in FT2Font(face.fname).get_charmap())
    except (OSError, RuntimeError):  # the file was removed after the list was made, or is broken
        return frozenset()


def _weight(weight: int | str) -> int:
    from matplotlib.font_manager import weight_dict

    return weight if isinstance(weight, int) else weight_dict.get(weight, 400)
