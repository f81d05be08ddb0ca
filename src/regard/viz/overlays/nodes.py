"""A graph whose edges are as dark and wide as the attention along them."""

from __future__ import annotations

from dataclasses import dataclass

from regard.text.display import shorten
from regard.viz.overlays.overlay import AnyPanel, Overlay
from regard.viz.scene import PAD, Item, Rect, Scene, SceneText, card, circle, clean, fitted, polyline, text_width, title
from regard.viz.terminal import Colour

SIDE = 560.0  # side of the drawing
TOP = 74.0  # below the title
KEY = "Width of the half edge at a node: its attention to the other node. Width of its outline: to itself."
MAX_LISTED = 12  # edges in a terminal
MAX_NAMED = 30  # nodes, above which only some have names


@dataclass(frozen=True, eq=False)
class GraphPanel:
    """The width of the half edge at a node is its attention to the other node; that of its outline, to itself."""

    overlay: Overlay

    def scene(self) -> Scene:
        axis, weights, names = self.overlay.keys, self.overlay.map.weights, self.overlay.map.keys
        at = [element["at"] for element in axis["elements"]]
        top = min(y for _, y in at)  # molecules are wider than high
        places = [(PAD + 20 + x * (SIDE - 40), TOP + PAD + 30 + (y - top) * (SIDE - 40)) for x, y in at]
        width, height = SIDE + 2 * PAD, max(y for _, y in places) + 40 + PAD
        lines: list[Item] = []
        for one, other in axis["edges"]:
            for receiver, sender in ((one, other), (other, one)):
                (x, y), (x2, y2), weight = places[receiver], places[sender], float(weights[receiver, sender])
                tip = f"{names[receiver]} attends to {names[sender]}: {weight:.3f}"
                look = {"stroke": "link", "line": 0.6 + 9 * weight, "opacity": 0.25 + 0.75 * weight, "tip": tip}
                lines.append(polyline([(x, y), ((x + x2) / 2, (y + y2) / 2)], **look))
        radius = 13.0 if axis["inside"] else 11.0 if len(places) <= MAX_NAMED else 7.0
        for node, (x, y) in enumerate(places):
            self_weight = float(weights[node, node])
            rim = 0.6 + 5 * self_weight
            fill = "link" if node == axis["focus"] else "box"
            tip = f"{names[node]} attends to itself: {self_weight:.3f}"
            lines.append(circle(x, y, radius, fill=fill, stroke="link" if rim > 1 else "rim", line=rim, tip=tip))
            if axis["inside"]:
                lines.append(SceneText(x, y + 3, names[node], 9, anchor="middle", bold=True))
            elif len(places) <= MAX_NAMED or node == axis["focus"]:
                if node == axis["focus"]:  # edges would cross its name
                    wide = text_width(names[node], 10) + 4
                    lines.append(Rect(x - wide / 2, y + radius + 3, wide, 14, fill="card"))
                lines.append(SceneText(x, y + radius + 13, names[node], 10, "quiet", "middle"))
        subtitle = fitted(clean(self.overlay.map.title), 12, width - 2 * PAD)
        heading = [title(self.overlay.headline(), width), SceneText(PAD, PAD + 36, subtitle, 12, "quiet")]
        heading.append(SceneText(PAD, PAD + 54, KEY, 12, "quiet"))
        return Scene(width, height, self.overlay.headline(), self._about(), (card(width, height), *heading, *lines))

    def strongest(self) -> list[tuple[str, str, float]]:
        """The names of receiver and sender, and the weight, of the edges that carry most; of the focus, if any."""
        axis, weights, names = self.overlay.keys, self.overlay.map.weights, self.overlay.map.keys
        pairs = [pair for a, b in axis["edges"] for pair in ((a, b), (b, a))]
        pairs += [(node, node) for node in range(len(names))]
        chosen = self.overlay.at if self.overlay.at is not None else axis["focus"]
        selected = [(r, s) for r, s in pairs if chosen in (None, r)]
        listed = [(names[r], names[s], float(weights[r, s])) for r, s in selected]
        return sorted((edge for edge in listed if edge[2] > 0), key=lambda edge: -edge[2])

    def _about(self) -> str:
        most = "; ".join(f"{r} attends to {s} with {w:.2f}" for r, s, w in self.strongest()[:5])
        return f"A graph whose edges are weighted by attention ({self.overlay.map.title}). {most}."

    def text(self, *, width: int, colour: Colour) -> str:
        lines = [shorten(self.overlay.headline(), width), shorten(self.overlay.map.title, width), ""]
        for receiver, sender, weight in self.strongest()[:MAX_LISTED]:
            bar = "█" * round(weight * max(width - 40, 10))
            lines.append(f"{shorten(f'{receiver} to {sender}', 30):30} {weight:5.3f} {bar}".rstrip())
        return "\n".join(lines) + "\n"


def node_panels(overlay: Overlay) -> list[AnyPanel]:
    """The graph."""
    return [GraphPanel(overlay)]
