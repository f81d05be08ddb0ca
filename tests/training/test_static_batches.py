"""Static batches: all of a batch in one tensor, and a step that is compiled once for all of them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import go, small
from torch import Tensor

from regard import accelerate, tensor_io
from regard.accelerate import Bf16Weights, compile
from regard.accelerate.fused import deferred_biases
from regard.attention import Causal, PackedQK, StaticQK, attend
from regard.data.masking import MaskingPolicy
from regard.data.packing import Packer, TokenWindows, generator
from regard.data.token_cache import TokenStore
from regard.errors import UserError
from regard.models import SequenceModel, build
from regard.packed import Batch, PackedLayout, SeqBatch, StaticPackedLayout
from regard.recipes.schema import TrainingSettings, families
from regard.training import setup
from regard.training.captured_step import make_step
from regard.training.optimizers import Muon, linear_weights
from regard.training.static_batch import StaticBatchShape
from regard.training.step import TrainingStep

WORDS = 40
CPU = torch.device("cpu")
FRONT = 4  # ids below are marks


def sentences(count: int, seed: int, longest: int = 9) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=random).tolist()
    return [torch.randint(FRONT, WORDS, (n,), generator=random).tolist() for n in lengths]


def pairs(static: bool) -> Packer:
    store = TokenStore.of(sentences(60, 1), sentences(60, 2))
    return Packer([store], [1.0], target_budget=48, seed=1, static=static)


def texts(static: bool) -> Packer:
    store = TokenStore.of([[] for _ in range(60)], [[1, *s, 2] for s in sentences(60, 3)])
    return Packer([store], [1.0], target_budget=48, seed=1, static=static)


def classes(static: bool) -> Packer:
    """Targets of a class and the end mark: they fill their row to the last place."""
    store = TokenStore.of([[1, *s, 2] for s in sentences(60, 3)], [[FRONT + n % 5, 2] for n in range(60)])
    return Packer([store], [1.0], target_budget=16, seed=1, static=static)


def windows(static: bool) -> TokenWindows:
    store = TokenStore.of([[]], [[n for s in sentences(80, 4) for n in s]])
    return TokenWindows([store], [1.0], context=12, batch_tokens=48, seed=1)


def with_gaps(batch: SeqBatch) -> SeqBatch:
    return MaskingPolicy(0.3, mask_id=3, first_id=FRONT, vocabulary=WORDS).mask(batch, generator(1))


KINDS: dict[str, tuple[dict[str, Any], Callable[[bool], Any]]] = {
    "transformer": ({"family": "transformer", "size": "tiny", "positions": "fraction"}, pairs),
    "transformer, norm after, squeezed": (
        {"family": "transformer", "size": "tiny", "norm_first": False, "se_dim": 8, "norm": "rms"},
        pairs,
    ),
    "transformer, batch norm": ({"family": "transformer", "size": "tiny", "norm": "batch"}, pairs),
    "gpt, pairs": ({"family": "gpt", "size": "nano"}, pairs),
    "gpt, pairs, rotary": ({"family": "gpt", "size": "nano", "positions": "rotary"}, pairs),
    "gpt, documents, relative": ({"family": "gpt", "size": "nano", "positions": "relative"}, texts),
    "gpt, windows": ({"family": "gpt", "size": "nano"}, windows),
    "bert": ({"family": "bert", "size": "tiny"}, texts),
    "bert, classes": ({"family": "bert", "size": "tiny", "task": "classify"}, classes),
    "bert, classes by the first": ({"family": "bert", "size": "tiny", "task": "classify", "pooling": "first"}, classes),
}


def made(name: str) -> tuple[SequenceModel, StaticBatchShape[SeqBatch], list[SeqBatch]]:
    settings, packs = KINDS[name]
    torch.manual_seed(0)
    chosen = families()[settings["family"]].model_validate({**settings, "dropout": 0.0})
    model = build(chosen, WORDS, WORDS, True).train()  # type: ignore[arg-type]
    packer = packs(True)
    batches = [packer.batch_at(n) for n in range(3)]
    gaps = packs is texts and settings["family"] == "bert"
    batches = [with_gaps(batch) for batch in batches] if gaps else batches
    return model, StaticBatchShape(batches[0]), batches


def loss_and_gradients(model: SequenceModel, batch: SeqBatch) -> list[Tensor]:
    model.zero_grad()
    loss = model(batch, 0.1)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", KINDS)
def test_a_static_batch_has_the_loss_and_the_gradients_of_the_batch_it_was_made_from(name: str) -> None:
    model, shape, batches = made(name)
    for batch in batches:
        buffer = shape.flatten(batch)
        assert buffer.shape == (shape.size,)
        torch.testing.assert_close(
            loss_and_gradients(model, shape.unflatten(buffer)), loss_and_gradients(model, batch), atol=1e-4, rtol=1e-4
        )


def test_a_packed_batch_of_classes_may_be_full_below_its_maximum_number_of_texts() -> None:
    _, _, batches = made("bert, classes")
    full = [batch.inputs.layout for batch in batches if batch.inputs.layout.tokens == batch.inputs.layout.size]
    assert full and all(layout.bounds is not None and len(layout) < layout.bounds[0] for layout in full)


def test_a_batch_of_another_shape_is_refused() -> None:
    _, shape, batches = made("transformer")
    other = SeqBatch.from_lists([[5, 2]], [[6, 2]], bos=1)
    for batch in (
        other,
        replace(batches[0], loss_mask=batches[0].labels > 5),
        replace(batches[0], inputs=other.inputs),
    ):
        with pytest.raises(ValueError, match="another shape"):
            shape.flatten(batch)
    with pytest.raises(ValueError, match="5 sentences of up to 3 tokens exceed"):
        StaticBatchShape(spectrograms([3, 2])).flatten(spectrograms([3, 2, 1, 1, 1]))


@dataclass(frozen=True)
class Spectrograms(Batch):
    """Features and labels of several dtypes, a field that is shared, and one that is absent."""

    frames: Tensor
    weights: Tensor
    layout: PackedLayout
    labels: Tensor
    same_labels: Tensor
    mask: Tensor
    absent: Tensor | None = None

    @property
    def num_targets(self) -> int:
        return len(self.labels)


def spectrograms(lengths: list[int], size: int = 11) -> Spectrograms:
    random = torch.Generator().manual_seed(sum(lengths))
    labels = torch.randint(0, 9, (4,), generator=random, dtype=torch.int32)
    frames, weights = torch.randn(size, 5, generator=random), torch.randn(3, generator=random).double()
    layout = PackedLayout(lengths, size, bounds=(4, 7))
    return Spectrograms(frames, weights, layout, labels, labels, torch.rand(size, generator=random) < 0.5)


def test_tensors_of_any_dtype_come_back_bit_by_bit_and_shared_fields_once() -> None:
    shape = StaticBatchShape(spectrograms([3, 2]))
    alone = StaticBatchShape(replace(spectrograms([3, 2]), same_labels=torch.zeros(4, dtype=torch.int32)))
    assert alone.size - shape.size == 16
    for lengths in ([3, 2], [7, 1, 0, 3], [1]):
        batch = spectrograms(lengths)
        found = shape.unflatten(shape.flatten(batch))
        for name in ("frames", "weights", "labels", "mask"):
            assert getattr(found, name).dtype == getattr(batch, name).dtype
            assert torch.equal(getattr(found, name), getattr(batch, name))
        assert found.same_labels is found.labels and found.absent is None
        assert found.layout.length.tolist() == lengths + [0] * (4 - len(lengths)) and found.layout.max_len == 7
        with pytest.raises(ValueError, match="another shape"):  # of the same tensors, but not shared
            shape.flatten(replace(batch, same_labels=batch.labels.clone()))


def test_a_batch_moves_with_its_shared_fields_and_its_bounds() -> None:
    moved = spectrograms([3, 2]).to("meta")
    assert moved.same_labels is moved.labels and moved.absent is None and moved.frames.device.type == "meta"
    assert moved.layout.device.type == "meta" and moved.layout.bounds == (4, 7) and moved.num_targets == 4


@pytest.mark.parametrize("name", ["transformer", "gpt, windows"])
def test_what_is_compiled_for_one_batch_serves_every_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the same. The compiler is left out: what is traced is run as it is."""
    from torch._dynamo.testing import CompileCounter

    model, shape, batches = made(name)
    torch.compiler.reset()  # as `accelerate` does before it compiles
    counted = CompileCounter()
    compile = torch.compile

    def traced(f: Callable[..., Tensor], options: object, **rest: Any) -> Callable[..., Tensor]:
        return compile(f, backend=counted, **rest)  # the options are the compiler's

    monkeypatch.setattr(torch, "compile", traced)
    expected = [loss_and_gradients(model, batch) for batch in batches]
    accelerate.compile_parts(model)
    frames = []
    for batch, wanted in zip(batches, expected, strict=True):
        torch.testing.assert_close(
            loss_and_gradients(model, shape.unflatten(shape.flatten(batch))), wanted, atol=1e-4, rtol=1e-4
        )
        frames.append(counted.frame_count)
    assert frames[0] > 0 and len(set(frames)) == 1


