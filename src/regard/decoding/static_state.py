"""The decoding states of the model families in tensors of constant shape, which stay what and where they are.

A family's own state grows by a token a step and is copied when beams change places; these are made from it once, with
room for a while, and then only written into. Shapes: N sentences, K beams each, C places of a cache, S source tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import Allowed, Branched, Cached, Lineage, Memory, Pooled, Relative, Rotary
from regard.models.ensemble import Ensemble, Together, agreed
from regard.models.family import CachedState
from regard.models.gpt import GPT
from regard.models.recurrent import Recurrent, RecurrentState
from regard.models.transformer import Transformer, TransformerState
from regard.recurrence import States
from regard.rows import Rows, TokenRow


@dataclass(frozen=True)
class Shape:
    """What is constant: N sentences of K beams, C places there is room for (a prompt's among them), S source tokens."""

    sentences: int
    beams: int
    room: int
    source: int


class Padded(Rows):
    """Rows of which the host knows only how many sentences they have, and how long these may be.

    Every sentence has `longest` places of the row, of which the first `length` [N] are real.
    """

    def __init__(self, length: Tensor, longest: int) -> None:
        super().__init__([longest] * len(length), device=length.device)
        self.length = length

    @property
    def even(self) -> bool:
        return False

    @property
    def filled(self) -> bool:
        return True

    @cached_property
    def real(self) -> Tensor:
        return self.present.flatten()

    @cached_property
    def position(self) -> Tensor:
        place = torch.arange(self.longest, device=self.device)
        return torch.where(self.present, place, 0).flatten()  # padding may go beyond the places that a model has

    @cached_property
    def sentence(self) -> Tensor:
        return torch.arange(len(self), device=self.device)[:, None].expand(-1, self.longest).flatten()

    def pad(self, flat: Tensor) -> Tensor:
        return flat.unflatten(0, (len(self), self.longest))

    def flatten(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)


class Steady(Protocol):
    """The decoding state of N sentences with K beams each, in tensors that stay what and where they are."""

    def feed(self, model: Any, tokens: Tensor) -> Tensor:
        """One token a beam, [N, K]: logits [N, K, V] for the next one."""
        ...

    def follow(self, parents: Tensor) -> None:
        """Beam k of sentence n goes on from beam `parents[n, k]`."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All that it consists of, in a fixed order."""
        ...

    def keep(self, sentences: Tensor) -> Self:
        """A new one with these sentences only."""
        ...

    def grown(self, room: int) -> Self:
        """A new one with room for so many places."""
        ...


class Source:
    """What beams see of their source sentences: keys and values a layer, padded to a common length, and one mask."""

    def __init__(self, memories: Sequence[Memory], allowed: Allowed) -> None:
        self.allowed = allowed
        self.memories = [Memory(memory.key, memory.value, allowed) for memory in memories]

    @classmethod
    def of(cls, memories: Sequence[Memory], size: int) -> Source:
        """Memories of one source, each with room for `size` tokens of it."""
        key, table = memories[0].key, memories[0].allowed.table
        if table is None:
            table = torch.ones(len(key), 1, 1, key.shape[2], dtype=torch.bool, device=key.device)
        spare = size - key.shape[2]

        def padded(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, spare))

        allowed = Allowed.shared(F.pad(table, (0, spare)), key.dtype)
        return cls([Memory(padded(m.key), padded(m.value), allowed) for m in memories], allowed)

    def tensors(self) -> Iterator[Tensor]:
        for memory in self.memories:
            yield from (memory.key, memory.value)
        assert self.allowed.table is not None and self.allowed.bias is not None
        yield from (self.allowed.table, self.allowed.bias)

    def keep(self, sentences: Tensor) -> Source:
        return Source([memory.keep(sentences) for memory in self.memories], self.allowed.keep(sentences))


