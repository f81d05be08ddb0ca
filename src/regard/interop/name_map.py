"""Tensors by another name: a table of templated names, read in both directions.

An entry says which of their tensors make one of ours, and how. In names, `{i}` counts layers, `{p}` is weight and bias,
and `{q,k,v}` stands for several of theirs that are one of ours:

    Entry("h.{i}.attn.{q,k,v}.{p}", "blocks.{i}.self_attn.qkv_proj.{p}", STACKED)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from regard.errors import UserError
from regard.interop.hf_folder import Stored
from regard.tensor_io import Tensors


class Transform(Protocol):
    """How their tensors become one of ours, and back, bit for bit."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor: ...

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]: ...


class Stack:
    """Several tensors one below the other; one stays as it is."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return whole.chunk(count)


class Transpose:
    """[in, out] becomes [out, in]: GPT-2 keeps its matrices the other way round."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole.t()]


SAME = STACKED = Stack()
TURNED = Transpose()


@dataclass(frozen=True)
class VocabularyRows:
    """One row a token: theirs in the order of their ids [V', ...], ours in that of ours [V, ...].

    `ids[our id]` is their id; where it is -1, ours is `absent`. Where two of ours were one of theirs, the later one
    (END, not BEGIN) goes back. `flat`: theirs has an axis of one in front.
    """

    ids: Sequence[int]
    absent: float = 0.0
    flat: bool = False

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        theirs = parts[0][0] if self.flat else parts[0]
        ids = torch.tensor(self.ids)
        if len(theirs) != ids.max() + 1:
            raise UserError(f"a table of {len(theirs)} rows for a vocabulary of {int(ids.max()) + 1} tokens")
        rows = theirs[ids.clamp(min=0)]
        rows[ids < 0] = self.absent
        return rows

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        rows = whole[torch.tensor(inverse(self.ids))]
        return [rows[None] if self.flat else rows]


def inverse(ids: Sequence[int]) -> list[int]:
    """Our id for each of theirs; of two of ours the later.

    >>> inverse([-1, 2, 2, 0, 1])
    [3, 4, 2]
    """
    ours = {theirs: mine for mine, theirs in enumerate(ids) if theirs >= 0}
    return [ours[theirs] for theirs in range(len(ours))]


@dataclass(frozen=True)
class Entry:
    """A line of a table."""

    theirs: str
    ours: str
    how: Transform = SAME

    def sources(self) -> list[str]:
        """Their names: `{q,k,v}` written out."""
        group = re.search(r"\{([^{}]*,[^{}]*)\}", self.theirs)
        return [self.theirs.replace(group[0], one) for one in group[1].split(",")] if group else [self.theirs]


def layered(table: Iterable[Entry], layers: int = 0) -> list[Entry]:
    """A table with `{i}` counted from 0 to `layers` - 1 and `{p}` written out as weight and bias."""
    found = []
    for entry in table:
        for i in range(layers) if "{i}" in entry.ours else (0,):
            for kind in ("weight", "bias") if "{p}" in entry.ours else ("",):
                theirs, ours = (name.replace("{i}", str(i)).replace("{p}", kind) for name in (entry.theirs, entry.ours))
                how = SAME if kind == "bias" and entry.how is TURNED else entry.how  # a bias is no matrix
                found.append(Entry(theirs, ours, how))
    return found


@dataclass(frozen=True)
class IgnoredTensors:
    """What a file may hold beside the table's tensors: `dropped` patterns, and `copies` of others (copy: original).

    `written` are the copies that an exported file has to hold, because the reader would not fill them in.
    """

    dropped: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    written: Sequence[str] = ()


FLOATS = ("F64", "F32", "F16", "BF16")  # the types of weights, as safetensors calls them


def check_header(
    header: Mapping[str, Stored], table: Sequence[Entry], leftovers: IgnoredTensors, expected: Tensors, origin: object
) -> None:
    """Refuse unknown, missing and misshapen tensors by what the header says; `expected` has their shapes by name."""
    wanted = {name for entry in table for name in entry.sources()}
    _refuse("lacks", wanted - header.keys(), origin)
    known = [re.compile(pattern) for pattern in leftovers.dropped]
    extra = header.keys() - wanted - {copy for copy, original in leftovers.copies.items() if original in header}
    _refuse("has an unknown", {name for name in extra if not any(p.fullmatch(name) for p in known)}, origin)
    for name in sorted(wanted):
        found, shape = header[name], tuple(expected[name].shape)
        if found.shape != shape:
            raise UserError(f"{found.file}: {name} has shape {found.shape}, but config.json makes it {shape}")
        if found.dtype not in FLOATS:
            raise UserError(f"{found.file}: {name} has type {found.dtype}, not one of {', '.join(FLOATS)}")


def to_ours(
    tensors: Mapping[str, Tensor], table: Sequence[Entry], leftovers: IgnoredTensors, origin: object
) -> Tensors:
    """Their tensors, of which the header was checked, as ours."""
    for copy, original in leftovers.copies.items():
        if copy in tensors and original in tensors and not torch.equal(tensors[copy], tensors[original]):
            raise UserError(f"{origin}: {copy} differs from {original}, though the config says that they are one")
    return {
        entry.ours: entry.how.ours([tensors[name].float() for name in entry.sources()]).contiguous() for entry in table
    }


def to_theirs(
    tensors: Mapping[str, Tensor], table: Sequence[Entry], leftovers: IgnoredTensors, origin: object
) -> Tensors:
    """Our tensors as theirs: `to_ours` backwards."""
    wanted = {entry.ours for entry in table}
    _refuse("lacks", wanted - tensors.keys(), origin)
    _refuse("has an unknown", tensors.keys() - wanted, origin)
    found: Tensors = {}
    for entry in table:
        names = entry.sources()
        found |= zip(names, entry.how.theirs(tensors[entry.ours], len(names)), strict=True)
    found |= {copy: found[leftovers.copies[copy]] for copy in leftovers.written}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def _refuse(what: str, names: set[str], origin: object) -> None:
    if names:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(f"{origin} {what} tensor: {shown} ({len(names)} in all)")
