"""FLOPs of a model on a batch: the multiplications and additions of its matrix products, by formula.

Norms, activations, softmaxes and look-ups are left out, as is usual, and so is padding. Causal attention counts in
full. T target and S source tokens, N sentences, D width, V vocabulary; a product of [a, b] with [b, c] is 2 a b c.

Not `torch.utils.flop_counter.FlopCounterMode`, which counts the operations of a pass while it runs: it does not see
into our Triton kernels or a captured graph, counts padding, and would slow every batch down. The tests compare the
formula with it where it sees everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.models.bert import BertSettings
from regard.models.gpt import GPTSettings
from regard.models.recurrent import RecurrentSettings
from regard.models.transformer import TransformerSettings
from regard.packed import SeqBatch
from regard.recipes.schema import ModelSettings

BACKWARD = 2  # the gradients of both factors of a product cost twice the product


@dataclass(frozen=True)
class Sizes:
    """Counts of a batch on which the FLOPs depend: tokens, sentences, and pairs of a query and a key."""

    source: int
    target: int
    sentences: int
    self_source: int  # pairs within the source
    self_target: int
    cross: int
    joined: int  # pairs within source and target as one sequence
    num_targets: int

    @classmethod
    def of(cls, batch: SeqBatch) -> Sizes:
        s, t = batch.source.layout.lengths, batch.inputs.layout.lengths
        pairs = list(zip(s, t, strict=True))
        return cls(
            source=sum(s),
            target=sum(t),
            sentences=len(t),
            self_source=sum(n * n for n in s),
            self_target=sum(n * n for n in t),
            cross=sum(a * b for a, b in pairs),
            joined=sum((a + b) ** 2 for a, b in pairs),
            num_targets=batch.num_targets,
        )


def forward(settings: ModelSettings, batch: SeqBatch, vocabulary: int) -> int:
    """FLOPs of a forward pass with its loss; `vocabulary` is the target's (or the number of classes)."""
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
    """FLOPs of a forward and a backward pass, without activations that are recomputed."""
    return (1 + BACKWARD) * forward(settings, batch, vocabulary)


def _feed_forward(settings: TransformerSettings | GPTSettings | BertSettings) -> int:
    """FLOPs per token."""
    return 2 * settings.width * settings.ffn_width * (3 if settings.activation == "gated" else 2)


def _projections(score: str, width: int, heads: int, queries: int, keys: int) -> int:
    """The projections of queries and keys, per head, that are part of a score."""
    projected = {"additive": queries + keys, "bilinear": queries}.get(score, 0)
    return 2 * projected * width * (width // heads)


def _transformer(settings: TransformerSettings, sizes: Sizes, vocabulary: int) -> int:
    d, inner = settings.width, _feed_forward(settings)
    encoder = sizes.source * (8 * d * d + inner) + 4 * sizes.self_source * d
    encoder += sizes.sentences * 4 * d * settings.se_dim
    encoder += _projections(settings.score, d, settings.heads, sizes.source, sizes.source)
    decoder = sizes.target * (12 * d * d + inner) + sizes.source * 4 * d * d  # self: q, k, v, o; cross: q, o; then k, v
    decoder += 4 * (sizes.self_target + sizes.cross) * d
    decoder += _projections(settings.score, d, settings.heads, sizes.target, sizes.target)
    decoder += _projections(settings.cross_score or settings.score, d, settings.heads, sizes.target, sizes.source)
    return settings.encoder_layers * encoder + settings.decoder_layers * decoder + 2 * sizes.target * d * vocabulary


def _body(settings: GPTSettings | BertSettings, tokens: int, pairs: int) -> int:
    """FLOPs of self-attention blocks. Relative positions also score each distance, with as many features again."""
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
    heads = sizes.num_targets if settings.task == "fill" else sizes.sentences
    return _body(settings, sizes.source, sizes.self_source) + 2 * heads * d * (d + vocabulary)


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
