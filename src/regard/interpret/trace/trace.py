"""The trace itself: a header of plain JSON, and arrays and logit lens that are computed on access.

An array is exact in Python (float32) and stored in fewer bits: weights and gates between 0 and 1 as uint8 in steps of
1/255, with an error of at most 0.002; vectors as float16; logits as float32. The header gives the data type and scale
of each, `value = stored * scale`, little-endian in C order.
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

FORMAT, VERSION = "regard-trace", 2
STEP = 1 / 255  # between neighbouring uint8 values
MAX_FLOAT16 = 6e4  # the largest float16 is 65504

Header = dict[str, Any]
MakeArray = Callable[[], np.ndarray]
Layers = list[dict[str, Any]]


class Trace(NotebookDisplay):
    """A recorded forward pass: `header` is plain JSON, `array(name)` are its numbers, `layers` the logit lens.

    >>> trace = model.trace("this cat is very large")              # doctest: +SKIP
    >>> trace.header["text"]["target"]                             # doctest: +SKIP
    'este gato es muy grande'
    >>> trace.array("decoder.0.cross_attn.weights").shape               # doctest: +SKIP
    (8, 6, 6)
    """

    def __init__(
        self,
        header: Header,
        arrays: Mapping[str, MakeArray],
        layers: Callable[[], Layers] = list,
        vocabulary: Callable[[], list[str]] = list,
    ) -> None:
        self.header = header
        self._arrays = dict(arrays)
        self._make_layers, self._make_vocabulary = layers, vocabulary
        self._stored: dict[str, np.ndarray] = {}  # arrays that were computed already, as they are stored

    @property
    def key(self) -> str:
        return str(self.header["key"])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arrays."""
        return tuple(self.header["arrays"])

    def elements(self, axis: str) -> list[dict[str, Any]]:
        """The elements of an axis ("source", "inputs", "target"): tokens, patches, steps, nodes."""
        elements: list[dict[str, Any]] = self.header["axes"][axis]["elements"]
        return elements

    def array(self, name: str) -> np.ndarray:
        """An array as float32, exact as recorded or, in a loaded trace, as exact as its file.

        A row of an array has a name too: `output.logits/3`.
        """
        whole, row = self._resolve(name)
        values = np.asarray(self._arrays[whole](), np.float32)
        return values if row is None else values[row]

    def display(self, name: str) -> np.ndarray:
        """An array as it is stored: uint8, float16 or float32, as `header["arrays"]` says."""
        whole, row = self._resolve(name)
        stored = self._stored.get(whole)
        if stored is not None:
            return stored if row is None else stored[row]
        return quantize(self.array(name), self.header["arrays"][whole]["dtype"])

    def store(self, name: str, exact: np.ndarray) -> None:
        """Keep an array in its stored form, where it has been computed already."""
        self._stored[name] = quantize(exact, self.header["arrays"][name]["dtype"])

    @cached_property
    def layers(self) -> Layers:
        """The logit lens: the output layer applied to the residual stream at each layer that `header["layers"]` names.

        Each is that entry and `top`, the five most probable next tokens at every position, `{"id", "text", "p"}`.
        Computed on first access: for a long text it is larger than the rest of the header.
        """
        return self._make_layers()

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of every token of the output's vocabulary, by id."""
        return self._make_vocabulary()

    @property
    def size(self) -> int:
        """The bytes of all arrays as they are stored."""
        return sum(
            int(np.prod(about["shape"])) * np.dtype(about["dtype"]).itemsize for about in self.header["arrays"].values()
        )

    def _resolve(self, name: str) -> tuple[str, int | None]:
        """Split a name into that of an array and a row of it."""
        whole, _, row = name.partition("/")
        about = self.header["arrays"].get(whole)
        if about is None or (row and row not in map(str, range(about["shape"][0]))):
            raise KeyError(f"this trace has no array {name!r}")
        return whole, int(row) if row else None

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, with the header as its metadata."""
        tensors = {name: torch.from_numpy(np.ascontiguousarray(self.display(name))) for name in self.names}
        tensor_io.save(Path(path), tensors, self.header | {"layers": self.layers, "vocabulary": self.vocabulary})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote."""
        tensors, header = tensor_io.load(Path(path))
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UserError(f"{path} is no trace: `regard draw RUN TEXT --out FILE.safetensors` writes one")
        if header.get("version") != VERSION:
            version = header.get("version")
            raise UserError(f"{path} is a trace of version {version}; this regard reads version {VERSION}")
        expected = {name: (about["shape"], about["dtype"]) for name, about in header["arrays"].items()}
        if expected != {name: (list(tensor.shape), _dtype(tensor)) for name, tensor in tensors.items()}:
            raise UserError(f"{path} is damaged: its header and its arrays do not agree")
        stored = {name: tensor.numpy() for name, tensor in tensors.items()}
        layers = header["layers"]
        header["layers"] = [{name: layer[name] for name in ("name", "label", "side")} for layer in layers]
        arrays = {name: _dequantize(array, header["arrays"][name]["scale"]) for name, array in stored.items()}
        vocabulary = header.pop("vocabulary", [])
        trace = cls(header, arrays, lambda: layers, lambda: vocabulary)
        trace._stored = stored
        return trace


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dequantize(stored: np.ndarray, scale: float) -> MakeArray:
    return lambda: stored.astype(np.float32) * np.float32(scale)


def quantize(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Convert an array to its stored form: values between 0 and 1 in steps of 1/255, or floats of some size."""
    if dtype == "uint8":
        return np.rint(exact.clip(0.0, 1.0) * 255).astype(np.uint8)
    return np.ascontiguousarray(exact.astype(np.dtype(dtype).newbyteorder("<")))


def describe_array(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """The entry of an array in the header."""
    return {"shape": [int(n) for n in shape], "dtype": dtype, "scale": STEP if dtype == "uint8" else 1.0}


def request_key(run: str, step: int | None, text: str, target: str | None, after: Any, changes: Any) -> str:
    """A string that identifies a request, the same in Python and on the page (JSON.stringify of the same list)."""
    request = [run, step, text, target, after, _whole_floats_as_integers(list(changes))]
    return json.dumps(request, ensure_ascii=False, separators=(",", ":"))


def _whole_floats_as_integers(value: Any) -> Any:
    """Replace 1.0 by 1, as JavaScript writes it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_floats_as_integers(item) for key, item in value.items()}
    return [_whole_floats_as_integers(item) for item in value] if isinstance(value, list | tuple) else value


def digest(key: str) -> str:
    """A short name for a request."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
