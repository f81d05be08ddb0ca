"""The resume state of a sharded model: PyTorch's distributed checkpoint (DCP) in safetensors files.

Each process writes its parts of the tensors to a file of a new folder. When all files are complete, the main process
renames the folder, and then writes `resume.safetensors`, which names the files with their checksums. A folder that no
such file names does not count, so that a job that ends at any moment leaves a complete state behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from regard import distributed, tensor_io
from regard.errors import UserError, first_line
from regard.files import errno_text


class ShardedStates:
    """Saves the states of a run, one after the other; `in_background`: in a thread, while training goes on.

    `check` is called before anything replaces the last state, and may raise.
    """

    def __init__(self, in_background: bool, check: Callable[[], None]) -> None:
        self._check = check
        self._thread = ThreadPoolExecutor(1, "shards") if in_background else None
        self._pending: Future[None] | None = None
        self._stager: Any = None  # holds pinned memory for the next state

    def _staged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies of tensors on the host; the next call overwrites them."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        copies: Mapping[str, Tensor] = self._stager.stage(dict(tensors))
        return copies

    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Save a state. All processes have to call this."""
        self.wait()
        name = distributed.broadcast(f"{path.stem}-{metadata['step']:08d}-{secrets.token_hex(4)}")
        if self._thread is None:
            self._write(path, name, tensors, metadata)
        else:
            copies = self._staged(tensors)
            self._pending = self._thread.submit(self._write, path, name, copies, metadata)

    def _write(self, path: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        from torch.distributed import checkpoint as dcp

        draft, folder = path.parent / f".{name}.tmp", path.parent / name
        writer = dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True)
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=distributed.saving_group())
        except dcp.CheckpointException as error:  # not an Exception; raised when all processes have finished writing
            if distributed.is_main():
                shutil.rmtree(draft, ignore_errors=True)  # the disk may be full
            number, (cause, _) = min(error.failures.items())
            why = errno_text(cause) if isinstance(cause, OSError) else first_line(Exception(cause))
            raise UserError(f"{path}: rank {number} could not write its part: {why}") from error
        written = {
            f"{name}/{file.name}": tensor_io.file_digest(file)
            for file in draft.glob(f"shard-{distributed.rank() + 1:05d}-*")
        }
        digests = {file: digest for part in distributed.gather_saved(written) for file, digest in part.items()}
        if distributed.is_main():
            self._check()
            os.rename(draft, folder)
            tensor_io.save(path, {}, {**metadata, tensor_io.SHARDS: digests})

    def check(self) -> None:
        """Raise what went wrong in the background, if that has ended."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last state is on disk."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def load_shards(path: Path, metadata: Mapping[str, Any], into: Mapping[str, Tensor]) -> None:
    """Load a state into tensors that are divided among processes, each its parts. All processes have to call this."""
    from torch.distributed import checkpoint as dcp

    distributed.spread(
        lambda name: tensor_io.verify_shard(path, metadata, name), list(tensor_io.shards(path, metadata))
    )
    reader = dcp.HuggingFaceStorageReader(str(tensor_io.shard_folder(path, metadata)))
    dcp.load(dict(into), storage_reader=reader)
