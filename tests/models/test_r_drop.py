"""R-Drop: every family reads a batch twice, dropped out differently, and both readings are asked to agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.models import SequenceModel, build
from regard.nn.losses import cross_entropy, r_drop_loss
from regard.packed import SeqBatch
from regard.recipes.schema import TrainingSettings, families
from regard.training import step

WORDS = 20
KINDS: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer", "size": "tiny"},
    "recurrent": {"family": "recurrent", "size": "tiny"},
    "gpt": {"family": "gpt", "size": "nano"},
    "bert": {"family": "bert", "size": "tiny", "task": "classify"},
    "bert, gaps": {"family": "bert", "size": "tiny"},
}


def made(name: str) -> tuple[SequenceModel, SeqBatch]:
    torch.manual_seed(0)
    settings = families()[KINDS[name]["family"]].model_validate({**KINDS[name], "dropout": 0.3})
    model = build(settings, WORDS, WORDS, name != "bert").train()  # type: ignore[arg-type]
    sources, targets = [[5, 6, 7, 2], [8, 9, 2]], [[7, 2], [6, 2]]
    if name != "bert, gaps":
        return model, SeqBatch.from_lists(sources, targets, bos=1)
    row = SeqBatch.from_lists(sources, sources, bos=1).source
    return model, SeqBatch(row, row, (row.ids + 1) % WORDS, row.ids % 2 == 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_read_twice(name: str) -> None:
    """Loss and gradients are those of the definition for two passes, one after the other."""
    model, batch = made(name)
    counted = torch.ones_like(batch.labels, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
    found = []
    for ours in (True, False):
        torch.manual_seed(3)
        if ours:
            loss = model(batch, 0.1, 5.0)
        else:
            one, other = model.logits(batch), model.logits(batch)
            assert not torch.allclose(one, other)
            loss = r_drop_loss(one, other, batch.labels, counted, 0.1, 5.0)
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)])
    torch.testing.assert_close(*([x for x in each if x is not None] for each in found))
    torch.manual_seed(3)
    apart = sum(cross_entropy(model.logits(batch), batch.labels, counted, 0.1) for _ in range(2)) / 2
    assert found[0][0] > apart + 1e-3  # to disagree costs something


@pytest.mark.parametrize("readings", [1, 2])
def test_an_update_reads_as_often_as_the_recipe_says(readings: int) -> None:
    """Two batches in one update, each read so often; what is summed up is what the definition gives."""
    model, batch = made("transformer")
    settings = TrainingSettings(
        precision="fp32", accumulate=2, label_smoothing=0.1, r_drop=5.0 if readings == 2 else 0.0
    )
    passes, hidden = 0, model.features

    def counted(batch: SeqBatch) -> Tensor:
        nonlocal passes
        passes += 1
        return hidden(batch)

    model.features = counted  # type: ignore[method-assign]
    update = step.TrainingStep(
        model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True), None, settings, torch.device("cpu")
    )
    update({0: batch, 1: batch}, 3, 0.0)
    assert passes == 2 * readings
    expected = 0.0
    for index in range(2):
        torch.manual_seed(step.dropout_seed(settings.seed, 3, index))
        expected += model(batch, 0.1, settings.r_drop).item()
    assert update.loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_without_dropout_both_readings_are_one(name: str) -> None:
    model, batch = made(name)
    model.eval()
    torch.testing.assert_close(model(batch, 0.1, 5.0), model(batch, 0.1))
