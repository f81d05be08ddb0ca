"""Plans: memory of ranks, collectives, scaling, and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.planning.small_recipes import PAIRS, small
from torch import nn
from torch.distributed.fsdp import fully_shard

from regard import devices, distributed
from regard.errors import UserError
from regard.models import build
from regard.planning import HARDWARE, Plan, make_plan, speed
from regard.planning.hardware import COLLECTIVES, EFFICIENCY
from regard.planning.plan import fits, rank_memory, sharded
from regard.planning.speed import Cluster, Compute
from regard.planning.trace import Kernel, StepTrace, trace
from regard.recipes import load
from regard.training import setup

H100 = HARDWARE["h100"]


def made_up(**changes: Any) -> StepTrace:
    """A step of a model with two blocks of 6 x 10 and an embedding of 5 x 10."""
    shapes = [(torch.Size(shape), unit) for shape, unit in [((6, 10), "a.0"), ((6, 10), "a.1"), ((5, 10), "")]]
    return StepTrace(
        **{
            "shapes": shapes,
            "parameters": 170,
            "weights": 680,
            "optimizer": 1360,
            "copies": 340,
            "gradients": 680,
            "activations": 10_000,
            "logits": 1_000,
            "peak": 0,
            "backend": "captured",
            "targets": 100,
            "model_flops": 1.0,
            "micro_batches": 1,
            "step": [],
            "update": [],
            **changes,
        }
    )


def test_a_ring_passes_on_all_but_one_part() -> None:
    four = Cluster(H100, 4, 8)
    expected = 3 * COLLECTIVES.link_latency + 0.75 * 8e9 / H100.link
    assert four.ring(8e9) == pytest.approx(expected)
    assert four.all_reduce(8e9) == pytest.approx(2 * expected)


def test_between_nodes_all_devices_of_a_node_share_its_links() -> None:
    assert Cluster(H100, 32, 8).bandwidth == min(H100.link, 8 * H100.network)
    assert Cluster(H100, 2, 1).bandwidth == H100.network
    slow = Cluster(HARDWARE["l4"], 16, 8)
    hops = 2 * 7 * COLLECTIVES.link_latency + 2 * COLLECTIVES.network_latency
    assert slow.all_reduce(1e9) == pytest.approx(hops + 2 * 15 / 16 * 1e9 / HARDWARE["l4"].link)


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory() -> None:
    matmul = Kernel("mm", 1e12, 1e6)
    known = speed.EFFICIENCY
    computing = 1e12 / (known.matmul * H100.matmul_rate) + known.matmul_traffic * 1e6 / H100.bandwidth
    assert speed.kernel_seconds(matmul, H100) == pytest.approx(computing + known.kernel_seconds)
    moving = 1e9 / (known.pointwise * H100.bandwidth)
    assert speed.kernel_seconds(Kernel("add", 0, 1e9), H100) == pytest.approx(moving + known.kernel_seconds)
    fused = speed.kernel_seconds(Kernel("add", 0, 1e9), H100, compiled=True)
    assert fused == pytest.approx(known.compiled * moving + known.kernel_seconds)
    assert speed.kernel_seconds(Kernel("add", 0, 8), H100) == 2 * known.kernel_seconds


def test_communication_hides_behind_the_backward_pass() -> None:
    cluster, parameters = Cluster(H100, 8, 8), 10**9
    reduced = cluster.all_reduce(COLLECTIVES.grad_bytes * parameters)
    long, short = Compute(10 * reduced, 0.0, parameters), Compute(0.3 * reduced, 0.0, parameters)
    last = cluster.all_reduce(COLLECTIVES.bucket)
    assert speed.ddp(long, cluster).waiting == pytest.approx(last + COLLECTIVES.contention * reduced)
    exposed = reduced - 0.2 * reduced
    assert speed.ddp(short, cluster).waiting == pytest.approx(exposed + COLLECTIVES.contention * 0.2 * reduced)


def test_one_rank_does_not_communicate() -> None:
    work = Compute(1.0, 0.1, 10**9, units=13)
    for step in (speed.ddp(work, Cluster(H100, 1, 8), 3), speed.fsdp(work, Cluster(H100, 1, 8), 3)):
        assert (step.sent, step.waiting) == (0, 0)
        assert step.total == pytest.approx(3.1)


def test_fsdp_sends_weights_twice_per_batch_and_gradients_once() -> None:
    step = speed.fsdp(Compute(1.0, 0.1, 10**6, units=4), Cluster(H100, 4, 8), micro_batches=3)
    assert step.sent == pytest.approx(0.75 * 10**6 * (3 * 2 * 2 + 4))
    assert step.update == pytest.approx(0.1 / 4)


def test_memory_of_a_rank_by_hand() -> None:
    traced, device = made_up(), HARDWARE["cpu"]  # no workspace
    plain = rank_memory(traced, "plain", 1, device)
    assert plain.peak == 680 + 1360 + 340 + 11_000
    assert rank_memory(traced, "ddp", 4, device).peak == plain.peak + 680  # buckets stay
    accumulated = made_up(micro_batches=2)  # whose traced peak has them already
    assert rank_memory(accumulated, "ddp", 4, device).peak == rank_memory(accumulated, "plain", 1, device).peak
    # ceil(6 / 4) = 2 rows twice, and ceil(5 / 4) = 2 rows, of 10 fp32 numbers
    assert sharded(traced, 4) == 4 * (20 + 20 + 20)
    fsdp = rank_memory(traced, "fsdp", 4, device)
    assert fsdp.weights == 240 and fsdp.optimizer == 480 and fsdp.gradients == 240
    gathered, reduced = 4 * 50 + 2 * 2 * 60, 4 * 60
    assert fsdp.peak == 240 + 480 + 240 + gathered + reduced + 11_000


@pytest.fixture
def thousand_ranks() -> Iterator[None]:
    """A process group of 1,024 ranks of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    yield
    dist.destroy_process_group()


