"""How queries, keys and values lie in memory, and which of them may meet.

A layout opens [T, H, D] tensors into what the dense kernels take, [..., H, L, D], with what is allowed, and closes the
result again. Training (flat rows), a decoding step (a growing cache), and a look at stored source keys are three
layouts of the same attention, so a block is written once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, Self

import torch
from torch import Tensor

from regard.attention.masks import NOWHERE, Causal, Everything, Mask, Places, SameSentence
from regard.rows import Rows

LOT = 128  # queries that a sparse kernel takes at a time


@dataclass(frozen=True)
class Allowed:
    """What a dense kernel is told about a mask.

    `table`: booleans that broadcast to [..., Q, K]; None: all may attend. `causal`: besides, the last query sees all
    keys, the one before it all but the last key, and so on. `full`: a promise that no row is empty, which saves the
    kernel from looking. `sparse`: in place of a table, a mask that can be asked a few queries at a time.
    """

    table: Tensor | None = None
    causal: bool = False
    full: bool = False
    sparse: Sparse | None = None

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
        room = 0 if self.store is None else self.store.shape[3]
        if self.held + tokens > room:
            grown = new.new_empty(*new.shape[:3], max(16, 2 * room, self.held + tokens), new.shape[4])
            if self.store is not None:
                grown[:, :, :, : self.held] = self.store[:, :, :, : self.held]
            self.store = grown
        assert self.store is not None
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
        if self.store is not None:
            fresh = self.store.new_empty(2, len(beams), *self.store.shape[2:])
            fresh[:, :, :, : self.held] = self.store[:, :, :, : self.held].index_select(1, beams)
            self.store = fresh
        return self


class Memory:
    """K beams a sentence look at the sentence's stored keys and values [N, H, S, D].

    The beams are folded into the query axis, so what belongs to a sentence is held once, not once a beam.
    """

    def __init__(self, key: Tensor, value: Tensor, allowed: Allowed) -> None:
        self.key, self.value, self.allowed = key, value, allowed

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is None and value is None
        q = query.unflatten(0, (len(self.key), -1)).transpose(1, 2)  # [N*K, H, D] -> [N, K, H, D] -> [N, H, K, D]
        return q, self.key, self.value, self.allowed

    def close(self, out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def lengths(self) -> None:
        return None

    def keep(self, sentences: Tensor) -> Memory:
        table = self.allowed.table
        kept = None if table is None else table.index_select(0, sentences)
        allowed = Allowed(kept, self.allowed.causal, self.allowed.full)
        return Memory(self.key.index_select(0, sentences), self.value.index_select(0, sentences), allowed)
