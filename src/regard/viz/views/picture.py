"""A view as a list of panels, each of which can be a scene or text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.interpret.trace import Trace
from regard.viz import charts, grid, terminal
from regard.viz.charts import Chart
from regard.viz.grid import Grid
from regard.viz.panels import Panel
from regard.viz.scene import Scene, Theme, stacked
from regard.viz.terminal import Colour
from regard.viz.views import files


@dataclass(frozen=True, eq=False)
class Picture:
    """A view, and its numbers as plain JSON, which are computed on demand."""

    view: str
    panels: tuple[Grid | Chart | Panel, ...]
    make_numbers: Callable[[], Mapping[str, Any]]
    trace: Trace | None = None

    @property
    def numbers(self) -> Mapping[str, Any]:
        return self.make_numbers()

    def scene(self) -> Scene:
        scenes = [_scene(panel) for panel in self.panels]
        return scenes[0] if len(scenes) == 1 else stacked(scenes)

    def text(self, *, width: int, colour: Colour) -> str:
        """Format the view for a terminal with `width` columns."""
        return "\n".join(_text(panel, width, colour) for panel in self.panels)

    def save(self, path: str | Path, *, theme: Theme = "auto") -> str:
        """Write a file; its suffix selects the format (see `regard.viz.views.FILES`)."""
        return files.save(self, Path(path), theme=theme)

    def _repr_svg_(self) -> str:
        """Show the picture in a notebook."""
        return self.scene().svg()


def _scene(panel: Grid | Chart | Panel) -> Scene:
    if isinstance(panel, Grid):
        return grid.scene(panel)
    return charts.scene(panel) if isinstance(panel, Chart) else panel.scene()


def _text(panel: Grid | Chart | Panel, width: int, colour: Colour) -> str:
    if isinstance(panel, Grid):
        return terminal.grid(panel, width=width, colour=colour)
    if isinstance(panel, Chart):
        return charts.terminal(panel, width=width, colour=colour)
    return panel.text(width=width, colour=colour)


def rounded(values: Any) -> Any:
    """Round nested numbers to six significant digits, for JSON."""
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    return float(f"{values:.6g}")
