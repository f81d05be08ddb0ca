"""A cache fed by prompts, segments and steps equals one pass over the whole text."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from cached import attend_cached
from regard.attention import (
    BeamTree,
    Causal,
    FixedBlocks,
    KVCache,
    Mask,
    MaskTable,
    PackedQK,
    Segments,
    Strided,
    Window,
    attend,
)
from regard.packed import PackedLayout

HEADS, WIDTH = 2, 4
MASKS: dict[str, Mask | None] = {
    "all": None,
    "window": Window(2),
    "strided": Strided(3),
    "fixed": FixedBlocks(3),
    "segments": Segments(3, 2),
}


def draw(layout: PackedLayout) -> list[Tensor]:
    return [torch.randn(layout.size, HEADS, WIDTH, dtype=torch.float64) for _ in range(3)]


def test_causal_counts_from_the_last_query_and_the_last_key() -> None:
    table = MaskTable(causal=True).to_dense(2, 4, torch.device("cpu"))
    assert table is not None and table.tolist() == [[True, True, True, False], [True, True, True, True]]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("chunks", [[1] * 21, [21], [4, 1, 1, 9, 6], [17, 4]], ids=str)
def test_a_text_fed_in_chunks_equals_one_pass(name: str, chunks: list[int]) -> None:
    torch.manual_seed(1)
    layout = PackedLayout([21])
    qkv = draw(layout)
    expected = attend(*qkv, PackedQK(layout, layout, MASKS[name] or Causal()))
    cache, outputs = KVCache(BeamTree(1, MASKS[name])), []
    for chunk in zip(*(x.split(chunks) for x in qkv), strict=True):
        query, key, value = (x[None] if len(x) > 1 else x for x in chunk)  # [1, T, H, D], or a step [1, H, D]
        outputs.append(attend_cached(query, key, value, cache).reshape(-1, HEADS, WIDTH))
    torch.testing.assert_close(torch.cat(outputs), expected)
    assert cache.tree.length == cache.tree.entries == 21


@pytest.mark.parametrize("name", MASKS)
def test_prompts_of_different_lengths_continue_as_if_alone_after_reordering(name: str) -> None:
    """Beams of prompts of 4, 0, 6 and 1 tokens are duplicated, reordered and dropped, and keep their padding."""
    torch.manual_seed(2)
    random = Random(2)
    prompts = [4, 0, 6, 1]
    texts = [[torch.randn(3, HEADS, WIDTH).double() for _ in range(n)] for n in prompts]  # each token: q, k, v
    cache = KVCache(BeamTree(4, MASKS[name], torch.tensor([6 - n for n in prompts])))
    garbage = torch.full((3, HEADS, WIDTH), 7.0).double()
    padded = torch.stack([torch.stack([garbage] * (6 - len(t)) + t) for t in texts])  # [B, 6, 3, H, D]
    out = attend_cached(*padded.unbind(2), cache)
    assert out.shape == (4, 6, HEADS, WIDTH) and out.isfinite().all()
    for _ in range(14):
        cache.tree.append(None, torch.device("cpu"))
        assert cache.tree.position.index.tolist() == [len(t) for t in texts]
        texts = [[*t, torch.randn(3, HEADS, WIDTH).double()] for t in texts]
        out = attend(*torch.stack([t[-1] for t in texts]).unbind(1), cache)
        for n, text in enumerate(texts):
            layout = PackedLayout([len(text)])
            alone = attend(*torch.stack(text).unbind(1), PackedQK(layout, layout, MASKS[name] or Causal()))
            torch.testing.assert_close(out[n], alone[-1])
        beams = [random.randrange(len(texts)) for _ in range(random.randint(1, 4))]
        cache = cache.select(torch.tensor(beams), cache.tree.select(torch.tensor(beams)))
        texts = [texts[n] for n in beams]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [[1], [1, 1], [1, 0]], ids=str)
def test_prompts_of_one_token_are_not_taken_for_steps(name: str, lengths: list[int]) -> None:
    torch.manual_seed(4)
    count, padding = len(lengths), None if min(lengths) else torch.tensor([1 - n for n in lengths])
    cache = KVCache(BeamTree(count, MASKS[name], padding))
    texts = torch.randn(count, 3, 3, HEADS, WIDTH).double()  # [N, tokens, q k v, H, D]
    assert attend_cached(*texts[:, :1].unbind(2), cache).shape == (count, 1, HEADS, WIDTH)
    for step in (1, 2):
        out = attend_cached(*texts[:, step].unbind(1), cache)
        for n, length in enumerate(lengths):
            layout = PackedLayout([length + step])
            seen = texts[n, 1 - length : step + 1].unbind(1)
            alone = attend(*seen, PackedQK(layout, layout, MASKS[name] or Causal()))
            torch.testing.assert_close(out[n], alone[-1])


@pytest.mark.parametrize(("length", "memory"), [(3, 0), (3, 2), (4, 4), (2, 5), (5, 100)])
def test_segments_with_a_memory_equal_the_segments_mask(length: int, memory: int) -> None:
    torch.manual_seed(3)
    layout = PackedLayout([17])
    qkv = draw(layout)
    expected = attend(*qkv, PackedQK(layout, layout, Segments(length, memory)))
    cache, outputs = KVCache(BeamTree(1)), []
    for chunk in zip(*(x.split(length) for x in qkv), strict=True):
        cache.trim(memory)
        cache.tree.entries = min(cache.tree.entries, memory)
        outputs.append(attend_cached(*(x[None] for x in chunk), cache)[0])
        assert cache.key is not None and cache.tree.entries == cache.key.shape[2] <= memory + length
    torch.testing.assert_close(torch.cat(outputs), expected)
    assert cache.tree.length == 17


def test_no_mask_table_is_built_without_padding_and_masks() -> None:
    cpu = torch.device("cpu")
    tree, padded = BeamTree(2), BeamTree(2, padding=torch.tensor([0, 2]))
    tree.append(None, cpu)
    assert tree.allowed(torch.float32) == MaskTable(no_empty_rows=True)
    tree.append(3, cpu)
    assert tree.allowed(torch.float32) == MaskTable(causal=True, no_empty_rows=True)
    padded.append(3, cpu)
    padded.append(None, cpu)
    assert padded.allowed(torch.float32).no_empty_rows  # a new token attends at least to itself
