"""The one attention: score, mask, weigh, sum. Every model goes through `attend`."""

from regard.attention.heads import MultiHead
from regard.attention.kernels import attend, kernel, plain_weights
from regard.attention.layouts import Allowed, Cached, Dense, Layout, Memory, Packed
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
    "Bilinear",
    "Cached",
    "Causal",
    "Dense",
    "Dot",
    "Everything",
    "Fixed",
    "Given",
    "Layout",
    "Mask",
    "Memory",
    "MultiHead",
    "Packed",
    "Places",
    "Relative",
    "Rotary",
    "SameSentence",
    "ScaledDot",
    "Score",
    "Segments",
    "Strided",
    "Window",
    "attend",
    "kernel",
    "placed",
    "plain_weights",
]
