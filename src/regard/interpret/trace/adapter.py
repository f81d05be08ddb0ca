"""The interface of trace adapters: what a model reads and writes in a trace.

An adapter reads the input, obtains the output (the model's own, a given one, or one more token), makes the batch of one
teacher-forced pass, and says which elements the positions of that pass are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.errors import UserError
from regard.interpret.explain.models import Vocabulary
from regard.interpret.interventions import Applied, Intervention
from regard.interpret.trace.tokens import TokenSide
from regard.runs import LoadedRun
from regard.tasks import TraceSpec
from regard.tasks.axes import Axis
from regard.text import EOS

Forward = Callable[[Any], Tensor]  # one forward pass over a batch: logits [T, V]


@dataclass(frozen=True)
class Output:
    """An output: its tokens (with EOS, if finished), how many of them were given, its text and its score.

    Where classes or actions are predicted, tokens are their ids; where numbers are predicted, there are none.
    """

    tokens: tuple[int, ...]
    text: str
    score: float | None = None  # score of the search; None: computed from the log-probabilities of the pass
    given: int = 0


@dataclass(frozen=True)
class TraceSides:
    """The axes of one pass. The logits have one row for each token of `target`."""

    source: TokenSide | Axis
    inputs: TokenSide | Axis
    target: TokenSide

    @property
    def joined(self) -> bool:
        """Whether input and output are one sequence."""
        return not len(self.source)

    def side(self, name: str) -> TokenSide | Axis:
        """The axis of this name."""
        sides: dict[str, TokenSide | Axis] = {"source": self.source, "inputs": self.inputs, "target": self.target}
        return sides[name]


class TraceAdapter(ABC):
    """Input and output of one run, for traces. `given` is the input as `encode` returns it."""

    last: int | None = EOS  # the token that ends an output; None: nothing does
    encoder_only = False  # whether the output is read off the encoder
    extends = True  # whether an output is written token by token
    has_score = True  # whether outputs have a score besides their log-probability
    has_lens = True  # whether the logit lens applies to the residual stream

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        self.spec = spec

    @property
    @abstractmethod
    def outputs(self) -> Vocabulary:
        """The meaning of the columns of the logits: tokens of the target, classes, or the names of numbers."""

    @abstractmethod
    def encode(self, text: str) -> tuple[Any, bool]:
        """Read the input, and say whether it was truncated."""

    @abstractmethod
    def hide(self, given: Any, changes: Sequence[Intervention]) -> tuple[Any, tuple[Applied, ...]]:
        """The input without the elements that interventions hide, and the interventions to apply to the model."""

    @abstractmethod
    def decode(self, given: Any, forward: Forward) -> Output:
        """Let the model write its own output."""

    @abstractmethod
    def encode_target(self, given: Any, target: str) -> Output:
        """Make an output from a given text."""

    def extend(self, given: Any, prefix: Sequence[int], forward: Forward) -> Output:
        """Extend an output prefix by the most probable token."""
        raise UserError("this model predicts its output at once: it cannot be continued")

    def max_output(self, given: Any, original: int) -> int:
        """The maximum number of tokens of an output under an intervention; `original`: tokens of the original one."""
        return original

    @abstractmethod
    def batch(self, given: Any, output: Sequence[int]) -> Any:
        """Make the batch of one teacher-forced pass."""

    @abstractmethod
    def sides(self, given: Any, output: Output) -> TraceSides:
        """The elements at the positions of that pass."""

    def output_logits(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """The logits [T, V] of the tokens of an output, from what the model computes."""
        return logits

    def numbers(self, logits: Tensor) -> list[list[float]] | None:
        """The numbers that a row of the model's output predicts, for each row; None: the rows are logits."""
        return None

    def forbidden(self) -> list[int]:
        """Ids that the search never writes."""
        return []
