"""A trace in a notebook: the page in a frame of its own, and a picture for where frames are not shown.

Scripts that a notebook injects into its page are dropped by some front ends (VS Code, GitHub); a frame with everything
in its `srcdoc` needs none of them, and an image with its data in it is shown even where frames are not.
"""

from __future__ import annotations

import base64
from html import escape

from regard.interpret.trace import Trace
from regard.viz import standalone
from regard.viz.scene import Scene
from regard.viz.views.views import draw

HEIGHT = 720  # of the frame


def html(trace: Trace) -> str:
    """The page in a frame, and below it the same as a picture, folded away."""
    page = escape(standalone.page([trace]), quote=True)
    name = escape(f"{trace.header['model']['name']}: {trace.header['text']['source']}", quote=True)
    return (
        f'<iframe title="{name}" srcdoc="{page}" width="100%" height="{HEIGHT}" style="border: 0" loading="lazy">'
        f"</iframe>\n<details><summary>As a picture</summary>{image(draw(trace).scene())}</details>"
    )


def image(scene: Scene) -> str:
    """A picture with its data in it; no script of an SVG runs in an image, and none is there."""
    data = base64.b64encode(scene.svg("light").encode()).decode()
    return f'<img alt="{escape(scene.name, quote=True)}" src="data:image/svg+xml;base64,{data}">'
