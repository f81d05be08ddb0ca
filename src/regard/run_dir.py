"""The run directory: everything needed to resume, use, inspect and export a model.

run.json               format, regard's version, the run it was initialised from (`--from`), the settings it was trained
                       with, checksums of the tokenizers and of itself, the names of classes
recipe.toml            the resolved recipe
tokenizer.json         or source.tokenizer.json and target.tokenizer.json
model.safetensors      the best weights so far
snapshots/             weights at some steps (see `kept_snapshots`)
resume.safetensors     the state needed to resume at the next batch
metrics.jsonl          one JSON object per measurement
samples.jsonl          outputs for a few held-out examples at each validation
calibration.json       how often words of a given probability are right (`regard calibrate`)
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import __version__, devices, tensor_io
from regard.errors import RegardWarning, UserError, first_line
from regard.files import DirectoryLock, checksum, errno_text, json_checksum, parse_json, read_text, regular, write_text
from regard.models import SequenceModel, build, sizes
from regard.nn import lora
from regard.recipes import differences, parse, to_toml, validate
from regard.recipes.schema import Recipe
from regard.text import Tokenizer

FORMAT = 3
# keys of run.json
ORIGIN, RECIPE, TOKENIZERS, CLASSES, CHECKSUM = "from", "recipe", "tokenizers", "classes", "checksum"
FEATURES, SCALES = "features", "scales"
LOGS = ("metrics.jsonl", "samples.jsonl")
BEST, LAST, AVERAGE = "best", "last", "average"  # names of weights, besides step-N
SNAPSHOT = re.compile(r"step-([0-9]{8,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Weights on disk: one file, or several to average; `prefix` is that of their names in the file."""

    files: tuple[Path, ...]
    prefix: str = ""

    def load(self) -> dict[str, Tensor]:
        if len(self.files) > 1:
            return tensor_io.mean(self.files)
        loaded = tensor_io.load(self.files[0])[0]
        return {name.removeprefix(self.prefix): t for name, t in loaded.items() if name.startswith(self.prefix)}

    @property
    def step(self) -> int | None:
        """The training step of the weights (the last of an average), if the file records it."""
        step = tensor_io.read_metadata(self.files[-1]).get("step")
        if step is not None and not isinstance(step, int):
            raise UserError(f"{self.files[-1]} is damaged: the step in its header is {step!r:.40}, not a whole number")
        return step


