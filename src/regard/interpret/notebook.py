"""The display of results of this package in notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class NotebookDisplay:
    """Base class of results that `regard.api` gives a picture in a notebook, by setting `draw_html`."""

    draw_html: ClassVar[Callable[[Any], str] | None] = None

    def _repr_html_(self) -> str | None:
        draw = type(self).draw_html
        return None if draw is None else draw(self)
