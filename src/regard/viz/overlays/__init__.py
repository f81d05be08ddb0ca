"""Attention drawn over an input, by the kind of its elements: patches, frames, steps, nodes.

Each kind is one module with a function from an `Overlay` to the panels of a picture.
"""

from regard.viz.overlays.frames import frame_panels
from regard.viz.overlays.nodes import node_panels
from regard.viz.overlays.overlay import Overlay, PanelMaker
from regard.viz.overlays.patches import patch_panels
from regard.viz.overlays.steps import step_panels

PANELS: dict[str, PanelMaker] = {
    "patches": patch_panels,
    "frames": frame_panels,
    "steps": step_panels,
    "nodes": node_panels,
}

__all__ = ["PANELS", "Overlay"]
