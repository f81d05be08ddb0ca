"""Tensors on disk: safetensors files with a checksum, written atomically. Loading never executes code."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from regard import sharding
from regard.errors import UserError
from regard.files import atomic_write, errno_text, json_checksum, parse_json, regular, write_text

Tensors = dict[str, Tensor]
MAX_FILE_BYTES = 5 * 10**9  # bytes of tensors in one file, as in Hugging Face's tools
INDEX = ".safetensors.index.json"  # the ending of an index of shards
CHECKSUM = "checksum"  # checksum of the tensors
METADATA_CHECKSUM = "facts_checksum"  # key of the checksum of the metadata, that of the tensors included
SHARDS = (
    "shards"  # in the metadata: files that hold the tensors in parts, by path relative to this file, with checksums
)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
    return digest.hexdigest()


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors with metadata, a JSON object.

    Above `MAX_FILE_BYTES`, the tensors are in shards with an index, in a folder that the file names: for example
    "model-00001000-89abcdef/model-00001-of-00002.safetensors". Shards that it does not name any more are removed.
    """
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    parts = split_by_size(on_cpu)
    if len(parts) > 1:
        metadata, on_cpu = {**metadata, SHARDS: _save_shards(path, parts, metadata.get("step", 0))}, {}
    metadata = {**metadata, CHECKSUM: digest(on_cpu)}
    # one entry, because the library does not keep the order of several
    _save_file(path, on_cpu, {"about": json.dumps({**metadata, METADATA_CHECKSUM: json_checksum(metadata)})})
    shards = metadata.get(SHARDS)
    remove_shards(path, but={Path(name).parent.name for name in shards} if isinstance(shards, list | dict) else set())


def _save_file(path: Path, tensors: Tensors, header: dict[str, str]) -> None:
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, str(temporary), metadata=header)
        except SafetensorError as error:  # the library reports the system's error as text
            full = "No space left" in str(error) or "os error 28" in str(error)
            raise OSError(28 if full else 5, "the disk is full" if full else str(error)) from error


def split_by_size(tensors: Tensors) -> list[Tensors]:
    """Divide tensors, in order, into parts of at most `MAX_FILE_BYTES`, or of one tensor."""
    parts: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > MAX_FILE_BYTES and parts[-1]:
            parts.append({})
            size = tensor.nbytes
        parts[-1][name] = tensor
    return parts


def save_indexed(folder: Path, stem: str, parts: Sequence[Tensors]) -> None:
    """Write parts in Hugging Face's layout of large models: numbered files, and an index that names each tensor's."""
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        _save_file(folder / name, part, {"format": "pt"})
    size = sum(tensor.nbytes for part in parts for tensor in part.values())
    files = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_text(folder / f"{stem}{INDEX}", json.dumps(index, indent=2, ensure_ascii=False) + "\n")


def _save_shards(path: Path, parts: Sequence[Tensors], step: int) -> dict[str, str]:
    """Write parts to a new folder; return its files with their checksums."""
    name = f"{path.stem}-{step:08d}-{secrets.token_hex(4)}"
    draft, folder = path.parent / f".{name}.tmp", path.parent / name
    try:
        save_indexed(draft, path.stem, parts)
        digests = {f"{name}/{file.name}": file_digest(file) for file in sorted(draft.iterdir())}
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return digests


def remove_shards(path: Path, but: Collection[str] = ()) -> None:
    """Remove the folders of shards that `path` does not name any more."""
    written = re.compile(rf"{re.escape(path.stem)}-\d{{8,}}-[0-9a-f]{{8}}")
    for folder in path.parent.glob(f"{glob.escape(path.stem)}-*"):
        if written.fullmatch(folder.name) and folder.name not in but and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _nothing() -> None: ...


