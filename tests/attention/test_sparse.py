"""Sparse masks against tables drawn by hand, and the block-sparse backend against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.attention import (
    Additive,
    Causal,
    FixedBlocks,
    Full,
    Mask,
    MaskTable,
    PackedQK,
    Relative,
    Rotary,
    ScaledDot,
    Score,
    SegmentPositions,
    Segments,
    Strided,
    TableMask,
    Window,
    attend,
    use_backend,
)
from regard.attention.backends import BACKENDS
from regard.attention.block_sparse import block_pattern
from regard.packed import PackedLayout

CPU = torch.device("cpu")

DRAWN: list[tuple[Mask, list[str]]] = [
    (Strided(1), ["#....", "##...", "###..", "####.", "#####"]),
    (Strided(2), ["#.....", "##....", "###...", ".###..", "#.###.", ".#.###"]),
    (Strided(3), ["#.......", "##......", "###.....", "####....", ".####...", "..####..", "#..####.", ".#..####"]),
    (Strided(9), ["#..", "##.", "###"]),
    (FixedBlocks(1), ["#...", "##..", "###.", "####"]),
    (FixedBlocks(2), ["#.....", "##....", ".##...", ".###..", ".#.##.", ".#.###"]),
    (FixedBlocks(3), ["#.......", "##......", "###.....", "..##....", "..###...", "..####..", "..#..##.", "..#..###"]),
    (Segments(3, 1), ["#.......", "##......", "###.....", "..##....", "..###...", "..####..", ".....##.", ".....###"]),
    (Segments(2), ["#.....", "##....", "..#...", "..##..", "....#.", "....##"]),
    (Segments(2, 3), ["#.....", "##....", "###...", "####..", ".####.", ".#####"]),
]


def table(mask: Mask, length: int) -> Tensor:
    positions = SegmentPositions.padded(PackedLayout([length]))
    return mask.table(positions, positions)[0]


@pytest.mark.parametrize(("mask", "drawn"), DRAWN, ids=[str(mask) for mask, _ in DRAWN])
def test_sparse_masks_equal_these_pictures_and_are_causal(mask: Mask, drawn: list[str]) -> None:
    actual = table(mask, len(drawn))
    assert ["".join("#" if cell else "." for cell in row) for row in actual.tolist()] == drawn
    assert torch.equal(table(mask & Causal(), len(drawn)), actual)


@pytest.mark.parametrize("mask", [Strided(3), FixedBlocks(3), Segments(3, 1)], ids=str)
def test_the_pictures_in_the_docstrings_are_those_of_the_masks(mask: Mask) -> None:
    drawn = [line.split()[1] for line in (mask.__doc__ or "").splitlines() if line.strip()[:1].isdigit()]
    lines = ["".join("#" if cell else "." for cell in row).rstrip(".") for row in table(mask, 8).tolist()]
    assert lines == drawn


# -- blocks ------------------------------------------------------------------------------------------------------------

MASKS: dict[str, Mask] = {
    "window": Window(3),
    "strided": Strided(4),
    "strided and causal": Strided(3) & Causal(),
    "fixed": FixedBlocks(4),
    "segments": Segments(5, 3),
    "ahead": Window(2, 5),
    "given": TableMask(torch.rand(37, 37, generator=torch.Generator().manual_seed(1)) < 0.1),
    "nothing": ~Full(),
}


@pytest.mark.parametrize("block_size", [1, 4, 8, 64])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_contain_all_allowed_pairs_and_no_unused_keys(name: str, block_size: int) -> None:
    length = 37
    pattern = block_pattern(MASKS[name], length, block_size, CPU)
    every, expected, pairs = torch.arange(length), table(MASKS[name], length), 0
    rebuilt = torch.zeros(length, length, dtype=torch.bool)
    query_order = []
    for part in pattern.blocks:
        queries, keys = every[part.queries], every[part.keys]
        rebuilt[queries[:, None], keys] = part.table
        assert bool(part.table.any(0).all()) and part.no_empty_rows == bool(expected[queries].any(-1).all())
        query_order.append(queries)
        pairs += len(queries) * len(keys)
    assert torch.equal(rebuilt, expected)
    order = torch.cat(query_order)
    assert torch.equal(order if pattern.inverse_order is None else order[pattern.inverse_order], every)
    assert pattern.share == pairs / length**2


def test_blocks_of_long_texts_have_few_keys() -> None:
    """Shares of 4096 * 4096 pairs, in blocks of 128 queries; the masks allow at most 8 %."""
    shares = {
        str(m): block_pattern(m, 4096, 128, CPU).share for m in (Window(127), FixedBlocks(128), Strided(128), Causal())
    }
    assert shares["Window(before=127, after=0)"] == pytest.approx(
        255 / 4096, rel=0.02
    )  # a block and the window before it
    assert shares["FixedBlocks(block=128)"] == pytest.approx((128 + 31 / 2) / 4096, rel=0.01)  # its block
    assert 0.1 < shares["Strided(stride=128)"] < 0.4
    assert shares["Causal()"] == pytest.approx(0.5, abs=0.02)


# -- the backend -------------------------------------------------------------------------------------------------------


def scores(heads: int) -> dict[str, Score]:
    return {"scaled dot": ScaledDot(), "rotary": Rotary(6), "relative": Relative(6, heads)}


@pytest.mark.parametrize("lengths", [[37], [37, 12, 1, 30], [20, 20]], ids=str)
@pytest.mark.parametrize("which", scores(1))
@pytest.mark.parametrize("name", MASKS)
def test_the_block_sparse_backend_equals_the_plain_one(name: str, which: str, lengths: list[int]) -> None:
    torch.manual_seed(3)
    score = scores(2)[which].double()
    packed = PackedLayout(lengths, size=sum(lengths) + 2)
    query, key, value = (torch.randn(packed.size, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout, grad_out = (
        PackedQK(packed, packed, MASKS[name], query_block=8),
        torch.randn(packed.size, 2, 6, dtype=torch.float64),
    )
    actual = []
    for how in ("plain", "block_sparse"):
        with use_backend(how):
            out = attend(query, key, value, layout, score=score)
        leaves = [query, key, value, *score.parameters()]
        gradients = torch.autograd.grad((out * grad_out).sum(), leaves, retain_graph=True)
        actual.append([out, *gradients])
    for slow, fast in zip(*actual, strict=True):
        torch.testing.assert_close(slow, fast, atol=1e-12, rtol=1e-12)


def test_the_block_sparse_backend_without_a_pattern_equals_the_fused_one() -> None:
    query = torch.randn(1, 2, 5, 4)
    for allowed in (MaskTable(), MaskTable(causal=True), MaskTable(torch.rand(5, 5) < 0.5)):
        one, other = (
            run(query, query, query, allowed, ScaledDot()) for run in (BACKENDS["fused"], BACKENDS["block_sparse"])
        )
        assert torch.equal(one, other)
    packed, flat, score = PackedLayout([5]), query[0].transpose(0, 1), Additive(4, 4)
    outputs = []
    for backend in ("block_sparse", "plain"):
        with use_backend(backend):
            outputs.append(attend(flat, flat, flat, PackedQK(packed, packed, Window(1)), score=score))
    assert torch.equal(*outputs)  # not a dot product: the plain backend computes it either way


@pytest.mark.parametrize(
    ("mask", "length", "chosen"),
    [
        (Window(9), 1024, "block_sparse"),
        (Window(9), 1023, "fused"),  # too short to be faster
        (Window(900), 1024, "fused"),  # not sparse
        (Causal(), 1024, "fused"),
        (Strided(64), 2048, "block_sparse"),
    ],
)
def test_long_texts_with_sparse_masks_use_the_block_sparse_backend(
    mask: Mask, length: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("plain", "fused", "block_sparse"):
        monkeypatch.setitem(BACKENDS, name, lambda q, k, v, a, s, n=name: seen.append(n) or v)
    packed = PackedLayout([length])
    x = torch.zeros(length, 1, 2)
    attend(x, x, x, PackedQK(packed, packed, mask))
    assert seen == [chosen]


def test_the_full_mask_table_is_not_built_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedLayout([1024])
    layout, x = PackedQK(packed, packed, Window(9)), torch.zeros(1024, 1, 2)
    attend(x, x, x, layout)
    assert layout.allowed.sparse is not None and "table" not in vars(layout.allowed.sparse)


def test_a_pattern_made_in_inference_mode_can_be_used_in_training() -> None:
    packed = PackedLayout([40])
    query, key, value = (torch.randn(40, 1, 4, requires_grad=True) for _ in range(3))
    with torch.inference_mode(), use_backend("block_sparse"):
        attend(query, key, value, PackedQK(packed, packed, Strided(7), query_block=8))
    with use_backend("block_sparse"):
        attend(query, key, value, PackedQK(packed, packed, Strided(7), query_block=8)).sum().backward()
    assert value.grad is not None and value.grad.any()
