"""Set up a run, or resume it, and train it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from regard import accelerate, devices, distributed, tasks, tensor_io
from regard.data.stream import BatchStream
from regard.errors import UserError
from regard.files import DirectoryLock, remove_temporary_files
from regard.models import SequenceModel, sizes
from regard.recipes import differences
from regard.recipes.load import with_changes
from regard.recipes.schema import Recipe, TrainingSettings
from regard.recipes.to_toml import shown
from regard.resuming import may_change
from regard.run_dir import RunDir
from regard.tasks import Task
from regard.tasks.text import LINKS_FILE
from regard.text import chat
from regard.training import origin as origins
from regard.training.attention_links import write_attention_links
from regard.training.checkpoint import TrainingProgress
from regard.training.loop import Trainer
from regard.training.progress import Reporter, pick
from regard.training.static_batch import StaticBatchShape

Fits = Callable[[Recipe, torch.device, int], bool]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    start_from: str | Path | None = None,
    quiet: bool = False,
    fits: Fits | None = None,
) -> RunDir:
    """Train a recipe into a run directory; the same call again resumes from the exact batch.

    `start_from` is another run whose weights (and tokenizers) this one begins with. It is written down, so that a run
    that ended before its first save begins with it again. Processes that torchrun started train one model together;
    `fits` returns whether each of them can hold all of it (`planning.fits`), which decides where `training.parallel` is
    "auto".
    """
    local_device, out = distributed.local_device(devices.pick(device)), Path(out)
    with distributed.joined(local_device, recipe.training.timeout), distributed.lost_process_named():
        recipe = _choose_parallel(recipe, local_device, fits)
        reporter, task = pick(quiet or not distributed.is_main()), tasks.of(recipe)
        reporter.members, reporter.targets = task.members, task.targets
        with distributed.main_first():
            given = RunDir(start_from) if start_from is not None else None
            for line in task.check_files(resumed=(out / "resume.safetensors").exists()):
                reporter.say(line)
            held_out = task.held_out("valid")
            _refuse_too_large(recipe, (0, 0), local_device)  # the vocabularies are not known yet
            RunDir.refuse_other_folder(out)
        with distributed.main_first():  # the lock is the job's: its other processes are admitted
            lock = DirectoryLock(out, "training", exclusive=distributed.is_main())
        with lock:  # nothing is written before
            return _train(task, lock, local_device, given, held_out, reporter)


def _train(
    task: Task,
    lock: DirectoryLock,
    device: torch.device,
    given: RunDir | None,
    held_out: Sequence[Any],
    reporter: Reporter,
) -> RunDir:
    """Train in a directory that is locked."""
    recipe = task.recipe
    with distributed.main_first():
        run = _open(recipe, lock.folder, None if given is None else given.path, reporter)
        origin = _origin(run, given, reporter)
        if not run.classes and (names := task.class_names()):
            run.save_classes(origins.class_order(names, origin))
        if not run.features and (names := task.feature_names()):
            run.save_features(names)
        if not run.scales and (scales := task.scales()):
            run.save_scales(scales)
        if not run.has_tokenizers():
            if origin is not None and origin.recipe.text.shared == recipe.text.shared:  # else one is newly trained
                chat.copy(origin.path, run.path)
            run.save_tokenizers(*origins.tokenizers(recipe, origin, reporter))
    settings = run.recipe.training
    if settings.adapter != "none" and origin is None and not run.resume.exists():
        raise UserError('training.adapter = "lora" adapts the weights of another run: name it with --from')
    torch.manual_seed(settings.seed)
    _refuse_too_large(recipe, run.vocabulary_sizes, device)
    model = run.fresh_model()
    started = None  # the run whose weights are validated before the first update
    if origin is not None:  # report a misfit before the long work
        origins.warn_of_old_held_out(recipe, origin, reporter)
        try:
            started = origin.path if origins.load_origin(origin, run, model, reporter) else None
        except UserError:
            if given is not None and distributed.is_main() and not _has_learnt(run):
                _forget_origin(run)
            raise
    with distributed.main_first():
        write_attention_links(run, origin, device, reporter)
        dataset = task.dataset(run, progress=reporter.counted, say=reporter.say)
    backend, static = plan_updates(run, model, device)
    identity = {"static": static, "data": dataset.digest, "held_out": task.digest(held_out)}
    _refuse_other_data(run, identity)
    batches = task.stream(run, dataset, static)
    if not accelerate.shards(settings):  # else each block moves to the device when it is sharded
        model = model.to(device)
    for line in task.describe(run, dataset, static):
        reporter.say(line)
    _describe_model(reporter, run, model, device)
    validator = task.validator(run, held_out, device)
    if _trained(run):
        backend = "plain"  # without updates there is nothing to compile
    backend, shape = choose_backend(backend, batches, model, settings, device, reporter.say)
    parallel = accelerate.data_parallel(model, settings, device, backend)
    with devices.held_memory(device):
        Trainer(run, model, batches, validator, reporter, device, shape, identity, started, lock, parallel).train()
    return run


def _choose_parallel(recipe: Recipe, device: torch.device, fits: Fits | None) -> Recipe:
    """Choose how several processes share the model, where the recipe leaves it open: by ddp, if it fits on a device."""
    ranks = distributed.world_size()
    if recipe.training.parallel != "auto" or ranks == 1:
        return recipe
    whole = not distributed.is_main() or _whole_model_fits(recipe, device, ranks, fits)
    choice = distributed.broadcast("ddp" if whole else "fsdp", patient=True)  # planning takes some seconds
    return with_changes(recipe, [f"training.parallel={choice}"])


def _whole_model_fits(recipe: Recipe, device: torch.device, ranks: int, fits: Fits | None) -> bool:
    try:
        _refuse_too_large(recipe, (0, 0), device)
    except UserError:  # the weights alone are too large
        return False
    try:
        return fits is None or fits(recipe, device, ranks)
    except Exception:  # a task that cannot be planned can still be trained
        return True


def _refuse_too_large(recipe: Recipe, vocabularies: tuple[int, int], device: torch.device) -> None:
    """Refuse a model that cannot be trained in the memory of a device."""
    copies = 3 if recipe.training.optimizer == "muon" else 4  # weights, gradients, and one moment or two
    memory = devices.memory(device) * (distributed.world_size() if accelerate.shards(recipe.training) else 1)
    sizes.refuse_too_large(recipe.model, vocabularies, recipe.text.shared, memory, copies, "the recipe")


def plan_updates(run: RunDir, model: SequenceModel, device: torch.device) -> tuple[str, bool]:
    """The backend of updates, and whether batches are static.

    Captured and compiled updates need static batches. A run that is resumed keeps the kind of batches it began with;
    where these are not static, its updates are plain.
    """
    backend = accelerate.requested_backend(run.recipe.training, model, device)
    if not run.resume.exists():
        return backend, backend != "plain"
    static = bool(tensor_io.read_metadata(run.resume).get("static", False))
    return backend if static else "plain", static


def _trained(run: RunDir) -> bool:
    """Whether training has already finished."""
    if not run.resume.exists():
        return False
    progress = TrainingProgress.read(run.resume)
    return progress.finished and progress.limit(run.recipe.training) != ""


def _open(recipe: Recipe, out: Path, origin: Path | None, reporter: Reporter) -> RunDir:
    """Create a run, or open the existing one if its recipe (except for what may change) and its origin are the same."""
    for folder in (out, out / "snapshots") if distributed.is_main() else ():
        remove_temporary_files(folder)
    if not RunDir.exists(out):
        return RunDir.create(out, recipe, origin)
    run = RunDir(out)
    edited, changed = run.edits(), differences(run.accepted, recipe)
    elsewhere = origin is not None and not run.started_from(origin)
    if (changed or elsewhere) and not _has_learnt(run):  # start over
        run.remove_tokenizers()
        for file in (run.best, out / LINKS_FILE, out / chat.FILE):
            file.unlink(missing_ok=True)
        tensor_io.remove_shards(run.best)
    else:
        _refuse_another(changed, out)
        if elsewhere:
            began = f"with {run.origin}" if run.origin is not None else "with fresh weights"
            raise UserError(f"{out} began {began}, not with {origin}: choose another --out, or leave --from out")
    if edited:
        file, keys = out / "recipe.toml", ", ".join(edited)
        reporter.say(f"warning: {file} was edited ({keys}); it is written again as the recipe given says")
    run.record(recipe)
    if origin is not None and elsewhere:
        run.change_origin(origin)
    return run


def _has_learnt(run: RunDir) -> bool:
    """Whether a run has saved more than the weights that it started from."""
    saved = {*run.path.glob("*.safetensors"), *run.snapshots().values()}  # large ones name shards in folders
    return bool(saved) and (saved != {run.best} or tensor_io.read_metadata(run.best).get("step") != 0)


def _origin(run: RunDir, given: RunDir | None, reporter: Reporter) -> RunDir | None:
    """The run whose weights to begin with, which the first call may have named; None once there is a resume state."""
    if run.resume.exists():
        return None
    if given is None and run.origin is not None:
        reporter.say(f"beginning with {run.origin}, as the first time")
        return RunDir(run.origin)
    return given


def _forget_origin(run: RunDir) -> None:
    """Remove what a run took from another one that it cannot begin with: the next call may not name it."""
    run.remove_tokenizers()
    (run.path / chat.FILE).unlink(missing_ok=True)
    run.change_origin(None)


def _refuse_another(changed: dict[str, tuple[Any, Any]], out: Path) -> None:
    """Raise a UserError for settings that a resumed run may not change."""
    others = [
        f"{key} was {shown(old)} and is now {shown(new)}" for key, (old, new) in changed.items() if not may_change(key)
    ]
    if others:
        raise UserError(
            f"{out} was made by another recipe: {'; '.join(others)}: choose another --out "
            "(regard train --help lists what may change)"
        )


def _refuse_other_data(run: RunDir, identity: dict[str, Any]) -> None:
    """Raise a UserError if the data have changed since the run began: its next batches would be other ones."""
    known = tensor_io.read_metadata(run.resume) if run.resume.exists() else {}
    for key, what in (("data", "training data are"), ("held_out", "held-out data are")):
        if known.get(key, "") not in ("", identity[key]):
            raise UserError(
                f"the {what} no longer those that {run.path} was trained with: put them back, or choose another --out "
                f"(--from {run.path} begins with its weights)"
            )


def choose_backend(
    backend: str,
    batches: BatchStream,
    model: SequenceModel,
    settings: TrainingSettings,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[str, StaticBatchShape[Any] | None]:
    """Prepare the model; return the backend of its updates and, unless it is plain, the shape of all batches."""
    if backend == "plain":
        return accelerate.for_training(model, settings, device, say=say), None
    first = batches.batch_at(0)
    shape = StaticBatchShape(first)
    example = shape.unflatten(shape.flatten(first).to(device))
    backend = accelerate.for_training(model, settings, device, backend, example, say)
    return backend, None if backend == "plain" else shape


def _describe_model(reporter: Reporter, run: RunDir, model: SequenceModel, device: torch.device) -> None:
    """Report the model, and settings that are probably a mistake, before training starts."""
    count = sum(p.numel() for p in model.parameters())
    reporter.say(f"model: {run.recipe.model.summary()}, {count:,} parameters, on {device}; run directory {run.path}")
    settings, world = run.recipe.training, distributed.world_size()
    if settings.accumulate % world:
        reporter.say(
            f"warning: {world} devices share training.accumulate = {settings.accumulate} micro-batches a step, so that "
            f"some wait for others: set it to a multiple of {world} (and training.batch_tokens accordingly)"
        )
    if settings.steps <= settings.warmup:
        reporter.say(
            f"warning: the learning rate rises to the last of {settings.steps:,} steps and never falls: "
            f"training.warmup is {settings.warmup:,}"
        )
