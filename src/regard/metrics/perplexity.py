"""Perplexity of text: loss, perplexity and bits per byte, computed in overlapping windows.

A model reads at most `context` tokens at once. Longer text is read in windows that advance by `stride` tokens, and each
window scores only the tokens that no earlier window has scored. So every token is scored once and, except in the first
window, after at least context - stride tokens. A small stride gives the model more context and is slower; stride =
context gives the loss that training reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from regard import distributed
from regard.data.packing import sentence_batches
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, UNK, Tokenizer, encode_stream


@dataclass(frozen=True)
class TextScore:
    """Scores of a text. Perplexity is per token and compares runs of one vocabulary; bits per byte compare all runs.

    loss = nats / tokens; perplexity = exp(loss); bits per byte = nats / ln 2 / bytes. The unknown token spells nothing
    and is easy to predict: where a text has unknown words, it has no bits per byte.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None  # None where the text has unknown words
    tokens: int  # scored tokens, including the EOS of each document
    bytes: int  # length of the scored text in UTF-8
    unknown: int = 0  # unknown tokens

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
    """The input tokens of a window, the next token at each position, and how many positions at the end are scored."""

    inputs: list[int]
    labels: list[int]
    scored: int


def windows(tokens: Sequence[int], context: int, stride: int, begin: int | None = None) -> Iterator[TextWindow]:
    """Yield the windows over a sequence of tokens; its first token is read and not scored.

    `begin` replaces the first token of every window: in training, documents and the chunks of long ones begin with BOS.

    >>> [(w.inputs, w.scored) for w in windows([1, 5, 6, 7, 8, 9], context=3, stride=2)]
    [([1, 5, 6], 3), ([6, 7, 8], 2)]
    """
    positions, scored = len(tokens) - 1, 0  # every input has the following token as its label
    for start in range(0, max(positions - (context - stride), min(positions, 1)), stride):
        end = min(start + context, positions)
        inputs = list(tokens[start:end])
        if begin is not None:
            inputs[0] = begin
        yield TextWindow(inputs, list(tokens[start + 1 : end + 1]), end - scored)
        scored = end


@dataclass(frozen=True)
class WindowBatches:
    """Batches of windows over a text, for any model with its vocabulary."""

    batches: list[SeqBatch]
    bytes: int  # length of the scored text

    @classmethod
    def of(
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
        spans, size = _windows(tokenizer, documents, context, stride, stream)
        if not spans:
            raise UserError("no text to score")
        groups = sentence_batches([len(window.inputs) for window in spans], batch_tokens)
        return cls([_batch([spans[i] for i in group]) for group in groups], size)

    def score(
        self, model: SequenceModel, device: torch.device | str, progress: Callable[[int], None] | None = None
    ) -> TextScore:
        """Score the text with a model; several processes divide the batches."""

        def nats(batch: SeqBatch) -> float:
            loss = model(batch.to(device)).item()
            if progress is not None:
                progress(batch.num_targets)
            return loss

        with torch.no_grad():
            total = sum(distributed.spread(nats, self.batches))
        tokens = sum(batch.num_targets for batch in self.batches)
        unknown = sum(int((batch.labels == UNK)[batch.loss_mask].sum()) for batch in self.batches)
        return TextScore.of(total, tokens, self.bytes, unknown)


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
    """Score documents, each from BOS to EOS; or, with `stream`, all of them as one text.

    The first token of a stream is not scored: nothing predicts it. `batch_tokens` changes speed, not results;
    `progress` is called with the number of tokens just scored. The model has to be in evaluation mode.
    """
    batches = WindowBatches.of(
        tokenizer, documents, context=context, stride=stride, stream=stream, batch_tokens=batch_tokens
    )
    return batches.score(model, device, progress)


def _windows(
    tokenizer: Tokenizer, documents: Sequence[str], context: int, stride: int, stream: bool
) -> tuple[list[TextWindow], int]:
    """All windows, and the bytes of the scored text."""
    size = sum(len(document.encode()) for document in documents)
    if stream:
        tokens = encode_stream(tokenizer, documents)
        unscored = len(tokenizer.decode(tokens[:1]).encode())
        return list(windows(tokens, context, stride)), size - unscored
    texts = [[BOS, *ids, EOS] for ids in tokenizer.encode_batch(list(documents))]
    return [window for text in texts for window in windows(text, context, stride, begin=BOS)], size


def _batch(group: Sequence[TextWindow]) -> SeqBatch:
    """Windows as pairs with empty sources."""
    inputs = PackedTokens.from_lists([window.inputs for window in group])
    labels = [label for window in group for label in window.labels]
    loss_mask = [n >= len(w.inputs) - w.scored for w in group for n in range(len(w.inputs))]
    return SeqBatch(PackedTokens.from_lists([[] for _ in group]), inputs, torch.tensor(labels), torch.tensor(loss_mask))
