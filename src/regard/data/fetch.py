"""Downloads the public data sets that recipes name, into a folder that `--data` understands.

Which sets there are, and where their files lie, is in `public_sets.toml`. A download that breaks off is kept as
`NAME.part` and goes on from there next time; what is there and right is left alone; a file gets its real name only
when it is complete, so a file with its real name can be trusted.

Where the table has no checksum of an archive, the first download's is recorded in `SHA256SUMS` beside the sets' folders
and later downloads have to have the same.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import lzma
import os
import re
import ssl
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from regard.errors import UserError
from regard.files import read_text

Progress = Callable[[str, int, int | None], None]  # what is being fetched, bytes so far, bytes in all where known
Form = Literal["lines", "ted", "segments"]

ATTEMPTS = 4  # how often a broken connection is taken up again before we give up
PAUSE = 1.0  # seconds before the second attempt; twice that before the third, and so on
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 18
DIGESTS = "SHA256SUMS"  # of downloads that the table has no checksum of, as sha256sum writes it
MOST_TIMES_SIZE = 2  # a download may be so many times as large as its whole set is said to be
MOST_EXPANSION = 20  # and its contents so many times as large again
HINT = "`--data DIR` uses a folder that is already there"

_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
_DROPPED = (TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError)
_TED_NOTE = re.compile(rb"\s*</?(doc|url|talkid|keywords|speaker|reviewer|translator)\b")
_TED_TAG = re.compile(rb"</?(title|description)>")
_SEGMENT = re.compile(rb"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Archive:
    """A tar or zip file that several of a set's files come from; `verified` is false where its address is untried."""

    url: str
    sha256: str | None = None
    verified: bool = True


@dataclass(frozen=True)
class PublicFile:
    """One file of a set: `name` in the folder, and either its own `url` or (archive, member) `parts`, joined in order.

    `sha256` is of the bytes served, `text_sha256` of the file in the folder. `every` keeps each nth line only,
    `except_every` leaves each nth out: together they cut a validation set out of the training text.
    """

    name: str
    url: str | None = None
    sha256: str | None = None
    text_sha256: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    form: Form = "lines"
    every: int | None = None
    except_every: int | None = None


@dataclass(frozen=True)
class PublicSet:
    """A data set that can be fetched: what it is, on which terms, how big the download is (bytes), and its files."""

    name: str
    description: str
    terms: str
    size: int
    files: tuple[PublicFile, ...]
    archives: Mapping[str, Archive]

    @property
    def most_bytes(self) -> int:
        """The most bytes that any one download of this set may have."""
        return MOST_TIMES_SIZE * self.size


@cache
def sets() -> dict[str, PublicSet]:
    """All sets, by name: `sets()["multi30k"].description`."""
    table = tomllib.loads((resources("regard.data") / "public_sets.toml").read_text(encoding="utf-8"))
    return {name: _public_set(name, entry) for name, entry in table.items()}


def _public_set(name: str, entry: dict[str, Any]) -> PublicSet:
    archives = {key: Archive(**archive) for key, archive in entry.pop("archives", {}).items()}
    files = []
    for file in entry.pop("files"):
        parts = [part.partition(":") for part in file.pop("parts", [])]
        if not file.get("url", ".gz").endswith(".gz"):
            file["text_sha256"] = file.get("sha256")  # served as it will lie in the folder
        files.append(PublicFile(**file, parts=tuple((archive, member) for archive, _, member in parts)))
    return PublicSet(name=name, files=tuple(files), archives=archives, **entry)


