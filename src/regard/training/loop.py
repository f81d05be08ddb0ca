"""The training loop: one step at a time, each a pure function of the recipe, the seed and the step.

With several processes, all run this loop: each computes its share of every batch and of validations, and the main one
writes and reports.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard import distributed, sharding, tasks, tensor_io
from regard.accelerate import DataParallel
from regard.data.prefetch import Prefetched
from regard.data.stream import BatchShare, BatchStream
from regard.errors import Interrupted, UserError
from regard.files import DirectoryLock
from regard.models import SequenceModel
from regard.run_dir import RunDir, kept_snapshots
from regard.tasks.validator import Validator
from regard.training import checkpoint
from regard.training.best_weights import BestWeights
from regard.training.captured_step import make_step
from regard.training.optimizers import make_optimizer
from regard.training.outputs import RunOutputs
from regard.training.progress import Reporter
from regard.training.schedule import rate
from regard.training.signals import catch_signals
from regard.training.static_batch import StaticBatchShape

LOG_EVERY = 50  # steps between lines of metrics
CHECK_EVERY = 10  # steps between reads of the flag that a loss was not finite
PREFETCHED = 4  # micro-batches that are made ahead


@dataclass
class Trainer:
    """Trains a model in a run directory, from its saved state on."""

    run: RunDir
    model: SequenceModel
    stream: BatchStream
    validator: Validator
    reporter: Reporter
    device: torch.device
    shape: StaticBatchShape[Any] | None = None  # shape of all batches, if static; steps are then captured
    identity: dict[str, Any] = field(default_factory=dict)  # identifies batches and data: fields of `TrainingProgress`
    origin: Path | None = None  # the run whose weights this one starts with: they are validated before the first step
    lock: DirectoryLock | None = None  # lock of the run directory
    parallel: DataParallel | None = None  # how several processes sum gradients (`accelerate.data_parallel`)

    def __post_init__(self) -> None:
        self.settings = self.run.recipe.training
        self.optimizer = make_optimizer(self.model, self.run)
        self.ema = checkpoint.EMA(self.model, self.settings.ema) if self.settings.ema else None
        self.progress = checkpoint.TrainingProgress()
        in_background = self.device.type == "cuda"  # a GPU need not wait until files are on disk
        self.outputs = RunOutputs(self.run, self.reporter, in_background, self.lock)
        self.training_step = make_step(
            self.model,
            self.optimizer,
            self.ema,
            self.settings,
            self.device,
            self.shape,
            self.outputs.say,
            self.parallel,
        )
        self.best_weights = BestWeights(
            self.run, self.model, self.ema, self.validator, self.outputs, self.device, self._add_elapsed_time
        )

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train up to the recipe's number of steps, or until patience runs out or a signal comes."""
        self._resume()
        progress, settings = self.progress, self.settings
        limit = progress.limit(settings)
        if progress.finished and limit:
            self.outputs.say(f"already trained to step {progress.step:,}; raise {limit} to go on")
            self.best_weights.ensure_saved(progress)
            self.best_weights.report(progress)
            return
        equal = self.parallel is not None and self.parallel.equal_passes
        shares = self.stream.shares(
            progress.position, settings.accumulate, distributed.rank(), distributed.world_size(), equal
        )
        batches = Prefetched(shares, max(PREFETCHED // settings.accumulate, 1))
        with catch_signals() as signals, self.outputs, batches:
            if not limit:
                self.outputs.reporter.start(progress.step, settings.steps)
            self._clock = time.perf_counter()
            self._saved = time.monotonic()
            if self.origin is not None and progress.step == 0:
                self.best_weights.validate(progress)
            while not progress.limit(settings):
                share = next(batches)
                progress.step += 1
                progress.position = share.after
                self._take_step(share)
                self.outputs.reporter.step(progress.step, progress.tokens)
                self._after_step(signals)
            self._finish()

    def _after_step(self, signals: list[int]) -> None:
        """Check, log, validate and save, each if it is due; stop after a signal."""
        step, last = self.progress.step, self.progress.step == self.settings.steps
        stopping, save_due = distributed.any_of(bool(signals), self._save_due())
        saving, validating = save_due or self._snapshot_due(), last or self._validation_due()
        if stopping or saving or validating or step % CHECK_EVERY == 0:
            self._stop_if_nonfinite()
            self.outputs.check()
        if step % LOG_EVERY == 0 or last:
            self._log()
        if validating:
            self.best_weights.validate(self.progress)
        if self._snapshot_due():
            self._snapshot()
        if saving or stopping or last:
            self._save()
        if stopping and not last:
            self.outputs.wait()
            message = f"stopped after step {step}; the same command continues" if self.outputs.active else ""
            raise Interrupted(message, 128 + (signals or [signal.SIGTERM])[0])

    def _snapshot_due(self) -> bool:
        return self.progress.step % self.settings.save_every == 0

    def _save_due(self) -> bool:
        """Whether the last save was `save_minutes` ago: all that a kill may cost."""
        minutes = self.settings.save_minutes
        return minutes > 0 and time.monotonic() - self._saved >= 60 * minutes

    def _validation_due(self) -> bool:
        return self.progress.step % self.settings.validate_every == 0

    def _learning_rate(self) -> float:
        return rate(self.settings, self.run.recipe.model.width, self.progress.step)

    def _take_step(self, share: BatchShare) -> None:
        """Take one optimizer step, given this process's share of the step's batch."""
        targets = self.training_step(share.batches, self.progress.step, self._learning_rate(), share.idle)
        self.progress.tokens += targets
        self.progress.window_tokens += targets
        self.progress.finished = False

    def _stop_if_nonfinite(self) -> None:
        """Save the batch and stop with advice if a loss was not finite. The last saved state is untouched."""
        if not self.training_step.nonfinite.item():
            return
        step, accumulate = int(self.training_step.nonfinite_step.item()), self.settings.accumulate
        task, examples = tasks.of(self.run.recipe), []
        for number in range((step - 1) * accumulate, step * accumulate):
            examples += task.describe_batch(self.run, self.stream.batch_at(number))
        file = self.run.path / f"not-finite-{step}.json"
        self.outputs.ensure_held()
        self.outputs.write_json(file, {"step": step, "examples": examples})
        raise UserError(
            f"the loss or its gradient was not finite at step {step}; its batch is in {file}. Try training.precision = "
            "fp32; or, with another --out, a lower training.learning_rate or a longer training.warmup"
        )

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        progress = self.progress
        self._add_elapsed_time()
        self.outputs.measured(
            progress.step,
            "train",
            loss=round(self._window_loss() / max(progress.window_tokens, 1), 6),
            learning_rate=self._learning_rate(),
            gradient=round(self.training_step.norm.item(), 4),
            tokens=progress.tokens,
            seconds=round(progress.seconds, 1),
        )
        self.training_step.loss.zero_()
        progress.window_tokens = 0

    def _window_loss(self) -> float:
        """The loss of all processes, summed over the targets since the last line of metrics."""
        return distributed.all_sum(self.training_step.loss.item())

    def _add_elapsed_time(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._clock
        self._clock = now

    # -- saving -------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        resumed = self.run.resume.exists()
        if resumed:
            self.progress = checkpoint.load(self.run.resume, self.model, self.optimizer, self.ema)
            self.training_step.loss.fill_(self.progress.window_loss if self.outputs.active else 0.0)
        self.progress = replace(self.progress, **self.identity)
        self.outputs.restore_logs(self.progress.logs if resumed else None)

    def _save(self) -> None:
        self._add_elapsed_time()
        self.progress.window_loss = self._window_loss()
        self.progress.logs = self.outputs.log_states()
        checkpoint.save(self.outputs, self.run.resume, self.progress, self.model, self.optimizer, self.ema)
        self._saved = time.monotonic()

    def _snapshot(self) -> None:
        step = self.progress.step
        tensors = {name: sharding.whole(tensor) for name, tensor in tensor_io.model_tensors(self.model).items()}
        self.outputs.save(self.run.snapshot(step), tensors, {"step": step}, then=partial(self._prune, step))

    def _prune(self, step: int) -> None:
        """Delete the snapshots up to this step that are no longer needed."""
        present = self.run.snapshots()
        kept = kept_snapshots([s for s in present if s <= step], self.settings.save_every, self.settings.average)
        for old, file in present.items():
            if old <= step and old not in kept:
                file.unlink(missing_ok=True)
                tensor_io.remove_shards(file)

    def _finish(self) -> None:
        """Validate the mean of the last snapshots, keep it if it is better, and close the run."""
        self.outputs.wait()
        if self.progress.validated != self.progress.step:  # training.steps was lowered to a step already reached
            self._log()
            self.best_weights.validate(self.progress)
        average = self.best_weights.validate_average(self.progress)
        if self.progress.limit(self.settings) == "training.patience":
            since, best = self.progress.validations_since_best, self.progress.best_step
            self.outputs.measured(self.progress.step, "stop", validations=since, best_step=best)
        self.best_weights.ensure_saved(self.progress)
        self.progress.finished = True
        self._save()
        self.outputs.wait()
        self.outputs.ensure_held()
        self.best_weights.report(self.progress, average)
