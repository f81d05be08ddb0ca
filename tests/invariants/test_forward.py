"""Invariants of the forward and backward pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FIRST_WORD, SEEDS, Case, FeatureCase, ImageCase, gradients, logits_of
from torch import Tensor, nn

from regard import taps
from regard.accelerate import checkpoint_activations
from regard.attention import use_backend
from regard.decoding import SearchRequest, search
from regard.interpret.recorder import Recorder
from regard.models.bert import TextClassBatch
from regard.packed import PackedLayout, PackedTokens
from regard.recipes.schema import DecodingSettings

seeds = pytest.mark.parametrize("seed", SEEDS)


@pytest.mark.invariant("fused = plain")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=["fp32", "fp64"])
@seeds
def test_the_fused_backend_equals_the_plain_one(case: Any, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    made: Case = case(seed)
    made.model.to(dtype)
    batch = made.cast(made.batch(spare=3), dtype)
    results = []
    for name in ("plain", "fused"):
        with use_backend(name):
            logits = made.model.logits(batch)
        results.append({"logits": logits, **gradients(made.model, made.objective(batch, logits))})
    for name, slow in results[0].items():
        atol = tolerance * max(1.0, slow.abs().max().item())  # rounding grows with what is summed
        torch.testing.assert_close(results[1][name], slow, atol=atol, rtol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.invariant("packed = padded = one by one")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=["fp32", "fp64"])
@seeds
def test_logits_and_loss_do_not_depend_on_packing(case: Any, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    made: Case = case(seed)
    made.model.to(dtype)

    def batch(**packing: Any) -> Any:
        return made.cast(made.batch(**packing), dtype)

    together = logits_of(made, batch())
    with_padding = logits_of(made, batch(spare=7))
    alone = [logits_of(made, batch(only=[n]))[0] for n in range(len(together))]
    for packed, padded, single in zip(together, with_padding, alone, strict=True):
        atol = tolerance * max(1.0, packed.abs().max().item())
        torch.testing.assert_close(packed, padded, atol=atol, rtol=tolerance)
        torch.testing.assert_close(packed, single, atol=atol, rtol=tolerance)
    several = len(set(map(len, made.sources))) > 1  # lengths, so that the padded view has padding
    same_size = isinstance(made, FeatureCase) and len(set(map(len, made.targets))) > 1  # images; texts differ
    assert several or same_size or isinstance(made, ImageCase)
    with torch.no_grad():
        loss = made.model(batch(), 0.1).item()  # computed in float32
        singly = [made.model(batch(only=[n]), 0.1).item() for n in range(len(together))]
        assert made.model(batch(spare=7), 0.1).item() == pytest.approx(loss, rel=1e-5)
    assert sum(singly) == pytest.approx(loss, rel=1e-5)


def with_other_padding(batch: Any, vocabulary: int) -> Any:
    """Replace the padding of source, inputs and labels by random tokens, or random numbers."""

    def replaced(rows: Tensor, real: Tensor) -> Tensor:
        others = torch.randint(FIRST_WORD, vocabulary, rows.shape).to(rows.dtype)
        return torch.where(real.view(-1, *[1] * (rows.dim() - 1)), rows, others)

    layout = batch.source.layout
    source = batch.source.with_rows(replaced(batch.source.rows, layout.is_token), layout)
    if isinstance(batch, TextClassBatch):
        return replace(batch, source=source)
    inputs = batch.inputs
    return replace(
        batch,
        source=source,
        inputs=PackedTokens(replaced(inputs.ids, inputs.layout.is_token), inputs.layout),
        labels=replaced(batch.labels, inputs.layout.is_token),
    )


@pytest.mark.invariant("padding is never read")
@pytest.mark.parametrize("training", [True, False])
@seeds
def test_other_tokens_in_the_padding_change_nothing(case: Any, seed: int, training: bool) -> None:
    made: Case = case(seed, dropout=0.2)
    made.model.train(training)
    batch = made.batch(spare=6)
    results = []
    for chosen in (batch, with_other_padding(batch, 12)):
        torch.manual_seed(seed)
        loss = made.model(chosen, smoothing=0.1)
        results.append({"loss": loss, **gradients(made.model, loss)})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    assert any(g.any() for g in results[0].values())


@pytest.mark.invariant("padding is never read")
@pytest.mark.parametrize("name", ["plain", "fused"])
@pytest.mark.parametrize("training", [True, False])
@seeds
def test_nan_in_the_padding_of_every_stream_stays_there(case: Any, seed: int, training: bool, name: str) -> None:
    made: Case = case(seed, dropout=0.2)
    made.model.train(training)
    batch = made.batch(spare=6)
    encoded = made.encoder_layout(batch)
    sides = (encoded, encoded if isinstance(batch, TextClassBatch) else batch.inputs.layout)
    both = PackedLayout(
        [s + t for s, t in zip(*(rows.lengths for rows in sides), strict=True)], sum(r.size for r in sides)
    )
    real = {rows.size: rows.is_token[:, None] for rows in (*sides, both)}  # some families pack both sides together
    # They are told apart by size; two of one size have equally many tokens before the same padding.
    poisoned = 0

    def poison(module: nn.Module, kind: str, value: Any) -> Tensor | None:
        nonlocal poisoned
        if kind != "stream":
            return None
        poisoned += 1
        return value.where(real[len(value)], math.nan)

    with use_backend(name):
        torch.manual_seed(seed)
        clean = made.model.logits(batch), made.model(batch)
        torch.manual_seed(seed)
        with taps.listen(poison):
            dirty = made.model.logits(batch), made.model(batch)
    decodes = getattr(made.model, "has_decoder", True)  # with CTC alone, what belongs to a decoder is not called
    parts = [name for name, _ in made.model.named_children() if decodes or name not in ("target_embedding", "decoder")]
    assert poisoned >= 2 * len(parts) > 2  # every stream had NaN in its padding
    for before, after in zip(made.split(batch, clean[0]), made.split(batch, dirty[0]), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(clean[1], dirty[1]) and dirty[1].isfinite()


@pytest.mark.invariant("recorder on = off")
@pytest.mark.parametrize("training", [True, False])
@seeds
def test_a_recorder_changes_nothing(case: Any, seed: int, training: bool) -> None:
    results = []
    for record in (False, True):
        made: Case = case(seed, dropout=0.3)
        made.model.train(training)
        batch = made.batch(spare=2)
        torch.manual_seed(seed)
        if record:
            with Recorder(made.model) as seen:
                logits, loss = made.model.logits(batch), made.model(batch, 0.1)
                for attended in seen.attention.values():  # read during the forward pass
                    attended.sentence(0)
                found = gradients(made.model, loss)
            without = getattr(made.model.settings, "attention", "") == "none"  # a recurrent model without attention
            assert seen.values and bool(seen.attention) is not without
        else:
            logits, loss = made.model.logits(batch), made.model(batch, 0.1)
            found = gradients(made.model, loss)
        state = {"logits": logits, "loss": loss, "random numbers": torch.random.get_rng_state()}
        results.append({**state, **found, **dict(made.model.named_buffers(prefix="buffers"))})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@pytest.mark.invariant("recorder on = off")
@seeds
def test_recorded_weights_are_those_of_the_backend(case: Any, family: str, seed: int) -> None:
    made: Case = case(seed)
    batch = made.batch(spare=2)
    with torch.no_grad(), Recorder(made.model) as seen:
        made.model.logits(batch)
    for name, attended in seen.attention.items():
        offered = attended.offered
        heads = offered.layout.from_kernel(offered() @ offered.value)
        torch.testing.assert_close(heads, seen.values[f"{name}.heads"], atol=1e-5, rtol=1e-5)
        queries, keys = offered.layout.lengths()
        for n, (q, k) in enumerate(zip(queries, keys, strict=True)):
            weights = attended.sentence(n)
            assert weights.shape[1:] == (q, k)
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
            if name.endswith("self_attn") and ("decoder" in name or family == "gpt"):
                assert not weights.triu(1).any()


@pytest.mark.invariant("recorder on = off")
@pytest.mark.generates
@seeds
def test_a_search_with_a_recorder_finds_the_same(case: Any, seed: int) -> None:
    made: Case = case(seed)
    off = search(made.model, SearchRequest(made.source(), DecodingSettings(beam=3), nbest=3))
    with Recorder(made.model):
        on = search(made.model, SearchRequest(made.source(), DecodingSettings(beam=3), nbest=3))
    assert off == on


@pytest.mark.invariant("checkpointed = plain")
@seeds
def test_activation_checkpointing_gives_the_same_gradients(case: Any, seed: int) -> None:
    results, runs = [], [0, 0]
    for recompute in (False, True):
        made: Case = case(seed, dropout=0.3)
        made.model.train()
        if recompute:
            checkpoint_activations(made.model)
        layers = [layer for name in ("encoder", "decoder") for layer in getattr(made.model, name, [])]

        def count(*_: Any, again: int = recompute) -> None:
            runs[again] += 1

        for layer in layers:
            layer.register_forward_pre_hook(count)
        torch.manual_seed(seed)
        loss = made.model(made.batch(spare=2), 0.1)
        found = gradients(made.model, loss)
        random = {"random numbers": torch.random.get_rng_state()}
        results.append({"loss": loss, **found, **dict(made.model.named_buffers(prefix="buffers")), **random})
    assert runs == [len(layers), 2 * len(layers)]  # every layer was run twice
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
