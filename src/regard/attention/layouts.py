"""How queries, keys and values lie in memory, and which of them may meet.

A layout opens [T, H, D] tensors into what the dense kernels take, [..., H, L, D], with what is allowed, and closes the
result again. Training (flat rows), a decoding step (a growing cache), and a look at stored source keys are three
layouts of the same attention, so a block is written once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.masks import NOWHERE, Causal, Everything, Mask, Places, SameSentence
from regard.rows import Rows, StaticRows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

LOT = 128  # queries that a sparse kernel takes at a time
BLOCK = 128  # places of a tile of flex attention, which has no smaller ones for the backward pass


@dataclass(frozen=True)
class Allowed:
    """What a dense kernel is told about a mask.

    `table`: booleans that broadcast to [..., Q, K]; None: all may attend. `causal`: besides, the last query sees all
    keys, the one before it all but the last key, and so on. `full`: a promise that no row is empty, which saves the
    kernel from looking. `sparse`: in place of a table, what gives one if need be, and lets a kernel skip most of it.
    `bias`: the table once more, as what a fused kernel adds to the scores (0 or -inf), where many layers share it.
    """

    table: Tensor | None = None
    causal: bool = False
    full: bool = False
    sparse: Sparse | Ranges | None = None
    bias: Tensor | None = None

    @classmethod
    def shared(cls, table: Tensor | None, dtype: torch.dtype) -> Allowed:
        """For a table without empty rows that many layers use: with its bias, for scores of this type."""
        if table is None:
            return cls(full=True)
        bias = torch.zeros(table.shape, dtype=dtype, device=table.device).masked_fill_(~table, -math.inf)
        return cls(table, full=True, bias=bias)

    def keep(self, sentences: Tensor) -> Allowed:
        """The same for these sentences, of a table that has them along its first axis."""
        table, bias = (None if x is None else x.index_select(0, sentences) for x in (self.table, self.bias))
        return Allowed(table, self.causal, self.full, bias=bias)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """One table of booleans that says it all."""
        table = self.table if self.sparse is None else self.sparse.table
        if not self.causal:
            return table
        causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        return causal if table is None else causal & table


@dataclass(frozen=True, eq=False)
class Lot:
    """A few queries, the keys that any of them may see, and which sees which: [queries, keys]."""

    queries: slice | Tensor
    keys: slice | Tensor
    table: Tensor
    full: bool


@dataclass(frozen=True, eq=False)
class Pattern:
    """A mask within one long sentence, cut into lots of queries; `back` puts their results in order again."""

    lots: list[Lot]
    back: Tensor | None
    share: float  # of all pairs of a query and a key, those that some lot looks at


@lru_cache(maxsize=8)  # of text cut to one length every batch has the same
@torch.inference_mode(False)  # what is kept may be wanted in training later
def pattern(mask: Mask, length: int, lot: int, device: torch.device) -> Pattern:
    """Lots for a sentence that looks at itself. No more than [lot, length] booleans are held at once, to find them."""
    order = mask.order(length, lot)
    every = torch.arange(length, dtype=torch.int32)  # half the bytes to go through
    place = every if order is None else order.int()
    keys = Places(every, torch.zeros_like(every))
    lots, pairs = [], 0
    for queries in place.split(lot):
        table = mask.table(Places(queries, torch.zeros_like(queries)), keys)
        seen = table.flatten(0, -2).any(0).nonzero().flatten()
        table = table[..., seen]
        pairs += len(queries) * len(seen)
        full = bool(table.any(-1).all()) and len(seen) > 0
        lots.append(Lot(_range(queries, device), _range(seen, device), table.to(device), full))
    back = None if order is None else order.argsort().to(device)
    return Pattern(lots, back, pairs / max(length * length, 1))


def _range(places: Tensor, device: torch.device) -> slice | Tensor:
    """Places as a slice where they are neighbours, which costs no copy."""
    if len(places) == 0:
        return slice(0, 0)
    first, last = int(places[0]), int(places[-1])
    neighbours = last - first + 1 == len(places) and bool((places.diff() == 1).all())
    return slice(first, last + 1) if neighbours else places.to(device, torch.long)


class Sparse:
    """A mask over the sentences of one row looking at themselves, for kernels that skip what is not allowed."""

    def __init__(self, mask: Mask, rows: Rows, lot: int) -> None:
        self.mask, self.rows, self.lot = mask, rows, lot

    @cached_property
    def table(self) -> Tensor:
        """[N, 1, L, L] all of it, the same for all heads."""
        places = Places.padded(self.rows)
        return (self.mask & SameSentence()).table(places, places).unsqueeze(-3)

    @cached_property
    def pattern(self) -> Pattern:
        return pattern(self.mask, self.rows.longest, self.lot, self.rows.device)

    @cached_property
    def lots(self) -> Sequence[tuple[Lot, Allowed]]:
        """Each lot with what its queries are allowed; padded queries may do as they like."""
        if self.rows.even:
            return [(lot, Allowed(lot.table, full=lot.full)) for lot in self.pattern.lots]
        present = self.rows.present[:, None, None, :]
        return [(lot, Allowed(lot.table & present[..., lot.keys])) for lot in self.pattern.lots]


class Ranges:
    """Who may see whom between two static rows: each sentence is a range of places of either, and sees its own.

    Fill sees fill: no real token sees it, and no row is empty where it need not be.
    """

    def __init__(self, queries: StaticRows, keys: StaticRows, causal: bool) -> None:
        self.queries, self.keys, self.causal = queries, keys, causal

    def prepare(self) -> None:
        """Make what the kernels will ask for."""
        if self.queries.device.type == "cuda":
            _ = self.block_mask, self.queries.real, self.keys.real
        else:
            _ = self.table

    @cached_property
    def table(self) -> Tensor:
        """[Q, K] all of it."""
        place = torch.arange(self.queries.size, device=self.queries.device)
        own = self.queries.sentence[:, None] == self.keys.sentence
        return own & (place <= place[:, None]) if self.causal else own

    @cached_property
    def block_mask(self) -> BlockMask:
        """The same for flex attention: which tiles of BLOCK x BLOCK places have anything in them, and what."""
        from torch.nn.attention.flex_attention import BlockMask

        of_queries, of_keys, causal = self.queries.sentence.int(), self.keys.sentence.int(), self.causal

        def may(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = of_queries[query] == of_keys[key]
            return own & (key <= query) if causal else own

        first, last = _tiles(self.queries, self.keys)
        first_back, last_back = _tiles(self.keys, self.queries)
        if causal:
            last = last.minimum(torch.arange(1, len(last) + 1, device=last.device))
            first_back = first_back.maximum(torch.arange(len(first_back), device=last.device))
        counts, indices = _listed(first, last, len(first_back))
        counts_back, indices_back = _listed(first_back, last_back, len(first))
        return BlockMask(
            seq_lengths=(self.queries.size, self.keys.size),
            kv_num_blocks=counts,
            kv_indices=indices,
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=counts_back,
            q_indices=indices_back,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=may,
        )


def _tiles(of: StaticRows, among: StaticRows) -> tuple[Tensor, Tensor]:
    """For each tile of one row, the tiles of the other in which its sentences lie: the first, and one past the last."""
    begins = torch.arange(0, of.size, BLOCK, device=of.device)
    ends = (begins + BLOCK).clamp(max=of.size) - 1
    offsets = F.pad(among.offsets, (0, 1), value=among.size)  # the fill is a last sentence
    first = offsets[of.sentence[begins]] // BLOCK
    last = -(-offsets[of.sentence[ends] + 1] // BLOCK)
    return first, last


def _listed(first: Tensor, last: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Ranges of tiles as flex attention wants them: how many, [1, 1, A], and which, [1, 1, A, tiles]."""
    counts = (last - first).clamp(min=0).int()
    indices = (first[:, None] + torch.arange(tiles, device=first.device)).clamp(max=tiles - 1).int()
    return counts[None, None], indices[None, None]


