"""Import Hugging Face model directories as runs, and export runs; each model type has a module of its own.

A model that is imported and exported again is unchanged, bit for bit: the tokenizer keeps the mapping of the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from regard import tensor_io
from regard.errors import UserError
from regard.files import errno_text
from regard.interop import bert, gpt2, gpt_neox, hf_folder, marian, name_map, pegasus
from regard.interop.common import Imported
from regard.interop.hf_folder import Files, HFFolder, TensorInfo, short_repr
from regard.interop.name_map import Entry, IgnoredTensors
from regard.recipes.schema import Recipe
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.tensor_io import Tensors
from regard.text import Tokenizer


class Converter(Protocol):
    """What the module of a model type defines."""

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        """Convert config.json and the tokenizer's files to a recipe and tokenizers."""

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors of a file by the names in the table."""

    def entries(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
        """The table of tensor names."""

    def ignored(self, recipe: Recipe) -> IgnoredTensors:
        """Tensors of a file that are not converted."""

    def defaults(self, target: Tokenizer) -> Tensors:
        """Tensors that a file may lack, with the values that they have then."""

    def constants(self, recipe: Recipe) -> Tensors:
        """Tensors that transformers stores and our model computes."""

    def unsupported(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
        """The settings of a run that this model type cannot express."""

    def config(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
        """The content of config.json."""

    def files(self, recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
        """All files except the weights and config.json."""


BY_TYPE: dict[str, Converter] = {  # by model_type of config.json
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "bert": bert,
    "marian": marian,
    "pegasus": pegasus,
}
BY_FAMILY: dict[str, list[Converter]] = {  # by model.family of a recipe
    "gpt": [gpt2, gpt_neox],
    "bert": [bert],
    "transformer": [marian, pegasus],
}
HEAD = "mlm_head."  # prefix of the tensors of our head, which a saved body lacks


def import_folder(path: str | Path, out: str | Path) -> RunDir:
    """Convert a Hugging Face directory to a run: `import_folder("gpt2", "runs/gpt2")`."""
    folder = HFFolder(path)
    kind = folder.setting("model_type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        raise UserError(
            f"{folder.path}: model_type = {short_repr(kind)} has no counterpart here ({', '.join(BY_TYPE)} have)"
        )
    converter = BY_TYPE[kind]
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    header = converter.canonical(folder.header)
    imported = _read(folder, converter, header)
    about = f"imported from {folder.path.resolve().name} ({kind})" + ("; its head is new" if imported.headless else "")
    recipe = imported.recipe.model_copy(update={"about": about})
    loaded = _load(folder, converter, header, imported)
    model = imported.build()
    if imported.headless:
        loaded = {name: t for name, t in tensor_io.model_tensors(model).items() if name.startswith(HEAD)} | loaded
    with torch.no_grad():
        tensor_io.load_into_model(model, loaded, folder.path)
    run = RunDir.create(out, recipe)  # last, so that a failed import leaves nothing behind
    run.save_tokenizers(imported.source, imported.target)
    if imported.classes:
        run.save_classes(imported.classes)
    tensor_io.save(run.best, tensor_io.model_tensors(model), {"step": 0, "weights": "imported"})
    return run


def _read(folder: HFFolder, converter: Converter, header: Mapping[str, TensorInfo]) -> Imported:
    """Read the settings of a folder; those that a recipe refuses are an error in one line."""
    try:
        return converter.read(folder, header)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        raise UserError(f"{folder.path / 'config.json'}: {where}: {message}") from error


def _load(
    folder: HFFolder, converter: Converter, header: Mapping[str, TensorInfo], imported: Imported
) -> tensor_io.Tensors:
    """Load our tensors from a folder, after comparing its header with the shapes that the settings imply."""
    recipe, defaults = imported.recipe, converter.defaults(imported.target)
    table = converter.entries(recipe, imported.source, imported.target)
    if imported.headless:
        table = [entry for entry in table if not entry.ours.startswith(HEAD)]
    ignored = converter.ignored(recipe)
    with torch.device("meta"):  # shapes only
        model = imported.build()
        ours = {entry.ours for entry in table}
        shapes = {name: tensor for name, tensor in tensor_io.model_tensors(model).items() if name in ours}
        expected = name_map.to_theirs(shapes, table, ignored, folder.path)
    missing = {
        name: TensorInfo(folder.path, name, "F32", tuple(tensor.shape))
        for name, tensor in defaults.items()
        if name not in header
    }
    name_map.check_header({**missing, **header}, table, ignored, expected, folder.path)
    constants = converter.constants(recipe)
    names = {name for entry in table for name in entry.sources()} | ignored.copies.keys() | constants.keys()
    present = {name: header[name] for name in names if name in header}
    raw = folder.load(present.values())
    tensors = {**defaults, **{name: raw[info.name] for name, info in present.items()}}
    for name, constant in constants.items():
        stored = tensors.pop(name, constant).float()
        if stored.shape != constant.shape or not torch.allclose(stored, constant, atol=1e-2):  # also half precision
            raise UserError(f"{folder.path}: {name} is not the table that config.json implies")
    return name_map.to_ours(tensors, table, ignored, folder.path)


@EXPORTERS.register("huggingface")
def export_run(run: RunDir, path: str | Path) -> Path:
    """Write a model directory for transformers.

    >>> export_run(RunDir("runs/en-es"), "en-es")  # doctest: +SKIP
    """
    recipe, out = run.recipe, Path(path)
    if recipe.model.family not in BY_FAMILY:
        raise UserError(f"the {recipe.model.family} family has no counterpart among Hugging Face's models")
    source, target = run.tokenizers
    converters = BY_FAMILY[recipe.model.family]
    problems = {number: c.unsupported(recipe, source, target) for number, c in enumerate(converters)}
    closest = min(problems, key=lambda number: len(problems[number]))
    if problems[closest]:
        raise UserError("; ".join(problems[closest]))
    converter = converters[closest]
    config, files = converter.config(recipe, source, target), converter.files(recipe, source, target)
    if run.classes:
        config["id2label"] = {str(number): name for number, name in enumerate(run.classes)}
        config["label2id"] = {name: number for number, name in enumerate(run.classes)}
    if not run.best.exists():
        raise UserError(f"{run.path} has no {run.best.name} yet: training has not reached its first validation")
    loaded, _ = tensor_io.load(run.best)
    table, ignored = converter.entries(recipe, source, target), converter.ignored(recipe)
    tensors = name_map.to_theirs(loaded, table, ignored, run.best) | converter.constants(recipe)
    try:
        hf_folder.write(out, tensors, config, files)
    except OSError as error:
        raise UserError(f"{out} could not be written: {errno_text(error)}") from error
    return out
