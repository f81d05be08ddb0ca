"""Download the public data sets that recipes name, into a folder that `--data` accepts.

The sets and their URLs are listed in `public_sets.toml`. A file gets its final name only when it is complete and
verified; existing files are left alone.

The digest of a download without a checksum in the table is recorded in `SHA256SUMS` beside the sets' folders, and later
downloads are compared with it.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import lzma
import os
import re
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from regard.data.download import BLOCK_BYTES, HINT, Progress, discard, download, file_sha256, mismatch
from regard.errors import UserError
from regard.files import read_text

Form = Literal["lines", "ted", "segments"]
Member = tuple[str, str]  # archive, path in it

DIGESTS = "SHA256SUMS"  # in the format of sha256sum
MAX_SIZE_RATIO = 2  # largest size of one download, relative to the stated size of its set
MAX_EXPANSION = 20  # largest size of unpacked contents, relative to the largest download

_CORRUPT = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
_TED_METADATA = re.compile(rb"\s*</?(doc|url|talkid|keywords|speaker|reviewer|translator)\b")
_TED_TAG = re.compile(rb"</?(title|description)>")
_SEGMENT = re.compile(rb"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Archive:
    """A tar or zip file with several of a set's files; `verified` is false if its URL has not been tried."""

    url: str
    sha256: str | None = None
    verified: bool = True


@dataclass(frozen=True)
class PublicFile:
    """One file of a set: `name` in the folder, and either its own `url` or the members it is concatenated from.

    `sha256` is the digest of the bytes served, `text_sha256` that of the file in the folder. `every` selects each nth
    line only, `except_every` all but each nth: together they split a validation set from the training text.
    """

    name: str
    url: str | None = None
    sha256: str | None = None
    text_sha256: str | None = None
    parts: tuple[Member, ...] = ()
    form: Form = "lines"
    every: int | None = None
    except_every: int | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """`parts`, or the only member of the file at `url`, which is named "" and may be compressed."""
        return self.parts or ((self.name + (".gz" if (self.url or "").endswith(".gz") else ""), ""),)


@dataclass(frozen=True)
class PublicSet:
    """A data set that can be downloaded: description, terms of use, size of the download in bytes, and files.

    `recipes` are the built-in ones that train on it.
    """

    name: str
    description: str
    terms: str
    size: int
    files: tuple[PublicFile, ...]
    archives: Mapping[str, Archive]
    recipes: Sequence[str] = ()

    @property
    def max_bytes(self) -> int:
        """The largest size of one download."""
        return MAX_SIZE_RATIO * self.size


@cache
def sets() -> dict[str, PublicSet]:
    """All sets, by name: `sets()["multi30k"].description`."""
    table = tomllib.loads((resources("regard.data") / "public_sets.toml").read_text(encoding="utf-8"))
    return {name: _public_set(name, entry) for name, entry in table.items()}


def set_of(recipe: str) -> PublicSet | None:
    """The set that a built-in recipe trains on, if it can be downloaded."""
    return next((known for known in sets().values() if recipe in known.recipes), None)


def _public_set(name: str, entry: dict[str, Any]) -> PublicSet:
    archives = {key: Archive(**archive) for key, archive in entry.pop("archives", {}).items()}
    files = []
    for file in entry.pop("files"):
        parts = [part.partition(":") for part in file.pop("parts", [])]
        if not file.get("url", ".gz").endswith(".gz"):
            file["text_sha256"] = file.get("sha256")  # not compressed: served as it is stored
        files.append(PublicFile(**file, parts=tuple((archive, member) for archive, _, member in parts)))
    return PublicSet(name=name, files=tuple(files), archives=archives, **entry)


def fetch(name: str, folder: Path, *, base: str | None = None, progress: Progress | None = None) -> Path:
    """Download the set `name` into `folder`/`name` and return that path; complete files are left alone.

    `base`, such as `http://mirror.example/data`, replaces the scheme and host of every URL.
    `progress(name, so_far, total)` is called as bytes arrive; `total` is None if the server does not say.
    """
    chosen = sets().get(name)
    if chosen is None:
        raise UserError(f"there is no public data set {name!r}; there are {', '.join(sorted(sets()))}")
    home = Path(folder) / name
    with _disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        missing = [file for file in chosen.files if not _is_present(home, file)]
        assembled = [file for file in missing if file.url is None]
        for files in [*([file] for file in missing if file.url is not None), *([assembled] if assembled else [])]:
            _fetch_files(chosen, files, home, base, progress)
    return home


