"""BERT equals PyTorch's encoder with the same weights, has BERT's size, predicts masked tokens and classifies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import tensor_io
from regard.decoding import SearchRequest, search
from regard.errors import UserError
from regard.interpret.recorder import Recorder
from regard.models import SequenceModel, build
from regard.models.bert import Bert, BertSettings, TextClassBatch
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS

TINY = {"width": 16, "heads": 4, "layers": 2, "ffn_width": 24, "dropout": 0.0, "max_positions": 32}
TEXTS = [[BOS, 9, 5, 7, 12, EOS], [BOS, 6, EOS], [BOS, 8, 8, 11, EOS]]


def settings(**changes: Any) -> BertSettings:
    return BertSettings.model_validate({**TINY, **changes})


def bert(source: int = 20, target: int = 20, **changes: Any) -> Bert:
    """Randomise every parameter, so that no bias is zero and no gain is one."""
    torch.manual_seed(1)
    model = Bert(settings(**changes), source, target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def masked_batch(size: int | None = None, predicted: int = 7) -> SeqBatch:
    """Return the texts with some tokens to be predicted."""
    tokens = PackedTokens.from_lists(TEXTS, size)
    return SeqBatch(tokens, tokens, tokens.ids, tokens.ids >= predicted)


def classes() -> TextClassBatch:
    return TextClassBatch.from_lists(TEXTS, [4, 5, 6])


# -- against PyTorch ---------------------------------------------------------------------------------------------------


def pytorch_encoder(model: Bert) -> nn.TransformerEncoder:
    """PyTorch's encoder with our weights."""
    s = model.settings
    layer = nn.TransformerEncoderLayer(
        s.width, s.heads, s.ffn_width, 0.0, "gelu", s.norm_eps, batch_first=True, norm_first=s.norm_first
    )
    final = nn.LayerNorm(s.width, s.norm_eps) if s.norm_first else None
    encoder = nn.TransformerEncoder(layer, s.layers, final, enable_nested_tensor=False)
    with torch.no_grad():
        for ours, theirs in zip(model.encoder, encoder.layers, strict=True):
            theirs.self_attn.in_proj_weight.copy_(ours.self_attn.qkv_proj.weight)
            theirs.self_attn.in_proj_bias.copy_(ours.self_attn.qkv_proj.bias)
            theirs.self_attn.out_proj.load_state_dict(ours.self_attn.out_proj.state_dict())
            theirs.linear1.load_state_dict(ours.feed_forward.w_in.state_dict())
            theirs.linear2.load_state_dict(ours.feed_forward.w_out.state_dict())
            theirs.norm1.load_state_dict(ours.self_attn_residual.norm.state_dict())
            theirs.norm2.load_state_dict(ours.feed_forward_residual.norm.state_dict())
        if final is not None:
            final.load_state_dict(model.encoder.norm.state_dict())
    return encoder.train()  # training, so that no inference fast path is taken


def pytorch_states(model: Bert, text: list[int]) -> Tensor:
    """Return the hidden states of one text, by PyTorch's layers."""
    s, e = model.settings, model.embedding
    x = e.table[text] + e.positions.table[: len(text)] + e.token_types[0]  # type: ignore[union-attr, index]
    x = F.layer_norm(x, (s.width,), e.norm.weight, e.norm.bias, s.norm_eps)  # type: ignore[arg-type]
    return pytorch_encoder(model)(x[None])[0]


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_encoder_equals_pytorch_s_on_each_text_alone(norm_first: bool) -> None:
    model = bert(norm_first=norm_first)
    tokens = PackedTokens.from_lists(TEXTS, 20)
    with torch.no_grad():
        for text, states in zip(TEXTS, tokens.layout.split(model.encode(tokens)), strict=True):
            torch.testing.assert_close(states, pytorch_states(model, text), atol=1e-5, rtol=1e-5)


