"""The common part of the interfaces of `regard serve`: reading requests, limits, threads and time limits, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any, TypeVar
from urllib.parse import parse_qs

import torch
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from regard.cancel import Cancellation, Cancelled, cancellable
from regard.decoding.continuous import QueueFull
from regard.errors import UserError, is_out_of_memory
from regard.server.access import Access, ApiKey, RateLimitExceeded, Unauthorized, secret_of
from regard.server.metrics import Metrics
from regard.server.pool import ModelPool, Unavailable
from regard.server.registry import NotFound

TIMED_OUT = "time is up"  # the reason of a cancellation

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)


class Overloaded(Exception):
    """The maximum number of requests is being answered."""


class RequestTooLarge(Exception):
    """A request above the limits of this server."""


class RequestTimeout(Exception):
    """A request above the time limit."""


STATUSES: dict[type[Exception], int] = {
    UserError: 400,
    ValidationError: 400,
    Unauthorized: 403,
    NotFound: 404,
    RequestTooLarge: 413,
    RateLimitExceeded: 429,
    Cancelled: 499,  # nginx's status for a client that disconnected
    Overloaded: 503,
    QueueFull: 503,
    Unavailable: 503,
    RequestTimeout: 504,
}


def error_answer(error: Exception) -> tuple[int, str]:
    """The HTTP status for an error, and one line about it."""
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 500)
    if status == 500 and is_out_of_memory(error):
        return 503, "there is not enough memory for this request"
    if status == 500:
        return status, f"a bug in regard: {type(error).__name__}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        fields = [str(part) for part in first["loc"]]  # and the alternatives of a type, such as list[str]
        where = ".".join(field for field in fields if field != "str" and "[" not in field) or "the request"
        return status, f"{where}: {first['msg'].removeprefix('Value error, ')}"
    if isinstance(error, Overloaded | QueueFull):
        return status, "the server is busy: try again in a moment"
    return status, " ".join(str(error).split())


class Payload(BaseModel):
    """The body of a request; fields that an interface does not use are ignored, as its original does."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    characters: int = 50_000  # of all texts of a request
    texts: int = 256  # of a request
    tokens: int = 8192  # that a language model generates for a request, in all its samples
    body_bytes: int = 2**20
    seconds: float = 60.0  # for one request
    requests: int = 512  # at the same time
    queue: int = 1024  # sentences that wait, above which requests are refused


class Gateway:
    """Reads requests, checks keys and limits, and runs work in threads, for all interfaces of a server."""

    def __init__(self, pool: ModelPool, access: Access, limits: Limits, metrics: Metrics) -> None:
        self.pool, self.access, self.limits, self.metrics = pool, access, limits, metrics
        self.draining = False
        self._free = BoundedSemaphore(limits.requests)
        # PyTorch uses one core in these threads, and all of them in the thread of the engines (see `EngineThread`).
        self._threads = ThreadPoolExecutor(limits.requests, "request", torch.set_num_threads, (1,))

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Read the body (JSON, a form, or the query), check the key, and validate the fields."""
        fields = await body_of(request)
        request.state.key = self.access.admit(secret_of(request.headers, fields))
        return kind.model_validate(fields)

    def check_texts(self, request: Request, texts: list[str]) -> None:
        """Refuse texts above the limits, and count the others."""
        size = sum(map(len, texts))
        if len(texts) > self.limits.texts:
            raise RequestTooLarge(f"{len(texts)} texts: at most {self.limits.texts} are allowed in a request")
        if size > self.limits.characters:
            raise RequestTooLarge(f"{size:,} characters: at most {self.limits.characters:,} are allowed in a request")
        if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise UserError("the text is not valid Unicode")
        request.state.characters = size
        key: ApiKey = request.state.key
        key.characters += size
        self.metrics.characters.inc(size)

    async def run(self, request: Request, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread; cancel it when the client disconnects or time is up."""
        cancellation = Cancellation()
        with self.cancelling(request, cancellation, self.new_deadline()):
            return await asyncio.wrap_future(self.submit(work, cancellation))

    @contextmanager
    def cancelling(self, request: Request, cancellation: Cancellation, deadline: float) -> Iterator[None]:
        """Cancel work when its client disconnects or at the deadline, while the context lasts."""
        listener = asyncio.create_task(_cancel_on_disconnect(request, cancellation))
        try:
            with self.cancel_at(deadline, cancellation):
                yield
        except Cancelled:
            if cancellation.reason == TIMED_OUT:
                raise self.timeout_error() from None
            self.metrics.cancelled.inc()
            raise
        finally:
            listener.cancel()

    def timeout_error(self) -> RequestTimeout:
        return RequestTimeout(f"the request took longer than {self.limits.seconds:g} seconds")

    def new_deadline(self) -> float:
        """When a request that begins now must be answered, in the event loop's time."""
        return asyncio.get_running_loop().time() + self.limits.seconds

    @contextmanager
    def cancel_at(self, deadline: float, cancellation: Cancellation) -> Iterator[None]:
        """Cancel work at the deadline, unless the context has ended."""
        timer = asyncio.get_running_loop().call_at(deadline, cancellation.cancel, TIMED_OUT)
        try:
            yield
        finally:
            timer.cancel()

    def submit(self, work: Callable[[], Result], cancellation: Cancellation) -> Future[Result]:
        """Start `work` in a thread, unless the server is busy."""
        if self.pool.queued >= self.limits.queue or not self._free.acquire(blocking=False):
            raise Overloaded("as many requests as are allowed are being answered")

        def cancellable_work() -> Result:
            try:
                with cancellable(cancellation):
                    return work()
            finally:
                self._free.release()

        return self._threads.submit(cancellable_work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.pool.close()


async def _cancel_on_disconnect(request: Request, cancellation: Cancellation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    cancellation.cancel()


async def body_of(request: Request) -> dict[str, Any]:
    """The fields of a request: those of its query, and of its JSON object or form."""
    fields = _flat(parse_qs(request.url.query, keep_blank_values=True))
    raw = await request.body()
    if not raw:
        return fields
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "application/x-www-form-urlencoded" and not raw.lstrip().startswith(b"{"):
            return fields | _flat(parse_qs(raw.decode(), keep_blank_values=True))
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise UserError("the body is neither a JSON object nor a form") from None
    if not isinstance(content, dict):
        raise UserError("the body is not a JSON object")
    return fields | content


def _flat(form: Mapping[str, list[str]]) -> dict[str, Any]:
    """Values of a form that occur once as strings, others as lists."""
    return {name: values[0] if len(values) == 1 else values for name, values in form.items()}
