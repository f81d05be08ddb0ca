"""The frames of an episode, each with the attention that a decision pays to its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.text.display import shorten
from regard.viz.colours import Ramp
from regard.viz.grid import Grid, colour_bar, short_number
from regard.viz.overlays.overlay import AnyPanel, Entry, Overlay
from regard.viz.scene import PAD, Cells, Item, Rect, Scene, SceneText, card, clean, fitted, hexadecimal, title
from regard.viz.terminal import Colour

ACROSS, FRAME_WIDTH, GAP = 8, 92.0, 12.0  # frames in a line; width of a frame; space between two
FRAMELESS_HEIGHT = 40.0  # height of a step without a frame
MAX_LISTED = 12  # steps in a terminal


@dataclass(frozen=True, eq=False)
class StepPanel:
    """The steps so far, with the weight of each below its frame; the step of the decision is outlined."""

    overlay: Overlay
    at: int

    def scene(self) -> Scene:
        frames, steps = self.overlay.image("frames"), self.overlay.keys["steps"][: self.at + 1]
        weights = self.overlay.map.weights[self.at]
        ramp = Ramp(0.0, float(weights.max()) or 1.0)
        pixel = FRAME_WIDTH / (frames.shape[2] if frames is not None else 1)
        tall = FRAMELESS_HEIGHT if frames is None else frames.shape[1] * pixel
        items: list[Item] = []
        for n, step in enumerate(steps):
            x, y = PAD + (n % ACROSS) * (FRAME_WIDTH + GAP), PAD + 54 + (n // ACROSS) * (tall + 62)
            colour = hexadecimal(ramp.rgb(float(weights[n])))
            label = f"step {step['number']}"
            tip = f"{label}, {step['action']}: {weights[n]:.3f}; state {step['state']}"
            if frames is None:
                items.append(SceneText(x, y + 24, fitted(step["state"], 10, FRAME_WIDTH), 10, "quiet"))
            else:
                items.append(Cells(x, y, pixel, pixel, np.rint(255 * frames[n]).astype(np.uint8), image=True))
            chosen = n == self.at
            items += [
                Rect(x, y, FRAME_WIDTH, tall, stroke="link" if chosen else "edge", line=3 if chosen else 1, tip=tip),
                Rect(x, y + tall + 4, FRAME_WIDTH, 8, fill=colour, tip=tip),
                SceneText(x, y + tall + 26, f"{label}: {weights[n]:.2f}", 11, bold=chosen),
                SceneText(x, y + tall + 40, fitted(clean(step["action"]), 11, FRAME_WIDTH), 11, "quiet"),
            ]
        width = PAD + ACROSS * (FRAME_WIDTH + GAP) - GAP + PAD
        below = PAD + 54 + -(-len(steps) // ACROSS) * (tall + 62)
        heading = [title(self._headline(), width), SceneText(PAD, PAD + 36, self._subtitle(width), 12, "quiet")]
        bar = colour_bar(PAD, below + 4, ramp, "attention weight", short_number)
        height = below + 40 + PAD
        return Scene(width, height, self._headline(), self._about(), (card(width, height), *heading, *items, bar))

    def _headline(self) -> str:
        header, number = self.overlay.trace.header, self.overlay.keys["steps"][self.at]["number"]
        now = self._decision(header["axes"]["target"]["elements"], header["output"]["p"])
        before = header["before"]
        then = now if before is None else self._decision(before["tokens"], before["p"])
        changed = "" if now == then else f" (nothing hidden: {then})"
        return f"{header['text']['source']}, step {number}: {now}{changed}"

    def _decision(self, actions: Sequence[Entry], shares: Sequence[float]) -> str:
        """The action and its probability; of continuous actions what was done."""
        if not actions:
            return str(self.overlay.keys["steps"][self.at]["action"])
        return f"{actions[self.at]['text']} {100 * shares[self.at]:.0f} %"

    def _subtitle(self, width: float) -> str:
        return fitted(clean(f"Which steps this decision attends to. {self.overlay.map.title}"), 12, width - 2 * PAD)

    def strongest(self) -> list[tuple[str, float]]:
        """Step and action, and its weight, the greatest first."""
        steps, weights = self.overlay.keys["steps"], self.overlay.map.weights[self.at]
        order = np.argsort(-weights, kind="stable")
        return [(f"step {steps[n]['number']} {steps[n]['action']}", float(weights[n])) for n in order]

    def _about(self) -> str:
        most = ", ".join(f"{name} {weight:.2f}" for name, weight in self.strongest()[:5])
        return f"The frames of an episode and the attention of a decision to each step: {most}."

    def text(self, *, width: int, colour: Colour) -> str:
        lines = [shorten(self._headline(), width), shorten(self.overlay.map.title, width), ""]
        for name, weight in self.strongest()[:MAX_LISTED]:
            bar = "█" * round(weight * max(width - 40, 10))
            lines.append(f"{shorten(name, 30):30} {weight:5.3f} {bar}".rstrip())
        return "\n".join(lines) + "\n"


def step_panels(overlay: Overlay) -> list[AnyPanel]:
    """The frames for one decision, by default the last one, and the map of all decisions; of single tokens the map."""
    if len(overlay.map.keys) != len(overlay.keys["steps"]):
        return [Grid.of(overlay.map)]
    at = len(overlay.map.queries) - 1 if overlay.at is None else overlay.at
    columns = tuple(str(step["number"]) for step in overlay.keys["steps"])
    grid = replace(Grid.of(overlay.map), title="Which steps each decision attends to", columns=columns)
    return [StepPanel(overlay, at), grid]
