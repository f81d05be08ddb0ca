"""Attention over the edges of graphs: equal to attention with the graph as a table, in memory linear in the edges."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from regard.attention import EdgeQK, GraphAdditive, attend, use_backend
from regard.attention.edges import EdgeMask
from regard.packed import PackedLayout
from regard.registry import SCORES

HEADS, WIDTH = 3, 4


def random_edges(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Senders and receivers of random edges within each graph, with an edge from every node to itself."""
    generator = torch.Generator().manual_seed(seed)
    pairs, start = [], 0
    for length in lengths:
        some = torch.randint(length, (3 * length, 2), generator=generator)
        pairs += [some + start, torch.arange(length)[:, None].expand(-1, 2) + start]
        start += length
    edges = torch.cat(pairs).unique(dim=0)
    return edges[:, 1], edges[:, 0]


@pytest.mark.parametrize("lengths", [[7], [1, 5, 3], [4, 4]], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_attention_over_edges_is_attention_with_the_graph_as_its_mask(name: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    score = SCORES[name](WIDTH, WIDTH, HEADS).double()
    nodes = PackedLayout(lengths)
    senders, receivers = random_edges(lengths)
    q, k, v = (torch.randn(sum(lengths), HEADS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = []
    for backend in ("plain", "auto"):
        with use_backend(backend):
            out = attend(q, k, v, EdgeQK(nodes, senders, receivers), score=score)
        grads = torch.autograd.grad(out.square().sum(), [q, k, v, *score.parameters()])
        results.append([out, *grads])
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


def test_the_graph_additive_score_is_that_of_the_paper() -> None:
    """leaky_relu(a · [q, k]) with slope 0.2, one vector a for each head."""
    torch.manual_seed(1)
    score = GraphAdditive(WIDTH, WIDTH, HEADS)
    q, k = torch.randn(2, HEADS, WIDTH), torch.randn(5, HEADS, WIDTH)
    found = score.compare(q.transpose(0, 1), score.project_keys(k).transpose(0, 1))  # [H, 2, 5]
    for head in range(HEADS):
        a = torch.cat([score.query[head], score.key[head]])
        for i in range(2):
            for j in range(5):
                total = (a @ torch.cat([q[i, head], k[j, head]])).item()
                assert found[head, i, j].item() == pytest.approx(total if total > 0 else 0.2 * total, abs=1e-6)


def test_three_edges_by_hand() -> None:
    """Scores log 1, log 2 and log 5 have the weights 1/8, 2/8 and 5/8; another node has one edge, of weight 1."""
    mask = EdgeMask(PackedLayout([4]), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 3]))
    weights = mask.softmax(torch.tensor([[1.0], [2.0], [5.0], [9.0]]).log())
    assert weights.flatten().tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8, 1.0])
    summed = mask.weighted_sum(weights, torch.tensor([8.0, 16.0, 24.0, 0.0])[:, None, None])
    assert summed.flatten().tolist() == pytest.approx([1 + 4 + 15, 0, 0, 8])


def test_huge_scores_do_not_overflow() -> None:
    mask = EdgeMask(PackedLayout([2]), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
    weights = mask.softmax(torch.tensor([[1e4], [1e4], [-1e4]]))
    assert weights.flatten().tolist() == [0.5, 0.5, 1.0]


def test_dropped_weights_are_zero_and_the_others_are_larger() -> None:
    torch.manual_seed(0)
    count = 1000
    mask = EdgeMask(PackedLayout([count]), torch.arange(count), torch.arange(count), dropped=0.25)
    out = mask.weighted_sum(torch.ones(count, 1), torch.ones(count, 1, 1)).flatten()
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)


LARGE = """
import torch
from regard.attention import EdgeQK, GraphAdditive, attend
from regard.packed import PackedLayout
nodes, edges = 100_000, 1_000_000
pairs = torch.cat([torch.randint(nodes, (edges, 2)), torch.arange(nodes)[:, None].expand(-1, 2)])
pairs = pairs[pairs[:, 1].argsort()]
x = torch.randn(nodes, 8, 8, requires_grad=True)
layout = EdgeQK(PackedLayout([nodes]), pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
attend(x, x, x, layout, score=GraphAdditive(8, 8, 8)).sum().backward()
assert x.grad.isfinite().all()
import resource
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_million_edges_take_memory_in_proportion_to_the_edges() -> None:
    """A table of 100,000 x 100,000 weights would take 40 GB for each head; 8 heads of 8 features take 256 MB a copy."""
    limit = 4 * 2**30

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    found = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, preexec_fn=limited)
    assert found.returncode == 0, found.stderr[-500:]
    assert int(found.stdout) * 1024 < limit
