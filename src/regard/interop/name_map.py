"""Rename and reshape tensors in both directions by a table of name templates.

An entry maps one or several of their tensors to one of ours. In names, `{i}` is the index of a layer, `{p}` is weight
and bias, and `{q,k,v}` stands for several of their tensors that are one of ours:

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
from regard.interop.hf_folder import TensorInfo
from regard.tensor_io import Tensors


class Transform(Protocol):
    """Converts their tensors to one of ours and back, without loss."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor: ...

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]: ...


class Stack:
    """Concatenates several tensors along the first axis; a single one is unchanged."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return whole.chunk(count)


class Transpose:
    """Transposes [in, out] to [out, in]: GPT-2 stores its matrices transposed."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole.t()]


class Copy:
    """Copies a tensor that several of ours are made from."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].clone()

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole]


SAME = STACKED = Stack()
COPIED = Copy()
TRANSPOSED = Transpose()


@dataclass(frozen=True)
class VocabularyRows:
    """Reorders the rows of a table, one for each token, from their ids [V', ...] to ours [V, ...].

    `ids[our id]` is their id; a row without one (-1) is filled with `absent`. If two of our ids map to one of theirs,
    the later one (EOS, not BOS) is exported. `flat`: their table has an extra first axis of size 1.
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
    """Our id for each of theirs; the later one if there are two.

    >>> inverse([-1, 2, 2, 0, 1])
    [3, 4, 2]
    """
    by_id = {theirs: ours for ours, theirs in enumerate(ids) if theirs >= 0}
    return [by_id[theirs] for theirs in range(len(by_id))]


@dataclass(frozen=True)
class Entry:
    """A row of the table: names of the tensors, and how they are converted."""

    theirs: str
    ours: str
    transform: Transform = SAME

    def sources(self) -> list[str]:
        """Their names, with `{q,k,v}` expanded."""
        group = re.search(r"\{([^{}]*,[^{}]*)\}", self.theirs)
        return [self.theirs.replace(group[0], part) for part in group[1].split(",")] if group else [self.theirs]


def layered(table: Iterable[Entry], layers: int = 0) -> list[Entry]:
    """Expand `{i}` to 0 ... `layers` - 1 and `{p}` to weight and bias."""
    entries = []
    for entry in table:
        for i in range(layers) if "{i}" in entry.ours else (0,):
            for kind in ("weight", "bias") if "{p}" in entry.ours else ("",):
                theirs, ours = (name.replace("{i}", str(i)).replace("{p}", kind) for name in (entry.theirs, entry.ours))
                is_vector = kind == "bias" and entry.transform is TRANSPOSED
                entries.append(Entry(theirs, ours, SAME if is_vector else entry.transform))
    return entries


@dataclass(frozen=True)
class IgnoredTensors:
    """Tensors that a file may contain beside those of the table: `dropped` patterns, and `copies` (copy: original).

    `written` are the copies that an exported file must contain, because transformers would initialise them randomly.
    """

    dropped: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    written: Sequence[str] = ()


@dataclass(frozen=True)
class TensorMap:
    """The conversion of the tensors of a folder to those of a model.

    `defaults` are their tensors that a file may lack, `constants` those that our model computes, `extra` are ours that
    have no counterpart.
    """

    entries: Sequence[Entry]
    ignored: IgnoredTensors
    defaults: Tensors = field(default_factory=dict)
    constants: Tensors = field(default_factory=dict)
    extra: Tensors = field(default_factory=dict)


FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that weights may have


def check_header(
    header: Mapping[str, TensorInfo], table: Sequence[Entry], ignored: IgnoredTensors, expected: Tensors, origin: object
) -> None:
    """Refuse missing and unknown tensors and wrong shapes by the header; `expected` has tensors of the right shapes."""
    wanted = {name for entry in table for name in entry.sources()}
    _refuse("lacks", wanted - header.keys(), origin)
    known = [re.compile(pattern) for pattern in ignored.dropped]
    extra = header.keys() - wanted - {copy for copy, original in ignored.copies.items() if original in header}
    _refuse("has an unknown", {name for name in extra if not any(p.fullmatch(name) for p in known)}, origin)
    for name in sorted(wanted):
        info, shape = header[name], tuple(expected[name].shape)
        if info.shape != shape:
            raise UserError(f"{info.file}: {name} has shape {info.shape}, but config.json makes it {shape}")
        if info.dtype not in FLOATS:
            raise UserError(f"{info.file}: {name} has type {info.dtype}, not one of {', '.join(FLOATS)}")


def to_ours(tensors: Mapping[str, Tensor], table: Sequence[Entry], ignored: IgnoredTensors, origin: object) -> Tensors:
    """Convert their tensors to ours; the header must have been checked.

    16-bit tensors stay so: they take half the space, and a model converts them when it is loaded. Each is converted on
    its own, so that no more than one copy of the weights is in memory, if `tensors` reads them when they are asked for.
    """
    for copy, original in ignored.copies.items():
        if copy in tensors and original in tensors and not torch.equal(tensors[copy], tensors[original]):
            raise UserError(f"{origin}: {copy} differs from {original}, but config.json says that they are the same")
    return {entry.ours: _converted(entry, [tensors[name] for name in entry.sources()]) for entry in table}


def _converted(entry: Entry, parts: Sequence[Tensor]) -> Tensor:
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1 or not kinds <= {torch.float16, torch.bfloat16}:
        parts = [part.float() for part in parts]
    return entry.transform.ours(parts).contiguous()


def to_theirs(
    tensors: Mapping[str, Tensor], table: Sequence[Entry], ignored: IgnoredTensors, origin: object
) -> Tensors:
    """Convert our tensors to theirs."""
    wanted = {entry.ours for entry in table}
    _refuse("lacks", wanted - tensors.keys(), origin)
    _refuse("has an unknown", tensors.keys() - wanted, origin)
    theirs: Tensors = {}
    for entry in table:
        names = entry.sources()
        theirs |= zip(names, entry.transform.theirs(tensors[entry.ours], len(names)), strict=True)
    theirs |= {copy: theirs[ignored.copies[copy]] for copy in ignored.written}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in theirs.items()}


def _refuse(what: str, names: set[str], origin: object) -> None:
    if names:
        listed = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(f"{origin} {what} tensor: {listed} ({len(names)} in all)")
