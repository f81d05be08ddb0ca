"""A server process: an open port, and a server that runs until it is stopped."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import webbrowser
from dataclasses import dataclass

import uvicorn

from regard.errors import UserError
from regard.files import errno_text


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
