"""What stands before every request: who may ask, how much, and what a browser may do with the answer.

A page from elsewhere can point a browser at this machine (by its address, or by a name that it makes resolve to it), so
only requests that name this machine as their host, and come from no other site, are answered. Other users of this
machine can reach the port too, so requests carry the token of this start: `/?token=...` sets it as a cookie, and
programs send it as `Authorization: Bearer ...`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")
LARGEST = 2**20  # bytes of a request's body
BODY_SECONDS = 30.0  # in which it has to arrive
NO_TOKEN = "this page needs its token: open the address that `regard look` printed, which ends in ?token=..."

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
        parts = urlsplit(f"//{host}")
        return parts.hostname in LOCAL and parts.port != 0
    except ValueError:
        return False


class SecurityMiddleware:
    """Refuses requests that are not from here or too large, and puts the safety headers on every answer.

    With a `token`, requests without it are refused as well.
    """

    def __init__(self, app: App, token: str | None = None) -> None:
        self.app, self.token = app, token

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
        if self.token is not None and not self._is_known(headers):
            if not self._opens_page(scope):
                await _refuse(safe, 401, NO_TOKEN, (b"www-authenticate", b"Bearer"))
                return
            safe = _with_headers(send, (b"set-cookie", _cookie(headers[b"host"], self.token)))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, headers.get(b"content-length", ""))
        except TimeoutError:
            await _refuse(safe, 408, f"the request took longer than {BODY_SECONDS:g} seconds to arrive")
            return
        if body is None:
            await _refuse(safe, 413, f"the request is larger than {LARGEST // 1024} KB")
            return
        await self.app(scope, _again(body, receive), safe)

    def _is_known(self, headers: Mapping[bytes, str]) -> bool:
        """Whether a request carries the token, as its cookie or in its Authorization header."""
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(cookie_name(headers[b"host"]))
        except CookieError:
            cookie = None
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else "" if cookie is None else cookie.value
        return self._is_token(sent)

    def _opens_page(self, scope: Scope) -> bool:
        """Whether this is the page itself, opened by the printed address.

        It is answered at once: after a redirect the browser would hold back a strict cookie if a link on another site
        led here.
        """
        sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        return scope["method"] == "GET" and scope["path"] == "/" and self._is_token(sent[0])

    def _is_token(self, sent: str) -> bool:
        return self.token is not None and secrets.compare_digest(sent.encode(), self.token.encode())


def cookie_name(host: str) -> str:
    """A name for the port, because browsers share cookies between the ports of a host.

    >>> cookie_name("127.0.0.1:8000")
    'regard-8000'
    """
    return f"regard-{urlsplit(f'//{host}').port or 80}"


def _cookie(host: str, token: str) -> bytes:
    return f"{cookie_name(host)}={token}; Path=/; HttpOnly; SameSite=Strict".encode()


def _with_headers(send: Send, *more: tuple[bytes, bytes]) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in HEADERS]
            message = {**message, "headers": [*own, *HEADERS.items(), *more]}
        await send(message)

    return sent


async def _refuse(send: Send, status: int, why: str, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
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
