"""The server process: it listens on a loopback address until Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import UserError
from regard.files import errno_text
from regard.server.middleware import LOCAL

if TYPE_CHECKING:
    import uvicorn

SHUTDOWN_SECONDS = 1  # for requests that are still running


@dataclass
class Server:
    """A server with an open port."""

    address: str
    token: str | None  # required of requests
    _server: uvicorn.Server
    _socket: socket.socket

    @property
    def link(self) -> str:
        """The address that opens the page, with the token, which the page keeps as a cookie."""
        return self.address if self.token is None else f"{self.address}?token={self.token}"

    def run(self, *, browser: bool = False) -> None:
        """Serve until Ctrl-C."""
        if browser:
            threading.Thread(target=self._open_browser, daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    @property
    def started(self) -> bool:
        """Whether the server answers requests."""
        return self._server.started

    def _open_browser(self) -> None:
        while not self.started and not self._server.should_exit:
            time.sleep(0.05)
        if self.started:
            webbrowser.open(self.link)

    def stop(self) -> None:
        """Stop the server from another thread."""
        self._server.should_exit = True


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
    try:  # fastapi and uvicorn are optional
        import uvicorn

        from regard.server import app, connections
    except ImportError as error:
        raise UserError(f"the page needs {error.name}: pip install 'regard[serve]'") from None
    secret = secrets.token_urlsafe(24) if token else None
    page = app.application(paths, text=text, device=device, token=secret)
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


def listen(host: str, port: int) -> socket.socket:
    """Open a port; 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit IPPROTO_TCP asyncio sets TCP_NODELAY; otherwise small responses would be delayed by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # so that early connections wait until the server has started
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} cannot be opened: {errno_text(error)} (--port 0 uses any free one)") from error
    return listener
