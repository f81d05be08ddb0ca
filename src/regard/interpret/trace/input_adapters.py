"""Adapters for inputs other than texts: predictions for images and graphs, decisions in an environment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from regard.errors import UserError
from regard.interpret.explain.models import ClassVocabulary, Vocabulary
from regard.interpret.interventions import Applied, Intervention, MaskKeys, hidden_elements
from regard.interpret.trace.adapter import Forward, Output, TraceAdapter, TraceSides
from regard.interpret.trace.tokens import TokenSide, TokenSpan
from regard.runs import LoadedRun
from regard.tasks import TraceSpec
from regard.tasks.actor import Actor
from regard.tasks.axes import Axis, InspectableTask, Inspection
from regard.tasks.classes import ClassTask
from regard.tasks.decisions import DecisionTask


def run_lengths(texts: Sequence[str]) -> str:
    """Texts with a count for those that are repeated.

    >>> run_lengths(["left", "left", "right"])
    'left × 2, right'
    """
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return ", ".join(text if count == 1 else f"{text} × {count}" for text, count in runs)


class InspectionAdapter(TraceAdapter):
    """An input with elements that its task can hide: `given` is an `Inspection` whose content is a batch."""

    extends, has_score, has_lens = False, False, False
    last = None

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.run = loaded.run
        self.task: Any = loaded.task
        self.is_numeric = loaded.task.output == "numbers"
        count = len(loaded.run.scales)
        numbers = ["number"] if count == 1 else [f"number {n}" for n in range(1, count + 1)]
        self.classes = ClassVocabulary(numbers if self.is_numeric else loaded.run.classes)

    @property
    def outputs(self) -> Vocabulary:
        return self.classes

    def hide(self, given: Inspection, changes: Sequence[Intervention]) -> tuple[Any, tuple[Applied, ...]]:
        hidden = hidden_elements(changes, self.spec.input_sides, len(given.axis))
        if not hidden.elements and not hidden.edges:
            return given, tuple(changes)
        without = self.task.hide(given, hidden)
        masked = (MaskKeys(without.unseen),) if without.unseen else ()
        return without, (*changes, *masked)

    def batch(self, given: Inspection, output: Sequence[int]) -> Any:
        return given.content


class PredictionAdapter(InspectionAdapter):
    """One class, or numbers, for an image, a graph or a node of one."""

    encoder_only = True
    task: InspectableTask

    def encode(self, text: str) -> tuple[Inspection, bool]:
        return self.task.inspect(self.run, self.task.read_argument(text)), False

    def decode(self, given: Inspection, forward: Forward) -> Output:
        row = forward(given.content)[0].cpu()
        return Output(() if self.is_numeric else (int(row.argmax()),), str(self.task.prediction(self.run, row)))

    def encode_target(self, given: Inspection, target: str) -> Output:
        if not isinstance(self.task, ClassTask):
            raise UserError("a model that predicts numbers takes no target")
        (label,) = self.task.class_ids(self.run, [target], "the target")
        return Output((label,), target)

    def sides(self, given: Inspection, output: Output) -> TraceSides:
        return TraceSides(given.axis, TokenSide(), TokenSide((TokenSpan(output.tokens, self.classes),)))

    def numbers(self, logits: Tensor) -> list[list[float]] | None:
        if not self.is_numeric:
            return None
        return [list(self.task.prediction(self.run, row).numbers) for row in logits.cpu()]


class DecisionAdapter(InspectionAdapter):
    """The action at each step of an episode, which the model plays first."""

    task: DecisionTask

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.actor = Actor(loaded.run, loaded.module, loaded.device)
        self.is_numeric = self.actor.settings.actions == "continuous"

    def encode(self, text: str) -> tuple[Inspection, bool]:
        return self.task.inspect(self.actor, text), False

    def decode(self, given: Inspection, forward: Forward) -> Output:
        rows = forward(given.content).cpu()
        if self.is_numeric:
            return Output((), "; ".join(" ".join(f"{x:.2f}" for x in row) for row in rows.tolist()))
        chosen = tuple(rows.argmax(-1).tolist())
        return Output(chosen, run_lengths(self.classes.token_texts(chosen)))

    def encode_target(self, given: Inspection, target: str) -> Output:
        raise UserError("a model of decisions shows its own actions: it takes no target")

    def sides(self, given: Inspection, output: Output) -> TraceSides:
        return TraceSides(Axis("tokens"), given.axis, TokenSide((TokenSpan(output.tokens, self.classes),)))

    def numbers(self, logits: Tensor) -> list[list[float]] | None:
        return logits.tolist() if self.is_numeric else None
