"""The process of `regard serve`: it answers until SIGTERM or Ctrl-C, and then finishes what it has accepted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from regard.errors import UserError
from regard.server.access import KEY_VARIABLE, Access, read_keys
from regard.server.connections import LimitedProtocol
from regard.server.gateway import Limits
from regard.server.metrics import Metrics
from regard.server.middleware import LOCAL
from regard.server.pool import ModelPool
from regard.server.process import Server, listen
from regard.server.service_app import application

BACKLOG = 512  # connections that wait to be accepted
MAX_CONNECTIONS = 1100


@dataclass(frozen=True)
class Options:
    """The address of a server, and the hosts, keys and limits of its requests."""

    host: str = "127.0.0.1"
    port: int = 0
    keys: Path | None = None
    auth: bool = True  # whether another host than this machine needs keys
    glossaries: Sequence[str] = ()  # files, each for all runs, or NAME=FILE
    rate: float = 0.0  # requests a minute of each key (0: no limit)
    device: str = "auto"
    memory_gb: float = 0.0  # of all models together (0: no limit)
    rows: int = 64  # sentences that are decoded at the same time
    characters: int = 50_000  # of a request
    queue: int = 1024  # sentences that wait
    seconds: float = 60.0  # for a request
    drain_seconds: float = 30.0
    certificate: Path | None = None
    private_key: Path | None = None
    logs: bool = True


class ServiceProtocol(LimitedProtocol):
    limit = MAX_CONNECTIONS


class DrainingServer(uvicorn.Server):
    """A server that reports itself as not ready from the signal on that ends it."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.config.app.state.gateway.draining = True  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def open_service(runs: Sequence[str], options: Options) -> Server:
    """Open a server for runs, given as RUN or NAME=RUN."""
    keys = read_keys(options.keys, options.rate)
    if options.host not in LOCAL and not keys and options.auth:
        raise UserError(
            f"--host {options.host}: everyone who can reach this address could use the server; give it keys "
            f"(--keys FILE, or {KEY_VARIABLE}), or --no-auth if that is what you want"
        )
    if (options.certificate is None) != (options.private_key is None):
        raise UserError("TLS needs both --tls-cert and --tls-key")
    for file in (options.certificate, options.private_key):
        if file is not None and not file.is_file():
            raise UserError(f"{file} does not exist")
    metrics = Metrics()
    pool = ModelPool(
        runs,
        device=options.device,
        memory=int(options.memory_gb * 2**30),
        rows=options.rows,
        queue=options.queue,
        observe=metrics.observe,
        glossaries=options.glossaries,
    )
    limits = Limits(options.characters, seconds=options.seconds, queue=options.queue)
    access = Access(keys, options.rate)
    local = options.host in LOCAL and not keys
    app = application(pool, access, limits, metrics, local=local)
    if options.logs:
        _log_to_stderr()
    listener = listen(options.host, options.port)
    tls: dict[str, Any] = {}
    if options.certificate is not None:
        tls = {"ssl_certfile": options.certificate, "ssl_keyfile": options.private_key}
    config = uvicorn.Config(
        app,
        http=ServiceProtocol,
        ws="none",
        loop="asyncio",
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
        **tls,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        listener.close()
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        why = "the key belongs to another certificate" if mismatch else f"not a PEM certificate and its key ({error})"
        files = f"--tls-cert {options.certificate}, --tls-key {options.private_key}"
        raise UserError(f"{files}: {why}") from error

    shown = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "https" if tls else "http"
    address = f"{scheme}://{shown}:{listener.getsockname()[1]}/"
    return Server(address, None, DrainingServer(config), listener)


def _log_to_stderr() -> None:
    logger = logging.getLogger("regard.serve")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
