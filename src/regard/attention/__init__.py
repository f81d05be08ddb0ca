"""Attention: score, mask, softmax, weighted sum. Every model calls `attend`."""

from regard.attention.backends import attend, plain_weights, use_backend
from regard.attention.kv_cache import BeamTree, KVCache, SourceCache
from regard.attention.layouts import AttentionLayout, DenseQK, PackedQK, StaticQK, pack
from regard.attention.mask_tables import MaskTable
from regard.attention.masks import (
    Causal,
    FixedBlocks,
    Full,
    Mask,
    SameSegment,
    SegmentPositions,
    Segments,
    Strided,
    TableMask,
    Window,
)
from regard.attention.multihead import MultiHeadAttention
from regard.attention.scores import Additive, Bilinear, Dot, Relative, Rotary, ScaledDot, Score

__all__ = [
    "Additive",
    "AttentionLayout",
    "BeamTree",
    "Bilinear",
    "Causal",
    "DenseQK",
    "Dot",
    "FixedBlocks",
    "Full",
    "KVCache",
    "Mask",
    "MaskTable",
    "MultiHeadAttention",
    "PackedQK",
    "Relative",
    "Rotary",
    "SameSegment",
    "ScaledDot",
    "Score",
    "SegmentPositions",
    "Segments",
    "SourceCache",
    "StaticQK",
    "Strided",
    "TableMask",
    "Window",
    "attend",
    "pack",
    "plain_weights",
    "use_backend",
]
