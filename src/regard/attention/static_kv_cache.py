"""KV caches with static shapes and addresses, as CUDA graphs require, and as continuous batching needs them.

Shapes are those of `kv_cache`: N sentences, K beams each, H heads, D features of a head, E entries of a cache.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.kv_cache import BeamTree, KVCache
from regard.attention.layouts import MaskTable
from regard.attention.scores import TokenPositions


class StaticBeamTree(BeamTree):
    """A `BeamTree` whose steps change tensors in place.

    The index of a sentence's next entry (`cursor` [N]) and its number of tokens (`fed` [N]) are tensors: sentences may
    have been fed different numbers of tokens. A sentence without free entries overwrites its last ones. Only steps are
    appended: the prompt was before.
    """

    is_static: ClassVar[bool] = True
    SENTENCE_TENSORS: ClassVar[tuple[str, ...]] = (*BeamTree.SENTENCE_TENSORS, "cursor", "fed", "index")

    seen: Tensor
    padding: Tensor
    cursor: Tensor
    fed: Tensor
    rows: Tensor  # [N, 1], and
    write: Tensor  # [N, K]: where the caches store the tokens of this step
    uniform: int | None = None  # the first new entry of all sentences, where it is the same and on a CPU
    _levels: Tensor | None = None  # 0 and -inf
    _indices: tuple[Tensor, Tensor, Tensor] | None = None  # result of `_step_indices`

    @classmethod
    def start(cls, tree: BeamTree, beams: int, capacity: int, prompt: int, device: torch.device) -> StaticBeamTree:
        """Make a tree with capacity for `capacity` more tokens of each of `beams` beams, which start equal.

        It has `prompt` entries for prompts; unused ones are masked.
        """
        made = cls(tree.sentences, tree.mask)
        made.beams, made.entries = beams, prompt
        made.seen = torch.zeros(tree.sentences, beams, prompt + beams * capacity, dtype=torch.bool, device=device)
        made.seen[..., : tree.entries] = True if tree.seen is None else tree.seen
        made.cursor = torch.full((tree.sentences,), prompt, device=device)
        made.fed = torch.full((tree.sentences,), tree.length, device=device)
        made.padding = torch.zeros_like(made.fed) if tree.padding is None else tree.padding.clone()
        made.fed -= made.padding
        if tree.mask is not None:  # [N, E]; of the entries after the prompt, `append` writes the position
            made.index = torch.arange(made.seen.shape[-1], device=device).repeat(tree.sentences, 1)
        return made

    def append(self, tokens: int | None, device: torch.device) -> None:
        self._allowed = {}
        beam, self.rows, same_beam = self._step_indices()
        self.write = self.cursor.clamp(max=self.seen.shape[-1] - self.beams)[:, None] + beam
        self.used = self.uniform = None
        if self.cursor.is_cpu:
            first, last = (int(entry) for entry in self.write[:, 0].aminmax())
            self.used, self.uniform = last + self.beams, first if first == last else None
        if self.uniform is None:
            self.seen.scatter_(2, self.write[:, None].expand_as(same_beam), same_beam)
        else:
            self.seen[..., self.uniform : self.used] = same_beam
        if self.index is not None:
            self.index.scatter_(1, self.write, (self.fed + self.padding)[:, None].expand_as(self.write))
        self.position = TokenPositions(self.fed[:, None].repeat(1, self.beams).flatten())
        self.cursor.add_(self.beams)
        self.fed.add_(1)

    def _step_indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Beams [K], sentences [N, 1], and which beams are the same [N, K, K]; on a CPU the same tensors every step."""
        if self._indices is not None and self._indices[2].shape[:2] == (self.sentences, self.beams):
            return self._indices
        beam = torch.arange(self.beams, device=self.cursor.device)
        same_beam = (beam[:, None] == beam).expand(self.sentences, -1, -1)
        indices = beam, torch.arange(self.sentences, device=beam.device)[:, None], same_beam
        if self.cursor.is_cpu:  # tensors made while a step is captured are valid in its replays only
            self._indices = indices
        return indices

    def _with_bias(self, table: Tensor, dtype: torch.dtype) -> MaskTable:
        if self._levels is None or self._levels.dtype != dtype:
            self._levels = torch.tensor([0.0, -math.inf], dtype=dtype, device=table.device)
        return MaskTable(table, no_empty_rows=True, bias=torch.where(table, self._levels[0], self._levels[1]))

    def reorder(self, parents: Tensor) -> None:
        if self.beams > 1:
            self.seen.copy_(self.seen.gather(1, parents[..., None].expand_as(self.seen)))

    def grown(self, capacity: int, prompt: int = 0) -> Self:
        """Return a tree with capacity for this many tokens, after prompts of this length."""
        made = copy.copy(self)
        made.entries, made._allowed = max(self.entries, prompt), {}
        more = made.entries + self.beams * capacity - self.seen.shape[-1]
        made.seen = F.pad(self.seen, (0, more))
        made.index = None if self.index is None else F.pad(self.index, (0, more))
        return made

    def compacted(self) -> Tensor:
        """Move the entries that some beam descends from to the front, and forget the others; return the order [N, E'].

        In beam search most entries belong to no beam after a few steps. The caches must follow
        (`StaticKVCache.reorder_entries`).
        """
        needed = self.seen.any(1)  # [N, E]
        self.cursor.copy_(needed.sum(1))
        order = needed.logical_not().byte().argsort(dim=-1, stable=True)[:, : int(self.cursor.max())]
        entries = order.shape[1]
        self.seen[..., :entries] = self.seen.gather(2, order[:, None].expand(-1, self.beams, -1))
        self.seen[..., entries:] = False
        if self.index is not None:
            self.index[:, :entries] = self.index.gather(1, order)
        return order

    def restart(self) -> None:
        """Reset a tree that started without prompts."""
        for tensor in (self.seen, self.cursor, self.fed):
            tensor.zero_()

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the tree, in a fixed order."""
        yield from (self.seen, self.cursor, self.fed, self.padding)
        yield from () if self.index is None else (self.index,)


class StaticKVCache(KVCache):
    """The keys and values of one layer's self-attention, in stores [N, H, E, D] that steps change in place."""

    tree: StaticBeamTree
    key: Tensor
    value: Tensor
    pair: Tensor | None = None  # [2, N, H, E, D]: both stores as one tensor, if their widths are equal

    @classmethod
    def start(cls, cache: KVCache, tree: StaticBeamTree, like: tuple[Tensor, Tensor]) -> StaticKVCache:
        """Make a cache for a tree that was started from that of `cache`; `like` has the heads, widths and dtype."""
        shapes = [(tree.sentences, empty.shape[1], tree.seen.shape[-1], empty.shape[3]) for empty in like]
        if shapes[0] == shapes[1]:
            made = cls.of_pair(tree, like[0].new_zeros(2, *shapes[0]), cache.masked)
        else:
            made = cls(tree, *(x.new_zeros(shape) for x, shape in zip(like, shapes, strict=True)), masked=cache.masked)
        for kept, store in ((cache.key, made.key), (cache.value, made.value)):
            if kept is not None:
                store[:, :, : cache.tree.entries] = kept[:, :, : cache.tree.entries]
        return made

    @classmethod
    def of_pair(cls, tree: StaticBeamTree, pair: Tensor, masked: bool) -> StaticKVCache:
        made = cls(tree, *pair.unbind(0), masked=masked)
        made.pair = pair
        return made

    def stacked_to_kernel(self, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        tree, pair = self.tree, self.pair
        if pair is None or heads != kv_heads:
            return super().stacked_to_kernel(qkv, heads, kv_heads)
        stacked = qkv.view(tree.sentences, -1, 3, heads, pair.shape[-1]).permute(2, 0, 3, 1, 4)  # [3, N, H, K, D]
        if tree.uniform is None:
            pair.permute(1, 3, 0, 2, 4)[tree.rows, tree.write] = stacked[1:].permute(1, 3, 0, 2, 4)
        else:
            pair[:, :, :, tree.uniform : tree.used] = stacked[1:]
        key, value = pair[:, :, :, : tree.used].unbind(0)
        return stacked[0], key, value, tree.allowed(qkv.dtype, self.masked)

    def _append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        for store, new in ((self.key, key), (self.value, value)):
            if self.tree.uniform is None:
                store.transpose(1, 2)[self.tree.rows, self.tree.write] = new.transpose(1, 2).to(store.dtype)
            else:  # a copy of a slice, which takes a fraction of the time
                store[:, :, self.tree.uniform : self.tree.used] = new
        return self.key[:, :, : self.tree.used], self.value[:, :, : self.tree.used]

    def grown(self, tree: StaticBeamTree) -> StaticKVCache:
        """Return a cache with the capacity of a tree that has grown."""
        more = tree.seen.shape[-1] - self.key.shape[2]
        if self.pair is not None:
            return self.of_pair(tree, F.pad(self.pair, (0, 0, 0, more)), self.masked)
        return StaticKVCache(tree, *(F.pad(x, (0, 0, 0, more)) for x in (self.key, self.value)), masked=self.masked)

    def select(self, sentences: Tensor, tree: BeamTree) -> StaticKVCache:
        if self.pair is None:
            return super().select(sentences, tree)
        return self.of_pair(cast(StaticBeamTree, tree), self.pair.index_select(1, sentences), self.masked)

    def reorder_entries(self, order: Tensor) -> None:
        """Move entry `order[n, e]` of sentence n to e."""
        rows = torch.arange(len(order), device=order.device)[:, None]
        for store in (self.key, self.value):
            by_entry = store.transpose(1, 2)  # [N, E, H, D]
            by_entry[:, : order.shape[1]] = by_entry[rows, order]

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.key, self.value)
