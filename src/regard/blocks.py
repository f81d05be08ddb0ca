"""The parts between attentions: norms, residual connections, feed-forward layers, and the two Transformer blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import gpu, taps
from regard.attention import Layout, MultiHead, Packed, Score
from regard.attention.gates import SqueezeExcite
from regard.devices import matrix_dtype
from regard.dropout import dropout, new_seeds
from regard.rows import Rows


@dataclass(frozen=True)
class BlockSettings:
    """What a Transformer block is made of."""

    width: int
    heads: int
    inner: int
    dropout: float = 0.0
    activation: Literal["relu", "gelu", "gelu-tanh", "silu", "gated"] = "relu"
    norm: Literal["layer", "rms", "batch"] = "layer"
    norm_first: bool = True
    norm_eps: float = 1e-5
    squeeze: int = 0  # of the encoder's feed-forward layers; 0: none
    qk_norm: bool = False
    zero_init: bool = False
    score: Callable[[], Score] | None = None  # makes the score of each self-attention; None: scaled dot

    @classmethod
    def of(cls, settings: object, score: Callable[[], Score] | None = None) -> BlockSettings:
        """What a family's settings say of its blocks; what they do not speak of stays as usual."""
        said = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**said, score=score)

    def make_norm(self) -> LayerNorm | RMSNorm | BatchNorm:
        return NORMS[self.norm](self.width, eps=self.norm_eps)

    def make_own(self) -> MultiHead:
        """A self-attention."""
        score = None if self.score is None else self.score()
        return MultiHead(self.width, self.heads, score=score, qk_norm=self.qk_norm, zero_init=self.zero_init)

    def make_cross(self, source_width: int) -> MultiHead:
        """An attention over a source of that width."""
        return MultiHead(self.width, self.heads, source_width, qk_norm=self.qk_norm, zero_init=self.zero_init)


_pass: ContextVar[int] = ContextVar("regard_pass", default=0)  # over a block that is computed twice: 1, 2


@contextmanager
def computed_twice(number: int) -> Iterator[None]:
    """While a block is computed for the first time, without keeping what is inside it, or again, for its gradients.

    Both go the same way, whoever listens; and running statistics count the first one only.
    """
    token = _pass.set(number)
    try:
        yield
    finally:
        _pass.reset(token)


def _time() -> int:
    """Which time this is, of two; 0 where there is one only, as in what is compiled."""
    return 0 if torch.compiler.is_compiling() else _pass.get()


class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation over the features of each token."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """x / root-mean-square over the features of each token; no centring, no bias."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return super().forward(x)


