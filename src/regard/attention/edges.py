"""Attention over the edges of graphs: the graph is the mask, stored as a list of its edges.

Work and memory grow with the number of edges, not with the square of the number of nodes.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.layouts import MaskTable, PackedQK
from regard.attention.scores import Score
from regard.dropout import dropout
from regard.packed import PackedLayout
from regard.registry import SCORES


class EdgeMask:
    """Node `receivers[e]` may attend to node `senders[e]`, for each edge e of the graphs of a packed batch.

    `receivers` must be sorted, with at least one edge to each node (an edge to itself, say). A random share
    `dropped` of the attention weights becomes zero: in training, as in graph attention networks (Velickovic et al.
    2018).
    """

    any_score: ClassVar[bool] = True

    def __init__(self, layout: PackedLayout, senders: Tensor, receivers: Tensor, dropped: float = 0.0) -> None:
        self.layout, self.dropped = layout, dropped
        self.senders, self.receivers = senders, receivers

    def backend(self, query: Tensor) -> str:
        return "edges"

    @cached_property
    def cells(self) -> tuple[Tensor, Tensor]:
        """Senders and receivers as indices [E] into the padded view of the batch, [N * L]."""
        if self.layout.equal_lengths:
            return self.senders, self.receivers
        cell = self.layout.segment_ids * self.layout.max_len + self.layout.position
        return cell[self.senders], cell[self.receivers]

    @cached_property
    def table(self) -> Tensor:
        """[N, 1, L, L] the mask as a table, for the definition of attention; the same for all heads."""
        senders, receivers = self.cells
        length = self.layout.max_len
        table = torch.zeros(len(self.layout) * length, length, dtype=torch.bool, device=senders.device)
        table[receivers, senders % length] = True
        return table.view(len(self.layout), 1, length, length)

    def softmax(self, scores: Tensor) -> Tensor:
        """Scores of the edges [E, H] -> weights that sum to one over the edges of each receiver."""
        index = self.cells[1][:, None].expand_as(scores)
        nodes = len(self.layout) * self.layout.max_len
        with torch.no_grad():  # the result does not depend on what is subtracted
            largest = scores.new_zeros(nodes, scores.shape[1]).scatter_reduce(
                0, index, scores, "amax", include_self=False
            )
        exponentials = (scores - largest.gather(0, index)).exp()
        sums = scores.new_zeros(nodes, scores.shape[1]).index_add(0, self.cells[1], exponentials)
        return exponentials / sums.index_select(0, self.cells[1])

    def weighted_sum(self, weights: Tensor, value: Tensor) -> Tensor:
        """Weights [E, H] and values [N * L, H, D] of the senders -> [N * L, H, D] for the receivers."""
        senders, receivers = self.cells
        weights = dropout(weights, self.dropped, training=True)
        messages = weights.unsqueeze(-1).to(value.dtype) * value.index_select(0, senders)
        return torch.zeros_like(value).index_add(0, receivers, messages)


class EdgeQK(PackedQK):
    """Packed graphs: a node attends to the nodes that an edge connects it with (see `EdgeMask`)."""

    def __init__(self, nodes: PackedLayout, senders: Tensor, receivers: Tensor, dropped: float = 0.0) -> None:
        super().__init__(nodes, nodes)
        self.allowed = MaskTable(no_empty_rows=nodes.equal_lengths, sparse=EdgeMask(nodes, senders, receivers, dropped))


@SCORES.register("graph-additive")
class GraphAdditive(Score):
    """leaky_relu(a · q + b · k), with vectors a and b of each head (Velickovic et al. 2018).

    The additive score without its hidden layer: each node has one number as a query and one as a key, so that an edge
    costs one addition.
    """

    equal_widths = False
    SLOPE: ClassVar[float] = 0.2  # for negative sums

    def __init__(self, query_width: int, key_width: int, heads: int = 1) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, query_width))
        self.key = nn.Parameter(torch.empty(heads, key_width))
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter)

    def project_keys(self, key: Tensor) -> Tensor:
        return (key * self.key).sum(-1, keepdim=True)

    def cached_width(self, width: int) -> int:
        return 1

    @classmethod
    def flops(cls, query_width: int, key_width: int, queries: int, keys: int, pairs: int) -> int:
        return 0  # elementwise products and sums, no matmuls

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        vector = self.query[:, None] if len(self.query) > 1 else self.query  # [H, 1, Dq] for queries [..., H, Q, Dq]
        return F.leaky_relu((query * vector).sum(-1, keepdim=True) + key.transpose(-2, -1), self.SLOPE)

    def on_edges(self, query: Tensor, key: Tensor, receivers: Tensor, senders: Tensor) -> Tensor:
        queries = (query * self.query).sum(-1)  # [T, H]
        return F.leaky_relu(queries.index_select(0, receivers) + key.squeeze(-1).index_select(0, senders), self.SLOPE)
