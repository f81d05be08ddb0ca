"""Attention to a KV cache without a model, which would append the tokens to the tree."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.attention import KVCache, attend


def attend_cached(query: Tensor, key: Tensor, value: Tensor, cache: KVCache, **options: Any) -> Tensor:
    """Append the tokens of a prompt [N, T, H, D] or of a step [N * K, H, D] to the cache, and attend to it."""
    cache.tree.append(query.shape[1] if query.dim() == 4 else None, query.device)
    return attend(query, key, value, cache, **options)
