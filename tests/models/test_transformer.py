"""The Transformer equals PyTorch's with the same weights, and has the paper's number of parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import tensor_io
from regard.errors import UserError
from regard.models import build
from regard.models.transformer import Transformer
from regard.models.transformer_settings import TransformerSettings
from regard.packed import SeqBatch
from regard.text import BOS, EOS, UNK

TINY = {"width": 16, "heads": 4, "encoder_layers": 2, "decoder_layers": 3, "ffn_width": 24, "dropout": 0.0}


def settings(**changes: Any) -> TransformerSettings:
    return TransformerSettings.model_validate({**TINY, **changes})


def randomised(model: nn.Module) -> Any:
    """Randomise every parameter, so that no bias is zero and no gain is one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


# -- against PyTorch ---------------------------------------------------------------------------------------------------


def copy_attention(ours: Any, theirs: nn.MultiheadAttention) -> None:
    """Copy weights: PyTorch stacks query, key and value; our cross-attention keeps queries apart."""
    if ours.is_cross:
        weight, bias = (
            torch.cat([getattr(ours.q_proj, name), getattr(ours.kv_proj, name)]) for name in ("weight", "bias")
        )
    else:
        weight, bias = ours.qkv_proj.weight, ours.qkv_proj.bias
    theirs.in_proj_weight.copy_(weight)
    theirs.in_proj_bias.copy_(bias)
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


