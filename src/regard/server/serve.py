"""Where the server listens: an address of this machine's own, until Ctrl-C."""

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

PATIENCE = 1  # seconds for what is still being answered when it ends


@dataclass
class Server:
    """A server that has its port and is about to answer."""

    address: str
    token: str | None  # that requests have to carry
    _server: uvicorn.Server
    _socket: socket.socket

    @property
    def link(self) -> str:
        """The address that opens the page: it carries the token, which the page keeps as a cookie."""
        return self.address if self.token is None else f"{self.address}?token={self.token}"

    def run(self, *, browser: bool = False) -> None:
        """Answer until Ctrl-C."""
        if browser:
            threading.Thread(target=self._open_browser, daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    @property
    def started(self) -> bool:
        """Whether it answers by now."""
        return self._server.started

    def _open_browser(self) -> None:
        while not self.started and not self._server.should_exit:
            time.sleep(0.05)
        if self.started:
            webbrowser.open(self.link)

    def stop(self) -> None:
        """End it from another thread."""
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
    """The server of these runs, its port taken; 0 takes any that is free. Each start has its own token."""
    if host not in LOCAL:
        raise UserError(
            f"--host {host}: the page is for this machine alone, as {', '.join(LOCAL)} "
            "(to look from another one, forward a port: ssh -L 8000:127.0.0.1:8000 ...)"
        )
    try:
        import uvicorn

        from regard.server.app import application
        from regard.server.connections import BACKLOG, LimitedProtocol
    except ImportError as error:
        raise UserError(f"the page needs {error.name}: pip install 'regard[serve]'") from None
    secret = secrets.token_urlsafe(24) if token else None
    app = application(paths, text=text, device=device, token=secret)
    listener = _listener(host, port)
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        loop="asyncio",  # whose way of accepting connections BACKLOG is made for
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=PATIENCE,
    )
    shown = f"[{host}]" if ":" in host else host
    return Server(f"http://{shown}:{listener.getsockname()[1]}/", secret, uvicorn.Server(config), listener)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP by name: only then does asyncio send small answers at once, where Nagle's algorithm would wait 40 ms for each.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # so that whoever comes before the server has started waits, and is not turned away
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} cannot be had: {errno_text(error)} (--port 0 takes any that is free)") from error
    return listener
