"""The application: the page and its files, traces and their arrays, explanations, positions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from regard.cancel import Cancelled, cancellable
from regard.errors import UserError
from regard.server import schemas
from regard.server.explain import Busy, EventLines, Explainer, TooMany
from regard.server.middleware import SecurityMiddleware
from regard.server.registry import NotFound, RunRegistry, WeightsChanged
from regard.viz import standalone

AT_ONCE = 2  # passes through models side by side
WAITING = 100  # that may wait for their turn

Answer = TypeVar("Answer")


class TooLarge(Exception):
    """A text longer than this server reads."""


STATUS: dict[type[Exception], int] = {
    UserError: 400,
    NotFound: 404,
    WeightsChanged: 409,
    TooLarge: 413,
    TooMany: 422,
    Cancelled: 499,  # nginx's status for a client that hung up; only tests see it
    Busy: 503,
}


class ConcurrencyLimit:
    """Lets a few requests work at a time, and as many wait; more are told that it is busy."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def take(self, request: Request, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """Do the work in a thread, when its turn has come; it is cancelled when the client of the request hangs up."""
        if self._waiting >= WAITING:
            raise Busy("too much is asked at once: try again in a moment")
        self._waiting += 1
        gone = Event()
        listener = asyncio.create_task(_set_when_gone(request, gone))

        def cancellable_work() -> Answer:
            with cancellable(gone.is_set):
                return work(*arguments)

        try:
            async with self._free:
                if gone.is_set():
                    raise Cancelled("the client hung up")
                return await run_in_threadpool(cancellable_work)
        finally:
            self._waiting -= 1
            listener.cancel()


async def _set_when_gone(request: Request, gone: Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


def application(
    paths: Sequence[str | Path], *, text: str = "", device: str = "auto", token: str | None = None
) -> FastAPI:
    """The server for these runs; `text` is what the page opens with, `token` what requests have to carry."""
    runs, turns, explainer = RunRegistry(paths, device=device, text=text), ConcurrencyLimit(), Explainer()
    app = FastAPI(title="regard", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(SecurityMiddleware, token=token)
    _say_what_is_wrong(app)

    @app.get("/")
    async def page() -> Response:
        return await file("index.html")

    @app.get("/page/{path:path}")
    async def file(path: str) -> Response:
        found = standalone.entries().get(path)
        if found is None:
            raise NotFound(f"the page has no file {path!r}")
        return Response(found.read_bytes(), media_type=standalone.media_type(path))

    @app.get("/api/runs")
    async def known() -> Response:
        return _json(await run_in_threadpool(runs.to_json))

    @app.post("/api/trace")
    async def trace(wanted: schemas.TraceBody, request: Request) -> Response:
        _short_enough(wanted)
        found, weights = await turns.take(request, runs.trace, wanted)
        return _json(found.header | {"key": f"{found.key}-{weights}", "weights": weights})

    @app.get("/api/trace/{key}/layers")
    async def layers(key: str, request: Request) -> Response:
        found = runs.kept(key)
        return _json(await turns.take(request, lambda: found.layers))

    @app.get("/api/trace/{key}/vocabulary")
    async def vocabulary(key: str, request: Request) -> Response:
        found = runs.kept(key)
        return _json(await turns.take(request, lambda: found.vocabulary))

    @app.get("/api/trace/{key}/{name:path}")
    async def array(key: str, name: str, request: Request) -> Response:
        found = runs.kept(key)
        try:
            shown = await turns.take(request, found.display, name)
        except KeyError as error:
            raise NotFound(str(error.args[0])) from None
        return Response(shown.tobytes(), media_type="application/octet-stream")

    @app.post("/api/explain")
    async def explain(wanted: schemas.ExplainBody, request: Request) -> Response:
        _short_enough(wanted)
        lines = await turns.take(request, begun, wanted, asyncio.get_running_loop())
        return StreamingResponse(lines, media_type="application/x-ndjson")

    def begun(wanted: schemas.ExplainBody, loop: asyncio.AbstractEventLoop) -> EventLines:
        with runs.using(wanted.run, wanted.step, wanted.weights) as held:
            return explainer.begin(held.model, wanted, loop)

    @app.post("/api/positions")
    async def places(wanted: schemas.PositionsBody, request: Request) -> Response:
        return _json(await turns.take(request, lambda: runs.positions(wanted).to_json()))

    @app.post("/api/standalone")
    async def whole(wanted: schemas.StandaloneBody, request: Request) -> Response:
        for one in wanted.requests:
            _short_enough(one)
        traces = []
        for one in wanted.requests:
            found, _ = await turns.take(request, runs.trace, one)
            traces.append(found)
            if len(traces) > 1 and sum(trace.size for trace in traces) > schemas.FILE_BYTES:
                raise TooLarge(
                    f"the file would hold more than {schemas.FILE_BYTES // 2**20} MB: open fewer runs or a shorter text"
                )
        made = await turns.take(request, lambda: standalone.page(traces, hash=wanted.hash))
        return Response(made, media_type="text/html; charset=utf-8")

    return app


def _short_enough(wanted: schemas.RunRequest) -> None:
    for text in (wanted.text, wanted.target or ""):
        if len(text) > schemas.CHARACTERS:
            raise TooLarge(f"the text has {len(text):,} characters: at most {schemas.CHARACTERS:,}")


def _json(content: Any, status: int = 200) -> Response:
    return Response(standalone.as_json(content), status, media_type="application/json")


def _say_what_is_wrong(app: FastAPI) -> None:
    """Every error is one line for people, with the status that says what kind it is."""

    def refused(_: Request, error: Exception) -> Response:
        return _json({"error": " ".join(str(error).split())}, STATUS[type(error)])

    def misasked(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"][1:]) or "the request"
        return _json({"error": f"{where}: {fault['msg'].removeprefix('Value error, ')}"}, 400)

    def missing(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json({"error": str(error.detail)}, error.status_code)

    def broken(_: Request, error: Exception) -> Response:
        return _json({"error": f"a bug in regard: {type(error).__name__}: {error}"}, 500)

    for kind in STATUS:
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(RequestValidationError, misasked)
    app.add_exception_handler(HTTPException, missing)
    app.add_exception_handler(Exception, broken)
