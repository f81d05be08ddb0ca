"""A Hugging Face model directory on disk: JSON, text and safetensors. Nothing in it is ever unpickled.

Files may come from anywhere: they are read only if they are regular files of a bounded size, what JSON holds is checked
as it is used, and the shapes of tensors are known from the header before any tensor is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from regard.errors import UserError, first_line
from regard.files import atomic_write, errno_text
from regard.tensor_io import Tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_FILE_BYTES = 16 * 2**20  # of each file but the weights, and of the header of these


class Fields:
    """A JSON object in a file. A field of another kind than asked for is an error that names both."""

    def __init__(self, where: object, content: Mapping[str, Any]) -> None:
        self.where, self.content = where, content

    def _get(self, name: str, kind: type, spoken: str) -> Any:
        value = self.content.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.fault(name, f"must be {spoken}, not {shown(value)}")
        return value

    def fault(self, name: str, what: str) -> UserError:
        return UserError(f"{self.where}: {name} {what}")

    def text(self, name: str) -> str | None:
        found: str | None = self._get(name, str, "a string")
        return found

    def whole(self, name: str) -> int | None:
        found: int | None = self._get(name, int, "a whole number")
        return found

    def flag(self, name: str, usual: bool | None = None) -> bool | None:
        found: bool | None = self._get(name, bool, "true or false")
        return usual if found is None else found

    def items(self, name: str) -> list[Any]:
        """A list; an empty one where there is none."""
        return self._get(name, list, "a list") or []

    def object(self, name: str) -> Fields:
        """An object; an empty one where there is none."""
        return Fields(f"{self.where}: {name}", self._get(name, dict, "an object") or {})


def shown(value: object) -> str:
    """A value of somebody else's file in a message: on one line, and cut short."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Stored:
    """What the header of a weights file says of a tensor."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class HFFolder:
    """A directory with config.json in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.has("config.json"):
            what = "has no config.json" if self.path.is_dir() else "is no folder"
            raise UserError(f"{self.path} {what}: a Hugging Face model directory is wanted")

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
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UserError(f"{self.path / name} is not a regular file")
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise UserError(f"{self.path / name} could not be read: {errno_text(error)}") from error
        if len(content) > MAX_FILE_BYTES:
            raise UserError(f"{self.path / name} is larger than {MAX_FILE_BYTES >> 20} MiB, the limit for such a file")
        return content

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path / name} is damaged: it is not UTF-8 text") from None

    def json(self, name: str) -> Fields:
        """A JSON object; an empty one where there is no such file."""
        where = self.path / name
        if not self.has(name):
            return Fields(where, {})
        text = self.text(name)
        try:
            found = json.loads(text)
            if re.search(r"\\u[dD][89a-fA-F]", text):  # half a surrogate pair is no text
                json.dumps(found, ensure_ascii=False).encode()
        except RecursionError:
            raise UserError(f"{where} is damaged: its values are nested too deeply") from None
        except UnicodeEncodeError:
            raise UserError(f"{where} is damaged: it holds text that is not valid Unicode") from None
        except ValueError as error:
            raise UserError(f"{where} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"{where} is damaged: it holds no JSON object")
        return Fields(where, found)

    @cached_property
    def config(self) -> Fields:
        return self.json("config.json")

    def setting(self, name: str, usual: Any = None) -> Any:
        """A setting of config.json, or what its absence means there."""
        return self.config.content.get(name, usual)

    def insist(self, **wanted: Any) -> None:
        """Settings that have no counterpart here unless they have these values; not being there is as good."""
        for name, value in wanted.items():
            found = self.setting(name)
            if found is not None and found != value:
                raise UserError(f"{self.path}: {name} = {shown(found)} has no counterpart here (only {value!r})")

    @cached_property
    def specials(self) -> dict[str, str]:
        """How the special tokens are spelt, by what they are for: {"eos_token": "</s>"}."""
        named = {**self.json("special_tokens_map.json").content, **self.json("tokenizer_config.json").content}
        tokens = {role: token for role, token in named.items() if role.endswith("_token")}
        plain = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
        return {role: token for role, token in plain.items() if isinstance(token, str)}

    @cached_property
    def header(self) -> dict[str, Stored]:
        """All tensors by name, of one file or of several that an index lists; none is loaded."""
        found: dict[str, Stored] = {}
        for file in self._weight_files():
            for one in _header(self.path / file):
                if one.name in found:
                    raise UserError(f"{one.file} holds {shown(one.name)}, which {found[one.name].file} holds too")
                found[one.name] = one
        return found

    def _weight_files(self) -> list[str]:
        if self.has(INDEX):
            listed = self.json(INDEX).object("weight_map")
            names = {listed.text(tensor) or "" for tensor in listed.content}
            for name in sorted(names):
                if Path(name).name != name or not name.endswith(".safetensors"):
                    raise UserError(f"{listed.where} names {shown(name)}, which is no safetensors file of this folder")
                if not self.has(name):
                    raise UserError(f"{listed.where} names {shown(name)}, which is not there")
            return sorted(names)
        if self.has(WEIGHTS):
            return [WEIGHTS]
        if any(self.has(name) for name in PICKLES):
            raise UserError(
                f"{self.path} has its weights only as pytorch_model.bin, a pickle, which regard never loads: it could "
                f"run any code. Where you trust it, convert it: {self._conversion()}, which adds {WEIGHTS}"
            )
        raise UserError(f"{self.path} has no {WEIGHTS}")

    def _conversion(self) -> str:
        """A command that converts a pickle, in place: the tokenizer's files stay beside the weights."""
        names = [name for name in self.config.items("architectures") if isinstance(name, str) and name.isidentifier()]
        kind, path = names[0] if names else "AutoModel", json.dumps(str(self.path), ensure_ascii=False)
        code = f"from transformers import {kind} as M; M.from_pretrained({path}).save_pretrained({path})"
        return f"python -c {shlex.quote(code)}"

    def load(self, wanted: Iterable[Stored]) -> Tensors:
        """Some of the tensors, by their names in the file."""
        by_file: dict[Path, list[str]] = {}
        for one in wanted:
            by_file.setdefault(one.file, []).append(one.name)
        found: Tensors = {}
        for file, names in by_file.items():
            with _opened(file) as tensors:
                found |= {name: tensors.get_tensor(name) for name in names}
        return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file: {first_line(error)}") from error
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error


def _header(path: Path) -> list[Stored]:
    """Name, type and shape of every tensor of a file; safetensors compares them with the file's size."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error
    if size > MAX_FILE_BYTES:
        raise UserError(
            f"{path} is damaged or no safetensors file: its header is larger than {MAX_FILE_BYTES >> 20} MiB"
        )
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return [Stored(path, name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()]


Files = dict[str, bytes]  # by name


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def write(path: Path, tensors: Tensors, config: Mapping[str, Any], files: Files) -> None:
    """A new directory; config.json comes last, so that one without it was never finished."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another --out")
    with atomic_write(path / WEIGHTS) as temporary:
        save_file(tensors, str(temporary), metadata={"format": "pt"})
    for name, content in [*files.items(), ("config.json", as_json(config))]:
        with atomic_write(path / name) as temporary:
            temporary.write_bytes(content)
