"""GPT has GPT-2's size, reads pairs as one text, and gives the same logits with a cache and in segments."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import tensor_io
from regard.attention import PackedQK, kv_cache, use_backend
from regard.errors import UserError
from regard.models import build
from regard.models.gpt import GPT, GPTSettings
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS

TINY = {
    "width": 16,
    "heads": 2,
    "layers": 2,
    "ffn_width": 24,
    "max_positions": 64,
    "dropout": 0.0,
    "mask_size": 3,
    "memory_size": 2,
}
POSITIONS = ("learned", "sinusoidal", "rotary", "relative")
MASKS = ("causal", "window", "strided", "fixed", "segments")
VOCABULARY = 20


def settings(**changes: Any) -> GPTSettings:
    return GPTSettings.model_validate({**TINY, **changes})


def make_model(
    seed: int = 1, shared: bool = True, sizes: tuple[int, int] = (VOCABULARY, VOCABULARY), **changes: Any
) -> GPT:
    """Return a model with random parameters, so that no bias is zero and no gain is one."""
    torch.manual_seed(seed)
    model = GPT(settings(**changes), *sizes, shared).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def text(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Return documents of random tokens, without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def alone(gpt: GPT, tokens: list[int]) -> Tensor:
    """Return the logits of one text in a full pass, [T, V]."""
    packed = PackedTokens.from_lists([tokens])
    return gpt.logits(SeqBatch(PackedTokens.from_lists([[]]), packed, packed.ids))


# -- size --------------------------------------------------------------------------------------------------------------


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def formula(vocabulary: int, num_positions: int, d: int, inner: int, layers: int) -> int:
    """Count embeddings, attention and feed-forward matrices with biases, two norms per layer and the last norm."""
    block = 4 * (d * d + d) + 2 * d * inner + inner + d + 2 * 2 * d
    return (vocabulary + num_positions) * d + layers * block + 2 * d


@pytest.mark.parametrize(
    ("size", "d", "layers", "num_positions", "total"),
    [
        ("nano", 128, 4, 64, None),
        ("mini", 384, 6, 256, None),
        ("gpt2", 768, 12, 1024, 124_439_808),
        ("gpt2-medium", 1024, 24, 1024, 354_823_168),
        ("gpt2-large", 1280, 36, 1024, 774_030_080),
        ("gpt2-xl", 1600, 48, 1024, 1_557_611_200),
    ],
)
def test_every_preset_has_its_size(size: str, d: int, layers: int, num_positions: int, total: int | None) -> None:
    with torch.device("meta"):
        model = build(GPTSettings.model_validate({"size": size}), 50257, 50257, shared=True)
    assert count(model) == formula(50257, num_positions, d, 4 * d, layers)
    assert total is None or count(model) == total  # as published with the weights of GPT-2


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"tie_embeddings": False}, VOCABULARY * 16),
        ({"positions": "sinusoidal"}, -64 * 16),
        ({"positions": "rotary"}, -64 * 16),
        ({"positions": "relative"}, -64 * 16 + 2 * 2 * (8 + 8 + 8 * 8)),  # 2 layers, 2 heads: u, v and W
        ({"norm": "rms"}, -5 * 16),  # no bias in any norm
        ({"activation": "gated"}, 2 * (16 * 24 + 24)),
        ({"mask": "strided"}, 0),
        ({"scale_embeddings": True}, 0),
    ],
)
def test_the_parameters_that_each_setting_adds(changes: dict[str, Any], difference: int) -> None:
    assert (
        count(GPT(settings(**changes), VOCABULARY, VOCABULARY))
        == count(GPT(settings(), VOCABULARY, VOCABULARY)) + difference
    )


def test_a_separate_source_vocabulary_adds_a_table_and_positions_are_shared() -> None:
    model = GPT(settings(), 30, VOCABULARY, shared=False)
    assert count(model) == count(GPT(settings(), VOCABULARY, VOCABULARY)) + 30 * 16
    stored = tensor_io.model_tensors(model)
    assert {n for n in stored if "embedding" in n} == {
        "embedding.table", "embedding.positions.table", "source_embedding.table"
    }  # fmt: skip
    other = GPT(settings(), 30, VOCABULARY, shared=False)
    tensor_io.load_into_model(other, stored, "memory")
    assert torch.equal(other.source_embedding.table, model.source_embedding.table)


def test_initial_weights_are_small_and_smaller_on_the_residual_stream() -> None:
    torch.manual_seed(2)
    model = GPT(settings(width=64, ffn_width=256, layers=8, tie_embeddings=False, positions="relative"), 500, 500)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert bool((parameter == (1 if name.endswith("norm.weight") else 0)).all()), name
        else:
            added = name.endswith(("self_attn.out_proj.weight", "feed_forward.w_out.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (4 if added else 1), rel=0.2), name  # sqrt(2 * 8) = 4
    scaled = GPT(settings(width=64, scale_embeddings=True), 500, 500)
    assert scaled.embedding.table.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert (scaled.embedding.scale, model.embedding.scale) == (8, 1)


# -- one text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "mask"), list(product(POSITIONS, MASKS)))
def test_logits_do_not_depend_on_what_comes_later(positions: str, mask: str) -> None:
    model = make_model(positions=positions, mask=mask)
    (tokens,) = text(9)
    one, other = alone(model, tokens), alone(model, [*tokens[:8], (tokens[8] + 1) % VOCABULARY])
    torch.testing.assert_close(one[:8], other[:8])
    assert (one[8] - other[8]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("causal", set(range(9))),
        ("window", {6, 7, 8}),
        ("strided", {2, 5, 6, 7, 8}),
        ("fixed", {2, 5, 6, 7, 8}),
        ("segments", {4, 5, 6, 7, 8}),
    ],
)
def test_one_layer_attends_as_the_mask_allows(mask: str, seen: set[int]) -> None:
    """Find the tokens that influence the logits after token 8, with mask_size 3 and memory_size 2."""
    model = make_model(layers=1, mask=mask)
    (tokens,) = text(9)
    before = alone(model, tokens)[8]
    influential = set()
    for n in range(9):
        changed = [*tokens[:n], (tokens[n] + 1) % VOCABULARY, *tokens[n + 1 :]]
        if not torch.equal(alone(model, changed)[8], before):
            influential.add(n)
    assert influential == seen


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_with_relative_positions_a_shift_changes_nothing(positions: str) -> None:
    """With a window of 3 tokens in 1 layer, earlier tokens and their number have no effect."""
    model = make_model(positions=positions, mask="window", layers=1)
    before, tokens = text(5, 6)
    torch.testing.assert_close(alone(model, [*before, *tokens])[7:], alone(model, tokens)[2:])


def test_only_learned_positions_limit_the_length() -> None:
    tokens = text(5)[0]
    with pytest.raises(UserError, match="a sequence of 5 tokens is too long: this model has 4 positions"):
        alone(make_model(max_positions=4), tokens)
    model = make_model(max_positions=4)
    state = model.start(PackedTokens.from_lists([tokens[:3], tokens[:1]]))
    _, state = model.step(state, torch.tensor([[4], [4]]))
    state = state.select(torch.tensor([1]))  # the longer one leaves; the other has two positions left
    for _ in range(2):
        _, state = model.step(state, torch.tensor([[4]]))
    with pytest.raises(UserError, match="5 tokens"):
        model.step(state, torch.tensor([[4]]))
    for positions in ("sinusoidal", "rotary", "relative"):
        assert alone(make_model(max_positions=4, positions=positions), tokens).shape == (5, VOCABULARY)


@pytest.mark.parametrize("mask", MASKS)
def test_all_backends_give_the_same_logits(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.models.gpt.attention_layout", partial(PackedQK, query_block=4))  # 4 queries at a time
    model = make_model(mask=mask, positions="relative")
    batch = SeqBatch.from_lists(text(3, 11, 7), text(9, 1, 12, seed=2), bos=BOS, source_size=25, target_size=30)
    actual = []
    for name in ("plain", "fused", "block_sparse"):
        with use_backend(name):
            actual.append(model.logits(batch))
    torch.testing.assert_close(actual[1], actual[0])
    torch.testing.assert_close(actual[2], actual[0])


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "mask"), [("learned", "causal"), ("rotary", "strided"), ("relative", "segments")]
)
def test_a_pair_is_the_source_followed_by_the_target(positions: str, mask: str) -> None:
    model = make_model(positions=positions, mask=mask)
    sources, targets = text(4, 0, 6), text(3, 5, 1, seed=2)
    batch = SeqBatch.from_lists(sources, targets, bos=BOS, source_size=13, target_size=12)
    logits = model.logits(batch)
    assert not logits[9:].any()  # padding
    for source, target, actual in zip(sources, targets, batch.inputs.layout.split(logits), strict=True):
        torch.testing.assert_close(actual, alone(model, [*source, BOS, *target[:-1]])[len(source) :])


def test_a_separate_source_vocabulary_uses_its_own_table() -> None:
    model, joined = make_model(shared=False, sizes=(30, VOCABULARY)), make_model(sizes=(50, 50))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embedding.table"):
                continue
            joined.get_parameter(name).copy_(parameter)
        joined.embedding.table[:VOCABULARY] = model.embedding.table
        joined.embedding.table[VOCABULARY:] = model.source_embedding.table
    target = text(4)[0]
    actual = model.logits(SeqBatch.from_lists([[29, 3, 17]], [target], bos=BOS))
    expected = alone(joined, [VOCABULARY + 29, VOCABULARY + 3, VOCABULARY + 17, BOS, *target[:-1]])
    torch.testing.assert_close(actual, expected[3:, :VOCABULARY])
    state = model.start(PackedTokens.from_lists([[29, 3, 17]]))
    torch.testing.assert_close(model.step(state, torch.tensor([[BOS]]))[0][0, 0], actual[0])


def test_plain_text_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    layouts = []
    monkeypatch.setattr(model, "_decode", lambda x, r: layouts.append(r) or x)
    batch = SeqBatch.from_lists([[], []], [[5, EOS], [6, 7, EOS]], bos=BOS, source_size=3, target_size=7)
    model.logits(batch)
    assert layouts == [batch.inputs.layout]


# -- with a cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "mask"), list(product(POSITIONS, MASKS)))
def test_prompts_of_different_lengths_continue_as_if_alone(positions: str, mask: str) -> None:
    """Cached equals uncached for prompts of 5, 0, 9 and 1 tokens, through 18 steps (the cache grows)."""
    model = make_model(positions=positions, mask=mask)
    prompts, further = text(5, 0, 9, 1), text(18, 18, 18, 18, seed=2)
    full_pass = [alone(model, [*p, *f]) for p, f in zip(prompts, further, strict=True)]
    with torch.no_grad():
        state = model.start(PackedTokens.from_lists(prompts, size=17))
        for step in range(18):
            logits, state = model.step(state, torch.tensor([[f[step]] for f in further]))
            for n, prompt in enumerate(prompts):
                torch.testing.assert_close(logits[n, 0], full_pass[n][len(prompt) + step])


@pytest.mark.parametrize("prompts", [[[], []], [[4, 5], [6, 7]]], ids=["empty", "even"])
def test_prompts_of_equal_length_need_no_padding(prompts: list[list[int]]) -> None:
    model = make_model()
    state = model.start(PackedTokens.from_lists(prompts, size=5))
    for cache in state.self_kv:
        assert cache.tree.padding is None and cache.tree.length == len(prompts[0])
        assert (cache.key is None) == (not prompts[0])  # an empty prompt is not processed
    logits, _ = model.step(state, torch.tensor([[8], [9]]))
    torch.testing.assert_close(logits[1, 0], alone(model, [*prompts[1], 9])[-1])


def test_reordered_beams_and_sentences_keep_their_prompts() -> None:
    model = make_model(positions="relative", mask="fixed")
    prompts = text(2, 7, 4)
    with torch.no_grad():
        state = model.start(PackedTokens.from_lists(prompts))
        _, state = model.step(state, torch.tensor([[5], [6], [7]]))
        state = state.reorder(torch.zeros(3, 2, dtype=torch.long))
        _, state = model.step(state, torch.tensor([[8, 9], [10, 11], [12, 13]]))
        state = state.select(torch.tensor([2, 1])).reorder(torch.tensor([[1, 0, 1], [1, 1, 0]]))
        logits, _ = model.step(state, torch.tensor([[14, 15, 16], [17, 18, 19]]))
    histories = [[[7, 13, 14], [7, 12, 15], [7, 13, 16]], [[6, 11, 17], [6, 11, 18], [6, 10, 19]]]
    for n, k in product(range(2), range(3)):
        torch.testing.assert_close(logits[n, k], alone(model, [*prompts[2 - n], *histories[n][k]])[-1])


# -- segments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["relative", "rotary", "learned"])
@pytest.mark.parametrize(("length", "memory"), [(4, 4), (3, 0), (5, 2), (2, 7), (30, 1)])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_long_text_in_segments_equals_one_pass_with_their_mask(
    positions: str, length: int, memory: int, layers: int
) -> None:
    model = make_model(
        positions=positions, mask="segments", mask_size=length, memory_size=memory, layers=layers
    ).float()
    texts = text(23, 23)
    cache_sizes = []
    to_kernel = kv_cache.KVCache.to_kernel

    def record_to_kernel(self: Any, *arguments: Any) -> Any:
        inputs = to_kernel(self, *arguments)
        cache_sizes.append(self.key.shape[2])
        return inputs

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache.KVCache, "to_kernel", record_to_kernel)
        parts = list(model.segments(torch.tensor(texts)))
        assert [p.shape[1] for p in parts] == [min(length, 23 - n) for n in range(0, 23, length)]
        for n, tokens in enumerate(texts):
            expected = alone(model, tokens)
            torch.testing.assert_close(
                torch.cat(parts, 1)[n], expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5
            )
    assert max(cache_sizes) <= min(length + memory, 23) and len(cache_sizes) == layers * math.ceil(23 / length)


def test_only_the_segments_mask_allows_segments() -> None:
    with pytest.raises(UserError, match='only a model with mask = "segments"'):
        list(make_model(mask="window").segments(torch.tensor([[4, 5]])))


def test_the_size_of_a_large_model_counts_layers_and_not_lists_of_them() -> None:
    from regard.models.sizes import Size

    settings = GPTSettings.model_validate({"size": "gpt2", "global_layers": [1, 3], "mask": "window"})
    assert Size.of(settings, 50257, 50257, True).stored == 124_439_808  # of GPT-2
