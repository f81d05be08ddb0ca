"""Norms: x [T, D] -> [T, D]. `is_token` [T] is False for padding, which batch statistics leave out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.registry import NORMS


@NORMS.register("layer")
class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation over the features of each token."""

    mixes_tokens = False  # whether the output of a token depends on other tokens

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        return super().forward(x)


@NORMS.register("rms")
class RMSNorm(nn.RMSNorm):
    """x / root-mean-square over the features of each token; no centring, no bias."""

    mixes_tokens = False

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        return super().forward(x)


class NoNorm(nn.Module):
    """x itself, in the place of a norm."""

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        return x


@NORMS.register("batch")
class BatchNorm(nn.Module):
    """(x - mean) / deviation of each feature over the tokens of the batch; for comparison.

    In training, the output of a token depends on the rest of its batch; in evaluation, running statistics are used.
    """

    running_mean: Tensor
    running_variance: Tensor
    mixes_tokens = True
    track_running_stats = True  # False while a block is recomputed for its gradients (activation checkpointing)

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_variance", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        if not self.training:
            mean, variance = self.running_mean, self.running_variance
        else:
            tokens = x.float() if is_token is None else torch.where(is_token[:, None], x.float(), 0.0)
            n = x.new_tensor(len(x), dtype=torch.float32) if is_token is None else is_token.sum().clamp(min=1)
            mean = tokens.sum(0) / n
            centred = tokens - mean if is_token is None else torch.where(is_token[:, None], tokens - mean, 0.0)
            variance = centred.square().sum(0) / n
            if self.track_running_stats:
                with torch.no_grad():
                    self.running_mean.lerp_(mean, self.momentum)
                    self.running_variance.lerp_(variance * n / (n - 1).clamp(min=1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
