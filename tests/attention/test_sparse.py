"""Sparse masks against tables drawn by hand, and the kernel that skips what they do not allow against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.attention import (
    Additive,
    Allowed,
    Causal,
    Everything,
    Fixed,
    Given,
    Mask,
    Packed,
    Places,
    Relative,
    Rotary,
    ScaledDot,
    Score,
    Segments,
    Strided,
    Window,
    attend,
    kernel,
)
from regard.attention import kernels as kernels_module
from regard.attention.allowed import pattern
from regard.rows import Rows

CPU = torch.device("cpu")

DRAWN: list[tuple[Mask, list[str]]] = [
    (Strided(1), ["#....", "##...", "###..", "####.", "#####"]),
    (Strided(2), ["#.....", "##....", "###...", ".###..", "#.###.", ".#.###"]),
    (Strided(3), ["#.......", "##......", "###.....", "####....", ".####...", "..####..", "#..####.", ".#..####"]),
    (Strided(9), ["#..", "##.", "###"]),
    (Fixed(1), ["#...", "##..", "###.", "####"]),
    (Fixed(2), ["#.....", "##....", ".##...", ".###..", ".#.##.", ".#.###"]),
    (Fixed(3), ["#.......", "##......", "###.....", "..##....", "..###...", "..####..", "..#..##.", "..#..###"]),
    (Segments(3, 1), ["#.......", "##......", "###.....", "..##....", "..###...", "..####..", ".....##.", ".....###"]),
    (Segments(2), ["#.....", "##....", "..#...", "..##..", "....#.", "....##"]),
    (Segments(2, 3), ["#.....", "##....", "###...", "####..", ".####.", ".#####"]),
]


def table(mask: Mask, length: int) -> Tensor:
    places = Places.padded(Rows([length]))
    return mask.table(places, places)[0]


@pytest.mark.parametrize(("mask", "drawn"), DRAWN, ids=[str(mask) for mask, _ in DRAWN])
def test_sparse_masks_are_these_pictures_and_never_look_ahead(mask: Mask, drawn: list[str]) -> None:
    found = table(mask, len(drawn))
    assert ["".join("#" if cell else "." for cell in row) for row in found.tolist()] == drawn
    assert torch.equal(table(mask & Causal(), len(drawn)), found)


@pytest.mark.parametrize("mask", [Strided(3), Fixed(3), Segments(3, 1)], ids=str)
def test_the_pictures_in_the_docstrings_are_those_of_the_masks(mask: Mask) -> None:
    drawn = [line.split()[1] for line in (mask.__doc__ or "").splitlines() if line.strip()[:1].isdigit()]
    rows = ["".join("#" if cell else "." for cell in row).rstrip(".") for row in table(mask, 8).tolist()]
    assert rows == drawn


# -- lots --------------------------------------------------------------------------------------------------------------

MASKS: dict[str, Mask] = {
    "window": Window(3),
    "strided": Strided(4),
    "strided and causal": Strided(3) & Causal(),
    "fixed": Fixed(4),
    "segments": Segments(5, 3),
    "ahead": Window(2, 5),
    "given": Given(torch.rand(37, 37, generator=torch.Generator().manual_seed(1)) < 0.1),
    "nothing": ~Everything(),
}


@pytest.mark.parametrize("lot", [1, 4, 8, 64])
@pytest.mark.parametrize("name", MASKS)
def test_lots_hold_every_pair_that_is_allowed_and_no_key_in_vain(name: str, lot: int) -> None:
    length = 37
    cut = pattern(MASKS[name], length, lot, CPU)
    every, expected, pairs = torch.arange(length), table(MASKS[name], length), 0
    again = torch.zeros(length, length, dtype=torch.bool)
    taken = []
    for part in cut.lots:
        queries, keys = every[part.queries], every[part.keys]
        again[queries[:, None], keys] = part.table
        assert bool(part.table.any(0).all()) and part.full == bool(expected[queries].any(-1).all())
        taken.append(queries)
        pairs += len(queries) * len(keys)
    assert torch.equal(again, expected)
    order = torch.cat(taken)
    assert torch.equal(order if cut.back is None else order[cut.back], every)
    assert cut.share == pairs / length**2


def test_lots_of_long_texts_look_at_few_keys() -> None:
    """Of 4096 * 4096 pairs, with 128 queries at a time; the mask itself allows no more than 8 %."""
    shares = {str(m): pattern(m, 4096, 128, CPU).share for m in (Window(127), Fixed(128), Strided(128), Causal())}
    assert shares["Window(before=127, after=0)"] == pytest.approx(255 / 4096, rel=0.02)  # a lot and what is before it
    assert shares["Fixed(block=128)"] == pytest.approx((128 + 31 / 2) / 4096, rel=0.01)  # a block, 15.5 last tokens
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
    rows = Rows(lengths, size=sum(lengths) + 2)
    query, key, value = (torch.randn(rows.size, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout, cause = Packed(rows, rows, MASKS[name], lot=8), torch.randn(rows.size, 2, 6, dtype=torch.float64)
    found = []
    for how in ("plain", "blocks"):
        with kernel(how):
            out = attend(query, key, value, layout, score=score)
        leaves = [query, key, value, *score.parameters()]
        gradients = torch.autograd.grad((out * cause).sum(), leaves, retain_graph=True)
        found.append([out, *gradients])
    for slow, fast in zip(*found, strict=True):
        torch.testing.assert_close(slow, fast, atol=1e-12, rtol=1e-12)


def test_the_blocks_kernel_does_without_a_pattern_what_the_fused_one_does() -> None:
    query = torch.randn(1, 2, 5, 4)
    for allowed in (Allowed(), Allowed(causal=True), Allowed(torch.rand(5, 5) < 0.5)):
        one, other = (
            run(query, query, query, allowed, ScaledDot()) for run in (kernels_module.fused, kernels_module.blocks)
        )
        assert torch.equal(one, other)
    rows = Rows([5])
    with kernel("blocks"), pytest.raises(TypeError, match="Additive is no dot product"):
        attend(query[0].transpose(0, 1), query[0].transpose(0, 1), query[0].transpose(0, 1),
               Packed(rows, rows, Window(1)), score=Additive(4, 4, 4))  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "length", "chosen"),
    [
        (Window(9), 1024, "blocks"),
        (Window(9), 1023, "fused"),  # too short to pay
        (Window(900), 1024, "fused"),  # not sparse
        (Causal(), 1024, "fused"),
        (Strided(64), 2048, "blocks"),
    ],
)
def test_long_rows_under_sparse_masks_are_taken_in_blocks(
    mask: Mask, length: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("plain", "fused", "blocks"):
        monkeypatch.setitem(kernels_module.KERNELS, name, lambda q, k, v, a, s, n=name: seen.append(n) or v)
    rows = Rows([length])
    x = torch.zeros(length, 1, 2)
    attend(x, x, x, Packed(rows, rows, mask))
    assert seen == [chosen]


def test_no_layer_builds_the_whole_table_when_lots_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([1024])
    layout, x = Packed(rows, rows, Window(9)), torch.zeros(1024, 1, 2)
    attend(x, x, x, layout)
    assert layout.allowed.sparse is not None and "table" not in vars(layout.allowed.sparse)


def test_a_pattern_found_while_only_looking_serves_training_too() -> None:
    rows = Rows([40])
    query, key, value = (torch.randn(40, 1, 4, requires_grad=True) for _ in range(3))
    with torch.inference_mode(), kernel("blocks"):
        attend(query, key, value, Packed(rows, rows, Strided(7), lot=8))
    with kernel("blocks"):
        attend(query, key, value, Packed(rows, rows, Strided(7), lot=8)).sum().backward()
    assert value.grad is not None and value.grad.any()