def pytorch_stacks(model: Transformer, activation: str) -> tuple[nn.TransformerEncoder, nn.TransformerDecoder]:
    """Return PyTorch's encoder and decoder with our weights."""
    s = model.settings
    kind = dict(
        dim_feedforward=s.ffn_width, dropout=0.0, activation=activation, batch_first=True, norm_first=s.norm_first
    )
    final = [nn.LayerNorm(s.width) if s.norm_first else None for _ in range(2)]
    encoder_layer = nn.TransformerEncoderLayer(s.width, s.heads, **kind)
    encoder = nn.TransformerEncoder(encoder_layer, s.encoder_layers, final[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(s.width, s.heads, **kind), s.decoder_layers, norm=final[1]
    )
    with torch.no_grad():
        for ours, theirs in [*zip(model.encoder, encoder.layers), *zip(model.decoder, decoder.layers)]:  # noqa: B905
            copy_attention(ours.self_attn, theirs.self_attn)
            theirs.linear1.load_state_dict(ours.feed_forward.w_in.state_dict())
            theirs.linear2.load_state_dict(ours.feed_forward.w_out.state_dict())
            norms = [ours.self_attn_residual.norm, ours.feed_forward_residual.norm]
            if hasattr(ours, "cross_attn"):
                copy_attention(ours.cross_attn, theirs.multihead_attn)
                norms.insert(1, ours.cross_attn_residual.norm)
            for number, norm in enumerate(norms, 1):
                getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
        if s.norm_first:
            final[0].load_state_dict(model.encoder.norm.state_dict())  # type: ignore[union-attr]
            final[1].load_state_dict(model.decoder.norm.state_dict())  # type: ignore[union-attr]
    return encoder.double().train(), decoder.double().train()  # training, so that no inference fast path is taken


def sinusoids(length: int, width: int) -> Tensor:
    table = [
        [(math.cos if c % 2 else math.sin)(pos / 10000 ** (2 * (c // 2) / width)) for c in range(width)]
        for pos in range(length)
    ]
    return torch.tensor(table, dtype=torch.float64)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_forward_pass_equals_pytorch_s_on_padded_batches(norm_first: bool, activation: str) -> None:
    torch.manual_seed(1)
    model = randomised(Transformer(settings(norm_first=norm_first, activation=activation), 30, 30)).double()
    encoder, decoder = pytorch_stacks(model, activation)
    sources = [[5, 6, EOS], [7, 8, 9, 10, 11, EOS], [EOS]]
    targets = [[12, 13, 14, 15, EOS], [EOS], [16, 17, EOS]]
    batch = SeqBatch.from_lists(sources, targets, bos=BOS, source_size=12, target_size=13)
    logits = model.logits(batch)

    table, layout, source_layout = model.source_embedding.table, batch.inputs.layout, batch.source.layout

    def embed(ids: Tensor) -> Tensor:
        return table[ids] * math.sqrt(16) + sinusoids(ids.shape[1], 16)

    memory = encoder(embed(source_layout.pad(batch.source.ids)), src_key_padding_mask=~source_layout.padded_is_token)
    future = torch.ones(layout.max_len, layout.max_len, dtype=torch.bool).triu(1)
    out = decoder(
        embed(layout.pad(batch.inputs.ids)),
        memory,
        tgt_mask=future,
        memory_key_padding_mask=~source_layout.padded_is_token,
    )
    expected = out @ table.T
    torch.testing.assert_close(
        layout.pad(logits)[layout.padded_is_token], expected[layout.padded_is_token], atol=1e-5, rtol=1e-5
    )

    loss = nn.functional.cross_entropy(
        expected[layout.padded_is_token].float(), batch.labels[: layout.tokens], label_smoothing=0.1, reduction="sum"
    )
    assert model(batch, 0.1).item() == pytest.approx(loss.item(), rel=1e-5)


def test_the_loss_is_the_smoothed_cross_entropy_written_out() -> None:
    torch.manual_seed(2)
    model = randomised(Transformer(settings(), 9, 9))
    batch = SeqBatch.from_lists([[5, EOS], [6, 7, EOS]], [[8, EOS], [EOS]], bos=BOS, target_size=6)
    logp = model.logits(batch).log_softmax(-1)
    labels = [8, EOS, EOS]
    expected = 0.0
    for index, label in enumerate(labels):
        expected -= 0.8 * logp[index, label].item() + 0.2 * sum(logp[index].tolist()) / 9
    assert model(batch, 0.2).item() == pytest.approx(expected, rel=1e-5)


# -- how many parameters -----------------------------------------------------------------------------------------------


def attention(d: int) -> int:
    return 4 * (d * d + d)  # query, key, value and output, with biases


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def formula(d: int, inner: int, layers: int, final_norms: bool) -> int:
    """Count the parameters of N encoder and N decoder layers, without embeddings."""
    feed_forward = d * inner + inner + inner * d + d
    norm = 2 * d
    encoder = attention(d) + feed_forward + 2 * norm
    decoder = 2 * attention(d) + feed_forward + 3 * norm
    return layers * (encoder + decoder) + (2 * norm if final_norms else 0)


@pytest.mark.parametrize(
    ("size", "d", "inner", "million"),
    # Vaswani et al. 2017, table 3: 65M (base) and 213M (big), with a shared vocabulary of "about 37000 tokens" and
    # without saying which biases were counted; ours are 63.1M and 214.2M, within 3% of what was printed.
    [("base", 512, 2048, 65), ("big", 1024, 4096, 213)],
)
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_papers_models_have_the_papers_size(size: str, d: int, inner: int, million: int, norm_first: bool) -> None:
    vocabulary = 37_000
    preset = TransformerSettings.model_validate({"size": size, "norm_first": norm_first})
    assert (preset.width, preset.ffn_width, preset.encoder_layers, preset.decoder_layers) == (d, inner, 6, 6)
    with torch.device("meta"):
        model = build(preset, vocabulary, vocabulary, shared=True)
    assert count(model) == vocabulary * d + formula(d, inner, 6, final_norms=norm_first)
    assert count(model) == pytest.approx(million * 1e6, rel=0.03)


def test_the_papers_heads_and_dropout() -> None:
    assert (TransformerSettings.PRESETS["base"]["heads"], TransformerSettings.PRESETS["base"]["dropout"]) == (8, 0.1)
    assert (TransformerSettings.PRESETS["big"]["heads"], TransformerSettings.PRESETS["big"]["dropout"]) == (16, 0.3)


@pytest.mark.parametrize(
    ("tied", "shared", "tables"),
    [
        (True, True, lambda source, target: target),  # one table for all three
        (False, True, lambda source, target: 2 * target),  # the output has its own
        (True, False, lambda source, target: source + target),
        (False, False, lambda source, target: source + 2 * target),
    ],
)
def test_tying_and_sharing_tables(tied: bool, shared: bool, tables: Any) -> None:
    source, target = (40, 40) if shared else (40, 30)
    s = settings(tie_embeddings=tied, encoder_layers=2, decoder_layers=2)
    model = build(s, source, target, shared)
    assert count(model) == tables(source, target) * 16 + formula(16, 24, 2, final_norms=True)
    is_shared = model.source_embedding.table is model.target_embedding.table
    assert is_shared is shared
    assert model.logits(SeqBatch.from_lists([[39, EOS]], [[29, EOS]], bos=BOS)).shape == (2, target)


def test_tied_tables_are_one_parameter() -> None:
    """Changing the source table changes the logits as changing the output table would."""
    torch.manual_seed(3)
    batch = SeqBatch.from_lists([[5, EOS]], [[6, EOS]], bos=BOS)
    for tied in (True, False):
        model = randomised(Transformer(settings(tie_embeddings=tied), 20, 20))
        before = model.logits(batch)
        with torch.no_grad():
            model.source_embedding.table[17] *= 2  # a token that is neither in the source nor in the target
        after = model.logits(batch)
        factor = torch.ones(20)
        factor[17] = 2 if tied else 1
        torch.testing.assert_close(after, before * factor)


def test_weights_are_unchanged_if_one_tensor_does_not_fit() -> None:
    model = Transformer(settings(), 20, 20)
    before = {name: tensor.clone() for name, tensor in tensor_io.model_tensors(model).items()}
    last = list(before)[-1]
    others = {name: tensor + 1 for name, tensor in before.items()} | {last: torch.zeros(3, 5, 7)}
    with pytest.raises(UserError, match=r"memory: .* has shape \(3, 5, 7\)"):
        tensor_io.load_into_model(model, others, "memory")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensor_io.model_tensors(model).items())


def test_a_tied_table_is_stored_once_and_loaded_tied() -> None:
    model = Transformer(settings(), 20, 20)
    stored = tensor_io.model_tensors(model)
    assert [name for name in stored if "table" in name] == ["source_embedding.table"]
    other = Transformer(settings(), 20, 20)
    tensor_io.load_into_model(other, stored, "memory")
    assert torch.equal(other.target_embedding.table, model.source_embedding.table)
    assert other.target_embedding.table is other.source_embedding.table


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"activation": "gated"}, 5 * (16 * 24 + 24)),  # a gate matrix for each of the 2 + 3 blocks
        ({"norm": "rms"}, -16 * (2 * 2 + 3 * 3 + 2)),  # no bias in any norm
        ({"norm": "batch"}, 0),
        ({"norm_first": False}, -2 * 2 * 16),
        ({"positions": "learned", "max_positions": 50}, 2 * 50 * 16),  # one table per side
        ({"positions": "index"}, 0),
    ],
)
def test_the_parameters_that_each_setting_adds(changes: dict[str, Any], difference: int) -> None:
    assert count(Transformer(settings(**changes), 20, 20)) == count(Transformer(settings(), 20, 20)) + difference


