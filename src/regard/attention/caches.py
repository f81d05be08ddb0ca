"""What decoding keeps: the layouts of tokens that look back at what was fed before, or at stored source keys.

`Cached` grows, and its rows follow the beams. `Pooled` and `Branched` never move a key: the beams of a sentence share
what was fed to any of them, and a table says who descends from what. The former grows; the latter has constant shapes
and addresses, so that a step can be recorded.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from regard.attention.allowed import Allowed
from regard.attention.masks import NOWHERE, Causal, Mask, Places, SameSentence


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
