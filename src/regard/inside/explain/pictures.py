"""Explanations as SVG pictures: a matrix of signed cells, bars with their error bars, and both above their curves.

Signed numbers have a scale with two arms, blue for what spoke for the output and orange for what spoke against it,
which people with the common colour deficiencies can tell apart; and every number is also written, or drawn to one side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from regard.inside.colours import DARK_INK, LIGHT_INK, luminance
from regard.inside.explain.rise import Explanation
from regard.inside.maps import labels, shorten
from regard.inside.svg import (
    _DARK,
    _LIGHT,
    FONTS,
    PAD,
    Theme,
    _clean,
    _group,
    _isolated,
    _n,
    _Palette,
    _text,
    text_width,
)

FOR, AGAINST, NEITHER = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0xF2, 0xF2, 0xF2)  # Okabe and Ito's blue, vermilion
NOTE = "What the output depended on while words were hidden; not what the model thought."
BAR = 380.0  # the room for the longest bar and its error bar, both arms together
LINE = 34.0  # from one bar to the next
WIDEST_TITLE = 760.0
TALL = 38.0  # of a cell
LONGEST = 20  # columns of a label
SHOWN = 0.05  # of the greatest number; smaller ones are not written into their cells
STEPS = 8  # of a legend, to each side


def signed_rgb(value: float) -> tuple[int, int, int]:
    """The colour of a number from -1 to 1; what lies outside takes the nearest end."""
    end, part = (FOR if value > 0 else AGAINST), min(abs(value), 1.0)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(NEITHER, end, strict=True))
    return red, green, blue


def signed_ink(value: float) -> str:
    """What can be read on that colour."""
    return DARK_INK if luminance(signed_rgb(value)) > 0.179 else LIGHT_INK


def extent(numbers: np.ndarray) -> float:
    """What the ends of the scale stand for: the greatest number, whichever its sign."""
    return float(np.abs(numbers).max()) or 1.0


def number(value: float) -> str:
    """A signed number in three digits: +1.24, −15.9; nothing that rounds to nothing has a sign."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    written = f"{value:+.{digits}f}"
    return "0.00" if float(written) == 0 else written.replace("-", "−")


def draw(explanation: Explanation, *, theme: Theme = "auto") -> str:
    """A matrix where there are several outputs, else bars; a complete SVG document."""
    return matrix(explanation, theme=theme) if len(explanation.outputs) > 1 else bars(explanation, theme=theme)


