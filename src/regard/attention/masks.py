"""Who may look at whom. One convention everywhere: True = may attend.

A mask is a small object that answers for any two places; masks combine with `&`, `|` and `~`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.rows import Rows

NOWHERE = -1  # the sentence number of padding and fill


@dataclass(frozen=True)
class Places:
    """Where tokens stand: place within the sentence and which sentence, both [..., L]; NOWHERE for padding."""

    position: Tensor
    sentence: Tensor

    @classmethod
    def flat(cls, rows: Rows) -> Places:
        """The T places of a flat row."""
        return cls(rows.position, torch.where(rows.real, rows.sentence, NOWHERE))

    @classmethod
    def padded(cls, rows: Rows) -> Places:
        """The [N, L] places of the padded view."""
        position = torch.arange(rows.longest, device=rows.device).expand(len(rows), -1)
        sentence = torch.arange(len(rows), device=rows.device)[:, None]
        return cls(position, torch.where(rows.present, sentence, NOWHERE))

    def __getitem__(self, index: tuple[object, ...]) -> Places:
        return Places(self.position[index], self.sentence[index])  # type: ignore[index]


class Mask:
    """Base of all masks: `allows(query, key)` broadcasts over places."""

    def allows(self, query: Places, key: Places) -> Tensor:
        raise NotImplementedError  # each mask's own

    def table(self, query: Places, key: Places) -> Tensor:
        """Every query of [..., Q] against every key of [..., K]: booleans [..., Q, K]."""
        return self.allows(query[..., :, None], key[..., None, :])

    def __and__(self, other: Mask) -> Mask:
        return _Combined(self, other, torch.logical_and)

    def __or__(self, other: Mask) -> Mask:
        return _Combined(self, other, torch.logical_or)

    def __invert__(self) -> Mask:
        return _Not(self)


@dataclass(frozen=True)
class Everything(Mask):
    """No restriction."""

    def allows(self, query: Places, key: Places) -> Tensor:
        return torch.ones_like(query.position, dtype=torch.bool) & torch.ones_like(key.position, dtype=torch.bool)


@dataclass(frozen=True)
class Causal(Mask):
    """A token sees itself and what came before."""

    def allows(self, query: Places, key: Places) -> Tensor:
        return key.position <= query.position


@dataclass(frozen=True)
class Window(Mask):
    """A token sees `before` places back and `after` places ahead."""

    before: int
    after: int = 0

    def allows(self, query: Places, key: Places) -> Tensor:
        distance = key.position - query.position
        return (distance >= -self.before) & (distance <= self.after)


@dataclass(frozen=True)
class SameSentence(Mask):
    """Tokens of one sentence see each other; padding and fill are seen by none and see nothing."""

    def allows(self, query: Places, key: Places) -> Tensor:
        return (query.sentence == key.sentence) & (key.sentence != NOWHERE)


@dataclass(frozen=True, eq=False)
class Given(Mask):
    """Any table of booleans [..., Q, K], read by place within the sentence."""

    booleans: Tensor

    def allows(self, query: Places, key: Places) -> Tensor:
        return self.booleans[..., query.position, key.position]


@dataclass(frozen=True)
class _Combined(Mask):
    left: Mask
    right: Mask
    how: Callable[[Tensor, Tensor], Tensor]

    def allows(self, query: Places, key: Places) -> Tensor:
        return self.how(self.left.allows(query, key), self.right.allows(query, key))


@dataclass(frozen=True)
class _Not(Mask):
    mask: Mask

    def allows(self, query: Places, key: Places) -> Tensor:
        return ~self.mask.allows(query, key)
