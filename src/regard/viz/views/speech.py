"""A recording on one axis of time: the spectrogram, CTC's spikes, and what each token attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.interpret.sound_attention import SoundAttention, time_of
from regard.text.display import shorten, visible
from regard.viz.colours import Ramp
from regard.viz.grid import colour_bar, short_number
from regard.viz.scene import PAD, Cells, Item, Rect, Scene, SceneText, card, clean, polyline, text_width, title
from regard.viz.terminal import Colour
from regard.viz.views.picture import Picture, rounded

WIDTH = 720.0  # of the axis of time
SPECTROGRAM, SPIKES, ROW = 120.0, 90.0, 18.0  # heights: of the spectrogram, of CTC, of a row of attention
HEAD = 24.0  # above each part, for its name
LABEL = 11.0  # font size
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds between two marks


@dataclass(frozen=True, eq=False)
class SoundPanel:
    """The parts, from top to bottom, with time from left to right."""

    found: SoundAttention
    name: str

    @property
    def labels(self) -> list[str]:
        return [shorten(visible(token), 16) for token in (*self.found.tokens, "</s>")]

    @property
    def left(self) -> float:
        return PAD + max(44.0, *(text_width(label, LABEL) for label in self.labels)) + 20

    def x(self, seconds: float) -> float:
        return self.left + WIDTH * seconds / self.found.seconds

    def scene(self) -> Scene:
        y = PAD + 30
        items: list[Item] = []
        for part in (self._spectrogram, self._spikes, self._attention):
            made, height = part(y)
            items += made
            y += height
        items += self._axis(y + 4)
        width, height = self.left + WIDTH + PAD, y + 40 + PAD
        heading = title(f"{self.name}: {self.found.text}", width)
        return Scene(width, height, self.headline(), self._about(), (card(width, height), heading, *items))

    def headline(self) -> str:
        return clean(f"{self.name}: {self.found.text}")

    def _head(self, y: float, text: str) -> SceneText:
        return SceneText(self.left, y + HEAD - 8, text, LABEL, "quiet")

    def _spectrogram(self, y: float) -> tuple[list[Item], float]:
        values = self.found.features.T[::-1]  # high frequencies on top
        across = self.x(time_of(0.01, values.shape[1])) - self.x(time_of(0.01, 0))
        begin = self.x(time_of(0.01, 0)) - across / values.shape[1] / 2
        colours = Ramp.between(values).rgbs(values)
        cells = Cells(begin, y + HEAD, across / values.shape[1], SPECTROGRAM / len(values), colours, image=True)
        top = f"{self.found.sample_rate / 2000:g} kHz"
        axis = [SceneText(self.left - 8, y + HEAD + 9, top, LABEL, "quiet", "end")]
        axis.append(SceneText(self.left - 8, y + HEAD + SPECTROGRAM, "0", LABEL, "quiet", "end"))
        what = "log-mel spectrogram (the scale of frequency is mel)"
        return [self._head(y, what), cells, *axis], HEAD + SPECTROGRAM + 8

    def _spikes(self, y: float) -> tuple[list[Item], float]:
        found = self.found
        if found.ctc is None or found.blank is None:
            return [], 0.0
        top, height = y + HEAD + 14, SPIKES - 14

        def curve(values: np.ndarray, **look: object) -> Item:
            points = [(self.x(time_of(found.frame, i)), top + height * (1 - v)) for i, v in enumerate(values.tolist())]
            return polyline(points, **look)

        items: list[Item] = [self._head(y, "CTC: the probability of each token (grey: the blank)")]
        items.append(Rect(self.left, top, WIDTH, height, fill="box"))
        items.append(curve(found.blank, stroke="rim", line=1.2))
        spans = self._spans()
        for token, values, (begin, end) in zip(self.labels, found.ctc, spans, strict=False):
            alone = np.where((np.arange(len(values)) >= begin) & (np.arange(len(values)) < end), values, 0.0)
            items.append(curve(alone, stroke="link", line=1.6, tip=f"{token}: {alone.max():.2f}"))
            middle = self.x(time_of(found.frame, int(alone.argmax())))
            items.append(SceneText(middle, top - 3, token, LABEL, anchor="middle"))
        for value in (0, 1):
            items.append(SceneText(self.left - 8, top + height * (1 - value) + 4, str(value), LABEL, "quiet", "end"))
        return items, HEAD + SPIKES + 8

    def _spans(self) -> list[tuple[int, int]]:
        """The frames of each token: from where it begins on the best path to where the next one does."""
        starts = list(self.found.starts or ())
        count = 0 if self.found.blank is None else len(self.found.blank)
        return list(zip(starts, [*starts[1:], count], strict=False))

    def _attention(self, y: float) -> tuple[list[Item], float]:
        weights = self.found.attention
        if weights is None:
            return [], 0.0
        top, ramp = y + HEAD, Ramp(0.0, max(float(weights.max()), 1e-6))
        across = self.x(self.found.frame) - self.x(0)
        begin = self.x(time_of(self.found.frame, 0)) - across / 2
        cells = Cells(begin, top, across, ROW, ramp.rgbs(weights), image=True, row_tip=self._row_tip)
        items: list[Item] = [self._head(y, f"attention of each token: {self.found.layers}"), cells]
        for row, label in enumerate(self.labels[: len(weights)]):
            items.append(SceneText(self.left - 18, top + (row + 0.7) * ROW, label, LABEL, anchor="end"))
        bottom = top + ROW * len(weights)
        items.append(colour_bar(self.left, bottom + 34, ramp, "attention weight", short_number))
        return items, HEAD + ROW * len(weights) + 8

    def _row_tip(self, row: int) -> str:
        assert self.found.attention is not None
        peak = int(self.found.attention[row].argmax())
        return f"{self.labels[row]} attends most to {time_of(self.found.frame, peak):.2f} s"

    def _axis(self, y: float) -> list[Item]:
        seconds = self.found.seconds
        step = next((tick for tick in TICKS if seconds / tick <= 12), TICKS[-1])
        marks = np.arange(0, seconds + step / 1000, step).tolist()
        items: list[Item] = []
        for mark in marks:
            items.append(polyline([(self.x(mark), y - 8), (self.x(mark), y - 3)], stroke="rim"))
            items.append(SceneText(self.x(mark), y + 8, f"{mark:g}", LABEL, "quiet", "middle"))
        items.append(SceneText(self.left + WIDTH, y + 24, "seconds", LABEL, "quiet", "end"))
        return items

    def times(self) -> list[dict[str, Any]]:
        """For each token, when CTC recognises it and when it attends most to, in seconds."""
        rows = []
        for number, token in enumerate(self.found.tokens):
            row: dict[str, Any] = {"token": token}
            if self.found.starts:
                row["ctc"] = rounded(time_of(self.found.frame, self.found.starts[number]))
            if self.found.attention is not None:
                row["attention"] = rounded(time_of(self.found.frame, int(self.found.attention[number].argmax())))
            rows.append(row)
        return rows

    def _about(self) -> str:
        when = "; ".join(
            f"{row['token']} at {row.get('ctc', row.get('attention', 0)):.2f} seconds" for row in self.times()[:40]
        )
        seconds = f"{self.found.seconds:.2f} seconds"
        return f"The spectrogram of a recording of {seconds}, with the time of each token. {when}."

    def text(self, *, width: int, colour: Colour) -> str:
        """A line for each token, with its time as a mark on a bar."""
        lines = [shorten(self.headline(), width), f"0 to {self.found.seconds:.2f} seconds", ""]
        space = max(width - 36, 10)
        for row in self.times():
            time = row.get("ctc", row.get("attention", 0.0))
            at = min(int(space * time / self.found.seconds), space - 1)
            named = "  ".join(f"{kind} {row[kind]:.2f}" for kind in ("ctc", "attention") if kind in row)
            lines.append(f"{shorten(visible(row['token']), 9):9} {'·' * at}█{'·' * (space - at - 1)} {named}")
        return "\n".join(lines) + "\n"


def speech(found: SoundAttention, name: str) -> Picture:
    """Draw a recording, its spectrogram, CTC and attention over time."""
    panel = SoundPanel(found, name)

    def numbers() -> Mapping[str, Any]:
        def listed(values: np.ndarray | None) -> Any:
            return None if values is None else rounded(values.tolist())

        return {
            "text": found.text,
            "seconds": rounded(found.seconds),
            "frame": rounded(found.frame),
            "tokens": panel.times(),
            "attention": listed(found.attention),
            "ctc": listed(found.ctc),
            "blank": listed(found.blank),
        }

    return Picture("speech", (panel,), numbers)
