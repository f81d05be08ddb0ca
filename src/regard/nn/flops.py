"""FLOPs of attention and of Transformer blocks, by formula: the multiplications and additions of their matmuls.

A matmul of [a, b] with [b, c] takes 2 a b c. Norms, activations, softmaxes and look-ups are left out, as is usual, and
so is padding. Causal attention counts in full. D is the width.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.attention import Relative, Score
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import GATED
from regard.registry import SCORES


def num_pairs(lengths: Sequence[int], key_lengths: Sequence[int]) -> int:
    """The number of pairs of a query and a key, over sentences with these lengths."""
    return sum(queries * keys for queries, keys in zip(lengths, key_lengths, strict=True))


def attention(
    score: type[Score], width: int, heads: int, lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> int:
    """Scores and weighted sums of all heads, of `width` features together, without the projections of the layer."""
    key_lengths = lengths if key_lengths is None else key_lengths
    return attention_on_pairs(score, width, heads, sum(lengths), sum(key_lengths), num_pairs(lengths, key_lengths))


def attention_on_pairs(score: type[Score], width: int, heads: int, queries: int, keys: int, pairs: int) -> int:
    """The same, if `pairs` of these queries and keys are scored."""
    features = width // heads
    return heads * score.flops(features, features, queries, keys, pairs) + 2 * pairs * width


def _self_attn(config: BlockConfig, lengths: Sequence[int]) -> int:
    score = Relative if config.positions == "relative" else SCORES[config.score]
    queries, keys = _rows(config)
    projections = 4 * sum(lengths) * config.width * (queries + keys)  # queries, keys, values, output
    return projections + attention(score, queries, config.heads, lengths)


def _rows(config: BlockConfig) -> tuple[int, int]:
    """The features of all queries of a token, and of all its keys."""
    return config.heads * config.head_features, (config.kv_heads or config.heads) * config.head_features


def _cross_attn(config: BlockConfig, lengths: Sequence[int], source_lengths: Sequence[int]) -> int:
    score = SCORES[config.cross_score or config.score]
    queries, keys = _rows(config)
    projections = (
        4 * (sum(lengths) * queries + sum(source_lengths) * keys) * config.width
    )  # queries, output; keys, values
    return projections + attention(score, queries, config.heads, lengths, source_lengths)


def _feed_forward(config: BlockConfig, tokens: int) -> int:
    return 2 * tokens * config.width * config.ffn_width * (3 if config.activation.startswith(GATED) else 2)


def encoder_block(config: BlockConfig, lengths: Sequence[int]) -> int:
    """A block of self-attention and feed-forward layer; the gate of `se_dim` features is computed per sentence."""
    gate = 4 * len(lengths) * config.width * config.se_dim
    return _self_attn(config, lengths) + _feed_forward(config, sum(lengths)) + gate


def graph_block(config: BlockConfig, nodes: int, edges: int) -> int:
    """A block whose self-attention scores the edges of a graph."""
    attn = attention_on_pairs(SCORES[config.score], config.width, config.heads, nodes, nodes, edges)
    return 8 * nodes * config.width**2 + attn + _feed_forward(config, nodes)


def decoder_block(config: BlockConfig, lengths: Sequence[int], source_lengths: Sequence[int]) -> int:
    """A block with cross-attention to a source; its keys and values are computed in every block."""
    attn = _self_attn(config, lengths) + _cross_attn(config, lengths, source_lengths)
    return attn + _feed_forward(config, sum(lengths))
