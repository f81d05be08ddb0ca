"""How much arithmetic a model needs for a batch: the multiplications and additions of its matrix products, by formula.

Norms, activations, softmaxes and look-ups are left out, as is usual, and so is padding: what counts is what the tokens
need. Attention counts whole, also where it is causal. T target and S source tokens, N sentences, D width, V vocabulary;
a product of [a, b] with [b, c] is 2 a b c.

A formula and not `torch.utils.flop_counter.FlopCounterMode`: that counts the operations of a pass that it watches. It
does not see into our Triton kernels or a captured graph, counts padding, and would slow every batch down. The tests
hold the formula against it where it sees everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.packed import SeqBatch
from regard.recipes.schema import BertSettings, GPTSettings, ModelSettings, RecurrentSettings, TransformerSettings

BACKWARD = 2  # the gradients of both factors of a product: twice as much again as the product


@dataclass(frozen=True)
class Sizes:
    """What of a batch decides over the work: tokens of either row, sentences, and pairs of a query and a key."""

    source: int
    target: int
    sentences: int
    own_source: int  # pairs within the source
    own_target: int
    cross: int
    joined: int  # pairs within source and target laid as one
    counted: int  # places that count in the loss

    @classmethod
    def of(cls, batch: SeqBatch) -> Sizes:
        s, t = batch.source.layout.lengths, batch.inputs.layout.lengths
        pairs = list(zip(s, t, strict=True))
        return cls(
            source=sum(s),
            target=sum(t),
            sentences=len(t),
            own_source=sum(n * n for n in s),
            own_target=sum(n * n for n in t),
            cross=sum(a * b for a, b in pairs),
            joined=sum((a + b) ** 2 for a, b in pairs),
            counted=batch.num_targets,
        )


def forward(settings: ModelSettings, batch: SeqBatch, vocabulary: int) -> int:
    """Of a forward pass with its loss, in FLOP; `vocabulary` is the target's (or the number of classes)."""
    sizes = Sizes.of(batch)
    if isinstance(settings, RecurrentSettings):
        return _recurrent(settings, sizes, vocabulary)
    if isinstance(settings, GPTSettings):
        return _gpt(settings, sizes, vocabulary)
    if isinstance(settings, BertSettings):
        return _bert(settings, sizes, vocabulary)
    assert isinstance(settings, TransformerSettings)
    return _transformer(settings, sizes, vocabulary)


def update(settings: ModelSettings, batch: SeqBatch, vocabulary: int) -> int:
    """Of a forward and a backward pass. What is computed again to save memory does not count twice."""
    return (1 + BACKWARD) * forward(settings, batch, vocabulary)


def _feed_forward(settings: TransformerSettings | GPTSettings | BertSettings) -> int:
    """A token's."""
    return 2 * settings.width * settings.ffn_width * (3 if settings.activation == "gated" else 2)


def _projections(score: str, width: int, heads: int, queries: int, keys: int) -> int:
    """The projections of queries and keys, per head, that are part of a score."""
    projected = {"additive": queries + keys, "bilinear": queries}.get(score, 0)
    return 2 * projected * width * (width // heads)


def _transformer(settings: TransformerSettings, sizes: Sizes, vocabulary: int) -> int:
    d, inner = settings.width, _feed_forward(settings)
    reads = sizes.source * (8 * d * d + inner) + 4 * sizes.own_source * d
    reads += sizes.sentences * 4 * d * settings.se_dim
    reads += _projections(settings.score, d, settings.heads, sizes.source, sizes.source)
    writes = sizes.target * (12 * d * d + inner) + sizes.source * 4 * d * d  # its own q, k, v, o; q, o; then k, v
    writes += 4 * (sizes.own_target + sizes.cross) * d
    writes += _projections(settings.score, d, settings.heads, sizes.target, sizes.target)
    writes += _projections(settings.cross_score or settings.score, d, settings.heads, sizes.target, sizes.source)
    return settings.encoder_layers * reads + settings.decoder_layers * writes + 2 * sizes.target * d * vocabulary


def _body(settings: GPTSettings | BertSettings, tokens: int, pairs: int) -> int:
    """Blocks of self-attention. Relative positions ask each distance besides: as many features again."""
    d = settings.width
    layer = tokens * (8 * d * d + _feed_forward(settings)) + 4 * pairs * d
    layer += _projections(settings.score, d, settings.heads, tokens, tokens)
    if settings.positions == "relative":
        layer += 2 * tokens * d * (d // settings.heads) + 2 * pairs * d
    return settings.layers * layer


def _gpt(settings: GPTSettings, sizes: Sizes, vocabulary: int) -> int:
    body = _body(settings, sizes.source + sizes.target, sizes.joined)
    return body + 2 * sizes.target * settings.width * vocabulary


def _bert(settings: BertSettings, sizes: Sizes, vocabulary: int) -> int:
    d = settings.width
    heads = sizes.counted if settings.task == "fill" else sizes.sentences
    return _body(settings, sizes.source, sizes.own_source) + 2 * heads * d * (d + vocabulary)


def _recurrent(settings: RecurrentSettings, sizes: Sizes, vocabulary: int) -> int:
    e, d, i = settings.encoder_width, settings.width, settings.embedding
    gates, states = (4, 2) if settings.cell == "lstm" else (3, 1)
    directions = 2 if settings.bidirectional else 1
    half = e // directions
    fed = e if settings.feed == "every" else 0
    attends_first, score = settings.attention == "bahdanau", settings.attention_score
    total = 0
    for layer in range(settings.encoder_layers):
        total += directions * 2 * sizes.source * gates * half * ((e if layer else i) + half)
    for layer in range(settings.decoder_layers):
        inputs = d if layer else i + fed + (e if attends_first else 0)
        total += 2 * sizes.target * gates * d * (inputs + d) + 2 * sizes.sentences * e * d * states
    beside = fed + (e + i if attends_first else 0)
    if settings.attention == "multihead":
        total += sizes.target * 4 * d * d + sizes.source * 4 * e * d + 4 * sizes.cross * d
        total += _projections(score, d, settings.heads, sizes.target, sizes.source)
        beside += d
    elif settings.attention != "none":
        total += 2 * sizes.cross * (d + e)
        if score == "additive":
            total += 2 * sizes.source * e * d + 2 * sizes.target * d * d
        elif score == "bilinear":
            total += 2 * sizes.target * d * e
        beside += 0 if attends_first else e
    features = i if settings.tie_embeddings else d
    return total + 2 * sizes.target * ((d + beside) * features + features * vocabulary)
