"""KV caches for decoding: of the tokens that beams were fed (self-attention), and of the source (cross-attention).

Shapes: N sentences, K beams each, H heads, D features of a head, E entries of a cache, T tokens fed at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.layouts import MaskTable
from regard.attention.masks import NO_POSITION, Causal, Mask, SameSegment, SegmentPositions
from regard.attention.scores import TokenPositions


class BeamTree:
    """The cache entries that each beam descends from; shared by the caches of all layers.

    The entries of a sentence are its prompt, then K per step, one per beam. Entries never move when beams are
    reordered: `seen` [N, K, E] marks those that a beam attends to (None: all of them, while there is one beam). Prompts
    are padded on the left: `padding` [N] counts the empty entries before the first token. `mask` restricts attention to
    earlier tokens (None: causal), in the layers whose caches ask for it.

    A tree grows with every token. `fixed` returns one with static shapes and addresses, as CUDA graphs require, in
    which the index of the next entry (`cursor`) and the tokens of a sentence (`fed`) are tensors: sentences may have
    been fed different numbers of tokens. When a sentence has no more room, it overwrites its last entries.
    """

    def __init__(self, sentences: int, mask: Mask | None = None, padding: Tensor | None = None) -> None:
        self.sentences, self.mask, self.padding = sentences, mask, padding
        self.beams = 1
        self.length = 0  # tokens that each beam was fed, including padding
        self.entries = 0
        self.turn = 0  # number of calls of `enter`
        self.seen: Tensor | None = None
        self.index: Tensor | None = None  # [E] or [N, E] position of each entry, including padding; for masks
        self.cursor: Tensor | None = None  # [N]
        self.fed: Tensor | None = None  # [N]
        self.position = TokenPositions(torch.empty(0, dtype=torch.long))  # of the tokens fed last
        self.used: int | None = None  # entries in use, unless only the device knows
        self.uniform: int | None = None  # the first new entry of all sentences, where it is the same and on a CPU
        self._queries = 1
        self._allowed: dict[bool, MaskTable] = {}  # by whether `mask` applies
        self._levels: Tensor | None = None  # 0 and -inf
        self._indices: tuple[Tensor, Tensor, Tensor] | None = None  # of `_step_indices`

    def enter(self, tokens: int | None, device: torch.device) -> None:
        """Add entries: one token per beam (None), or this many prompt tokens per sentence, which has one beam."""
        self.turn, self._allowed = self.turn + 1, {}
        if self.cursor is not None:
            return self._enter_fixed()
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
        return None

    def _enter_fixed(self) -> None:
        assert self.cursor is not None and self.fed is not None and self.seen is not None and self.padding is not None
        beam, self.rows, same_beam = self._step_indices()
        self.write = self.cursor.clamp(max=self.seen.shape[-1] - self.beams)[:, None] + beam  # [N, K], for this step
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
        assert self.cursor is not None
        if self._indices is not None and self._indices[2].shape[:2] == (self.sentences, self.beams):
            return self._indices
        beam = torch.arange(self.beams, device=self.cursor.device)
        same_beam = (beam[:, None] == beam).expand(self.sentences, -1, -1)
        indices = beam, torch.arange(self.sentences, device=beam.device)[:, None], same_beam
        if self.cursor.is_cpu:  # tensors made while a step is captured are valid in its replays only
            self._indices = indices
        return indices

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
        if table is None:
            return MaskTable(no_empty_rows=True)
        table = table.unsqueeze(1)
        if self.cursor is None:
            return MaskTable.with_bias(table, dtype)
        if self._levels is None or self._levels.dtype != dtype:
            self._levels = torch.tensor([0.0, -math.inf], dtype=dtype, device=table.device)
        return MaskTable(table, no_empty_rows=True, bias=torch.where(table, self._levels[0], self._levels[1]))

    def follow(self, parents: Tensor) -> None:
        """Beam k of sentence n continues beam `parents[n, k]`."""
        before, self.beams = self.beams, parents.shape[1]
        if self.seen is None:
            if self.beams > 1:
                self.seen = torch.ones(*parents.shape, self.entries, dtype=torch.bool, device=parents.device)
        elif before > 1 or self.beams > 1:
            seen = self.seen.gather(1, parents[..., None].expand(-1, -1, self.seen.shape[-1]))
            self.seen = seen if self.cursor is None else self.seen.copy_(seen)

    def keep(self, sentences: Tensor) -> BeamTree:
        """Return a tree with these sentences only, [M] indices into the present N."""
        kept = copy.copy(self)
        kept.sentences, kept._allowed = len(sentences), {}
        for name in ("seen", "padding", "fed", "cursor", *(() if self.cursor is None else ("index",))):
            rows = getattr(self, name)
            setattr(kept, name, None if rows is None else rows.index_select(0, sentences))
        return kept

    def fixed(self, beams: int, capacity: int, prompt: int, device: torch.device) -> BeamTree:
        """Return a tree with static shapes, for `capacity` more tokens of each of `beams` beams, which start equal.

        It has `prompt` entries for prompts; unused ones are masked.
        """
        made = copy.copy(self)
        made.beams, made.entries, made._queries, made._allowed = beams, prompt, 1, {}
        made.seen = torch.zeros(self.sentences, beams, prompt + beams * capacity, dtype=torch.bool, device=device)
        made.seen[..., : self.entries] = True if self.seen is None else self.seen
        made.cursor = torch.full((self.sentences,), prompt, device=device)
        made.fed = torch.full((self.sentences,), self.length, device=device)
        made.padding = torch.zeros_like(made.fed) if self.padding is None else self.padding.clone()
        made.fed -= made.padding
        if self.mask is not None:
            entries = torch.arange(made.seen.shape[-1], device=device)
            made.index = entries.repeat(self.sentences, 1)  # of those after the prompt, `enter` writes the position
        return made

    def grown(self, capacity: int, prompt: int = 0) -> BeamTree:
        """Return a tree with static shapes and capacity for this many tokens, after prompts of this length."""
        assert self.seen is not None
        made = copy.copy(self)
        made.entries, made._allowed = max(self.entries, prompt), {}
        more = made.entries + self.beams * capacity - self.seen.shape[-1]
        made.seen = F.pad(self.seen, (0, more))
        made.index = None if self.index is None else F.pad(self.index, (0, more))
        return made

    def compacted(self) -> Tensor:
        """Move the entries that some beam descends from to the front, and forget the others; return the order [N, E'].

        In beam search most entries belong to no beam after a few steps. For a tree with static shapes; the caches must
        follow (`KVCache.reorder_entries`).
        """
        assert self.seen is not None and self.cursor is not None
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
        """Reset a tree with static shapes that started without prompts."""
        assert self.seen is not None and self.cursor is not None and self.fed is not None
        for tensor in (self.seen, self.cursor, self.fed):
            tensor.zero_()

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of a tree with static shapes, in a fixed order."""
        for tensor in (self.seen, self.cursor, self.fed, self.padding):
            assert tensor is not None
            yield tensor
        yield from () if self.index is None else (self.index,)


class KVCache:
    """The keys and values of one layer's self-attention, [N, H, E, D] each.

    Beams are folded into the query axis; the tree masks the entries that a beam does not descend from. A step adds one
    token per beam, [N * K, H, D]; a prompt or a segment adds several per sentence, [N, T, H, D]. The capacity doubles
    when it is exhausted, unless the tree is fixed.
    """

    def __init__(
        self, tree: BeamTree, key: Tensor | None = None, value: Tensor | None = None, *, masked: bool = True
    ) -> None:
        """`masked`: whether the tree's mask applies to this layer; if not, it attends to all earlier tokens."""
        self.tree, self.key, self.value, self.masked = tree, key, value, masked
        self._turn = tree.turn
        self._prompt = self._announced = False

    def positions(self, query: Tensor) -> TokenPositions:
        """The positions of queries [N * K, H, D] or [N, T, H, D]; enters them into the tree if the model has not."""
        self._prompt, self._announced = query.dim() == 4, True
        if self._turn == self.tree.turn:
            self.tree.enter(query.shape[1] if self._prompt else None, query.device)
        self._turn = self.tree.turn
        return self.tree.position

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        assert key is not None and value is not None
        if not self._announced:
            self.positions(query)
        self._announced = False
        q, k, v = map(self._folded, (query, key, value))
        tree = self.tree
        if tree.cursor is None:
            held = tree.entries - k.shape[2]
            self.key = _with_capacity(self.key, k, held, self._prompt)
            self.value = _with_capacity(self.value, v, held, self._prompt)
            self.key[:, :, held : tree.entries], self.value[:, :, held : tree.entries] = k, v
            k, v = self.key[:, :, : tree.entries], self.value[:, :, : tree.entries]
        else:
            assert self.key is not None and self.value is not None
            for store, new in ((self.key, k), (self.value, v)):
                if tree.uniform is None:
                    store.transpose(1, 2)[tree.rows, tree.write] = new.transpose(1, 2).to(store.dtype)
                else:  # a copy of a slice, which takes a fraction of the time
                    store[:, :, tree.uniform : tree.used] = new
            k, v = self.key[:, :, : tree.used], self.value[:, :, : tree.used]
        return q, k, v, tree.allowed(q.dtype, self.masked)

    def _folded(self, x: Tensor) -> Tensor:
        """[N * K, H, D] or [N, T, H, D] -> [N, H, K or T, D]."""
        return (x if self._prompt else x.unflatten(0, (self.tree.sentences, -1))).transpose(1, 2)

    def close(self, out: Tensor) -> Tensor:
        out = out.transpose(1, 2)
        return out if self._prompt else out.flatten(0, 1)

    def lengths(self) -> None:
        return None

    def keep(self, sentences: Tensor, tree: BeamTree) -> KVCache:
        """Return a cache with these sentences only, for a tree that has them."""
        kept = (None if x is None else x.index_select(0, sentences) for x in (self.key, self.value))
        return KVCache(tree, *kept, masked=self.masked)

    def fixed(self, tree: BeamTree, like: tuple[Tensor, Tensor]) -> KVCache:
        """Return a cache with static shapes for a fixed tree; `like` has the right heads, widths and dtype."""
        assert tree.seen is not None
        stores = []
        for kept, empty in zip((self.key, self.value), like, strict=True):
            store = empty.new_zeros(tree.sentences, empty.shape[1], tree.seen.shape[-1], empty.shape[3])
            if kept is not None:
                store[:, :, : self.tree.entries] = kept[:, :, : self.tree.entries]
            stores.append(store)
        return KVCache(tree, *stores, masked=self.masked)

    def grown(self, tree: BeamTree) -> KVCache:
        """Return a cache with the capacity of a tree that has grown."""
        assert tree.seen is not None and self.key is not None and self.value is not None
        more = tree.seen.shape[-1] - self.key.shape[2]
        return KVCache(tree, *(F.pad(x, (0, 0, 0, more)) for x in (self.key, self.value)), masked=self.masked)

    def reorder_entries(self, order: Tensor) -> None:
        """Move entry `order[n, e]` of sentence n to e, with static shapes."""
        rows = torch.arange(len(order), device=order.device)[:, None]
        for store in (self.key, self.value):
            assert store is not None
            by_entry = store.transpose(1, 2)  # [N, E, H, D]
            by_entry[:, : order.shape[1]] = by_entry[rows, order]

    def trim(self, entries: int) -> None:
        """Keep the last `entries` entries only. The caller trims the tree after the caches of all layers."""
        for name in ("key", "value"):
            store = getattr(self, name)
            if store is not None:
                setattr(self, name, store[:, :, max(0, self.tree.entries - entries) : self.tree.entries])

    def tensors(self) -> Iterator[Tensor]:
        assert self.key is not None and self.value is not None
        yield from (self.key, self.value)


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


class SourceCache:
    """The keys and values of one layer's cross-attention, [N, H, S, D] each, shared by the K beams of a sentence.

    Beams are folded into the query axis, so that a sentence is stored once, not once per beam.
    """

    def __init__(self, key: Tensor, value: Tensor, allowed: MaskTable) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        if allowed.no_empty_rows and allowed.table is not None and allowed.bias is None:
            self.allowed = MaskTable.with_bias(allowed.table, key.dtype)  # computed once for all steps

    def positions(self, query: Tensor) -> None:
        return None

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, MaskTable]:
        assert key is None and value is None
        q = query.unflatten(0, (len(self.key), -1)).transpose(1, 2)  # [N*K, H, D] -> [N, K, H, D] -> [N, H, K, D]
        return q, self.key, self.value, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def lengths(self) -> None:
        return None

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


def keep_sources(caches: Sequence[SourceCache], sentences: Tensor) -> list[SourceCache]:
    """Select sentences in the caches of all layers, [M] indices into the present N; shared masks stay shared."""
    masks = {id(cache.allowed): cache.allowed for cache in caches}
    kept = {number: allowed.select(sentences) for number, allowed in masks.items()}
    return [
        SourceCache(c.key.index_select(0, sentences), c.value.index_select(0, sentences), kept[id(c.allowed)])
        for c in caches
    ]
