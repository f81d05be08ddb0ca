"""A recording on one axis of time: the spectrogram, CTC's spikes, and what each token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard.text.display import shorten
from regard.viz.colours import Ramp
from regard.viz.grid import colour_bar, short_number
from regard.viz.overlays.overlay import AnyPanel, Overlay
from regard.viz.scene import PAD, Cells, Item, Rect, Scene, SceneText, card, clean, fitted, polyline, text_width, title
from regard.viz.terminal import Colour

WIDTH = 720.0  # width of the axis of time
SPECTROGRAM, SPIKES, ROW = 120.0, 90.0, 18.0  # heights: of the spectrogram, of CTC, of a row of attention
HEAD = 24.0  # above each part, for its name
LABEL = 11.0  # font size
TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds between two marks


@dataclass(frozen=True, eq=False)
class SoundPanel:
    """The parts, from top to bottom, with time from left to right."""

    overlay: Overlay

    @cached_property
    def ends(self) -> list[float]:
        """The times, in seconds, where the encoder's frames begin, and the end."""
        frames = [element["time"] for element in self.overlay.keys["elements"]]
        return [begin for begin, _ in frames] + [frames[-1][1]]

    @property
    def seconds(self) -> float:
        return float(self.overlay.keys["seconds"])

    @cached_property
    def tokens(self) -> list[str]:
        """The labels of the tokens of the output, without EOS."""
        return [one["label"] for one in self.overlay.trace.header["axes"]["target"]["elements"] if not one["special"]]

    @cached_property
    def ctc(self) -> np.ndarray | None:
        """The probability [1 + T, frames] of the blank and of each token; None: the model has no CTC."""
        about = self.overlay.trace.header.get("ctc")
        return None if about is None else self.overlay.trace.array(about["array"])

    @property
    def starts(self) -> list[int]:
        """The frame where each token begins on CTC's most likely path; empty if there is none."""
        about = self.overlay.trace.header.get("ctc")
        return [] if about is None else list(about["starts"])

    @cached_property
    def rows(self) -> list[tuple[str, np.ndarray]]:
        """Labels and weights [frames] of the rows of attention."""
        if self.overlay.queries is self.overlay.keys or self.overlay.at is not None:
            label, weights = self.overlay.row()
            return [(label, weights)]
        return list(zip(self.overlay.map.labels()[0], self.overlay.map.weights, strict=True))

    @property
    def left(self) -> float:
        return PAD + max(44.0, *(text_width(self._label(label), LABEL) for label, _ in self.rows)) + 20

    def _label(self, label: str) -> str:
        return shorten(clean(label), 22)

    def x(self, seconds: float) -> float:
        return self.left + WIDTH * seconds / self.seconds

    def middle(self, frame: int) -> float:
        return (self.ends[frame] + self.ends[frame + 1]) / 2

    def scene(self) -> Scene:
        y = PAD + 30
        items: list[Item] = []
        for part in (self._spectrogram, self._spikes, self._attention):
            made, height = part(y)
            items += made
            y += height
        items += self._axis(y + 4)
        width, height = self.left + WIDTH + PAD, y + 40 + PAD
        headline = self.overlay.headline()
        return Scene(width, height, headline, self._about(), (card(width, height), title(headline, width), *items))

    def _head(self, y: float, text: str) -> SceneText:
        return SceneText(self.left, y + HEAD - 8, text, LABEL, "quiet")

    def _spectrogram(self, y: float) -> tuple[list[Item], float]:
        spectrogram = self.overlay.image("spectrogram")
        assert spectrogram is not None
        values = spectrogram.T[::-1]  # high frequencies on top
        across = WIDTH / values.shape[1]
        colours = Ramp.between(values).rgbs(values)
        cells = Cells(self.left, y + HEAD, across, SPECTROGRAM / len(values), colours, image=True)
        top = f"{self.overlay.keys['top']:g} kHz"
        axis = [SceneText(self.left - 8, y + HEAD + 9, top, LABEL, "quiet", "end")]
        axis.append(SceneText(self.left - 8, y + HEAD + SPECTROGRAM, "0", LABEL, "quiet", "end"))
        what = "log-mel spectrogram (the scale of frequency is mel)"
        return [self._head(y, what), cells, *axis], HEAD + SPECTROGRAM + 8

    def _spikes(self, y: float) -> tuple[list[Item], float]:
        if self.ctc is None:
            return [], 0.0
        blank, *of_tokens = self.ctc
        top, height = y + HEAD + 14, SPIKES - 14

        def curve(values: np.ndarray, **look: object) -> Item:
            points = [(self.x(self.middle(i)), top + height * (1 - v)) for i, v in enumerate(values.tolist())]
            return polyline(points, **look)

        items: list[Item] = [self._head(y, "CTC: the probability of each token (grey: the blank)")]
        items.append(Rect(self.left, top, WIDTH, height, fill="box"))
        items.append(curve(blank, stroke="rim", line=1.2))
        spans = zip(self.starts, [*self.starts[1:], len(blank)], strict=False)  # until the next token begins
        for token, values, (begin, end) in zip(self.tokens, of_tokens, spans, strict=False):
            alone = np.where((np.arange(len(values)) >= begin) & (np.arange(len(values)) < end), values, 0.0)
            items.append(curve(alone, stroke="link", line=1.6, tip=f"{token}: {alone.max():.2f}"))
            middle = self.x(self.middle(int(alone.argmax())))
            items.append(SceneText(middle, top - 3, token, LABEL, anchor="middle"))
        for value in (0, 1):
            items.append(SceneText(self.left - 8, top + height * (1 - value) + 4, str(value), LABEL, "quiet", "end"))
        return items, HEAD + SPIKES + 8

    def _attention(self, y: float) -> tuple[list[Item], float]:
        weights = np.array([row for _, row in self.rows])
        top, ramp = y + HEAD, Ramp(0.0, max(float(weights.max()), 1e-6))
        spread = weights[:, self._frame_of_columns()]
        across = WIDTH / spread.shape[1]
        cells = Cells(self.left, top, across, ROW, ramp.rgbs(spread), image=True, row_tip=self._row_tip)
        items: list[Item] = [self._head(y, fitted(clean(self.overlay.map.title), LABEL, WIDTH)), cells]
        for row, (label, _) in enumerate(self.rows):
            items.append(SceneText(self.left - 18, top + (row + 0.7) * ROW, self._label(label), LABEL, anchor="end"))
        bottom = top + ROW * len(weights)
        items.append(colour_bar(self.left, bottom + 34, ramp, "attention weight", short_number))
        return items, HEAD + ROW * len(weights) + 8

    def _frame_of_columns(self) -> np.ndarray:
        """The encoder's frame at each of many equal stretches of time: those at the ends are shorter than others."""
        count = 8 * (len(self.ends) - 1)
        middles = (np.arange(count) + 0.5) * self.seconds / count
        return np.searchsorted(np.array(self.ends[1:-1]), middles, side="right")

    def _row_tip(self, row: int) -> str:
        label, weights = self.rows[row]
        return f"{clean(label)}: most at {self.middle(int(weights.argmax())):.2f} s"

    def _axis(self, y: float) -> list[Item]:
        step = next((tick for tick in TICKS if self.seconds / tick <= 12), TICKS[-1])
        marks = np.arange(0, self.seconds + step / 1000, step).tolist()
        items: list[Item] = []
        for mark in marks:
            items.append(polyline([(self.x(mark), y - 8), (self.x(mark), y - 3)], stroke="rim"))
            items.append(SceneText(self.x(mark), y + 8, f"{mark:g}", LABEL, "quiet", "middle"))
        items.append(SceneText(self.left + WIDTH, y + 24, "seconds", LABEL, "quiet", "end"))
        return items

    def times(self) -> list[dict[str, Any]]:
        """The times, in seconds, when CTC recognises each token or word, and to which it attends most."""
        if self.overlay.queries is self.overlay.keys:
            items = [(token, number, None) for number, token in enumerate(self.tokens)]
        else:
            firsts = [group[0] for group in self.overlay.query_groups]
            items = list(zip(self.overlay.map.labels()[0], firsts, self.overlay.map.weights, strict=True))
        rows = []
        for label, token, weights in items:
            row: dict[str, Any] = {"token": label}
            if token < len(self.starts):
                row["ctc"] = round(self.middle(self.starts[token]), 4)
            if weights is not None:
                row["attention"] = round(self.middle(int(weights.argmax())), 4)
            rows.append(row)
        return rows

    def _about(self) -> str:
        when = "; ".join(
            f"{row['token']} at {row.get('ctc', row.get('attention', 0)):.2f} seconds" for row in self.times()[:40]
        )
        return f"The spectrogram of a recording of {self.seconds:.2f} seconds, with the time of each token. {when}."

    def text(self, *, width: int, colour: Colour) -> str:
        """A line for each token, with its time as a mark on a bar."""
        lines = [shorten(self.overlay.headline(), width), f"0 to {self.seconds:.2f} seconds", ""]
        space = max(width - 36, 10)
        for row in self.times():
            time = row.get("ctc", row.get("attention", 0.0))
            at = min(int(space * time / self.seconds), space - 1)
            named = "  ".join(f"{kind} {row[kind]:.2f}" for kind in ("ctc", "attention") if kind in row)
            lines.append(f"{shorten(row['token'], 9):9} {'·' * at}█{'·' * (space - at - 1)} {named}")
        return "\n".join(lines) + "\n"


def frame_panels(overlay: Overlay) -> list[AnyPanel]:
    """The recording with the attention of every token to it, or of one element."""
    return [SoundPanel(overlay)]
