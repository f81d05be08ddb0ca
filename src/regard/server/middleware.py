"""Checks of every request (host, origin, token, size) and security headers of every response.

A page of another site can send requests to this machine, by its address or by a name that resolves to it (DNS
rebinding). Therefore only requests with a local host name and without a foreign origin are answered. Other users of
this machine can reach the port too, so requests need the token of this start: `/?token=...` sets it as a cookie, and
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
MAX_BODY_BYTES = 2**20
BODY_SECONDS = 30.0  # time limit for the body
NO_TOKEN = "the token is missing: open the address that `regard look` printed, which ends in ?token=..."

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-cache",  # always revalidated, so that the page is never outdated
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
    """Refuses requests that are not local or too large, or lack the `token`, and adds security headers to responses.

    Without `local`, hosts and origins are not checked: for servers that check API keys.
    """

    def __init__(self, app: App, token: str | None = None, local: bool = True, max_body: int = MAX_BODY_BYTES) -> None:
        self.app, self.token, self.local, self.max_body = app, token, local, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # other connections are closed without an answer
        secured = _with_headers(send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.local and not is_local(headers.get(b"host", "")):
            await _refuse(secured, 403, "the page is available on this machine only: open it as 127.0.0.1")
            return
        origin = headers.get(b"origin")
        foreign = origin is not None and origin.partition("://")[2] != headers.get(b"host")  # another port too
        if self.local and foreign:
            await _refuse(secured, 403, "requests from other sites are refused")
            return
        if self.token is not None and not self._is_known(headers):
            if not self._opens_page(scope):
                await _refuse(secured, 401, NO_TOKEN, (b"www-authenticate", b"Bearer"))
                return
            secured = _with_headers(send, (b"set-cookie", _cookie(headers[b"host"], self.token)))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive, headers.get(b"content-length", ""), self.max_body)
        except TimeoutError:
            await _refuse(secured, 408, f"the request took longer than {BODY_SECONDS:g} seconds to arrive")
            return
        if body is None:
            await _refuse(secured, 413, f"the request is larger than {self.max_body // 1024} KB")
            return
        await self.app(scope, _replay(body, receive), secured)

    def _is_known(self, headers: Mapping[bytes, str]) -> bool:
        """Whether a request has the token, as a cookie or in its Authorization header."""
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(cookie_name(headers[b"host"]))
        except CookieError:
            cookie = None
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else "" if cookie is None else cookie.value
        return self._is_token(sent)

    def _opens_page(self, scope: Scope) -> bool:
        """Whether this is a request for the page itself with the token in its address.

        It is answered without a redirect, after which a browser that came from another site would not send a strict
        cookie.
        """
        sent = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        return scope["method"] == "GET" and scope["path"] == "/" and self._is_token(sent[0])

    def _is_token(self, sent: str) -> bool:
        return self.token is not None and secrets.compare_digest(sent.encode(), self.token.encode())


def cookie_name(host: str) -> str:
    """Return a name for the port, since browsers share cookies between the ports of a host.

    >>> cookie_name("127.0.0.1:8000")
    'regard-8000'
    """
    return f"regard-{urlsplit(f'//{host}').port or 80}"


def _cookie(host: str, token: str) -> bytes:
    return f"{cookie_name(host)}={token}; Path=/; HttpOnly; SameSite=Strict".encode()


def _with_headers(send: Send, *more: tuple[bytes, bytes]) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in HEADERS]
            message = {**message, "headers": [*kept, *HEADERS.items(), *more]}
        await send(message)

    return sent


async def _refuse(send: Send, status: int, why: str, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive, content_length: str, largest: int) -> bytes | None:
    """Read the body; return None if it, or its announced length, is too large."""
    if content_length.isdigit() and int(content_length) > largest:
        return None
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body  # disconnected; the application handles it
        body += message.get("body", b"")
        if len(body) > largest:
            return None
        if not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body again, and then the following messages."""
    done = False

    async def replayed() -> Message:
        nonlocal done
        if done:
            return await receive()
        done = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