def _fetch_files(
    chosen: PublicSet, files: list[PublicFile], home: Path, base: str | None, progress: Progress | None
) -> None:
    """Download the archives that `files` need, extract only the members they name, and write the files."""
    archives = dict(chosen.archives) | {f.members[0][0]: Archive(f.url, f.sha256) for f in files if f.url}
    wanted: dict[str, set[str]] = {}
    for archive, member in (member for file in files for member in file.members):
        wanted.setdefault(archive, set()).add(member)
    urls = {key: _mirrored(archives[key].url, base) for key in wanted}
    unverified = {key for key in wanted if archives[key].sha256 is None and not all(f.text_sha256 for f in files)}
    parts: dict[str, Path] = {}
    for key, url in urls.items():
        suffix = (".zip" if url.endswith(".zip") else ".tgz") if key in chosen.archives else ""
        parts[key] = download(url, home / (key + suffix), archives[key].sha256, chosen.max_bytes, progress)
        if key in unverified:
            _compare_with_first(home, parts[key], url)
    try:
        with TemporaryDirectory(dir=home, prefix=".unpacked-") as scratch:
            members: dict[Member, Path] = {}
            for key, part in parts.items():
                targets = {name: Path(scratch) / f"{key}-{number}" for number, name in enumerate(wanted[key])}
                with _unpacking_errors(part, urls[key]):
                    missing = _extract(part, targets, MAX_EXPANSION * chosen.max_bytes)
                if missing:
                    raise UserError(f"{urls[key]} no longer contains {min(missing)}; {HINT}")
                members |= {(key, name): path for name, path in targets.items()}
            _write_files(chosen.name, files, members, home)
    except UserError:  # downloads without the expected contents are not worth keeping
        for part in parts.values():
            discard(part)
        raise
    for key, part in parts.items():
        if key in unverified:
            _record_first(home, part)
        discard(part)


def _extract(archive: Path, targets: Mapping[str, Path], max_bytes: int) -> set[str]:
    """Copy the named members to `targets`, never to a path given by the archive; return those it lacks."""
    missing = set(targets)
    if "" in targets:
        with _open(archive, Path(archive.stem).suffix) as content:
            _copy(content, targets[""], max_bytes)
        return set()
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for name in missing & set(opened.namelist()):
                with opened.open(name) as content:
                    _copy(content, targets[name], max_bytes)
                missing.remove(name)
        return missing
    with tarfile.open(archive, "r:*") as tar:
        for entry in tar:  # in one pass: seeking back in a compressed archive means reading it again
            name = entry.name.removeprefix("./")
            file = tar.extractfile(entry) if entry.isfile() and name in missing else None
            if file is not None:
                _copy(file, targets[name], max_bytes)
                missing.remove(name)
                if not missing:
                    break
    return missing


def _copy(source: IO[bytes], target: Path, max_bytes: int) -> None:
    """Copy a stream to a file; more than `max_bytes`, as from a decompression bomb, are an error."""
    size = 0
    with target.open("wb") as file:
        while block := source.read(BLOCK_BYTES):
            size += len(block)
            if size > max_bytes:
                raise UserError(f"{target.name} unpacks to more than {max_bytes:,} bytes: not the published text")
            file.write(block)


def _write_files(name: str, files: list[PublicFile], members: Mapping[Member, Path], home: Path) -> None:
    """Write the files from their members; the sides of a split must have equally many lines."""
    first: dict[str, tuple[str, int]] = {}
    for file in files:
        count = _write(home / file.name, _content(file, [members[member] for member in file.members]), file, name)
        other, expected = first.setdefault(file.name.rpartition(".")[0], (file.name, count))
        if count != expected:
            for written in files:
                (home / written.name).unlink(missing_ok=True)
            raise UserError(f"{file.name} has {count:,} lines but {other} has {expected:,}: {name} has changed")


def _write(target: Path, content: Iterable[bytes], file: PublicFile, origin: str) -> int:
    """Write a file under a temporary name and rename it when it is complete and verified. Returns its lines."""
    temporary = target.with_name(target.name + ".new")
    digest, lines = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as out:
            for block in content:
                out.write(block)
                digest.update(block)
                lines += block.count(b"\n")
        if file.text_sha256 is not None and digest.hexdigest() != file.text_sha256:
            raise mismatch(f"{file.name} of {origin}", digest.hexdigest(), file.text_sha256)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return lines


