"""Feed-forward layers, norms and residual connections, against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention import PackedQK
from regard.dropout import dropout
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import EncoderBlock, FeedForward, Residual
from regard.nn.norms import BatchNorm, LayerNorm, RMSNorm
from regard.packed import PackedLayout


def settings(**changes: Any) -> BlockConfig:
    return BlockConfig(**{"width": 6, "heads": 2, "ffn_width": 5, **changes})


def randomised(module: nn.Module) -> nn.Module:
    """Randomise every parameter, so that no bias is zero and no gain is one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


# -- feed-forward ------------------------------------------------------------------------------------------------------


def relu(x: float) -> float:
    return max(x, 0.0)


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def linear(layer: nn.Linear, x: list[float]) -> list[float]:
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    return [sum(w * a for w, a in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


@pytest.mark.parametrize(("activation", "f"), [("relu", relu), ("gelu", gelu)])
def test_feed_forward_is_two_linear_layers_with_an_activation_between(activation: Any, f: Any) -> None:
    torch.manual_seed(1)
    layer = randomised(FeedForward(settings(activation=activation)))
    x = torch.randn(4, 6)
    expected = [linear(layer.w_out, [f(h) for h in linear(layer.w_in, row)]) for row in x.tolist()]
    torch.testing.assert_close(layer(x), torch.tensor(expected))


def test_the_gated_feed_forward_multiplies_by_a_gate() -> None:
    torch.manual_seed(2)
    layer = randomised(FeedForward(settings(activation="gated")))
    x = torch.randn(4, 6)
    expected = []
    for row in x.tolist():
        both = linear(layer.w_in, row)  # the gate first, then the gated features
        expected.append(linear(layer.w_out, [silu(g) * h for g, h in zip(both[:5], both[5:], strict=True)]))
    torch.testing.assert_close(layer(x), torch.tensor(expected))


# -- norms -------------------------------------------------------------------------------------------------------------


def test_layer_norm_uses_mean_and_deviation_over_the_features_of_a_token() -> None:
    norm = randomised(LayerNorm(6))
    x = torch.randn(5, 6) * 3 + 2
    expected = []
    for row in x.tolist():
        mean = sum(row) / 6
        deviation = math.sqrt(sum((a - mean) ** 2 for a in row) / 6 + norm.eps)
        expected.append([(a - mean) / deviation for a in row])
    torch.testing.assert_close(norm(x), torch.tensor(expected) * norm.weight + norm.bias)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = randomised(RMSNorm(6))
    x = torch.randn(5, 6) * 3 + 2
    expected = [[a / math.sqrt(sum(b * b for b in row) / 6) for a in row] for row in x.tolist()]
    torch.testing.assert_close(norm(x), torch.tensor(expected) * norm.weight)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@pytest.mark.parametrize("poison", [0.0, 1e4, math.nan])
def test_batch_norm_equals_pytorch_s_and_ignores_padding(poison: float) -> None:
    torch.manual_seed(3)
    ours, theirs = BatchNorm(6), nn.BatchNorm1d(6)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_())
        theirs.bias.copy_(ours.bias.normal_())
    is_token = torch.tensor([True] * 5 + [False] * 3)
    for _ in range(3):  # running statistics build up over batches
        x = torch.randn(8, 6) * 2 + 1
        x[5:] = poison
        our_x, their_x = x.clone().requires_grad_(), x[:5].clone().requires_grad_()
        out, expected = ours(our_x, is_token)[:5], theirs(their_x)
        torch.testing.assert_close(out, expected)
        grad_out = torch.randn(5, 6)
        gradient = torch.autograd.grad((out * grad_out).sum(), our_x)[0]
        if math.isfinite(poison):  # zero times NaN is NaN in any layer; padding is always finite
            torch.testing.assert_close(gradient[:5], torch.autograd.grad((expected * grad_out).sum(), their_x)[0])
            assert not gradient[5:].any()
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_variance, theirs.running_var)
    ours.eval(), theirs.eval()
    x = torch.randn(8, 6)
    torch.testing.assert_close(ours(x, is_token), theirs(x))
    assert not torch.equal(ours.running_mean, torch.zeros(6))


def test_batch_norm_counts_all_tokens_without_a_mask() -> None:
    ours, theirs = BatchNorm(6), nn.BatchNorm1d(6)
    x = torch.randn(8, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_variance, theirs.running_var)


def test_a_batch_of_one_token_leaves_finite_statistics() -> None:
    norm = BatchNorm(6)
    assert norm(torch.randn(3, 6), torch.tensor([True, False, False])).isfinite().all()
    assert norm.running_variance.isfinite().all()


# -- residual connections ----------------------------------------------------------------------------------------------


