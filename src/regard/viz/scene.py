"""A picture as a list of simple things on a card: rectangles, words, lines and coloured cells.

Every picture of the package is described once, as a `Scene`, and written by whoever is asked: as SVG here (one file, no
scripts, no fonts from outside), as PNG or PDF in `figure.py`. So all of them show the same.

A colour is "#rrggbb", or the name of a role in the `Palette`, which is another colour on a dark card. Roles are written
as plain attributes, so that viewers which know no style sheets (slide programs, converters) show the light picture;
the `auto` theme adds one media query that turns the card dark where the reader's screen is.
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
Place = tuple[float, float]

FONTS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"
PAD = 28.0  # between the edge of the card and anything on it
BOLD = 1.15  # bold text is this much wider than regular text (DejaVu Sans: 1.13 to 1.15)
GAP = 18.0  # between cards one below another
MANY = 10_000  # more cells than this are one image, a pixel a cell: a rectangle each would be a file of many megabytes


@dataclass(frozen=True)
class Palette:
    """The colours that depend on whether the card is light or dark."""

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
    """Words that begin, have their middle or end at x, with their foot at y; `turn` is in degrees, clockwise."""

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
    """A rectangle with round corners; a circle, where the radius is half its side."""

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
    """Strokes through places, each with its own beginning; `closed` ones may be filled."""

    strokes: tuple[tuple[Place, ...], ...]
    stroke: str = "none"
    line: float = 1.0
    fill: str = "none"
    dash: tuple[float, ...] = ()
    opacity: float = 1.0
    closed: bool = False
    tip: str = ""


@dataclass(frozen=True, eq=False)
class Cells:
    """A matrix as coloured cells: `colours` [R, C, 3] are bytes. A cell takes `across` x `down`, `gap` stays empty.

    `tip(r, c)` says what a cell shows, `row_tip(r)` what a row does: the one that is written depends on how many
    cells there are.
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
    image: bool = False  # as one image, however few they are: many such matrices stand side by side

    @property
    def many(self) -> bool:
        return self.image or self.colours.shape[0] * self.colours.shape[1] > MANY


@dataclass(frozen=True)
class Group:
    """Things that belong together, moved by (x, y)."""

    items: tuple[Item, ...]
    name: str = ""
    x: float = 0.0
    y: float = 0.0


Item = SceneText | Rect | Line | Cells | Group


@dataclass(frozen=True)
class Scene:
    """A picture: its size, its name, what it shows in words, and the things on it, the lowest first."""

    width: float
    height: float
    name: str
    about: str
    items: tuple[Item, ...]

    def svg(self, theme: Theme = "auto") -> str:
        """A complete SVG document: `Path("map.svg").write_text(scene.svg(), encoding="utf-8")`."""
        palette = palette_of(theme)
        size = f'viewBox="0 0 {n(self.width)} {n(self.height)}" width="{n(self.width)}" height="{n(self.height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="regard" {size} role="img" '
            f'aria-label={quoteattr(self.name)} font-family="{FONTS}" style="font-variant-numeric: tabular-nums">\n'
            f"<desc>{escape(self.about)}</desc>"
        )
        parts = [head, *([_night()] if theme == "auto" else []), *_svg(self.items, palette), "</svg>\n"]
        return "\n".join(parts)

    def flat(self) -> Iterator[tuple[Item, float, float]]:
        """Every thing that is no group, with how far it is moved."""
        yield from _flat(self.items, 0.0, 0.0)


def palette_of(theme: Theme) -> Palette:
    return DARK if theme == "dark" else LIGHT


def card(width: float, height: float) -> Rect:
    """The ground that a picture lies on."""
    return Rect(0.5, 0.5, width - 1, height - 1, fill="card", stroke="edge", radius=14)


def title(text: str, width: float) -> SceneText:
    """The heading of a card, cut where the card is too narrow for it."""
    return SceneText(PAD, PAD + 14, fitted(clean(text), 16 * BOLD, width - 2 * PAD + 1), 16, bold=True)


