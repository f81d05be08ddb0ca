"""Access to a server: API keys and rate limits."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from regard.errors import UserError
from regard.files import errno_text

SCHEMES = ("bearer", "deepl-auth-key")  # of the Authorization header
KEY_VARIABLE = "REGARD_API_KEY"
MIN_KEY_CHARACTERS = 16  # characters; shorter ones can be guessed


class Unauthorized(Exception):
    """A request without a valid key."""


class RateLimitExceeded(Exception):
    """A key above its rate limit; `retry` is the number of seconds until the next request is allowed."""

    def __init__(self, message: str, retry: float) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass
class ApiKey:
    """A key: a name for logs, the hash of its secret, and how many requests a minute it allows (0: no limit)."""

    name: str
    digest: bytes
    rate: float = 0.0
    tokens: float = field(default=-1.0)  # requests that are allowed now; -1: not used yet
    updated: float = 0.0
    characters: int = 0  # that were translated with it

    def count_request(self, now: float) -> None:
        """Count a request, or raise `RateLimitExceeded`. The requests of up to a minute may come at once."""
        if not self.rate:
            return
        burst = max(1.0, self.rate)
        before = burst if self.tokens < 0 else self.tokens
        self.tokens = min(burst, before + (now - self.updated) * self.rate / 60 if self.updated else burst)
        self.updated = now
        if self.tokens < 1:
            raise RateLimitExceeded(f"more than {self.rate:g} requests a minute", (1 - self.tokens) * 60 / self.rate)
        self.tokens -= 1


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The keys of a server. Without keys everyone is allowed, under one rate limit."""

    def __init__(self, keys: Mapping[str, tuple[str, float]] | None = None, rate: float = 0.0) -> None:
        """`keys` maps secrets to (name, requests a minute); `rate` applies if there are none."""
        self.keys = [ApiKey(name, _digest(secret), limit) for secret, (name, limit) in (keys or {}).items()]
        self.anyone = ApiKey("anyone", b"", rate)
        self._lock = Lock()

    @property
    def is_open(self) -> bool:
        return not self.keys

    def admit(self, secret: str | None) -> ApiKey:
        """Return the key with this secret, and count a request of it."""
        key = self.anyone if self.is_open else self._find(secret)
        with self._lock:
            key.count_request(time.monotonic())
        return key

    def _find(self, secret: str | None) -> ApiKey:
        given = _digest(secret or "")
        matching = [key for key in self.keys if secrets.compare_digest(key.digest, given)]
        if not matching:
            raise Unauthorized("the API key is missing or unknown: send it as 'Authorization: Bearer KEY'")
        return matching[0]


def secret_of(headers: Mapping[str, str], body: Mapping[str, object]) -> str | None:
    """The key that a request sends: in a header, or as LibreTranslate's `api_key`."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() in SCHEMES:
        return value.strip()
    given = headers.get("x-api-key") or body.get("api_key")
    return given if isinstance(given, str) else None


def read_keys(file: Path | None, rate: float = 0.0) -> dict[str, tuple[str, float]]:
    """Read keys: lines of NAME SECRET [REQUESTS-A-MINUTE]; and that of the environment variable REGARD_API_KEY."""
    keys: dict[str, tuple[str, float]] = {}
    if secret := os.environ.get(KEY_VARIABLE):
        keys[_checked(secret, KEY_VARIABLE)] = ("environment", rate)
    if file is None:
        return keys
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = errno_text(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--keys {file} could not be read: {why}") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(words) not in (2, 3):
            raise UserError(f"{where}: expected NAME SECRET [REQUESTS-A-MINUTE]")
        try:
            limit = float(words[2]) if len(words) == 3 else rate
        except ValueError:
            limit = math.nan
        if len(words) == 3 and not (math.isfinite(limit) and limit >= 0):
            raise UserError(f"{where}: {words[2]!r} is not a number of requests a minute")
        keys[_checked(words[1], where)] = (words[0], limit)
    if not keys:
        raise UserError(f"--keys {file}: the file has no keys")
    return keys


def _checked(secret: str, where: str) -> str:
    if len(secret) < MIN_KEY_CHARACTERS:
        raise UserError(f"{where}: a key needs at least {MIN_KEY_CHARACTERS} characters")
    return secret