# -- positions in the model --------------------------------------------------------------------------------------------


def test_fractions_stay_between_0_and_1_in_the_encoder_and_follow_the_source_in_the_decoder() -> None:
    model = Transformer(settings(positions="fraction"), 20, 20)
    fractions: list[Tensor] = []
    for side in (model.source_embedding, model.target_embedding):
        side.positions.register_forward_hook(lambda module, args, out: fractions.append(out[..., 0]))
    batch = SeqBatch.from_lists(
        [[5, 6, 7, EOS], [EOS]], [[8, EOS], [9, 10, EOS]], bos=BOS, source_size=7, target_size=6
    )
    model.logits(batch)
    source, target = fractions
    assert source.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1, 0, 0, 0])
    assert target.tolist() == pytest.approx([0, 1 / 3, 0, 1, 2, 0])  # relative to sources of 4 tokens and of 1


def test_without_positions_the_encoder_sees_a_bag_of_words_and_with_them_a_sentence() -> None:
    torch.manual_seed(4)
    model = randomised(Transformer(settings(), 20, 20))
    order = [2, 0, 1]
    tokens = [5, 6, 7]
    shuffled = [tokens[i] for i in order]
    one, other = (SeqBatch.from_lists([t], [[EOS]], bos=BOS).source for t in (tokens, shuffled))
    assert (model.encode(one)[0][order] - model.encode(other)[0]).abs().max() > 0.01
    model.source_embedding.positions.forward = lambda position, length: torch.zeros(*position.shape, 16)
    torch.testing.assert_close(model.encode(one)[0][order], model.encode(other)[0], atol=1e-5, rtol=1e-4)


