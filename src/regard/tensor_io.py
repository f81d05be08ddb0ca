"""Tensors on disk: safetensors files with a checksum, written whole or not at all. Loading never executes code."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.errors import UserError
from regard.files import atomic_write, errno_text, json_checksum, parse_json, regular

Tensors = dict[str, Tensor]
CHECKSUM = "checksum"  # of the tensors
FACTS_CHECKSUM = "facts_checksum"  # of the facts about them, the tensors' checksum included


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    return digest.hexdigest()


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a few JSON facts about them."""
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    facts = {**about, CHECKSUM: digest(on_cpu)}
    header = {"about": json.dumps({**facts, FACTS_CHECKSUM: json_checksum(facts)})}  # the library shuffles entries
    with atomic_write(path) as temporary:
        try:
            save_file(on_cpu, str(temporary), metadata=header)
        except SafetensorError as error:  # the library wraps the system's reason in text
            full = "No space left" in str(error) or "os error 28" in str(error)
            raise OSError(28 if full else 5, "the disk is full" if full else str(error)) from error


def _nothing() -> None: ...


class TensorWriter:
    """Saves files one after the other; `behind`: on a thread of its own, while whoever saves goes on.

    Then tensors are copied first, and what went wrong is raised by the next call of `save`, `check` or `wait`. After
    that nothing more is written: a file never says that an earlier one is there which is not.
    """

    AHEAD = 1  # files that may wait while another is written: each is held in memory

    def __init__(self, behind: bool, check: Callable[[], None] = _nothing) -> None:
        """`check` is called before each file is written, and may raise."""
        self._before = check
        self._thread = ThreadPoolExecutor(1, "writer") if behind else None
        self._unfinished: deque[Future[None]] = deque()
        self._failed = False

    def save(
        self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], then: Callable[[], None] = _nothing
    ) -> None:
        """Write a file; `then` is what is to be done once it is there."""
        if self._thread is None:
            return self._write(path, tensors, about, then)
        self._finish(self.AHEAD)
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._unfinished.append(self._thread.submit(self._write, path, copies, about, then))

    def _write(
        self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], then: Callable[[], None]
    ) -> None:
        if self._failed:
            return
        try:
            self._before()
            save(path, tensors, about)
            then()
        except BaseException:
            self._failed = True
            raise

    def _finish(self, left: int) -> None:
        while len(self._unfinished) > left:
            self._unfinished.popleft().result()

    def check(self) -> None:
        """Raise what has gone wrong so far."""
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft().result()

    def wait(self) -> None:
        """Until everything is on disk."""
        self._finish(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:  # who is in a hurry waits for the file that is being written, and no other
            self._thread.shutdown(wait=True, cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))
        if kind is None:
            self.wait()


def load(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and facts; a truncated or altered file is an error that names it."""
    try:
        with safe_open(str(regular(path)), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error
    facts = _facts(header, path)
    if facts.pop(CHECKSUM, header.get(CHECKSUM)) != digest(tensors):  # older files had it beside the facts
        raise _altered(path)
    return tensors, facts


def mean(files: Sequence[Path]) -> Tensors:
    """The mean of several weight files, tensor by tensor, summed in float64."""
    total: Tensors = {}
    for file in files:
        for name, tensor in load(file)[0].items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(files)).float() for name, tensor in total.items()}


def read_metadata(path: Path) -> dict[str, Any]:
    """The facts alone, without reading the tensors."""
    try:
        with safe_open(str(regular(path)), framework="pt") as file:
            facts = _facts(file.metadata() or {}, path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or could not be read: {error}") from error
    facts.pop(CHECKSUM, None)
    return facts


def elements(path: Path, prefix: str = "") -> int:
    """The number of elements of all tensors of a file whose names begin so, from its header alone."""
    try:
        with safe_open(str(regular(path)), framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or could not be read: {error}") from error


def _facts(header: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The facts in a file's header, compared with their checksum; older files have none."""
    try:
        facts = parse_json(header.get("about", "{}"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise UserError(f"{path} is damaged: what its header says about it is not a JSON object")
    if FACTS_CHECKSUM in facts and facts.pop(FACTS_CHECKSUM) != json_checksum(facts):
        raise _altered(path)
    return facts


def _altered(path: Path) -> UserError:
    return UserError(f"{path} was altered after it was written: its checksum does not match")


def model_tensors(model: nn.Module) -> Tensors:
    """Every parameter and kept buffer once, by name (tied ones under their first name)."""
    kept = set(model.state_dict())
    return {
        **{name: p.detach() for name, p in model.named_parameters()},
        **{name: b for name, b in model.named_buffers() if name in kept},
    }


def load_into_model(model: nn.Module, tensors: Mapping[str, Tensor], origin: object) -> None:
    """Copy tensors into a model; a missing, unknown or misshapen one is an error that names it."""
    own = model_tensors(model)
    for what, names in (("lacks", own.keys() - tensors.keys()), ("has an unknown", tensors.keys() - own.keys())):
        if names:
            raise UserError(f"{origin} {what} tensor {min(names)} ({len(names)} in all)")
    for name, mine in own.items():  # all of them before the first is copied: a model is not left half changed
        if mine.shape != tensors[name].shape:
            raise UserError(f"{origin}: {name} has shape {tuple(tensors[name].shape)}, not {tuple(mine.shape)}")
    for name, mine in own.items():
        mine.copy_(tensors[name])