class Layout(Protocol):
    """Opens queries, keys and values for a dense kernel and closes its result."""

    def open(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Allowed]: ...

    def close(self, out: Tensor) -> Tensor: ...

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Real queries and keys of each opened sentence; None: all of them."""
        ...


class Dense:
    """Tensors that already are [..., H, L, D], with a table of booleans."""

    def __init__(self, table: Tensor | None = None, causal: bool = False) -> None:
        self.allowed = Allowed(table, causal)

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        return query, key, value, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out

    def lengths(self) -> None:
        return None


class Packed:
    """Flat rows: queries of one row look at the keys of the same sentence in another (or the same) row.

    Made once a batch and shared by all layers, so the maps and tables are built once. `lot` is how many queries a
    sparse kernel takes at a time.
    """

    def __init__(self, queries: Rows, keys: Rows, mask: Mask | None = None, lot: int = LOT) -> None:
        self.queries, self.keys = queries, keys
        self.mask = mask if mask is not None else Everything()
        self.lot = lot

    @cached_property
    def allowed(self) -> Allowed:
        """The cheapest form of "same sentence, and the mask", in the padded view.

        Padded queries may do as they like: closing drops them. Sentences have at least one token, so a row that only
        avoids padding, or looks back from where it stands, is never empty.
        """
        own = self.queries is self.keys
        if own and self.mask == Causal():
            return Allowed(causal=True, full=True)  # padding lies behind every real query, so causality hides it
        if self.mask == Everything():
            if self.keys.even:
                return Allowed(full=True)
            return Allowed(self.keys.present[:, None, None, :], full=min(self.keys.lengths) > 0)
        if own:
            return Allowed(sparse=Sparse(self.mask, self.keys, self.lot))
        table = (self.mask & SameSentence()).table(Places.padded(self.queries), Places.padded(self.keys))
        return Allowed(table.unsqueeze(-3))  # the same for all heads

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        q = self.queries.pad(query).transpose(1, 2)  # [T, H, D] -> [N, L, H, D] -> [N, H, L, D]
        k = self.keys.pad(key).transpose(1, 2)
        v = self.keys.pad(value).transpose(1, 2)
        return q, k, v, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return self.queries.flatten(out.transpose(1, 2))

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.queries.lengths, self.keys.lengths


class Flat(Packed):
    """Static rows, as they lie: queries [H, T, D] against keys [H, S, D] of all sentences at once.

    Nothing depends on where the sentences begin but numbers on the device, so one compiled step serves all batches.
    Those numbers are made at once: they are for all blocks, and a compiler sees the blocks one by one.
    """

    queries: StaticRows
    keys: StaticRows

    def __init__(self, queries: StaticRows, keys: StaticRows, mask: Mask | None = None) -> None:
        super().__init__(queries, keys, mask)
        if self.mask not in (Causal(), Everything()):
            raise TypeError(f"static rows cannot be seen through {self.mask}")
        ranges = Ranges(queries, keys, self.mask == Causal())
        self.allowed = Allowed(sparse=ranges)
        ranges.prepare()

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(0, 1)

    def lengths(self) -> None:  # type: ignore[override]
        return None


def pack(queries: Rows, keys: Rows, mask: Mask | None = None) -> Packed:
    """The layout for queries of one row that look at the same sentences in another (or the same) row."""
    if isinstance(queries, StaticRows) and isinstance(keys, StaticRows):
        return Flat(queries, keys, mask)
    packed = Packed(queries, keys, mask)
    _ = packed.allowed  # made now: a compiler of blocks should find it there
    return packed


class Cached:
    """New tokens look back at all earlier ones: B beams, keys and values kept as [B, H, C, D].

    A step brings one token a beam, [B, H, D]; a prompt or a segment brings several, [B, T, H, D], of which each also
    sees those before it. Prompts of different lengths end together: `padding` [B] is how many places before a beam's
    first token are empty, never seen, and not counted as places. `mask` is what tokens see of what came before (None:
    everything). With `memory`, only so many earlier keys are kept when new tokens come.

    Room C grows by doubling; only the places in use are ever read.
    """

    def __init__(self, mask: Mask | None = None, padding: Tensor | None = None, memory: int | None = None) -> None:
        self.mask, self.padding, self.memory = mask, padding, memory
        self.length = 0  # places passed, of which the last `held` are kept
        self.held = 0
        self.store: Tensor | None = None  # [2, B, H, C, D]: keys, values
        self._single = True

    def places(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next tokens of each beam will stand, counted from its first: [B, tokens]; [1, tokens] if all agree.

        Negative for padding.
        """
        return self._counted(torch.arange(self.length, self.length + tokens, device=device))

    def _counted(self, index: Tensor) -> Tensor:
        """Indices [L] as places of each beam, [B or 1, L]."""
        return index[None] if self.padding is None else index - self.padding[:, None]

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        self._single = query.dim() == 3
        new = torch.stack([key, value])  # [2, B, H, D] or [2, B, T, H, D]
        new = new.unsqueeze(3) if self._single else new.transpose(2, 3)  # [2, B, H, T, D]
        k, v = self._append(new)
        q = query.unsqueeze(2) if self._single else query.transpose(1, 2)
        return q, k, v, self._allowed(q.shape[2], q.device)

    def _append(self, new: Tensor) -> Tensor:
        """All keys and values in use, [2, B, H, held, D], the new ones last."""
        tokens = new.shape[3]
        self.length += tokens
        if self.memory is not None:
            kept = min(self.held, self.memory)
            if self.store is not None and kept:
                new = torch.cat([self.store[:, :, :, self.held - kept : self.held], new], dim=3)
            self.store, self.held = new, kept + tokens
            return new
        self.store = with_room(self.store, new, self.held)
        self.store[:, :, :, self.held : self.held + tokens] = new
        self.held += tokens
        return self.store[:, :, :, : self.held]

    def _allowed(self, queries: int, device: torch.device) -> Allowed:
        if self.mask is None and self.padding is None:
            return Allowed(causal=queries > 1, full=True)
        position = self._counted(torch.arange(self.length - self.held, self.length, device=device))
        places = Places(position, torch.where(position < 0, NOWHERE, 0))
        mask = Causal() if self.mask is None else self.mask & Causal()
        table = (mask & SameSentence()).table(places[:, -queries:], places)
        return Allowed(table.unsqueeze(1), full=self.mask is None and queries == 1)  # [B or 1, 1, Q, K]

    def close(self, out: Tensor) -> Tensor:
        return out.squeeze(2) if self._single else out.transpose(1, 2)

    def lengths(self) -> None:
        return None

    def take(self, beams: Tensor) -> Self:
        """Go on with these beams, [B'] indices."""
        if self.padding is not None:
            self.padding = self.padding.index_select(0, beams)
        self.store = None if self.store is None else self.store.index_select(1, beams)
        return self


