"""The trace itself: a header of plain JSON, and what is worked out when it is asked for: arrays, and layers.

An array is exact in Python (float32) and carried in less: weights and gates between 0 and 1 as uint8, in steps of
1/255, so that no value is off by more than 0.002; vectors as float16; logits as float32. The header says how each one
is carried, `value = stored * scale`, little-endian in C order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard import tensor_io
from regard.errors import UserError
from regard.interpret.notebook import NotebookDisplay

FORMAT, VERSION = "regard-trace", 1
STEP = 1 / 255  # between two values that uint8 tells apart
LARGEST_HALF = 6e4  # float16 ends at 65504

Header = dict[str, Any]
Made = Callable[[], np.ndarray]
Layers = list[dict[str, Any]]


class Trace(NotebookDisplay):
    """What was recorded of one run: `header` is plain JSON, `array(name)` the numbers behind it, `layers` what each
    layer would say.

    >>> trace = model.trace("this cat is very large")              # doctest: +SKIP
    >>> trace.header["text"]["target"]                             # doctest: +SKIP
    'este gato es muy grande'
    >>> trace.array("decoder.0.cross_attn.weights").shape               # doctest: +SKIP
    (8, 6, 6)
    """

    def __init__(
        self,
        header: Header,
        arrays: Mapping[str, Made],
        layers: Callable[[], Layers] = list,
        vocabulary: Callable[[], list[str]] = list,
    ) -> None:
        self.header = header
        self._arrays = dict(arrays)
        self._read_off, self._spell = layers, vocabulary
        self._shown: dict[str, np.ndarray] = {}  # those that were worked out on the way

    @property
    def key(self) -> str:
        return str(self.header["key"])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arrays."""
        return tuple(self.header["arrays"])

    def array(self, name: str) -> np.ndarray:
        """The numbers, float32: exact as recorded, or as exact as the file they were read from.

        A row of an array has a name too: `output.logits/3`.
        """
        whole, row = self._named(name)
        found = np.asarray(self._arrays[whole](), np.float32)
        return found if row is None else found[row]

    def display(self, name: str) -> np.ndarray:
        """The array as it is carried: uint8, float16 or float32, as `header["arrays"]` says."""
        whole, row = self._named(name)
        found = self._shown.get(whole)
        if found is not None:
            return found if row is None else found[row]
        return carried(self.array(name), self.header["arrays"][whole]["dtype"])

    def keep(self, name: str, exact: np.ndarray) -> None:
        """Keep how an array is carried, where its numbers are at hand already."""
        self._shown[name] = carried(exact, self.header["arrays"][name]["dtype"])

    @cached_property
    def layers(self) -> Layers:
        """What the model would say if it stopped at each place that `header["layers"]` names.

        Each is that entry and `top`, for every token the five likeliest next ones, `{"id", "piece", "p"}`. Read off the
        stream when first asked for: of a long text that is more than all the rest of the header.
        """
        return self._read_off()

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of every token of the output's vocabulary, by id."""
        return self._spell()

    @property
    def size(self) -> int:
        """Bytes of all arrays as they are carried."""
        return sum(
            int(np.prod(about["shape"])) * np.dtype(about["dtype"]).itemsize for about in self.header["arrays"].values()
        )

    def _named(self, name: str) -> tuple[str, int | None]:
        whole, _, row = name.partition("/")
        about = self.header["arrays"].get(whole)
        if about is None or (row and row not in map(str, range(about["shape"][0]))):
            raise KeyError(f"this trace has no array {name!r}")
        return whole, int(row) if row else None

    def save(self, path: str | Path) -> None:
        """Write everything into one safetensors file: arrays as they are carried, the rest as its metadata."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(self.display(name))) for name in self.names}
        tensor_io.save(Path(path), tensors, self.header | {"layers": self.layers, "vocabulary": self.vocabulary})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace that `save` wrote."""
        tensors, header = tensor_io.load(Path(path))
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UserError(f"{path} is no trace: `regard draw RUN TEXT --out FILE.safetensors` writes one")
        if header.get("version") != VERSION:
            found = header.get("version")
            raise UserError(f"{path} is a trace of version {found}; this regard reads version {VERSION}")
        described = {name: (about["shape"], about["dtype"]) for name, about in header["arrays"].items()}
        if described != {name: (list(one.shape), _dtype(one)) for name, one in tensors.items()}:
            raise UserError(f"{path} is damaged: its header and its arrays do not agree")
        stored = {name: one.numpy() for name, one in tensors.items()}
        layers = header["layers"]
        header["layers"] = [{name: layer[name] for name in ("name", "label", "side")} for layer in layers]
        made = {name: _values(one, header["arrays"][name]["scale"]) for name, one in stored.items()}
        vocabulary = header.pop("vocabulary", [])
        trace = cls(header, made, lambda: layers, lambda: vocabulary)
        trace._shown = stored
        return trace


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(stored: np.ndarray, scale: float) -> Made:
    return lambda: stored.astype(np.float32) * np.float32(scale)


def carried(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as they are carried: between 0 and 1 in steps of 1/255, or as floats of some size."""
    if dtype == "uint8":
        return np.rint(exact.clip(0.0, 1.0) * 255).astype(np.uint8)
    return np.ascontiguousarray(exact.astype(np.dtype(dtype).newbyteorder("<")))


def described(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """What a header says of an array."""
    return {"shape": [int(n) for n in shape], "dtype": dtype, "scale": STEP if dtype == "uint8" else 1.0}


def request_key(run: str, step: int | None, text: str, target: str | None, after: Any, changes: Any) -> str:
    """One string for what was asked, the same in Python and in the page (JSON.stringify of the same list)."""
    asked = [run, step, text, target, after, _plain(list(changes))]
    return json.dumps(asked, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Whole floats as integers, for JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def digest(key: str) -> str:
    """A short name for a request."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
