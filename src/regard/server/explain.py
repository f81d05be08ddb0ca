"""Explanations as a stream of JSON lines, which get more precise while the client is connected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import BoundedSemaphore, Event
from typing import Any

from regard.errors import UserError
from regard.interpret.explain import Curve, Explanation, Sampling, curves, stream
from regard.interpret.explain.curve import RANDOM
from regard.interpret.explain.models import explain_request
from regard.interpret.explain.request import ExplainRequest, MaskingMode
from regard.runs import LoadedRun
from regard.server.schemas import MAX_MASKS, ExplainBody

MAX_RUNNING = 2  # explanations; further ones are refused as busy
PROGRESS_SECONDS, RESULT_SECONDS = 0.1, 1.0  # between two progress lines, and between two intermediate results
EXPLANATION, SHUFFLED = "explanation", "random"

Send = Callable[[dict[str, Any]], None]


class TooManyMasks(Exception):
    """More masks than this server allows."""


class Busy(Exception):
    """Too many requests are running."""


class ClientGone(Exception):
    """The client has disconnected."""


class EventLines:
    """The lines of one explanation, as an asynchronous iterator; `gone` is set when they are no longer read."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.gone = Event()
        self._loop = loop
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def sender(self) -> Callable[[dict[str, Any] | None], None]:
        """Return a function that adds lines from another thread, without a reference to this object."""
        loop, lines = self._loop, self._lines

        def send(line: dict[str, Any] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(lines.put_nowait, line)

        return send

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (line := await self._lines.get()) is not None:
                yield json.dumps(line, ensure_ascii=False).encode() + b"\n"
        finally:
            self.gone.set()  # the client disconnected, or the end was reached

    def __del__(self) -> None:
        self.gone.set()  # also if reading never started


class Explainer:
    """Runs explanations in threads, a few at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="explain")
        self._free = BoundedSemaphore(MAX_RUNNING)

    def start(self, model: LoadedRun, body: ExplainBody, loop: asyncio.AbstractEventLoop) -> EventLines:
        """Validate the request and start an explanation; `loop` reads the lines."""
        if body.masks > MAX_MASKS:
            raise TooManyMasks(f"{body.masks} masks are too many: at most {MAX_MASKS} are allowed")
        sampling = Sampling(body.masks, body.keep, body.exact, seed=body.seed)
        request = explain_request(
            model, body.text, target=body.target, masking=MaskingMode(body.how, body.unit, body.span)
        )
        request.box.enumerates(sampling)  # raises an error if they are too many
        if not self._free.acquire(blocking=False):
            raise Busy(f"{MAX_RUNNING} explanations are already running: try again in a moment")
        lines = EventLines(loop)
        self._threads.submit(self._explain, request, sampling, lines.sender(), lines.gone)
        return lines

    def _explain(
        self, request: ExplainRequest, sampling: Sampling, send: Callable[[dict[str, Any] | None], None], gone: Event
    ) -> None:
        try:
            explain(request, sampling, send, gone)
        except ClientGone:
            pass
        except UserError as error:
            send({"error": str(error)})
        except Exception as error:
            send({"error": f"a bug in regard: {type(error).__name__}: {error}"})
        finally:
            self._free.release()
            send(None)


def explain(request: ExplainRequest, sampling: Sampling, send: Send, gone: Event) -> None:
    """Compute an explanation; send progress, intermediate results and the final result; stop when `gone` is set."""

    def score_if_connected(inputs: list[Any]) -> Any:
        if gone.is_set():
            raise ClientGone
        return request.box.function(inputs)

    box = replace(request.box, function=score_if_connected)
    of = box.count_masks(sampling)
    done, reported = 0, time.monotonic()

    def progress(count: int) -> None:
        nonlocal done, reported
        done += count
        if time.monotonic() - reported >= PROGRESS_SECONDS:
            reported = time.monotonic()
            send({"done": done, "of": of})

    about = {"outputs": list(box.outputs), "output": request.output, "what": request.score, "grid": box.grid}
    send({"done": 0, "of": of, "inputs": list(box.parts), **about})
    result, sent = None, time.monotonic()
    for result in stream(box, sampling, progress):
        if time.monotonic() - sent >= RESULT_SECONDS and done < of:
            sent = time.monotonic()
            send({"done": done, "of": of, **_numbers(result)})
    assert result is not None
    send({"done": of, "of": of, **_numbers(result)})
    drawn = curves(box, request.orders(result.overall, EXPLANATION), insertion=request.insertion, seed=sampling.seed)
    final = {"inputs": list(result.features), **result.to_json(), **about, "cut": request.truncated}
    send({"final": True, **final, "curves": _curves(drawn)})


def _numbers(result: Explanation) -> dict[str, Any]:
    names = ("importance", "error", "overall", "overall_error")
    return {name: value for name, value in result.to_json().items() if name in names}


def _curves(drawn: list[Curve]) -> dict[str, Any]:
    """The numbers of hidden (or shown) parts, both curves of each order, and the areas under them."""
    named = {SHUFFLED if curve.name == RANDOM else curve.name: curve for curve in drawn}
    return {
        "counts": drawn[0].counts.tolist(),
        "deletion": {name: curve.deletion.tolist() for name, curve in named.items()},
        "insertion": {name: curve.insertion.tolist() for name, curve in named.items()},
        "areas": {
            "deletion": {name: curve.deletion_area for name, curve in named.items()},
            "insertion": {name: curve.insertion_area for name, curve in named.items()},
        },
    }