class BatchNorm(nn.Module):
    """(x - mean) / deviation of each feature over the tokens of the batch, for comparison.

    Statistics count real tokens only. A token's output depends on the rest of its batch in training; after it, running
    statistics are used.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_variance", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if not self.training:
            mean, variance = self.running_mean, self.running_variance
        else:
            counted = x.float() if real is None else torch.where(real[:, None], x.float(), 0.0)
            n = x.new_tensor(len(x), dtype=torch.float32) if real is None else real.sum().clamp(min=1)
            mean = counted.sum(0) / n
            spread = counted - mean if real is None else torch.where(real[:, None], counted - mean, 0.0)
            variance = spread.square().sum(0) / n
            if _time() != 2:
                with torch.no_grad():
                    self.running_mean.lerp_(mean, self.momentum)
                    self.running_variance.lerp_(variance * n / (n - 1).clamp(min=1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


NORMS: dict[str, type[LayerNorm] | type[RMSNorm] | type[BatchNorm]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "batch": BatchNorm,
}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class Sum(NamedTuple):
    """x + dropout(added + bias), still to be added up: the next norm does that, too, in one kernel of a GPU."""

    x: Tensor
    added: Tensor
    bias: Tensor | None  # of the layer that `added` comes from
    dropped: float = 0.0  # share of what is added


Stream = Tensor | Sum  # what blocks hand on
Sublayer = Callable[[Tensor, bool], Tensor]  # what it adds; its last bias included or not


def quick(x: Tensor, norm: nn.Module) -> bool:
    """Whether our kernel for GPUs can add to x and normalise, and nobody wants to see what lies between."""
    able = gpu.takes(x) and isinstance(norm, LayerNorm | RMSNorm)
    return able and not taps.listening() and _time() == 0


def unsummed(x: Tensor, block: nn.Module) -> Stream:
    """What a stack of such blocks is to begin with, so that they leave sums to their norms where that is quicker.

    In training, the sums that they hand on are then in the precision of matrix products: norms are bound by memory.
    """
    assert isinstance(block, EncoderBlock | DecoderBlock)
    first, last = block.own_residual, block.feed_forward.last_bias
    if not first.norm_first or not quick(x, first.norm):
        return x
    nothing = torch.zeros_like(x, dtype=matrix_dtype(x)).requires_grad_(x.requires_grad)
    x = x.to(nothing.dtype) if block.training else x
    bias = nn.Parameter(torch.zeros_like(last)) if block.training and last is not None else None
    return Sum(x, nothing, bias, first.share)  # to a compiler the same as what blocks hand on


def late_biases(model: nn.Module) -> set[nn.Parameter]:
    """The biases that are added where sums are made: see `Residual`."""
    found: set[nn.Parameter | None] = set()
    for block in model.modules():
        if isinstance(block, EncoderBlock | DecoderBlock):
            found |= {block.own.out.bias, block.feed_forward.last_bias}
        if isinstance(block, DecoderBlock):
            found.add(block.cross.out.bias)
    return {bias for bias in found if bias is not None}


def normed(norm: nn.Module, x: Sum, exact: bool = False) -> tuple[Tensor, Tensor]:
    """The sum, and its norm: in the precision of the stream if `exact`, else in that of matrix products."""
    from regard.gpu.norm import added_norm

    assert isinstance(norm, LayerNorm | RMSNorm) and norm.eps is not None
    seeds = new_seeds(x.x.device) if x.dropped else None
    bias, dtype = getattr(norm, "bias", None), x.x.dtype if exact else matrix_dtype(x.x)
    flat, added = (t.flatten(0, -2) for t in (x.x, x.added))
    how = x.dropped, norm.eps, isinstance(norm, LayerNorm), dtype
    total, found, *_ = added_norm(flat, added, x.bias, norm.weight, bias, seeds, *how)
    return total.view(x.x.shape), found.view(x.x.shape)


class FeedForward(nn.Module):
    """W_2 f(W_1 x): f is ReLU, GELU or SiLU; gated: W_2 (silu(W_g x) * W_1 x).

    With `squeeze`, what comes out passes a gate over its features, one a sentence.
    """

    def __init__(self, settings: BlockSettings, squeeze: int = 0) -> None:
        super().__init__()
        self.activation = settings.activation
        self.channels = SqueezeExcite(settings.width, squeeze) if squeeze else None
        hidden = settings.inner * (2 if settings.activation == "gated" else 1)
        self.into = nn.Linear(settings.width, hidden)
        self.out = nn.Linear(settings.inner, settings.width)
        for linear in (self.into, self.out):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        if settings.zero_init:
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, rows: Rows | None = None, biased: bool = True) -> Tensor:
        """x [T, D] -> [T, D]; if not `biased`, without the bias at the end."""
        hidden = self._inner(x) if self._in_one(x) else self._hidden(x)
        out = self.out(hidden) if biased else F.linear(hidden, self.out.weight)
        return out if self.channels is None or rows is None else self.channels(out, rows)

    def _hidden(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        if self.activation != "gated":
            return ACTIVATIONS[self.activation](hidden)
        gate, hidden = hidden.chunk(2, dim=-1)
        return F.silu(taps.tap(self, "gate", gate)) * hidden

    @property
    def last_bias(self) -> nn.Parameter | None:
        """What is added last of all; None where a gate comes after it."""
        return self.out.bias if self.channels is None else None

    def _in_one(self, x: Tensor) -> bool:
        """Whether our kernels for GPUs can do f(W_1 x)."""
        known = self.activation in ("relu", "gelu", "gelu-tanh")
        return known and self.training and x.dim() == 2 and gpu.takes(x)

    def _inner(self, x: Tensor) -> Tensor:
        from regard.gpu.inner import ACTIVATIONS

        dtype = matrix_dtype(x)
        return ACTIVATIONS[self.activation](x.to(dtype), self.into.weight.to(dtype), self.into.bias.to(dtype))


class Residual(nn.Module):
    """A sub-layer's way around: x + f(norm(x)), or norm(x + f(x)) as in the paper; dropout on what f adds.

    Where a sum is left to the next norm, so is the last bias of f, whose gradient costs little there.
    """

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.norm = settings.make_norm()
        self.norm_first = settings.norm_first
        self.dropout = settings.dropout

    @property
    def share(self) -> float:
        """Of what is added, how much is dropped."""
        return self.dropout if self.training else 0.0

    def forward(self, x: Stream, sublayer: Sublayer, bias: Tensor | None, real: Tensor | None) -> Stream:
        """x [T, D] -> [T, D]; `bias` [D] is the sub-layer's last one, if that can be added later."""
        left = bias if self.training else None
        if isinstance(x, Sum):
            total, norm = normed(self.norm, x)
            return Sum(total, sublayer(norm, left is None), left, self.share)
        if self.norm_first:
            added = sublayer(self.norm(x, real), True)
            return taps.tap(self, "stream", x + dropout(added, self.dropout, self.training))
        if quick(x, self.norm):
            return normed(self.norm, Sum(x, sublayer(x, left is None), left, self.share), exact=True)[1]
        added = sublayer(x, True)
        return taps.tap(self, "stream", self.norm(x + dropout(added, self.dropout, self.training), real))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with its way around."""

    def __init__(self, settings: BlockSettings) -> None:
        super().__init__()
        self.own = settings.make_own()
        self.own_residual = Residual(settings)
        self.feed_forward = FeedForward(settings, settings.squeeze)
        self.feed_forward_residual = Residual(settings)

    def forward(self, x: Stream, own: Layout, real: Tensor | None = None) -> Stream:
        """x [T, D] -> [T, D]."""
        x = self.own_residual(x, lambda h, biased: self.own(h, own, biased=biased), self.own.out.bias, real)
        rows = own.queries if isinstance(own, Packed) else None
        last = self.feed_forward.last_bias
        return self.feed_forward_residual(x, lambda h, biased: self.feed_forward(h, rows, biased), last, real)


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention over the source, then feed-forward."""

    def __init__(self, settings: BlockSettings, source_width: int | None = None) -> None:
        super().__init__()
        self.own = settings.make_own()
        self.own_residual = Residual(settings)
        self.cross = settings.make_cross(source_width or settings.width)
        self.cross_residual = Residual(settings)
        self.feed_forward = FeedForward(settings)
        self.feed_forward_residual = Residual(settings)

    def forward(
        self, x: Stream, own: Layout, cross: Layout, source: Tensor | None = None, real: Tensor | None = None
    ) -> Stream:
        """x [T, D] and source [S, Ds] -> [T, D]; source is None when the cross layout remembers it."""
        x = self.own_residual(x, lambda h, biased: self.own(h, own, biased=biased), self.own.out.bias, real)
        x = self.cross_residual(x, lambda h, biased: self.cross(h, cross, source, biased), self.cross.out.bias, real)
        last = self.feed_forward.last_bias
        return self.feed_forward_residual(x, lambda h, biased: self.feed_forward(h, None, biased), last, real)
