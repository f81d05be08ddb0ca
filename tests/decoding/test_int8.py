"""int8: small whole numbers give nearly what real ones do, for each token by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_cpu_fast_paths import FAMILIES, made, sources

from regard.accelerate import linear_backends
from regard.decoding import SearchRequest, score, search
from regard.errors import UserError
from regard.packed import SeqBatch
from regard.precision import decoding_precision
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this PyTorch has no int8 kernels"
)


KINDS = [False, True] if torch.cpu._is_vnni_supported() else [False]
both = pytest.mark.parametrize("vnni", KINDS, ids=lambda vnni: "32 bits" if vnni else "16 bits")


def by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, most: int) -> torch.Tensor:
    """The definition, with integers as doubles: round(x / s_x) @ round(W / s_W), scaled back."""
    x, weight = x.double(), weight.double()
    s_x, s_w = x.abs().amax(-1, keepdim=True) / most, weight.abs().amax(-1, keepdim=True) / 127
    return (x / s_x).round() @ (weight / s_w).round().T * s_x * s_w.T + bias.double()


@both
def test_the_matmul_equals_its_definition_and_is_close_to_float(vnni: bool) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(5, 64), torch.randn(48, 64) / 8, torch.randn(48)
    x *= torch.tensor([1e-3, 1.0, 10.0, 1e3, 1.0])[:, None]  # rows of very different size
    found = linear_backends.Int8Linear(vnni)(x, weight, bias)
    size = x.norm(dim=-1, keepdim=True)
    expected = by_hand(x, weight, bias, 127 if vnni else 63).float()
    assert ((found - expected).abs() / size).max() < 2e-3  # a number half way between two may be rounded either way
    assert ((found - F.linear(x, weight, bias)).abs() / size).max() < 0.02


@both
def test_a_row_does_not_depend_on_the_other_rows(vnni: bool) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(6, 32), torch.randn(20, 32)
    product = linear_backends.Int8Linear(vnni)
    together = product(torch.cat([x, 1000 * x]), weight)[:6]
    torch.testing.assert_close(together, torch.cat([product(row[None], weight) for row in x]), atol=1e-6, rtol=1e-6)


@both
def test_the_largest_values_do_not_overflow(vnni: bool) -> None:
    # 63 * 127 * 256 terms, all of one sign: more than 16 bits hold, and each pair as much as they do
    x, weight = torch.ones(3, 256), torch.ones(16, 256)
    torch.testing.assert_close(linear_backends.Int8Linear(vnni)(x, weight), torch.full((3, 16), 256.0))
    torch.testing.assert_close(linear_backends.Int8Linear(vnni)(-x, weight), torch.full((3, 16), -256.0))


@both
def test_zeros_stay_zeros_and_nan_stays_nan(vnni: bool) -> None:
    weight, bias = torch.randn(4, 8), torch.randn(4)
    product = linear_backends.Int8Linear(vnni)
    torch.testing.assert_close(product(torch.zeros(2, 8), weight, bias), bias.expand(2, -1))
    torch.testing.assert_close(product(torch.randn(2, 8), torch.zeros(4, 8), bias), bias.expand(2, -1))
    assert product(torch.full((1, 8), torch.nan), weight).isnan().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_int8_gives_nearly_the_same_output(family: str) -> None:
    model, rough = made(family), made(family)
    linear_backends.prepare(rough, "int8")
    source = sources()
    pairs = [ids.tolist() for ids in source.layout.split(source.ids)]
    batch = SeqBatch.from_lists(pairs, [[*pair[:-1][::-1], EOS] for pair in pairs], bos=BOS)
    for one, other in zip(score(model.logits, batch), score(rough.logits, batch), strict=True):
        assert other == pytest.approx(one, abs=0.2)
    found = search(rough, SearchRequest(source, DecodingSettings(beam=2, max_extra=3)))
    again = [
        search(rough, SearchRequest(sources(n + 1), DecodingSettings(beam=2, max_extra=3)))[n]
        for n in range(len(pairs))
    ]
    assert [h.tokens for h, *_ in found] == [h.tokens for h, *_ in again]


def test_the_precision_depends_on_device_and_training() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert decoding_precision("auto", "auto", cpu) == decoding_precision("auto", "bf16", cpu) == "fp32"
    assert decoding_precision("auto", "auto", gpu) == decoding_precision("auto", "bf16", gpu) == "bf16"
    assert decoding_precision("auto", "fp32", gpu) == decoding_precision("fp32", "bf16", gpu) == "fp32"
    assert decoding_precision("int8", "auto", cpu) == "int8"
    for asked, device, says in (
        ("int4", cpu, "no precision 'int4'"),
        ("int8", gpu, "for CPUs"),
        ("bf16", cpu, "for GPUs"),
    ):
        with pytest.raises(UserError, match=says):
            decoding_precision(asked, "auto", device)
