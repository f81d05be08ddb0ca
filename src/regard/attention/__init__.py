"""The one attention: score, mask, weigh, sum. Every model goes through `attend`."""

from regard.attention.heads import MultiHead
from regard.attention.kernels import attend, kernel, plain_weights
from regard.attention.layouts import Allowed, Cached, Dense, Layout, Memory, Packed
from regard.attention.masks import Causal, Everything, Given, Mask, Places, SameSentence, Window
from regard.attention.scores import Additive, Bilinear, Dot, ScaledDot, Score

__all__ = [
    "Additive",
    "Allowed",
    "Bilinear",
    "Cached",
    "Causal",
    "Dense",
    "Dot",
    "Everything",
    "Given",
    "Layout",
    "Mask",
    "Memory",
    "MultiHead",
    "Packed",
    "Places",
    "SameSentence",
    "ScaledDot",
    "Score",
    "Window",
    "attend",
    "kernel",
    "plain_weights",
]
