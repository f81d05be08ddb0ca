"""The adapter for texts that are written from feature vectors: captions of images, texts of recordings."""

from __future__ import annotations

from collections.abc import Sequence

from regard.decoding.constraints import max_length
from regard.errors import UserError
from regard.interpret.explain.models import Vocabulary
from regard.interpret.interventions import Applied, Intervention, hidden_elements
from regard.interpret.trace.adapter import Forward, Output, TraceAdapter, TraceSides
from regard.interpret.trace.text_adapters import EXTRA_TOKENS, best_output, check_prefix, most_probable
from regard.interpret.trace.tokens import TokenSide, TokenSpan
from regard.packed import FeatureBatch
from regard.runs import LoadedRun
from regard.tasks import TraceSpec
from regard.tasks.axes import Inspection, refuse_edges
from regard.text import BOS, EOS, PAD


class FeatureTextAdapter(TraceAdapter):
    """An input that is read as feature vectors: `given` is an `Inspection` whose content are its features [n, F]."""

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.run, self.task, self.writer = loaded.run, loaded.feature_task(), loaded.writer()
        self.target = loaded.tokenizers[1]

    @property
    def outputs(self) -> Vocabulary:
        return self.target

    def encode(self, text: str) -> tuple[Inspection, bool]:
        given = self.task.read_argument(text)
        return Inspection(self.task.features(given), self.task.axis(given)), False

    def hide(self, given: Inspection, changes: Sequence[Intervention]) -> tuple[Inspection, tuple[Applied, ...]]:
        hidden = hidden_elements(changes, self.spec.input_sides, len(given.axis))
        refuse_edges(hidden, given.axis.kind)
        return Inspection(self.task.without(given.content, hidden.elements), given.axis), tuple(changes)

    def decode(self, given: Inspection, forward: Forward) -> Output:
        ((best, *_),) = (answer.hypotheses for answer in self.writer([given.content]))
        return best_output(best, self.target, 0)

    def encode_target(self, given: Inspection, target: str) -> Output:
        (tokens,), (truncated,) = self.task.encode_texts(self.run, [target])
        if truncated:
            raise UserError(f"the target is longer than the {self.writer.longest - 1} tokens that this model can write")
        return Output(tuple(tokens), target)

    def extend(self, given: Inspection, prefix: Sequence[int], forward: Forward) -> Output:
        check_prefix(prefix, self.target, self.writer.longest, EOS)
        logits = forward(self.batch(given, [*prefix, PAD]))[-1]
        output = (*prefix, most_probable(logits, self.forbidden()))
        return Output(output, self.target.decode(output), given=len(prefix))

    def max_output(self, given: Inspection, original: int) -> int:
        return min(max_length(self.writer.settings, len(given.content)), 2 * original + EXTRA_TOKENS)

    def batch(self, given: Inspection, output: Sequence[int]) -> FeatureBatch:
        return FeatureBatch.from_lists([given.content], [list(output)], bos=BOS)

    def sides(self, given: Inspection, output: Output) -> TraceSides:
        written = (
            TokenSpan(output.tokens[: output.given], self.target, given=True),
            TokenSpan(output.tokens[output.given :], self.target),
        )
        inputs = TokenSide((TokenSpan([BOS, *output.tokens[:-1]], self.target),))
        return TraceSides(given.axis, inputs, TokenSide(written))

    def forbidden(self) -> list[int]:
        return self.target.forbidden()
