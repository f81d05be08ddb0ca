"""Attention over graphs: a node attends to its neighbours, for the class of a node or a property of a whole graph.

`block = "gat"` is the graph attention network (Velickovic et al. 2018); `block = "transformer"` is the encoder of the
Transformer with the graph as its mask. T nodes of a packed batch, N graphs, M features of nodes, E edges, H heads, D
width, C outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from regard import taps
from regard.attention import EdgeQK, attend
from regard.dropout import dropout
from regard.models.base import SequenceModel
from regard.nn import flops
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, EncoderBlock
from regard.packed import Batch, PackedLayout
from regard.recipes.schema import Activation, ScoreName, SizedSettings, TokenNorm
from regard.registry import MODELS, SCORES

SUM_SCALE = 0.1  # scale of sums beside means: sums over ten nodes are as large as means


@dataclass(frozen=True)
class PackedGraphs:
    """N graphs in one: their nodes and edges are concatenated.

    A node is a bag of features: node t has the features `feature_ids[i]` with the weights `feature_weights[i]`, for i
    from `feature_offsets[t]` to the offset of the next node. Node `receivers[e]` attends to node `senders[e]`;
    receivers are sorted, and every node has an edge to itself.
    """

    layout: PackedLayout
    feature_ids: Tensor  # [M]
    feature_weights: Tensor  # [M]
    feature_offsets: Tensor  # [T]
    senders: Tensor  # [E]
    receivers: Tensor  # [E]


@dataclass(frozen=True)
class GraphBatch(Batch):
    """Graphs, and what is predicted: labels of the nodes `nodes` or, if that is None, of whole graphs.

    Labels are class ids [Q], or numbers [Q, C].
    """

    graphs: PackedGraphs
    labels: Tensor
    nodes: Tensor | None = None  # [Q]

    @property
    def target_mask(self) -> Tensor:
        return torch.ones(len(self.labels), dtype=torch.bool, device=self.labels.device)

    @property
    def num_targets(self) -> int:
        return len(self.labels)


class GraphSettings(SizedSettings):
    """Attention over the edges of graphs."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=64, heads=8, layers=2, ffn_width=128, dropout=0.0),
        "small": dict(width=128, heads=8, layers=4, ffn_width=256, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "tiny"
    TASKS: ClassVar[tuple[str, ...]] = ("node-classification", "molecule-regression")

    family: Literal["graph"] = Field("graph", description="model family")
    size: Literal["tiny", "small"] = Field("tiny", description="preset for the sizes below; each can be set separately")
    block: Literal["gat", "transformer"] = Field(
        "gat", description="layers of a graph attention network, or of the Transformer's encoder"
    )
    width: int = Field(..., ge=2, description="hidden size")
    heads: int = Field(..., ge=1, description="attention heads; each has width / heads features")
    layers: int = Field(..., ge=1, description="number of layers: how many edges away a node can see")
    ffn_width: int = Field(..., ge=1, description="transformer: hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on features of nodes and on hidden features"
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of attention weights")
    score: ScoreName = Field("graph-additive", description="attention score of queries and keys")
    activation: Activation = Field("gelu", description="transformer: activation of the feed-forward layers")
    norm: TokenNorm = Field("layer", description="transformer: normalisation layer, before each sub-layer")
    normalise_features: bool = Field(False, description="divide the weights of each node's features by their sum")
    pooling: Literal["mean", "sum", "mean-sum"] = Field(
        "mean", description="whole graphs: mean or sum over the nodes, or a feed-forward layer of both"
    )

    @model_validator(mode="after")
    def _check_pooling(self) -> GraphSettings:
        if self.pooling == "mean-sum" and self.block == "gat":
            raise ValueError('pooling = "mean-sum" needs block = "transformer"')
        return self

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.layers, 0

    def forward_flops(self, batch: GraphBatch, target_size: int) -> int:
        nodes, edges = len(batch.graphs.feature_offsets), len(batch.graphs.senders)
        embedding = 2 * len(batch.graphs.feature_ids) * self.width
        if self.block == "transformer":
            blocks = self.layers * flops.graph_block(BlockConfig.from_settings(self), nodes, edges)
            hidden = 2 * self.width if self.pooling == "mean-sum" else 0
            return embedding + blocks + 2 * batch.num_targets * self.width * (hidden + target_size)
        score, hidden = SCORES[self.score], self.layers - 1
        attention = hidden * flops.attention_on_pairs(score, self.width, self.heads, nodes, nodes, edges)
        attention += flops.attention_on_pairs(score, target_size, 1, nodes, nodes, edges)
        projections = max(hidden - 1, 0) * 2 * nodes * self.width**2 + 2 * nodes * self.width * target_size
        return embedding + projections + attention

    def summary(self) -> str:
        return "GAT" if self.block == "gat" else "graph Transformer"


class GATLayer(nn.Module):
    """elu(concatenation over the heads of attend(W x, W x, W x) + b): one projection serves queries, keys and values.

    Without `in_width`, x is already projected. The last layer has no elu.
    """

    def __init__(self, settings: GraphSettings, heads: int, in_width: int | None, width: int, is_last: bool) -> None:
        super().__init__()
        self.heads, self.is_last, self.dropout = heads, is_last, settings.dropout
        self.proj = None if in_width is None else nn.Linear(in_width, width, bias=False)
        if self.proj is not None:
            nn.init.xavier_uniform_(self.proj.weight)
        self.score = SCORES[settings.score](width // heads, width // heads, heads)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, layout: EdgeQK, is_token: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, width]."""
        if self.proj is not None:
            x = self.proj(dropout(x, self.dropout, self.training))
        nodes = x.unflatten(-1, (self.heads, -1))  # [T, H, D / H]
        heads = taps.tap(self, "heads", attend(nodes, nodes, nodes, layout, score=self.score, owner=self))
        x = heads.flatten(-2) + self.bias
        return taps.tap(self, "stream", x if self.is_last else F.elu(x))


@MODELS.register("graph")
class GraphModel(SequenceModel):
    """head(pool(encoder(sum of the vectors of a node's features))); nodes are not pooled."""

    Settings = GraphSettings

    def __init__(self, settings: GraphSettings, source_size: int, target_size: int, shared: bool = False) -> None:
        super().__init__()
        self.settings = settings
        self.features_table = nn.Parameter(torch.empty(source_size, settings.width))
        nn.init.xavier_uniform_(self.features_table)
        self.encoder: BlockStack
        if settings.block == "gat":
            self.encoder = BlockStack(_gat_layers(settings, target_size))
            self.head: nn.Module = nn.Identity()
        else:
            self.encoder = BlockStack.of(BlockConfig.from_settings(settings), EncoderBlock, settings.layers)
            self.head = _graph_head(settings, target_size)

    def encode(self, graphs: PackedGraphs) -> Tensor:
        """The vectors of the nodes after the last layer: [T, D], or [T, C] of a graph attention network."""
        x = taps.tap(self, "tokens", self._embed(graphs))
        dropped = self.settings.attention_dropout if self.training else 0.0
        layout = EdgeQK(graphs.layout, graphs.senders, graphs.receivers, dropped)
        return self.encoder(x, layout, is_token=graphs.layout.is_token)

    def _embed(self, graphs: PackedGraphs) -> Tensor:
        """The weighted sum of the vectors of each node's features, [T, D]."""
        weights = graphs.feature_weights.to(self.features_table.dtype)
        ids, offsets = graphs.feature_ids, graphs.feature_offsets
        if self.settings.normalise_features:
            counts = torch.cat([offsets, offsets.new_tensor([len(ids)])]).diff()
            owners = torch.repeat_interleave(counts, output_size=len(ids))
            sums = weights.new_zeros(len(offsets)).index_add(0, owners, weights.abs())
            weights = weights / sums.index_select(0, owners)
        weights = dropout(weights, self.settings.dropout, self.training)
        return F.embedding_bag(ids, self.features_table, offsets, mode="sum", per_sample_weights=weights)

    def logits(self, batch: GraphBatch) -> Tensor:
        """[Q, C] of the nodes or graphs that the batch asks for: logits of classes, or numbers."""
        x = self.encode(batch.graphs)
        if batch.nodes is not None:
            pooled = self._pool(x.index_select(0, batch.nodes), torch.ones_like(batch.nodes))
        else:
            pooled = self._pool(batch.graphs.layout.mean(x), batch.graphs.layout.length)
        return taps.tap(self, "logits", self.head(pooled))

    def _pool(self, mean: Tensor, size: Tensor) -> Tensor:
        """Means [Q, D] over `counts` [Q] nodes -> [Q, D], or [Q, 2 D] of both mean and sum. A node is its own mean."""
        if self.settings.pooling == "mean":
            return mean
        total = mean * size[:, None]
        return total if self.settings.pooling == "sum" else torch.cat([mean, SUM_SCALE * total], -1)


def _graph_head(settings: GraphSettings, target_size: int) -> nn.Module:
    """Map the pooled vector of a graph to its outputs, which start as 0: sums over large graphs are large numbers."""
    last = nn.Linear(settings.width, target_size)
    nn.init.zeros_(last.weight)
    if settings.pooling != "mean-sum":
        return last
    return nn.Sequential(nn.Linear(2 * settings.width, settings.width), nn.GELU(), last)


def _gat_layers(settings: GraphSettings, target_size: int) -> list[GATLayer]:
    """Layers of `heads` heads whose results are concatenated; the last one has one head, as wide as the output."""
    width = settings.width
    layers = [
        GATLayer(settings, settings.heads, None if depth == 0 else width, width, is_last=False)
        for depth in range(settings.layers - 1)
    ]
    return [*layers, GATLayer(settings, 1, width, target_size, is_last=True)]
