"""Hugging Face model directories: in as a run, and out again. A family's names and settings are in a file of its own.

What goes in and out again comes out as it went in, tensor for tensor and bit for bit: the tokenizer keeps which id of
theirs is which of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from regard import tensor_io
from regard.errors import UserError
from regard.files import errno_text
from regard.interop import bert, gpt2, hf_folder, marian, name_map
from regard.interop.common import Imported
from regard.interop.hf_folder import HFFolder, Stored, shown
from regard.models import build
from regard.run_dir import RunDir

if TYPE_CHECKING:
    from types import ModuleType

BY_TYPE: dict[str, ModuleType] = {"gpt2": gpt2, "bert": bert, "marian": marian}  # model_type of config.json
HEAD = "mlm_head."  # what the names of the head begin with that a body alone lacks
BY_FAMILY: dict[str, ModuleType] = {"gpt": gpt2, "bert": bert, "transformer": marian}  # model.family of a recipe


def import_folder(path: str | Path, out: str | Path) -> RunDir:
    """A run made of a Hugging Face directory: `import_folder("gpt2", "runs/gpt2")`."""
    folder = HFFolder(path)
    kind = folder.setting("model_type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        raise UserError(
            f"{folder.path}: model_type = {shown(kind)} has no counterpart here ({', '.join(BY_TYPE)} have)"
        )
    family: Any = BY_TYPE[kind]
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    header = family.canonical(folder.header)
    found = _read(folder, family, header)
    about = f"imported from {folder.path.resolve().name} ({kind})" + ("; its head is new" if found.headless else "")
    recipe = found.recipe.model_copy(update={"about": about})
    loaded = _load(folder, family, header, found)
    model = build(recipe.model, len(found.source), len(found.target), recipe.text.shared)
    if found.headless:
        loaded = {name: t for name, t in tensor_io.model_tensors(model).items() if name.startswith(HEAD)} | loaded
    with torch.no_grad():
        tensor_io.load_into_model(model, loaded, folder.path)
    run = RunDir.create(out, recipe)  # only now: what could fail is done
    run.save_tokenizers(found.source, found.target)
    tensor_io.save(run.best, tensor_io.model_tensors(model), {"step": 0, "weights": "imported"})
    return run


def _read(folder: HFFolder, family: Any, header: Mapping[str, Stored]) -> Imported:
    """What a folder says of its model; settings that ours cannot have are an error in one line."""
    try:
        found: Imported = family.read(folder, header)
        return found
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        said = fault["msg"].removeprefix("Value error, ")
        raise UserError(f"{folder.path / 'config.json'}: {where}: {said}") from error


def _load(folder: HFFolder, family: Any, header: Mapping[str, Stored], found: Imported) -> tensor_io.Tensors:
    """Our tensors, loaded from a folder once its header was compared with what the settings make of them."""
    recipe, given = found.recipe, family.defaults(found.target)
    table = family.entries(recipe, found.source, found.target)
    if found.headless:
        table = [entry for entry in table if not entry.ours.startswith(HEAD)]
    leftovers = family.leftovers(recipe)
    with torch.device("meta"):  # shapes alone
        model = build(recipe.model, len(found.source), len(found.target), recipe.text.shared)
        ours = {entry.ours for entry in table}
        shapes = {name: tensor for name, tensor in tensor_io.model_tensors(model).items() if name in ours}
        expected = name_map.to_theirs(shapes, table, leftovers, folder.path)
    absent = {name: Stored(folder.path, name, "F32", tuple(t.shape)) for name, t in given.items() if name not in header}
    name_map.check_header({**absent, **header}, table, leftovers, expected, folder.path)
    read = {name for entry in table for name in entry.sources()} | leftovers.copies.keys()
    stored = {name: header[name] for name in read if name in header}
    raw = folder.load(stored.values())
    tensors = {**given, **{name: raw[one.name] for name, one in stored.items()}}
    return name_map.to_ours(tensors, table, leftovers, folder.path)


def export_run(run: RunDir, path: str | Path) -> Path:
    """A Hugging Face directory made of a run: `export_run(Run("runs/en-es"), "en-es")`."""
    recipe, out = run.recipe, Path(path)
    if recipe.model.family not in BY_FAMILY:
        raise UserError(f"the {recipe.model.family} family has no counterpart among Hugging Face's models")
    family: Any = BY_FAMILY[recipe.model.family]
    source, target = run.tokenizers
    if obstacles := family.lacks(recipe, source, target):
        raise UserError("; ".join(obstacles))
    config, files = family.config(recipe, source, target), family.files(recipe, source, target)
    if not run.best.exists():
        raise UserError(f"{run.path} has no {run.best.name} yet: training has not reached its first validation")
    loaded, _ = tensor_io.load(run.best)
    tensors = name_map.to_theirs(loaded, family.entries(recipe, source, target), family.leftovers(recipe), run.best)
    try:
        hf_folder.write(out, tensors, config, files)
    except OSError as error:
        raise UserError(f"{out} could not be written: {errno_text(error)}") from error
    return out