def fetch(name: str, folder: Path, *, base: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch the set `name` into `folder`/`name`, and return that; files that are there and right are left alone.

    `base`, such as `http://mirror.example/data`, takes the place of the scheme and host of every address.
    `progress(what, so_far, in_all)` is called as bytes come in; `in_all` is None where the server doesn't say.
    """
    chosen = sets().get(name)
    if chosen is None:
        raise UserError(f"there is no public data set {name!r}; there are {', '.join(sorted(sets()))}")
    home = Path(folder) / name
    with _explained(home):
        home.mkdir(parents=True, exist_ok=True)
        missing = [file for file in chosen.files if not _is_there(home, file)]
        for file in missing:
            if file.url is not None:
                _fetch_file(chosen, file, _moved(file.url, base), home, progress)
        assembled = [file for file in missing if file.url is None]
        if assembled:
            _fetch_parts(chosen, assembled, home, base, progress)
    return home


def _fetch_file(chosen: PublicSet, file: PublicFile, url: str, home: Path, progress: Progress | None) -> None:
    suffix = ".gz" if url.endswith(".gz") else ""
    part = _download(url, home / (file.name + suffix), file.name, file.sha256, chosen.most_bytes, progress)
    first_use = file.sha256 is None and file.text_sha256 is None
    try:
        if first_use:
            _compare(home, part, url)
        with _whole(part, url), _opened(part, suffix) as source:
            pieces = _bounded(source, MOST_EXPANSION * chosen.most_bytes, f"{file.name} from {url}")
            _write(home / file.name, pieces, file.text_sha256, url)
        if first_use:
            _record(home, part)
    except UserError:
        _forget(part)
        raise
    _forget(part)


def _fetch_parts(
    chosen: PublicSet, files: list[PublicFile], home: Path, base: str | None, progress: Progress | None
) -> None:
    """Download the archives that `files` need, take out only the members that are named, and join them."""
    wanted: dict[str, list[str]] = {}
    for file in files:
        for archive, member in file.parts:
            if member not in wanted.setdefault(archive, []):
                wanted[archive].append(member)
    members: dict[tuple[str, str], Path] = {}
    parts: list[Path] = []
    first_use: list[Path] = []  # those that the table has no checksum of
    try:
        for key, names in wanted.items():
            url = _moved(chosen.archives[key].url, base)
            suffix = ".zip" if url.endswith(".zip") else ".tgz"
            sha256 = chosen.archives[key].sha256
            part = _download(url, home / (key + suffix), key + suffix, sha256, chosen.most_bytes, progress)
            if sha256 is None:
                _compare(home, part, url)
                first_use.append(part)
            with _whole(part, url):
                found = _extract(part, names, home, key, MOST_EXPANSION * chosen.most_bytes)
            members |= {(key, member): path for member, path in found.items()}
            for member in names:
                if member not in found:
                    raise UserError(f"{url} has no {member} in it any more; {HINT}")
            parts.append(part)
        _assemble(chosen.name, files, members, home)
        for part in first_use:
            _record(home, part)
    finally:
        for path in members.values():
            path.unlink(missing_ok=True)
    for part in parts:
        _forget(part)


def _assemble(name: str, files: list[PublicFile], members: Mapping[tuple[str, str], Path], home: Path) -> None:
    """Write the files from their members; the sides of a split must have as many lines as each other."""
    lengths: dict[str, tuple[str, int]] = {}
    for file in files:
        lines = _selected(file, (members[part] for part in file.parts))
        count = _write(home / file.name, (line + b"\n" for line in lines), file.text_sha256, name)
        other, expected = lengths.setdefault(file.name.rpartition(".")[0], (file.name, count))
        if count != expected:
            for written in files:
                (home / written.name).unlink(missing_ok=True)
            raise UserError(f"{file.name} has {count:,} lines but {other} has {expected:,}: {name} has changed")


def _extract(archive: Path, names: Iterable[str], home: Path, key: str, most: int) -> dict[str, Path]:
    """Copy the named members out, to names of our own choosing, so that no path inside the archive is ever obeyed."""
    targets = {name: home / f"{key}-{i}.member" for i, name in enumerate(names)}
    found = {}
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for name in set(targets) & set(opened.namelist()):
                with opened.open(name) as source:
                    found[name] = _copied(source, targets[name], most)
        return found
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:  # one pass: going back in a compressed archive means reading it again
            name = member.name.removeprefix("./")
            content = tar.extractfile(member) if member.isfile() and name in targets else None
            if content is not None:
                found[name] = _copied(content, targets[name], most)
                if len(found) == len(targets):
                    break
    return found


def _copied(source: IO[bytes], target: Path, most: int) -> Path:
    try:
        with target.open("wb") as file:
            for chunk in _bounded(source, most, target.name):
                file.write(chunk)
    except UserError:
        target.unlink(missing_ok=True)
        raise
    return target


def _bounded(source: IO[bytes], most: int, what: str) -> Iterator[bytes]:
    """The bytes of a stream in chunks; more than `most` of them, as of a compressed bomb, are an error."""
    size = 0
    while chunk := source.read(CHUNK):
        size += len(chunk)
        if size > most:
            raise UserError(f"{what} unpacks to more than {most:,} bytes, which is not the published text")
        yield chunk


def _selected(file: PublicFile, paths: Iterable[Path]) -> Iterator[bytes]:
    """The lines of a file, without their ends: all of them, each nth, or all but each nth."""
    number = 0
    for path in paths:
        for line in _lines(path, file.form):
            number += 1
            if file.every and number % file.every != 0:
                continue
            if file.except_every and number % file.except_every == 0:
                continue
            yield line


def _lines(path: Path, form: Form) -> Iterator[bytes]:
    """The sentences of one member. Lines end at a newline only: other separators occur inside sentences."""
    if form == "segments":
        for segment in _SEGMENT.findall(path.read_bytes()):
            yield b" ".join(segment.split())
        return
    with path.open("rb") as file:
        for line in file:
            if form == "lines":
                yield line.rstrip(b"\r\n")
            elif not _TED_NOTE.match(line):
                yield _TED_TAG.sub(b"", line).strip()


# --- files --------------------------------------------------------------------------------------------------------


def _is_there(home: Path, file: PublicFile) -> bool:
    """Whether the file, or a compressed form of it, is in the folder. One with other contents isn't ours to replace."""
    for suffix in ("", ".gz", ".xz"):
        path = home / (file.name + suffix)
        if not path.exists():
            continue
        if file.text_sha256 is not None:
            try:
                with _opened(path, suffix) as source:
                    same = _sha256(source) == file.text_sha256
            except _BROKEN:
                same = False
            if not same:
                raise UserError(f"{path} is there, but it is not the published text: move it away and fetch again")
        return True
    return False


def _opened(path: Path, suffix: str) -> IO[bytes]:
    """The contents of a file that is compressed as `suffix` says, which need not be how its name ends."""
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return cast(IO[bytes], lzma.open(path, "rb")) if suffix == ".xz" else path.open("rb")


def _write(target: Path, pieces: Iterable[bytes], sha256: str | None, origin: str) -> int:
    """Write a file under a passing name, and give it its own when it is complete and right. Returns its lines."""
    passing = target.with_name(target.name + ".new")
    digest, lines = hashlib.sha256(), 0
    try:
        with passing.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                lines += piece.count(b"\n")
        if sha256 is not None and digest.hexdigest() != sha256:
            raise _mismatch(target.name, origin, digest.hexdigest(), sha256)
        os.replace(passing, target)
    finally:
        passing.unlink(missing_ok=True)
    return lines


def _sha256(source: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _recorded(home: Path, part: Path) -> str | None:
    """The digest of the first download of this name, if there was one."""
    try:
        lines = [line.split(maxsplit=1) for line in read_text(home.parent / DIGESTS).splitlines()]
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    wanted = f"{home.name}/{part.name.removesuffix('.part')}"
    return next((line[0] for line in lines if line[1:] == [wanted]), None)


def _compare(home: Path, part: Path, url: str) -> None:
    """Refuse a download that differs from the first one of its name."""
    known = _recorded(home, part)
    with part.open("rb") as file:
        if known in (None, _sha256(file)):
            return
    _forget(part)
    raise UserError(
        f"{part.name.removesuffix('.part')} from {urlsplit(url).netloc} is not what was downloaded the first time; "
        f"what came has been removed. If it was meant to change, remove its line from {home.parent / DIGESTS}"
    )


def _record(home: Path, part: Path) -> None:
    """Write down the digest of a download that the table has none of, unless that was done before."""
    if _recorded(home, part) is None:
        with part.open("rb") as file:
            digest = _sha256(file)
        with open(home.parent / DIGESTS, "a", encoding="utf-8") as digests:
            digests.write(f"{digest}  {home.name}/{part.name.removesuffix('.part')}\n")


def _forget(path: Path) -> None:
    """Remove a download and the note beside it that says which version of the file it is a part of."""
    path.unlink(missing_ok=True)
    _note(path).unlink(missing_ok=True)


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".version")


# --- the network --------------------------------------------------------------------------------------------------


def _moved(url: str, base: str | None) -> str:
    """The address, on the mirror if there is one."""
    if base is None:
        return url
    mirror = urlsplit(base)
    if mirror.scheme not in ("http", "https") or not mirror.netloc:
        raise UserError(f"a mirror is an http or https address, not {base!r}")
    path = mirror.path.rstrip("/") + urlsplit(url).path
    return urlsplit(url)._replace(scheme=mirror.scheme, netloc=mirror.netloc, path=path).geturl()


def _download(url: str, target: Path, label: str, sha256: str | None, most: int, progress: Progress | None) -> Path:
    """Bring `target`.part to completeness, from wherever it stands, check it, and return its path."""
    part = target.with_name(target.name + ".part")
    host = urlsplit(url).netloc
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        try:
            if _go_on(url, part, label, most, progress):
                break
        except _DROPPED:
            continue
    else:
        kept = part.stat().st_size if part.exists() else 0
        raise UserError(
            f"the connection to {host} broke off {ATTEMPTS} times while fetching {label}; the {kept:,} bytes that "
            "came are kept, and the same command goes on from there"
        )
    if sha256 is not None:
        with part.open("rb") as file:
            got = _sha256(file)
        if got != sha256:
            _forget(part)
            raise _mismatch(label, url, got, sha256)
    return part


def _go_on(url: str, part: Path, label: str, most: int, progress: Progress | None) -> bool:
    """Ask for the bytes that `part` lacks and append them. True if it is complete now, False to ask again.

    The version note (a strong ETag, or the date) goes along as If-Range, so that a file which changed on the server
    comes whole instead of being joined to the beginning of another.
    """
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "regard", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if _note(part).exists():
            headers["If-Range"] = _note(part).read_text(encoding="utf-8")
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as refusal:
        with refusal:
            if refusal.code != 416:
                raise _refused(url, refusal.code) from None
            if refusal.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
                return True  # it was complete already
            _forget(part)
            return False
    except urllib.error.URLError as failure:
        raise _unreachable(url, failure.reason) from None
    with response:
        joined = response.status == 206
        if joined and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            _forget(part)
            return False
        if not joined:
            have = 0
            tag = response.headers.get("ETag", "")
            version = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")  # a weak tag won't do
            _note(part).unlink(missing_ok=True)
            if version:
                _note(part).write_text(version, encoding="utf-8")
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        _refuse_larger(total or 0, most, url, label, part)
        with part.open("ab" if joined else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                _refuse_larger(have, most, url, label, part)
                if progress is not None:
                    progress(label, have, total)
        return total is None or have == total


# --- what can go wrong, in a sentence -----------------------------------------------------------------------------


def _unreachable(url: str, reason: object) -> UserError:
    why = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return UserError(f"cannot reach {urlsplit(url).netloc} ({why}): is there a network? {HINT}")


def _refused(url: str, code: int) -> UserError:
    host, path = urlsplit(url).netloc, urlsplit(url).path
    if code in (404, 410):
        return UserError(f"{host} has no {path} ({code}): it has moved, or the mirror lacks it; {HINT}")
    later = "try again later" if code == 429 or code >= 500 else HINT
    return UserError(f"{host} refused {path} with status {code}; {later}")


def _refuse_larger(size: int, most: int, url: str, label: str, part: Path) -> None:
    if size > most:
        _forget(part)
        raise UserError(
            f"{urlsplit(url).netloc} sends more than {most:,} bytes for {label}, which it cannot have; {HINT}"
        )


def _mismatch(label: str, origin: str, got: str, expected: str) -> UserError:
    return UserError(
        f"{label} from {urlsplit(origin).netloc or origin} is not the published one (its sha256 begins {got[:12]}, "
        f"not {expected[:12]}); what came has been removed"
    )


@contextmanager
def _whole(part: Path, url: str) -> Iterator[None]:
    """A download that turns out to be no archive (an error page, say) is removed, and said to be none."""
    try:
        yield
    except _BROKEN as problem:
        _forget(part)
        raise UserError(
            f"what {urlsplit(url).netloc} sent for {part.name.removesuffix('.part')} cannot be unpacked ({problem}); "
            "it has been removed"
        ) from None


@contextmanager
def _explained(home: Path) -> Iterator[None]:
    """Failures of the disk, in a sentence."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no room left on the disk for {home}; what came so far is kept") from None
        if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"no permission to write {problem.filename or home}") from None
        if problem.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            raise UserError(f"{problem.filename or home} is in the way of the folder {home}") from None
        raise
