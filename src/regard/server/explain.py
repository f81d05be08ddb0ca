"""Explanations as they get better, a line of JSON at a time, for as long as somebody listens."""

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
from regard.interpret.explain.models import ExplainRequest, MaskingMode, ask
from regard.runs import LoadedRun
from regard.server.schemas import MASKS, ExplainBody

AT_ONCE = 2  # explanations; others are told to come back
COUNTED, SHOWN = 0.1, 1.0  # seconds between two counts, and between two explanations on the way
EXPLANATION, ATTENTION, SHUFFLED = "explanation", "attention", "random"

Tell = Callable[[dict[str, Any]], None]


class TooMany(Exception):
    """More masks than this server asks about."""


class Busy(Exception):
    """As much is going on already as may."""


class ClientGone(Exception):
    """Nobody listens any more."""


class EventLines:
    """The lines of one explanation as they come. When nobody reads them any more, it is told so, and stops."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.gone = Event()
        self._loop = loop
        self._told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def teller(self) -> Callable[[dict[str, Any] | None], None]:
        """What the thread that explains tells its lines to; it does not keep these lines alive."""
        loop, told = self._loop, self._told

        def tell(line: dict[str, Any] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(told.put_nowait, line)

        return tell

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (line := await self._told.get()) is not None:
                yield json.dumps(line, ensure_ascii=False).encode() + b"\n"
        finally:
            self.gone.set()  # the client hung up, or all is said

    def __del__(self) -> None:
        self.gone.set()  # also where nobody ever began to read


class Explainer:
    """Runs explanations, a few at a time, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="explain")
        self._free = BoundedSemaphore(AT_ONCE)

    def begin(self, model: LoadedRun, wanted: ExplainBody, loop: asyncio.AbstractEventLoop) -> EventLines:
        """Refuse what can be refused, and begin; the lines are for the loop to read."""
        if wanted.masks > MASKS:
            raise TooMany(f"{wanted.masks} masks are too many: at most {MASKS}")
        sampling = Sampling(wanted.masks, wanted.keep, wanted.exact, seed=wanted.seed)
        asked = ask(model, wanted.text, target=wanted.target, masking=MaskingMode(wanted.how, wanted.unit, wanted.span))
        sampling.enumerates(len(asked.box.parts))  # or says why not
        if not self._free.acquire(blocking=False):
            raise Busy(f"{AT_ONCE} explanations are under way already: try again in a moment")
        lines = EventLines(loop)
        self._threads.submit(self._explain, asked, sampling, lines.teller(), lines.gone)
        return lines

    def _explain(
        self, asked: ExplainRequest, sampling: Sampling, tell: Callable[[dict[str, Any] | None], None], gone: Event
    ) -> None:
        try:
            explained(asked, sampling, tell, gone)
        except ClientGone:
            pass
        except UserError as error:
            tell({"error": str(error)})
        except Exception as error:
            tell({"error": f"a bug in regard: {type(error).__name__}: {error}"})
        finally:
            self._free.release()
            tell(None)


def explained(asked: ExplainRequest, sampling: Sampling, tell: Tell, gone: Event) -> None:
    """Explain, telling how far it is, what it looks like so far, and at last everything; stops when `gone` is set."""

    def still_wanted(inputs: list[Any]) -> Any:
        if gone.is_set():
            raise ClientGone
        return asked.box.ask(inputs)

    box = replace(asked.box, ask=still_wanted)
    of = 2 ** len(box.parts) if sampling.enumerates(len(box.parts)) else sampling.masks
    done, told = 0, time.monotonic()

    def progress(count: int) -> None:
        nonlocal done, told
        done += count
        if time.monotonic() - told >= COUNTED:
            told = time.monotonic()
            tell({"done": done, "of": of})

    tell({"done": 0, "of": of, "inputs": list(box.parts), "outputs": list(box.outputs), "said": asked.output})
    found, shown = None, time.monotonic()
    for found in stream(box, sampling, progress):
        if time.monotonic() - shown >= SHOWN and done < of:
            shown = time.monotonic()
            tell({"done": done, "of": of, **_numbers(found)})
    assert found is not None
    tell({"done": of, "of": of, **_numbers(found)})
    orders = {EXPLANATION: found.overall} | ({} if (looked := asked.attention()) is None else {ATTENTION: looked})
    drawn = curves(box, orders, seed=sampling.seed)
    about = {"said": asked.output, "what": asked.score, "cut": asked.truncated}
    tell({"final": True, "inputs": list(found.features), **found.to_json(), **about, "curves": _curves(drawn)})


def _numbers(found: Explanation) -> dict[str, Any]:
    kept = ("importance", "error", "overall", "overall_error")
    return {name: value for name, value in found.to_json().items() if name in kept}


def _curves(drawn: list[Curve]) -> dict[str, Any]:
    """Deletion and insertion by the order they follow, and the areas under them."""
    named = {SHUFFLED if curve.name == RANDOM else curve.name: curve for curve in drawn}
    return {
        "deletion": {name: curve.deletion.tolist() for name, curve in named.items()},
        "insertion": {name: curve.insertion.tolist() for name, curve in named.items()},
        "areas": {
            "deletion": {name: curve.deletion_area for name, curve in named.items()},
            "insertion": {name: curve.insertion_area for name, curve in named.items()},
        },
    }
