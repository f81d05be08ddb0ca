"""A picture as a list of shapes on a card: rectangles, text, lines and coloured cells.

Every picture is described once, as a `Scene`, and rendered as SVG here (one file, without scripts or external fonts) or
as PNG or PDF by `matplotlib_backend.py`.

A colour is "#rrggbb" or the name of a role in the `Palette`, which depends on the theme. Roles are written as plain
attributes too, so that viewers without CSS (slide programs, converters) show the light picture; the `auto` theme adds a
media query for dark screens.
"""

from __future__ import annotations

import base64
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from regard.text.display import clusters, visible

Theme = Literal["light", "dark", "auto"]
Anchor = Literal["start", "middle", "end"]
Coordinates = tuple[float, float]

FONTS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"
PAD = 28.0  # between the edge of the card and anything on it
BOLD = 1.15  # bold text is this much wider than regular text (DejaVu Sans: 1.13 to 1.15)
GAP = 18.0  # between two cards
MAX_RECTS = 10_000  # more cells than this become one image, since a rectangle each would need many megabytes


@dataclass(frozen=True)
class Palette:
    """The colours that depend on the theme."""

    card: str
    edge: str
    box: str
    rim: str
    ink: str
    quiet: str
    link: str


LIGHT = Palette("#ffffff", edge="#e3e6ea", box="#f4f6f8", rim="#c3c9d1", ink="#1b2027", quiet="#5f6874", link="#d1431a")
DARK = Palette("#14171c", edge="#2a3039", box="#1d2229", rim="#444c57", ink="#eceff3", quiet="#98a2af", link="#ff7d4d")


@dataclass(frozen=True)
class SceneText:
    """Text anchored at x, with its baseline at y; `turn` is in degrees, clockwise."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "ink"
    anchor: Anchor = "start"
    bold: bool = False
    turn: float = 0.0
    tip: str = ""


@dataclass(frozen=True)
class Rect:
    """A rectangle with rounded corners; a circle, if the radius is half its side."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    line: float = 1.0
    radius: float = 0.0
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """One or more strokes through points; `closed` ones may be filled."""

    strokes: tuple[tuple[Coordinates, ...], ...]
    stroke: str = "none"
    line: float = 1.0
    fill: str = "none"
    dash: tuple[float, ...] = ()
    opacity: float = 1.0
    closed: bool = False
    tip: str = ""


@dataclass(frozen=True, eq=False)
class Cells:
    """A matrix of coloured cells: `colours` [R, C, 3] are bytes. A cell takes `across` x `down`, including a `gap`.

    `tip(r, c)` is the tooltip of a cell, `row_tip(r)` that of a row; which of them is used depends on the number of
    cells.
    """

    x: float
    y: float
    across: float
    down: float
    colours: np.ndarray
    gap: float = 0.0
    radius: float = 0.0
    tip: Callable[[int, int], str] | None = None
    row_tip: Callable[[int], str] | None = None
    image: bool = False  # always one image, for pictures with many matrices

    @property
    def is_image(self) -> bool:
        """Whether the cells are drawn as one image."""
        return self.image or self.colours.shape[0] * self.colours.shape[1] > MAX_RECTS


@dataclass(frozen=True)
class Group:
    """Items that belong together, moved by (x, y)."""

    items: tuple[Item, ...]
    name: str = ""
    x: float = 0.0
    y: float = 0.0


Item = SceneText | Rect | Line | Cells | Group


@dataclass(frozen=True)
class Scene:
    """A picture: its size, name, text alternative, and items from back to front."""

    width: float
    height: float
    name: str
    about: str
    items: tuple[Item, ...]

    def svg(self, theme: Theme = "auto") -> str:
        """Return a complete SVG document: `Path("map.svg").write_text(scene.svg(), encoding="utf-8")`."""
        palette = palette_of(theme)
        size = f'viewBox="0 0 {n(self.width)} {n(self.height)}" width="{n(self.width)}" height="{n(self.height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="regard" {size} role="img" '
            f'aria-label={quoteattr(self.name)} font-family="{FONTS}" style="font-variant-numeric: tabular-nums">\n'
            f"<desc>{escape(self.about)}</desc>"
        )
        parts = [head, *([_dark_styles()] if theme == "auto" else []), *_svg(self.items, palette), "</svg>\n"]
        return "\n".join(parts)

    def flat(self) -> Iterator[tuple[Item, float, float]]:
        """Yield every item that is not a group, with its offset."""
        yield from _flat(self.items, 0.0, 0.0)


