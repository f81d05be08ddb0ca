"""An attention map as an SVG picture: one file, no scripts, no fonts from outside, fit for a slide or a page.

Colours that matter are written as plain attributes, so that viewers which know no style sheets (slide programs,
converters) show the light picture; the `auto` theme adds one media query that turns the card dark where the reader's
screen is.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from regard.inside.colours import ANCHORS, colour, ink
from regard.inside.maps import Map, clusters, labels, shorten, visible

Theme = Literal["light", "dark", "auto"]

FONTS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"
LONGEST = 20  # columns of a label; the rest of a longer token is in the tooltips
SHOWN = 0.05  # weights below this are not written into their cell: they would only be noise
PAD = 28.0  # between the edge of the card and anything on it
SPACE = 720.0  # what the cells of one side share, as long as they stay big enough to be seen
LEGEND = 168.0


@dataclass(frozen=True)
class _Palette:
    card: str
    edge: str
    ink: str
    quiet: str
    link: str


_LIGHT = _Palette(card="#ffffff", edge="#e3e6ea", ink="#1b2027", quiet="#5f6874", link="#d1431a")
_DARK = _Palette(card="#14171c", edge="#2a3039", ink="#eceff3", quiet="#98a2af", link="#ff7d4d")


@dataclass(frozen=True)
class _Layout:
    """Where everything lies, in SVG units. A cell takes `across` x `down`, of which `gap` stays empty."""

    across: float
    down: float
    gap: float
    radius: float
    font: float
    angle: int  # of the column labels: 0 level, -45 slanted, -90 upright
    left: float  # of the first cell
    top: float
    width: float  # of the whole picture
    height: float
    row_step: int  # every how many rows there is a label
    column_step: int


def draw(map: Map, *, theme: Theme = "auto", links: Iterable[tuple[int, int]] = ()) -> str:
    """The map as a heat map: keys along the top, queries down the left, one coloured cell a weight.

    `links` are the (query, key) cells to outline, such as the gold alignment of a sentence pair. The result is a
    complete SVG document: `Path("map.svg").write_text(draw(map), encoding="utf-8")`.
    """
    links = list(links)
    for q, k in links:
        if not (0 <= q < len(map.queries) and 0 <= k < len(map.keys)):
            raise ValueError(f"link ({q}, {k}) lies outside a map of {len(map.queries)} x {len(map.keys)}")
    rows = [shorten(label, LONGEST) for label in labels(map.queries)]
    heads = [shorten(label, LONGEST) for label in labels(map.keys)]
    layout = _lay_out(map, rows, heads, bool(links))
    palette = _DARK if theme == "dark" else _LIGHT
    parts = [
        _opening(map, layout, links),
        _style(theme),
        f'<rect class="card" x="0.5" y="0.5" width="{_n(layout.width - 1)}" height="{_n(layout.height - 1)}" rx="14" '
        f'fill="{palette.card}" stroke="{palette.edge}"/>',
        _title(map, layout, palette),
        _row_labels(rows, layout, palette),
        _column_labels(heads, layout, palette),
        _cells(map, layout),
        _numbers(map, layout),
        _outlines(links, layout, palette),
        _legend(map, layout, palette, bool(links)),
        "</svg>\n",
    ]
    return "\n".join(part for part in parts if part)


def text_width(text: str, size: float) -> float:
    """A good guess at the width of text in a sans-serif face of this size; SVG has no way to ask the font."""

    def ems(sign: str) -> float:
        if unicodedata.east_asian_width(sign) in "WF":
            return 1.0
        if sign in "iíìïjlItfr.,:;'|!()[] ":
            return 0.34
        return 0.86 if sign in "mwMW…%@␣" else 0.70 if sign.isupper() else 0.58

    return size * sum(ems(cluster[0]) for cluster in clusters(text))


def _lay_out(map: Map, rows: Sequence[str], heads: Sequence[str], linked: bool) -> _Layout:
    longer = max(len(rows), len(heads))
    down = min(44.0, max(4.0 if longer <= 400 else 2.0, SPACE // longer))
    font = min(14.0, max(9.0, down * 0.6))
    widest = max(text_width(head, font) for head in heads)
    across, angle = down, 0
    level = max(down * 1.15, widest + 14)  # how wide cells must be for their labels to stand level
    if level <= 96 and level * len(heads) <= SPACE:
        across = level
    else:
        angle = -45 if across >= font * 1.5 else -90
    slant = math.radians(-angle)
    head_height = font + (widest * math.sin(slant) if angle else 0.0)
    overhang = (
        max(text_width(head, font) * math.cos(slant) - (len(heads) - 1 - k) * across for k, head in enumerate(heads))
        if angle == -45
        else 0.0
    )
    left = PAD + max([text_width("looks at →", 11)] + [text_width(row, font) for row in rows]) + 12
    top = PAD + (34 if map.title else 0) + head_height + 12
    grid_right = left + across * len(heads)
    row_step, column_step = math.ceil(11 / down), math.ceil(11 / across)
    legend = LEGEND + (150 if linked else 0) + (230 if max(row_step, column_step) > 1 else 0)
    needs = [grid_right + max(0.0, overhang), left + legend, PAD + min(text_width(map.title, 16), SPACE)]
    return _Layout(
        across=across, down=down,
        gap=2.5 if down >= 24 else 1.0 if down >= 10 else 0.0,
        radius=5.0 if down >= 24 else 1.5 if down >= 10 else 0.0,
        font=font, angle=angle, left=left, top=top,
        width=max(needs) + PAD,
        height=top + down * len(rows) + 51 + PAD,
        row_step=row_step, column_step=column_step,
    )  # fmt: skip


def _opening(map: Map, layout: _Layout, links: Sequence[tuple[int, int]]) -> str:
    size = f"{_n(layout.width)} {_n(layout.height)}"
    name = _clean(map.title) or "Attention map"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="regard-map" viewBox="0 0 {size}" '
        f'width="{_n(layout.width)}" height="{_n(layout.height)}" role="img" aria-label={quoteattr(name)} '
        f'font-family="{FONTS}">\n<desc>{escape(_description(map, links))}</desc>'
    )


def _description(map: Map, links: Sequence[tuple[int, int]]) -> str:
    """What a reader who cannot see the picture needs: its size, and where each row looks most."""
    shown = 24
    queries, keys = labels(map.queries), labels(map.keys)
    said = [f"A heat map of attention weights, {len(queries)} rows by {len(keys)} columns; each row looks at columns."]
    for q, row in enumerate(map.weights[:shown]):
        k = int(row.argmax())
        said.append(f"{_isolated(queries[q])} looks most at {_isolated(keys[k])} ({row[k]:.2f}).")
    if len(queries) > shown:
        said.append(f"And {len(queries) - shown} more rows.")
    if links:
        said.append(f"{len(links)} cells are outlined as gold alignment.")
    return " ".join(said)


def _style(theme: Theme) -> str:
    if theme != "auto":
        return ""
    d = _DARK
    return (
        "<style>@media (prefers-color-scheme: dark) { "
        f".regard-map .card {{ fill: {d.card}; stroke: {d.edge} }} .regard-map .ink {{ fill: {d.ink} }} "
        f".regard-map .quiet {{ fill: {d.quiet} }} .regard-map .link {{ stroke: {d.link} }} "
        f".regard-map .halo {{ stroke: {d.card} }} }}</style>"
    )


def _title(map: Map, layout: _Layout, palette: _Palette) -> str:
    if not map.title:
        return ""
    text = _clean(map.title)
    while text_width(text, 16) > layout.width - 2 * PAD and len(text) > 1:
        text = text[:-2].rstrip() + "…"
    return _text(PAD, PAD + 14, text, f'class="ink" fill="{palette.ink}" font-size="16" font-weight="600"')


def _row_labels(rows: Sequence[str], layout: _Layout, palette: _Palette) -> str:
    x, middle = layout.left - 12, layout.down / 2 + layout.font * 0.35
    lines = [
        _text(x, layout.top + q * layout.down + middle, row) for q, row in enumerate(rows) if q % layout.row_step == 0
    ]
    return _group(lines, f'class="ink" fill="{palette.ink}" font-size="{_n(layout.font)}" text-anchor="end"')


def _column_labels(heads: Sequence[str], layout: _Layout, palette: _Palette) -> str:
    y, lines = layout.top - 12, []
    for k, head in enumerate(heads):
        if k % layout.column_step:
            continue
        x = layout.left + (k + 0.5) * layout.across + (layout.font * 0.35 if layout.angle == -90 else 0.0)
        turn = f'transform="rotate({layout.angle} {_n(x)} {_n(y)})"' if layout.angle else ""
        lines.append(_text(x, y, head, turn))
    anchor = "start" if layout.angle else "middle"
    corner = _text(layout.left - 12, y, "looks at →", f'class="quiet" fill="{palette.quiet}" font-size="11" '
                   'text-anchor="end"')  # fmt: skip
    group = _group(lines, f'class="ink" fill="{palette.ink}" font-size="{_n(layout.font)}" text-anchor="{anchor}"')
    return corner + "\n" + group


def _cells(map: Map, layout: _Layout) -> str:
    """One rectangle a weight, with its tooltip; a row is a group of its own so that the file stays small."""
    queries, keys = ([_isolated(shorten(label, 200)) for label in labels(axis)] for axis in (map.queries, map.keys))
    size = f'width="{_n(layout.across - layout.gap)}" height="{_n(layout.down - layout.gap)}"'
    size += f' rx="{_n(layout.radius)}"' if layout.radius else ""
    lines = []
    for q, row in enumerate(map.weights):
        y = layout.top + q * layout.down + layout.gap / 2
        lines.append(f'<g transform="translate({_n(layout.left + layout.gap / 2)} {_n(y)})">')
        for k, weight in enumerate(row):
            tip = escape(f"{queries[q]} → {keys[k]}: {weight:.2f}")
            x = _n(k * layout.across)
            lines.append(f'<rect x="{x}" {size} fill="{colour(float(weight))}"><title>{tip}</title></rect>')
        lines.append("</g>")
    return _group(lines, 'class="cells"' + ("" if layout.gap else ' shape-rendering="crispEdges"'))


def _numbers(map: Map, layout: _Layout) -> str:
    if layout.down < 30:
        return ""
    lines = []
    for q, row in enumerate(map.weights):
        y = layout.top + (q + 0.5) * layout.down + 4
        for k, weight in enumerate(row):
            if weight >= SHOWN:
                x = layout.left + (k + 0.5) * layout.across
                lines.append(_text(x, y, f"{weight:.2f}", f'fill="{ink(float(weight))}"'))
    size = _n(min(12.0, layout.across * 0.32))
    return _group(lines, f'class="numbers" font-size="{size}" text-anchor="middle" pointer-events="none" '
                  'style="font-variant-numeric: tabular-nums"')  # fmt: skip


def _outlines(links: Sequence[tuple[int, int]], layout: _Layout, palette: _Palette) -> str:
    """An outline in the card's colour under one in the accent's: it stands out on dark and on bright cells alike."""
    return _group(
        [
            _outline(layout.left + k * layout.across, layout.top + q * layout.down, layout.across, layout.down,
                     layout, palette)
            for q, k in links
        ],
        'class="links" pointer-events="none"',
    )  # fmt: skip


def _outline(x: float, y: float, width: float, height: float, layout: _Layout, palette: _Palette) -> str:
    line = max(1.0, min(2.4, layout.down / 8))
    place = f'x="{_n(x + layout.gap / 2)}" y="{_n(y + layout.gap / 2)}" width="{_n(width - layout.gap)}" '
    place += f'height="{_n(height - layout.gap)}" rx="{_n(layout.radius)}" fill="none"'
    return (
        f'<rect class="halo" {place} stroke="{palette.card}" stroke-width="{_n(line * 2.2)}"/>'
        f'<rect class="link" {place} stroke="{palette.link}" stroke-width="{_n(line)}"/>'
    )


def _legend(map: Map, layout: _Layout, palette: _Palette, linked: bool) -> str:
    stops = "".join(
        f'<stop offset="{_n(i / (len(ANCHORS) - 1), 4)}" stop-color="{colour(i / (len(ANCHORS) - 1))}"/>'
        for i in range(len(ANCHORS))
    )
    mark = "regard-scale-" + hashlib.sha256(stops.encode()).hexdigest()[:8]  # equal scales may share a name on a page
    x, y = layout.left + layout.gap / 2, layout.top + layout.down * map.weights.shape[0] + 26
    lines = [
        f'<defs><linearGradient id="{mark}">{stops}</linearGradient></defs>',
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(LEGEND)}" height="8" rx="4" fill="url(#{mark})"/>',
        _text(x, y + 23, "0"),
        _text(x + LEGEND / 2, y + 23, "attention weight", 'text-anchor="middle"'),
        _text(x + LEGEND, y + 23, "1", 'text-anchor="end"'),
    ]
    if linked:
        sample = replace(layout, gap=0.0, radius=3.0, down=16.0)
        lines.append(_outline(x + LEGEND + 26, y - 3, 14, 14, sample, palette))
        lines.append(_text(x + LEGEND + 48, y + 8.5, "gold alignment"))
    step = max(layout.row_step, layout.column_step)
    if step > 1:
        lines.append(_text(x + LEGEND + (176 if linked else 26), y + 8.5, f"one label in {step}; hover for the rest"))
    return _group(lines, f'class="quiet" fill="{palette.quiet}" font-size="11"')


def _clean(text: str) -> str:
    """A title on one line, without anything invisible."""
    return " ".join(visible(word) for word in text.split())


def _isolated(label: str) -> str:
    """A label kept from reordering its neighbours where it runs from right to left."""
    rtl = any(unicodedata.bidirectional(c) in ("R", "AL") for c in label)
    return f"\u2068{label}\u2069" if rtl else label


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}"{" " + attributes if attributes else ""}>{escape(text)}</text>'


def _group(lines: Sequence[str], attributes: str) -> str:
    return "\n".join([f"<g {attributes}>", *lines, "</g>"]) if lines else ""


def _n(number: float, digits: int = 2) -> str:
    """A coordinate without trailing zeros."""
    return f"{number:.{digits}f}".rstrip("0").rstrip(".")
