"""The process of `regard look`: it listens on a loopback address until Ctrl-C."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from regard.errors import UserError
from regard.server import connections, page_app
from regard.server.middleware import LOCAL
from regard.server.process import Server, listen

SHUTDOWN_SECONDS = 1  # for requests that are still running


def open_server(
    paths: Sequence[Path],
    *,
    text: str = "",
    device: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    token: bool = True,
) -> Server:
    """Open a server for these runs; port 0 is any free one. Each start has its own token."""
    if host not in LOCAL:
        raise UserError(
            f"--host {host}: the page is available on this machine only ({', '.join(LOCAL)}); "
            "to use it from another one, forward a port: ssh -L 8000:127.0.0.1:8000 ..."
        )
    secret = secrets.token_urlsafe(24) if token else None
    page = page_app.application(paths, text=text, device=device, token=secret)
    listener = listen(host, port)
    config = uvicorn.Config(
        page,
        http=connections.LimitedProtocol,
        ws="none",
        loop="asyncio",  # this backlog assumes how asyncio accepts connections
        backlog=connections.BACKLOG,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    shown = f"[{host}]" if ":" in host else host
    return Server(f"http://{shown}:{listener.getsockname()[1]}/", secret, uvicorn.Server(config), listener)
