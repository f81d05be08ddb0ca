"""A trace in a notebook: the page in an iframe, and a picture for front ends that do not show iframes.

Some front ends (VS Code, GitHub) remove scripts from notebook output. An iframe whose `srcdoc` has the whole page is
not affected, and an image with a data URL is shown even without iframes.
"""

from __future__ import annotations

import base64
from html import escape

from regard.interpret.trace import Trace
from regard.viz import standalone
from regard.viz.scene import Scene
from regard.viz.views.views import draw

HEIGHT = 720  # height of the frame


def html(trace: Trace) -> str:
    """Return the page in an iframe, and a collapsed picture below it."""
    page = escape(standalone.page([trace]), quote=True)
    name = escape(f"{trace.header['model']['name']}: {trace.header['text']['source']}", quote=True)
    return (
        f'<iframe title="{name}" srcdoc="{page}" width="100%" height="{HEIGHT}" style="border: 0" loading="lazy">'
        f"</iframe>\n<details><summary>As a picture</summary>{image(draw(trace).scene())}</details>"
    )


def image(scene: Scene) -> str:
    """Return a picture with a data URL; scripts of an SVG do not run in an image."""
    data = base64.b64encode(scene.svg("light").encode()).decode()
    return f'<img alt="{escape(scene.name, quote=True)}" src="data:image/svg+xml;base64,{data}">'
