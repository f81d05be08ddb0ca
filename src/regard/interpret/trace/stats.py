"""What can be said of a head in four numbers. H heads, Q queries, K keys."""

from __future__ import annotations

import torch
from torch import Tensor

NEAR = 1.0  # places from the diagonal that still count as on it


def describe(weights: Tensor, marks: Tensor, punctuation: Tensor) -> list[dict[str, float]]:
    """Of weights [H, Q, K], per head, over the rows that look at anything:

    entropy       mean of -sum p log p, in nats: 0 looks at one token, log K at all alike
    diagonal      share of the weight at most one place off the straight line from first to last
    marks         share of the weight on begin and end marks and tags, `marks` [K]
    punctuation   share of the weight on punctuation, `punctuation` [K]
    """
    weights = weights.float()
    rows = (weights.sum(-1) > 0).sum(-1).clamp(min=1)  # [H]
    logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()  # 0 log 0 = 0, and log runs faster than xlogy
    line = diagonal(weights.shape[-2], weights.shape[-1]).to(weights.device)
    keys = weights.sum(-2)  # [H, K]: what each was given
    entropy = 0.0 - logs.mul_(weights).sum((-2, -1))  # never -0
    sums = (entropy, weights.flatten(1) @ line.flatten(), keys @ marks, keys @ punctuation)
    named = zip(*((each / rows).tolist() for each in sums), strict=True)
    return [
        {"entropy": significant(e), "diagonal": significant(d), "marks": significant(m), "punctuation": significant(p)}
        for e, d, m, p in named
    ]


def diagonal(queries: int, keys: int) -> Tensor:
    """[Q, K] 1 where a key is at most `NEAR` places off the line from the first cell to the last."""
    at = torch.arange(queries) * ((keys - 1) / max(queries - 1, 1))
    return ((torch.arange(keys) - at[:, None]).abs() <= NEAR).float()


def significant(value: float, digits: int = 6) -> float:
    """A number for JSON, with no more digits than float32 has."""
    return float(f"{value:.{digits}g}")