def _content(file: PublicFile, paths: Iterable[Path]) -> Iterator[bytes]:
    """The content of a file at a URL as it is; otherwise the selected lines of its members."""
    number = 0
    for path in paths:
        if file.url is not None:
            with path.open("rb") as content:
                yield from iter(lambda: content.read(BLOCK_BYTES), b"")
            return
        for line in _lines(path, file.form):
            number += 1
            if file.every and number % file.every != 0:
                continue
            if file.except_every and number % file.except_every == 0:
                continue
            yield line + b"\n"


def _lines(path: Path, form: Form) -> Iterator[bytes]:
    """The sentences of one member. Only a line feed ends a line: other separators occur inside sentences."""
    if form == "segments":
        for segment in _SEGMENT.findall(path.read_bytes()):
            yield b" ".join(segment.split())
        return
    with path.open("rb") as file:
        for line in file:
            if form == "lines":
                yield line.rstrip(b"\r\n")
            elif not _TED_METADATA.match(line):
                yield _TED_TAG.sub(b"", line).strip()


def _is_present(home: Path, file: PublicFile) -> bool:
    """Whether the folder has the file, perhaps compressed. A file with other contents is the user's: an error."""
    for suffix in ("", ".gz", ".xz"):
        path = home / (file.name + suffix)
        if not path.exists():
            continue
        if file.text_sha256 is not None:
            try:
                with _open(path, suffix) as content:
                    same = hashlib.file_digest(content, "sha256").hexdigest() == file.text_sha256  # type: ignore[arg-type]
            except _CORRUPT:
                same = False
            if not same:
                raise UserError(f"{path} exists but is not the published text: move it away and fetch again")
        return True
    return False


def _open(path: Path, suffix: str) -> IO[bytes]:
    """Open a file that is compressed as `suffix` says."""
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return cast(IO[bytes], lzma.open(path, "rb")) if suffix == ".xz" else path.open("rb")


def _first_digest(home: Path, part: Path) -> str | None:
    """The recorded digest of the first download of this name."""
    try:
        lines = [line.split(maxsplit=1) for line in read_text(home.parent / DIGESTS).splitlines()]
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return next((line[0] for line in lines if line[1:] == [f"{home.name}/{part.stem}"]), None)


def _compare_with_first(home: Path, part: Path, url: str) -> None:
    """Refuse a download that differs from the first one of its name."""
    if _first_digest(home, part) not in (None, file_sha256(part)):
        discard(part)
        raise UserError(
            f"{part.stem} from {urlsplit(url).netloc} differs from the first download and has been removed. If the "
            f"change is intended, remove its line from {home.parent / DIGESTS}"
        )


def _record_first(home: Path, part: Path) -> None:
    """Record the digest of the first download of this name."""
    if _first_digest(home, part) is None:
        with open(home.parent / DIGESTS, "a", encoding="utf-8") as digests:
            digests.write(f"{file_sha256(part)}  {home.name}/{part.stem}\n")


def _mirrored(url: str, base: str | None) -> str:
    """Replace the scheme and host of a URL by those of the mirror, if there is one."""
    if base is None:
        return url
    mirror = urlsplit(base)
    if mirror.scheme not in ("http", "https") or not mirror.netloc:
        raise UserError(f"a mirror must be an http or https URL, not {base!r}")
    path = mirror.path.rstrip("/") + urlsplit(url).path
    return urlsplit(url)._replace(scheme=mirror.scheme, netloc=mirror.netloc, path=path).geturl()


@contextmanager
def _unpacking_errors(part: Path, url: str) -> Iterator[None]:
    """Report a download that is not an archive, such as an error page."""
    try:
        yield
    except _CORRUPT as error:
        raise UserError(
            f"{part.stem} from {urlsplit(url).netloc} cannot be unpacked ({error}); it has been removed"
        ) from None


@contextmanager
def _disk_errors(home: Path) -> Iterator[None]:
    """Report disk errors in one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on the disk for {home}; the bytes received so far are kept") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"no permission to write {error.filename or home}") from None
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            raise UserError(f"cannot create the folder {home}: {error.filename or home} is in the way") from None
        raise
