"""R-Drop: two passes with different dropout masks, whose distributions are pulled together, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.models import SequenceModel, build
from regard.models.bert import TextClassBatch
from regard.nn.losses import cross_entropy
from regard.nn.r_drop import r_drop_loss
from regard.packed import SeqBatch
from regard.recipes.schema import TrainingSettings, families
from regard.training import step

WORDS = 20
KINDS: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer", "size": "tiny"},
    "recurrent": {"family": "recurrent", "size": "tiny"},
    "gpt": {"family": "gpt", "size": "nano"},
    "bert": {"family": "bert", "size": "tiny", "task": "classify"},
    "bert, masked-lm": {"family": "bert", "size": "tiny"},
}


def make_case(name: str) -> tuple[SequenceModel, Any]:
    torch.manual_seed(0)
    settings = families()[KINDS[name]["family"]].model_validate({**KINDS[name], "dropout": 0.3})
    model = build(settings, WORDS, WORDS, name != "bert").train()  # type: ignore[arg-type]
    sources, targets = [[5, 6, 7, 2], [8, 9, 2]], [[7, 2], [6, 2]]
    if name == "bert":
        return model, TextClassBatch.from_lists(sources, [7, 6])
    if name != "bert, masked-lm":
        return model, SeqBatch.from_lists(sources, targets, bos=1)
    tokens = SeqBatch.from_lists(sources, sources, bos=1).source
    return model, SeqBatch(tokens, tokens, (tokens.ids + 1) % WORDS, tokens.ids % 2 == 0)


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_equal_those_of_two_passes(name: str) -> None:
    """The definition is evaluated on two separate passes."""
    model, batch = make_case(name)
    loss_mask = batch.target_mask
    results = []
    for ours in (True, False):
        torch.manual_seed(3)
        if ours:
            loss = model(batch, 0.1, 5.0)
        else:
            one, other = model.logits(batch), model.logits(batch)
            assert not torch.allclose(one, other)
            loss = r_drop_loss(one, other, batch.labels, loss_mask, 0.1, 5.0)
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)])
    torch.testing.assert_close(*([x for x in each if x is not None] for each in results))
    torch.manual_seed(3)
    mean_loss = sum(cross_entropy(model.logits(batch), batch.labels, loss_mask, 0.1) for _ in range(2)) / 2
    assert results[0][0] > mean_loss + 1e-3  # disagreement is penalised


@pytest.mark.parametrize("num_passes", [1, 2])
def test_an_update_makes_as_many_passes_as_the_recipe_requests(num_passes: int) -> None:
    """Two batches in one update; the summed loss equals the definition."""
    model, batch = make_case("transformer")
    settings = TrainingSettings(
        precision="fp32", accumulate=2, label_smoothing=0.1, r_drop=5.0 if num_passes == 2 else 0.0
    )
    passes, hidden = 0, model.features

    def count_pass(batch: SeqBatch) -> Tensor:
        nonlocal passes
        passes += 1
        return hidden(batch)

    model.features = count_pass  # type: ignore[method-assign]
    update = step.TrainingStep(
        model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True), None, settings, torch.device("cpu")
    )
    update({0: batch, 1: batch}, 3, 0.0)
    assert passes == 2 * num_passes
    expected = 0.0
    for index in range(2):
        torch.manual_seed(step.dropout_seed(settings.seed, 3, index))
        expected += model(batch, 0.1, settings.r_drop).item()
    assert update.loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_without_dropout_both_passes_are_equal(name: str) -> None:
    model, batch = make_case(name)
    model.eval()
    torch.testing.assert_close(model(batch, 0.1, 5.0), model(batch, 0.1))
