"""Import Hugging Face model directories as runs, and export runs; each model type has a module of its own.

A model that is imported and exported again is unchanged, bit for bit: the tokenizer keeps the mapping of the ids.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from regard import tensor_io
from regard.errors import UserError
from regard.files import errno_text, write_text
from regard.interop import bert, decoder_exports, gpt2, gpt_neox, hf_folder, marian, name_map, pegasus, vit, whisper
from regard.interop.common import Imported
from regard.interop.decoders import DECODERS
from regard.interop.encoders import ENCODERS
from regard.interop.hf_folder import Files, HFFolder, TensorInfo, short_repr
from regard.interop.name_map import Entry, IgnoredTensors, TensorMap
from regard.interop.t5 import T5
from regard.interop.translators import TRANSLATORS
from regard.nn import lora
from regard.recipes.schema import Recipe
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.tensor_io import Tensors
from regard.text import Tokenizer, chat


class Importer(Protocol):
    """Reads a model type."""

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        """Convert config.json and the tokenizer's files to a recipe and tokenizers, with a map of the tensors."""

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors of a file by the names in the table."""


class Converter(Importer, Protocol):
    """Reads and writes a model type. Models of images have no tokenizers: None."""

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


CONVERTERS: dict[str, Converter] = {  # by model_type of config.json
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "bert": bert,
    "marian": marian,
    "pegasus": pegasus,
    "vit": vit,
    "whisper": whisper,
}
IMPORTERS: dict[str, Importer] = {**CONVERTERS, **DECODERS, **ENCODERS, **TRANSLATORS, **T5}
NOT_READ = {  # models that people ask for, and why they have no counterpart
    "mixtral": "mixtures of experts have no counterpart here",
    "qwen2_moe": "mixtures of experts have no counterpart here",
    "qwen3_moe": "mixtures of experts have no counterpart here",
}
BY_FAMILY: dict[str, list[Converter]] = {  # by model.family of a recipe
    "gpt": [gpt2, gpt_neox, *decoder_exports.CONVERTERS],
    "bert": [bert],
    "transformer": [marian, pegasus],
    "vit": [vit],
    "speech": [whisper],
}
HEADS = ("mlm_head.", "classifier.")  # prefixes of the tensors of our heads, which a saved body lacks


def import_folder(path: str | Path, out: str | Path) -> RunDir:
    """Convert a Hugging Face directory to a run: `import_folder("gpt2", "runs/gpt2")`."""
    folder = HFFolder(path)
    kind = folder.setting("model_type")
    if kind in NOT_READ:
        raise UserError(f"{folder.path}: model_type = {short_repr(kind)} is not read: {NOT_READ[kind]}")
    if not isinstance(kind, str) or kind not in IMPORTERS:
        raise UserError(
            f"{folder.path}: model_type = {short_repr(kind)} has no counterpart here ({', '.join(IMPORTERS)} have)"
        )
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")
    importer = IMPORTERS[kind]
    header = importer.canonical(folder.header)
    imported = _read(folder, importer, header)
    about = f"imported from {folder.path.resolve().name} ({kind})" + ("; its head is new" if imported.headless else "")
    recipe = imported.recipe.model_copy(update={"about": about})
    tensors = imported.tensors or _tensor_map(CONVERTERS[kind], imported)
    template = chat.checked(chat_template(folder) or "")
    with _converted(folder, tensors, header, imported) as ours:
        run = RunDir.create(out, recipe)  # last, so that a failed import leaves nothing behind
        if imported.source is not None and imported.target is not None:
            run.save_tokenizers(imported.source, imported.target)
        if imported.classes:
            run.save_classes(imported.classes)
        if template:
            write_text(run.path / chat.FILE, template)
        tensor_io.save(run.best, ours, {"step": 0, "weights": "imported"})
    return run


def chat_template(folder: HFFolder) -> str | None:
    """The chat template of a folder, from its own file or from tokenizer_config.json; of several, the default one."""
    if folder.has(chat.FILE):
        return folder.text(chat.FILE)
    given = folder.json("tokenizer_config.json")
    if not isinstance(templates := given.content.get("chat_template"), list):
        return given.text("chat_template")
    named = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
    template = named.get("default")
    return template if isinstance(template, str) else None


def _weights(run: RunDir) -> Tensors:
    """The best weights in float32, with adapters added."""
    if run.recipe.training.adapter == "none":
        return {name: tensor.float() for name, tensor in tensor_io.load(run.best)[0].items()}
    model = run.model("cpu")
    lora.merge(model)
    return tensor_io.model_tensors(model)


def _tensor_map(converter: Converter, imported: Imported) -> TensorMap:
    recipe, source, target = imported.recipe, cast(Tokenizer, imported.source), cast(Tokenizer, imported.target)
    table = converter.entries(recipe, source, target), converter.ignored(recipe)
    return TensorMap(*table, converter.defaults(target), converter.constants(recipe))


def _read(folder: HFFolder, importer: Importer, header: Mapping[str, TensorInfo]) -> Imported:
    """Read the settings of a folder; those that a recipe refuses are an error in one line."""
    try:
        return importer.read(folder, header)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        raise UserError(f"{folder.path / 'config.json'}: {where}: {message}") from error


@contextmanager
def _converted(
    folder: HFFolder, tensors: TensorMap, header: Mapping[str, TensorInfo], imported: Imported
) -> Iterator[Tensors]:
    """Convert the tensors of a folder, after comparing its header with the shapes that the settings imply.

    Tensors that are not changed stay in the files, which are mapped into memory and open as long as the context lasts.
    """
    table, ignored = tensors.entries, tensors.ignored
    if imported.headless:
        table = [entry for entry in table if not entry.ours.startswith(HEADS)]
    with torch.device("meta"):  # shapes only
        model = imported.build()
        ours, shapes = {entry.ours for entry in table}, tensor_io.model_tensors(model)
        expected = name_map.to_theirs({n: t for n, t in shapes.items() if n in ours}, table, ignored, folder.path)
    missing = {
        name: TensorInfo(folder.path, name, "F32", tuple(tensor.shape))
        for name, tensor in tensors.defaults.items()
        if name not in header
    }
    name_map.check_header({**missing, **header}, table, ignored, expected, folder.path)
    names = {name for entry in table for name in entry.sources()} | ignored.copies.keys() | tensors.constants.keys()
    with folder.opened({name: header[name] for name in names if name in header}) as raw:
        _check_constants(folder, raw, tensors.constants)
        defaults = {name: tensor for name, tensor in tensors.defaults.items() if name not in header}
        made = name_map.to_ours(ChainMap(defaults, raw), table, ignored, folder.path) | tensors.extra  # type: ignore[arg-type]
        if imported.headless:
            fresh = tensor_io.model_tensors(imported.build())
            made = {name: tensor for name, tensor in fresh.items() if name.startswith(HEADS)} | made
        tensor_io.check_names(shapes, made, folder.path)
        yield made


def _check_constants(folder: HFFolder, raw: Mapping[str, Tensor], constants: Tensors) -> None:
    for name, constant in constants.items():
        stored = raw[name].float() if name in raw else constant
        if stored.shape != constant.shape or not torch.allclose(stored, constant, atol=1e-2):  # also half precision
            raise UserError(f"{folder.path}: {name} is not the table that config.json implies")


@EXPORTERS.register("huggingface")
def export_run(run: RunDir, path: str | Path) -> Path:
    """Write a model directory for transformers.

    >>> export_run(RunDir("runs/en-es"), "en-es")  # doctest: +SKIP
    """
    recipe, out = run.recipe, Path(path)
    if recipe.model.family not in BY_FAMILY:
        raise UserError(f"the {recipe.model.family} family has no counterpart among Hugging Face's models")
    source, target = run.tokenizers if recipe.data.has_tokens else (cast(Tokenizer, None),) * 2
    converters = BY_FAMILY[recipe.model.family]
    problems = {number: c.unsupported(recipe, source, target) for number, c in enumerate(converters)}
    closest = min(problems, key=lambda number: len(problems[number]))
    if problems[closest]:
        raise UserError("; ".join(problems[closest]))
    converter = converters[closest]
    config, files = converter.config(recipe, source, target), converter.files(recipe, source, target)
    if (template := run.path / chat.FILE).is_file():
        files[chat.FILE] = template.read_bytes()
    if run.classes:
        config["id2label"] = {str(number): name for number, name in enumerate(run.classes)}
        config["label2id"] = {name: number for number, name in enumerate(run.classes)}
    if not run.best.exists():
        raise UserError(f"{run.path} has no {run.best.name} yet: training has not reached its first validation")
    loaded = _weights(run)
    table, ignored = converter.entries(recipe, source, target), converter.ignored(recipe)
    tensors = name_map.to_theirs(loaded, table, ignored, run.best) | converter.constants(recipe)
    if converter is marian:
        tensors = marian.with_zero_start(tensors, recipe, target)
    try:
        hf_folder.write(out, tensors, config, files)
    except OSError as error:
        raise UserError(f"{out} could not be written: {errno_text(error)}") from error
    return out
