"""An attention map as an SVG picture: one file, no scripts, no fonts from outside, fit for a slide or a page."""

from __future__ import annotations

from collections.abc import Iterable

from regard.viz import grid
from regard.viz.maps import Map
from regard.viz.scene import Theme


def draw(map: Map, *, theme: Theme = "auto", links: Iterable[tuple[int, int]] = ()) -> str:
    """The map as a heat map: keys along the top, queries down the left, one coloured cell a weight.

    `links` are the (query, key) cells to outline, such as the gold alignment of a sentence pair. The result is a
    complete SVG document: `Path("map.svg").write_text(draw(map), encoding="utf-8")`.
    """
    return grid.scene(grid.Grid.of(map, links)).svg(theme)
