"""New entries of a KV cache with static shapes: written as a slice where all sentences write the same entries."""

from __future__ import annotations

import pytest
import torch

from regard.attention import BeamTree, KVCache, StaticBeamTree, StaticKVCache

SENTENCES, BEAMS, HEADS, WIDTH, CAPACITY = 2, 3, 2, 4, 5


def static_cache(cursors: list[int]) -> tuple[StaticBeamTree, StaticKVCache]:
    """A tree and a cache whose sentences have so many entries already."""
    begun = BeamTree(SENTENCES)
    tree = StaticBeamTree.start(begun, BEAMS, CAPACITY, 0, torch.device("cpu"))
    empty = torch.empty(0, HEADS, 0, WIDTH)
    cache = StaticKVCache.start(KVCache(begun), tree, (empty, empty))
    tree.cursor.copy_(torch.tensor(cursors))
    tree.fed.copy_(tree.cursor // BEAMS)
    for n, cursor in enumerate(cursors):
        tree.seen[n, :, :cursor] = torch.rand(BEAMS, cursor) < 0.5
    return tree, cache


@pytest.mark.parametrize("cursors", [[0, 0], [6, 6], [3, 9], [15, 15]])
def test_slices_hold_what_indices_would_write(cursors: list[int]) -> None:
    torch.manual_seed(0)
    tree, cache = static_cache(cursors)
    torch.manual_seed(0)
    other, by_index = static_cache(cursors)
    for _ in range(2):
        new = [torch.randn(SENTENCES * BEAMS, HEADS, WIDTH) for _ in range(3)]
        tree.append(None, torch.device("cpu"))
        assert (tree.uniform is None) == (cursors[0] != cursors[1])
        append_by_index(other)
        ours, expected = cache.to_kernel(*new), by_index.to_kernel(*new)
        for a, b in zip(ours[:3], expected[:3], strict=True):
            assert torch.equal(a, b)
        assert torch.equal(ours[3].table, expected[3].table)  # type: ignore[arg-type]
        assert torch.equal(tree.seen, other.seen) and torch.equal(tree.cursor, other.cursor)


def append_by_index(tree: StaticBeamTree) -> None:
    """`append`, but what it writes as slices is written by indices."""
    before = tree.seen.clone()
    tree.append(None, torch.device("cpu"))
    beam = torch.arange(BEAMS)
    write = (tree.cursor - BEAMS).clamp(max=tree.seen.shape[-1] - BEAMS)[:, None] + beam
    same = (beam[:, None] == beam).expand(SENTENCES, -1, -1)
    tree.seen.copy_(before.scatter(2, write[:, None].expand_as(same), same))
    tree.uniform = None
