"""The application of `regard serve`: its interfaces, health, metrics, logs and errors.

An interface is a module with a function `routes(gateway)` that returns an `APIRouter`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from regard import __version__
from regard.server import deepl_api, libretranslate_api, openai_api, translate_api, translation_page
from regard.server.access import Access, RateLimitExceeded
from regard.server.gateway import STATUSES, Gateway, Limits, error_answer
from regard.server.metrics import Metrics
from regard.server.middleware import SecurityMiddleware
from regard.server.pool import ModelPool

LOG = logging.getLogger("regard.serve")
RETRY_SECONDS = 1  # suggested to clients of a busy server
INTERFACES = (translate_api, libretranslate_api, deepl_api, openai_api, translation_page)


def application(pool: ModelPool, access: Access, limits: Limits, metrics: Metrics, *, local: bool = True) -> FastAPI:
    """Make the application; `local`: answer only requests that name this machine (see `middleware`)."""
    gateway = Gateway(pool, access, limits, metrics)
    metrics.watch(pool)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=pool.load_all, name="regard-models", daemon=True).start()
        yield
        gateway.close()

    app = FastAPI(title="regard serve", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.gateway = gateway
    app.add_middleware(SecurityMiddleware, local=local, max_body=limits.body_bytes)
    app.add_middleware(RequestLog, metrics=metrics)
    _handle_errors(app, metrics)
    _health(app, gateway)
    for interface in INTERFACES:
        app.include_router(interface.routes(gateway))
    return app


def _health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz", tags=["operation"])
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"])
    async def ready() -> Response:
        """Whether all models can be used; 503 while one cannot, or the server is shutting down."""
        pool = gateway.pool
        models = {name: run.error or ("loaded" if run.active else "not loaded yet") for name, run in pool.runs.items()}
        is_ready = not pool.failures and not gateway.draining
        status = "draining" if gateway.draining else "ready" if is_ready else "failed"
        return JSONResponse({"status": status, "models": models}, 200 if is_ready else 503)

    @app.get("/metrics", tags=["operation"])
    async def metrics() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class RequestLog:
    """Logs every request as one JSON object, without texts, and measures its time."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500
        scope.setdefault("state", {})

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            seconds = time.monotonic() - began
            route = scope.get("route")
            path = getattr(route, "path", "other")  # the pattern, so that there are few
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(seconds)
            state, client = scope["state"], scope.get("client")
            key = state.get("key")
            LOG.info(
                json.dumps(
                    {
                        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                        "client": client[0] if client else None,
                        "key": getattr(key, "name", None),
                        "method": scope["method"],
                        "path": path,
                        "status": status,
                        "ms": round(1000 * seconds, 1),
                        "model": state.get("model"),
                        "characters": state.get("characters"),
                    }
                )
            )


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer every error with one line and a status, in the form that the client of the interface expects."""

    def failed(request: Request, error: Exception) -> Response:
        status, why = error_answer(error)
        headers = {}
        if status == 500:
            LOG.error(json.dumps({"error": type(error).__name__, "path": request.url.path}))
        if status in (403, 413, 429, 503, 504):
            metrics.refused.labels(type(error).__name__).inc()
        if status in (429, 503):
            wait = math.ceil(error.retry) if isinstance(error, RateLimitExceeded) else RETRY_SECONDS
            headers["Retry-After"] = str(max(1, wait))
        return error_response(request, status, why, headers)

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(request, error.status_code, str(error.detail), dict(error.headers or {}))

    for kind in STATUSES:
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, failed)


def error_response(request: Request, status: int, why: str, headers: dict[str, str]) -> Response:
    """An error as OpenAI's, DeepL's and LibreTranslate's clients read it."""
    path = request.url.path
    content: dict[str, Any] = {"error": why}
    if path.startswith("/v2/"):
        content = {"message": why}
    elif path.startswith("/v1/") and path != "/v1/translate":
        kind = "invalid_request_error" if status < 500 else "server_error"
        content = {"error": {"message": why, "type": kind, "param": None, "code": None}}
        status = 401 if status == 403 else status
    with contextlib.suppress(UnicodeEncodeError):
        return JSONResponse(content, status, headers)
    return JSONResponse({"error": "the request is not valid Unicode"}, status, headers)
