"""The application of the inspection page: its files, traces and their arrays, explanations, positions."""

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
from regard.server.explain import Busy, EventLines, Explainer, TooManyMasks
from regard.server.middleware import SecurityMiddleware
from regard.server.registry import NotFound, RunRegistry, WeightsChanged
from regard.viz import standalone

MAX_RUNNING = 2  # requests that use models at the same time
MAX_WAITING = 100

Answer = TypeVar("Answer")


class TooLarge(Exception):
    """A text or a file above the limits of this server."""


STATUS: dict[type[Exception], int] = {
    UserError: 400,
    NotFound: 404,
    WeightsChanged: 409,
    TooLarge: 413,
    TooManyMasks: 422,
    Cancelled: 499,  # nginx's status for a client that disconnected; only tests see it
    Busy: 503,
}


class ConcurrencyLimit:
    """Limits how many requests run and wait; further ones are refused as busy."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_RUNNING)
        self._waiting = 0

    async def run(self, request: Request, work: Callable[..., Answer], *arguments: Any) -> Answer:
        """Run `work` in a thread when there is a free slot; cancel it when the client disconnects."""
        if self._waiting >= MAX_WAITING:
            raise Busy("too many requests: try again in a moment")
        self._waiting += 1
        disconnected = Event()
        listener = asyncio.create_task(_set_on_disconnect(request, disconnected))

        def cancellable_work() -> Answer:
            with cancellable(disconnected.is_set):
                return work(*arguments)

        try:
            async with self._free:
                if disconnected.is_set():
                    raise Cancelled("the client disconnected")
                return await run_in_threadpool(cancellable_work)
        finally:
            self._waiting -= 1
            listener.cancel()


async def _set_on_disconnect(request: Request, disconnected: Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    disconnected.set()


def application(
    paths: Sequence[str | Path], *, text: str = "", device: str = "auto", token: str | None = None
) -> FastAPI:
    """Make the application for these runs; `text` is the first input of the page, `token` is required of requests."""
    runs, limit, explainer = RunRegistry(paths, device=device, text=text), ConcurrencyLimit(), Explainer()
    app = FastAPI(title="regard", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(SecurityMiddleware, token=token)
    _handle_errors(app)

    @app.get("/")
    async def page() -> Response:
        return await file("index.html")

    @app.get("/page/{path:path}")
    async def file(path: str) -> Response:
        entry = standalone.entries().get(path)
        if entry is None:
            raise NotFound(f"the page has no file {path!r}")
        return Response(entry.read_bytes(), media_type=standalone.media_type(path))

    @app.get("/api/runs")
    async def list_runs() -> Response:
        return _json(await run_in_threadpool(runs.to_json))

    @app.post("/api/trace")
    async def trace(body: schemas.TraceBody, request: Request) -> Response:
        _check_length(body)
        recorded, weights = await limit.run(request, runs.trace, body)
        return _json(recorded.header | {"key": f"{recorded.key}-{weights}", "weights": weights})

    @app.get("/api/trace/{key}/layers")
    async def layers(key: str, request: Request) -> Response:
        recorded = runs.cached_trace(key)
        return _json(await limit.run(request, lambda: recorded.layers))

    @app.get("/api/trace/{key}/vocabulary")
    async def vocabulary(key: str, request: Request) -> Response:
        recorded = runs.cached_trace(key)
        return _json(await limit.run(request, lambda: recorded.vocabulary))

    @app.get("/api/trace/{key}/{name:path}")
    async def array(key: str, name: str, request: Request) -> Response:
        recorded = runs.cached_trace(key)
        try:
            values = await limit.run(request, recorded.display, name)
        except KeyError as error:
            raise NotFound(str(error.args[0])) from None
        return Response(values.tobytes(), media_type="application/octet-stream")

    @app.post("/api/explain")
    async def explain(body: schemas.ExplainBody, request: Request) -> Response:
        _check_length(body)
        lines = await limit.run(request, start_explanation, body, asyncio.get_running_loop())
        return StreamingResponse(lines, media_type="application/x-ndjson")

    def start_explanation(body: schemas.ExplainBody, loop: asyncio.AbstractEventLoop) -> EventLines:
        with runs.using(body.run, body.step, body.weights) as loaded:
            return explainer.start(loaded.model, body, loop)

    @app.post("/api/positions")
    async def positions(body: schemas.PositionsBody, request: Request) -> Response:
        return _json(await limit.run(request, lambda: runs.positions(body).to_json()))

    @app.post("/api/standalone")
    async def standalone_file(body: schemas.StandaloneBody, request: Request) -> Response:
        for one in body.requests:
            _check_length(one)
        traces = []
        for one in body.requests:
            recorded, _ = await limit.run(request, runs.trace, one)
            traces.append(recorded)
            if len(traces) > 1 and sum(trace.size for trace in traces) > schemas.MAX_FILE_BYTES:
                raise TooLarge(
                    f"the file would exceed {schemas.MAX_FILE_BYTES // 2**20} MB: use fewer runs or a shorter text"
                )
        html = await limit.run(request, lambda: standalone.page(traces, hash=body.hash))
        return Response(html, media_type="text/html; charset=utf-8")

    return app


def _check_length(body: schemas.RunRequest) -> None:
    for text in (body.text, body.target or ""):
        if len(text) > schemas.MAX_CHARACTERS:
            raise TooLarge(f"the text has {len(text):,} characters: at most {schemas.MAX_CHARACTERS:,} are allowed")


def _json(content: Any, status: int = 200) -> Response:
    return Response(standalone.as_json(content), status, media_type="application/json")


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with one line and a status."""

    def known_error(_: Request, error: Exception) -> Response:
        return _json({"error": " ".join(str(error).split())}, STATUS[type(error)])

    def invalid_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return _json({"error": f"{where}: {first['msg'].removeprefix('Value error, ')}"}, 400)

    def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _json({"error": str(error.detail)}, error.status_code)

    def bug(_: Request, error: Exception) -> Response:
        return _json({"error": f"a bug in regard: {type(error).__name__}: {error}"}, 500)

    for kind in STATUS:
        app.add_exception_handler(kind, known_error)
    app.add_exception_handler(RequestValidationError, invalid_request)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)
