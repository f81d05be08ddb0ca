"""Limits on connections: how many there may be, and how long clients may take to send headers and to read."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 128
HEADER_SECONDS = 10.0
READ_SECONDS = 60.0  # that a client may leave an answer unread, once buffers are full
BACKLOG = 32  # connections that asyncio accepts at once, before any of them can be closed


def max_connections(limit: int = MAX_CONNECTIONS) -> int:
    """At most half of the file descriptors that this process may open: asyncio cannot accept without one."""
    return min(limit, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit for request headers, one for reading answers, and a limit on connections.

    Above the limit, the connection that has been without a request for longest is closed, so that half-open requests
    do not lock out others. uvicorn itself limits only the time between two requests of a connection.
    """

    limit = MAX_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._set_deadline()
        if len(self.connections) > max_connections(self.limit):
            idle = [one for one in self.connections if isinstance(one, LimitedProtocol) and not one.is_busy]
            oldest = min(idle, key=lambda one: one._idle_since)  # this connection, if all others are busy
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_busy:
            self._cancel_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_unread()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
