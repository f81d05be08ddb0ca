"""Progress reports of training: a live bar in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from regard.errors import UserError, printable

PLAIN_EVERY = 10.0  # seconds between plain progress lines


class Reporter:
    """Reports nothing: the base class of the others, and what --quiet uses."""

    members = "pairs"  # what the data are made of: pairs, documents, lines of a stream, images
    targets = "tokens"  # what steps count (`Task.targets`)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @property
    def held_out(self) -> str:
        return "text" if self.members in ("documents", "lines") else self.members

    def say(self, line: str) -> None:
        """Report a line of text."""

    def counted(self, what: str, count: int) -> None:
        """Report how many pairs, documents or lines of a corpus were read so far."""

    def start(self, step: int, steps: int) -> None:
        """Report that training starts or resumes after `step`."""

    def step(self, step: int, tokens: int) -> None:
        """Report a finished step; `tokens` is the number of targets so far."""

    def measured(self, step: int, kind: str, numbers: dict[str, Any]) -> None:
        """Report measurements that were written to the metrics."""

    def samples(self, samples: list[dict[str, str]]) -> None:
        """Report outputs for held-out examples."""


class ErrorTolerantStream:
    """A stream whose errors are ignored, so that training goes on when the terminal or the reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class PlainReporter(Reporter):
    """Reports in plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = ErrorTolerantStream(stream if stream is not None else sys.stderr)
        self.loss = float("nan")
        self.shown = time.monotonic()

    def counted(self, what: str, count: int) -> None:
        if time.monotonic() - self.shown >= PLAIN_EVERY / 2:
            self.shown = time.monotonic()
            self.say(f"{what}: {count:,} {self.members} so far")

    def say(self, line: str) -> None:
        print(printable(line), file=self.stream, flush=True)

    def start(self, step: int, steps: int) -> None:
        self.steps, self.begun, self.first, self.shown = steps, time.monotonic(), step, time.monotonic()
        self.tokens: int | None = None
        if step:
            self.say(f"resuming after step {step:,} of {steps:,}")

    def step(self, step: int, tokens: int) -> None:
        note = self._pace(step, tokens)
        if time.monotonic() - self.shown >= PLAIN_EVERY and step > self.first:
            self.shown = time.monotonic()
            left = (self.shown - self.begun) / max(step - self.first, 1) * (self.steps - step)
            self.say(f"step {step:,} of {self.steps:,}  {note}  {_clock(left)} left")

    def _pace(self, step: int, tokens: int) -> str:
        """The last loss, if any, and targets per second, without the first step, which may be slow."""
        if self.tokens is None:
            self.tokens, self.begun, self.first = tokens, time.monotonic(), step
        loss = "" if self.loss != self.loss else f"loss {self.loss:.3f}  "
        return f"{loss}{(tokens - self.tokens) / max(time.monotonic() - self.begun, 1e-9):,.0f} {self.targets}/s"

    def measured(self, step: int, kind: str, numbers: dict[str, Any]) -> None:
        if kind == "train":
            self.loss = numbers["loss"]
        elif kind == "stop":
            validations = f"{numbers['validations']} validations on the held-out {self.held_out}"
            self.say(f"stopped after step {step:,}: nothing better in {validations}")
        else:
            self.say(f"held-out {self.held_out} {_validation_line(step, numbers)}")

    def samples(self, samples: list[dict[str, str]]) -> None:
        for sample in samples[:1]:
            self.say(f"    {sample['source']}\n    → {sample['output']}")


class LiveReporter(PlainReporter):
    """A progress bar, with lines above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__()
        self.bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=self.stream),  # type: ignore[arg-type]  # it forwards every attribute of a stream
            refresh_per_second=4,
        )

    def __enter__(self) -> Reporter:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        self.bar.console.print(printable(line), markup=False, highlight=False)

    def start(self, step: int, steps: int) -> None:
        super().start(step, steps)
        self.task = self.bar.add_task("", total=steps, completed=step, note="")

    def step(self, step: int, tokens: int) -> None:
        self.bar.update(self.task, completed=step, note=self._pace(step, tokens))


class TensorBoardWriter:
    """Writes the measurements for TensorBoard, if a folder is given."""

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "training.tensorboard needs one more package: pip install 'regard[tensorboard]'"
                ) from None
            self.writer = SummaryWriter(str(folder))

    def write(self, step: int, kind: str, numbers: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.writer.add_scalar(f"{kind}/{name}", value, step)
            self.writer.flush()


def pick(quiet: bool) -> Reporter:
    """Choose the reporter for stderr: a live bar in a terminal, plain lines elsewhere."""
    if quiet:
        return Reporter()
    return LiveReporter() if sys.stderr.isatty() else PlainReporter()


def figures(numbers: dict[str, Any], brief: bool = False) -> str:
    """Format measurements: `loss 3.512, perplexity 33.51, BLEU 10.20`; if `brief`, without those implied by others.

    The share of exact outputs is the accuracy where outputs are not texts.

    >>> figures({"loss": 1.0, "perplexity": 2.718, "exact": 50.0}, brief=True)
    'loss 1.000, accuracy 50.0 %'
    """
    formats = {
        "loss": "loss {:.3f}",
        "perplexity": "perplexity {:.2f}",
        "wer": "WER {:.2f} %",
        "bleu": "BLEU {:.2f}",
        "exact": "exact {:.1f} %" if "bleu" in numbers else "accuracy {:.1f} %",
        "bits_per_byte": "{:.3f} bits a byte",
        "rmse": "RMSE {:.4g}",
        "mae": "MAE {:.4g}",
        "r2": "R2 {:.3f}",
    }
    omitted = ({"perplexity", "exact"} if "bleu" in numbers else {"perplexity"}) if brief else set()
    parts = [form.format(numbers[name]) for name, form in formats.items() if name in numbers and name not in omitted]
    return ", ".join(parts) or "not validated"


def which_weights(metadata: dict[str, Any]) -> str:
    """Describe the weights that a validation measured."""
    step, kind = int(metadata.get("step", 0)), str(metadata.get("weights", "step"))
    if kind.startswith("average"):
        return f"the {kind.replace('average of', 'average of the last')} snapshots, up to step {step:,}"
    when = f"step {step:,}" if step else "the starting weights, step 0"
    return when if kind == "step" or not step else f"{when} ({kind})"


def _validation_line(step: int, numbers: dict[str, Any]) -> str:
    kept = ", the best so far" if numbers["better"] and step else ""
    which = "" if numbers["weights"] == "step" or not step else f" ({numbers['weights']})"
    when = f"after step {step:,}" if step else "before training (step 0)"
    return f"{when}{which}: {figures(numbers)}{kept}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
