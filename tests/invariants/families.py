"""The families that the invariants are tested for, with tiny random models and examples.

A new family is one entry in FAMILIES: a function from a seed to the [model] section of a tiny recipe. Options cycle
with the seed, so that a few seeds cover all of them; sizes are random. NOT_APPLICABLE says which invariants do not
apply to a family, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.graphs import NodeGraph, pack_graphs
from regard.data.trajectories import Episode, Scaling, window_batch
from regard.models import SequenceModel, build
from regard.models.bert import TextClassBatch
from regard.models.graph import GraphBatch
from regard.models.transformer import EncoderDecoder
from regard.models.vit import ImageBatch
from regard.packed import FeatureBatch, PackedLayout, PackedTokens, SeqBatch
from regard.recipes.schema import ModelSettings, Recipe
from regard.text import BOS, EOS

INVARIANTS = (
    "fused = plain",
    "packed = padded = one by one",
    "padding is never read",
    "cached = uncached",
    "beam of one = greedy",
    "widest beam = exhaustive search",
    "batch size and order change nothing",
    "resumed = uninterrupted",
    "failed writes lose nothing",
    "accumulated = one big batch",
    "recorder on = off",
    "checkpointed = plain",
    "n lines in = n lines out",
)
SEEDS = range(6)
FIRST_WORD = 4  # after the special tokens


def transformer(seed: int) -> dict[str, Any]:
    random = Random(f"transformer {seed}")
    heads = random.choice([1, 2, 4])
    return {
        "family": "transformer",
        "width": heads * random.choice([4, 8]) * (4 // heads),
        "heads": heads,
        "ffn_width": random.randint(8, 32),
        "encoder_layers": random.randint(1, 2),
        "decoder_layers": 2,
        "dropout": 0.0,
        "norm": ["layer", "rms", "batch"][seed % 3],
        "norm_first": seed % 2 == 0,
        "qk_norm": seed % 3 == 1,
        "positions": ["sinusoidal", "learned", "fraction", "bucketed", "index"][seed % 5],
        "activation": ["relu", "gelu", "gated"][(seed // 2) % 3],
        "head_width": [0, 6][seed % 2],
        "biases": seed % 5 != 3,
        "tie_embeddings": seed % 4 < 2,
        "max_positions": 64,
    }


def recurrent(seed: int) -> dict[str, Any]:
    random = Random(f"recurrent {seed}")
    kinds = [("none", None), ("luong", "dot"), ("bahdanau", "additive"), ("multihead", None), ("none", None)]
    attention, score = [*kinds, ("luong", "bilinear")][seed % 6]
    width = 2 * random.randint(2, 4) if attention != "multihead" else 8
    return {
        "family": "recurrent",
        "cell": ["lstm", "gru"][(seed // 2 + seed) % 2],
        "width": width,
        "encoder_width": width if score == "dot" else 2 * random.randint(2, 5),
        "embedding": random.randint(4, 9),
        "encoder_layers": 1 + seed % 2,
        "decoder_layers": 1 + (seed // 2) % 2,
        "bidirectional": seed % 4 != 3,
        "attention": attention,
        "score": score,
        "heads": 2,
        "feed": "start" if seed % 6 == 0 else "every",
        "dropout": 0.0,
        "tie_embeddings": seed % 3 != 1,
        "max_positions": 64,
    }


def gpt(seed: int) -> dict[str, Any]:
    random = Random(f"gpt {seed}")
    heads = random.choice([1, 2])
    return {
        "family": "gpt",
        "width": heads * 8,
        "heads": heads,
        "layers": random.randint(1, 2),
        "ffn_width": random.randint(8, 32),
        "dropout": 0.0,
        "norm": ["layer", "rms"][seed % 2],
        "activation": ["gelu-tanh", "gated", "silu"][seed % 3],
        "positions": ["learned", "rotary", "relative", "sinusoidal", "relative", "rotary"][seed % 6],
        "mask": ["causal", "window", "causal", "strided", "segments", "fixed"][seed % 6],
        "mask_size": random.randint(2, 5),
        "memory_size": random.randint(0, 4),
        "tie_embeddings": seed % 4 < 2,
        "scale_embeddings": seed % 2 == 1,
        "kv_heads": [0, 1, 1][seed % 3],
        "head_width": [0, 6, 0, 4][seed % 4],
        "norm_place": ["before", "output", "both", "before"][seed % 4],
        "qk_norm": seed % 3 == 1,
        "qk_norm_all": seed % 2 == 1,
        "qkv_bias": seed % 3 != 1,
        "out_bias": seed % 2 == 0,
        "ffn_bias": seed % 3 != 2,
        "norm_bias": seed % 4 != 2,
        "softcap": [0, 0, 0, 2.0][seed % 4],
        "logit_softcap": [0, 0, 3.0][seed % 3],
        "global_layers": [0] if seed % 2 else [],
        **ROTARY.get(seed, {}),
        "max_positions": 64,
    }


ROTARY: dict[int, dict[str, Any]] = {
    1: {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original": 16, "local_base": 100.0},
    5: {
        "rope_scaling": "yarn",
        "rope_factor": 2.0,
        "rope_original": 16,
        "rope_attention": 1.2,
        "unrotated_layers": [1],
    },
}


def bert(seed: int) -> dict[str, Any]:
    random = Random(f"bert {seed}")
    heads = random.choice([1, 2])
    return {
        "family": "bert",
        "task": "classify",
        "width": heads * 8,
        "heads": heads,
        "layers": random.randint(1, 2),
        "ffn_width": random.randint(8, 32),
        "dropout": 0.0,
        "norm": ["layer", "rms"][seed % 2],
        "norm_first": seed % 3 == 1,
        "positions": ["learned", "rotary", "relative", "bucketed", "sinusoidal"][seed % 5],
        "pooling": ["mean", "first"][(seed // 2) % 2],
        "max_positions": 64,
    }


def filler(seed: int) -> dict[str, Any]:
    return {**bert(seed), "task": "fill"}


def vit(seed: int) -> dict[str, Any]:
    random = Random(f"vit {seed}")
    heads = random.choice([1, 2])
    return {
        "family": "vit",
        "patch": [12, 6, 8][seed % 3],
        "width": heads * 8,
        "heads": heads,
        "layers": random.randint(1, 2),
        "ffn_width": random.randint(8, 32),
        "dropout": 0.0,
        "norm": ["layer", "rms"][seed % 2],
        "activation": ["gelu", "gated", "relu"][seed % 3],
        "score": ["scaled-dot", "additive"][(seed // 2) % 2],
        "pooling": ["mean", "class-token"][seed % 2],
        "class_position": seed % 4 == 1,
        "qkv_bias": seed % 3 != 1,
        "pixel_mean": [[0.5], [0.4, 0.5, 0.6]][seed % 2],
        "positions": ["learned", "sinusoidal"][(seed // 2) % 2],
        "stem": ["patches", "patches", "convolutions"][seed % 3],
    }


def captioner(seed: int) -> dict[str, Any]:
    patch, stem = [(12, "patches"), (8, "convolutions"), (16, "convolutions"), (24, "patches")][seed % 4]
    positions = "learned" if seed % 3 == 0 else "sinusoidal"
    settings = {"patch": patch, "stem": stem, "patch_positions": positions, "max_positions": 128}
    return {**transformer(seed), "family": "captioner", **settings}


def graph(seed: int) -> dict[str, Any]:
    random = Random(f"graph {seed}")
    heads = random.choice([1, 2])
    return {
        "family": "graph",
        "block": ["gat", "transformer"][seed % 2],
        "width": heads * 8,
        "heads": heads,
        "layers": random.randint(1, 3),
        "ffn_width": random.randint(8, 32),
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "score": ["graph-additive", "scaled-dot", "additive"][seed % 3],
        "normalise_features": seed % 4 < 2,
        "pooling": ["mean", "mean-sum"][seed % 2] if seed // 2 % 2 == 0 else "sum",
    }


def decision(seed: int) -> dict[str, Any]:
    random = Random(f"decision {seed}")
    heads = random.choice([1, 2])
    return {
        "family": "decision",
        "condition": ["return", "none"][seed % 2],
        "width": heads * 8,
        "heads": heads,
        "layers": random.randint(1, 2),
        "ffn_width": random.randint(8, 32),
        "dropout": 0.0,
        "norm": ["layer", "rms"][seed % 2],
        "activation": ["gelu", "gated", "relu"][seed % 3],
        "score": ["scaled-dot", "additive"][(seed // 2) % 2],
        "context": random.randint(3, 9),
        "max_steps": 64,
    }


def speech(seed: int) -> dict[str, Any]:
    random = Random(f"speech {seed}")
    masked = seed % 3 == 2  # SpecAugment draws masks for each pass, so that others can be compared
    return {
        **transformer(seed),
        "family": "speech",
        "norm": ["layer", "rms"][seed % 2],  # running statistics of few frames would enlarge rounding errors
        "mels": random.randint(3, 7),
        "subsample": [2, 4, 1][seed % 3],
        "stem": "whisper" if seed % 6 == 3 else "strided",
        "source_positions": [None, "learned", None][seed % 3],
        "ctc_weight": [0.3, 0.0, 0.6, 0.3][seed % 4],
        "band_masks": [2, 2] if masked else [0, 0],
        "frame_masks": [2, 4] if masked else [0, 0],
        "max_positions": 128,
    }


def speech_ctc(seed: int) -> dict[str, Any]:
    return {**speech(seed), "ctc_weight": 1.0, "decoder_layers": 0}


FAMILIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "transformer": transformer,
    "recurrent": recurrent,
    "gpt": gpt,
    "bert": bert,
    "bert (fill)": filler,
    "vit": vit,
    "captioner": captioner,
    "graph": graph,
    "decision": decision,
    "speech": speech,
    "speech (CTC)": speech_ctc,
}
NO_SEARCH = ("bert", "bert (fill)", "vit", "graph", "decision", "speech (CTC)")  # no search writes their output
SEARCH_INVARIANTS = (
    "cached = uncached",
    "beam of one = greedy",
    "widest beam = exhaustive search",
    "n lines in = n lines out",
)
READ_FEATURES = ("captioner", "speech", "speech (CTC)")  # families whose sources are feature vectors, not lines of text
NOT_APPLICABLE: dict[tuple[str, str], str] = {
    **{("n lines in = n lines out", family): "reads no lines" for family in READ_FEATURES},
    **{(invariant, family): "generates nothing" for invariant in SEARCH_INVARIANTS for family in NO_SEARCH},
    **{(invariant, "speech (CTC)"): "has no decoder" for invariant in SEARCH_INVARIANTS},
    ("padding is never read", "vit"): "all images have the same number of patches, so that batches have no padding",
    ("padding is never read", "graph"): "batches of graphs have no padding",
    ("padding is never read", "decision"): "batches of episodes have no padding",
}


@dataclass(frozen=True)
class Case:
    """A tiny model with random weights, and random sentence pairs with their EOS."""

    model: SequenceModel
    sources: list[list[int]]
    targets: list[list[int]]
    vocabulary: int  # of the target
    fills: bool = False  # whether it is a masked language model

    def batch(self, spare: int = 0, only: list[int] | None = None) -> SeqBatch:
        """Pack all pairs (or only some, in this order), with `spare` positions of padding on each side."""
        chosen = range(len(self.sources)) if only is None else only
        sources, targets = [self.sources[i] for i in chosen], [self.targets[i] for i in chosen]
        sizes = [sum(map(len, side)) + spare for side in (sources, targets)]
        if not self.fills:
            return self.pack(sources, targets, *sizes)
        row = PackedTokens.from_lists(sources, sizes[0])
        return SeqBatch(row, row, (row.ids + 1) % self.vocabulary, row.layout.is_token & (row.ids % 2 == 0))

    def pack(self, sources: list[Any], targets: list[list[int]], *sizes: int) -> Any:
        """A batch for teacher forcing; `sizes` of both sides include padding (default: none)."""
        source_size, target_size = sizes or (None, None)
        return SeqBatch.from_lists(sources, targets, bos=BOS, source_size=source_size, target_size=target_size)

    def encoder_layout(self, batch: Any) -> PackedLayout:
        """How the vectors that the encoder reads are packed."""
        return batch.source.layout

    def split(self, batch: Any, values: Tensor) -> list[Tensor]:
        """Split values of the targets of a batch (logits or labels) by example, without padding."""
        return batch.inputs.layout.split(values)

    def objective(self, batch: Any, logits: Tensor) -> Tensor:
        """A function of the logits of the targets, whose gradients are compared."""
        return F.cross_entropy(torch.cat(self.split(batch, logits)), torch.cat(self.split(batch, batch.labels)))

    def cast(self, batch: Any, dtype: torch.dtype) -> Any:
        """The batch with floating-point inputs of this type."""
        return batch

    def source(self, only: list[int] | None = None) -> Any:
        return self.batch(only=only).source

    def next_logits(self, source: Any, history: list[int]) -> Tensor:
        """[V] logits of the token after `history`, which begins with BOS, by one full forward pass."""
        return self.model.logits(self.pack([source], [[*history[1:], EOS]]))[-1]


@dataclass(frozen=True)
class ClassCase(Case):
    """A tiny classifier of texts; the class of a text is the first token of its target."""

    def batch(self, spare: int = 0, only: list[int] | None = None) -> Any:
        chosen = range(len(self.sources)) if only is None else only
        sources, labels = [self.sources[i] for i in chosen], [self.targets[i][0] for i in chosen]
        source = PackedTokens.from_lists(sources, sum(map(len, sources)) + spare)
        return TextClassBatch(source, torch.tensor(labels))

    def split(self, batch: Any, values: Tensor) -> list[Tensor]:
        return list(values.split(1))


@dataclass(frozen=True)
class FeatureCase(Case):
    """A tiny model that reads feature vectors and writes texts; `sources` are arrays [n, F]."""

    def pack(self, sources: list[Any], targets: list[list[int]], *sizes: int) -> Any:
        source_size, target_size = sizes or (None, None)
        return FeatureBatch.from_lists(sources, targets, bos=BOS, source_size=source_size, target_size=target_size)

    def encoder_layout(self, batch: Any) -> PackedLayout:
        assert isinstance(self.model, EncoderDecoder)
        return self.model.embed_source(batch.source)[1]

    def cast(self, batch: Any, dtype: torch.dtype) -> Any:
        return replace(batch, source=replace(batch.source, values=batch.source.values.to(dtype)))


@dataclass(frozen=True)
class CTCCase(FeatureCase):
    """A tiny model without a decoder, whose logits are those of frames."""

    def split(self, batch: Any, values: Tensor) -> list[Tensor]:
        return self.encoder_layout(batch).split(values)

    def objective(self, batch: Any, logits: Tensor) -> Tensor:
        return torch.cat(self.split(batch, logits)).log_softmax(-1).square().mean()


@dataclass(frozen=True)
class ImageCase(Case):
    """A tiny model of images, and random images with their classes; `sources` and `targets` are empty."""

    examples: ImageBatch | None = None

    def batch(self, spare: int = 0, only: list[int] | None = None) -> Any:
        """A batch of all images, or only some; `spare` has no effect, since there is no padding."""
        assert self.examples is not None
        chosen = list(range(self.examples.num_targets)) if only is None else only
        return ImageBatch(self.examples.images[chosen], self.examples.labels[chosen])

    def split(self, batch: Any, values: Tensor) -> list[Tensor]:
        return list(values.split(1))

    def cast(self, batch: Any, dtype: torch.dtype) -> Any:
        return replace(batch, images=batch.images.to(dtype))


@dataclass(frozen=True)
class GraphCase(ImageCase):
    """A tiny model of graphs, and random graphs with their classes."""

    graphs: tuple[NodeGraph, ...] = ()

    def batch(self, spare: int = 0, only: list[int] | None = None) -> Any:
        chosen = list(range(len(self.graphs))) if only is None else only
        labels = torch.tensor([len(self.graphs[i].edges) % self.vocabulary for i in chosen])
        return GraphBatch(pack_graphs([self.graphs[i] for i in chosen]), labels)

    def cast(self, batch: Any, dtype: torch.dtype) -> Any:
        weights = batch.graphs.feature_weights.to(dtype)
        return replace(batch, graphs=replace(batch.graphs, feature_weights=weights))


@dataclass(frozen=True)
class DecisionCase(Case):
    """A tiny model that acts, and random episodes."""

    windows: tuple[tuple[Episode, int, int], ...] = ()

    def batch(self, spare: int = 0, only: list[int] | None = None) -> Any:
        width = self.windows[0][0].states.shape[1]
        scaling = Scaling(np.zeros(width, np.float32), np.ones(width, np.float32), 1.0, 1.0)
        chosen = range(len(self.windows)) if only is None else only
        return window_batch([self.windows[i] for i in chosen], scaling)

    def split(self, batch: Any, values: Tensor) -> list[Tensor]:
        return batch.layout.split(values)

    def cast(self, batch: Any, dtype: torch.dtype) -> Any:
        return replace(batch, returns=batch.returns.to(dtype), states=batch.states.to(dtype))


def random_episode(seed: int, features: int, actions: int) -> Episode:
    random = np.random.default_rng(seed)
    steps = int(random.integers(1, 9))
    states, rewards = (random.normal(size=shape).astype(np.float32) for shape in ((steps, features), steps))
    return Episode(states, random.integers(0, actions, steps), rewards)


def random_graph(random: Random, features: int) -> NodeGraph:
    """A graph of one to eight nodes; a node may have no features and no edges."""
    nodes = random.randint(1, 8)
    edges = [(random.randrange(nodes), random.randrange(nodes)) for _ in range(random.randint(0, 2 * nodes))]
    rows = sorted(random.randrange(nodes) for _ in range(3 * nodes))
    return NodeGraph(
        tuple(map(str, range(nodes))),
        np.array(edges, np.int64).reshape(-1, 2),
        np.array(rows),
        np.array([random.randrange(features) for _ in rows]),
        np.array([random.uniform(0.1, 2) for _ in rows], np.float32),
    )


def settings(family: str, seed: int, **changes: Any) -> ModelSettings:
    model = {**FAMILIES[family](seed), **changes}
    return Recipe.model_validate({**data_for(model), "model": model}).model


def data_for(model: dict[str, Any]) -> dict[str, Any]:
    """Return the [data] and [text] sections for a model."""
    if model["family"] == "vit":
        return {"data": {"corpus": "shapes"}}
    if model["family"] == "captioner":
        return {"data": {"corpus": "scenes"}}
    if model["family"] == "graph":
        return {"data": {"corpus": "citations"}}
    if model["family"] == "decision":
        return {"data": {"corpus": "key-door"}}
    if model["family"] == "speech":
        return {"data": {"corpus": "tones"}}
    if model.get("task") == "fill":
        return {"data": {"corpus": "stories"}}
    return {"data": {"corpus": "copy"}}


def make(
    family: str,
    seed: int,
    *,
    pairs: int = 5,
    longest: int = 8,
    vocabulary: int | None = None,
    **changes: Any,
) -> Case:
    """Make a random model in evaluation mode; `vocabulary`, if given, is the size for both sides."""
    random = Random(f"{family} {seed} sentences")
    fills = FAMILIES[family](seed).get("task") == "fill"
    shared = vocabulary is not None or fills or seed % 3 != 1
    source_size = vocabulary or random.randint(12, 24)
    target_size = source_size if shared else random.randint(12, 24)
    torch.manual_seed(seed)
    model = build(settings(family, seed, **changes), source_size, target_size, shared)
    with torch.no_grad():  # biases and gains that start as zeros or ones would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)

    if family == "vit":
        images = ImageBatch(torch.rand(pairs, 24, 24, 3), torch.randint(target_size, (pairs,)))
        return ImageCase(model.eval(), [], [], target_size, examples=images)

    if family == "graph":
        graphs = tuple(random_graph(random, source_size) for _ in range(pairs))
        return GraphCase(model.eval(), [], [], target_size, graphs=graphs)
    if family == "decision":
        episodes = [random_episode(10 * seed + n, source_size, target_size) for n in range(pairs)]
        windows = tuple((episode, 0, len(episode.rewards)) for episode in episodes)
        steps = [list(range(end)) for _, _, end in windows]
        return DecisionCase(model.eval(), steps, [], target_size, windows=windows)

    def sentences(size: int) -> list[list[int]]:
        lengths = [random.randint(0, longest - 1) for _ in range(pairs)]
        return [[*(random.randrange(FIRST_WORD, size) for _ in range(n)), EOS] for n in lengths]

    kind: type[Case] = ClassCase if family == "bert" else Case
    if family in READ_FEATURES:
        kind = CTCCase if family == "speech (CTC)" else FeatureCase
    sources = feature_rows(model, random, pairs) if family in READ_FEATURES else sentences(source_size)
    made = kind(model, sources, sentences(target_size), target_size, fills)
    if any("running" in name for name, _ in model.named_buffers()):  # running statistics of batch norm
        with torch.no_grad():
            for _ in range(20):
                model.logits(made.batch())
    model.eval()
    return made


def feature_rows(model: Any, random: Random, count: int) -> list[Any]:
    """Random frames, or patches: without convolutions as if images had different sizes, up to the model's."""
    settings = model.settings
    if settings.family == "speech":
        return [torch.randn(random.randint(1, 12), settings.mels) for _ in range(count)]
    most = settings.grid**2
    least = most if settings.stem == "convolutions" else 1
    return [torch.rand(random.randint(least, most), settings.patch_features) for _ in range(count)]


def gradients(model: SequenceModel, objective: Tensor) -> dict[str, Tensor]:
    """Return gradients by parameter name; zeros for unused parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(objective, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def logits_of(case: Case, batch: Any) -> list[Tensor]:
    """Return logits [length of the target, V] for each example of the batch."""
    with torch.no_grad():
        return case.split(batch, case.model.logits(batch))