class RunDir:
    """An existing run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            info = parse_json(read_text(self.path / "run.json"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(_no_run(self.path)) from None
        except OSError as error:
            raise UserError(f"{self.path / 'run.json'} could not be read: {errno_text(error)}") from error
        except ValueError:
            info = None
        if not isinstance(info, dict) or not isinstance(info.get("format"), int) or info["format"] < 1:
            raise UserError(f"{self.path / 'run.json'} is damaged: it is not the JSON that regard writes")
        recorded = info.pop(CHECKSUM, None)
        if recorded is not None and recorded != json_checksum(info):
            raise UserError(f"{self.path / 'run.json'} was altered after it was written: its checksum does not match")
        if info["format"] > FORMAT:
            raise UserError(
                f"{self.path} has run format {info['format']}, made by regard {info.get('regard', '?')}; "
                f"this is regard {__version__}, which reads up to {FORMAT}: upgrade regard"
            )
        if info["format"] < FORMAT:
            raise UserError(
                f"{self.path} has run format {info['format']}, made by regard {info.get('regard', '?')}; "
                f"this version reads format {FORMAT}, which names weights differently: train the run again"
            )
        if recorded is None:
            raise UserError(f"{self.path / 'run.json'} is damaged: its checksum is missing")
        for key, kind in {
            ORIGIN: str,
            RECIPE: dict,
            TOKENIZERS: dict,
            CLASSES: list,
            FEATURES: list,
            SCALES: list,
        }.items():
            if not isinstance(info.get(key), kind | None):
                raise UserError(f"{self.path / 'run.json'} is damaged: {key} is {info[key]!r:.40}")
        self.info = info

    @staticmethod
    def refuse_other_folder(path: Path) -> None:
        """Refuse a path that is neither a run directory nor empty."""
        if RunDir.exists(path) or not path.exists():
            return
        if not path.is_dir() or any(not _is_leftover(file) for file in path.iterdir()):
            raise UserError(f"{path} exists and is not a run directory: choose another --out")

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe, origin: Path | None = None) -> RunDir:
        """Create a run directory with a recipe; `origin` is the run whose weights it starts from."""
        path = Path(path)
        cls.refuse_other_folder(path)
        info = {"format": FORMAT, "regard": __version__, "created": datetime.now(UTC).isoformat(timespec="seconds")}
        start = {ORIGIN: None if origin is None else str(origin.resolve())}
        _write_info(path, {**info, **start, RECIPE: recipe.model_dump(), TOKENIZERS: {}})
        write_text(path / "recipe.toml", to_toml(recipe))
        return cls(path)

    @staticmethod
    def exists(path: str | Path) -> bool:
        return all((Path(path) / name).exists() for name in ("run.json", "recipe.toml"))

    # -- settings -----------------------------------------------------------------------------------------------------

    @cached_property
    def recipe(self) -> Recipe:
        """The settings in recipe.toml; warns of those that were edited since training."""
        if edited := self.edits():
            changes = ", ".join(f"{key} from {old!r} to {new!r}" for key, (old, new) in edited.items())
            hint = f"`regard verify {self.path} --accept-edit` records it"
            message = f"{self.path / 'recipe.toml'} was edited since training ({changes}): {hint}"
            warnings.warn(message, RegardWarning, stacklevel=3)
        return self._parsed

    @cached_property
    def accepted(self) -> Recipe:
        """The settings in run.json: those of training, with the edits that were accepted since."""
        return validate(self.info.get(RECIPE) or {}, str(self.path / "run.json"))

    def edits(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ between run.json and recipe.toml, with their old and new values."""
        return differences(self.accepted, self._parsed)

    @cached_property
    def _parsed(self) -> Recipe:
        file = self.path / "recipe.toml"
        try:
            return parse(read_text(file), str(file))
        except OSError as error:
            raise UserError(f"{file} could not be read: {errno_text(error)}") from error
        except UnicodeDecodeError:
            raise UserError(f"{file} is damaged: it is not text") from None

    def accept_edits(self) -> None:
        """Accept the settings in recipe.toml as those of the run."""
        self.record(self._parsed)

    def record(self, recipe: Recipe) -> None:
        """Write these settings to both files, where they differ."""
        if recipe != self._parsed:
            write_text(self.path / "recipe.toml", to_toml(recipe))
        if self.accepted != recipe:
            self.info[RECIPE] = recipe.model_dump()
            _write_info(self.path, self.info)
        for name in ("recipe", "accepted", "_parsed"):
            self.__dict__.pop(name, None)

    # -- origin -------------------------------------------------------------------------------------------------------

    @property
    def origin(self) -> Path | None:
        """The run whose weights this one started from."""
        origin = self.info.get(ORIGIN)
        return None if origin is None else Path(origin)

    def started_from(self, origin: Path) -> bool:
        """Whether the run started from these weights."""
        return self.origin == origin.resolve()

    def change_origin(self, origin: Path | None) -> None:
        self.info[ORIGIN] = None if origin is None else str(origin.resolve())
        _write_info(self.path, self.info)

    # -- text ---------------------------------------------------------------------------------------------------------

    def tokenizer_files(self, recipe: Recipe) -> list[Path]:
        if not recipe.data.has_tokens:
            return []
        both = [self.path / "source.tokenizer.json", self.path / "target.tokenizer.json"]
        return [self.path / "tokenizer.json"] if recipe.text.shared else both

    def has_tokenizers(self) -> bool:
        return all(file.exists() and file.name in self.info[TOKENIZERS] for file in self.tokenizer_files(self.recipe))

    def save_tokenizers(self, source: Tokenizer, target: Tokenizer) -> None:
        for file, tokenizer in zip(self.tokenizer_files(self.recipe), (source, target), strict=False):
            write_text(file, tokenizer.to_json())
            self.info[TOKENIZERS][file.name] = checksum(tokenizer.to_json())
        _write_info(self.path, self.info)
        self.__dict__.pop("tokenizers", None)

    def remove_tokenizers(self) -> None:
        for file in self.path.glob("*tokenizer.json"):
            file.unlink()
        self.info[TOKENIZERS] = {}
        self.info.pop(CLASSES, None)
        self.info.pop(FEATURES, None)
        self.info.pop(SCALES, None)
        _write_info(self.path, self.info)

    def tokenizer(self, file: Path) -> Tokenizer:
        """Read a tokenizer file of the run, and check that it was not altered."""
        try:
            content = regular(file).read_bytes()
            recorded = self.info.get(TOKENIZERS)
            if recorded is not None and recorded.get(file.name) != checksum(content):
                raise UserError("it was altered after it was written: its checksum does not match")
            return Tokenizer.from_json(content.decode())
        except OSError as error:
            raise UserError(f"{file} could not be read: {errno_text(error)}") from error
        except (UserError, ValueError) as error:
            raise UserError(f"{file} is damaged: {first_line(error)}") from error

    @cached_property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizers of source and target; the same object if both are equal."""
        tokenizers = [self.tokenizer(file) for file in self.tokenizer_files(self.recipe)]
        if not tokenizers:
            raise UserError(f"{self.path} has no tokenizers: it was not trained on text")
        return tokenizers[0], tokenizers[0].target_side() if len(tokenizers) == 1 else tokenizers[1]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of a classifier's classes in the order of their ids; empty for other tasks."""
        return tuple(self.info.get(CLASSES) or ())

    def save_classes(self, names: Sequence[str]) -> None:
        self.info[CLASSES] = list(names)
        _write_info(self.path, self.info)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features of a graph's nodes in the order of their ids; empty for other data."""
        return tuple(self.info.get(FEATURES) or ())

    def save_features(self, names: Sequence[str]) -> None:
        self.info[FEATURES] = list(names)
        _write_info(self.path, self.info)

    @property
    def scales(self) -> list[tuple[float, float]]:
        """Mean and standard deviation of each number that is predicted; empty for other tasks.

        The model predicts (number - mean) / deviation.
        """
        return [(float(mean), float(deviation)) for mean, deviation in self.info.get(SCALES) or ()]

    def save_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        self.info[SCALES] = [list(scale) for scale in scales]
        _write_info(self.path, self.info)

    @property
    def vocabulary_sizes(self) -> tuple[int, int]:
        """The number of source tokens (or features of nodes), and of target tokens, classes or numbers."""
        source, target = (len(t) for t in self.tokenizers) if self.recipe.data.has_tokens else (len(self.features), 0)
        return source, len(self.classes) or len(self.scales) or target

    # -- measurements -------------------------------------------------------------------------------------------------

    def log_checksum(self, name: str) -> tuple[int, str] | None:
        """The length and checksum of a log file at the last save, if known."""
        try:
            size, digest = tensor_io.read_metadata(self.resume)["logs"][name] if self.resume.exists() else (0, "")
        except (UserError, KeyError, TypeError, ValueError):  # the resume state is damaged, or has no such entry
            return None
        return (size, digest) if isinstance(size, int) and size else None

    def log(self, name: str) -> Path:
        """The path of a log file; an error if its content at the last save was altered."""
        file, saved = self.path / name, self.log_checksum(name)
        if saved is not None and file.exists() and checksum(regular(file).read_bytes()[: saved[0]]) != saved[1]:
            raise UserError(f"{file} was altered after it was written: its checksum does not match")
        return file

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def best(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def resume(self) -> Path:
        return self.path / "resume.safetensors"

    def snapshot(self, step: int) -> Path:
        return self.path / "snapshots" / f"step-{step:08d}.safetensors"

    def snapshots(self) -> dict[int, Path]:
        """Map steps to snapshot files, in order; files with other names, such as copies, are ignored."""
        matches = ((SNAPSHOT.fullmatch(file.name), file) for file in (self.path / "snapshots").glob("step-*"))
        return dict(sorted((int(match[1]), file) for match, file in matches if match))

    def averaged_snapshots(self, until: int | None = None) -> dict[int, Path]:
        """The last `training.average` snapshots up to a step, as a mapping from step to file; empty if below two."""
        steps = [step for step in self.snapshots() if until is None or step <= until]
        last = steps[-self.recipe.training.average :] if self.recipe.training.average > 1 else []
        return {step: self.snapshot(step) for step in last} if len(last) > 1 else {}

    def checkpoint(self, which: str | Path = BEST) -> Checkpoint:
        """Find weights by name (best, last, average or step-N) or by file."""
        if isinstance(which, str) and (checkpoint := self._named(which)) is not None:
            return checkpoint
        file = Path(which)
        if file.is_file():
            return Checkpoint((file,))
        if which == BEST or file == self.best:
            raise UserError(f"{self.path} has no {self.best.name} yet: training has not reached its first validation")
        missing = f"there is no {file.name} in {file.parent}" if file.suffix else f"{self.path} has no weights {which}"
        raise UserError(f"{missing}; {self._choices()}")

    def _named(self, name: str) -> Checkpoint | None:
        snapshots = self.snapshots()
        if name == BEST and self.best.exists():
            return Checkpoint((self.best,))
        if name == LAST and self.resume.exists():
            return Checkpoint((self.resume,), prefix="model.")
        if name == LAST and snapshots:
            return Checkpoint((snapshots[max(snapshots)],))
        if name == AVERAGE and (files := self.averaged_snapshots()):
            return Checkpoint(tuple(files.values()))
        step = re.fullmatch(r"step-(\d+)", name)
        file = None if step is None else snapshots.get(int(step[1]))
        return None if file is None else Checkpoint((file,))

    def _choices(self) -> str:
        """The names of the weights that exist, for a message."""
        names = [name for name in (BEST, LAST, AVERAGE) if self._named(name) is not None]
        names += [f"step-{step}" for step in self.snapshots()]
        hint = "" if AVERAGE in names else "; an average needs 2 snapshots, and training.average of 2 or more"
        return f"{self.path} has {', '.join(names) or 'no weights yet'}{hint}"

    def fresh_model(self) -> SequenceModel:
        """Build the recipe's model with new weights."""
        model = build(self.recipe.model, *self.vocabulary_sizes, self.recipe.text.shared and not self.classes)
        training = self.recipe.training
        if training.adapter == "lora":
            lora.add_adapters(model, training.adapter_rank, training.adapter_alpha, training.adapter_targets)
        return model

    def model(self, device: torch.device | str = "cpu", weights: str | Path = BEST) -> SequenceModel:
        """Load the trained model, in eval mode, with the weights that `checkpoint` finds."""
        checkpoint = self.checkpoint(weights)
        self._check_size(checkpoint, device)
        loaded, model = checkpoint.load(), self.fresh_model()
        tensor_io.load_into_model(model, loaded, checkpoint.files[-1])
        return model.to(device).eval()

    def _check_size(self, checkpoint: Checkpoint, device: torch.device | str) -> None:
        """Refuse a recipe that does not match the weights or exceeds the memory, before anything is allocated."""
        recipe, origin = self.recipe, str(self.path / "recipe.toml")
        vocabularies = self.vocabulary_sizes
        stored = tensor_io.elements(checkpoint.files[-1], checkpoint.prefix)
        sizes.refuse_misfit(recipe.model, vocabularies, recipe.text.shared, stored, origin)
        memory = devices.memory(torch.device(device))
        sizes.refuse_too_large(recipe.model, vocabularies, recipe.text.shared, memory, 1, origin)


def _no_run(path: Path) -> str:
    """Say why a path is not a run directory, and what to do instead."""
    if path.suffix == ".toml":
        what = "is a recipe, not a run directory" if path.exists() else "does not exist"
        return f"{path} {what}; `regard train {path} --out RUN` makes a run directory, which is what goes here"
    if path.is_file():
        return f"{path} is a file, not a run directory; name the directory that `regard train` or `regard import` made"
    if (path / "config.json").is_file():
        other = f"{path} is not a run directory but looks like another library's model"
        return f"{other}; `regard import {path} --out RUN` reads it"
    near = [Path("runs") / path] if RunDir.exists(Path("runs") / path) else []
    near += sorted(file.parent for file in path.glob("*/run.json"))
    near += [] if path.exists() or near else _similar_runs(path)
    what = "is not a run directory (it has no run.json)" if path.exists() else "does not exist"
    if near:
        return f"{path} {what}; did you mean {' or '.join(map(str, near[:3]))}?"
    return f"{path} {what}; `regard train RECIPE --out RUN` makes a run directory"


def _similar_runs(path: Path) -> list[Path]:
    """The run directories beside a path that does not exist, or in runs/, whose names are like its own."""
    runs = {
        file.parent.name: file.parent for folder in ("runs", path.parent) for file in Path(folder).glob("*/run.json")
    }
    return [runs[name] for name in difflib.get_close_matches(path.name, runs, 3)]


def _write_info(path: Path, info: dict[str, Any]) -> None:
    info = {key: value for key, value in info.items() if key != CHECKSUM}
    write_text(path / "run.json", json.dumps({**info, CHECKSUM: json_checksum(info)}, indent=2) + "\n")


def _is_leftover(file: Path) -> bool:
    """Whether a file can be left over from a run that was interrupted before its recipe was written."""
    names = ("run.json", DirectoryLock.NAME)
    return file.name in names or file.name.startswith((".run.json.", ".recipe.toml."))


def kept_snapshots(steps: list[int], every: int, average: int) -> set[int]:
    """Choose the snapshots to keep: the last `average` for averaging, and the 1st, 2nd, 4th, 8th, ... of the course.

    >>> sorted(kept_snapshots([10, 20, 30, 40, 50, 60, 70], every=10, average=2))
    [10, 20, 40, 60, 70]
    """
    count = {step: step // every for step in steps}
    powers = {step for step, n in count.items() if step % every == 0 and n & (n - 1) == 0}
    return powers | set(sorted(steps)[-max(average, 1) :])
