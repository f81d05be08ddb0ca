"""Writing files so that a reader sees the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import UserError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "it is a folder",
}


def reason(error: OSError) -> str:
    """What went wrong, in plain words."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


MAX_TEXT_BYTES = 1 << 28  # of a file that is read whole, such as a recipe, a vocabulary or metrics


def regular(path: Path) -> Path:
    """Return the path of a file that exists; a pipe or a device, which could block or never end, is an error."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe or a device, not a file")
    return path


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read a whole text file. Raises OSError and UnicodeDecodeError, and UserError where it is no file or too large."""
    if regular(path).is_file() and path.stat().st_size > MAX_TEXT_BYTES:
        raise UserError(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MB, which no such file is")
    return path.read_text(encoding=encoding, errors=errors)


def parse_json(text: str) -> Any:
    """Parse JSON; whatever is wrong with it, nesting that is too deep included, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Write to the path given; when the block ends well it takes the place of `path`, on disk, at once.

    If anything fails the old file stays as it was and the half-written one is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # a library that replaced the file with one of its own may have made it private
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"{path} could not be written: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder for one process; `what` says what the other one is doing. Where locks are not to be had, go on."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / ".lock", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is {what} there; wait for it, or stop it") from None
        except OSError:
            pass
        yield


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
