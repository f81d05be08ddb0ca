"""Sparse masks against tables drawn by hand, and the kernel that skips what they do not allow against the plain one."""

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
from regard.attention import backends as kernels_module
from regard.attention.mask_tables import block_pattern
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
    places = SegmentPositions.padded(PackedLayout([length]))
    return mask.table(places, places)[0]


@pytest.mark.parametrize(("mask", "drawn"), DRAWN, ids=[str(mask) for mask, _ in DRAWN])
def test_sparse_masks_are_these_pictures_and_never_look_ahead(mask: Mask, drawn: list[str]) -> None:
    found = table(mask, len(drawn))
    assert ["".join("#" if cell else "." for cell in row) for row in found.tolist()] == drawn
    assert torch.equal(table(mask & Causal(), len(drawn)), found)


@pytest.mark.parametrize("mask", [Strided(3), FixedBlocks(3), Segments(3, 1)], ids=str)
def test_the_pictures_in_the_docstrings_are_those_of_the_masks(mask: Mask) -> None:
    drawn = [line.split()[1] for line in (mask.__doc__ or "").splitlines() if line.strip()[:1].isdigit()]
    rows = ["".join("#" if cell else "." for cell in row).rstrip(".") for row in table(mask, 8).tolist()]
    assert rows == drawn


# -- lots --------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("lot", [1, 4, 8, 64])
@pytest.mark.parametrize("name", MASKS)
def test_lots_hold_every_pair_that_is_allowed_and_no_key_in_vain(name: str, lot: int) -> None:
    length = 37
    cut = block_pattern(MASKS[name], length, lot, CPU)
    every, expected, pairs = torch.arange(length), table(MASKS[name], length), 0
    again = torch.zeros(length, length, dtype=torch.bool)
    taken = []
    for part in cut.blocks:
        queries, keys = every[part.queries], every[part.keys]
        again[queries[:, None], keys] = part.table
        assert bool(part.table.any(0).all()) and part.no_empty_rows == bool(expected[queries].any(-1).all())
        taken.append(queries)
        pairs += len(queries) * len(keys)
    assert torch.equal(again, expected)
    order = torch.cat(taken)
    assert torch.equal(order if cut.inverse_order is None else order[cut.inverse_order], every)
    assert cut.share == pairs / length**2


def test_lots_of_long_texts_look_at_few_keys() -> None:
    """Of 4096 * 4096 pairs, with 128 queries at a time; the mask itself allows no more than 8 %."""
    shares = {
        str(m): block_pattern(m, 4096, 128, CPU).share for m in (Window(127), FixedBlocks(128), Strided(128), Causal())
    }
    assert shares["Window(before=127, after=0)"] == pytest.approx(255 / 4096, rel=0.02)  # a lot and what is before it
    assert shares["FixedBlocks(block=128)"] == pytest.approx((128 + 31 / 2) / 4096, rel=0.01)  # its block
    assert 0.1 < shares["Strided(stride=128)"] < 0.4
    assert shares["Causal()"] == pytest.approx(0.5, abs=0.02)


# -- the kernel --------------------------------------------------------------------------------------------------------


def scores(heads: int) -> dict[str, Score]:
    return {"scaled dot": ScaledDot(), "rotary": Rotary(6), "relative": Relative(6, heads)}


@pytest.mark.parametrize("lengths", [[37], [37, 12, 1, 30], [20, 20]], ids=str)
@pytest.mark.parametrize("which", scores(1))
@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_kernel_computes_what_the_plain_one_defines(name: str, which: str, lengths: list[int]) -> None:
    torch.manual_seed(3)
    score = scores(2)[which].double()
    rows = PackedLayout(lengths, size=sum(lengths) + 2)
    query, key, value = (torch.randn(rows.size, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout, cause = PackedQK(rows, rows, MASKS[name], query_block=8), torch.randn(rows.size, 2, 6, dtype=torch.float64)
    found = []
    for how in ("plain", "block_sparse"):
        with use_backend(how):
            out = attend(query, key, value, layout, score=score)
        leaves = [query, key, value, *score.parameters()]
        gradients = torch.autograd.grad((out * cause).sum(), leaves, retain_graph=True)
        found.append([out, *gradients])
    for slow, fast in zip(*found, strict=True):
        torch.testing.assert_close(slow, fast, atol=1e-12, rtol=1e-12)


def test_the_blocks_kernel_does_without_a_pattern_what_the_fused_one_does() -> None:
    query = torch.randn(1, 2, 5, 4)
    for allowed in (MaskTable(), MaskTable(causal=True), MaskTable(torch.rand(5, 5) < 0.5)):
        one, other = (
            run(query, query, query, allowed, ScaledDot())
            for run in (kernels_module.fused, kernels_module.block_sparse)
        )
        assert torch.equal(one, other)
    rows, flat, score = PackedLayout([5]), query[0].transpose(0, 1), Additive(4, 4)
    outputs = []
    for backend in ("block_sparse", "plain"):
        with use_backend(backend):
            outputs.append(attend(flat, flat, flat, PackedQK(rows, rows, Window(1)), score=score))
    assert torch.equal(*outputs)  # not a dot product: the plain backend computes it either way


@pytest.mark.parametrize(
    ("mask", "length", "chosen"),
    [
        (Window(9), 1024, "block_sparse"),
        (Window(9), 1023, "fused"),  # too short to pay
        (Window(900), 1024, "fused"),  # not sparse
        (Causal(), 1024, "fused"),
        (Strided(64), 2048, "block_sparse"),
    ],
)
def test_long_rows_under_sparse_masks_are_taken_in_blocks(
    mask: Mask, length: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("plain", "fused", "block_sparse"):
        monkeypatch.setitem(kernels_module.BACKENDS, name, lambda q, k, v, a, s, n=name: seen.append(n) or v)
    rows = PackedLayout([length])
    x = torch.zeros(length, 1, 2)
    attend(x, x, x, PackedQK(rows, rows, mask))
    assert seen == [chosen]


def test_no_layer_builds_the_whole_table_when_lots_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PackedLayout([1024])
    layout, x = PackedQK(rows, rows, Window(9)), torch.zeros(1024, 1, 2)
    attend(x, x, x, layout)
    assert layout.allowed.sparse is not None and "table" not in vars(layout.allowed.sparse)


def test_a_pattern_found_while_only_looking_serves_training_too() -> None:
    rows = PackedLayout([40])
    query, key, value = (torch.randn(40, 1, 4, requires_grad=True) for _ in range(3))
    with torch.inference_mode(), use_backend("block_sparse"):
        attend(query, key, value, PackedQK(rows, rows, Strided(7), query_block=8))
    with use_backend("block_sparse"):
        attend(query, key, value, PackedQK(rows, rows, Strided(7), query_block=8)).sum().backward()
    assert value.grad is not None and value.grad.any()