def title_width(text: str) -> float:
    """Width that a card needs, without its margins, for this heading."""
    return text_width(clean(text), 16 * BOLD)


def polyline(places: Sequence[Place], **more: object) -> Line:
    """One stroke through places: `polyline([(0, 0), (5, 5)], stroke="ink")`."""
    return Line((tuple(places),), **more)  # type: ignore[arg-type]


def circle(x: float, y: float, radius: float, **more: object) -> Rect:
    return Rect(x - radius, y - radius, 2 * radius, 2 * radius, radius=radius, **more)  # type: ignore[arg-type]


def stacked(scenes: Sequence[Scene], name: str = "") -> Scene:
    """Several pictures in one, one below another, on cards of one width; each begins with its card."""
    width = max(scene.width for scene in scenes)
    items, y = [], 0.0
    for scene in scenes:
        items.append(Group((card(width, scene.height), *scene.items[1:]), "picture", 0.0, y))
        y += scene.height + GAP
    about = " ".join(scene.about for scene in scenes)
    return Scene(width, y - GAP, name or scenes[0].name, about, tuple(items))


def text_width(text: str, size: float) -> float:
    """A good guess at the width of text in a sans-serif face of this size; SVG has no way to ask the font."""

    def ems(sign: str) -> float:
        if unicodedata.east_asian_width(sign) in "WF":
            return 1.0
        if sign in "iíìïjlItfr.,:;'|!()[] ":
            return 0.34
        return 0.86 if sign in "mwMW…%@␣" else 0.70 if sign.isupper() else 0.58

    return size * sum(ems(cluster[0]) for cluster in clusters(text))


def fitted(text: str, size: float, room: float) -> str:
    """The text, or as much of it as has room and an ellipsis."""
    while text_width(text, size) > room and len(text) > 1:
        text = text[:-2].rstrip() + "…"
    return text


def clean(text: str) -> str:
    """Text on one line, without anything invisible."""
    return " ".join(visible(word) for word in text.split())


def isolated(label: str) -> str:
    """A label kept from reordering its neighbours, or being reordered by them, where it runs from right to left."""
    rtl = any(unicodedata.bidirectional(c) in ("R", "AL") for c in label)
    return f"\u2068{label}\u2069" if rtl else label


def n(number: float, digits: int = 2) -> str:
    """A coordinate without trailing zeros."""
    written = f"{number:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def _flat(items: Sequence[Item], x: float, y: float) -> Iterator[tuple[Item, float, float]]:
    for item in items:
        if isinstance(item, Group):
            yield from _flat(item.items, x + item.x, y + item.y)
        else:
            yield item, x, y


# -- SVG --------------------------------------------------------------------------------------------------------------


def _night() -> str:
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
                place = f' transform="translate({n(item.x)} {n(item.y)})"' if item.x or item.y else ""
                mark = f' class="{item.name}"' if item.name else ""
                lines += [f"<g{mark}{place}>", *_svg(item.items, palette), "</g>"]
        elif isinstance(item, Cells):
            lines += _cells(item)
        elif isinstance(item, SceneText):
            lines.append(_text(item, palette))
        else:
            lines.append(_rect(item, palette) if isinstance(item, Rect) else _line(item, palette))
    return lines


def _paints(palette: Palette, fill: str, stroke: str = "none") -> str:
    """The attributes for a fill and a stroke; roles are classes too."""
    roles = [f"{what}-{paint}" for what, paint in (("fill", fill), ("line", stroke)) if hasattr(palette, paint)]
    mark = f' class="{" ".join(roles)}"' if roles else ""
    own = f' stroke="{getattr(palette, stroke, stroke)}"' if stroke != "none" else ""
    return f'{mark} fill="{getattr(palette, fill, fill)}"{own}'


def _ended(tag: str, attributes: str, tip: str, inside: str = "") -> str:
    """An element, with what it says when pointed at."""
    said = f"<title>{escape(tip)}</title>" if tip else ""
    return f"<{tag}{attributes}>{said}{inside}</{tag}>" if said or inside else f"<{tag}{attributes}/>"