def double(x: Tensor) -> Tensor:
    return 2 * x


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def test_the_norm_comes_before_the_sublayer_or_after_the_sum() -> None:
    x = torch.randn(4, 6)
    before = randomised(Residual(settings(norm_first=True)))
    torch.testing.assert_close(before(x, double), x + 2 * before.norm(x))
    after = randomised(Residual(settings(norm_first=False)))
    torch.testing.assert_close(after(x, double), after.norm(x + 2 * x))


def test_dropout_applies_only_to_the_output_of_the_sublayer() -> None:
    torch.manual_seed(4)
    x = torch.randn(400, 6) + 10
    residual = Residual(settings(norm_first=True, dropout=0.25))
    added = residual(x, ones) - x  # ones, dropped or scaled up by 1 / 0.75
    not_dropped = added > 0.5
    torch.testing.assert_close(added[not_dropped], torch.full_like(added[not_dropped], 4 / 3), atol=1e-5, rtol=1e-5)
    assert added[~not_dropped].abs().max() < 1e-5  # where it is dropped, x is unchanged
    assert not_dropped.float().mean().item() == pytest.approx(0.75, abs=0.04)  # 2400 draws: a deviation is 0.009
    residual.eval()
    torch.testing.assert_close(residual(x, ones), x + 1)


def test_dropout_comes_before_a_post_norm() -> None:
    torch.manual_seed(5)
    residual = Residual(settings(norm_first=False, dropout=0.5))
    x = torch.randn(50, 6)
    torch.manual_seed(6)
    out = residual(x, ones)
    torch.manual_seed(6)
    dropped = dropout(torch.ones_like(x), 0.5, True)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(out, residual.norm(x + dropped))


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_block_applies_dropout_once_per_sublayer(norm_first: bool) -> None:
    """The whole block written out, with dropout where the paper puts it: on the output of each sub-layer."""
    torch.manual_seed(7)
    block = randomised(EncoderBlock(settings(dropout=0.4, norm_first=norm_first)))
    layout = PackedLayout([3, 2])
    self_layout, x = PackedQK(layout, layout), torch.randn(5, 6)
    torch.manual_seed(8)
    out = block(x, self_layout, layout.is_token)
    torch.manual_seed(8)
    first, second = block.self_attn_residual.norm, block.feed_forward_residual.norm

    def drop(t: Tensor) -> Tensor:
        return dropout(t, 0.4, True)

    if norm_first:
        x = x + drop(block.self_attn(first(x), self_layout))
        x = x + drop(block.feed_forward(second(x)))
    else:
        x = first(x + drop(block.self_attn(x, self_layout)))
        x = second(x + drop(block.feed_forward(x)))
    assert torch.equal(out, x)


@pytest.mark.parametrize("norm", ["layer", "rms", "batch"])
def test_every_norm_can_be_used_in_a_block(norm: Any) -> None:
    block = EncoderBlock(settings(norm=norm))
    layout = PackedLayout([3, 2], size=6)
    kinds = {"layer": LayerNorm, "rms": RMSNorm, "batch": BatchNorm}
    assert type(block.self_attn_residual.norm) is type(block.feed_forward_residual.norm) is kinds[norm]
    assert block(torch.randn(6, 6), PackedQK(layout, layout), layout.is_token).shape == (6, 6)


# -- zero initialisation, and norms of queries and keys ----------------------------------------------------------------


def test_a_zero_initialised_block_is_the_identity() -> None:
    torch.manual_seed(0)
    layout, x = PackedLayout([3, 2]), torch.randn(5, 6)
    block = EncoderBlock(settings(zero_init=True))
    assert torch.equal(block(x, PackedQK(layout, layout)), x)
    assert not torch.equal(EncoderBlock(settings())(x, PackedQK(layout, layout)), x)
    block(x, PackedQK(layout, layout)).square().sum().backward()
    last = (block.self_attn.out_proj.weight.grad, block.feed_forward.w_out.weight.grad)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in last)  # it can learn


def test_normalised_queries_and_keys_have_the_root_mean_square_of_their_gains() -> None:
    """Their scale has no effect, and with gains g and h no score of D features exceeds g h sqrt(D)."""
    torch.manual_seed(0)
    layout, x = PackedLayout([4, 3]), torch.randn(7, 6)
    attention = settings(qk_norm=True).make_self_attn()
    with torch.no_grad():
        attention.q_norm.weight.fill_(2.0)
        attention.k_norm.weight.fill_(0.5)
    before = attention(x, PackedQK(layout, layout))
    query, key, _ = attention._project(attention.qkv_proj, x, *[attention.heads] * 3)
    for norm, projected, gain in ((attention.q_norm, query, 2.0), (attention.k_norm, key, 0.5)):
        expected = gain * projected / projected.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(norm(projected), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        attention.qkv_proj.weight[:12] *= 1000  # queries and keys
    torch.testing.assert_close(attention(x, PackedQK(layout, layout)), before, atol=1e-4, rtol=1e-4)