def local_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards, padded to equal sizes as FSDP allocates them."""
    return sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())  # type: ignore[operator]


def shard(model: nn.Module) -> nn.Module:
    for stack in (model.encoder, model.decoder):
        for block in stack:  # type: ignore[union-attr]
            fully_shard(block)
    return fully_shard(model)


def shapes_of(model: nn.Module) -> StepTrace:
    return made_up(shapes=[(p.shape, "") for p in model.parameters()])


@pytest.mark.usefixtures("thousand_ranks")
def test_shards_of_1024_ranks_are_as_large_as_pytorch_makes_them() -> None:
    with torch.device("cpu"):
        model = build(
            small("wmt14-en-de-base", *PAIRS, "model.width=96", "model.ffn_width=1100").model, 3000, 3000, True
        )
    planned = sharded(shapes_of(model), 1024)
    assert local_bytes(shard(model)) == planned


def _gloo_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = build(small("wmt14-en-de-base", *PAIRS, "model.width=34").model, 301, 301, True)
    planned = sharded(shapes_of(model), 2)
    Path(folder, f"{rank}.json").write_text(json.dumps([planned, local_bytes(shard(model))]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_of_two_gloo_ranks_are_exactly_as_planned(tmp_path: Path) -> None:
    mp.spawn(_gloo_rank, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        planned, held = json.loads((tmp_path / f"{rank}.json").read_text())
        assert held == planned


@pytest.fixture(scope="module")
def plan() -> Plan:
    pytest.importorskip("triton")
    return make_plan(small("wmt14-en-de-base", *PAIRS), replace(H100, memory=80e6, workspace=0), gpus=16, price=2.0)


def test_throughput_is_tokens_over_time(plan: Plan) -> None:
    for point in plan.weak_scaling:
        assert point.tokens_per_second == pytest.approx(point.gpus * plan.targets / point.seconds)
        assert point.hours == pytest.approx(100_000 * plan.targets / point.tokens_per_second / 3600)
        assert point.cost == pytest.approx(2.0 * point.gpus * point.hours)
        assert 0 < point.efficiency <= 1.0001
    assert plan.chosen.gpus == 16 and [p.gpus for p in plan.weak_scaling][-1] == 1024


def test_the_recipe_s_step_is_divided_among_gpus(plan: Plan) -> None:
    assert [(p.gpus, p.batch_tokens) for p in plan.strong_scaling] == [(1, 512), (2, 256)]
    assert plan.strong_scaling_limit <= plan.weak_scaling_limit


def test_more_ranks_leave_less_state_on_each(plan: Plan) -> None:
    plain, ddp, fsdp = plan.memory
    assert [each.scheme for each in plan.memory] == ["plain", "ddp", "fsdp"]
    assert fsdp.weights < plain.weights / 8 and ddp.peak >= plain.peak
    assert all(each.fits and each.largest_batch >= 512 for each in plan.memory)


@pytest.mark.slow
def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    pytest.importorskip("triton")
    recipe = small("wmt14-en-de-base", *PAIRS, "training.batch_tokens=1024")
    device = replace(H100, memory=60e6, workspace=0)
    (most,) = (each.largest_batch for each in make_plan(recipe, device).memory)

    def fits(tokens: int) -> bool:
        changed = recipe.model_copy(update={"training": recipe.training.model_copy(update={"batch_tokens": tokens})})
        return make_plan(changed, device).memory[0].fits

    assert fits(most) and not fits(math.ceil(1.1 * most))


def test_a_model_that_fits_nowhere_says_what_to_change() -> None:
    pytest.importorskip("triton")
    huge = load("wikitext2", ["model.size=gpt2", "model.width=24576", "model.layers=4"])
    with pytest.raises(
        UserError, match=r"does not fit: .* GB .*: try training.checkpoint_activations = true, more GPUs"
    ):
        make_plan(huge, HARDWARE["l4"], gpus=2)


def test_a_model_fits_if_its_planned_peak_is_within_the_usable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share the memory of a CPU."""
    recipe, cpu = small("wmt14-en-de-base", *PAIRS), torch.device("cpu")
    peak = rank_memory(trace(recipe, gpu=False), "ddp", 2, HARDWARE["cpu"]).peak
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for share in (0.99, 1.01):
        monkeypatch.setattr(devices, "memory", lambda device, s=share: 2 * s * peak / EFFICIENCY.usable_memory)
        assert fits(recipe, cpu, 2) == (share > 1)


def test_several_processes_share_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, cpu = small("wmt14-en-de-base", *PAIRS), torch.device("cpu")
    choose = setup._choose_parallel
    assert choose(recipe, cpu, None).training.parallel == "auto"  # one process
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "broadcast", lambda value, patient: value)

    def cannot_plan(*_: object) -> bool:
        raise ZeroDivisionError

    for planned, parallel in ((lambda *_: True, "ddp"), (lambda *_: False, "fsdp"), (cannot_plan, "ddp")):
        assert choose(recipe, cpu, planned).training.parallel == parallel
    given = load("wmt14-en-de-base", ["training.parallel=ddp"])
    assert choose(given, cpu, lambda *_: False).training.parallel == "ddp"
    huge = load("wmt14-en-de-base", ["model.width=8192", "model.heads=64", "model.encoder_layers=100"])
    monkeypatch.setattr(devices, "memory", lambda device: 2**30)
    assert choose(huge, cpu, lambda *_: True).training.parallel == "fsdp"  # the weights alone are too large
