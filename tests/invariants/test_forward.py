"""Invariants of the forward and backward pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FIRST_WORD, SEEDS, Case, gradients, logits_of
from torch import Tensor, nn

from regard import taps
from regard.accelerate import checkpoint_activations
from regard.attention import use_backend
from regard.decoding import SearchRequest, search
from regard.interpret.recorder import Recorder
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.recipes.schema import DecodingSettings

seeds = pytest.mark.parametrize("seed", SEEDS)


@pytest.mark.invariant("fused = plain")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=["fp32", "fp64"])
@seeds
def test_the_fused_kernel_computes_what_the_plain_one_defines(
    case: Any, seed: int, dtype: torch.dtype, tolerance: float
) -> None:
    made: Case = case(seed)
    made.model.to(dtype)
    batch = made.batch(spare=3)
    results = []
    for name in ("plain", "fused"):
        with use_backend(name):
            logits = made.model.logits(batch)
        real = batch.inputs.layout.tokens
        loss = F.cross_entropy(logits[:real], batch.labels[:real])
        results.append({"logits": logits, **gradients(made.model, loss)})
    for name, slow in results[0].items():
        torch.testing.assert_close(results[1][name], slow, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.invariant("flat = padded = one by one")
@seeds
def test_sentences_do_not_notice_how_they_are_laid(case: Any, seed: int) -> None:
    made: Case = case(seed)
    together = logits_of(made, made.batch())
    with_fill = logits_of(made, made.batch(spare=7))
    alone = [logits_of(made, made.batch(only=[n]))[0] for n in range(len(together))]
    for flat, filled, single in zip(together, with_fill, alone, strict=True):
        torch.testing.assert_close(flat, filled, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(flat, single, atol=1e-5, rtol=1e-5)
    assert len({len(part) for part in together}) > 1  # of several lengths, so that the padded view has padding
    with torch.no_grad():
        loss = made.model(made.batch(), 0.1).item()
        singly = [made.model(made.batch(only=[n]), 0.1).item() for n in range(len(together))]
        assert made.model(made.batch(spare=7), 0.1).item() == pytest.approx(loss, rel=1e-5)
    assert sum(singly) == pytest.approx(loss, rel=1e-5)


def with_other_fill(batch: SeqBatch, vocabulary: int) -> SeqBatch:
    """The same batch with random tokens where the fill is, in source, input and labels."""

    def refill(ids: Tensor, real: Tensor) -> Tensor:
        return torch.where(real, ids, torch.randint(FIRST_WORD, vocabulary, ids.shape))

    source, inputs = batch.source, batch.inputs
    return replace(
        batch,
        source=PackedTokens(refill(source.ids, source.layout.is_token), source.layout),
        inputs=PackedTokens(refill(inputs.ids, inputs.layout.is_token), inputs.layout),
        labels=refill(batch.labels, inputs.layout.is_token),
    )


@pytest.mark.invariant("fill is never read")
@pytest.mark.parametrize("training", [True, False])
@seeds
def test_other_tokens_in_the_fill_change_nothing(case: Any, seed: int, training: bool) -> None:
    made: Case = case(seed, dropout=0.2)
    made.model.train(training)
    batch = made.batch(spare=6)
    results = []
    for chosen in (batch, with_other_fill(batch, 12)):
        torch.manual_seed(seed)
        loss = made.model(chosen, smoothing=0.1)
        results.append({"loss": loss, **gradients(made.model, loss)})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    assert any(g.any() for g in results[0].values())


@pytest.mark.invariant("fill is never read")
@pytest.mark.parametrize("name", ["plain", "fused"])
@pytest.mark.parametrize("training", [True, False])
@seeds
def test_poison_in_the_fill_of_every_stream_stays_there(case: Any, seed: int, training: bool, name: str) -> None:
    made: Case = case(seed, dropout=0.2)
    made.model.train(training)
    batch = made.batch(spare=6)
    sides = (batch.source.layout, batch.inputs.layout)
    both = PackedLayout(
        [s + t for s, t in zip(*(rows.lengths for rows in sides), strict=True)], sum(r.size for r in sides)
    )
    real = {rows.size: rows.is_token[:, None] for rows in (*sides, both)}  # some families lay both sides in one row
    assert len(real) == 2 if made.fills else 3  # they can be told apart by their size
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
    assert poisoned >= 2 * len(list(made.model.children()))  # it was there to be read
    tokens = batch.inputs.layout.tokens
    assert torch.equal(clean[0][:tokens], dirty[0][:tokens])
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
                for attended in seen.attention.values():  # asked for in the midst of the run
                    attended.sentence(0)
                found = gradients(made.model, loss)
            without = getattr(made.model.settings, "attention", "") == "none"  # a recurrent model that looks at nothing
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
def test_recorded_weights_are_those_of_the_kernel(case: Any, family: str, seed: int) -> None:
    made: Case = case(seed)
    batch = made.batch(spare=2)
    with torch.no_grad(), Recorder(made.model) as seen:
        made.model.logits(batch)
    for name, attended in seen.attention.items():
        offered = attended.offered
        heads = offered.layout.close(offered() @ offered.value)
        torch.testing.assert_close(heads, seen.values[f"{name}.heads"], atol=1e-5, rtol=1e-5)
        queries, keys = offered.layout.lengths()
        for n, (q, k) in enumerate(zip(queries, keys, strict=True)):
            weights = attended.sentence(n)
            assert weights.shape[1:] == (q, k)
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
            if name.endswith("self_attn") and ("decoder" in name or family == "gpt"):
                assert not weights.triu(1).any()


@pytest.mark.invariant("recorder on = off")
@pytest.mark.writes
@seeds
def test_a_recorded_search_finds_the_same(case: Any, seed: int) -> None:
    made: Case = case(seed)
    off = search(made.model, SearchRequest(made.source(), DecodingSettings(beam=3), nbest=3))
    with Recorder(made.model):
        on = search(made.model, SearchRequest(made.source(), DecodingSettings(beam=3), nbest=3))
    assert off == on


@pytest.mark.invariant("checkpointed = plain")
@seeds
def test_recomputing_activations_gives_the_same_gradients(case: Any, seed: int) -> None:
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
    assert runs == [len(layers), 2 * len(layers)]  # every layer was run a second time
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
