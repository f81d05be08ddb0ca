"""What makes decoding on a CPU quick changes nothing: each is held to its slow twin."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.accelerate import linear_backends
from regard.attention import BeamTree, DenseQK, KVCache, MaskTable, ScaledDot, attend, use_backend
from regard.attention.backends import BACKENDS
from regard.decoding import SearchRequest, search
from regard.decoding.decisive import decisive
from regard.decoding.topk import GROUP, topk
from regard.models import SequenceModel, build
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import EOS

FAMILIES = {
    "transformer": {"width": 32, "heads": 4, "encoder_layers": 1, "decoder_layers": 2, "ffn_width": 48},
    "recurrent": {"width": 32, "encoder_width": 32, "embedding": 32, "encoder_layers": 1, "decoder_layers": 1},
    "gpt": {"width": 32, "heads": 4, "layers": 2, "ffn_width": 48, "max_positions": 64},
}


def made(family: str, vocabulary: int = 300) -> SequenceModel:
    model = {"family": family, "dropout": 0.0, **FAMILIES[family]}
    settings = Recipe.model_validate({"data": {"corpus": "copy"}, "model": model}).model
    torch.manual_seed(1)
    return build(settings, vocabulary, vocabulary, shared=True).eval()


def sources(count: int = 7, vocabulary: int = 300) -> PackedTokens:
    draw = Random(1)
    return PackedTokens.from_lists(
        [[*(draw.randrange(4, vocabulary) for _ in range(draw.randint(1, 9))), EOS] for _ in range(count)]
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beam", [1, 4])
def test_a_prepared_model_finds_what_the_plain_one_finds(family: str, beam: int) -> None:
    settings = DecodingSettings(beam=beam, max_extra=6)
    request = SearchRequest(sources(), settings)
    expected = search(made(family), request)
    model = made(family)
    linear_backends.prepare(model)
    found = search(model, request)
    decided = decisive(made(family), request, expected)
    assert sum(decided) >= len(decided) - 1
    for (ours, *_), (theirs, *_), clear in zip(found, expected, decided, strict=True):
        if clear:
            assert ours.tokens == theirs.tokens
            assert ours.score == pytest.approx(theirs.score, abs=1e-5)


@pytest.mark.parametrize("shape", [(1, 7), (3, 7), (2, 5, 7), (0, 7)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_a_prepacked_linear_layer_equals_the_plain_one(shape: tuple[int, ...], biased: bool) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(11, 7), torch.randn(11) if biased else None
    product = linear_backends.PrepackedLinear()
    with torch.no_grad():
        torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight, bias))
        turned = x.transpose(0, -1).contiguous().transpose(0, -1)  # the same numbers, lying otherwise
        torch.testing.assert_close(product(turned, weight, bias), F.linear(x, weight, bias))


def test_changed_weights_are_prepacked_again() -> None:
    layer, x = torch.nn.Linear(5, 4), torch.randn(3, 5)
    product = linear_backends.PrepackedLinear()
    with torch.no_grad():
        product(x, layer.weight)
        layer.weight.mul_(2)
        torch.testing.assert_close(product(x, layer.weight), F.linear(x, layer.weight))


def test_a_prepared_model_keeps_its_gradients_and_names() -> None:
    from regard import tensor_io

    plain, quick = made("transformer"), made("transformer")
    linear_backends.prepare(quick)
    assert tensor_io.model_tensors(plain).keys() == tensor_io.model_tensors(quick).keys()
    assert plain.state_dict().keys() == quick.state_dict().keys()
    x = torch.randn(4, 32)
    for model in (plain, quick):
        model.decoder[0].feed_forward(x).sum().backward()  # type: ignore[index,operator]
    for one, other in zip(plain.parameters(), quick.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.parametrize("size", [3, GROUP, 9 * GROUP, 40 * GROUP, 40 * GROUP + 1, 41 * GROUP - 1])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_two_stage_topk_equals_topk(size: int, count: int) -> None:
    torch.manual_seed(size)
    values = torch.randn(2, 3, size)
    values[0, 1, size // 2 :] = -torch.inf
    values[1, 2] = -torch.inf
    values[1, 2, -1] = 0.0
    expected = values.topk(min(count, size))
    found, where = topk(values, count)
    torch.testing.assert_close(found, expected.values)
    finite = found > -torch.inf  # which of the impossible ones are named does not matter
    assert torch.equal(values.gather(-1, where)[finite], found[finite])
    assert torch.equal(where[finite], expected.indices[finite])


@pytest.mark.parametrize("name", ["plain", "fused", "small"])
@pytest.mark.parametrize("prompt", [0, 3])
def test_beams_of_a_tree_see_what_beams_with_copied_keys_see(name: str, prompt: int) -> None:
    """While beams multiply and are reordered and sentences leave, fixed cache entries equal reordered keys."""
    torch.manual_seed(3)
    random, heads, width = Random(3), 2, 4
    sentences, beams, layers = 3, 1, range(2)
    tree = BeamTree(sentences)
    caches = [KVCache(tree) for _ in layers]
    moved = [torch.empty(2, sentences, heads, 0, width) for _ in layers]  # keys and values of each beam
    with torch.no_grad(), use_backend(name):
        if prompt:
            tree.append(prompt, torch.device("cpu"))
            for n in layers:
                tokens = torch.randn(3, sentences, prompt, heads, width)
                attend(*tokens, caches[n])
                moved[n] = tokens[1:].transpose(2, 3)
        for step in range(24):
            tree.append(None, torch.device("cpu"))
            for n in layers:
                query, *new = torch.randn(3, sentences * beams, heads, width)
                moved[n] = torch.cat([moved[n], torch.stack(new).unsqueeze(3)], 3)
                expected = attend(query.unsqueeze(2), *moved[n], DenseQK()).squeeze(2)
                torch.testing.assert_close(attend(query, *new, caches[n]), expected)
            assert tree.position.index.tolist() == [prompt + step]
            after = random.randint(1, 4)
            parents = torch.randint(0, beams, (sentences, after))
            rows = (torch.arange(sentences)[:, None] * beams + parents).flatten()
            tree.reorder(parents)
            moved, beams = [kept.index_select(1, rows) for kept in moved], after
            if random.random() < 0.2 and sentences > 1:
                stay = torch.tensor([0, sentences - 1][: sentences - 1])
                tree = tree.select(stay)
                caches = [cache.select(stay, tree) for cache in caches]
                rows = (stay[:, None] * beams + torch.arange(beams)).flatten()
                moved, sentences = [kept.index_select(1, rows) for kept in moved], len(stay)
    assert tree.entries > 24 + prompt and tree.length == 24 + prompt


def test_one_beam_needs_no_mask() -> None:
    tree = BeamTree(2)
    for _ in range(3):
        tree.append(None, torch.device("cpu"))
        allowed = tree.allowed(torch.float32)
        tree.reorder(torch.zeros(2, 1, dtype=torch.long))
    assert allowed.table is None and allowed.no_empty_rows


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("decoding", [True, False])
@pytest.mark.parametrize("sentences", [1, 2, 20])
@pytest.mark.parametrize("key_heads", [3, 1])
def test_the_backend_for_few_queries_equals_the_plain_one(
    masked: bool, decoding: bool, sentences: int, key_heads: int
) -> None:
    """Without gradients, a step of one or two sentences is computed by one operator, unless queries share keys."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(sentences, heads, size, 8) for heads, size in ((3, 4), (key_heads, 9), (key_heads, 9)))
    table: Tensor | None = None
    if masked:
        table = torch.rand(sentences, 1, 4, 9) > 0.5
        table[..., 0] = True
    allowed = MaskTable.with_bias(table, torch.float32)
    all_keys = (x.repeat_interleave(3 // key_heads, 1) for x in (k, v))
    expected = BACKENDS["plain"](q, *all_keys, allowed, ScaledDot())
    with torch.set_grad_enabled(not decoding):
        torch.testing.assert_close(BACKENDS["small"](q, k, v, allowed, ScaledDot()), expected)


def test_translating_imports_neither_training_nor_optional_packages() -> None:
    """`regard translate` is slow to start if it loads what it does not need."""
    code = (
        "import json, sys, regard.runs, regard.cli.app, regard.tasks.translator, regard.models.transformer;"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))
    heavy = {"regard.training", "regard.server", "sacrebleu", "transformers", "tensorboard", "matplotlib", "fastapi"}
    assert not loaded & heavy
    assert "regard.decoding.cuda_graphs" not in loaded
