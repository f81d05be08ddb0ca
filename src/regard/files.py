"""Files that are written whole or not at all, their checksums, and locks on directories."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

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
_TEMPORARY = re.compile(r"\..+\.tmp|\.tmp[A-Za-z0-9]{6}")  # names made by `atomic_write` and by the safetensors library
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def errno_text(error: OSError) -> str:
    """Describe an error of the operating system in plain words."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


MAX_TEXT_BYTES = 1 << 28  # maximum size of a file that is read whole, such as a recipe or a vocabulary


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
    """Parse JSON; any error, also too deep nesting, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; when the block succeeds, that file atomically replaces `path` on disk.

    If anything fails, the old file stays as it was and the temporary one is removed. The temporary file has a random
    name and is created exclusively, so that an existing file or link is never written to.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o666)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        os.close(handle)
        yield temporary
        handle = os.open(temporary, os.O_RDONLY | _NOFOLLOW)
        try:
            os.fchmod(handle, mode)  # a library that replaced the file may have given it another mode
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"{path} could not be written: {errno_text(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files and folders that killed processes left. Only for the process that holds the lock."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for file in list(folder.iterdir()):
            if _TEMPORARY.fullmatch(file.name) and file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            elif _TEMPORARY.fullmatch(file.name):
                file.unlink(missing_ok=True)


def checksum(content: bytes | str) -> str:
    """A digest of 16 bytes, in hexadecimal digits."""
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=16).hexdigest()


def json_checksum(content: dict[str, Any]) -> str:
    """The digest of a JSON object; the same after it was written to a file and read again."""
    return checksum(json.dumps(content))


class DirectoryLock:
    """A lock on a directory for one job, held from here to `release` or to the end of a `with` block.

    `activity` says what the job does there, for the message that another job gets. One process of the job takes the
    lock; the others are admitted with `exclusive=False`, which locks nothing. The lock is a file in the directory and
    vanishes with it: `ensure_held` raises when the directory was deleted, moved or replaced meanwhile. On a file system
    without locks, nothing is excluded.
    """

    NAME = ".lock"

    def __init__(self, folder: Path, activity: str, exclusive: bool = True) -> None:
        self.folder, self.activity = folder, activity
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / self.NAME, os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o666)
        except OSError as error:
            raise UserError(f"{folder / self.NAME} could not be written: {errno_text(error)}") from error
        if not exclusive:
            return
        try:
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UserError(f"{folder}: another process is {activity} there; wait for it, or stop it") from None
        except (ImportError, OSError):
            pass

    def ensure_held(self) -> None:
        """Raise an error if the directory is no longer the one that was locked."""
        try:
            held = os.path.samestat(os.fstat(self._handle), os.lstat(self.folder / self.NAME))
        except (FileNotFoundError, NotADirectoryError):
            held = False
        if not held:
            raise UserError(f"{self.folder} was deleted, moved or replaced while {self.activity} went on; stopped")

    def release(self) -> None:
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
