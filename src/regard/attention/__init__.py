"""Attention: score, mask, softmax, weighted sum. Every model calls `attend`."""

from regard.attention import sparse_backends  # noqa: F401  adds its backends to those of `attend`
from regard.attention.backends import attend, plain_weights, use_backend
from regard.attention.edges import EdgeQK, GraphAdditive
from regard.attention.kv_cache import BeamTree, KVCache, SourceCache
from regard.attention.layouts import AttentionLayout, DenseQK, MaskTable, PackedQK, attention_layout
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
from regard.attention.positional_scores import (
    BucketedBias,
    DistanceBuckets,
    Relative,
    RopeScaling,
    Rotary,
    SoftCapped,
)
from regard.attention.scores import Additive, Bilinear, Dot, ScaledDot, Score
from regard.attention.static_kv_cache import StaticBeamTree, StaticKVCache
from regard.attention.static_layout import StaticPackedLayout, StaticQK

__all__ = [
    "Additive",
    "AttentionLayout",
    "BeamTree",
    "Bilinear",
    "BucketedBias",
    "Causal",
    "DenseQK",
    "DistanceBuckets",
    "Dot",
    "EdgeQK",
    "FixedBlocks",
    "Full",
    "GraphAdditive",
    "KVCache",
    "Mask",
    "MaskTable",
    "MultiHeadAttention",
    "PackedQK",
    "Relative",
    "RopeScaling",
    "Rotary",
    "SameSegment",
    "ScaledDot",
    "Score",
    "SegmentPositions",
    "Segments",
    "SoftCapped",
    "SourceCache",
    "StaticBeamTree",
    "StaticKVCache",
    "StaticPackedLayout",
    "StaticQK",
    "Strided",
    "TableMask",
    "Window",
    "attend",
    "attention_layout",
    "plain_weights",
    "use_backend",
]
