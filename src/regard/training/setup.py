"""Setting a run up, or taking it up again, and training it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from regard import accelerate, devices, tensor_io
from regard.data.corpora import TextPair, corpora, detected_layouts, files, held_out, locate
from regard.data.masking import MaskedBatches, MaskingPolicy
from regard.data.packing import BatchStream, ClassLabelsOnly, Packer, PlannedBatches, TokenWindows, fill_ratio
from regard.data.token_cache import TokenStore, build
from regard.errors import UserError
from regard.files import DirectoryLock, remove_temporary_files
from regard.models import SequenceModel, sizes
from regard.recipes import differences
from regard.recipes.schema import BertSettings, DataSettings, Recipe, TrainingSettings
from regard.recipes.to_toml import shown
from regard.resuming import may_change
from regard.run_dir import RunDir
from regard.text import Tokenizer
from regard.training import origin as origins
from regard.training.checkpoint import TrainingProgress
from regard.training.loop import Trainer
from regard.training.progress import Reporter, pick
from regard.training.static_batch import StaticBatchShape
from regard.training.validation import make_validator


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    start_from: str | Path | None = None,
    quiet: bool = False,
) -> RunDir:
    """Train a recipe into a run directory; the same call again resumes from the exact batch.

    `start_from` is another run whose weights (and tokenizers) this one begins with. It is written down, so that a run
    that ended before its first save begins with it again.
    """
    reporter = pick(quiet)
    reporter.members = _members(recipe)
    where, out = devices.pick(device), Path(out)
    given = RunDir(start_from) if start_from is not None else None
    _check_files(recipe.data, resumed=(Path(out) / "resume.safetensors").exists())
    for line in detected_layouts(recipe.data):
        reporter.say(line)
    watched = held_out(recipe.data, "valid")
    _refuse_too_large(recipe, (0, 0), where)  # the vocabularies are not known yet
    RunDir.refuse_other_folder(out)
    with DirectoryLock(out, "training") as lock:  # nothing is written before, and nobody else writes until the end
        return _train(recipe, lock, where, given, watched, reporter)


def _train(
    recipe: Recipe,
    lock: DirectoryLock,
    where: torch.device,
    given: RunDir | None,
    watched: list[TextPair],
    reporter: Reporter,
) -> RunDir:
    """Train in a directory that is locked."""
    run = _open(recipe, lock.folder, None if given is None else given.path, reporter)
    origin = _origin(run, given, reporter)
    settings = run.recipe.training
    if not run.has_tokenizers():
        run.save_tokenizers(*origins.tokenizers(recipe, origin, reporter))
    torch.manual_seed(settings.seed)
    _refuse_too_large(recipe, (len(run.tokenizers[0]), len(run.tokenizers[1])), where)
    model = run.fresh_model()
    started = None  # the run whose weights are validated before the first update
    if origin is not None:  # what does not fit is said before the long work
        origins.warn_of_old_held_out(recipe, origin, reporter)
        started = origin.path if origins.begin_with(origin, run, model, reporter) else None
    stores = build(recipe, *run.tokenizers, progress=reporter.counted, say=reporter.say)
    how, static = plan_updates(run, model, where)
    facts = {"static": static, "data": "".join(store.digest for store in stores), "held_out": _digest(watched)}
    _refuse_other_data(run, facts)
    packer, batches = streams(recipe, stores, static, run.tokenizers[0])
    model = model.to(where)
    _say_what(reporter, run, model, stores, packer, where, static)
    looks = make_validator(recipe, run.tokenizers, watched, where)
    if _trained(run):
        how = "plain"  # nothing is to be compiled for no update
    _, shape = choose_backend(how, packer, batches, model, settings, where, reporter.say)
    with devices.held_memory(where):
        Trainer(run, model, batches, looks, reporter, where, shape, facts, started, lock).train()
    return run


def _refuse_too_large(recipe: Recipe, vocabularies: tuple[int, int], device: torch.device) -> None:
    """Refuse a model that cannot be trained in the memory of a device."""
    copies = 3 if recipe.training.optimizer == "muon" else 4  # weights, gradients, and one moment or two
    memory = devices.memory(device)
    sizes.refuse_too_large(recipe.model, vocabularies, recipe.text.shared, memory, copies, "the recipe")


def plan_updates(run: RunDir, model: SequenceModel, device: torch.device) -> tuple[str, bool]:
    """How updates are made, and whether batches are static.

    Captured updates want static batches. But a run that has begun goes on with the batches it began with: plain updates
    take any, and others are not made for it where they are not static.
    """
    how = accelerate.requested_backend(run.recipe.training, model, device)
    if not run.resume.exists():
        return how, how != "plain"
    static = bool(tensor_io.read_metadata(run.resume).get("static", False))
    return how if static else "plain", static


def _trained(run: RunDir) -> bool:
    """Whether there is nothing left to do."""
    if not run.resume.exists():
        return False
    progress = TrainingProgress.read(run.resume)
    return progress.finished and progress.limit(run.recipe.training) != ""


def _open(recipe: Recipe, out: Path, origin: Path | None, reporter: Reporter) -> RunDir:
    """A new run, or the one that is there if it has the same recipe but for what may change, and the same origin."""
    for folder in (out, out / "snapshots"):
        remove_temporary_files(folder)
    if not RunDir.exists(out):
        return RunDir.create(out, recipe, origin)
    run = RunDir(out)
    edited, changed = run.edits(), differences(run.accepted, recipe)
    elsewhere = origin is not None and not run.began_with(origin)
    if (changed or elsewhere) and not _has_learnt(run):  # start over
        run.forget_tokenizers()
        run.best.unlink(missing_ok=True)
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
    """Whether a run has saved more than the weights that it was given to start from."""
    saved = set(run.path.rglob("*.safetensors"))
    return bool(saved) and (saved != {run.best} or tensor_io.read_metadata(run.best).get("step") != 0)


def _check_files(data: DataSettings, resumed: bool) -> None:
    """Complain of missing files before the long work. A run that was moved may go on without its test set."""
    for corpus in corpora(data):
        files(corpus, data)
    for name in [] if resumed else data.test or []:
        try:
            locate(name, data.folder)
        except UserError as error:
            raise UserError(f"data.test: {error}; data.test = [] trains without a test set") from error


def _origin(run: RunDir, given: RunDir | None, reporter: Reporter) -> RunDir | None:
    """The run to begin with, also where it was only said the first time; none once there is a state to go on from."""
    if run.resume.exists():
        return None
    if given is None and run.origin is not None:
        reporter.say(f"beginning with {run.origin}, as the first time")
        return RunDir(run.origin)
    return given


def _refuse_another(changed: dict[str, tuple[Any, Any]], out: Path) -> None:
    """Complain of the differences that make it another run."""
    others = [
        f"{key} was {shown(old)} and is now {shown(new)}" for key, (old, new) in changed.items() if not may_change(key)
    ]
    if others:
        raise UserError(
            f"{out} was made by another recipe: {'; '.join(others)}: choose another --out "
            "(regard train --help lists what may change)"
        )


def _refuse_other_data(run: RunDir, facts: dict[str, Any]) -> None:
    """Complain if files have changed since the run began: it would go on with other batches, from the same place."""
    known = tensor_io.read_metadata(run.resume) if run.resume.exists() else {}
    for key, what in (("data", "training data are"), ("held_out", "held-out data are")):
        if known.get(key, "") not in ("", facts[key]):
            raise UserError(
                f"the {what} no longer those that {run.path} was trained with: put them back, or choose another --out "
                f"(--from {run.path} begins with its weights)"
            )


def _digest(pairs: list[TextPair]) -> str:
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()


def choose_backend(
    how: str,
    packer: PlannedBatches,
    batches: BatchStream,
    model: SequenceModel,
    settings: TrainingSettings,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[str, StaticBatchShape[Any] | None]:
    """Prepare the model; the backend of its updates, and the shape of the batches of those that are not plain."""
    if how == "plain":
        return accelerate.for_training(model, settings, device, say=say), None
    first = batches.batch_at(0)
    shape = StaticBatchShape(first)
    how = accelerate.for_training(model, settings, device, how, shape.unflatten(shape.flatten(first).to(device)), say)
    return how, None if how == "plain" else shape


def streams(
    recipe: Recipe, stores: list[TokenStore], static: bool, tokenizer: Tokenizer
) -> tuple[PlannedBatches, BatchStream]:
    """What is packed, and what is trained on: the same, unless there are gaps to be made in it, or classes to name."""
    packer = _packer(recipe, stores, static)
    if recipe.classifies:
        return packer, ClassLabelsOnly(packer)
    if not (recipe.data.is_text and isinstance(recipe.model, BertSettings)):
        return packer, packer
    return packer, MaskedBatches(packer, recipe.training.seed, MaskingPolicy.of(tokenizer, recipe.model.mask_prob))


def _packer(recipe: Recipe, stores: list[TokenStore], static: bool) -> PlannedBatches:
    weights, settings = [corpus.weight for corpus in corpora(recipe.data)], recipe.training
    if recipe.data.is_text and recipe.data.documents == "stream":
        context = recipe.model.max_positions
        return TokenWindows(stores, weights, context=context, batch_tokens=settings.batch_tokens, seed=settings.seed)
    return Packer(
        stores,
        weights,
        target_budget=settings.batch_tokens,
        seed=settings.seed,
        pool=settings.sort_buffer,
        static=static,
    )


def _members(recipe: Recipe) -> str:
    """What the data are made of."""
    if not recipe.data.is_text:
        return "pairs"
    return "lines" if recipe.data.documents == "stream" else "documents"


def _say_what(
    reporter: Reporter,
    run: RunDir,
    model: SequenceModel,
    stores: list[TokenStore],
    packer: PlannedBatches,
    device: torch.device,
    static: bool,
) -> None:
    """The facts of a run, before it starts. Static batches have no padded view."""
    shares = fill_ratio(packer.batch_at(0))
    padded = shares.pop("padded")
    source, target = run.tokenizers
    sizes = f"{len(source):,}" if source is target else f"{len(source):,} and {len(target):,}"
    count = sum(p.numel() for p in model.parameters())
    reporter.say(f"data: {_what_data(reporter.members, stores, packer)}; vocabulary {sizes}")
    rows = f"{packer.target_budget:,} target and {packer.source_budget:,} source tokens"
    used = " and ".join(f"{100 * shares[side]:.0f} %" for side in ("target", "source") if side in shares)
    padding = "" if static else f"; {100 - 100 * padded:.0f} % of the positions in attention are padding"
    reporter.say(
        f"batches: up to {rows if packer.source_budget else f'{packer.target_budget:,} tokens'} "
        f"(the first one is {used} full{padding})"
    )
    reporter.say(f"model: {run.recipe.model.family}, {count:,} parameters, on {device}; run directory {run.path}")
    settings = run.recipe.training
    if settings.steps <= settings.warmup:
        reporter.say(
            f"warning: the learning rate rises to the last of {settings.steps:,} steps and never falls: "
            f"training.warmup is {settings.warmup:,}"
        )


def _what_data(members: str, stores: list[TokenStore], packer: PlannedBatches) -> str:
    """How much there is to train on, and what was left out."""
    facts = {name: sum(getattr(store.report, name) for store in stores) for name in asdict(stores[0].report)}
    empty, long = facts["dropped_empty"], facts["dropped_long"] + packer.dropped_long
    if members == "pairs":
        dropped = f"{empty:,} empty and {long:,} over-long pairs dropped" if empty or long else "none dropped"
        return f"{facts['pairs'] - packer.dropped_long:,} pairs, {dropped}"
    cut = members == "documents" and facts["pairs"] > facts["documents"]
    pieces = f" in {facts['pairs']:,} pieces" if cut else ""
    return f"{facts['documents']:,} {members}{pieces}, {_rounded(facts['target_tokens'])} tokens"


def _rounded(count: int) -> str:
    """
    >>> _rounded(2_100_400), _rounded(12_345)
    ('2.1 million', '12,345')
    """
    return f"{count / 1e6:,.1f} million" if count >= 1_000_000 else f"{count:,}"
