"""What stands before every request: who may ask, how much, and what a browser may do with the answer.

A page from elsewhere can point a browser at this machine (by its address, or by a name that it makes resolve to it), so
only requests that name this machine as their host, and come from no other site, are answered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")
LARGEST = 2**20  # bytes of a request's body

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-cache",  # asked again each time, so that the page is never an old one
}


def is_local(host: str) -> bool:
    """Whether a host, with or without a port, is this machine.

    >>> is_local("127.0.0.1:8000"), is_local("[::1]"), is_local("localhost.example.org")
    (True, True, False)
    """
    try:
        return urlsplit(f"//{host}").hostname in LOCAL
    except ValueError:
        return False


class Guard:
    """Refuses requests that are not from here or too large, and puts the safety headers on every answer."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a connection of another kind is closed unanswered
        safe = _with_headers(send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not is_local(headers.get(b"host", "")):
            await _refuse(safe, 403, "this page answers only to its own machine: open it as 127.0.0.1")
            return
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2] != headers[b"host"]:  # another port is another site
            await _refuse(safe, 403, "this page answers only to itself, not to other sites")
            return
        body = await _body(receive, headers.get(b"content-length", ""))
        if body is None:
            await _refuse(safe, 413, f"the request is larger than {LARGEST // 1024} KB")
            return
        await self.app(scope, _again(body, receive), safe)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in HEADERS]
            message = {**message, "headers": [*own, *HEADERS.items()]}
        await send(message)

    return sent


async def _refuse(send: Send, status: int, why: str) -> None:
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive, announced: str) -> bytes | None:
    """The whole body; None if it is too large, by what it says or by what comes."""
    if announced.isdigit() and int(announced) > LARGEST:
        return None
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body  # gone; the application will hear of it
        body += message.get("body", b"")
        if len(body) > LARGEST:
            return None
        if not message.get("more_body"):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Hear the body once more, and then what comes after it."""
    heard = False

    async def hear() -> Message:
        nonlocal heard
        if heard:
            return await receive()
        heard = True
        return {"type": "http.request", "body": body, "more_body": False}

    return hear