def palette_of(theme: Theme) -> Palette:
    return DARK if theme == "dark" else LIGHT


def card(width: float, height: float) -> Rect:
    """Return the background of a picture."""
    return Rect(0.5, 0.5, width - 1, height - 1, fill="card", stroke="edge", radius=14)


def title(text: str, width: float) -> SceneText:
    """Return the title of a card, shortened to its width."""
    return SceneText(PAD, PAD + 14, fitted(clean(text), 16 * BOLD, width - 2 * PAD + 1), 16, bold=True)


def title_width(text: str) -> float:
    """Return the width that a card needs for this title, without its margins."""
    return text_width(clean(text), 16 * BOLD)


def polyline(points: Sequence[Coordinates], **more: object) -> Line:
    """Return one stroke through points: `polyline([(0, 0), (5, 5)], stroke="ink")`."""
    return Line((tuple(points),), **more)  # type: ignore[arg-type]


def circle(x: float, y: float, radius: float, **more: object) -> Rect:
    return Rect(x - radius, y - radius, 2 * radius, 2 * radius, radius=radius, **more)  # type: ignore[arg-type]


def stacked(scenes: Sequence[Scene], name: str = "") -> Scene:
    """Put several pictures below each other, on cards of one width; the first item of each is its card."""
    width = max(scene.width for scene in scenes)
    items, y = [], 0.0
    for scene in scenes:
        items.append(Group((card(width, scene.height), *scene.items[1:]), "picture", 0.0, y))
        y += scene.height + GAP
    about = " ".join(scene.about for scene in scenes)
    return Scene(width, y - GAP, name or scenes[0].name, about, tuple(items))


def text_width(text: str, size: float) -> float:
    """Estimate the width of text in a sans-serif font; the font of the viewer is not known."""

    def ems(char: str) -> float:
        if unicodedata.east_asian_width(char) in "WF":
            return 1.0
        if char in "iíìïjlItfr.,:;'|!()[] ":
            return 0.34
        return 0.86 if char in "mwMW…%@␣" else 0.70 if char.isupper() else 0.58

    return size * sum(ems(cluster[0]) for cluster in clusters(text))


def fitted(text: str, size: float, width: float) -> str:
    """Return the text, shortened with an ellipsis if it is wider than `width`."""
    while text_width(text, size) > width and len(text) > 1:
        text = text[:-2].rstrip() + "…"
    return text


def clean(text: str) -> str:
    """Return text on one line, with invisible characters made visible."""
    return " ".join(visible(word) for word in text.split())


def isolated(label: str) -> str:
    """Put isolates around a right-to-left label, so that it and the text beside it do not reorder each other."""
    rtl = any(unicodedata.bidirectional(c) in ("R", "AL") for c in label)
    return f"\u2068{label}\u2069" if rtl else label


def n(number: float, digits: int = 2) -> str:
    """Format a coordinate without trailing zeros."""
    text = f"{number:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _flat(items: Sequence[Item], x: float, y: float) -> Iterator[tuple[Item, float, float]]:
    for item in items:
        if isinstance(item, Group):
            yield from _flat(item.items, x + item.x, y + item.y)
        else:
            yield item, x, y


# -- SVG --------------------------------------------------------------------------------------------------------------


def _dark_styles() -> str:
    rules = " ".join(
        f".regard .fill-{role} {{ fill: {paint} }} .regard .line-{role} {{ stroke: {paint} }}"
        for role, paint in asdict(DARK).items()
    )
    return f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def _svg(items: Sequence[Item], palette: Palette) -> list[str]:
    lines: list[str] = []
    for item in items:
        if isinstance(item, Group):
            if item.items:
                moved = f' transform="translate({n(item.x)} {n(item.y)})"' if item.x or item.y else ""
                name = f' class="{item.name}"' if item.name else ""
                lines += [f"<g{name}{moved}>", *_svg(item.items, palette), "</g>"]
        elif isinstance(item, Cells):
            lines += _cells(item)
        elif isinstance(item, SceneText):
            lines.append(_text(item, palette))
        else:
            lines.append(_rect(item, palette) if isinstance(item, Rect) else _line(item, palette))
    return lines


