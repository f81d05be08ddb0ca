"""The translation page of `regard serve`: its files. It uses `/v1/translate` and `/v1/models` like any other client."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

from regard.server.gateway import Gateway
from regard.server.registry import NotFound

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    folder = files("regard.server") / "page"
    entries = {entry.name: entry for entry in folder.iterdir() if entry.is_file()}

    @router.get("/")
    async def index() -> Response:
        return file("index.html")

    @router.get("/page/{name}")
    async def page_file(name: str) -> Response:
        return file(name)

    def file(name: str) -> Response:
        if name not in entries:
            raise NotFound(f"the page has no file {name[:64]!r}")
        kind = TYPES[name.rpartition(".")[2]]
        return Response(entries[name].read_bytes(), media_type=f"{kind}; charset=utf-8")

    return router