# -- attention over static rows ----------------------------------------------------------------------------------------


def rows(lengths: list[int], size: int, most: int) -> StaticPackedLayout:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return StaticPackedLayout(
        torch.nn.functional.pad(ends, (0, most - len(lengths)), value=int(ends[-1])), size, max(lengths)
    )


def test_static_rows_lie_as_rows_do() -> None:
    batch = SeqBatch.from_lists(sentences(7, 5), sentences(7, 6), bos=1, source_size=70, target_size=70)
    known = batch.inputs.layout
    static = rows(list(known.lengths), 70, 12)
    assert torch.equal(static.position, known.position) and torch.equal(static.is_token, known.is_token)
    assert torch.equal(static.segment_ids[known.is_token], known.segment_ids[known.is_token])
    torch.manual_seed(0)
    q, k, v = torch.randn(70, 2, 16), torch.randn(70, 2, 16), torch.randn(70, 2, 16)
    flat, padded = (
        attend(q, k, v, StaticQK(static, static, Causal())),
        attend(q, k, v, PackedQK(known, known, Causal())),
    )
    torch.testing.assert_close(flat[known.is_token], padded[known.is_token])


# -- which step --------------------------------------------------------------------------------------------------------


def family(name: str, **settings: Any) -> SequenceModel:
    return build(families()[name].model_validate(settings), WORDS, WORDS, True)  # type: ignore[arg-type]


