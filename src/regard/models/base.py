"""What every model family offers, so that training, search, pictures and serving never ask which one they drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps, tensor_io
from regard.attention import BeamTree, KVCache, MultiHeadAttention, SourceCache
from regard.attention.kv_cache import fixed_sources, keep_sources, source_tensors
from regard.linear_backends import LinearFn
from regard.nn import losses
from regard.packed import PackedTokens, SeqBatch


class DecodingState(Protocol):
    """The decoding state of N sentences with K beams each.

    What belongs to a sentence is stored once; what belongs to a beam is reordered.
    """

    def reorder(self, parents: Tensor) -> Self:
        """Beam k of sentence n goes on from beam `parents[n, k]`; K may change."""
        ...

    def keep(self, sentences: Tensor) -> Self:
        """Only these sentences stay, in this order: [M] indices into the present N."""
        ...


@dataclass(frozen=True)
class StaticShape:
    """What is constant in a state for CUDA graphs: N sentences of K beams, and capacities in tokens."""

    sentences: int
    beams: int
    capacity: int  # of the output
    source: int


class StaticState(DecodingState, Protocol):
    """A decoding state in tensors of constant shapes and addresses, which steps and `reorder` change in place."""

    def grown(self, capacity: int) -> Self:
        """A new one with capacity for so many output tokens."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All that it consists of, in a fixed order."""
        ...


class DecoderState:
    """The state of a decoder that attends to what it was fed: a key-value cache a layer, and what it sees of a source.

    `length` [N] are the source lengths of an encoder-decoder; None for a decoder alone, which was fed the source.
    """

    def __init__(
        self, tree: BeamTree, own: list[KVCache], cross: Sequence[SourceCache] = (), length: Tensor | None = None
    ) -> None:
        self.tree, self.own, self.cross, self.length = tree, own, cross, length

    @classmethod
    def start(
        cls, layers: int, tree: BeamTree, cross: Sequence[SourceCache] = (), length: Tensor | None = None
    ) -> Self:
        return cls(tree, [KVCache(tree) for _ in range(layers)], cross, length)

    def reorder(self, parents: Tensor) -> Self:
        self.tree.follow(parents)
        return self

    def keep(self, sentences: Tensor) -> DecoderState:
        tree = self.tree.keep(sentences)
        own = [cache.keep(sentences, tree) for cache in self.own]
        length = None if self.length is None else self.length[sentences]
        return DecoderState(tree, own, keep_sources(self.cross, sentences), length)

    def fixed(self, shape: StaticShape, attentions: Sequence[MultiHeadAttention]) -> DecoderState:
        """A state of constant shapes and addresses, whose layers' self-attentions are given."""
        prompt = shape.source if self.length is None else 0
        like = [attention.cached_like() for attention in attentions]
        tree = self.tree.fixed(shape.beams, shape.capacity, prompt, like[0][0].device)
        own = [cache.fixed(tree, empty) for cache, empty in zip(self.own, like, strict=True)]
        return DecoderState(tree, own, fixed_sources(self.cross, shape.source), self.length)

    def grown(self, capacity: int) -> DecoderState:
        tree = self.tree.grown(capacity)
        return DecoderState(tree, [cache.grown(tree) for cache in self.own], self.cross, self.length)

    def restart(self, started: DecoderState) -> None:
        """Become as a state of other sources that was just started, in the tensors that are here."""
        assert self.length is not None and started.length is not None
        size = self.cross[0].key.shape[2]
        for own, new in zip(
            source_tensors(self.cross), source_tensors(fixed_sources(started.cross, size)), strict=True
        ):
            own.copy_(new)
        self.length.copy_(started.length)
        self.tree.restart()
        for cache in self.own:
            for tensor in cache.tensors():
                tensor.zero_()

    def trim(self, entries: int) -> None:
        """Keep only the last so many entries of what was fed, in a state of one beam a sentence."""
        for cache in self.own:
            cache.trim(entries)
        self.tree.entries = min(self.tree.entries, entries)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.tree.tensors()
        for cache in self.own:
            yield from cache.tensors()
        yield from source_tensors(self.cross)
        yield from () if self.length is None else (self.length,)


