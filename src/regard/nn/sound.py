"""Parts of models of sound: convolutional subsampling, SpecAugment, and the CTC loss, on packed batches.

Shapes: S frames of features in a packed batch, F features of a frame, N recordings, D width, V vocabulary, T labels.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.dropout import dropout
from regard.nn import positions
from regard.nn.embedding import EmbeddingSettings
from regard.packed import PackedLayout
from regard.special_tokens import PAD

KERNEL, STRIDE, PADDING = 3, 2, 1  # of a convolution, which halves the frames


class SoundSettings(EmbeddingSettings, Protocol):
    """The settings of a family that a sound embedding reads."""

    @property
    def mels(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def stem(self) -> str: ...
    @property
    def source_positions(self) -> str | None: ...
    @property
    def max_frames(self) -> int: ...


class SoundEmbedding(nn.Module):
    """Convolutions along time, some of which halve the frames, and positions: dropout(conv(x) + position encoding).

    With the "strided" stem, all halve them, and a linear layer follows; Whisper's stem is convolutions alone.
    """

    def __init__(self, settings: SoundSettings) -> None:
        super().__init__()
        self.strides = settings.strides
        widths = [settings.mels, *[settings.width] * len(settings.strides)]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(wide, settings.width, KERNEL, stride, PADDING)
            for wide, stride in zip(widths, settings.strides, strict=False)
        )
        self.project = nn.Linear(widths[-1], settings.width) if settings.stem == "strided" else None
        kind = settings.source_positions or settings.positions
        self.positions = positions.make(kind, settings.width, base=settings.position_base, longest=settings.max_frames)
        self.dropout = settings.dropout

    def forward(self, values: Tensor, layout: PackedLayout) -> tuple[Tensor, PackedLayout]:
        """Frames [S, F] -> [S', D], and the layout of what is left of each recording."""
        x, layout = self._convolve(values, layout) if self.convolutions else (values, layout)
        x = taps.tap(self, "tokens", x if self.project is None else self.project(x))
        length = F.pad(layout.length, (0, 1), value=1)[layout.segment_ids]
        encoded = taps.tap(self, "positions", self.positions(layout.position, length))
        return taps.tap(self, "stream", dropout(x + encoded, self.dropout, self.training)), layout

    def _convolve(self, values: Tensor, layout: PackedLayout) -> tuple[Tensor, PackedLayout]:
        """gelu(convolution), once for each stride: [S, F] -> [S', D].

        Each recording takes a multiple of the product of all strides in rows, of which the last is zero before each
        convolution. So pairs of rows are a view of the packed rows, and no convolution reads another recording.
        """
        factor = math.prod(self.strides)
        blocks = torch.tensor([-(-n // factor) + 1 for n in layout.lengths])
        total, blocks = int(blocks.sum()) * factor, blocks.to(values.device)
        real = _row_index(layout, blocks * factor)
        x = values.new_zeros(total, values.shape[1])
        x = x.index_copy(0, real, values[: layout.tokens])
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            assert isinstance(convolution, nn.Conv1d) and convolution.bias is not None
            convolve = _halve if stride == STRIDE else _keep_length
            x = F.gelu(convolve(x, convolution.weight, convolution.bias))
            factor, layout = factor // stride, layout.convolved(KERNEL, stride, PADDING)
            real = _row_index(layout, blocks * factor)
            if factor > 1:  # another convolution follows
                padding = torch.ones(len(x), 1, dtype=torch.bool, device=x.device).index_fill_(0, real, False)
                x = x.masked_fill(padding, 0.0)
        return x.index_select(0, real), layout


def _row_index(layout: PackedLayout, rows: Tensor) -> Tensor:
    """[S] the row of each frame of `layout`, without padding, if its recordings take `rows` [N] rows each."""
    begins = rows.cumsum(0) - rows
    return begins[layout.segment_ids[: layout.tokens]] + layout.position[: layout.tokens]


def _halve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution of `KERNEL` = 3, `STRIDE` = 2 and `PADDING` = 1 along an even number of rows: [2n, F] -> [n, D].

    Output j reads rows 2j - 1, 2j and 2j + 1: a pair of rows, and the second row of the pair before it. The weight
    [D, F, 3] is that of `nn.Conv1d`, whose padded and transposed views take several times as long on a CPU.
    """
    pairs = x.unflatten(0, (-1, STRIDE)).flatten(1)  # [n, 2F], a view
    before = F.pad(pairs[:-1, x.shape[1] :], (0, 0, 1, 0))
    return F.linear(torch.cat([before, pairs], 1), weight.mT.flatten(1), bias)


def _keep_length(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution of `KERNEL` = 3, stride 1 and `PADDING` = 1 along rows, as `_halve`: [n, F] -> [n, D]."""
    padded = F.pad(x, (0, 0, 1, 1))
    return F.linear(torch.cat([padded[:-2], x, padded[2:]], 1), weight.mT.flatten(1), bias)


def subsampled(length: int, factor: int) -> int:
    """The number of frames after subsampling `length` frames.

    >>> subsampled(98, 4), subsampled(1, 4)
    (25, 1)
    """
    while factor > 1:
        length, factor = (length + 2 * PADDING - KERNEL) // STRIDE + 1 if length else 0, factor // STRIDE
    return length


def spec_augment(
    values: Tensor, layout: PackedLayout, bands: tuple[int, int], frames: tuple[int, int], share: float = 0.5
) -> Tensor:
    """Zero random bands of frequencies and stretches of time of each recording (SpecAugment; Park et al. 2019).

    `bands` and `frames` are how many masks, and how wide each is at most; the stretches of a recording together take at
    most a `share` of it. values [S, F], whose mean is zero; the random numbers are PyTorch's.
    """
    count, device = len(layout), values.device
    features = torch.arange(values.shape[1], device=device)
    masked = torch.zeros(count + 1, values.shape[1], dtype=torch.bool, device=device)  # the last row is for padding
    for _ in range(bands[0]):
        width, begin = torch.rand(2, count + 1, 1, device=device)
        width = width * min(bands[1], values.shape[1])
        begin = begin * (values.shape[1] - width)
        masked |= (features >= begin) & (features < begin + width)
    masked = masked[layout.segment_ids]
    length = F.pad(layout.length, (0, 1))
    for _ in range(frames[0]):
        width, begin = torch.rand(2, count + 1, device=device)
        width = width * (length * share / frames[0]).clamp(max=frames[1])
        begin = begin * (length - width)
        position = layout.position
        hit = (position >= begin[layout.segment_ids]) & (position < (begin + width)[layout.segment_ids])
        masked = masked | hit[:, None]
    return values.masked_fill(masked, 0.0)


def warp_bands(values: Tensor, layout: PackedLayout, rate: int, warp: float) -> Tensor:
    """Move the frequencies of each recording by a random factor, as if its speaker had a vocal tract of another length.

    (Vocal tract length perturbation; Jaitly and Hinton 2013.) With a factor a between 1 - `warp` and 1 + `warp`, a band
    whose centre is f takes the value at a · f, between the two bands nearest to it; outer ones take the last band's.
    values [S, F] in bands of HTK's mel scale up to half the sample rate; the random numbers are PyTorch's.
    """
    bands, device = values.shape[1], values.device
    factor = 1 + warp * (2 * torch.rand(len(layout) + 1, 1, device=device) - 1)  # the last one is for padding
    step = math.log1p(rate / 1400) / (bands + 1)  # from one centre to the next: mels in units of 1127
    hertz = 700 * torch.expm1(step * torch.arange(1, bands + 1, device=device))
    position = (torch.log1p(factor * hertz / 700) / step - 1).clamp(0, bands - 1)  # [N + 1, F]
    lower = position.floor().clamp(max=max(bands - 2, 0))
    share, index = (position - lower)[layout.segment_ids], lower.long()[layout.segment_ids]
    below, above = values.gather(1, index), values.gather(1, (index + 1).clamp(max=bands - 1))
    return torch.lerp(below, above, share)


def ctc_loss(logits: Tensor, layout: PackedLayout, labels: Tensor, label_layout: PackedLayout) -> Tensor:
    """-log of the probability of all paths of each text, summed over the recordings, in float32.

    logits [S, V] of the frames that are laid out by `layout`; labels [T], of which the last of each text, EOS, is left
    out. `PAD` is the blank. A recording that is too short for its text counts as 0.
    """
    texts = label_layout.pad(labels)  # [N, longest]
    lengths = torch.tensor(label_layout.lengths) - 1  # on the host, where F.ctc_loss expects them
    loss: Tensor = _CtcLoss.apply(logits.float(), layout, texts, lengths)
    return loss


class _CtcLoss(torch.autograd.Function):
    """The CTC loss of log_softmax(logits), by the columns of the blank and of the labels of each text alone.

    With g for the probability that the paths of the text give to a label at a frame, the gradient is

        softmax(logits) - g

    `F.ctc_loss` of all columns makes several passes over [S, V] in both directions.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, layout: PackedLayout, texts: Tensor, lengths: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        columns = F.pad(texts, (1, 0, 0, 1), value=PAD)  # [N + 1, longest + 1], the blank first; the last for padding
        same = texts[:, :, None] == texts[:, None, :]
        targets = same.int().argmax(-1) + 1  # equal labels take the column of the first of them
        columns = columns[layout.segment_ids]
        with torch.enable_grad():
            chosen = layout.pad(log_probs.gather(1, columns)).transpose(0, 1).requires_grad_()  # [L, N, longest + 1]
            frames = torch.tensor(layout.lengths)
            losses = F.ctc_loss(chosen, targets, frames, lengths, blank=0, reduction="none", zero_infinity=True)
        if ctx.needs_input_grad[0]:
            # PyTorch's gradient is exp(chosen) - g, or zero where a text does not fit.
            (grad,) = torch.autograd.grad(losses, chosen, torch.ones_like(losses))
            on_paths = layout.flatten((chosen.detach().exp() - grad).transpose(0, 1))
            counts = F.pad(losses.detach() != 0, (0, 1))[layout.segment_ids][:, None]
            ctx.save_for_backward(log_probs, columns, on_paths * counts, counts)
        return losses.detach().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        log_probs, columns, on_paths, counts = ctx.saved_tensors
        grad_logits = log_probs.exp().mul_(counts).scatter_add_(1, columns, -on_paths)
        return grad_logits.mul_(grad), None, None, None