def test_the_backend_is_chosen_by_device_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, backend = torch.device("cuda"), accelerate.requested_backend
    monkeypatch.setattr("regard.kernels.available", lambda: True)
    transformer, recurrent = family("transformer", size="tiny"), family("recurrent", size="tiny")
    sparse = family("gpt", size="nano", mask="window")
    assert backend(TrainingSettings(), transformer, CPU) == "plain"
    assert backend(TrainingSettings(), transformer, gpu) == "captured"
    assert backend(TrainingSettings(), family("bert", size="tiny"), gpu) == "captured"
    assert backend(TrainingSettings(), family("gpt", size="nano"), gpu) == "captured"
    assert backend(TrainingSettings(backend="compiled"), transformer, gpu) == "compiled"
    assert backend(TrainingSettings(steps=10, backend="plain"), transformer, gpu) == "plain"
    assert backend(TrainingSettings(checkpoint_activations=True), transformer, gpu) == "plain"
    for other in (recurrent, sparse):
        assert backend(TrainingSettings(), other, gpu) == "plain"
    with pytest.raises(UserError, match="needs a GPU"):
        backend(TrainingSettings(backend="compiled"), transformer, CPU)
    monkeypatch.setattr("regard.kernels.available", lambda: False)
    assert backend(TrainingSettings(), transformer, gpu) == "plain"


def test_long_jobs_are_compiled_unless_the_recipe_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's length is its arithmetic: 6 times weights times tokens."""
    model, shape, batches = made("transformer")
    batch = shape.unflatten(shape.flatten(batches[0]))
    tried: list[bool] = []

    def attempt(model: SequenceModel, *_: object) -> None:
        tried.append(accelerate.is_compiled(model))
        accelerate.remove_compiled(model)

    monkeypatch.setattr(accelerate, "_try", attempt)
    weights = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(accelerate, "LONG_JOB", 6 * weights * 100 * 2 * 50)
    few, many, said = (
        TrainingSettings(batch_tokens=100, accumulate=2, steps=49),
        {"batch_tokens": 100, "accumulate": 2},
        [],
    )

    def backend(settings: TrainingSettings) -> str:
        return accelerate.for_training(model, settings, CPU, "captured", batch, said.append)

    assert backend(few) == "captured"
    assert backend(TrainingSettings(**many, steps=50)) == "compiled"
    assert backend(TrainingSettings(**many, steps=50, backend="captured")) == "captured"
    assert tried == [False, True, False] and said == ["compiling the training step"]


