"""The one attention: score, mask, weigh, sum. Every model goes through `attend`."""

from regard.attention.allowed import Allowed
from regard.attention.heads import MultiHead
from regard.attention.kernels import attend, kernel, plain_weights
from regard.attention.kv_cache import BeamTree, KVCache, SourceCache
from regard.attention.layouts import Dense, Flat, Layout, Packed, pack
from regard.attention.masks import (
    Causal,
    Everything,
    Fixed,
    Given,
    Mask,
    Places,
    SameSentence,
    Segments,
    Strided,
    Window,
)
from regard.attention.scores import Additive, Bilinear, Dot, Relative, Rotary, ScaledDot, Score, placed

__all__ = [
    "Additive",
    "Allowed",
    "BeamTree",
    "Bilinear",
    "Causal",
    "Dense",
    "Dot",
    "Everything",
    "Fixed",
    "Flat",
    "Given",
    "KVCache",
    "Layout",
    "Mask",
    "MultiHead",
    "Packed",
    "Places",
    "Relative",
    "Rotary",
    "SameSentence",
    "ScaledDot",
    "Score",
    "Segments",
    "SourceCache",
    "Strided",
    "Window",
    "attend",
    "kernel",
    "pack",
    "placed",
    "plain_weights",
]
