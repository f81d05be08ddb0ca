"""The interface of the parts of a picture that are neither grids nor charts."""

from __future__ import annotations

from typing import Protocol

from regard.viz.scene import Scene
from regard.viz.terminal import Colour


class Panel(Protocol):
    """A part of a picture that is neither a grid nor a chart."""

    def scene(self) -> Scene: ...

    def text(self, *, width: int, colour: Colour) -> str: ...