def test_a_step_that_cannot_be_compiled_goes_on_without_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, batches = made("transformer")

    def fails(*arguments: object, **named: object) -> Tensor:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(torch, "compile", lambda f, **options: fails)
    said: list[str] = []
    batch = shape.unflatten(shape.flatten(batches[0]))
    assert accelerate.for_training(model, TrainingSettings(), CPU, "compiled", batch, said.append) == "captured"
    assert not accelerate.is_compiled(model) and all(p.grad is None for p in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert len(said) == 2 and said[0] == "compiling the training step"
    assert "no such instruction" in said[1] and "much more" not in said[1]
    monkeypatch.setattr(model, "forward", fails)
    assert accelerate.for_training(model, TrainingSettings(), CPU, "captured", batch, said.append) == "plain"
    assert len(said) == 3 and "cannot be captured here" in said[2]


def test_trying_a_step_out_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, batches = made("transformer, batch norm")
    statistics = [buffer.clone() for buffer in model.buffers()]
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    batch = shape.unflatten(shape.flatten(batches[0]))
    assert accelerate.for_training(model, TrainingSettings(), CPU, "compiled", batch) == "compiled"
    assert torch.equal(torch.rand(3), expected)
    assert all(p.grad is None for p in model.parameters())
    assert statistics and all(map(torch.equal, model.buffers(), statistics))


def test_compiled_parts_change_no_key_and_run_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, batches = made("transformer")
    keys, names, ran = list(model.state_dict()), [name for name, _ in model.named_modules()], []

    def counted(f: Callable[..., Any], **options: object) -> Callable[..., Any]:
        return lambda *given, **named: (ran.append(f), f(*given, **named))[1]

    monkeypatch.setattr(torch, "compile", counted)
    expected = loss_and_gradients(model, batches[0])
    accelerate.compile_parts(model)
    assert all(map(torch.equal, loss_and_gradients(model, batches[0]), expected))
    # 2 blocks, a norm and an embedding on either side, and the loss
    assert len(ran) == 2 * (2 + 1 + 1) + 1 and compile.losses.linear_cross_entropy in ran
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == names
    ran.clear()
    model.eval()(batches[0])
    copied = copy.deepcopy(model).train()
    assert not ran
    with torch.no_grad():
        copied.encoder[0].self_attn.out_proj.bias += 1.0  # type: ignore[union-attr, index]
    assert not torch.equal(copied(batches[0]), model(batches[0]))  # a copy computes with its own weights
    assert ran


@pytest.mark.parametrize("name", KINDS)
def test_copies_of_the_weights_in_bf16_give_the_gradients_that_autocast_gives(name: str) -> None:
    model, shape, batches = made(name)
    weights, halves = [*model.parameters()], Bf16Weights(model)
    assert len(halves.copies) >= 8
    for batch in map(shape.unflatten, map(shape.flatten, batches)):
        found = []
        for instead in (halves.active(), nullcontext()):
            model.zero_grad()
            with instead:
                assert any(w.dtype == torch.bfloat16 for w in model.parameters()) == (not found)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch, 0.1)
                loss.backward()
            found.append([loss.detach(), *(w.grad for w in model.parameters() if w.grad is not None)])
        assert all(slope.dtype == torch.float32 for slope in found[0])
        assert len(found[0]) == len(found[1]) > 8 and all(map(torch.equal, *found))
        assert all(map(operator.is_, model.parameters(), weights))
        with torch.no_grad():
            for weight in weights:  # copies are of the weights as they are then
                weight.mul_(1.01)


def test_what_breaks_off_leaves_nothing_on_the_copies() -> None:
    """Neither are they in the model's place afterwards, nor is what they were given added to the next gradients."""
    model, shape, batches = made("transformer")
    weights, halves, batch = [*model.parameters()], Bf16Weights(model), shape.unflatten(shape.flatten(batches[0]))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with halves.active(), torch.autocast("cpu", torch.bfloat16):
            model(batch).backward()
        return [w.grad.clone() for w in weights if w.grad is not None]

    expected = gradients()
    with pytest.raises(ZeroDivisionError), halves.active(), torch.autocast("cpu", torch.bfloat16):
        model(batch).backward()
        raise ZeroDivisionError
    assert all(map(operator.is_, model.parameters(), weights))
    assert all(copy.grad is None for copy in halves.copies)
    assert all(map(torch.equal, gradients(), expected))