def test_embeddings_are_scaled_by_the_root_of_the_width() -> None:
    model = Transformer(settings(positions="index"), 20, 20).eval()
    out = model.source_embedding(torch.tensor([3]), torch.tensor([0]), torch.tensor([1]))
    torch.testing.assert_close(out[0], model.source_embedding.table[3] * 4)


def test_logits_do_not_depend_on_what_comes_later() -> None:
    torch.manual_seed(5)
    model = randomised(Transformer(settings(), 20, 20))
    one = model.logits(SeqBatch.from_lists([[5, EOS]], [[6, 7, 8, EOS]], bos=BOS))
    other = model.logits(SeqBatch.from_lists([[5, EOS]], [[6, 7, 19, EOS]], bos=BOS))
    torch.testing.assert_close(one[:3], other[:3])
    assert (one[3] - other[3]).abs().max() > 0.01


def test_the_logits_of_padding_are_zero_so_that_it_gets_no_gradient() -> None:
    model = randomised(Transformer(settings(), 20, 20))
    logits = model.logits(SeqBatch.from_lists([[5, EOS]], [[6, EOS]], bos=BOS, source_size=4, target_size=5))
    assert logits[:2].abs().min() > 0 and not logits[2:].any()


# -- word dropout ------------------------------------------------------------------------------------------------------


def test_word_dropout_feeds_the_decoder_unknown_tokens_in_training_only() -> None:
    batch = SeqBatch.from_lists([[7, 8, EOS]] * 400, [[4, 5, 6, EOS]] * 400, bos=BOS)
    model = randomised(Transformer(settings(word_dropout=0.25), 20, 20))
    plain = randomised(Transformer(settings(), 20, 20))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.logits(batch), plain.logits(batch))
    model.train()
    fed: list[Tensor] = []
    model.target_embedding.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0]))
    torch.manual_seed(0)
    logits = model.logits(batch)
    (ids,) = fed
    given = batch.inputs.ids
    assert (ids[given == BOS] == BOS).all() and set(ids[ids != given].tolist()) == {UNK}
    assert (ids != given)[given != BOS].double().mean() == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 1200))
    dropped = replace(batch, inputs=replace(batch.inputs, ids=ids))
    torch.testing.assert_close(logits, plain.logits(dropped))


def test_word_noise_feeds_the_decoder_random_tokens_in_training_only() -> None:
    """Uniform ones of the vocabulary, of which one in 17 is by chance the right one."""
    batch = SeqBatch.from_lists([[7, 8, EOS]] * 400, [[4, 5, 6, EOS]] * 400, bos=BOS)
    model = randomised(Transformer(settings(word_noise=0.5), 20, 20))
    plain = randomised(Transformer(settings(), 20, 20))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.logits(batch), plain.logits(batch))
    fed: list[Tensor] = []
    model.train().target_embedding.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0]))
    torch.manual_seed(0)
    model.logits(batch)
    (ids,), given = fed, batch.inputs.ids
    changed = (ids != given)[given != BOS].double().mean()
    share = 0.5 * 16 / 17
    assert (ids[given == BOS] == BOS).all() and set(ids[ids != given].tolist()) == {UNK, *range(4, 20)}
    assert changed == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 1200))
