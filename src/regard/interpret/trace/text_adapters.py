"""Adapters for texts: translation, classification, language models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.decoding import Hypothesis
from regard.decoding.constraints import max_length
from regard.errors import UserError
from regard.interpret.explain.models import CONTINUATION_TOKENS, ClassVocabulary, Vocabulary
from regard.interpret.interventions import Applied, Intervention, hidden_elements
from regard.interpret.trace.adapter import Forward, Output, TraceAdapter, TraceSides
from regard.interpret.trace.tokens import TokenSide, TokenSpan, is_special
from regard.models.bert import TextClassBatch
from regard.packed import PackedTokens, SeqBatch
from regard.runs import LoadedRun
from regard.tasks import TraceSpec
from regard.tasks.classification import ClassificationTask
from regard.text import BOS, EOS, PAD, UNK, Tokenizer, encode_side, encode_stream
from regard.text.encode import MASK
from regard.text.tokenizers import join_tokens

EXTRA_TOKENS = 8  # a translation under an intervention has at most twice as many tokens as the original, and these


class TextAdapter(TraceAdapter):
    """An input that is a text: `given` are its tokens."""

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.source, self.target = loaded.tokenizers

    @property
    def outputs(self) -> Vocabulary:
        return self.target

    def hide(self, given: list[int], changes: Sequence[Intervention]) -> tuple[list[int], tuple[Applied, ...]]:
        """Replace tokens by the unknown token."""
        hidden = hidden_elements(changes, self.spec.input_sides, len(given))
        masked = list(given)
        for element in hidden.elements:
            if is_special(given[element], self.source):
                raise UserError(f"element {element} is a special token: only words can be hidden")
            masked[element] = UNK
        return masked, tuple(changes)


class TranslationAdapter(TextAdapter):
    """Translation by an encoder and a decoder."""

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.translator = loaded.translator()
        tag = self.translator.target_tag
        self.tag = (self.target.tag(tag),) if tag else ()

    def encode(self, text: str) -> tuple[list[int], bool]:
        (tokens,), (truncated,) = self.translator.encode([text])
        return tokens, truncated

    def decode(self, tokens: list[int], forward: Forward) -> Output:
        (best,) = self.translator.of_tokens([tokens])
        return best_output(best, self.target, len(self.tag))

    def encode_target(self, tokens: list[int], target: str) -> Output:
        limit = self.translator.budget.target(len(tokens))
        tag, lower = self.translator.target_tag, self.translator.lowercase
        (ids,), (truncated,) = encode_side(self.target, [target], tag=tag, max_len=limit, lowercase=lower)
        if truncated:
            raise UserError(f"the target is longer than the {limit - 1} tokens that this model can write here")
        return Output(tuple(ids), target, given=len(self.tag))

    def extend(self, tokens: list[int], prefix: Sequence[int], forward: Forward) -> Output:
        limit = self.translator.budget.target(len(tokens))
        prefix = [*self.tag, *prefix]
        check_prefix(prefix, self.target, limit, EOS)
        logits = forward(self.batch(tokens, [*prefix, PAD]))[-1]
        output = (*prefix, most_probable(logits, self.forbidden()))
        return Output(output, self.target.decode(output), given=len(prefix))

    def max_output(self, tokens: list[int], original: int) -> int:
        return min(max_length(self.translator.settings, len(tokens)), 2 * original + EXTRA_TOKENS)

    def batch(self, tokens: list[int], output: Sequence[int]) -> SeqBatch:
        return SeqBatch.from_lists([tokens], [list(output)], bos=BOS)

    def sides(self, tokens: list[int], output: Output) -> TraceSides:
        written = (
            TokenSpan(output.tokens[: output.given], self.target, given=True),
            TokenSpan(output.tokens[output.given :], self.target),
        )
        inputs = TokenSide((TokenSpan([BOS, *output.tokens[:-1]], self.target),))
        return TraceSides(TokenSide((TokenSpan(tokens, self.source),)), inputs, TokenSide(written))

    def forbidden(self) -> list[int]:
        return self.translator.forbidden


class ClassificationAdapter(TextAdapter):
    """Classification: the text is read as a whole, and the output is one class."""

    encoder_only, extends = True, False

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        assert isinstance(loaded.task, ClassificationTask)
        self.task, self.run = loaded.task, loaded.run
        self.classes = ClassVocabulary(loaded.run.classes)

    @property
    def outputs(self) -> Vocabulary:
        return self.classes

    def encode(self, text: str) -> tuple[list[int], bool]:
        (tokens,), (truncated,) = self.task.encode(self.run, [text])
        return tokens, truncated

    def decode(self, tokens: list[int], forward: Forward) -> Output:
        best = int(forward(self.batch(tokens, ()))[0].argmax())
        return Output((best,), self.run.classes[best])

    def encode_target(self, tokens: list[int], target: str) -> Output:
        (label,) = self.task.class_ids(self.run, [target], "the target")
        return Output((label,), self.run.classes[label])

    def extend(self, tokens: list[int], prefix: Sequence[int], forward: Forward) -> Output:
        raise UserError("a classifier predicts one class: its output cannot be continued")

    def max_output(self, tokens: list[int], original: int) -> int:
        return original

    def batch(self, tokens: list[int], output: Sequence[int]) -> TextClassBatch:
        return TextClassBatch.from_lists([tokens])

    def sides(self, tokens: list[int], output: Output) -> TraceSides:
        source = TokenSide((TokenSpan(tokens, self.source),))
        one = TokenSide((TokenSpan([BOS], self.source),))  # the position that the class is predicted at
        return TraceSides(source, one, TokenSide((TokenSpan(output.tokens, self.classes),)))

    def forbidden(self) -> list[int]:
        return []


class DecoderOnlyAdapter(TranslationAdapter):
    """Translation by a decoder alone: source and target are one sequence."""

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, replace(spec, input_sides=("inputs",), joined=True))

    def sides(self, tokens: list[int], output: Output) -> TraceSides:
        source = TokenSpan(tokens, self.source, given=True)
        begin = TokenSpan([BOS, *output.tokens[: output.given]], self.target, given=True)
        written = TokenSpan(output.tokens[output.given :], self.target)
        inputs = TokenSpan([BOS, *output.tokens[:-1]], self.target)
        return TraceSides(
            TokenSide(),
            TokenSide((source, inputs)),
            TokenSide((TokenSpan(tokens[1:], self.source, given=True), begin, written)),
        )


class GenerationAdapter(TextAdapter):
    """Language modelling: prompt and continuation are one sequence."""

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.generator = loaded.generator(method="beam", beam=1)
        self.last = None if self.generator.stream else EOS  # in a stream, EOS ends a line, and more may follow

    def encode(self, text: str) -> tuple[list[int], bool]:
        return self.generator.read(text)

    def decode(self, tokens: list[int], forward: Forward) -> Output:
        best = self.generator.after(tokens, CONTINUATION_TOKENS)
        output = (*best.tokens, EOS) if best.finished else best.tokens
        return Output(output, self.generator.spell(best.tokens), best.score)

    def encode_target(self, tokens: list[int], target: str) -> Output:
        text = target.lower() if self.generator.lowercase else target
        ids = encode_stream(self.target, text) if self.generator.stream else self.target.encode(text)
        limit = self.generator.longest - len(tokens) + 1
        if not 1 <= len(ids) <= limit:
            raise UserError(f"the target has {len(ids)} tokens; after this text the model can write 1 to {limit}")
        return Output(tuple(ids), target)

    def extend(self, tokens: list[int], prefix: Sequence[int], forward: Forward) -> Output:
        check_prefix(prefix, self.target, self.generator.longest - len(tokens) + 1, self.last)
        logits = forward(self.batch(tokens, [*prefix, PAD]))[-1]
        output = (*prefix, most_probable(logits, self.forbidden()))
        return Output(output, self.generator.spell(output), given=len(prefix))

    def max_output(self, tokens: list[int], original: int) -> int:
        return original

    def batch(self, tokens: list[int], output: Sequence[int]) -> SeqBatch:
        inputs = PackedTokens.from_lists([[*tokens, *output[:-1]]])
        return SeqBatch(PackedTokens.from_lists([[]]), inputs, PackedTokens.from_lists([[*tokens[1:], *output]]).ids)

    def sides(self, tokens: list[int], output: Output) -> TraceSides:
        before = TokenSpan([*tokens[1:], *output.tokens[: output.given]], self.target, given=True)
        written = TokenSpan(output.tokens[output.given :], self.target)
        inputs = TokenSide((TokenSpan(tokens, self.target, given=True), TokenSpan(output.tokens[:-1], self.target)))
        return TraceSides(TokenSide(), inputs, TokenSide((before, written)))

    def forbidden(self) -> list[int]:
        return self.generator.forbidden


class FillAdapter(TextAdapter):
    """Masked language modelling: the text is read as a whole, and every position is predicted."""

    encoder_only, extends = True, False

    def __init__(self, loaded: LoadedRun, spec: TraceSpec) -> None:
        super().__init__(loaded, spec)
        self.filler = loaded.filler()
        self.mask = self.source.tag(MASK)

    def encode(self, text: str) -> tuple[list[int], bool]:
        return self.filler.encode(text), False

    def decode(self, tokens: list[int], forward: Forward) -> Output:
        logits = forward(self.batch(tokens, tokens))
        filled = [
            most_probable(row, self.forbidden()) if token == self.mask else token
            for token, row in zip(tokens, logits, strict=True)
        ]
        words = [token for token in filled if not is_special(token, self.source)]
        return Output(tuple(filled), join_tokens(self.source.token_texts(words)))

    def encode_target(self, tokens: list[int], target: str) -> Output:
        raise UserError("a masked language model shows its own predictions: it takes no target")

    def extend(self, tokens: list[int], prefix: Sequence[int], forward: Forward) -> Output:
        raise UserError("a masked language model predicts all masks at once: its output cannot be continued")

    def max_output(self, tokens: list[int], original: int) -> int:
        return original

    def batch(self, tokens: list[int], output: Sequence[int]) -> SeqBatch:
        packed = PackedTokens.from_lists([tokens])
        return SeqBatch(packed, packed, packed.ids)

    def sides(self, tokens: list[int], output: Output) -> TraceSides:
        side = TokenSide((TokenSpan(tokens, self.source),))
        pairs = zip(output.tokens, tokens, strict=True)
        target = TokenSide(tuple(TokenSpan([token], self.source, given=read != self.mask) for token, read in pairs))
        return TraceSides(side, side, target)

    def forbidden(self) -> list[int]:
        return sorted({*self.source.forbidden(), EOS})


def best_output(best: Hypothesis, tokenizer: Tokenizer, given: int) -> Output:
    tokens = (*best.tokens, EOS) if best.finished else best.tokens
    return Output(tokens, tokenizer.decode(best.tokens), best.score, given)


def most_probable(logits: Tensor, forbidden: Sequence[int]) -> int:
    """Choose the most probable token that is not forbidden, from logits [V]."""
    allowed = logits.clone()
    allowed[torch.tensor(list(forbidden), dtype=torch.long, device=logits.device)] = float("-inf")
    return int(allowed.argmax())


def check_prefix(ids: Sequence[int], tokenizer: Tokenizer, limit: int, last: int | None) -> None:
    """Refuse an output prefix that no token can follow: unknown ids, an ended output, or one that is too long."""
    if any(not 0 <= token < len(tokenizer) for token in ids):
        raise UserError(f"there is no token {max(ids)}: this model has {len(tokenizer)}")
    if last in ids:
        raise UserError("the output so far is finished: no token follows EOS")
    if len(ids) >= limit:
        raise UserError(f"the output so far has {len(ids)} tokens, and the model can write {limit} here")
