"""One update: its loss, its gradient, Adam, decay, clipping and the running average, each against its formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import CPU, current_weights, small, tensors, train_run
from torch import Tensor, nn

from regard.accelerate import checkpoint_activations
from regard.data.stream import START, BatchShare
from regard.models import SequenceModel, build
from regard.packed import SeqBatch
from regard.precision import autocast
from regard.run_dir import RunDir
from regard.text import BOS, EOS
from regard.training import checkpoint
from regard.training.loop import Trainer

VOCABULARY = 7


class Table(SequenceModel):
    """A model whose logits are a table plus a bias, so that every gradient has a simple formula."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits.clone())
        self.bias = nn.Parameter(torch.zeros(logits.shape[1]))

    def logits(self, batch: SeqBatch) -> Tensor:
        return self.table + self.bias


def two_pairs(size: int | None = None) -> SeqBatch:
    """Labels 4 5 EOS and 6 EOS, five tokens, then padding up to `size`."""
    return SeqBatch.from_lists([[4, EOS], [5, EOS]], [[4, 5, EOS], [6, EOS]], bos=BOS, target_size=size)


LABELS = [4, 5, EOS, 6, EOS]


def random_logits(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_equals_pytorch_s_and_the_formula(smoothing: float) -> None:
    """- sum over tokens of (1 - e) log p(label) + e / V sum over the vocabulary of log p"""
    logits = random_logits(5)
    loss = Table(logits)(two_pairs(), smoothing)
    library = F.cross_entropy(logits, torch.tensor(LABELS), label_smoothing=smoothing, reduction="none").sum()
    assert torch.equal(loss, library)
    by_hand = 0.0
    for row, label in zip(logits.tolist(), LABELS, strict=True):
        total = math.log(sum(math.exp(x) for x in row))
        logp = [x - total for x in row]
        by_hand -= (1 - smoothing) * logp[label] + smoothing * sum(logp) / VOCABULARY
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("garbage", [1e4, math.inf, math.nan])
def test_padding_never_counts(garbage: float) -> None:
    """The logits of padding affect neither the loss nor its gradient."""
    logits = torch.cat([random_logits(5), torch.full((3, VOCABULARY), garbage)])
    model, batch = Table(logits), two_pairs(size=8)
    assert batch.num_targets == 5
    loss = model(batch, 0.1)
    assert torch.equal(loss, Table(random_logits(5))(two_pairs(), 0.1))
    loss.backward()
    assert model.table.grad is not None
    assert model.table.grad[:5].abs().min() > 0
    if not math.isnan(garbage) and not math.isinf(
        garbage
    ):  # the Transformer zeroes padding before the output projection
        assert model.table.grad[5:].abs().max() == 0


def test_the_loss_is_in_float32_where_the_model_computes_in_bf16() -> None:
    half = random_logits(5).bfloat16()

    class Half(Table):
        def logits(self, batch: SeqBatch) -> Tensor:
            return half

    loss = Half(half)(two_pairs(), 0.1)
    exact = F.cross_entropy(half.double(), torch.tensor(LABELS), label_smoothing=0.1, reduction="sum").item()
    coarse = F.cross_entropy(half, torch.tensor(LABELS), label_smoothing=0.1, reduction="sum").item()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=1e-6)
    assert coarse != pytest.approx(exact, rel=1e-5)  # otherwise the test would show nothing