def _host_copies(tensors: Mapping[str, Tensor]) -> tuple[Tensors, Callable[[], None]]:
    """Begin to copy tensors to the host; return the copies, and a function that waits until they are complete.

    From a GPU the copies are made by the device, in pinned memory, between the steps before and after: no host waits.
    """
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    copies = {n: torch.empty_like(t, device="cpu", pin_memory=on_gpu) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        copies[name].copy_(tensor.detach(), non_blocking=on_gpu)
    if not on_gpu:
        return copies, _nothing
    event = torch.cuda.Event()
    event.record()
    return copies, event.synchronize


class TensorWriter:
    """Saves files one after the other; `in_background`: in a background thread.

    In the background, tensors are copied first (`_host_copies`), and an error is raised by the next call of `save`,
    `check` or `wait`. After an error nothing more is written, so that no file refers to an earlier one that is missing.
    """

    AHEAD = 1  # files that may be queued while another is written; each is held in memory

    def __init__(self, in_background: bool, check: Callable[[], None] = _nothing) -> None:
        """`check` is called before each file is written, and may raise."""
        self._before = check
        self._thread = ThreadPoolExecutor(1, "writer") if in_background else None
        self._unfinished: deque[Future[None]] = deque()
        self._failed = False

    def save(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        then: Callable[[], None] = _nothing,
    ) -> None:
        """Write a file, then call `then`."""
        if self._thread is None:
            return self._write(path, tensors, metadata, then)
        self._finish(self.AHEAD)
        copies, copied = _host_copies(tensors)

        def write() -> None:
            copied()
            self._write(path, copies, metadata, then)

        self._unfinished.append(self._thread.submit(write))

    def _write(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], then: Callable[[], None]
    ) -> None:
        if self._failed:
            return
        try:
            self._before()
            save(path, tensors, metadata)
            then()
        except BaseException:
            self._failed = True
            raise

    def _finish(self, left: int) -> None:
        while len(self._unfinished) > left:
            self._unfinished.popleft().result()

    def check(self) -> None:
        """Raise the error of a failed write, if there is one."""
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft().result()

    def wait(self) -> None:
        """Wait until all files are written."""
        self._finish(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:  # after Ctrl-C, finish only the file that is being written
            self._thread.shutdown(wait=True, cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))
        if kind is None:
            self.wait()


def load(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Load tensors and metadata; a truncated or altered file is an error."""
    try:
        with safe_open(str(regular(path)), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error
    metadata = _metadata(header, path)
    if metadata.pop(CHECKSUM, header.get(CHECKSUM)) != digest(tensors):  # older files had it beside the metadata
        raise _altered(path)
    if shards(path, metadata):
        tensors |= _load_shards(path, metadata)
    return tensors, metadata


def shards(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """The shards that a file names, with their checksums; all are in one folder beside it, named after the file.

    The file may be untrusted: names outside of that folder are refused before anything is opened.
    """
    named = metadata.get(SHARDS) or {}
    if not isinstance(named, dict) or not all(isinstance(word, str) for pair in named.items() for word in pair):
        raise UserError(f"{path} is damaged: its shards are not names with checksums")
    for name in named:
        if not re.fullmatch(rf"{re.escape(path.stem)}-[^/\\\0]*/(?!\.)[^/\\\0]+", name):
            raise UserError(f"{path} is damaged: {name!r:.80} is not the name of a shard of it")
    return named


def shard_folder(path: Path, metadata: Mapping[str, Any]) -> Path:
    """The folder of the shards that a file names, which holds no other files."""
    names = {Path(name) for name in shards(path, metadata)}
    folder = path.parent / min(names).parent
    present = {file.relative_to(path.parent) for file in folder.glob("*")}
    if present != names:
        raise UserError(f"{path} is damaged: {folder} does not hold the {len(names)} files that it names")
    return folder


def verify_shard(path: Path, metadata: Mapping[str, Any], name: str) -> None:
    """Raise a UserError if a shard was altered."""
    expected = shards(path, metadata)[name]
    if file_digest(path.parent / name) != expected:
        raise _altered(path.parent / name)


def file_digest(path: Path) -> str:
    """Hash the content of a file."""
    try:
        with open(regular(path), "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path} could not be read: {errno_text(error)}") from error


def _load_shards(path: Path, metadata: Mapping[str, Any]) -> Tensors:
    """Put together the tensors whose parts are in shards."""
    from torch.distributed import checkpoint as dcp

    for name in shards(path, metadata):
        verify_shard(path, metadata, name)
    tensors = {name: torch.empty_like(t, device="cpu") for name, t in stored_in_shards(path, metadata).items()}
    with warnings.catch_warnings():  # PyTorch warns that there is only one process, which is intended
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(shard_folder(path, metadata))), no_dist=True)
    return tensors


def stored_in_shards(path: Path, metadata: Mapping[str, Any]) -> Tensors:
    """The tensors whose parts are in shards, without their values (on PyTorch's meta device)."""
    from torch.distributed import checkpoint as dcp

    state: Any = dcp.HuggingFaceStorageReader(str(shard_folder(path, metadata))).read_metadata()
    return {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for name, stored in state.state_dict_metadata.items()
    }


def mean(files: Sequence[Path]) -> Tensors:
    """The mean of several weight files, tensor by tensor, summed in float64."""
    total: Tensors = {}
    for file in files:
        for name, tensor in load(file)[0].items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(files)).float() for name, tensor in total.items()}