def _paints(palette: Palette, fill: str, stroke: str = "none") -> str:
    """Return the attributes of a fill and a stroke; roles are also classes."""
    roles = [f"{what}-{paint}" for what, paint in (("fill", fill), ("line", stroke)) if hasattr(palette, paint)]
    classes = f' class="{" ".join(roles)}"' if roles else ""
    stroked = f' stroke="{getattr(palette, stroke, stroke)}"' if stroke != "none" else ""
    return f'{classes} fill="{getattr(palette, fill, fill)}"{stroked}'


def _element(tag: str, attributes: str, tip: str, content: str = "") -> str:
    """Return an element with its tooltip."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f"<{tag}{attributes}>{title}{content}</{tag}>" if title or content else f"<{tag}{attributes}/>"


def _text(item: SceneText, palette: Palette) -> str:
    anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
    bold = ' font-weight="600"' if item.bold else ""
    turn = f' transform="rotate({n(item.turn)} {n(item.x)} {n(item.y)})"' if item.turn else ""
    position = f' x="{n(item.x)}" y="{n(item.y)}" font-size="{n(item.size)}"'
    attributes = position + _paints(palette, item.fill) + anchor + bold + turn
    return _element("text", attributes, item.tip, escape(isolated(item.text)) or " ")


def _rect(item: Rect, palette: Palette) -> str:
    box = f' x="{n(item.x)}" y="{n(item.y)}" width="{n(item.width)}" height="{n(item.height)}"'
    box += f' rx="{n(item.radius)}"' if item.radius else ""
    line = f' stroke-width="{n(item.line)}"' if item.stroke != "none" and item.line != 1 else ""
    return _element("rect", box + _paints(palette, item.fill, item.stroke) + line, item.tip)


def _line(item: Line, palette: Palette) -> str:
    end = "Z" if item.closed else ""
    path = "".join("M" + "L".join(f"{n(x)} {n(y)}" for x, y in stroke) + end for stroke in item.strokes)
    dash = f' stroke-dasharray="{" ".join(map(n, item.dash))}"' if item.dash else ""
    faint = f' opacity="{n(item.opacity)}"' if item.opacity < 1 else ""
    line = f' stroke-width="{n(item.line)}"' if item.stroke != "none" and item.line != 1 else ""
    shape = f' d="{path}"' + _paints(palette, item.fill, item.stroke) + line
    return _element("path", shape + f' stroke-linejoin="round"{dash}{faint}', item.tip)


def _cells(item: Cells) -> list[str]:
    if item.is_image:
        return _image(item)
    size = f'width="{n(item.across - item.gap)}" height="{n(item.down - item.gap)}"'
    size += f' rx="{n(item.radius)}"' if item.radius else ""
    lines = ['<g class="cells">' if item.gap else '<g class="cells" shape-rendering="crispEdges">']
    for r, row in enumerate(item.colours.tolist()):  # one group per row keeps the file small
        y = item.y + r * item.down + item.gap / 2
        lines.append(f'<g transform="translate({n(item.x + item.gap / 2)} {n(y)})">')
        for c, paint in enumerate(row):
            box = f' x="{n(c * item.across)}" {size} fill="{hexadecimal(paint)}"'
            lines.append(_element("rect", box, item.tip(r, c) if item.tip else ""))
        lines.append("</g>")
    return [*lines, "</g>"]


def _image(item: Cells) -> list[str]:
    """Return one image with a pixel per cell, under transparent rows that have the tooltips."""
    rows, columns = item.colours.shape[:2]
    wide = f'x="{n(item.x)}" width="{n(columns * item.across)}"'
    data = base64.b64encode(png(item.colours)).decode()
    lines = [
        f'<image class="cells" {wide} y="{n(item.y)}" height="{n(rows * item.down)}" preserveAspectRatio="none" '
        f'style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
    ]
    for r in range(rows) if item.row_tip else ():
        box = f' {wide} y="{n(item.y + r * item.down)}" height="{n(item.down)}" fill="#000000" fill-opacity="0"'
        lines.append(_element("rect", box, item.row_tip(r) if item.row_tip else ""))
    return lines


def hexadecimal(colour: Sequence[int]) -> str:
    """Format three bytes in CSS notation: `hexadecimal((68, 1, 84)) == "#440154"`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def png(colours: np.ndarray) -> bytes:
    """Encode bytes [R, C, 3] as a PNG file: signature, header, deflated rows (each after its filter type, 0)."""
    rows, columns = colours.shape[:2]
    raw = np.concatenate([np.zeros((rows, 1), np.uint8), colours.reshape(rows, -1)], axis=1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks
