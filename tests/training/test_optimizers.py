"""Muon: its directions against singular values, its steps against PyTorch's, and a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import equal, small, tensors, train_run
from torch import Tensor, nn

from regard.models import SequenceModel, build
from regard.run_dir import RunDir
from regard.training.optimizers import MOMENTUM, QUINTIC, Muon, linear_weights, make_optimizer, orthogonalise


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model: nn.Module, folder: Path, **training: Any) -> torch.optim.Optimizer:
    run = RunDir.create(folder / "run", small(folder, optimizer="muon", **training))
    return make_optimizer(model, run)  # type: ignore[arg-type]


def make_muon(*weights: Tensor, decay: float = 0.0, parts: int = 1) -> tuple[Muon, list[nn.Parameter]]:
    """Return Muon for these matrices (with a vector for Adam), and the parameters."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    rest = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.0, fused=True)
    return Muon(dict.fromkeys(params, parts), rest, decay), params


def step_with(
    optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], gradients: list[Tensor], rate: float | Tensor
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_a_direction_keeps_the_singular_vectors_and_maps_the_singular_values(shape: tuple[int, int]) -> None:
    """U f(S / |M|) V' with f = five times s -> a s + b s^3 + c s^5, for each matrix of a batch by itself."""
    matrices = random(4, *shape).double()
    for matrix, actual in zip(matrices, orthogonalise(matrices), strict=True):
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / matrix.norm()
        for _ in range(5):
            s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
        torch.testing.assert_close(actual, u @ s.diag() @ v, atol=1e-10, rtol=1e-8)
        assert s.min() > 0.3 and s.max() < 1.3


def test_the_direction_of_a_zero_matrix_is_zero() -> None:
    assert not orthogonalise(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_are_those_of_pytorchs_muon(decay: float) -> None:
    """PyTorch's computes directions in bf16, so the steps agree to three digits."""
    shapes = [(6, 6), (4, 12), (6, 6), (12, 4)]
    start = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    ours, params = make_muon(*start, decay=decay)
    theirs = [nn.Parameter(weight.clone()) for weight in start]
    library = torch.optim.Muon(theirs, lr=0.0, weight_decay=decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        gradients = [random(*shape, seed=10 * step + n) for n, shape in enumerate(shapes)]
        step_with(ours, params, gradients, 0.1)
        step_with(library, theirs, gradients, 0.1)
        for one, other in zip(params, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=0.01, rtol=0.01)
    assert all((one - first).abs().max() > 0.1 for one, first in zip(params, start, strict=True))


def test_stacked_matrices_are_updated_like_separate_ones() -> None:
    three = [random(4, 4, seed=n) for n in range(3)]
    stacked, (joint,) = make_muon(torch.cat(three), parts=3)
    apart, params = make_muon(*three)
    for step in range(3):
        gradients = [random(4, 4, seed=5 * step + n) for n in range(3)]
        step_with(stacked, [joint], [torch.cat(gradients)], 0.1)
        step_with(apart, params, gradients, 0.1)
    torch.testing.assert_close(joint, torch.cat(params), atol=1e-6, rtol=1e-6)


def test_the_rms_of_an_update_is_about_a_fifth_of_the_learning_rate() -> None:
    """For any shape: orthogonal rows of the shorter side, scaled by 0.2 sqrt(longer side)."""
    for shape in [(32, 32), (16, 64), (96, 24)]:
        muon, (weight,) = make_muon(torch.zeros(shape))
        step_with(muon, [weight], [random(*shape)], 1.0)
        assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_the_learning_rate_may_be_a_tensor_as_in_a_captured_step() -> None:
    plain, (one,) = make_muon(random(4, 6), decay=0.3)
    captured, (other,) = make_muon(random(4, 6), decay=0.3)
    for seed in (1, 2):
        step_with(plain, [one], [random(4, 6, seed=seed)], 0.1)
        step_with(captured, [other], [random(4, 6, seed=seed)], torch.tensor(0.1))
    torch.testing.assert_close(one, other)


def test_weights_and_momentum_stay_unchanged_when_the_loss_is_not_finite() -> None:
    muon, (weight,) = make_muon(random(4, 4), decay=0.5)
    step_with(muon, [weight], [random(4, 4, seed=1)], 0.1)
    before, momentum = weight.clone(), muon.state[weight]["momentum"].clone()
    muon.found_inf = torch.ones(())  # type: ignore[attr-defined]
    step_with(muon, [weight], [torch.full((4, 4), torch.nan)], 0.1)
    assert torch.equal(weight, before) and torch.equal(muon.state[weight]["momentum"], momentum)
    muon.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    step_with(muon, [weight], [random(4, 4, seed=2)], 0.1)
    assert weight.isfinite().all() and not torch.equal(weight, before)


def small_model(folder: Path, **model: Any) -> SequenceModel:
    return build(small(folder, model=model).model, 9, 9, True)


def test_muon_updates_linear_weights_and_adam_everything_else(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    optimizer = optimizer_of(model, tmp_path, weight_decay=0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(name for group in groups for name in group) == sorted(names.values())
    hidden = [name for name in names.values() if name.startswith(("encoder.", "decoder.")) and name.endswith("weight")]
    assert sorted(groups[0]) == sorted(name for name in hidden if ".norm." not in name)
    assert groups[1] == ["source_embedding.table"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    parts = {names[weight]: count for weight, count in linear_weights(model).items() if count > 1}
    assert set(parts.values()) == {2, 3}
    assert all(("qkv_proj" in name) == (count == 3) for name, count in parts.items())


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_a_resumed_run_with_muon_equals_an_uninterrupted_one(family: str, tmp_path: Path) -> None:
    model = {"family": family, "size": "tiny"}
    if family == "recurrent":
        model |= {name: 8 for name in ("width", "encoder_width", "embedding")}
    changes: dict[str, Any] = {"optimizer": "muon", "weight_decay": 0.1, "data": {"corpus": "copy", "count": 40}}
    for folder in ("whole", "resumed"):
        (tmp_path / folder).mkdir()

    def recipe(folder: str, steps: int) -> Any:
        made = small(tmp_path / folder, **changes, steps=steps)
        sizes = model if family == "recurrent" else {**made.model.model_dump(), **model, "width": 8, "ffn_width": 16}
        return type(made).model_validate({**made.model_dump(), "model": sizes})

    uninterrupted = train_run(recipe("whole", 8), tmp_path / "whole" / "run")
    train_run(recipe("resumed", 5), tmp_path / "resumed" / "run")
    resumed = train_run(recipe("resumed", 8), tmp_path / "resumed" / "run")
    saved, other = tensors(uninterrupted.resume), tensors(resumed.resume)
    assert any(name.endswith(".momentum") for name in saved) and any(name.endswith(".exp_avg") for name in saved)
    assert equal(saved, other)
