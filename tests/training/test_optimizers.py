"""Muon: its directions against singular values, its steps against PyTorch's, and a run that is taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import equal, go, small, tensors
from torch import Tensor, nn

from regard.models import SequenceModel, build
from regard.run_dir import RunDir
from regard.training.optimizers import MOMENTUM, QUINTIC, Muon, linear_weights, make_optimizer, orthogonalise


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model: nn.Module, folder: Path, **training: Any) -> torch.optim.Optimizer:
    run = RunDir.create(folder / "run", small(folder, optimizer="muon", **training))
    return make_optimizer(model, run)  # type: ignore[arg-type]


def alone(*weights: Tensor, decay: float = 0.0, parts: int = 1) -> tuple[Muon, list[nn.Parameter]]:
    """Muon for these matrices, and a vector that Adam moves."""
    own = [nn.Parameter(weight.clone()) for weight in weights]
    rest = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.0, fused=True)
    return Muon(dict.fromkeys(own, parts), rest, decay), own


def move(
    optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], gradients: list[Tensor], rate: float | Tensor
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_a_direction_has_the_singular_vectors_of_its_matrix_and_other_values(shape: tuple[int, int]) -> None:
    """U f(S / |M|) V' with f five times s -> a s + b s^3 + c s^5, whatever the other matrices are."""
    matrices = random(4, *shape).double()
    for matrix, found in zip(matrices, orthogonalise(matrices), strict=True):
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / matrix.norm()
        for _ in range(5):
            s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
        torch.testing.assert_close(found, u @ s.diag() @ v, atol=1e-10, rtol=1e-8)
        assert s.min() > 0.3 and s.max() < 1.3


def test_a_matrix_of_zeros_has_no_direction() -> None:
    assert not orthogonalise(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_are_those_of_pytorchs_muon(decay: float) -> None:
    """That one goes matrix by matrix and computes directions in bf16, so they agree to its three digits."""
    shapes = [(6, 6), (4, 12), (6, 6), (12, 4)]
    start = [random(*shape, seed=n) for n, shape in enumerate(shapes)]
    ours, own = alone(*start, decay=decay)
    theirs = [nn.Parameter(weight.clone()) for weight in start]
    library = torch.optim.Muon(theirs, lr=0.0, weight_decay=decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        gradients = [random(*shape, seed=10 * step + n) for n, shape in enumerate(shapes)]
        move(ours, own, gradients, 0.1)
        move(library, theirs, gradients, 0.1)
        for one, other in zip(own, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=0.01, rtol=0.01)
    assert all((one - first).abs().max() > 0.1 for one, first in zip(own, start, strict=True))


def test_matrices_one_above_the_other_are_moved_as_if_they_were_apart() -> None:
    three = [random(4, 4, seed=n) for n in range(3)]
    stacked, (whole,) = alone(torch.cat(three), parts=3)
    apart, own = alone(*three)
    for step in range(3):
        gradients = [random(4, 4, seed=5 * step + n) for n in range(3)]
        move(stacked, [whole], [torch.cat(gradients)], 0.1)
        move(apart, own, gradients, 0.1)
    torch.testing.assert_close(whole, torch.cat(own), atol=1e-6, rtol=1e-6)


def test_an_entry_moves_by_about_a_fifth_of_the_rate() -> None:
    """Root mean square, whatever the shape: orthogonal rows of the shorter side, scaled by 0.2 sqrt(longer side)."""
    for shape in [(32, 32), (16, 64), (96, 24)]:
        muon, (weight,) = alone(torch.zeros(shape))
        move(muon, [weight], [random(*shape)], 1.0)
        assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_the_rate_may_be_a_tensor_as_it_is_in_a_captured_step() -> None:
    plain, (one,) = alone(random(4, 6), decay=0.3)
    captured, (other,) = alone(random(4, 6), decay=0.3)
    for seed in (1, 2):
        move(plain, [one], [random(4, 6, seed=seed)], 0.1)
        move(captured, [other], [random(4, 6, seed=seed)], torch.tensor(0.1))
    torch.testing.assert_close(one, other)


def test_nothing_moves_and_nothing_is_remembered_where_the_loss_was_not_finite() -> None:
    muon, (weight,) = alone(random(4, 4), decay=0.5)
    move(muon, [weight], [random(4, 4, seed=1)], 0.1)
    before, momentum = weight.clone(), muon.state[weight]["momentum"].clone()
    muon.found_inf = torch.ones(())  # type: ignore[attr-defined]
    move(muon, [weight], [torch.full((4, 4), torch.nan)], 0.1)
    assert torch.equal(weight, before) and torch.equal(muon.state[weight]["momentum"], momentum)
    muon.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    move(muon, [weight], [random(4, 4, seed=2)], 0.1)
    assert weight.isfinite().all() and not torch.equal(weight, before)


def small_model(folder: Path, **model: Any) -> SequenceModel:
    return build(small(folder, model=model).model, 9, 9, True)


def test_linear_weights_are_muons_and_everything_else_is_adams(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    optimizer = optimizer_of(model, tmp_path, weight_decay=0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    moved = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(name for group in moved for name in group) == sorted(names.values())
    hidden = [name for name in names.values() if name.startswith(("encoder.", "decoder.")) and name.endswith("weight")]
    assert sorted(moved[0]) == sorted(name for name in hidden if ".norm." not in name)
    assert moved[1] == ["source_embedding.table"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    parts = {names[weight]: count for weight, count in linear_weights(model).items() if count > 1}
    assert set(parts.values()) == {2, 3}
    assert all(("qkv_proj" in name) == (count == 3) for name, count in parts.items())


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_a_run_with_muon_that_was_stopped_ends_as_one_that_was_not(family: str, tmp_path: Path) -> None:
    model = {"family": family, "size": "tiny"}
    if family == "recurrent":
        model |= {name: 8 for name in ("width", "encoder_width", "embedding")}
    changes: dict[str, Any] = {"optimizer": "muon", "weight_decay": 0.1, "data": {"corpus": "copy", "count": 40}}
    for folder in ("whole", "sinusoidal-split"):
        (tmp_path / folder).mkdir()

    def recipe(folder: str, steps: int) -> Any:
        made = small(tmp_path / folder, **changes, steps=steps)
        sizes = model if family == "recurrent" else {**made.model.model_dump(), **model, "width": 8, "ffn_width": 16}
        return type(made).model_validate({**made.model_dump(), "model": sizes})

    whole = go(recipe("whole", 8), tmp_path / "whole" / "run")
    go(recipe("sinusoidal-split", 5), tmp_path / "sinusoidal-split" / "run")
    halves = go(recipe("sinusoidal-split", 8), tmp_path / "sinusoidal-split" / "run")
    saved, other = tensors(whole.resume), tensors(halves.resume)
    assert any(name.endswith(".momentum") for name in saved) and any(name.endswith(".exp_avg") for name in saved)
    assert equal(saved, other)