class Caches:
    """The state of a model that attends to what it was fed: a `Branched` store a layer, and what it sees of a source.

    `length` [N] are the source lengths of a Transformer; None for a decoder alone, which was fed the source itself.
    """

    def __init__(self, stores: list[Tensor], lineage: Lineage, source: Source | None, length: Tensor | None) -> None:
        self.stores, self.lineage, self.source, self.length = stores, lineage, source, length
        own: list[Any] = [Branched(store, lineage) for store in stores]
        self.state: CachedState | TransformerState
        if length is None:
            self.state = CachedState(own)
        else:
            self.state = TransformerState(own, [] if source is None else source.memories, length)

    @classmethod
    def of(cls, model: Transformer | GPT, state: CachedState | TransformerState, shape: Shape) -> Caches:
        """What `start` gave, in constant shapes. What it was fed already lies in the first row of each sentence."""
        own: Any = model.decoder[0].own
        device, dtype = next(model.parameters()).device, own.query_key_value.weight.dtype
        size = (2, shape.sentences, own.heads, shape.beams, shape.room, own.width // own.heads)
        stores = [_with_prompt(torch.zeros(size, dtype=dtype, device=device), cache) for cache in state.own]
        rows = torch.empty(shape.sentences, shape.beams, shape.room, dtype=torch.long, device=device)
        place, padding, mask, prompt = rows.new_zeros(1), None, None, None
        if isinstance(state, CachedState):
            assert isinstance(model, GPT)
            padding, mask = state.own[0].padding, model.mask
            padding = rows.new_zeros(shape.sentences) if padding is None else padding
            prompt = torch.arange(state.own[0].held, device=device) >= padding[:, None]
        lineage = Lineage(rows, place, dtype, padding, mask)
        lineage.restart(prompt)
        if isinstance(state, TransformerState):
            return cls(stores, lineage, Source.of(state.cross, shape.source), state.length)
        return cls(stores, lineage, None, None)

    def feed(self, model: Any, tokens: Tensor) -> Tensor:
        self.lineage.enter()
        logits: Tensor = model.step(self.state, tokens)[0]
        return logits

    def follow(self, parents: Tensor) -> None:
        self.lineage.follow(parents)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.stores
        yield from (self.lineage.rows, self.lineage.place)
        yield from (x for x in (self.lineage.padding, self.length) if x is not None)
        if self.source is not None:
            yield from self.source.tensors()

    def restart(self, model: Transformer, ids: Tensor, length: Tensor) -> None:
        """Begin anew, with other sources: `ids` [N * S], of each S the first `length` [N]."""
        assert self.source is not None and self.length is not None
        size = len(ids) // len(length)
        started = model.start(TokenRow(ids, Padded(length, size)))
        for own, new in zip(self.source.tensors(), Source.of(started.cross, size).tensors(), strict=True):
            own.copy_(new)
        for store in self.stores:
            store.zero_()
        self.length.copy_(length)
        self.lineage.restart()

    def keep(self, sentences: Tensor) -> Caches:
        old = self.lineage
        padding = None if old.padding is None else old.padding[sentences]
        lineage = Lineage(old.rows[sentences], old.place.clone(), old.dtype, padding, old.mask)
        source = None if self.source is None else self.source.keep(sentences)
        length = None if self.length is None else self.length[sentences]
        return Caches([store.index_select(1, sentences) for store in self.stores], lineage, source, length)

    def grown(self, room: int) -> Caches:
        old, more = self.lineage, room - self.lineage.rows.shape[-1]
        rows = F.pad(old.rows, (0, more), value=Lineage.NONE)
        lineage = Lineage(rows, old.place, old.dtype, old.padding, old.mask)
        return Caches([F.pad(store, (0, 0, 0, more)) for store in self.stores], lineage, self.source, self.length)


def _with_prompt(store: Tensor, cache: Cached | Pooled) -> Tensor:
    """The store [2, N, H, K, C, D] with what a cache holds in its first row."""
    if cache.store is not None:
        store[:, :, :, 0, : cache.held] = cache.store[:, :, :, : cache.held]
    return store


class Vectors:
    """The state of a recurrent model: vectors of constant size, moved when beams change places."""

    def __init__(self, layers: list[States], summary: Tensor, source: Source | None, beams: int) -> None:
        self.layers, self.summary, self.source, self.beams = layers, summary, source, beams  # layers: [N * K, D] each
        self._after = layers

    @classmethod
    def of(cls, state: RecurrentState, shape: Shape) -> Vectors:
        layers = [tuple(x.repeat_interleave(shape.beams, 0) for x in states) for states in state.layers]
        source = None if state.memory is None else Source.of([state.memory], shape.source)
        return cls(layers, state.summary, source, shape.beams)

    def feed(self, model: Any, tokens: Tensor) -> Tensor:
        memory = None if self.source is None else self.source.memories[0]
        state = RecurrentState(list(self.layers), self.summary, memory)
        state.beams = self.beams
        logits, state = model.step(state, tokens)
        self._after = state.layers
        result: Tensor = logits
        return result

    def follow(self, parents: Tensor) -> None:
        rows = (torch.arange(len(parents), device=parents.device)[:, None] * self.beams + parents).flatten()
        for states, after in zip(self.layers, self._after, strict=True):
            for kept, new in zip(states, after, strict=True):
                kept.copy_(new.index_select(0, rows))

    def tensors(self) -> Iterator[Tensor]:
        for states in self.layers:
            yield from states
        yield self.summary
        if self.source is not None:
            yield from self.source.tensors()

    def keep(self, sentences: Tensor) -> Vectors:
        def take(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, self.beams))[sentences].flatten(0, 1)

        layers = [tuple(take(x) for x in states) for states in self.layers]
        source = None if self.source is None else self.source.keep(sentences)
        return Vectors(layers, self.summary[sentences], source, self.beams)

    def grown(self, room: int) -> Vectors:
        return self