class Memory:
    """K beams a sentence look at the sentence's stored keys and values [N, H, S, D].

    The beams are folded into the query axis, so what belongs to a sentence is held once, not once a beam.
    """

    def __init__(self, key: Tensor, value: Tensor, allowed: Allowed) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        if allowed.full and allowed.table is not None and allowed.bias is None:
            self.allowed = Allowed.shared(allowed.table, key.dtype)  # once, for all steps

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is None and value is None
        q = query.unflatten(0, (len(self.key), -1)).transpose(1, 2)  # [N*K, H, D] -> [N, K, H, D] -> [N, H, K, D]
        return q, self.key, self.value, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def lengths(self) -> None:
        return None

    def keep(self, sentences: Tensor) -> Memory:
        key, value = (x.index_select(0, sentences) for x in (self.key, self.value))
        return Memory(key, value, self.allowed.keep(sentences))


class Ancestry:
    """Which entries of their sentence's pool the beams descend from: what the layers of one decoder share.

    Every step adds an entry for each of a sentence's K beams, in the order of the beams, and nothing ever moves. `seen`
    [N, K, P] says which of the P entries so far each beam sees; None: all of them, as long as there is only one beam.
    """

    def __init__(self, sentences: int) -> None:
        self.sentences, self.entries = sentences, 0
        self.seen: Tensor | None = None
        self.allowed = Allowed(full=True)

    def enter(self, beams: int, like: Tensor) -> None:
        """Beams take a step: each adds its own entry to what it sees. Scores will be of the type of `like`."""
        own = torch.eye(beams, dtype=torch.bool, device=like.device)
        if self.seen is not None:
            self.seen = torch.cat([self.seen, own.expand(self.sentences, -1, -1)], -1)
        self.entries += beams
        self.allowed = Allowed.shared(None if self.seen is None else self.seen.unsqueeze(1), like.dtype)

    def follow(self, parents: Tensor) -> None:
        """Beam k of sentence n goes on from beam `parents[n, k]`."""
        if self.seen is not None:
            self.seen = self.seen.gather(1, parents[..., None].expand(-1, -1, self.entries))
        elif parents.shape[1] > 1:
            self.seen = torch.ones(*parents.shape, self.entries, dtype=torch.bool, device=parents.device)

    def keep(self, sentences: Tensor) -> None:
        self.sentences = len(sentences)
        self.seen = None if self.seen is None else self.seen.index_select(0, sentences)


