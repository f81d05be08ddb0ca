"""The choice of the weights of a run: validations, the best so far, and the average of the last snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from regard import accelerate, distributed, sharding, tensor_io
from regard.models import SequenceModel
from regard.run_dir import RunDir
from regard.tasks.validator import Validation, Validator
from regard.training.checkpoint import EMA, TrainingProgress
from regard.training.outputs import RunOutputs
from regard.training.progress import figures, which_weights


@dataclass
class BestWeights:
    """Validates weights of a run, and keeps the best of them in model.safetensors."""

    run: RunDir
    model: SequenceModel
    ema: EMA | None  # validated in place of the model's own weights, if there is one
    validator: Validator
    outputs: RunOutputs
    device: torch.device
    add_elapsed_time: Callable[[], None]  # to the time of the run

    def __post_init__(self) -> None:
        self.settings = self.run.recipe.training
        self._whole: SequenceModel | None = None  # for validations of a sharded model

    def validate(self, progress: TrainingProgress) -> None:
        """Measure on held-out data, and keep the weights if they are the best so far."""
        if self.ema is None:
            validation, better = self._score(progress, "step")
        else:
            validation, better = self._score(progress, "ema", lambda ema=self.ema: ema.tensors)  # type: ignore[misc]
        progress.validated = progress.step
        progress.validations_since_best = 0 if better else progress.validations_since_best + 1
        self.outputs.samples(progress.step, validation.samples)

    def validate_average(self, progress: TrainingProgress) -> Validation | None:
        """Measure the mean of the last snapshots, if there are several, and keep it if it is the best so far.

        Patience does not count this validation.
        """
        last = distributed.broadcast(self.run.averaged_snapshots(progress.step))
        if not last:
            return None
        return self._score(progress, f"average of {len(last)}", lambda: tensor_io.mean(list(last.values())))[0]

    def _score(
        self, progress: TrainingProgress, which: str, weights: Callable[[], tensor_io.Tensors] | None = None
    ) -> tuple[Validation, bool]:
        """Validate the model, or other weights in it; save them and return True if they are the best so far."""
        outputs = self.outputs
        with self._validated(weights) as model:
            validation = distributed.broadcast(self.validator.validate(model))
            self.add_elapsed_time()
            value = {"bleu": validation.bleu, "exact": validation.exact}.get(self.settings.best)
            value = -validation.loss if value is None else value
            better = math.isfinite(value) and (progress.best is None or value > progress.best)
            numbers = validation.numbers()
            seconds = round(progress.seconds, 1)
            outputs.measured(progress.step, "valid", weights=which, **numbers, better=better, seconds=seconds)
            if better:
                progress.best, progress.best_step = value, progress.step
                metadata = {"step": progress.step, "weights": which, **numbers}
                outputs.save(self.run.best, tensor_io.model_tensors(model), metadata)
        return validation, better

    @contextmanager
    def _validated(self, weights: Callable[[], tensor_io.Tensors] | None) -> Iterator[SequenceModel]:
        """The model to validate, with other weights if they are given.

        A sharded model cannot decode, because parts of its blocks are called on their own: a whole one takes its place.
        """
        if not accelerate.is_sharded(self.model):
            with nullcontext() if weights is None else swapped_weights(self.model, weights()):
                yield self.model
            return
        tensors = tensor_io.model_tensors(self.model) if weights is None else weights()
        model = self._whole = (self.run.fresh_model() if self._whole is None else self._whole).to(self.device)
        tensor_io.load_into_model(model, {name: sharding.whole(tensor) for name, tensor in tensors.items()}, "the run")
        try:
            yield model
        finally:
            model.to("cpu")

    def ensure_saved(self, progress: TrainingProgress) -> None:
        """Save the last weights if no validation chose any, so that a finished run can always be used."""
        self.outputs.wait()
        if not distributed.broadcast(self.run.best.exists()):
            ema = self.ema
            which, tensors = ("step", tensor_io.model_tensors(self.model)) if ema is None else ("ema", ema.tensors)
            tensors = {name: sharding.whole(tensor) for name, tensor in tensors.items()}
            self.outputs.save(self.run.best, tensors, {"step": progress.step, "weights": which})
            self.outputs.wait()

    def report(self, progress: TrainingProgress, average: Validation | None = None) -> None:
        """Report which weights are in model.safetensors and why, and an average that was not better."""
        if not self.outputs.active:
            return
        best = tensor_io.read_metadata(self.run.best)
        exact = "the most exact outputs" if "bleu" in best else "the highest accuracy"
        by = {"loss": "the lowest loss", "bleu": "the highest BLEU", "exact": exact}[self.settings.best]
        why = f"by {by} on the held-out data" if progress.best is not None else "as no validation was finite"
        self.outputs.say(f"kept as best: {which_weights(best)} ({figures(best, brief=True)}), {why}")
        if best.get("step") == 0:
            origin = "that it started from" if self.run.origin is None else f"of {self.run.origin}"
            self.outputs.say(
                f"warning: training made nothing better: model.safetensors holds the weights {origin}; "
                "--weights last uses the trained ones"
            )
        if average is not None and not str(best.get("weights")).startswith("average"):
            numbers = average.numbers()
            higher = numbers.get("bleu", 0) > best.get("bleu", math.inf)
            why = f"; its BLEU is higher, but training.best = {self.settings.best!r} decides" if higher else ""
            count = len(self.run.averaged_snapshots(progress.step))
            self.outputs.say(
                f"not kept: the average of the last {count} snapshots ({figures(numbers, brief=True)}){why}; "
                "--weights average uses it"
            )


@contextmanager
def swapped_weights(model: SequenceModel, tensors: tensor_io.Tensors) -> Iterator[None]:
    """The model with other weights while the context lasts."""
    saved = {name: tensor.clone() for name, tensor in tensor_io.model_tensors(model).items()}
    tensor_io.load_into_model(model, tensors, "the average")
    try:
        yield
    finally:
        tensor_io.load_into_model(model, saved, "the model")
