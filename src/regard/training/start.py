"""Setting a run up, or taking it up again, and training it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard import devices, weights
from regard.data.packing import Packer, fill
from regard.data.sources import corpora, files, held_out
from regard.data.store import TokenStore, build, learn_tokenizers
from regard.errors import UserError
from regard.files import alone
from regard.models import Translator
from regard.recipes import differences
from regard.recipes.schema import Recipe
from regard.runs import Run
from regard.training.loop import Trainer
from regard.training.report import Reporter, pick
from regard.training.validation import Validator

# What the same run may have changed when it is taken up again; anything else would make it another run.
MAY_CHANGE = {
    "about",
    "training.steps",
    "training.validate_every",
    "training.validate_lines",
    "training.save_every",
    "training.patience",
    "training.precision",
    "training.tensorboard",
}


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    start_from: str | Path | None = None,
    quiet: bool = False,
) -> Run:
    """Train a recipe into a run directory; the same call again resumes from the exact batch.

    `start_from` is another run whose weights (and tokenizers) this one begins with.
    """
    reporter = pick(quiet)
    where = devices.pick(device)
    origin = Run(start_from) if start_from is not None else None
    for corpus in corpora(recipe.data):  # what is not there is said before the long work
        files(corpus, recipe.data)
    watched = held_out(recipe.data, "valid")
    run = _open(recipe, Path(out))
    settings = run.recipe.training
    if not run.has_tokenizers():
        if origin is None:
            reporter.say("learning the vocabulary")
            run.save_tokenizers(*learn_tokenizers(recipe))
        else:
            run.save_tokenizers(*origin.tokenizers)
    stores = build(recipe, *run.tokenizers, progress=reporter.counted)
    packer = _pack(recipe, stores, static=where.type == "cuda")
    torch.manual_seed(settings.seed)
    model = run.fresh_model().to(where)
    if origin is not None:
        model.begin_with(weights.load(origin.best)[0], origin.best)
    model.checkpoint_activations = settings.checkpoint_activations
    _say_what(reporter, run, model, stores, packer, where)
    validator = Validator(recipe, run.tokenizers, watched, where)
    with alone(run.path, "training"):
        Trainer(run, model, packer, validator, reporter, where).train()
    return run


def _open(recipe: Recipe, out: Path) -> Run:
    """A new run, or the one that is there if it has the same recipe but for what may change."""
    if not Run.exists(out):
        return Run.create(out, recipe)
    with alone(out, "training"):
        run = Run(out)
        changed = differences(run.recipe, recipe)
        if changed and not any(out.rglob("*.safetensors")):  # it failed before it had learnt anything: start over
            for file in out.glob("*tokenizer.json"):
                file.unlink()
        else:
            _refuse_another(changed, out)
        if changed:
            run.change_recipe(recipe)
    return run


def _refuse_another(changed: dict[str, tuple[Any, Any]], out: Path) -> None:
    """Complain of the first difference that makes it another run."""
    for key, (old, new) in changed.items():
        if key not in MAY_CHANGE and not key.startswith("decoding."):
            raise UserError(
                f"{out} was made by another recipe: {key} was {old!r} and is now {new!r}; "
                "choose another --out (regard train --help lists what may change)"
            )


def _pack(recipe: Recipe, stores: list[TokenStore], static: bool) -> Packer:
    return Packer(
        stores,
        [corpus.weight for corpus in corpora(recipe.data)],
        target_budget=recipe.training.batch_tokens,
        seed=recipe.training.seed,
        pool=recipe.training.pool,
        static=static,
    )


def _say_what(
    reporter: Reporter, run: Run, model: Translator, stores: list[TokenStore], packer: Packer, device: torch.device
) -> None:
    """The facts of a run, before it starts."""
    kept, empty, long = (
        sum(getattr(store.report, name) for store in stores) for name in ("pairs", "dropped_empty", "dropped_long")
    )
    kept, long = kept - packer.dropped_long, long + packer.dropped_long  # too long for a batch is too long
    dropped = f"{empty:,} empty and {long:,} over-long pairs dropped" if empty or long else "none dropped"
    full = fill(packer.batch_at(0))
    source, target = run.tokenizers
    sizes = f"{len(source):,}" if source is target else f"{len(source):,} and {len(target):,}"
    count = sum(p.numel() for p in model.parameters())
    reporter.say(f"data: {kept:,} pairs, {dropped}; vocabulary {sizes}")
    reporter.say(
        f"batches: {packer.target_budget:,} target and {packer.source_budget:,} source tokens; of the first, "
        + ", ".join(f"{name} {value:.0%} full" for name, value in full.items())
    )
    reporter.say(f"model: {run.recipe.model.family}, {count:,} parameters, on {device}; run directory {run.path}")