class Pooled:
    """K beams a sentence look back at what they descend from, in a pool of the sentence's keys and values [N, H, C, D].

    As `Cached`, but when beams change places no key does: the beams are folded into the query axis, and a table that
    all layers share says who sees what. Room C grows by doubling; only the entries in use are ever read.
    """

    def __init__(self, ancestry: Ancestry) -> None:
        self.ancestry = ancestry
        self.length = 0  # tokens that each beam was fed
        self.held = 0  # entries in use
        self.store: Tensor | None = None  # [2, N, H, C, D]: keys, values

    def places(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next tokens of each beam will stand: [1, tokens], for all agree."""
        return torch.arange(self.length, self.length + tokens, device=device)[None]

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        q, k, v = (x.unflatten(0, (self.ancestry.sentences, -1)).transpose(1, 2) for x in (query, key, value))
        beams = q.shape[2]  # of [N, H, K, D]
        if self.ancestry.entries == self.held:  # the first layer to take this step
            self.ancestry.enter(beams, query)
        self.store = with_room(self.store, k, self.held)
        self.store[0, :, :, self.held : self.held + beams] = k
        self.store[1, :, :, self.held : self.held + beams] = v
        self.held += beams
        self.length += 1
        k, v = self.store[:, :, :, : self.held]
        return q, k, v, self.ancestry.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def lengths(self) -> None:
        return None

    def keep(self, sentences: Tensor) -> None:
        """Go on with the pools of these sentences; the ancestry is told once, by whoever holds the layers."""
        self.store = None if self.store is None else self.store.index_select(1, sentences)


def with_room(store: Tensor | None, new: Tensor, held: int) -> Tensor:
    """A store [2, B, H, C, D] with room for `new` [..., B, H, T, D] after what is held: the same, or a larger one."""
    room = 0 if store is None else store.shape[3]
    if held + new.shape[-2] <= room:
        assert store is not None
        return store
    *before, tokens, width = new.shape[-4:]
    grown = new.new_empty(2, *before, max(16, 2 * room, held + tokens), width)
    if store is not None:
        grown[:, :, :, :held] = store[:, :, :, :held]
    return grown


class Lineage:
    """Which beam wrote each earlier token of each beam: what the layers of one decoder share in a `Branched` step.

    `rows` [N, K, C] says in whose row of the store a beam finds what it sees at each of C places: NONE where there is
    nothing (yet, or for good before a short prompt). `place` [1] is where the next token goes, a tensor, so that a
    recorded step can be played again at another place. `padding` [N] is how many places before a sentence's first
    token are empty (None: none). `mask` is what tokens see of what came before (None: everything). `dtype` is that of
    the keys.
    """

    NONE = -1

    def __init__(
        self, rows: Tensor, place: Tensor, dtype: torch.dtype, padding: Tensor | None = None, mask: Mask | None = None
    ) -> None:
        self.rows, self.place, self.dtype, self.padding, self.mask = rows, place, dtype, padding, mask
        self.allowed = Allowed()
        self._own = torch.arange(rows.shape[1], device=rows.device)
        self._every = torch.arange(rows.shape[2], device=rows.device)
        self._bias = torch.tensor([-math.inf, 0.0], dtype=dtype, device=rows.device)

    def restart(self, prompt: Tensor | None = None) -> None:
        """Nothing is seen but the prompt, in the first row: [N, P] booleans, False for padding before it."""
        self.rows.fill_(self.NONE)
        self.place.zero_()
        if prompt is not None:
            self.rows[:, :, : prompt.shape[1]] = torch.where(prompt, 0, self.NONE)[:, None]
            self.place.fill_(prompt.shape[1])

    def enter(self) -> None:
        """Beams go to the next place, each in its own row; what they see from there is worked out."""
        self.rows.index_copy_(2, self.place, self._own[:, None].expand(len(self.rows), -1, 1))
        seen = self.rows[:, :, None, :] == self._own[:, None]  # [N, K beams that look, K rows, C]
        if self.mask is not None:
            here, keys = self.counted(self.place), self.counted(self._every)
            table = self.mask.table(Places(here, torch.zeros_like(here)), Places(keys, torch.zeros_like(keys)))
            seen = seen & table[:, :, None, :]  # [N, 1, 1, C]
        seen = seen.flatten(2).unsqueeze(1)
        self.allowed = Allowed(seen, full=True, bias=torch.where(seen, self._bias[1], self._bias[0]))

    def counted(self, places: Tensor) -> Tensor:
        """Places [L] of the store, counted from each sentence's first token: [N, L]; [1, L] if all agree."""
        return places[None] if self.padding is None else places - self.padding[:, None]

    def follow(self, parents: Tensor) -> None:
        """Beam k of sentence n goes on from beam `parents[n, k]`. Nothing in the store moves."""
        self.rows.copy_(self.rows.gather(1, parents[..., None].expand_as(self.rows)))
        self.place.add_(1)


class Branched:
    """K beams a sentence look back at what they descend from, in a store of constant room: [2, N, H, K, C, D].

    Beam k writes into row k, and rows never move: the beams are folded into the query axis and the K rows into the key
    axis, and a table says which beam descends from which entries. So a step has the same shapes at the same addresses
    whatever was decided before it.
    """

    length = 0  # places are counted on the device; whoever makes the store sees that there is room

    def __init__(self, store: Tensor, lineage: Lineage) -> None:
        self.store, self.lineage = store, lineage
        self._single = True

    def places(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next token of each beam will stand, [N * K, 1]; [1, 1] if all agree."""
        assert tokens == 1
        here = self.lineage.counted(self.lineage.place)
        return here if len(here) == 1 else here.repeat_interleave(self.lineage.rows.shape[1], 0)

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        self._single = query.dim() == 3
        for kept, new in zip(self.store, (key, value), strict=True):
            kept.index_copy_(3, self.lineage.place, self._folded(new).unsqueeze(3).to(kept.dtype))
        k, v = self.store.flatten(3, 4)  # [N, H, K * C, D]
        return self._folded(query), k, v, self.lineage.allowed

    def _folded(self, x: Tensor) -> Tensor:
        """[N * K, H, D] or [N * K, 1, H, D] -> [N, H, K, D]."""
        x = x if self._single else x.squeeze(1)
        return x.unflatten(0, (self.store.shape[1], -1)).transpose(1, 2)

    def close(self, out: Tensor) -> Tensor:
        out = out.transpose(1, 2).flatten(0, 1)
        return out if self._single else out.unsqueeze(1)

    def lengths(self) -> None:
        return None
