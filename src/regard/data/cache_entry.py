"""Entries of the cache on disk: folders that are written whole or not at all, and verified when they are opened.

An entry's name is a digest of everything that determines its content. Processes on one machine that need the same entry
wait for the first of them to write it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from regard.errors import UserError

DRAFT_MAX_AGE = 24 * 3600  # seconds

Store = TypeVar("Store")


def cache_home() -> Path:
    """The folder of all caches: `REGARD_CACHE`, or below the user's cache directory."""
    home = os.environ.get("REGARD_CACHE")
    if home:
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard"


@dataclass(frozen=True)
class CacheEntry(Generic[Store]):
    """A folder of the cache, in words for messages, and the function that opens it.

    `open` returns None if the entry does not exist or is not what was written.
    """

    folder: Path
    what: str  # "the tokens of train.en and train.de"
    open: Callable[[Path], Store | None]

    def opened(self, write: Callable[[Path], None], say: Callable[[str], None]) -> Store:
        """Open the entry; if it does not exist or is damaged, `write` it to a new folder first."""
        store, cache = self.open(self.folder), self.folder.parent
        if store is None:
            try:
                with self._lock(say):
                    store = self.open(self.folder)  # another process may have built it meanwhile
                    if store is None:
                        if self.folder.exists():
                            say(f"{self.what} in {self.folder} are damaged: rebuilding them")
                        self._build(write)
                        _remove_stale_drafts(cache)
            except OSError as error:
                hint = "set REGARD_CACHE to a writable folder with enough space"
                raise UserError(f"cannot write {self.what} to {cache}: {error.strerror or error}; {hint}") from error
            store = self.open(self.folder) if store is None else store
        if store is None:
            raise UserError(f"{self.what}, just written to {self.folder}, are gone or damaged; try again")
        return store

    @contextmanager
    def _lock(self, say: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time build an entry; others wait. Where files cannot be locked, each builds a draft."""
        locks = self.folder.parent.with_name("locks")
        locks.mkdir(parents=True, exist_ok=True)
        with open(locks / f"{self.folder.name}.lock", "wb") as file:
            with suppress(ImportError):  # Windows
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say(f"waiting for another process, which prepares {self.what}")
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError:  # a file system without locks
                    pass
            yield

    def _build(self, write: Callable[[Path], None]) -> None:
        """Write to a draft folder and rename it when it is complete, so that no reader sees half of an entry."""
        draft = self.folder.with_name(f"{self.folder.name}.{os.getpid()}-{secrets.token_hex(4)}.draft")
        draft.mkdir(parents=True)
        try:
            write(draft)
            try:
                draft.rename(self.folder)
            except OSError:  # the folder exists
                if self.open(self.folder) is None:  # damaged; otherwise another process has written the same entry
                    shutil.rmtree(self.folder)
                    draft.rename(self.folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _remove_stale_drafts(cache: Path) -> None:
    """Remove drafts that a killed process left behind: those not written to for a day."""
    for draft in cache.glob("*.draft"):
        with suppress(OSError):  # another process may be removing it too
            newest = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
            if time.time() - newest > DRAFT_MAX_AGE:
                shutil.rmtree(draft, ignore_errors=True)


def new_hash() -> Any:
    return hashlib.blake2b(digest_size=8)


def folder_digest(folder: Path, names: list[str]) -> str:
    """Hash files of a folder, each in its own thread."""

    def digest(name: str) -> str:
        with open(folder / name, "rb", buffering=0) as file:
            return hashlib.file_digest(file, new_hash).hexdigest()

    with ThreadPoolExecutor(len(names)) as threads:
        return "".join(threads.map(digest, names))
