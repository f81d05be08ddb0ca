"""Read and write Hugging Face model directories: JSON, text and safetensors. Nothing is ever unpickled.

The files are untrusted: only regular files of a bounded size are read, JSON values are checked when they are used, and
tensor shapes are taken from the header before any tensor is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import UserError, first_line
from regard.files import atomic_write, errno_text
from regard.tensor_io import Tensors, save_indexed, split_by_size

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_FILE_BYTES = 16 * 2**20  # for each file except the weights, and for their header
MAX_BYTES_OF = {"tokenizer.json": 64 * 2**20}  # with 250,000 tokens it has 35 MB


class Fields:
    """A JSON object in a file. A field of the wrong type is an error that names the file and the field."""

    def __init__(self, where: object, content: Mapping[str, Any]) -> None:
        self.where, self.content = where, content

    def _get(self, name: str, kind: type, description: str) -> Any:
        value = self.content.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.error(name, f"must be {description}, not {short_repr(value)}")
        return value

    def error(self, name: str, what: str) -> UserError:
        return UserError(f"{self.where}: {name} {what}")

    def text(self, name: str) -> str | None:
        value: str | None = self._get(name, str, "a string")
        return value

    def integer(self, name: str) -> int | None:
        value: int | None = self._get(name, int, "a whole number")
        return value

    def boolean(self, name: str, default: bool | None = None) -> bool | None:
        value: bool | None = self._get(name, bool, "true or false")
        return default if value is None else value

    def items(self, name: str) -> list[Any]:
        """A list; empty if the field is missing."""
        return self._get(name, list, "a list") or []

    def object(self, name: str) -> Fields:
        """An object; empty if the field is missing."""
        return Fields(f"{self.where}: {name}", self._get(name, dict, "an object") or {})


def short_repr(value: object) -> str:
    """A value of an untrusted file for a message: on one line, and truncated."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class TensorInfo:
    """The entry of a tensor in the header of a weights file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class HFFolder:
    """A directory that contains config.json, or another file that names its kind."""

    def __init__(self, path: str | Path, needed: str = "config.json") -> None:
        self.path = Path(path)
        if not self.has(needed):
            what = f"has no {needed}" if self.path.is_dir() else "is not a folder"
            raise UserError(f"{self.path} {what}: expected a Hugging Face model directory")

    def has(self, name: str) -> bool:
        try:
            mode = (self.path / name).stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise UserError(f"{self.path / name} could not be read: {errno_text(error)}") from error
        if not stat.S_ISREG(mode):
            raise UserError(f"{self.path / name} is not a regular file")
        return True

    def read(self, name: str) -> bytes:
        limit = MAX_BYTES_OF.get(name, MAX_FILE_BYTES)
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would block
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{self.path / name} is not a regular file")
                content = file.read(limit + 1)
        except OSError as error:
            raise UserError(f"{self.path / name} could not be read: {errno_text(error)}") from error
        if len(content) > limit:
            raise UserError(f"{self.path / name} is larger than {limit >> 20} MiB, the limit for such a file")
        return content

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path / name} is damaged: it is not UTF-8 text") from None

    def json(self, name: str) -> Fields:
        """Read a JSON object; empty if there is no such file."""
        where = self.path / name
        if not self.has(name):
            return Fields(where, {})
        text = self.text(name)
        try:
            content = json.loads(text)
            if re.search(r"\\u[dD][89a-fA-F]", text):  # an unpaired surrogate is not valid text
                json.dumps(content, ensure_ascii=False).encode()
        except RecursionError:
            raise UserError(f"{where} is damaged: its values are nested too deeply") from None
        except UnicodeEncodeError:
            raise UserError(f"{where} is damaged: it holds text that is not valid Unicode") from None
        except ValueError as error:
            raise UserError(f"{where} is damaged: {error}") from None
        if not isinstance(content, dict):
            raise UserError(f"{where} is damaged: it is not a JSON object")
        return Fields(where, content)

    @cached_property
    def config(self) -> Fields:
        return self.json("config.json")

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting of config.json, or its default."""
        return self.config.content.get(name, default)

    def require(self, **wanted: Any) -> None:
        """Raise an error if a setting has another value than the one supported here; a missing one is accepted."""
        for name, value in wanted.items():
            given = self.setting(name)
            if given is not None and given != value:
                raise UserError(f"{self.path}: {name} = {short_repr(given)} has no counterpart here (only {value!r})")

    @cached_property
    def specials(self) -> dict[str, str]:
        """The spellings of the special tokens by role: {"eos_token": "</s>"}."""
        settings = {**self.json("special_tokens_map.json").content, **self.json("tokenizer_config.json").content}
        tokens = {role: token for role, token in settings.items() if role.endswith("_token")}
        plain = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
        return {role: token for role, token in plain.items() if isinstance(token, str)}

    @cached_property
    def header(self) -> dict[str, TensorInfo]:
        """All tensors by name, from one file or from the files listed in an index; none is loaded."""
        tensors: dict[str, TensorInfo] = {}
        for file in self._weight_files():
            for info in _header(self.path / file):
                if info.name in tensors:
                    raise UserError(f"{info.file} and {tensors[info.name].file} both contain {short_repr(info.name)}")
                tensors[info.name] = info
        return tensors

    def tensors_of(self, name: str) -> list[TensorInfo]:
        """The tensors of one safetensors file of the folder."""
        return _header(self.path / name)

    def _weight_files(self) -> list[str]:
        if self.has(INDEX):
            listed = self.json(INDEX).object("weight_map")
            names = {listed.text(tensor) or "" for tensor in listed.content}
            for name in sorted(names):
                if Path(name).name != name or not name.endswith(".safetensors"):
                    raise UserError(f"{listed.where} names {short_repr(name)}, not a safetensors file of this folder")
                if not self.has(name):
                    raise UserError(f"{listed.where} names {short_repr(name)}, which does not exist")
            return sorted(names)
        if self.has(WEIGHTS):
            return [WEIGHTS]
        if any(self.has(name) for name in PICKLES):
            raise UserError(
                f"{self.path} has its weights only as pytorch_model.bin, a pickle, which regard never loads: it could "
                f"run any code. If you trust it, convert it: {self._conversion()}, which adds {WEIGHTS}"
            )
        raise UserError(f"{self.path} has no {WEIGHTS}")

    def _conversion(self) -> str:
        """A command that converts a pickle in place, so that the tokenizer's files stay beside the weights."""
        names = [name for name in self.config.items("architectures") if isinstance(name, str) and name.isidentifier()]
        kind, path = names[0] if names else "AutoModel", json.dumps(str(self.path), ensure_ascii=False)
        code = f"from transformers import {kind} as M; M.from_pretrained({path}).save_pretrained({path})"
        return f"python -c {shlex.quote(code)}"

    @contextmanager
    def opened(self, wanted: Mapping[str, TensorInfo]) -> Iterator[Mapping[str, Tensor]]:
        """The given tensors by name; each is read when it is looked up."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(_open(path)) for path in {info.file for info in wanted.values()}}
            yield _LazyTensors(wanted, files)


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors of open files, read when they are looked up."""

    def __init__(self, wanted: Mapping[str, TensorInfo], files: Mapping[Path, Any]) -> None:
        self.wanted, self.files = wanted, files

    def __getitem__(self, name: str) -> Tensor:
        info = self.wanted[name]
        tensor: Tensor = self.files[info.file].get_tensor(info.name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.wanted)

    def __len__(self) -> int:
        return len(self.wanted)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {first_line(error)}") from error
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error


def _header(path: Path) -> list[TensorInfo]:
    """Name, dtype and shape of every tensor of a file; safetensors compares them with the file's size."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error
    if size > MAX_FILE_BYTES:
        raise UserError(
            f"{path} is damaged or not a safetensors file: its header is larger than {MAX_FILE_BYTES >> 20} MiB"
        )
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return [TensorInfo(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]


Files = dict[str, bytes]  # by name


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def write(path: Path, tensors: Tensors, config: Mapping[str, Any], files: Files) -> None:
    """Write a new directory; config.json is written last, so that a directory without it is known to be incomplete."""
    write_files(path, WEIGHTS, tensors, {**files, "config.json": as_json(config)})


def write_files(path: Path, weights: str, tensors: Tensors, files: Files) -> None:
    """Write a new directory: the weights, then the other files in this order."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another --out")
    parts = split_by_size(tensors)
    if len(parts) > 1 and weights == WEIGHTS:
        save_indexed(path, Path(WEIGHTS).stem, parts)
    else:
        with atomic_write(path / weights) as temporary:
            save_file(tensors, str(temporary), metadata={"format": "pt"})
    for name, content in files.items():
        with atomic_write(path / name) as temporary:
            temporary.write_bytes(content)