def read_metadata(path: Path) -> dict[str, Any]:
    """Load the metadata without the tensors."""
    try:
        with safe_open(str(regular(path)), framework="pt") as file:
            metadata = _metadata(file.metadata() or {}, path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or could not be read: {error}") from error
    metadata.pop(CHECKSUM, None)
    return metadata


def elements(path: Path, prefix: str = "") -> int:
    """The number of elements of all tensors whose names start with `prefix`, read from the headers."""
    parts = [name for name in shards(path, read_metadata(path)) if not name.endswith(INDEX)]
    return sum(_elements(file, prefix) for file in (path, *(path.parent / name for name in parts)))


def _elements(path: Path, prefix: str) -> int:
    try:
        with safe_open(str(regular(path)), framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or could not be read: {error}") from error


def _metadata(header: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The metadata in a file's header, verified by its checksum if it has one."""
    try:
        metadata = parse_json(header.get("about", "{}"))
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise UserError(f"{path} is damaged: the metadata in its header are not a JSON object")
    if METADATA_CHECKSUM in metadata and metadata.pop(METADATA_CHECKSUM) != json_checksum(metadata):
        raise _altered(path)
    return metadata


def _altered(path: Path) -> UserError:
    return UserError(f"{path} was altered after it was written: its checksum does not match")


def model_tensors(model: nn.Module) -> Tensors:
    """Every parameter and persistent buffer once, by name (tied ones under their first name)."""
    persistent = set(model.state_dict())
    return {
        **{name: p.detach() for name, p in model.named_parameters()},
        **{name: b for name, b in model.named_buffers() if name in persistent},
    }


def load_into_model(model: nn.Module, tensors: Mapping[str, Tensor], origin: object) -> None:
    """Copy tensors into a model; a missing or unknown tensor, or one of the wrong shape, is an error that names it."""
    targets = model_tensors(model)
    check_names(targets, tensors, origin)  # before copying, so that an error leaves the model unchanged
    for name, target in targets.items():
        sharding.fill(target, tensors[name])


def check_names(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], origin: object) -> None:
    """Raise an error for a missing or unknown tensor, or one of another shape than its target."""
    lacking, unknown = targets.keys() - tensors.keys(), tensors.keys() - targets.keys()
    for what, names in (("lacks", lacking), ("has an unknown", unknown)):
        if names:
            raise UserError(f"{origin} {what} tensor {min(names)} ({len(names)} in all)")
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise UserError(f"{origin}: {name} has shape {tuple(tensors[name].shape)}, not {tuple(target.shape)}")