def _text(item: SceneText, palette: Palette) -> str:
    anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
    bold = ' font-weight="600"' if item.bold else ""
    turn = f' transform="rotate({n(item.turn)} {n(item.x)} {n(item.y)})"' if item.turn else ""
    place = f' x="{n(item.x)}" y="{n(item.y)}" font-size="{n(item.size)}"'
    attributes = place + _paints(palette, item.fill) + anchor + bold + turn
    return _ended("text", attributes, item.tip, escape(isolated(item.text)) or " ")


def _rect(item: Rect, palette: Palette) -> str:
    place = f' x="{n(item.x)}" y="{n(item.y)}" width="{n(item.width)}" height="{n(item.height)}"'
    place += f' rx="{n(item.radius)}"' if item.radius else ""
    line = f' stroke-width="{n(item.line)}"' if item.stroke != "none" and item.line != 1 else ""
    return _ended("rect", place + _paints(palette, item.fill, item.stroke) + line, item.tip)


def _line(item: Line, palette: Palette) -> str:
    end = "Z" if item.closed else ""
    path = "".join("M" + "L".join(f"{n(x)} {n(y)}" for x, y in stroke) + end for stroke in item.strokes)
    dash = f' stroke-dasharray="{" ".join(map(n, item.dash))}"' if item.dash else ""
    faint = f' opacity="{n(item.opacity)}"' if item.opacity < 1 else ""
    line = f' stroke-width="{n(item.line)}"' if item.stroke != "none" and item.line != 1 else ""
    shape = f' d="{path}"' + _paints(palette, item.fill, item.stroke) + line
    return _ended("path", shape + f' stroke-linejoin="round"{dash}{faint}', item.tip)


def _cells(item: Cells) -> list[str]:
    if item.many:
        return _image(item)
    size = f'width="{n(item.across - item.gap)}" height="{n(item.down - item.gap)}"'
    size += f' rx="{n(item.radius)}"' if item.radius else ""
    lines = ['<g class="cells">' if item.gap else '<g class="cells" shape-rendering="crispEdges">']
    for r, row in enumerate(item.colours.tolist()):  # a row is a group of its own so that the file stays small
        y = item.y + r * item.down + item.gap / 2
        lines.append(f'<g transform="translate({n(item.x + item.gap / 2)} {n(y)})">')
        for c, paint in enumerate(row):
            place = f' x="{n(c * item.across)}" {size} fill="{hexadecimal(paint)}"'
            lines.append(_ended("rect", place, item.tip(r, c) if item.tip else ""))
        lines.append("</g>")
    return [*lines, "</g>"]


def _image(item: Cells) -> list[str]:
    """One image, a pixel a cell; above it each row says what it shows."""
    rows, columns = item.colours.shape[:2]
    wide = f'x="{n(item.x)}" width="{n(columns * item.across)}"'
    data = base64.b64encode(png(item.colours)).decode()
    lines = [
        f'<image class="cells" {wide} y="{n(item.y)}" height="{n(rows * item.down)}" preserveAspectRatio="none" '
        f'style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
    ]
    for r in range(rows) if item.row_tip else ():
        place = f' {wide} y="{n(item.y + r * item.down)}" height="{n(item.down)}" fill="#000000" fill-opacity="0"'
        lines.append(_ended("rect", place, item.row_tip(r) if item.row_tip else ""))
    return lines


def hexadecimal(colour: Sequence[int]) -> str:
    """Three bytes as CSS writes them: `hexadecimal((68, 1, 84)) == "#440154"`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def png(colours: np.ndarray) -> bytes:
    """Bytes [R, C, 3] as a PNG file without loss: signature, header, deflated rows (each led by its filter, none)."""
    rows, columns = colours.shape[:2]
    raw = np.concatenate([np.zeros((rows, 1), np.uint8), colours.reshape(rows, -1)], axis=1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)  # 8 bits a channel, true colour
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks
