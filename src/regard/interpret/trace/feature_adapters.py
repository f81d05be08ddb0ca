"""The adapter for texts that are written from feature vectors: captions of images, texts of recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from regard.decoding.constraints import max_length
from regard.decoding.ctc import align
from regard.errors import UserError
from regard.interpret.explain.models import Vocabulary
from regard.interpret.interventions import Applied, Intervention, hidden_elements
from regard.interpret.trace.adapter import Forward, Output, TraceAdapter, TraceSides
from regard.interpret.trace.text_adapters import EXTRA_TOKENS, best_output, check_prefix, most_probable
from regard.interpret.trace.tokens import TokenSide, TokenSpan
from regard.packed import FeatureBatch
from regard.runs import LoadedRun
from regard.tasks import TraceSpec
from regard.tasks.axes import Inspection
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
        return self.task.inspect(self.task.read_argument(text)), False

    def hide(self, given: Inspection, changes: Sequence[Intervention]) -> tuple[Inspection, tuple[Applied, ...]]:
        hidden = hidden_elements(changes, self.spec.input_sides, len(given.axis))
        return self.task.hide(given, hidden), tuple(changes)

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
        return [*self.target.forbidden(), *self.writer.settings.suppress_ids]


class SpellingAdapter(FeatureTextAdapter):
    """Speech recognition with CTC alone, which gives each frame a distribution over tokens and a blank.

    The logits of a token are those of the frame where it begins on the most likely path of the text.
    """

    encoder_only = True
    extends, has_score, has_lens = False, False, False
    last = None

    def decode(self, given: Inspection, forward: Forward) -> Output:
        written = super().decode(given, forward)
        return replace(written, tokens=tuple(token for token in written.tokens if token != EOS))

    def encode_target(self, given: Inspection, target: str) -> Output:
        output = super().encode_target(given, target)
        tokens = tuple(token for token in output.tokens if token != EOS)
        if len(tokens) + sum(one == other for one, other in pairwise(tokens)) > len(given.axis):
            raise UserError(f"the target needs more than the {len(given.axis)} frames of the recording")
        return replace(output, tokens=tokens)

    def extend(self, given: Inspection, prefix: Sequence[int], forward: Forward) -> Output:
        raise UserError("a model with CTC alone writes its output at once: it cannot be continued")

    def batch(self, given: Inspection, output: Sequence[int]) -> FeatureBatch:
        return super().batch(given, [EOS])

    def output_logits(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        return logits[align(logits.float().log_softmax(-1), output)]

    def sides(self, given: Inspection, output: Output) -> TraceSides:
        return TraceSides(given.axis, TokenSide(), TokenSide((TokenSpan(output.tokens, self.target),)))
