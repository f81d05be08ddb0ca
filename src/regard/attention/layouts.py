"""How queries, keys and values lie in memory, and which of them may meet.

A layout opens [T, H, D] tensors into what the dense kernels take, [..., H, L, D], with what is allowed, and closes the
result again. Training (flat rows), a decoding step (a growing cache), and a look at stored source keys are three
layouts of the same attention, so a block is written once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from regard.attention.masks import Causal, Everything, Mask, Places, SameSentence
from regard.rows import Rows


@dataclass(frozen=True)
class Allowed:
    """What a dense kernel is told about a mask.

    `table`: booleans that broadcast to [..., Q, K]; None: all may attend. `causal`: besides, key index <= query index.
    `full`: a promise that no row is empty, which saves the kernel from looking.
    """

    table: Tensor | None = None
    causal: bool = False
    full: bool = False

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """One table of booleans that says it all."""
        if not self.causal:
            return self.table
        causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return causal if self.table is None else causal & self.table


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

    Made once a batch and shared by all layers, so the maps and tables are built once.
    """

    def __init__(self, queries: Rows, keys: Rows, mask: Mask | None = None) -> None:
        self.queries, self.keys = queries, keys
        self.mask = mask if mask is not None else Everything()

    @cached_property
    def allowed(self) -> Allowed:
        """The cheapest form of "same sentence, and the mask", in the padded view.

        Padded queries may do as they like: closing drops them. Sentences have at least one token, so a row that only
        avoids padding, or looks back from where it stands, is never empty.
        """
        if self.queries is self.keys and self.mask == Causal():
            return Allowed(causal=True, full=True)  # padding lies behind every real query, so causality hides it
        if self.mask == Everything():
            if self.keys.even:
                return Allowed(full=True)
            return Allowed(self.keys.present[:, None, None, :], full=min(self.keys.lengths) > 0)
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
    """One new token a beam looks back at all earlier ones: B beams, keys and values kept as [B, H, C, D].

    Room C grows by doubling; only the `length` places in use are ever read.
    """

    def __init__(self) -> None:
        self.length = 0
        self.store: Tensor | None = None  # [2, B, H, C, D]: keys, values

    def open(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Allowed]:
        assert key is not None and value is not None
        new = torch.stack([key, value])  # [2, B, H, D]
        if self.store is None:
            self.store = new.new_empty(*new.shape[:3], 16, new.shape[3])
        elif self.length == self.store.shape[3]:
            self.store = torch.cat([self.store, torch.empty_like(self.store)], dim=3)
        self.store[:, :, :, self.length] = new
        self.length += 1
        k, v = self.store[:, :, :, : self.length]
        return query.unsqueeze(2), k, v, Allowed(full=True)

    def close(self, out: Tensor) -> Tensor:
        return out.squeeze(2)

    def lengths(self) -> None:
        return None

    def take(self, beams: Tensor) -> Self:
        """Go on with these beams, [B'] indices."""
        if self.store is not None:
            fresh = self.store.new_empty(2, len(beams), *self.store.shape[2:])
            fresh[:, :, :, : self.length] = self.store[:, :, :, : self.length].index_select(1, beams)
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
