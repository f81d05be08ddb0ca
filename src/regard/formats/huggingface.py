"""Hugging Face model directories: in as a run, and out again. A family's names and settings are in a file of its own.

What goes in and out again comes out as it went in, tensor for tensor and bit for bit: the tokenizer keeps which id of
theirs is which of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard import weights
from regard.errors import UserError
from regard.files import reason
from regard.formats import bert, folders, gpt2, marian, tables
from regard.formats.folders import Folder
from regard.runs import Run

if TYPE_CHECKING:
    from types import ModuleType

BY_TYPE: dict[str, ModuleType] = {"gpt2": gpt2, "bert": bert, "marian": marian}  # model_type of config.json
BY_FAMILY: dict[str, ModuleType] = {"gpt": gpt2, "bert": bert, "transformer": marian}  # model.family of a recipe


def import_folder(path: str | Path, out: str | Path) -> Run:
    """A run made of a Hugging Face directory: `import_folder("gpt2", "runs/gpt2")`."""
    folder = Folder(path)
    kind = folder.setting("model_type")
    if kind not in BY_TYPE:
        raise UserError(f"{folder.path}: model_type = {kind!r} has no counterpart here ({', '.join(BY_TYPE)} have)")
    family: Any = BY_TYPE[kind]
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    found = family.read(folder)
    about = f"imported from {folder.path.resolve().name} ({kind})" + ("; its head is new" if found.headless else "")
    recipe = found.recipe.model_copy(update={"about": about})
    table = family.entries(recipe, found.source, found.target)
    if found.headless:
        table = [entry for entry in table if not entry.ours.startswith("filler.")]
    tensors = family.renamed(folder.tensors(), folder)
    loaded = tables.to_ours(tensors, table, family.leftovers(recipe), folder.path)
    run = Run.create(out, recipe)
    run.save_tokenizers(found.source, found.target)
    model = run.fresh_model()
    if found.headless:
        loaded = {name: t for name, t in weights.of_model(model).items() if name.startswith("filler.")} | loaded
    with torch.no_grad():
        weights.into_model(model, loaded, folder.path)
    weights.save(run.best, weights.of_model(model), {"step": 0, "weights": "imported"})
    return run


def export_run(run: Run, path: str | Path) -> Path:
    """A Hugging Face directory made of a run: `export_run(Run("runs/en-es"), "en-es")`."""
    recipe, out = run.recipe, Path(path)
    if recipe.model.family not in BY_FAMILY:
        raise UserError(f"the {recipe.model.family} family has no counterpart among Hugging Face's models")
    family: Any = BY_FAMILY[recipe.model.family]
    source, target = run.tokenizers
    config, files = family.config(recipe, source, target), family.files(recipe, source, target)
    if not run.best.exists():
        raise UserError(f"{run.path} has no {run.best.name} yet: training has not reached its first validation")
    loaded, _ = weights.load(run.best)
    tensors = tables.to_theirs(loaded, family.entries(recipe, source, target), run.best)
    try:
        folders.write(out, tensors, config, files)
    except OSError as error:
        raise UserError(f"{out} could not be written: {reason(error)}") from error
    return out
