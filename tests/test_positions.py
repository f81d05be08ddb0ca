"""Position encodings against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.nn import positions
from regard.nn.positions import Sinusoidal
from regard.registry import POSITIONS


def vectors(encoding: positions.PositionEncoding, indices: list[int], length: int = 1) -> Tensor:
    position = torch.tensor(indices)
    return encoding(position, torch.full_like(position, length)).detach()


@pytest.mark.parametrize("width", [2, 7, 8, 9, 64])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_sine_on_even_and_cosine_on_odd_columns_with_the_same_exponent(width: int, base: float) -> None:
    indices = [0, 1, 2, 17, 100, 1000]
    table = vectors(Sinusoidal(width, base), indices)
    assert table.shape == (len(indices), width)
    for row, pos in zip(table.tolist(), indices, strict=True):
        for column, value in enumerate(row):
            angle = pos / base ** (2 * (column // 2) / width)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            # a float32 angle of up to 1000 is off by up to half a unit in the last place, 2^-15
            assert value == pytest.approx(expected, abs=1e-6 + pos * 2**-23)


def test_position_zero_is_zeros_and_ones() -> None:
    assert vectors(Sinusoidal(6), [0]).tolist() == [[0, 1, 0, 1, 0, 1]]


def test_wavelengths_run_from_2_pi_to_nearly_base_times_2_pi() -> None:
    width = 4096
    wavelength = 2 * math.pi / Sinusoidal(width).frequency.double()
    ratio = wavelength[1:] / wavelength[:-1]
    assert wavelength[0].item() == pytest.approx(2 * math.pi, rel=1e-7)
    assert wavelength[-1].item() == pytest.approx(10000 ** (1 - 2 / width) * 2 * math.pi, rel=1e-6)
    assert wavelength[-1].item() == pytest.approx(10000 * 2 * math.pi, rel=0.005)  # the limit as i -> d/2
    assert torch.allclose(ratio, torch.full_like(ratio, 10000 ** (2 / width)), rtol=1e-6)  # a geometric progression


@pytest.mark.parametrize("k", [1, 5, 40])
def test_a_shift_by_k_is_one_rotation_wherever_it_starts(k: int) -> None:
    width, base = 16, 10000.0
    rotation = torch.zeros(width, width, dtype=torch.float64)  # built from k alone
    for i in range(0, width, 2):
        w = base ** (-i / width)
        cos, sin = math.cos(k * w), math.sin(k * w)
        rotation[i : i + 2, i : i + 2] = torch.tensor([[cos, sin], [-sin, cos]])  # sin(a+b), cos(a+b)
    assert torch.allclose(rotation @ rotation.T, torch.eye(width, dtype=torch.float64))
    starts = list(range(0, 100, 3))
    before = vectors(Sinusoidal(width, base), starts).double()
    shifted = vectors(Sinusoidal(width, base), [pos + k for pos in starts]).double()
    assert torch.allclose(before @ rotation.T, shifted, atol=2e-5)


def test_sinusoids_need_no_longest_sentence_and_are_not_saved() -> None:
    encoding = Sinusoidal(8)
    assert vectors(encoding, [10**6]).isfinite().all()
    assert encoding.state_dict() == {}


def test_the_index_is_the_first_feature() -> None:
    assert vectors(positions.make("index", 3), [0, 4, 900]).tolist() == [[0, 0, 0], [4, 0, 0], [900, 0, 0]]


def test_the_fraction_runs_from_0_to_1_over_every_sentence() -> None:
    encoding = positions.make("fraction", 3)
    assert vectors(encoding, [0, 1, 2, 3, 4], length=5).tolist() == [[n / 4, 0, 0] for n in range(5)]
    assert vectors(encoding, [0], length=1).tolist() == [[0, 0, 0]]  # a single word is at 0
    for length in range(1, 60):
        fractions = vectors(encoding, list(range(length)), length)[:, 0]
        assert fractions.min() == 0 and fractions.max() == (1 if length > 1 else 0)


def test_learned_positions_are_rows_of_a_trained_table() -> None:
    encoding = positions.LearnedPositions(4, longest=6)
    assert encoding.table.shape == (6, 4) and encoding.table.requires_grad
    assert torch.equal(vectors(encoding, [5, 0, 5]), encoding.table[[5, 0, 5]])
    with pytest.raises(IndexError):
        vectors(encoding, [6])


def test_positions_by_name() -> None:
    kinds = {kind: type(positions.make(kind, 4)).__name__ for kind in POSITIONS}
    assert kinds == {
        "sinusoidal": "Sinusoidal",
        "sinusoidal-split": "SinusoidalSplit",
        "sinusoidal-fairseq": "SinusoidalFairseq",
        "learned": "LearnedPositions",
        "index": "IndexPosition",
        "fraction": "FractionPosition",
        "none": "NoPositions",
        "rotary": "RotaryPositions",
        "relative": "RelativePositions",
        "bucketed": "BucketedPositions",
    }
    assert positions.make("learned", 4, longest=7).table.shape == (7, 4)


def test_positions_inside_the_attention_add_nothing_to_the_embedding() -> None:
    for kind in ("rotary", "relative", "bucketed", "none"):
        encoding = positions.make(kind, 3)
        assert vectors(encoding, [0, 7]).tolist() == [[0, 0, 0], [0, 0, 0]] and not list(encoding.parameters())


def test_positions_of_any_shape() -> None:
    index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    for kind in ("sinusoidal", "learned", "index", "fraction"):
        encoding = positions.make(kind, 5)
        table = encoding(index, torch.tensor([[6], [6]]))
        assert table.shape == (2, 3, 5)
        assert torch.equal(table[1, 2], encoding(torch.tensor(5), torch.tensor(6)))


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal-split"])
def test_in_training_sinusoids_come_from_a_table(kind: str) -> None:
    """They equal the computed ones, which have no maximum length."""
    encoding, indices = positions.make(kind, 10, longest=40), torch.tensor([0, 7, 39, 3])
    assert torch.equal(encoding.train()(indices, indices), encoding.eval()(indices, indices))
    assert encoding(torch.tensor([4000]), indices).shape == (1, 10)