def test_the_mlm_head_is_a_layer_a_norm_and_the_token_table() -> None:
    model = bert()
    head, width = model.mlm_head, model.settings.width
    with torch.no_grad():
        logits = model.logits(masked_batch(20))
        assert logits.shape == (20, 20)
        for text, actual in zip(TEXTS, masked_batch(20).inputs.layout.split(logits), strict=True):
            hidden = F.gelu(F.linear(pytorch_states(model, text), head.dense.weight, head.dense.bias))
            hidden = F.layer_norm(hidden, (width,), head.norm.weight, head.norm.bias, 1e-12)  # type: ignore[arg-type]
            torch.testing.assert_close(actual, hidden @ model.embedding.table.T + head.bias, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_a_text_is_classified_by_its_first_hidden_state_or_their_mean(pool: str) -> None:
    model = bert(target=9, task="classify", pooling=pool)
    pooler, out = model.classifier.pooler, model.classifier.out
    with torch.no_grad():
        for text, actual in zip(TEXTS, model.logits(classes()), strict=True):
            states = pytorch_states(model, text)
            pooled_states = states[0] if pool == "first" else states.mean(0)
            pooled = torch.tanh(pooler.weight @ pooled_states + pooler.bias)
            torch.testing.assert_close(actual, out.weight @ pooled + out.bias, atol=1e-5, rtol=1e-5)


def test_every_kind_of_positions_makes_the_encoder_depend_on_order() -> None:
    one, other = ([BOS, 5, 6, 7, EOS], [BOS, 7, 6, 5, EOS])
    for kind in ("learned", "sinusoidal", "rotary", "relative"):
        model = bert(positions=kind)
        with torch.no_grad():
            first_states = [model.encode(PackedTokens.from_lists([text]))[0] for text in (one, other)]
        assert (first_states[0] - first_states[1]).abs().max() > 1e-3, kind
        has_position_table = "embedding.positions.table" in dict(model.named_parameters())
        assert has_position_table == (kind == "learned")


# -- sizes -------------------------------------------------------------------------------------------------------------


def body(vocabulary: int, s: BertSettings) -> int:
    """Count the parameters of the embeddings with their norm, and of the blocks."""
    d = s.width
    tables = (vocabulary + s.max_positions + 2) * d + 2 * d
    attention, feed_forward, norms = 4 * (d * d + d), 2 * d * s.ffn_width + s.ffn_width + d, 2 * 2 * d
    return tables + s.layers * (attention + feed_forward + norms)


@pytest.mark.parametrize("size", ["tiny", "mini", "small", "base", "large"])
def test_presets_have_the_parameters_of_the_formula(size: str) -> None:
    for task in ("fill", "classify"):
        chosen = BertSettings.model_validate({"size": size, "task": task})
        with torch.device("meta"):
            model = build(chosen, 8000, 8000 if task == "fill" else 6, shared=task == "fill")
        d = chosen.width
        head = d * d + d + (2 * d + 8000 if task == "fill" else 6 * d + 6)
        assert sum(p.numel() for p in model.parameters()) == body(8000, chosen) + head


def test_bert_base_has_its_published_109_482_240_parameters() -> None:
    """With the pooler but no classifier; with the MLM head instead of the pooler it has 109,514,298."""
    with torch.device("meta"):
        classifier = Bert(BertSettings.model_validate({"size": "base", "task": "classify"}), 30522, 6)
        masked_lm = Bert(BertSettings.model_validate({"size": "base"}), 30522, 30522)
    published = [p.numel() for name, p in classifier.named_parameters() if not name.startswith("classifier.out")]
    assert sum(published) == 109_482_240
    assert sum(p.numel() for p in masked_lm.parameters()) == 109_514_298


# -- masked tokens -----------------------------------------------------------------------------------------------------


def test_only_masked_positions_count_in_the_loss() -> None:
    model, batch = bert(), masked_batch(20)
    with torch.no_grad():
        logp = model.logits(batch).log_softmax(-1)
        predicted = [index for index, token in enumerate(batch.labels.tolist()) if token >= 7]
        expected = -sum(logp[index, batch.labels[index]].item() for index in predicted)
        assert model(batch).item() == pytest.approx(expected, rel=1e-5)
    assert batch.num_targets == len(predicted) == 6


def test_computing_fewer_logits_changes_neither_loss_nor_gradients() -> None:
    model, batch = bert(), masked_batch(20)
    parameters = list(model.parameters())
    results = []
    for loss in (
        model(batch, 0.1),
        SequenceModel.forward(model, batch, 0.1),
    ):  # ours, and from logits at every position
        results.append([loss, *torch.autograd.grad(loss, parameters)])
    for quick, slow in zip(*results, strict=True):
        torch.testing.assert_close(quick, slow, atol=1e-4, rtol=1e-5)


def test_every_token_attends_to_both_sides() -> None:
    model, tokens = bert(), PackedTokens.from_lists(TEXTS)
    with torch.no_grad(), Recorder(model) as seen:
        model.encode(tokens)
    assert len(seen.attention) == 2
    for attended in seen.attention.values():
        assert (attended.sentence(0) > 0).all()


@pytest.mark.parametrize("task", ["fill", "classify"])
def test_bert_writes_no_text(task: str) -> None:
    with pytest.raises(UserError, match=r"writes no text.*regard fill.*regard predict"):
        search(bert(task=task), SearchRequest(PackedTokens.from_lists(TEXTS), DecodingSettings()))


# -- classes -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_the_classes() -> None:
    model, batch = bert(target=9, task="classify"), classes()
    with torch.no_grad():
        logits = model.logits(batch)
        expected = F.cross_entropy(logits, torch.tensor([4, 5, 6]), reduction="sum", label_smoothing=0.1)
        assert model(batch, 0.1).item() == pytest.approx(expected.item(), rel=1e-5)
    assert logits.shape == (3, 9) and batch.num_targets == 3


def test_the_logit_lens_of_the_last_stream_is_the_logits() -> None:
    for norm_first in (False, True):
        model, batch = bert(target=9, task="classify", norm_first=norm_first), classes()
        with torch.no_grad(), Recorder(model) as seen:
            logits = model.logits(batch)
            last = [value for name, value in seen.values.items() if name.endswith("feed_forward_residual.stream")][-1]
            torch.testing.assert_close(model.logit_lens(last, batch), logits)


# -- from masked LM to classifier --------------------------------------------------------------------------------------


def test_a_classifier_takes_the_body_of_a_masked_lm_and_keeps_its_own_head() -> None:
    masked_lm, model = bert(), bert(target=9, task="classify")
    with torch.no_grad():
        for parameter in masked_lm.parameters():
            parameter.add_(1.0)
    before = {name: tensor.clone() for name, tensor in tensor_io.model_tensors(model).items()}
    tensors = tensor_io.model_tensors(masked_lm)
    model.init_from(tensors, "there")
    for name, tensor in tensor_io.model_tensors(model).items():
        is_head = name.startswith("classifier.")
        assert torch.equal(tensor, before[name] if is_head else tensors[name]), name
        assert is_head or not torch.equal(tensor, before[name]), name


def test_tensors_that_do_not_fit_are_named() -> None:
    tensors = tensor_io.model_tensors(bert())
    model = bert(target=9, task="classify")
    incomplete = {name: tensor for name, tensor in tensors.items() if name != "embedding.token_types"}
    with pytest.raises(UserError, match=r"there lacks tensor embedding\.token_types \(1 in all\)"):
        model.init_from(incomplete, "there")
    with pytest.raises(UserError, match=r"there has an unknown tensor encoder\.9\.self_attn \(1 in all\)"):
        model.init_from({**tensors, "encoder.9.self_attn": torch.zeros(1)}, "there")
    with pytest.raises(UserError, match=r"there: embedding\.table has shape \(21, 16\), not \(20, 16\)"):
        model.init_from(tensor_io.model_tensors(bert(source=21)), "there")
    with pytest.raises(UserError, match=r"there lacks tensor mlm_head\.bias"):
        bert().init_from(tensor_io.model_tensors(model), "there")  # a classifier has no MLM head


def test_a_model_of_the_same_task_takes_all_tensors() -> None:
    one, other = bert(target=9, task="classify"), Bert(settings(task="classify"), 20, 9)
    other.init_from(tensor_io.model_tensors(one), "there")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# -- learning ----------------------------------------------------------------------------------------------------------


def some_texts(count: int, generator: torch.Generator) -> TextClassBatch:
    """Return texts of 1 to 6 words: all from 10 to 19 (class 0), or one from 20 to 29 (class 1)."""
    sources, labels = [], []
    for _ in range(count):
        length = int(torch.randint(1, 7, (), generator=generator))
        words = torch.randint(10, 20, (length,), generator=generator)
        label = int(torch.randint(0, 2, (), generator=generator))
        if label:
            words[torch.randint(0, length, (), generator=generator)] += 10
        sources.append([BOS, *words.tolist(), EOS])
        labels.append(label)
    return TextClassBatch.from_lists(sources, labels)


def test_a_tiny_classifier_learns_which_words_matter() -> None:
    torch.manual_seed(0)
    model = Bert(settings(task="classify", layers=1), 30, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        batch = some_texts(32, generator)
        optimizer.zero_grad()
        (model(batch) / batch.num_targets).backward()
        optimizer.step()
    fresh = some_texts(300, generator)
    with torch.no_grad():
        right = model.eval().logits(fresh).argmax(-1) == fresh.labels
    assert right.sum() >= 0.98 * len(right)


def test_a_tiny_masked_lm_learns_a_rule_that_needs_both_sides() -> None:
    """The middle word of [a, ?, b] is a + b: it depends on both sides."""
    torch.manual_seed(0)
    model = Bert(settings(width=32), 16, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sums = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    texts = [[BOS, 5 + a, 5 + a + b, 5 + b, EOS] for a, b in sums.tolist()]
    clean = PackedTokens.from_lists(texts)
    middle = clean.layout.position == 2
    read = PackedTokens(clean.ids.masked_fill(middle, 4), clean.layout)
    batch = SeqBatch(read, read, clean.ids, middle)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(batch) / batch.num_targets
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
