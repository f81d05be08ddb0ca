"""A graph whose edges are as dark and wide as the attention along them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.interpret.edge_attention import EdgeAttention
from regard.tasks.classes import Prediction
from regard.text.display import shorten
from regard.viz.scene import PAD, Item, Scene, SceneText, card, circle, clean, fitted, polyline, title
from regard.viz.terminal import Colour
from regard.viz.views.picture import Picture, rounded

SIDE = 560.0  # of the drawing
TOP = 74.0  # below the title
LISTED = 12  # edges in a terminal


@dataclass(frozen=True, eq=False)
class GraphPanel:
    """The half of an edge next to a node shows how much this node attends to the other; its rim, how much to itself."""

    found: EdgeAttention
    name: str

    def scene(self) -> Scene:
        view = self.found.view
        places = {node: self._place(*position) for node, position in zip(view.shown, view.positions, strict=True)}
        width, height = SIDE + 2 * PAD, SIDE + TOP + 2 * PAD
        lines: list[Item] = []
        own: dict[int, float] = {}
        for sender, receiver, weight in self.edges():
            if sender == receiver:
                own[receiver] = weight
            elif sender in places and receiver in places:
                (x, y), (x2, y2) = places[receiver], places[sender]
                tip = f"{view.names[receiver]} attends to {view.names[sender]}: {weight:.3f}"
                look = {"stroke": "link", "line": 0.6 + 9 * weight, "opacity": 0.25 + 0.75 * weight, "tip": tip}
                lines.append(polyline([(x, y), ((x + x2) / 2, (y + y2) / 2)], **look))
        radius = 13.0 if view.inside else 11.0 if len(places) <= 30 else 7.0
        for node, (x, y) in places.items():
            tip = f"{view.names[node]} attends to itself: {own.get(node, 0):.3f}"
            rim = 0.6 + 5 * own.get(node, 0)
            fill = "link" if node == view.focus else "box"
            lines.append(circle(x, y, radius, fill=fill, stroke="link" if rim > 1 else "rim", line=rim, tip=tip))
            if view.inside:
                lines.append(SceneText(x, y + 3, view.names[node], 9, anchor="middle", bold=True))
            elif len(places) <= 30 or node == view.focus:
                lines.append(SceneText(x, y + radius + 13, view.names[node], 10, "quiet", "middle"))
        subtitle = fitted(clean(f"Attention over edges: {self.found.layers}"), 12, width - 2 * PAD)
        heading = [title(self.headline(), width), SceneText(PAD, PAD + 36, subtitle, 12, "quiet")]
        return Scene(width, height, self.headline(), self._about(), (card(width, height), *heading, *lines))

    def _place(self, x: float, y: float) -> tuple[float, float]:
        return PAD + 20 + x * (SIDE - 40), TOP + PAD + 10 + y * (SIDE - 40)

    def edges(self) -> list[tuple[int, int, float]]:
        """Sender, receiver and weight of every edge."""
        graphs = self.found.view.batch.graphs
        return list(zip(graphs.senders.tolist(), graphs.receivers.tolist(), self.found.weights.tolist(), strict=True))

    def strongest(self) -> list[tuple[int, int, float]]:
        """The edges between shown nodes that carry most attention; of the focus, if there is one."""
        focus, shown = self.found.view.focus, set(self.found.view.shown)
        edges = [e for e in self.edges() if (e[1] == focus if focus is not None else {e[0], e[1]} <= shown)]
        return sorted(edges, key=lambda edge: -edge[2])

    def headline(self) -> str:
        now, before = _words(self.found.prediction), _words(self.found.before)
        return f"{self.name}: {now}" if now == before else f"{self.name}: {now} (nothing hidden: {before})"

    def _about(self) -> str:
        names = self.found.view.names
        most = "; ".join(f"{names[r]} attends to {names[s]} with {w:.2f}" for s, r, w in self.strongest()[:5])
        return f"A graph whose edges are weighted by attention ({self.found.layers}). {most}."

    def text(self, *, width: int, colour: Colour) -> str:
        names = self.found.view.names
        lines = [shorten(self.headline(), width), f"Attention over edges: {self.found.layers}", ""]
        for sender, receiver, weight in self.strongest()[:LISTED]:
            bar = "█" * round(weight * max(width - 40, 10))
            lines.append(f"{shorten(f'{names[receiver]} to {names[sender]}', 30):30} {weight:5.3f} {bar}".rstrip())
        return "\n".join(lines) + "\n"


def _words(prediction: Any) -> str:
    if isinstance(prediction, Prediction):
        return f"{prediction.label} {prediction.probability:.0%}"
    return str(prediction)


def graph(found: EdgeAttention, name: str) -> Picture:
    """Draw attention over the edges of a graph."""
    panel = GraphPanel(found, name)

    def numbers() -> Mapping[str, Any]:
        names, shown = found.view.names, set(found.view.shown)
        edges = [
            {"from": names[receiver], "to": names[sender], "weight": rounded(weight)}
            for sender, receiver, weight in panel.edges()
            if receiver in shown and sender in shown
        ]
        return {"prediction": found.prediction.as_dict(), "before": found.before.as_dict(), "edges": edges}

    return Picture("graph", (panel,), numbers)
