"""A Hugging Face model directory on disk: JSON, text and safetensors. Nothing in it is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from regard.errors import UserError
from regard.files import atomic, reason
from regard.weights import Tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Folder:
    """A directory with config.json in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.has("config.json"):
            what = "has no config.json" if self.path.is_dir() else "is no folder"
            raise UserError(f"{self.path} {what}: a Hugging Face model directory is wanted")

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise UserError(f"{self.path / name} could not be read: {reason(error)}") from error

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path / name} is damaged: it is not UTF-8 text") from None

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object; an empty one where there is no such file."""
        if not self.has(name):
            return {}
        try:
            found = json.loads(self.text(name))
        except ValueError as error:
            raise UserError(f"{self.path / name} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"{self.path / name} is damaged: it holds no JSON object")
        return found

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.json("config.json")

    def setting(self, name: str, usual: Any = None) -> Any:
        """A setting of config.json, or what its absence means there."""
        return self.config.get(name, usual)

    def insist(self, **wanted: Any) -> None:
        """Settings that have no counterpart here unless they have these values; not being there is as good."""
        for name, value in wanted.items():
            if name in self.config and self.config[name] != value:
                raise UserError(f"{self.path}: {name} = {self.config[name]!r} has no counterpart here (only {value!r})")

    @cached_property
    def specials(self) -> dict[str, str]:
        """How the special tokens are spelt, by what they are for: {"eos_token": "</s>"}."""
        named = self.json("special_tokens_map.json") | self.json("tokenizer_config.json")
        tokens = {role: token for role, token in named.items() if role.endswith("_token")}
        plain = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
        return {role: token for role, token in plain.items() if isinstance(token, str)}

    def tensors(self) -> Tensors:
        """All tensors, of one file or of several that an index lists."""
        if self.has(INDEX):
            names = sorted(set(self.json(INDEX).get("weight_map", {}).values()))
        elif self.has(WEIGHTS):
            names = [WEIGHTS]
        elif any(self.has(name) for name in PICKLES):
            raise UserError(
                f"{self.path} has its weights only as pytorch_model.bin, a pickle, which regard never loads: it could "
                'run any code. Where you trust it, convert it: python -c "from transformers import AutoModel as M; '
                "M.from_pretrained('FOLDER').save_pretrained('NEW')\" (with the class that config.json names under "
                f"architectures, not AutoModel), which writes {WEIGHTS}"
            )
        else:
            raise UserError(f"{self.path} has no {WEIGHTS}")
        found: Tensors = {}
        for name in names:
            found |= _load(self.path / Path(name).name)
        return found


def _load(path: Path) -> Tensors:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"{path} could not be read: {reason(error)}") from error


Files = dict[str, bytes]  # by name


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def write(path: Path, tensors: Tensors, config: Mapping[str, Any], files: Files) -> None:
    """A new directory; config.json comes last, so that one without it was never finished."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another --out")
    with atomic(path / WEIGHTS) as temporary:
        save_file(tensors, str(temporary), metadata={"format": "pt"})
    for name, content in [*files.items(), ("config.json", as_json(config))]:
        with atomic(path / name) as temporary:
            temporary.write_bytes(content)
