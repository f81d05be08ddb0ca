"""A training step on tensors without data: what it stores and computes."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

import pytest
import torch
from tests.planning.small_recipes import PAIRS, small

from regard import kernels, torch_private
from regard.errors import UserError
from regard.models import build
from regard.planning.trace import BLOCK, Example, Ledger, StepTrace, mean_keys, trace
from regard.recipes import load
from regard.registry import OPTIMIZERS
from regard.training.step import TrainingStep


@pytest.fixture(scope="module")
def traced() -> StepTrace:
    pytest.importorskip("triton")
    return trace(small("wmt14-en-de-base", *PAIRS))


def test_the_ledger_counts_live_storages_in_blocks() -> None:
    ledger = Ledger()
    with torch_private.fake_tensors(), torch_private.watch_operators(ledger.watch):
        a = torch.zeros(100, 100)  # 40,000 bytes: 79 blocks
        b = a @ a
        view = b[1:].T
        assert ledger.total == 2 * 79 * BLOCK
        del a, b
        assert ledger.total == 79 * BLOCK  # the view keeps its storage
        del view
    assert (ledger.total, ledger.peak) == (0, 2 * 79 * BLOCK)
    fill, matmul = ledger.recorded
    assert (fill.flops, fill.bytes) == (0, 40_000)
    assert (matmul.flops, matmul.bytes) == (2 * 100**3, 3 * 40_000)


def test_a_pytorch_that_cannot_trace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "can_trace", lambda: False)
    with pytest.raises(UserError, match=f"which PyTorch {re.escape(torch.__version__)} does not offer"):
        trace(small("stories"))


def test_an_operator_in_place_reads_and_writes() -> None:
    ledger = Ledger()
    a, b = torch.ones(1000), torch.ones(1000)
    with torch_private.watch_operators(ledger.watch):
        a.add_(b)
    (kernel,) = ledger.recorded
    assert kernel.bytes == 3 * 4000


def test_a_step_without_data_takes_the_memory_and_the_operators_of_a_real_one() -> None:
    recipe = small("stories")
    planned = trace(recipe, gpu=False)
    example, settings = Example.of(recipe, gpu=False), recipe.training
    ledger = Ledger(mean_keys(example.batch))
    with torch_private.watch_operators(ledger.watch):
        model = example.model(recipe)
        step = TrainingStep(model, OPTIMIZERS[settings.optimizer](model, settings), None, settings, torch.device("cpu"))
        step({0: example.batch}, 1, 0.0)
        ledger.restart()
        step({0: example.batch}, 2, 0.0)
    assert planned.peak == pytest.approx(ledger.peak, rel=0.01)
    assert sum(k.flops for k in planned.step) == pytest.approx(sum(k.flops for k in ledger.recorded))


def test_weights_and_adam_take_12_bytes_a_parameter(traced: StepTrace) -> None:
    with torch.device("meta"):
        model = build(small("wmt14-en-de-base", *PAIRS).model, 300, 300, True)
    tensors = list(chain(model.parameters(), model.buffers()))
    assert traced.parameters == sum(p.numel() for p in model.parameters())
    assert traced.weights >= sum(4 * t.numel() for t in tensors)
    rounding = 2 * BLOCK * len(tensors)
    assert 8 * traced.parameters <= traced.optimizer <= 8 * traced.parameters + 2 * rounding
    assert 4 * traced.parameters <= traced.gradients <= 4 * traced.parameters + rounding


def test_the_step_is_that_of_a_gpu(traced: StepTrace) -> None:
    assert traced.backend == "captured"  # a small model: too little work to compile
    names = {kernel.name for kernel in traced.step}
    assert {"add_norm", "add_norm_backward", "varlen_attention", "cross_entropy_with_grad"} <= names
    assert "_fused_adam_" in {kernel.name for kernel in traced.update}
    assert traced.copies > 0  # bf16 weights
    assert not kernels.supports(torch.ones(1))  # only while the step is traced


def test_matmuls_are_those_of_the_formula(traced: StepTrace) -> None:
    batch = Example.of(small("wmt14-en-de-base", *PAIRS), gpu=True).batch
    source, target, d, f = len(batch.source.ids), len(batch.labels), 32, 64  # type: ignore[attr-defined]
    encoder, decoder = 8 * d * d + 4 * d * f, 12 * d * d + 4 * d * f  # FLOPs per token; cross-attention also reads
    forward = 2 * (source * (encoder + 4 * d * d) + target * decoder) + 2 * target * d * 300
    assert sum(k.flops for k in traced.step if "attention" not in k.name) == 3 * forward


def test_a_sharded_step_has_fused_blocks_that_add_their_own_last_bias(traced: StepTrace) -> None:
    pytest.importorskip("triton")
    step = trace(small("wmt14-en-de-base", *PAIRS), sharded=True).step
    both = [Counter(kernel.name for kernel in kernels) for kernels in (step, traced.step)]
    assert both[0]["add_norm"] == both[1]["add_norm"] > 0 and not both[0]["native_layer_norm"]


def test_long_trainings_are_planned_as_compiled() -> None:
    pytest.importorskip("triton")
    found = trace(small("wmt14-en-de-base", *PAIRS, "training.steps=10000000000"))
    assert found.backend == "compiled"


@pytest.mark.parametrize("name", ["citations", "key-door", "molecules", "molecules-text", "moods", "hansards-en-fr"])
def test_recipes_of_every_task_are_planned(name: str) -> None:
    found = trace(load(name, ["training.batch_tokens=256"]), gpu=False)
    assert found.targets > 0 and found.activations > 0 and found.step and found.update


def test_a_loss_whose_shapes_depend_on_data_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"this model cannot be planned: a result of aten\S+ depends on data, .* CTC"):
        trace(load("tones", ["training.batch_tokens=256"]), gpu=False)


def test_only_adapters_have_gradients() -> None:
    recipe = small("wmt14-en-de-base", *PAIRS, "training.adapter=lora")
    whole, adapted = trace(small("wmt14-en-de-base", *PAIRS), gpu=False), trace(recipe, gpu=False)
    assert adapted.parameters > whole.parameters and adapted.gradients < 0.3 * whole.gradients
    assert adapted.optimizer < 0.3 * whole.optimizer


def test_memory_grows_by_the_activations_of_a_larger_batch(traced: StepTrace) -> None:
    twice = trace(small("wmt14-en-de-base", *PAIRS, "training.batch_tokens=1024"))
    assert (twice.weights, twice.gradients) == (traced.weights, traced.gradients)
    assert twice.activations == pytest.approx(2 * traced.activations, rel=0.15)


def test_accumulated_gradients_are_alive_beside_activations(traced: StepTrace) -> None:
    more = trace(small("wmt14-en-de-base", *PAIRS, "training.accumulate=4"))
    assert more.micro_batches == 2
    assert more.copies == traced.copies
    assert more.peak - more.persistent > traced.peak - traced.persistent + 0.8 * traced.gradients


@pytest.mark.parametrize("name", ["stories-bert", "moods", "shapes", "ladder-additive"])
def test_every_kind_of_task_can_be_traced(name: str) -> None:
    pytest.importorskip("triton")
    recipe = load(name, ["training.batch_tokens=64"])
    found = trace(recipe, length=6)
    assert found.peak > found.weights and found.targets > 0 and found.model_flops > 0
