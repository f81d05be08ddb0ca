"""Decoding states: what a model keeps between the steps of a search."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from regard.attention import BeamTree, KVCache, MultiHeadAttention, SourceCache, StaticBeamTree, StaticKVCache
from regard.attention.kv_cache import fixed_sources, select_sources, source_tensors


class DecodingState(Protocol):
    """The decoding state of N sentences with K beams each.

    Data of a sentence is stored once; data of a beam is reordered.
    """

    def reorder(self, parents: Tensor) -> Self:
        """Beam k of sentence n continues beam `parents[n, k]`; K may change."""
        ...

    def select(self, sentences: Tensor) -> Self:
        """Select sentences, in this order: [M] indices into the present N."""
        ...


@dataclass(frozen=True)
class StaticShape:
    """The constant sizes of a state for CUDA graphs: N sentences of K beams, and capacities in tokens."""

    sentences: int
    beams: int
    capacity: int  # capacity for output tokens
    source: int


class StaticState(DecodingState, Protocol):
    """A decoding state in tensors of constant shapes and addresses, which steps and `reorder` change in place."""

    def grown(self, capacity: int, source: int = 0) -> Self:
        """Return a state with capacity for `capacity` output tokens and at least `source` source tokens."""
        ...

    def compact(self) -> None:
        """Forget what no beam reads any more, so that steps read less. Not for captured steps."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the state, in a fixed order; each has a row for every sentence, or for every beam."""
        ...


class DecoderState:
    """The state of an attention decoder: one KV cache per layer, and the cross-attention caches.

    `length` [N] are the source lengths of an encoder-decoder; None for decoder-only models, which are fed the source.
    """

    def __init__(
        self,
        tree: BeamTree,
        self_kv: Sequence[KVCache],
        cross_kv: Sequence[SourceCache] = (),
        length: Tensor | None = None,
    ) -> None:
        self.tree, self.self_kv, self.cross_kv, self.length = tree, self_kv, cross_kv, length

    @classmethod
    def start(
        cls,
        layers: int,
        tree: BeamTree,
        cross_kv: Sequence[SourceCache] = (),
        length: Tensor | None = None,
        unmasked: Collection[int] = (),
    ) -> Self:
        """`unmasked` are the layers that ignore the tree's mask."""
        return cls(tree, [KVCache(tree, masked=i not in unmasked) for i in range(layers)], cross_kv, length)

    def reorder(self, parents: Tensor) -> Self:
        self.tree.reorder(parents)
        return self

    def select(self, sentences: Tensor) -> Self:
        tree = self.tree.select(sentences)
        self_kv = [cache.select(sentences, tree) for cache in self.self_kv]
        length = None if self.length is None else self.length[sentences]
        return type(self)(tree, self_kv, select_sources(self.cross_kv, sentences), length)

    def trim(self, entries: int) -> None:
        """Keep the last `entries` tokens, in a state with one beam per sentence."""
        for cache in self.self_kv:
            cache.trim(entries)
        self.tree.entries = min(self.tree.entries, entries)


class StaticDecoderState(DecoderState):
    """A `DecoderState` of constant shapes and addresses."""

    tree: StaticBeamTree
    self_kv: Sequence[StaticKVCache]

    @classmethod
    def of(
        cls, state: DecoderState, shape: StaticShape, attentions: Sequence[MultiHeadAttention]
    ) -> StaticDecoderState:
        """Convert a newly started state, whose layers' self-attentions are given."""
        prompt = shape.source if state.length is None else 0
        like = [attention.cached_like() for attention in attentions]
        tree = StaticBeamTree.start(state.tree, shape.beams, shape.capacity, prompt, like[0][0].device)
        self_kv = [StaticKVCache.start(cache, tree, one) for cache, one in zip(state.self_kv, like, strict=True)]
        return cls(tree, self_kv, fixed_sources(state.cross_kv, shape.source), state.length)

    def grown(self, capacity: int, source: int = 0) -> Self:
        tree = self.tree.grown(capacity, source if self.length is None else 0)
        cross = self.cross_kv
        if cross and cross[0].key.shape[2] < source:
            cross = fixed_sources(cross, source)
        return type(self)(tree, [cache.grown(tree) for cache in self.self_kv], cross, self.length)

    def restart(self, started: DecoderState) -> None:
        """Copy a newly started state of other sources into the tensors of this one."""
        assert self.length is not None and started.length is not None
        sources = fixed_sources(started.cross_kv, self.cross_kv[0].key.shape[2])
        for old, new in zip(source_tensors(self.cross_kv), source_tensors(sources), strict=True):
            old.copy_(new)
        self.length.copy_(started.length)
        self.tree.restart()
        for cache in self.self_kv:
            for tensor in cache.tensors():
                tensor.zero_()

    def compact(self) -> None:
        order = self.tree.compacted()
        for cache in self.self_kv:
            cache.reorder_entries(order)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.tree.tensors()
        for cache in self.self_kv:
            yield from cache.tensors()
        yield from source_tensors(self.cross_kv)
        yield from () if self.length is None else (self.length,)
