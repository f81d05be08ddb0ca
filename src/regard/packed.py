"""Packed batches.

A batch of N sentences is one tensor of T tokens: the sentences concatenated, then padding up to T. Linear layers, norms
and the loss see [T, D]; attention asks here where sentences begin. T tokens, N sentences, L tokens in the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


class PackedLayout:
    """Offsets of the sentences in a packed batch.

    `lengths` are the N sentence lengths, `size` the number of tokens T (default: no padding). `bounds` are the maximum
    number of sentences and the maximum length over all batches of a run, for static copies of this layout. The indices
    that convert between the packed and the padded view are computed on first use and cached, so that all layers share
    them.

    >>> layout = PackedLayout([2, 1], size=4)
    >>> layout.position.tolist(), layout.segment_ids.tolist()
    ([0, 1, 0, 0], [0, 0, 1, 2])
    """

    def __init__(
        self,
        lengths: Sequence[int],
        size: int | None = None,
        device: torch.device | str = "cpu",
        bounds: tuple[int, int] | None = None,
    ) -> None:
        self.lengths = tuple(int(n) for n in lengths)
        self.tokens = sum(self.lengths)
        self.size = self.tokens if size is None else size
        if self.size < self.tokens:
            raise ValueError(f"{self.tokens} tokens do not fit a batch of {self.size}")
        self.max_len = max(self.lengths, default=0)
        self.device = torch.device(device)
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"PackedLayout({list(self.lengths)}, size={self.size})"

    def to(self, device: torch.device | str) -> PackedLayout:
        if torch.device(device) == self.device:
            return self
        return PackedLayout(self.lengths, self.size, device, self.bounds)

    @property
    def empty(self) -> bool:
        """Whether there are no tokens, as in the source of plain text."""
        return self.tokens == 0

    @property
    def equal_lengths(self) -> bool:
        """Whether all sentences are equally long, so that the padded view has no padding."""
        return self.max_len * len(self) == self.tokens

    @cached_property
    def length(self) -> Tensor:
        """[N] the sentence lengths."""
        return torch.tensor(self.lengths, dtype=torch.long, device=self.device)

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1] where each sentence begins; the last entry is the number of real tokens."""
        return torch.nn.functional.pad(self.length.cumsum(0), (1, 0))

    @cached_property
    def segment_ids(self) -> Tensor:
        """[T] the sentence that each token belongs to; N for padding."""
        owners = torch.arange(len(self) + 1, device=self.device)
        counts = torch.cat([self.length, self.length.new_tensor([self.size - self.tokens])])
        return torch.repeat_interleave(owners, counts, output_size=self.size)

    @cached_property
    def position(self) -> Tensor:
        """[T] position within the sentence, from 0; 0 for padding."""
        index = torch.arange(self.size, device=self.device)
        return torch.where(self.is_token, index - self.offsets[self.segment_ids.clamp(max=max(len(self) - 1, 0))], 0)

    @cached_property
    def is_token(self) -> Tensor:
        """[T] True for tokens, False for padding."""
        return torch.arange(self.size, device=self.device) < self.tokens

    @cached_property
    def padded_is_token(self) -> Tensor:
        """[N, L] True where the padded view holds a token."""
        return torch.arange(self.max_len, device=self.device) < self.length[:, None]

    @cached_property
    def _padded_to_flat(self) -> Tensor:
        """[N * L] the packed index of each cell of the padded view; arbitrary for padding."""
        index = self.offsets[:-1, None] + torch.arange(self.max_len, device=self.device)
        return torch.where(self.padded_is_token, index, 0).flatten()

    @cached_property
    def _flat_to_padded(self) -> Tensor:
        """[T] the cell of the padded view of each packed token; arbitrary for padding."""
        return torch.where(self.is_token, self.segment_ids * self.max_len + self.position, 0)

    @cached_property
    def _padding_cells(self) -> Tensor:
        """Cells of the padded view without a token; computed on the host, so that the device is not synchronised."""
        empty = np.arange(self.max_len) >= np.array(self.lengths)[:, None]
        return torch.from_numpy(np.flatnonzero(empty)).to(self.device, non_blocking=True)

    @cached_property
    def _padding_positions(self) -> Tensor:
        """Packed indices without a token."""
        return torch.arange(self.tokens, self.size, device=self.device)

    def pad(self, flat: Tensor) -> Tensor:
        """[T, ...] -> [N, L, ...]: packed to padded. Padding becomes zero; packed padding is never read."""
        if self.equal_lengths:  # nothing to pad: a view, not a copy
            return flat[: self.tokens].unflatten(0, (len(self), self.max_len))
        return self._gather(flat, to_padded=True).unflatten(0, (len(self), self.max_len))

    def flatten(self, padded: Tensor) -> Tensor:
        """[N, L, ...] -> [T, ...]: padded to packed. Padding becomes zero and is never read."""
        cells = padded.flatten(0, 1)
        if self.equal_lengths and self.size == self.tokens:
            return cells
        return self._gather(cells, to_padded=False)

    def _gather(self, table: Tensor, to_padded: bool) -> Tensor:
        padded, flat = (self._padded_to_flat, self._padding_cells), (self._flat_to_padded, self._padding_positions)
        moved: Tensor = _Permute.apply(table, *((padded, flat) if to_padded else (flat, padded)))
        return moved

    def mean(self, flat: Tensor) -> Tensor:
        """[T, D] -> [N, D]: the mean over the tokens of each sentence; zeros for an empty one. Padding is never read.

        Summed in float32 at least: in bf16 a sum of hundreds loses percents.
        """
        real = flat.where(self.is_token[:, None], 0.0).to(torch.promote_types(flat.dtype, torch.float32))
        sums = real.new_zeros(len(self) + 1, flat.shape[1]).index_add(0, self.segment_ids, real)
        return (sums[:-1] / self.length.clamp(min=1)[:, None]).to(flat.dtype)

    @property
    def may_have_padding(self) -> bool:
        """Whether there may be padding after the tokens."""
        return self.size > self.tokens

    def zero_padding(self, flat: Tensor) -> Tensor:
        """[T, D] with zeros as padding, so that no gradient reaches it."""
        return flat.where(self.is_token[:, None], 0.0) if self.may_have_padding else flat

    def split(self, flat: Tensor) -> list[Tensor]:
        """Split a packed tensor into one tensor per sentence."""
        return list(flat[: self.tokens].split(list(self.lengths)))

    def convolved(self, kernel: int, stride: int = 1, padding: int = 0) -> PackedLayout:
        """The layout after a convolution along each sentence, which may shorten it.

        n tokens become (n + 2 padding - kernel) // stride + 1; output j covers the inputs from j · stride - padding on.

        >>> PackedLayout([5, 2, 0]).convolved(kernel=3, stride=2, padding=1).lengths
        (3, 1, 0)
        """

        def length(n: int) -> int:
            return max((n + 2 * padding - kernel) // stride + 1, 0) if n else 0

        bounds = None if self.bounds is None else (self.bounds[0], length(self.bounds[1]))
        return PackedLayout([length(n) for n in self.lengths], device=self.device, bounds=bounds)


GatherIndex = tuple[Tensor, Tensor]  # the row that each position takes, and the positions that become zero


class _Permute(torch.autograd.Function):
    """Gather rows of a tensor, each at most once, so that the backward pass is a gather too, without a sum."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: GatherIndex, inverse: GatherIndex) -> Tensor:
        ctx.indices = index, inverse
        rows, padding = index
        if not len(table):
            return table.new_zeros(len(rows), *table.shape[1:])
        return table.index_select(0, rows).index_fill_(0, padding, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.indices
        return _Permute.apply(grad, inverse, index), None, None


def map_leaves(value: Any, convert: Callable[[Any], Any], done: dict[int, Any] | None = None) -> Any:
    """Rebuild nested dataclasses with every tensor and layout converted, in the order of their fields.

    An object that occurs twice is converted once and stays one object. Other values (None, numbers) are kept.
    """
    done = {} if done is None else done
    if id(value) not in done:
        if isinstance(value, Tensor | PackedLayout):
            done[id(value)] = convert(value)
        elif hasattr(value, "__dataclass_fields__"):
            parts = {f.name: map_leaves(getattr(value, f.name), convert, done) for f in fields(value)}
            done[id(value)] = type(value)(**parts)
        else:
            return value
    return done[id(value)]


class Batch:
    """Base class of batches: frozen dataclasses of named tensors of any dtype.

    A field is a tensor, a layout, a dataclass of these (such as `PackedTokens`), or None. Shared fields stay shared.
    """

    @property
    def target_mask(self) -> Tensor:
        """[T] for each label whether it counts in the loss."""
        raise NotImplementedError  # implemented by each kind of batch

    @property
    def num_targets(self) -> int:
        """Number of targets that count in the loss: what the loss is normalised by."""
        raise NotImplementedError  # implemented by each kind of batch

    def to(self, device: torch.device | str) -> Self:
        moved: Self = map_leaves(self, lambda leaf: _to(leaf, device))
        return moved


def _to(leaf: Tensor | PackedLayout, device: torch.device | str) -> Tensor | PackedLayout:
    return leaf.to(device) if isinstance(leaf, PackedLayout) else leaf.to(device, non_blocking=True)


class PackedRows:
    """Base class of packed sequences: one row for each position, token ids or feature vectors, and their layout."""

    layout: PackedLayout

    @property
    def rows(self) -> Tensor:
        """[T, ...] the packed rows: token ids or feature vectors."""
        raise NotImplementedError  # implemented by each kind

    def with_rows(self, rows: Tensor, layout: PackedLayout) -> Self:
        """Other rows of the same kind."""
        return type(self)(rows, layout)  # type: ignore[call-arg]

    def to(self, device: torch.device | str) -> Self:
        return self.with_rows(self.rows.to(device, non_blocking=True), self.layout.to(device))


@dataclass(frozen=True)
class PackedTokens(PackedRows):
    """Packed token ids [T] and their layout."""

    ids: Tensor
    layout: PackedLayout

    @property
    def rows(self) -> Tensor:
        return self.ids

    @classmethod
    def from_lists(cls, sentences: list[list[int]], size: int | None = None, pad_id: int = 0) -> PackedTokens:
        """Concatenate sentences and pad up to `size`."""
        layout = PackedLayout([len(s) for s in sentences], size)
        flat = [token for sentence in sentences for token in sentence]
        return cls(torch.tensor(flat + [pad_id] * (layout.size - layout.tokens), dtype=torch.long), layout)


@dataclass(frozen=True)
class PackedFeatures(PackedRows):
    """Packed feature vectors [T, F], such as patches of images or frames of sound, and their layout."""

    values: Tensor
    layout: PackedLayout

    @property
    def rows(self) -> Tensor:
        return self.values

    @classmethod
    def from_arrays(cls, sequences: Sequence[Any], size: int | None = None) -> PackedFeatures:
        """Concatenate arrays [n, F] (one at least) in float32, and pad with zeros up to `size` rows."""
        layout = PackedLayout([len(s) for s in sequences], size)
        flat = torch.cat([torch.as_tensor(s, dtype=torch.float32) for s in sequences])
        return cls(torch.nn.functional.pad(flat, (0, 0, 0, layout.size - layout.tokens)), layout)


@dataclass(frozen=True)
class LinkTargets:
    """Links between tokens that attention is to learn: [M] for each the sentence, the positions, and the weight.

    `row` is the position of the query in the target, `column` that of the key in the source. After the actual links,
    all are zeros.
    """

    sentence: Tensor
    row: Tensor
    column: Tensor
    weight: Tensor


class TextBatch(Batch):
    """Base class of batches whose targets are tokens, for teacher forcing.

    `inputs` is the target shifted right (BOS first) and `labels` [T] the target with its EOS, aligned with `inputs`;
    labels of padding are never read. `loss_mask` [T] marks the labels that count in the loss (None: all tokens).
    """

    inputs: PackedTokens
    labels: Tensor
    loss_mask: Tensor | None

    @property
    def target_mask(self) -> Tensor:
        return self.inputs.layout.is_token if self.loss_mask is None else self.loss_mask

    @property
    def num_targets(self) -> int:
        """Number of target tokens that count in the loss."""
        return self.inputs.layout.tokens if self.loss_mask is None else int(self.loss_mask.sum())


def _teacher_forced(targets: list[list[int]], bos: int, size: int | None) -> tuple[PackedTokens, Tensor]:
    """The `inputs` and `labels` of a batch, from token lists that end with EOS."""
    inputs = PackedTokens.from_lists([[bos, *t[:-1]] for t in targets], size)
    return inputs, PackedTokens.from_lists(targets, size).ids


@dataclass(frozen=True)
class FeatureBatch(TextBatch):
    """Feature vectors and their texts, for teacher forcing."""

    source: PackedFeatures
    inputs: PackedTokens
    labels: Tensor
    loss_mask: Tensor | None = None

    @classmethod
    def from_lists(
        cls,
        sources: Sequence[Any],
        targets: list[list[int]],
        *,
        bos: int,
        source_size: int | None = None,
        target_size: int | None = None,
        masked_label: int | None = None,
    ) -> FeatureBatch:
        """Create a batch from arrays [n, F] and token lists that end with EOS; `masked_label` is not in the loss."""
        inputs, labels = _teacher_forced(targets, bos, target_size)
        loss_mask = None if masked_label is None else inputs.layout.is_token & (labels != masked_label)
        return cls(PackedFeatures.from_arrays(sources, source_size), inputs, labels, loss_mask)


@dataclass(frozen=True)
class SeqBatch(TextBatch):
    """Sentence pairs for teacher forcing.

    `source` sentences end with EOS; for plain text they are empty. `links` are targets of guided alignment.
    """

    source: PackedTokens
    inputs: PackedTokens
    labels: Tensor
    loss_mask: Tensor | None = None
    links: LinkTargets | None = None

    @classmethod
    def from_lists(
        cls,
        sources: list[list[int]],
        targets: list[list[int]],
        *,
        bos: int,
        source_size: int | None = None,
        target_size: int | None = None,
    ) -> SeqBatch:
        """Create a batch from token lists that end with EOS."""
        return cls(PackedTokens.from_lists(sources, source_size), *_teacher_forced(targets, bos, target_size))
