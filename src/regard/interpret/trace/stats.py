"""Four statistics of an attention head. H heads, Q queries, K keys."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_DISTANCE = 1.0  # positions from the diagonal that still count as on it


def describe(weights: Tensor, special: Tensor, punctuation: Tensor) -> list[dict[str, float]]:
    """Compute statistics of weights [H, Q, K] per head, averaged over the rows that attend to anything:

    entropy       mean of -sum p log p, in nats: 0 for one token, log K for equal weights
    diagonal      share of the weight at most one position off the straight line from the first cell to the last
    special       share of the weight on special tokens, `special` [K]
    punctuation   share of the weight on punctuation, `punctuation` [K]
    """
    weights = weights.float()
    rows = (weights.sum(-1) > 0).sum(-1).clamp(min=1)  # [H]
    logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()  # 0 log 0 = 0; log is faster than xlogy
    near = diagonal(weights.shape[-2], weights.shape[-1]).to(weights.device)
    keys = weights.sum(-2)  # [H, K]: the weight that each key receives
    entropy = 0.0 - logs.mul_(weights).sum((-2, -1))  # 0.0 - x, so that there is no -0
    sums = (entropy, weights.flatten(1) @ near.flatten(), keys @ special, keys @ punctuation)
    names = ("entropy", "diagonal", "special", "punctuation")
    per_head = zip(*((each / rows).tolist() for each in sums), strict=True)
    return [dict(zip(names, map(significant, values), strict=True)) for values in per_head]


def diagonal(queries: int, keys: int) -> Tensor:
    """[Q, K] with 1 where a key is at most `MAX_DISTANCE` positions off the line from the first cell to the last."""
    expected = torch.arange(queries) * ((keys - 1) / max(queries - 1, 1))
    return ((torch.arange(keys) - expected[:, None]).abs() <= MAX_DISTANCE).float()


def significant(value: float, digits: int = 6) -> float:
    """Round to significant digits, for JSON that is no longer than float32 warrants."""
    return float(f"{value:.{digits}g}")