class SequenceModel(nn.Module):
    """A model from a source sentence to a target sentence: what a family has to write."""

    has_static_state = False  # whether decoding states have a form of constant shapes, for CUDA graphs
    is_decoder_only = False  # whether the source is a prompt, which the output continues in the same cache
    can_restart = False  # whether a static state can begin anew with other sources (`restart`)
    static_shapes = False  # whether `loss` on static batches never waits for the device, as CUDA graphs require
    # What `accelerate` replaces by faster equivalents: the output projection, and that projection with the loss.
    linear: LinearFn = staticmethod(F.linear)  # type: ignore[arg-type]
    linear_cross_entropy = staticmethod(losses.linear_cross_entropy)

    def forward(self, batch: SeqBatch) -> Tensor:
        """Logits [T, V] for every place of the flat target row, teacher-forced."""
        return self.logits(self.features(batch))

    def features(self, batch: SeqBatch) -> Tensor:
        """[T, D] what the logits of every place are made from; zeros in the fill, so that no gradient reaches it."""
        raise NotImplementedError  # each family's own

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        raise NotImplementedError  # each family's own

    def lm_head(self) -> tuple[Tensor, Tensor | None] | None:
        """A table W [V, D] and a bias [V] where `logits(h)` is W h + bias and no more; None where it is not."""
        return None

    def start(self, source: PackedTokens) -> Any:
        """The state before the first target token, one beam a sentence."""
        raise NotImplementedError  # each family's own

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Feed one token a beam, [N, K]; logits [N, K, V] for the next one, and the state after it.

        The logits are the caller's to write over.
        """
        raise NotImplementedError  # each family's own

    def static_state(self, state: Any, shape: StaticShape) -> Any:
        """What `start` gave, in constant shapes, as a `StaticState`."""
        raise NotImplementedError  # of families that have one

    def restart(self, state: Any, source: PackedTokens) -> None:
        """Let a static state begin anew with other sources, in rows of constant size."""
        raise NotImplementedError  # of families that can

    def logit_lens(self, stream: Tensor, batch: SeqBatch) -> Tensor:
        """What the model would say if it stopped here: logits from the stream at any depth of a pass over `batch`.

        The same final norm and output projection that the last stream goes through, [..., D] -> [..., V].
        """
        raise NotImplementedError  # each family's own

    def init_from(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Take another run's weights. A family may leave out what belonged to that run's task alone."""
        tensor_io.load_into_model(self, tensors, origin)

    def loss(self, batch: SeqBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """Label-smoothed cross-entropy summed over the target tokens that count, in float32 whatever the precision.

        (1 - e) · -log p(label) + e · mean over the vocabulary of -log p, as F.cross_entropy defines it. With `r_drop`,
        the batch is read twice (`losses.r_drop_loss`).
        """
        counted = batch.inputs.layout.is_token if batch.loss_mask is None else batch.loss_mask
        projection = self.lm_head()
        if projection is None:
            logits = self(batch)
            if r_drop:
                return losses.r_drop_loss(logits, self(batch), batch.labels, counted, smoothing, r_drop)
            return losses.cross_entropy(logits, batch.labels, counted, smoothing)
        hidden = self.features(batch)
        if r_drop:
            hidden = torch.stack([hidden, self.features(batch)])
        elif taps.has_listeners():  # the logits are never there as a whole: who wants them has them computed beside
            written = taps.offer(self, "logits", taps.Deferred(lambda: F.linear(hidden, *projection)))
            if written is not None:
                return losses.cross_entropy(written, batch.labels, counted, smoothing)
        return self.linear_cross_entropy(hidden, *projection, batch.labels, counted, smoothing, r_drop)