def test_the_loss_of_a_transformer_under_autocast_is_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(small(tmp_path).model, VOCABULARY, VOCABULARY, True).eval()
    with autocast("bf16", CPU):
        logits, loss = model.logits(two_pairs()), model(two_pairs(), 0.1)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    expected = F.cross_entropy(logits.double(), torch.tensor(LABELS), label_smoothing=0.1, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


# -- the optimiser -----------------------------------------------------------------------------------------------------


def make_trainer(folder: Path, model: SequenceModel, **training: Any) -> Trainer:
    """Return a trainer that can only make updates."""
    run = RunDir.create(folder / "run", small(folder, **{"max_grad_norm": 0.0, "label_smoothing": 0.0, **training}))
    return Trainer(run, model, None, None, None, CPU)  # type: ignore[arg-type]


def steps(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        trainer.progress.step += 1
        trainer._take_step(BatchShare({0: two_pairs()}, START))


def gradients(logits: Tensor, bias: Tensor) -> list[Tensor]:
    """The gradients of the mean cross-entropy: (softmax - one-hot) / tokens, and its sum over tokens."""
    table = ((logits + bias).softmax(-1) - F.one_hot(torch.tensor(LABELS), VOCABULARY)) / len(LABELS)
    return [table, table.sum(0)]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_three_steps_are_those_of_adam_written_out(optimizer: str, tmp_path: Path) -> None:
    """Kingma & Ba 2015, algorithm 1, with an L2 penalty; Loshchilov & Hutter 2019: decay apart from the gradient.

    Both decay the matrix only.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g²,  w -= rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """
    start = random_logits(5)
    trainer = make_trainer(tmp_path, Table(start), optimizer=optimizer, weight_decay=0.3, betas=(0.8, 0.95), warmup=2)
    values = [start.double(), torch.zeros(VOCABULARY, dtype=torch.float64)]
    first, second = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for step in (1, 2, 3):
        steps(trainer, 1)
        learning_rate = 8**-0.5 * min(step**-0.5, step * 2**-1.5)  # small() is 8 wide
        for i, gradient in enumerate(gradients(*values)):
            if optimizer == "adam" and i == 0:
                gradient = gradient + 0.3 * values[i]
            first[i] = 0.8 * first[i] + 0.2 * gradient
            second[i] = 0.95 * second[i] + 0.05 * gradient**2
            if optimizer == "adamw" and i == 0:
                values[i] = values[i] - learning_rate * 0.3 * values[i]
            scale = (second[i] / (1 - 0.95**step)).sqrt() + 1e-9
            values[i] = values[i] - learning_rate * first[i] / (1 - 0.8**step) / scale
        torch.testing.assert_close(trainer.model.table.double(), values[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(trainer.model.bias.double(), values[1], atol=1e-6, rtol=1e-5)
    assert (values[0] - start).abs().max() > 0.1


def test_decay_is_for_the_matrices_of_a_transformer_only(tmp_path: Path) -> None:
    model = build(small(tmp_path).model, VOCABULARY, VOCABULARY, True)
    trainer = make_trainer(tmp_path, model, optimizer="adamw", weight_decay=0.3)
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    expected = {id(p): 0.3 if p.dim() > 1 else 0.0 for p in model.parameters()}
    assert decay == expected and set(decay.values()) == {0.0, 0.3}


@pytest.mark.parametrize("clip", [0.0, 0.01, 100.0])
def test_a_gradient_is_clipped_to_the_maximum_norm(clip: float, tmp_path: Path) -> None:
    start = random_logits(5)
    trainer = make_trainer(tmp_path, Table(start), max_grad_norm=clip)
    given: list[Tensor] = []
    trainer.optimizer.step = lambda: given.extend(p.grad.clone() for p in trainer.model.parameters())  # type: ignore
    steps(trainer, 1)
    plain = gradients(start, torch.zeros(VOCABULARY))
    length = math.sqrt(sum(g.square().sum().item() for g in plain))
    assert 0.02 < length < 50
    assert trainer.training_step.norm.item() == pytest.approx(length, rel=1e-5)  # the norm before clipping is logged
    share = clip / length if 0 < clip < length else 1.0
    for found, gradient in zip(given, plain, strict=True):
        torch.testing.assert_close(found, gradient * share, atol=1e-8, rtol=1e-4)


# -- averages ----------------------------------------------------------------------------------------------------------


def test_the_running_average_moves_by_a_share_towards_each_new_value() -> None:
    model = Table(torch.zeros(1, VOCABULARY))
    average = checkpoint.EMA(model, 0.75)
    for value in (1.0, 3.0, -2.0):
        with torch.no_grad():
            model.table.fill_(value)
        average.update(model)
    # 0 -> 0.25·1 = 0.25 -> 0.75·0.25 + 0.25·3 = 0.9375 -> 0.75·0.9375 - 0.25·2 = 0.203125
    assert average.tensors["table"].tolist() == [[0.203125] * VOCABULARY]


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_the_average_includes_every_step_and_is_what_is_validated(
    norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers, such as the running statistics of batch norm, are averaged with the weights."""
    seen: list[dict[str, Tensor]] = []
    begin, update = Trainer.train, Trainer._take_step
    monkeypatch.setattr(Trainer, "train", lambda self: (seen.append(current_weights(self)), begin(self))[1])
    monkeypatch.setattr(
        Trainer, "_take_step", lambda self, batches: (update(self, batches), seen.append(current_weights(self)))[0]
    )
    run = train_run(small(tmp_path, ema=0.6, steps=5, validate_every=5, model={"norm": norm}), tmp_path / "run")
    assert len(seen) == 6 and any("running_mean" in name for name in seen[0]) == (norm == "batch")
    average = {name: tensor.double() for name, tensor in seen[0].items()}
    for values in seen[1:]:
        average = {name: 0.6 * average[name] + 0.4 * tensor.double() for name, tensor in values.items()}
    saved = tensors(run.best)
    assert saved.keys() == average.keys()
    for name, tensor in average.items():
        torch.testing.assert_close(saved[name].double(), tensor, atol=1e-6, rtol=1e-5)
    assert max((saved[name] - seen[-1][name]).abs().max().item() for name in saved) > 1e-3


# -- memory ------------------------------------------------------------------------------------------------------------


def test_recomputed_blocks_save_at_most_an_eighth_of_the_bytes_for_the_backward_pass(tmp_path: Path) -> None:
    """A block of width D keeps about 20 D values per token; recomputed, little more than its input, D."""
    model = build(
        small(tmp_path, model={"width": 32, "ffn_width": 128, "encoder_layers": 6, "decoder_layers": 6}).model,
        9,
        9,
        True,
    ).train()
    batch = SeqBatch.from_lists([[4, 5, 6, 7, 8] * 8] * 8, [[8, 7, 6, 5, 4] * 8] * 8, bos=BOS)
    saved = []
    for recompute in (False, True):
        if recompute:
            checkpoint_activations(model)
        sizes: dict[int, int] = {}  # by address, so that nothing counts twice
        weight_pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes, weight_pointers: set[int] = weight_pointers) -> Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in weight_pointers:
                sizes[memory.data_ptr()] = memory.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(batch)
        saved.append(sum(sizes.values()))
        del loss
    print(f"bytes kept: {saved[0]:,} plain, {saved[1]:,} recomputed")
    assert 0 < saved[1] <= saved[0] / 8