def test_biases_that_norms_add_are_not_rounded() -> None:
    model, *_ = made("transformer")
    accelerate.fuse(model)
    with Bf16Weights(model, without=deferred_biases(model)).active():
        kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    endings = ("self_attn.out_proj.bias", "cross_attn.out_proj.bias", "feed_forward.w_out.bias")
    late = {name for name in kinds if name.endswith(endings)}
    assert len(late) == 2 * 2 + 2 * 3 and {kinds[name] for name in late} == {torch.float32}
    assert kinds["encoder.0.feed_forward.w_in.bias"] == kinds["decoder.1.cross_attn.q_proj.weight"] == torch.bfloat16


def test_layers_that_do_not_learn_are_handed_nothing() -> None:
    model, shape, batches = made("transformer")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.requires_grad_(False)
    with Bf16Weights(model).active(), torch.autocast("cpu", torch.bfloat16):
        model(shape.unflatten(shape.flatten(batches[0]))).backward()
    assert all((w.grad is None) != w.requires_grad for w in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured steps need a GPU")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["captured", "compiled"])
@pytest.mark.parametrize(("accumulate", "precision"), [(1, "fp32"), (2, "fp32"), (1, "bf16")])
def test_captured_updates_are_the_plain_ones(kind: str, accumulate: int, precision: Any, optimizer: str) -> None:
    """On a GPU, most of them played from a graph: they move the weights as plain updates do."""
    gpu, found = torch.device("cuda"), []
    settings = TrainingSettings(precision=precision, accumulate=accumulate, max_grad_norm=1.0)
    for how in ("plain", kind):
        model, shape, batches = made("transformer")
        model.to(gpu)
        begun = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        if how == "compiled":
            accelerate.compile_parts(model)
        moved = model.parameters() if optimizer == "adamw" else [p for p in model.parameters() if p.dim() == 1]
        # Keys' biases have no gradient but rounding, which Adam would make as large as any other: hence the eps.
        mover: torch.optim.Optimizer = torch.optim.AdamW(moved, lr=0.0, eps=1e-3, fused=True)
        if optimizer == "muon":
            mover = Muon(linear_weights(model), mover, weight_decay=0.01)
        update = make_step(model, mover, None, settings, gpu, None if how == "plain" else shape)
        for number in range(1, 13):
            group = [batches[(number * accumulate + i) % len(batches)] for i in range(accumulate)]
            update(dict(enumerate(group)), number, 1e-3)
        assert isinstance(update, TrainingStep) and (how == "plain" or update.graphs is not None)
        now = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        found.append((update.loss.item(), update.norm.item(), now - begun))
    (loss, norm, way), (other_loss, other_norm, other_way) = found
    rough = 1 if precision == "fp32" else 10
    assert (other_loss, other_norm) == pytest.approx((loss, norm), rel=1e-3 * rough)
    apart = 0.01 * rough if optimizer == "adamw" else 0.1 * rough**0.5  # Muon evens out all sizes
    assert (other_way - way).norm() < apart * way.norm()


def test_a_run_keeps_the_batches_it_began_with_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun as on a GPU and ended on a CPU, it is the run that was not interrupted; and the other way round."""
    gpu = torch.device("cuda")
    for begun in (True, False):
        recipe = small(tmp_path, steps=4)
        monkeypatch.setattr(setup, "plan_updates", lambda run, model, device, begun=begun: ("plain", begun))
        whole = go(recipe, tmp_path / f"whole-{begun}")
        half = go(small(tmp_path, steps=2), tmp_path / f"half-{begun}")
        monkeypatch.undo()
        monkeypatch.setattr("regard.kernels.available", lambda: True)
        assert setup.plan_updates(half, half.fresh_model(), gpu) == (("captured", True) if begun else ("plain", False))
        half = go(recipe, tmp_path / f"half-{begun}")
        expected, found = (tensor_io.load(run.resume) for run in (whole, half))
        assert expected[1]["static"] == found[1]["static"] == begun
        assert all(torch.equal(expected[0][name], found[0][name]) for name in expected[0])
