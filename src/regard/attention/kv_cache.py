"""KV caches for decoding: of the tokens that beams were fed (self-attention), and of the source (cross-attention).

They grow with every token; `static_kv_cache` has those with static shapes and addresses, as CUDA graphs require.
Shapes: N sentences, K beams each, H heads, D features of a head, E entries of a cache, T tokens fed at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.layouts import AttentionLayout, KernelInputs, MaskTable
from regard.attention.masks import NO_POSITION, Causal, Mask, SameSegment, SegmentPositions
from regard.attention.scores import TokenPositions


class BeamTree:
    """The cache entries that each beam descends from; shared by the caches of all layers.

    The entries of a sentence are its prompt, then K per step, one per beam. Entries never move when beams are
    reordered: `seen` [N, K, E] marks those that a beam attends to (None: all of them, while there is one beam). Prompts
    are padded on the left: `padding` [N] counts the empty entries before the first token. `mask` restricts attention to
    earlier tokens (None: causal), in the layers whose caches are `masked`.
    """

    is_static: ClassVar[bool] = False
    SENTENCE_TENSORS: ClassVar[tuple[str, ...]] = ("seen", "padding")  # tensors with a row for each sentence
    used: int | None = None  # entries in use, if the tensors have more; None: all, or known to the device only
    is_prompt = False  # whether several tokens per sentence were added last, not one per beam

    def __init__(self, sentences: int, mask: Mask | None = None, padding: Tensor | None = None) -> None:
        self.sentences, self.mask, self.padding = sentences, mask, padding
        self.beams = 1
        self.length = 0  # tokens that each beam was fed, including padding
        self.entries = 0
        self.seen: Tensor | None = None
        self.index: Tensor | None = None  # [E] position of each entry, including padding; for masks
        self.position = TokenPositions(torch.empty(0, dtype=torch.long))  # positions of the tokens fed last
        self._queries = 1
        self._allowed: dict[bool, MaskTable] = {}  # by whether `mask` applies

    def append(self, tokens: int | None, device: torch.device) -> None:
        """Add entries: one token per beam (None), or this many prompt tokens per sentence, which has one beam.

        A model does this before its layers add the keys and values of these tokens to their caches.
        """
        self.is_prompt, self._allowed = tokens is not None, {}
        count = 1 if tokens is None else tokens
        new = torch.arange(self.length, self.length + count, device=device)
        position = new[None] if self.padding is None else new - self.padding[:, None]  # [N or 1, T]
        if self.padding is not None and self.seen is None:
            self.seen = torch.ones(self.sentences, self.beams, self.entries, dtype=torch.bool, device=device)
        if self.seen is not None:
            diagonal = torch.eye(self.beams, dtype=torch.bool, device=device)  # a beam sees its own new token only
            visible = diagonal.expand(self.sentences, -1, -1) if tokens is None else (position >= 0)[:, None]
            self.seen = torch.cat([self.seen, visible.expand(self.sentences, -1, -1)], -1)
        if self.mask is not None:
            added = new.repeat_interleave(self.beams)
            self.index = added if self.index is None else torch.cat([self.index, added])
        if tokens is None:
            position = position[:, 0].repeat_interleave(self.beams) if len(position) > 1 else position[:, 0]
        self.position = TokenPositions(position)
        self.entries += count * self.beams
        self.length, self._queries = self.length + count, count

    def allowed(self, dtype: torch.dtype, masked: bool = True) -> MaskTable:
        """The mask of the tokens fed last; computed once for all layers of a kind, whose scores have this dtype."""
        masked = masked and self.mask is not None
        if masked not in self._allowed:
            mask = self.mask if masked else None
            self._allowed[masked] = self._prompt(mask) if self._queries > 1 else self._step(dtype, mask)
        return self._allowed[masked]

    def _prompt(self, sparse: Mask | None) -> MaskTable:
        if sparse is None and self.seen is None:
            return MaskTable(causal=True, no_empty_rows=True)
        index = torch.arange(self.length - self.entries, self.length, device=self.position.index.device)
        position = index[None] if self.padding is None else index - self.padding[:, None]
        positions = SegmentPositions(position, torch.where(position < 0, NO_POSITION, 0))
        mask = Causal() if sparse is None else sparse & Causal()
        table = (mask & SameSegment()).table(positions[:, -self._queries :], positions)
        return MaskTable(table.unsqueeze(1))  # [N or 1, 1, Q, E]

    def _step(self, dtype: torch.dtype, sparse: Mask | None) -> MaskTable:
        table = None if self.seen is None else self.seen[..., : self.used]
        if sparse is not None:
            assert self.index is not None
            keys = self.index[..., : self.used]
            keys = keys[None] if self.padding is None else keys - self.padding[:, None]
            here = self.position.index.flatten()  # [N * K], or [1] for all
            here = here.view(len(keys), -1)[:, :1] if len(keys) > 1 else here[:1, None]
            visible = sparse.table(
                SegmentPositions(here, torch.zeros_like(here)), SegmentPositions(keys, torch.zeros_like(keys))
            )
            table = visible if table is None else table & visible  # [N, K, E] & [N or 1, 1, E]
        return MaskTable(no_empty_rows=True) if table is None else self._with_bias(table.unsqueeze(1), dtype)

    def _with_bias(self, table: Tensor, dtype: torch.dtype) -> MaskTable:
        return MaskTable.with_bias(table, dtype)

    def reorder(self, parents: Tensor) -> None:
        """Beam k of sentence n continues beam `parents[n, k]`."""
        before, self.beams = self.beams, parents.shape[1]
        if self.seen is None:
            if self.beams > 1:
                self.seen = torch.ones(*parents.shape, self.entries, dtype=torch.bool, device=parents.device)
        elif before > 1 or self.beams > 1:
            self.seen = self.seen.gather(1, parents[..., None].expand(-1, -1, self.seen.shape[-1]))

    def select(self, sentences: Tensor) -> Self:
        """Return a tree with these sentences only, [M] indices into the present N."""
        selected = copy.copy(self)
        selected.sentences, selected._allowed = len(sentences), {}
        for name in self.SENTENCE_TENSORS:
            rows = getattr(self, name)
            setattr(selected, name, None if rows is None else rows.index_select(0, sentences))
        return selected


class KVCache(AttentionLayout):
    """The keys and values of one layer's self-attention, [N, H, E, D] each.

    Beams are folded into the query axis; the tree masks the entries that a beam does not descend from. A step adds one
    token per beam, [N * K, H, D]; a prompt or a segment adds several per sentence, [N, T, H, D]. `BeamTree.append` says
    which, once for all layers. The capacity doubles when it is exhausted.
    """

    def __init__(
        self, tree: BeamTree, key: Tensor | None = None, value: Tensor | None = None, *, masked: bool = True
    ) -> None:
        """`masked`: whether the tree's mask applies to this layer; if not, it attends to all earlier tokens."""
        self.tree, self.key, self.value, self.masked = tree, key, value, masked

    @property
    def positions(self) -> TokenPositions:  # type: ignore[override]  # read only
        return self.tree.position

    def to_kernel(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> KernelInputs:
        assert key is not None and value is not None
        q, k, v = map(self._folded, (query, key, value))
        return q, *self._append(k, v), self.tree.allowed(q.dtype, self.masked)

    def stacked_to_kernel(self, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        """`to_kernel` for the tokens of a step, whose queries, keys and values are one tensor, [N * K, (H + 2 G) D]."""
        total = heads + 2 * kv_heads
        stacked = qkv.view(self.tree.sentences, -1, total, qkv.shape[-1] // total).transpose(1, 2)
        q, k, v = stacked.split_with_sizes((heads, kv_heads, kv_heads), 1)
        return q, *self._append(k, v), self.tree.allowed(q.dtype, self.masked)

    def _append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values [N, H, T, D] of the tokens fed last; return those of all entries, [N, H, E, D]."""
        end = self.tree.entries
        held = end - key.shape[2]
        self.key = _with_capacity(self.key, key, held, self.tree.is_prompt)
        self.value = _with_capacity(self.value, value, held, self.tree.is_prompt)
        self.key[:, :, held:end], self.value[:, :, held:end] = key, value
        return self.key[:, :, :end], self.value[:, :, :end]

    def _folded(self, x: Tensor) -> Tensor:
        """[N * K, H, D] or [N, T, H, D] -> [N, H, K or T, D]."""
        return (x if self.tree.is_prompt else x.view(self.tree.sentences, -1, *x.shape[1:])).transpose(1, 2)

    def from_kernel(self, out: Tensor) -> Tensor:
        out = out.transpose(1, 2)
        return out if self.tree.is_prompt else out.flatten(0, 1)

    def select(self, sentences: Tensor, tree: BeamTree) -> Self:
        """Return a cache with these sentences only, for a tree that has them."""
        selected = (None if x is None else x.index_select(0, sentences) for x in (self.key, self.value))
        return type(self)(tree, *selected, masked=self.masked)

    def trim(self, entries: int) -> None:
        """Keep the last `entries` entries only. The caller trims the tree after the caches of all layers."""
        for name in ("key", "value"):
            store = getattr(self, name)
            if store is not None:
                setattr(self, name, store[:, :, max(0, self.tree.entries - entries) : self.tree.entries])


def _with_capacity(store: Tensor | None, new: Tensor, held: int, exact: bool) -> Tensor:
    """Return the store [N, H, C, D], or a larger copy, with capacity for `new` [N, H, T, D] after `held` entries."""
    capacity = 0 if store is None else store.shape[2]
    needed = held + new.shape[2]
    if store is not None and needed <= capacity:
        return store
    grown = new.new_empty(*new.shape[:2], needed if exact else max(16, 2 * capacity, needed), new.shape[3])
    if store is not None:
        grown[:, :, :held] = store[:, :, :held]
    return grown


class SourceCache(AttentionLayout):
    """The keys and values of one layer's cross-attention, [N, H, S, D] each, shared by the K beams of a sentence.

    Beams are folded into the query axis, so that a sentence is stored once, not once per beam.
    """

    def __init__(self, key: Tensor, value: Tensor, allowed: MaskTable) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        if allowed.no_empty_rows and allowed.table is not None and allowed.bias is None:
            self.allowed = MaskTable.with_bias(allowed.table, key.dtype)  # computed once for all steps

    def to_kernel(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> KernelInputs:
        assert key is None and value is None
        q = query.view(len(self.key), -1, *query.shape[1:]).transpose(1, 2)  # [N*K, H, D] -> [N, H, K, D]
        return q, self.key, self.value, self.allowed

    def from_kernel(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def fixed(self, size: int, allowed: MaskTable | None = None) -> SourceCache:
        """Return a cache with capacity for `size` source tokens, which may share the mask of another layer."""
        table, spare = self.allowed.table, size - self.key.shape[2]
        if table is None:
            table = torch.ones(len(self.key), 1, 1, self.key.shape[2], dtype=torch.bool, device=self.key.device)
        key, value = (F.pad(x, (0, 0, 0, spare)) for x in (self.key, self.value))
        return SourceCache(key, value, allowed or MaskTable.with_bias(F.pad(table, (0, spare)), key.dtype))


def fixed_sources(caches: Sequence[SourceCache], size: int) -> list[SourceCache]:
    """The caches of all layers with capacity for `size` source tokens and a shared mask."""
    made: list[SourceCache] = []
    for cache in caches:
        made.append(cache.fixed(size, made[0].allowed if made else None))
    return made


def source_tensors(caches: Sequence[SourceCache]) -> Iterator[Tensor]:
    """The tensors of `fixed_sources`, in a fixed order."""
    for cache in caches:
        yield from (cache.key, cache.value)
    if caches:
        assert caches[0].allowed.table is not None and caches[0].allowed.bias is not None
        yield from (caches[0].allowed.table, caches[0].allowed.bias)


def select_sources(caches: Sequence[SourceCache], sentences: Tensor) -> list[SourceCache]:
    """Select sentences in the caches of all layers, [M] indices into the present N; shared masks stay shared."""
    masks = {id(cache.allowed): cache.allowed for cache in caches}
    selected = {number: allowed.select(sentences) for number, allowed in masks.items()}
    return [
        SourceCache(c.key.index_select(0, sentences), c.value.index_select(0, sentences), selected[id(c.allowed)])
        for c in caches
    ]