def matrix(explanation: Explanation, *, theme: Theme = "auto") -> str:
    """Outputs down the left and features along the top, as attention maps have them; a coloured cell a number."""
    palette = _DARK if theme == "dark" else _LIGHT
    rows = [shorten(label, LONGEST) for label in labels(explanation.outputs)]
    heads = [shorten(label, LONGEST) for label in labels(explanation.features)]
    values = explanation.importance.T  # [outputs, features]
    most, down = extent(values), TALL if len(rows) <= 20 else 22.0
    widest = max(text_width(head, 13) for head in heads)
    level = max(widest + 14, 52.0)
    across, upright = (level, False) if level * len(heads) <= 760 else (max(24.0, min(52.0, 760 / len(heads))), True)
    left = PAD + max(text_width(row, 13) for row in [*rows, "depends on →"]) + 12
    top = PAD + 34 + (widest if upright else 13.0) + 12
    right, bottom = left + across * len(heads), top + down * len(rows)
    width = max(right, left + 300, PAD + _title_width(explanation), PAD + text_width(NOTE, 11)) + PAD
    ink = f'class="ink" fill="{palette.ink}" font-size="13"'
    quiet = f'class="quiet" fill="{palette.quiet}" font-size="11"'
    columns = []
    for i, head in enumerate(heads):
        x, y = left + (i + 0.5) * across + (4.5 if upright else 0.0), top - 12
        turn = f' transform="rotate(-90 {_n(x)} {_n(y)})" text-anchor="start"' if upright else ' text-anchor="middle"'
        columns.append(_text(x, y, head, turn.strip()))
    parts = [
        _opening(explanation, width, bottom + 92, theme, palette),
        _text(left - 12, top - 12, "depends on →", f'{quiet} text-anchor="end"'),
        _group(columns, ink),
        _group([_text(left - 12, top + (o + 0.5) * down + 4.5, row) for o, row in enumerate(rows)],
               f'{ink} text-anchor="end"'),
        _cells(explanation, values / most, left, top, across, down),
        _legend(explanation.score, most, left, bottom + 24, quiet),
        _text(PAD, bottom + 76, NOTE, quiet),
        "</svg>\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _cells(explanation: Explanation, shares: np.ndarray, left: float, top: float, across: float, down: float) -> str:
    """One rectangle a number [O, n], with what it is in its tooltip, and written on it where there is room."""
    outputs, features = (
        [_isolated(label) for label in labels(axis)] for axis in (explanation.outputs, explanation.features)
    )
    lines = []
    for o, row in enumerate(shares):
        for i, share in enumerate(row):
            value, error = explanation.importance[i, o], explanation.error[i, o]
            x, y = left + i * across, top + o * down
            sure = "" if explanation.exact else f" ± {error:.2f}"
            tip = escape(f"{outputs[o]} depends on {features[i]}: {number(value)}{sure}")
            size = f'width="{_n(across - 2.5)}" height="{_n(down - 2.5)}" rx="5"'
            place = f'x="{_n(x + 1.25)}" y="{_n(y + 1.25)}" {size}'
            lines.append(f'<rect {place} fill="{_css(share)}"><title>{tip}</title></rect>')
            if across >= 44 and down >= 30 and abs(share) >= SHOWN:
                lines.append(_text(x + across / 2, y + down / 2 + 4, number(value), f'fill="{signed_ink(share)}"'))
    return _group(lines, 'class="cells" font-size="12" text-anchor="middle" '
                  'style="font-variant-numeric: tabular-nums"')  # fmt: skip


def _legend(score: str, most: float, x: float, y: float, quiet: str) -> str:
    """The scale from the one end to the other, in steps that carry their colours as they are."""
    step, lines = 10.0, []
    for k in range(-STEPS, STEPS + 1):
        place = x + (k + STEPS) * step
        lines.append(f'<rect x="{_n(place)}" y="{_n(y)}" width="{_n(step)}" height="8" fill="{_css(k / STEPS)}"/>')
    end = x + (2 * STEPS + 1) * step
    lines += [
        _text(x, y + 23, number(-most)),
        _text((x + end) / 2, y + 23, "0", 'text-anchor="middle"'),
        _text(end, y + 23, number(most), 'text-anchor="end"'),
        _text(end + 14, y + 8.5, f"change in {score}"),
    ]
    return _group(lines, quiet)


def bars(explanation: Explanation, *, theme: Theme = "auto") -> str:
    """A bar a feature for the score of the whole, to the right of zero or to its left, with two standard errors."""
    palette = _DARK if theme == "dark" else _LIGHT
    names = [shorten(label, LONGEST + 10) for label in labels(explanation.features)]
    values, errors = explanation.overall, 2 * explanation.overall_error
    low, high = min(0.0, float((values - errors).min())), max(0.0, float((values + errors).max()))
    scale = BAR / ((high - low) or 1.0)
    left = PAD + max(text_width(name, 13) for name in names) + 14
    zero, top = left - low * scale, PAD + 44
    bottom = top + LINE * len(names)
    width = max(left + BAR + 76, PAD + _title_width(explanation), PAD + text_width(NOTE, 11)) + PAD
    quiet = f'class="quiet" fill="{palette.quiet}" font-size="11"'
    lines = []
    for i, (name, value, error) in enumerate(zip(names, values, errors, strict=True)):
        y, x = top + i * LINE, zero + min(value, 0.0) * scale
        tip = escape(f"{_isolated(name)}: {number(value)}" + ("" if explanation.exact else f" ± {error / 2:.2f}"))
        lines += [
            _text(left - 14, y + LINE / 2 + 4.5, name,
                  f'class="ink" fill="{palette.ink}" font-size="13" text-anchor="end"'),
            f'<rect x="{_n(x)}" y="{_n(y + 6)}" width="{_n(max(abs(value) * scale, 0.5))}" height="{_n(LINE - 12)}" '
            f'rx="3" fill="{_css(1.0 if value > 0 else -1.0)}"><title>{tip}</title></rect>',
        ]  # fmt: skip
        if error > 0:
            lines.append(
                _whisker(zero + (value - error) * scale, zero + (value + error) * scale, y + LINE / 2, palette)
            )
        end = zero + max(value + error, 0.0) * scale
        lines.append(_text(end + 10, y + LINE / 2 + 4, number(value), quiet.replace('"11"', '"12"')))
    axis = f'<path class="axis" d="M{_n(zero)} {_n(top)}V{_n(bottom)}" stroke="{palette.quiet}"/>'
    sure = "every mask, no error" if explanation.exact else "lines: two standard errors either way"
    parts = [
        _opening(explanation, width, bottom + 66, theme, palette),
        *lines,
        axis,
        _text(PAD, bottom + 26, f"change in {explanation.score}; {sure}; {explanation.calls} calls", quiet),
        _text(PAD, bottom + 46, NOTE, quiet),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _whisker(low: float, high: float, y: float, palette: _Palette) -> str:
    path = f"M{_n(low)} {_n(y)}H{_n(high)}M{_n(low)} {_n(y - 4)}v8M{_n(high)} {_n(y - 4)}v8"
    return (
        f'<path class="halo" d="{path}" stroke="{palette.card}" stroke-width="4" fill="none"/>'
        f'<path class="axis" d="{path}" stroke="{palette.ink}" stroke-width="1.4" fill="none"/>'
    )


def _title_width(explanation: Explanation) -> float:
    """What the title asks for; a longer one is cut."""
    return min(text_width(_clean(explanation.title), 16), WIDEST_TITLE)


def _css(share: float) -> str:
    return "#{:02x}{:02x}{:02x}".format(*signed_rgb(share))


def _opening(explanation: Explanation, width: float, height: float, theme: Theme, palette: _Palette) -> str:
    """The card and its title, and in words what a reader who cannot see it needs."""
    name = title = _clean(explanation.title) or "Importance of each part of the input"
    while text_width(title, 16) > width - 2 * PAD + 1 and len(title) > 1:
        title = title[:-2].rstrip() + "…"
    order = explanation.order[:12]
    told = ", ".join(f"{_isolated(_clean(explanation.features[i]))} {number(explanation.overall[i])}" for i in order)
    dark = (
        "<style>@media (prefers-color-scheme: dark) { "
        f".regard-explanation .card {{ fill: {_DARK.card}; stroke: {_DARK.edge} }} "
        f".regard-explanation .ink {{ fill: {_DARK.ink} }} .regard-explanation .quiet {{ fill: {_DARK.quiet} }} "
        f".regard-explanation .axis {{ stroke: {_DARK.ink} }} .regard-explanation .halo {{ stroke: {_DARK.card} }} "
        "}</style>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="regard-explanation" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'width="{_n(width)}" height="{_n(height)}" role="img" aria-label={quoteattr(name)} font-family="{FONTS}">\n'
        f"<desc>{escape(f'Importance for the whole output, the greatest first: {told}. {NOTE}')}</desc>\n"
        + (dark + "\n" if theme == "auto" else "")
        + f'<rect class="card" x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="14" '
        f'fill="{palette.card}" stroke="{palette.edge}"/>\n'
        + _text(PAD, PAD + 14, title, f'class="ink" fill="{palette.ink}" font-size="16" font-weight="600"')
    )


def stacked(pictures: Sequence[str], gap: float = 18.0) -> str:
    """Several SVG documents in one, one below another."""
    sizes = [tuple(map(float, re.search(r'width="([\d.]+)" height="([\d.]+)"', one).groups()))  # type: ignore[union-attr]
             for one in pictures]  # fmt: skip
    width, height = max(w for w, _ in sizes), sum(h for _, h in sizes) + gap * (len(sizes) - 1)
    parts, y = [], 0.0
    for one, (_, tall) in zip(pictures, sizes, strict=True):
        parts.append(one.replace("<svg ", f'<svg y="{_n(y)}" ', 1).strip())
        y += tall + gap
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="group">\n' + "\n".join(parts) + "\n</svg>\n"
