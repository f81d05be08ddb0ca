"""The training loop: one update at a time, each a pure function of the recipe, the seed and the step."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from regard import tensor_io
from regard.data.packing import BatchStream
from regard.data.prefetch import Prefetched
from regard.errors import Interrupted, UserError
from regard.files import DirectoryLock, write_text
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.run_dir import LOGS, RunDir, kept_snapshots
from regard.tasks.validator import Validation, Validator
from regard.training import checkpoint, step
from regard.training.optimizers import make_optimizer
from regard.training.progress import Reporter, TensorBoardWriter, figures, which_weights
from regard.training.schedule import rate
from regard.training.static_batch import StaticBatchShape

LOG_EVERY = 50  # steps between lines of metrics
CHECK_EVERY = 10  # steps between looks at the flag that a loss was not finite


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM and SIGHUP while the context lasts, so that the loop can finish its step and save.

    A SIGHUP that is ignored, as nohup has it, stays ignored. Some platforms have none.
    A second Ctrl-C ends at once, or when the file that is being written is whole; nothing is lost but the steps since
    the last save.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # only the main thread may; elsewhere signals are someone else's business
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Trainer:
    """Everything a run needs while it trains."""

    run: RunDir
    model: SequenceModel
    packer: BatchStream
    validator: Validator
    reporter: Reporter
    device: torch.device
    shape: StaticBatchShape[Any] | None = (
        None  # of all batches, if there is one: then a captured step makes the updates
    )
    facts: dict[str, Any] = field(default_factory=dict)  # of the batches: fields of `TrainingProgress`
    origin: Path | None = None  # the run that the weights are of: they are validated before the first update
    lock: DirectoryLock | None = None  # of the run directory: nothing is written once it was deleted or replaced

    def __post_init__(self) -> None:
        self.settings = self.run.recipe.training
        self.optimizer = make_optimizer(self.model, self.run)
        self.ema = checkpoint.EMA(self.model, self.settings.ema) if self.settings.ema else None
        self.progress = checkpoint.TrainingProgress()
        behind = self.device.type == "cuda"  # a GPU need not wait until files are on disk
        self.writer = tensor_io.TensorWriter(behind=behind, check=self._ensure_held)
        self.logs = {name: checkpoint.Log(self.run.path / name) for name in LOGS}
        self.board = TensorBoardWriter(self.run.path / "tensorboard" if self.settings.tensorboard else None)
        self.update = step.make_step(
            self.model, self.optimizer, self.ema, self.settings, self.device, self.shape, self._say
        )

    def _ensure_held(self) -> None:
        if self.lock is not None:
            self.lock.ensure_held()

    def _say(self, text: str) -> None:
        self.reporter.say(text)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Go on to the recipe's number of steps, or until patience runs out or a signal comes."""
        self._resume()
        progress, settings = self.progress, self.settings
        limit = progress.limit(settings)
        if progress.finished and limit:
            self.reporter.say(f"already trained to step {progress.step:,}; raise {limit} to go on")
            self._ensure_weights()
            self._say_what_was_kept()
            return
        batches = Prefetched(self.packer.batches(progress.position))
        with catch_signals() as signals, self.reporter, batches, self.writer:
            if not limit:
                self.reporter.start(progress.step, settings.steps)
            self._clock = time.perf_counter()
            self._saved = time.monotonic()
            if self.origin is not None and progress.step == 0:
                self._validate()
            while not progress.limit(settings):
                group = []
                for _ in range(settings.accumulate):
                    batch, progress.position = next(batches)
                    group.append(batch)
                progress.step += 1
                self._update(group)
                self.reporter.step(progress.step, progress.tokens)
                last = progress.step == settings.steps
                saves = self.should_save() or self._save_due()
                if last or signals or progress.step % CHECK_EVERY == 0 or saves or self.should_validate():
                    self._ensure_held()
                    self._stop_if_broken()
                    self.writer.check()
                if progress.step % LOG_EVERY == 0 or last:
                    self._log()
                if self.should_validate() or last:
                    self._validate()
                if self.should_save():
                    self._snapshot()
                if saves or signals or last:
                    self._save()
                if signals and not last:
                    self.writer.wait()
                    raise Interrupted(
                        f"stopped after step {progress.step}; the same command continues", 128 + signals[0]
                    )
            self._finish()

    def should_save(self) -> bool:
        return self.progress.step % self.settings.save_every == 0

    def _save_due(self) -> bool:
        """Whether the last save was so long ago that a kill would cost more time than it should."""
        minutes = self.settings.save_minutes
        return minutes > 0 and time.monotonic() - self._saved >= 60 * minutes

    def should_validate(self) -> bool:
        return self.progress.step % self.settings.validate_every == 0

    def _update(self, batches: list[SeqBatch]) -> None:
        """One step of the optimiser on the mean loss a target token over all the batches together."""
        progress = self.progress
        tokens = self.update(batches, progress.step, rate(self.settings, self.run.recipe.model.width, progress.step))
        progress.tokens += tokens
        progress.window_tokens += tokens
        progress.finished = False

    def _stop_if_broken(self) -> None:
        """Where a loss was not finite: save the batch, say what to try, and stop. The last saved state is untouched."""
        if not self.update.nonfinite.item():
            return
        step, accumulate = int(self.update.nonfinite_step.item()), self.settings.accumulate
        source, target = self.run.tokenizers
        sentences = []
        for micro in range((step - 1) * accumulate, step * accumulate):
            batch = self.packer.batch_at(micro)
            labels = batch.inputs.layout.split(batch.labels)
            for src, tgt in zip(batch.source.layout.split(batch.source.ids), labels, strict=True):
                sentences.append({"source": source.decode(src.tolist()), "target": target.decode(tgt.tolist())})
        file = self.run.path / f"not-finite-{step}.json"
        write_text(file, json.dumps({"step": step, "pairs": sentences}, ensure_ascii=False, indent=1) + "\n")
        raise UserError(
            f"the loss or its gradient was not finite at step {step}; its batch is in {file}. Try training.precision = "
            "fp32; or, with another --out, a lower training.learning_rate or a longer training.warmup"
        )

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _write(self, kind: str, **numbers: Any) -> None:
        line = json.dumps({"step": self.progress.step, "kind": kind, **numbers}, ensure_ascii=False)
        self._append("metrics.jsonl", line)
        self.board.write(self.progress.step, kind, numbers)
        self.reporter.measured(self.progress.step, kind, numbers)

    def _append(self, name: str, line: str) -> None:
        self._ensure_held()
        self.logs[name].append(line)

    def _log(self) -> None:
        progress = self.progress
        self._tick()
        self._write(
            "train",
            loss=round(self.update.loss.item() / max(progress.window_tokens, 1), 6),
            learning_rate=rate(self.settings, self.run.recipe.model.width, progress.step),
            gradient=round(self.update.norm.item(), 4),
            tokens=progress.tokens,
            seconds=round(progress.seconds, 1),
        )
        self.update.loss.zero_()
        progress.window_tokens = 0

    def _tick(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._clock
        self._clock = now

    def _validate(self) -> None:
        """Measure on held-out pairs and keep the weights if they are the best so far."""
        if self.ema is None:
            look, better = self._score(self.model, "step")
        else:
            with swapped_weights(self.model, self.ema.tensors):
                look, better = self._score(self.model, "ema")
        self.progress.validated = self.progress.step
        self.progress.validations_since_best = 0 if better else self.progress.validations_since_best + 1
        for sample in look.samples:
            line = {"step": self.progress.step, **sample}
            self._append("samples.jsonl", json.dumps(line, ensure_ascii=False))
        self.reporter.samples(look.samples)

    def _score(self, model: SequenceModel, what: str) -> tuple[Validation, bool]:
        """How good weights are on the held-out pairs, and whether they are the best so far: then they are kept."""
        progress = self.progress
        look = self.validator.validate(model)
        self._tick()
        value = {"bleu": look.bleu, "exact": look.exact}.get(self.settings.best)
        value = -look.loss if value is None else value
        better = math.isfinite(value) and (progress.best is None or value > progress.best)
        self._write("valid", weights=what, **look.numbers(), better=better, seconds=round(progress.seconds, 1))
        if better:
            progress.best, progress.best_step, progress.best_is = value, progress.step, what
            about = {"step": progress.step, "weights": what, **look.numbers()}
            self.writer.save(self.run.best, tensor_io.model_tensors(model), about)
        return look, better

    # -- remembering --------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if self.run.resume.exists():
            self.progress = checkpoint.load(self.run.resume, self.model, self.optimizer, self.ema)
            self.update.loss.fill_(self.progress.window_loss)
        self.progress = replace(self.progress, **self.facts)
        for name, log in self.logs.items():  # what came after the saved state will come again
            if not log.restore(self.progress.logs.get(name) if self.run.resume.exists() else log.mark()):
                self._say(f"warning: {log.path} was altered after it was written: its numbers may be wrong")

    def _save(self) -> None:
        self._tick()
        self.progress.window_loss = self.update.loss.item()
        self.progress.logs = {name: log.mark() for name, log in self.logs.items()}
        checkpoint.save(self.writer, self.run.resume, self.progress, self.model, self.optimizer, self.ema)
        self._saved = time.monotonic()

    def _snapshot(self) -> None:
        step = self.progress.step
        file, policy = self.run.snapshot(step), partial(self._prune, step)
        self.writer.save(file, tensor_io.model_tensors(self.model), {"step": step}, then=policy)

    def _prune(self, step: int) -> None:
        """Of the snapshots up to this step, those that the policy does not keep."""
        present = self.run.snapshots()
        kept = kept_snapshots([s for s in present if s <= step], self.settings.save_every, self.settings.average)
        for old, file in present.items():
            if old <= step and old not in kept:
                file.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Try the mean of the last snapshots, keep it if held-out pairs like it better, and close the run."""
        self.writer.wait()
        if self.progress.validated != self.progress.step:  # training.steps was lowered to a step already reached
            self._log()
            self._validate()
        last = self.run.averaged_snapshots(self.progress.step)
        average: Validation | None = None
        if last:
            with swapped_weights(self.model, tensor_io.mean(list(last.values()))):
                # no look of its own: patience does not count it
                average, _ = self._score(self.model, f"average of {len(last)}")
        if self.progress.limit(self.settings) == "training.patience":
            self._write("stop", looks=self.progress.validations_since_best, best_step=self.progress.best_step)
        self._ensure_weights()
        self.progress.finished = True
        self._save()
        self.writer.wait()
        self._ensure_held()
        self._say_what_was_kept(average)

    def _say_what_was_kept(self, average: Validation | None = None) -> None:
        """Say which weights are `model.safetensors`, and why; also of an average that lost."""
        kept = tensor_io.read_metadata(self.run.best)
        by = {"loss": "the lowest loss", "bleu": "the highest BLEU", "exact": "the most exact"}[self.settings.best]
        why = f"by {by} on the held-out data" if self.progress.best is not None else "as no validation was finite"
        self._say(f"kept as best: {which_weights(kept)} ({figures(kept, brief=True)}), {why}")
        if kept.get("step") == 0:
            whose = "that it started from" if self.run.origin is None else f"of {self.run.origin}"
            self._say(
                f"warning: training made nothing better: model.safetensors holds the weights {whose}; "
                "--weights last uses the trained ones"
            )
        if average is not None and not str(kept.get("weights")).startswith("average"):
            numbers = average.numbers()
            higher = numbers.get("bleu", 0) > kept.get("bleu", math.inf)
            why = f"; its BLEU is higher, but training.best = {self.settings.best!r} decides" if higher else ""
            count = len(self.run.averaged_snapshots(self.progress.step))
            self._say(
                f"not kept: the average of the last {count} snapshots ({figures(numbers, brief=True)}){why}; "
                "--weights average uses it"
            )

    def _ensure_weights(self) -> None:
        """Keep the last weights if no validation chose any, so that a finished run can always be used."""
        self.writer.wait()
        if not self.run.best.exists():
            what, tensors = (
                ("step", tensor_io.model_tensors(self.model)) if self.ema is None else ("ema", self.ema.tensors)
            )
            self.writer.save(self.run.best, tensors, {"step": self.progress.step, "weights": what})
            self.writer.wait()


@contextmanager
def swapped_weights(model: SequenceModel, tensors: tensor_io.Tensors) -> Iterator[None]:
    """The model with other weights for a while."""
    own = {name: tensor.clone() for name, tensor in tensor_io.model_tensors(model).items()}
    tensor_io.load_into_model(model, tensors, "the average")
    try:
        yield
    finally:
        tensor_io.load_into_model(model, own, "the model")
