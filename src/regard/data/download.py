"""Resumable HTTP downloads.

An interrupted download is kept as `NAME.part` and resumed with a Range request, in this process or a later one. Beside
it, `NAME.part.version` holds the server's ETag or date, sent as If-Range, so that the parts of a file that has changed
on the server are never joined.

pooch does not do this: version 1.9.0 sends no Range header and deletes its temporary file when a connection breaks or
the process is interrupted, so a download of several gigabytes starts again from zero.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from regard.errors import UserError

Progress = Callable[[str, int, int | None], None]  # name, bytes so far, total bytes if known

ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt; twice that before the third, and so on
TIMEOUT = 30.0  # seconds without a byte
BLOCK_BYTES = 1 << 18
HINT = "`--data DIR` uses an existing folder"
_INTERRUPTED = (TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError)


def download(url: str, target: Path, sha256: str | None, max_bytes: int, progress: Progress | None) -> Path:
    """Complete `target`.part from wherever it stands, verify it, and return its path."""
    part = target.with_name(target.name + ".part")
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        try:
            if _resume(url, part, max_bytes, progress):
                break
        except _INTERRUPTED:
            continue
    else:
        raise UserError(
            f"the connection to {urlsplit(url).netloc} broke {ATTEMPTS} times while fetching {target.name}; the "
            f"{_size(part):,} bytes received are kept: run the same command again to resume"
        )
    if sha256 is not None and (digest := file_sha256(part)) != sha256:
        discard(part)
        raise mismatch(f"{target.name} from {urlsplit(url).netloc}", digest, sha256)
    return part


def _resume(url: str, part: Path, max_bytes: int, progress: Progress | None) -> bool:
    """Request the missing bytes of `part` and append them. True if it is complete, False to request again."""
    name, received = part.name.removesuffix(".part"), _size(part)
    headers = {"User-Agent": "regard", "Accept-Encoding": "identity"}
    if received:
        headers["Range"] = f"bytes={received}-"
        if _version_file(part).exists():
            headers["If-Range"] = _version_file(part).read_text(encoding="utf-8")
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 416:
                raise _status_error(url, error.code) from None
            if error.headers.get("Content-Range", "").rpartition("/")[2] == str(received):
                return True  # it was complete already
            discard(part)
            return False
    except urllib.error.URLError as error:
        reason = error.reason
        why = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
        raise UserError(f"cannot reach {urlsplit(url).netloc} ({why}): is there a network? {HINT}") from None
    with response:
        resumed = response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {received}-"):
            discard(part)
            return False
        if not resumed:
            received = 0
            etag = response.headers.get("ETag", "")  # If-Range needs a strong ETag, which starts with a quotation mark
            version = etag if etag.startswith('"') else response.headers.get("Last-Modified", "")
            _version_file(part).unlink(missing_ok=True)
            if version:
                _version_file(part).write_text(version, encoding="utf-8")
        length = response.headers.get("Content-Length")
        total = received + int(length) if length is not None else None
        with part.open("ab" if resumed else "wb") as file:
            while max(received, total or 0) <= max_bytes and (block := response.read(BLOCK_BYTES)):
                file.write(block)
                received += len(block)
                if progress is not None:
                    progress(name, received, total)
    if max(received, total or 0) > max_bytes:
        discard(part)
        raise UserError(
            f"{urlsplit(url).netloc} sends more than the expected maximum of {max_bytes:,} bytes for {name}; {HINT}"
        )
    return total is None or received == total


def discard(part: Path) -> None:
    """Remove a download and its version file."""
    part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mismatch(what: str, digest: str, expected: str) -> UserError:
    return UserError(
        f"{what} is not the published file (its sha256 starts with {digest[:12]}, not {expected[:12]}); "
        "it has been removed"
    )


def _status_error(url: str, code: int) -> UserError:
    host, path = urlsplit(url).netloc, urlsplit(url).path
    if code in (404, 410):
        return UserError(f"{host} has no {path} ({code}): it has moved, or the mirror lacks it; {HINT}")
    advice = "try again later" if code == 429 or code >= 500 else HINT
    return UserError(f"{host} refused {path} with status {code}; {advice}")


def _version_file(part: Path) -> Path:
    return part.with_name(part.name + ".version")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
