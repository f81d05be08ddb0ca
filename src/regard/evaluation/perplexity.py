"""How well a language model foresees text: loss, perplexity and bits per byte, taken in windows that overlap.

A model sees at most `context` tokens at once. Text longer than that is read in windows moved on by `stride` tokens, and
of each window only the tokens that no window before it has scored are counted: every token is scored once, and, but for
those of the first window, with at least context - stride tokens before it to go by. A small stride is fairer to the
model and slower; stride = context is the loss that training watches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from regard.data.packing import sentence_batches
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, UNK, Tokenizer, encode_stream


@dataclass(frozen=True)
class TextScore:
    """What a model makes of a text. Perplexity is by token, so it compares runs of one vocabulary; bits per byte any.

    loss = nats / tokens; perplexity = exp(loss); bits per byte = nats / ln 2 / bytes. Words that a vocabulary does not
    have are all one token, easy to foresee, which spells nothing: where there are any, there are no bits per byte.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None  # None where some of the text is unknown
    tokens: int  # scored, end marks of documents counted
    bytes: int  # of the text that they spell, in UTF-8
    unknown: int = 0  # tokens that stand for words the vocabulary does not have

    @classmethod
    def of(cls, nats: float, tokens: int, bytes: int, unknown: int = 0) -> TextScore:
        """
        >>> TextScore.of(8 * math.log(2), tokens=4, bytes=16)
        TextScore(loss=1.3862943611198906, perplexity=4.0, bits_per_byte=0.5, tokens=4, bytes=16, unknown=0)
        """
        loss = nats / tokens
        bits = None if unknown else nats / math.log(2) / max(bytes, 1)
        return cls(loss, math.exp(min(loss, 80)), bits, tokens, bytes, unknown)


@dataclass(frozen=True)
class TextWindow:
    """What the model reads, what should come next at each place, and how many places at the end are counted."""

    inputs: list[int]
    labels: list[int]
    counted: int


def windows(tokens: Sequence[int], context: int, stride: int, begin: int | None = None) -> Iterator[TextWindow]:
    """The windows over a run of tokens, of which the first is only read.

    With `begin`, that token stands first in every window, as documents and the pieces of long ones do in training.

    >>> [(w.inputs, w.counted) for w in windows([1, 5, 6, 7, 8, 9], context=3, stride=2)]
    [([1, 5, 6], 3), ([6, 7, 8], 2)]
    """
    places, scored = len(tokens) - 1, 0  # places: inputs, each with the token after it for its label
    for start in range(0, max(places - (context - stride), min(places, 1)), stride):
        end = min(start + context, places)
        inputs = list(tokens[start:end])
        if begin is not None:
            inputs[0] = begin
        yield TextWindow(inputs, list(tokens[start + 1 : end + 1]), end - scored)
        scored = end


@dataclass(frozen=True)
class WindowBatches:
    """Text laid out in batches of windows, for any model of its vocabulary to be measured on."""

    batches: list[SeqBatch]
    bytes: int  # of the text that is scored

    @classmethod
    def out(
        cls,
        tokenizer: Tokenizer,
        documents: Sequence[str],
        *,
        context: int,
        stride: int,
        stream: bool,
        batch_tokens: int = 4096,
    ) -> WindowBatches:
        if not 1 <= stride <= context:
            raise UserError(f"a stride of {stride} for a context of {context} tokens: it must be from 1 to the context")
        found, size = _windows(tokenizer, documents, context, stride, stream)
        if not found:
            raise UserError("no text to score")
        groups = sentence_batches([len(window.inputs) for window in found], batch_tokens)
        return cls([_batch([found[i] for i in group]) for group in groups], size)

    def score(
        self, model: SequenceModel, device: torch.device | str, progress: Callable[[int], None] | None = None
    ) -> TextScore:
        nats, tokens, unknown = 0.0, 0, 0
        with torch.no_grad():
            for batch in self.batches:
                nats += model(batch.to(device)).item()
                tokens += batch.num_targets
                unknown += int((batch.labels == UNK)[batch.loss_mask].sum())
                if progress is not None:
                    progress(batch.num_targets)
        return TextScore.of(nats, tokens, self.bytes, unknown)


def text_perplexity(
    model: SequenceModel,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    context: int,
    stride: int,
    stream: bool,
    device: torch.device | str,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> TextScore:
    """Score documents, each from its begin mark to its end mark; or, as a `stream`, all of them as one run of text.

    A stream's first token is not scored: nothing predicts it. `batch_tokens` are run at once; `progress` is called with
    the number of tokens just scored. The model is run as it is: put it into evaluation mode first.
    """
    laid = WindowBatches.out(
        tokenizer, documents, context=context, stride=stride, stream=stream, batch_tokens=batch_tokens
    )
    return laid.score(model, device, progress)


def _windows(
    tokenizer: Tokenizer, documents: Sequence[str], context: int, stride: int, stream: bool
) -> tuple[list[TextWindow], int]:
    """All windows, and the bytes of the text that is scored."""
    size = sum(len(document.encode()) for document in documents)
    if stream:
        run = encode_stream(tokenizer, documents)
        unscored = len(tokenizer.decode(run[:1]).encode())
        return list(windows(run, context, stride)), size - unscored
    runs = [[BOS, *pieces, EOS] for pieces in tokenizer.encode_batch(list(documents))]
    return [window for run in runs for window in windows(run, context, stride, begin=BOS)], size


def _batch(group: Sequence[TextWindow]) -> SeqBatch:
    """Windows as pairs with empty sources."""
    inputs = PackedTokens.from_lists([window.inputs for window in group])
    labels = [label for window in group for label in window.labels]
    counted = [n >= len(w.inputs) - w.counted for w in group for n in range(len(w.inputs))]
    return SeqBatch(PackedTokens.from_lists([[] for _ in group]), inputs, torch.tensor(labels), torch.tensor(counted))