class Parts:
    """The state of an ensemble: one for every member."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, model: Ensemble, state: Together, shape: Shape) -> Parts:
        return cls([steady(*each, shape) for each in zip(model.members, state.states, strict=True)])

    def feed(self, model: Ensemble, tokens: Tensor) -> Tensor:
        members = zip(self.parts, model.members, strict=True)
        return agreed(part.feed(member, tokens) for part, member in members)

    def follow(self, parents: Tensor) -> None:
        for part in self.parts:
            part.follow(parents)

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.tensors()

    def restart(self, model: Ensemble, ids: Tensor, length: Tensor) -> None:
        for part, member in zip(self.parts, model.members, strict=True):
            part.restart(member, ids, length)

    def keep(self, sentences: Tensor) -> Parts:
        return Parts([part.keep(sentences) for part in self.parts])

    def grown(self, room: int) -> Parts:
        return Parts([part.grown(room) for part in self.parts])


def steady(model: object, state: Any, shape: Shape) -> Steady:
    """A started state of that many sentences in constant shapes."""
    if isinstance(model, Ensemble):
        return Parts.of(model, state, shape)
    if isinstance(model, Recurrent):
        return Vectors.of(state, shape)
    assert isinstance(model, Transformer | GPT)
    return Caches.of(model, state, shape)


def possible(model: object) -> bool:
    """Whether a model's state has a form of constant shapes.

    Scores that count places along the key axis (rotary, relative) would count the rows of other beams as places.
    """
    if isinstance(model, Ensemble):  # of members that count places alike
        return all(map(possible, model.members)) and len(set(map(reads_on, model.members))) == 1
    if not isinstance(model, Transformer | GPT | Recurrent):
        return False
    return not any(isinstance(module, Rotary | Relative) for module in model.modules())


def reads_on(model: object) -> bool:
    """Whether a model writes its output after the source, in the same cache."""
    return isinstance(model, GPT) or (isinstance(model, Ensemble) and reads_on(model.members[0]))


def reads_again(model: object) -> bool:
    """Whether a state in constant shapes can begin anew with other sources (`restart`)."""
    if isinstance(model, Ensemble):
        return all(map(reads_again, model.members))
    return isinstance(model, Transformer)
