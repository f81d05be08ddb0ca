"""regard serve"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from regard import devices
from regard.cli import options
from regard.cli.groups import grouped
from regard.cli.output import note
from regard.server import service_server


@dataclass(frozen=True)
class AccessOptions:
    """The address, and who may use the server."""

    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="The address to listen on; other than this machine's, keys are needed."),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port; 0: any free one.")] = 8000
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="API keys, one in a line: NAME SECRET [REQUESTS-A-MINUTE]. The environment variable REGARD_API_KEY "
            "may hold one more.",
            show_default=False,
        ),
    ] = None
    auth: Annotated[
        bool, typer.Option("--auth/--no-auth", help="Whether an address that others can reach needs keys.")
    ] = True
    rate: Annotated[
        float, typer.Option(metavar="N", min=0, help="Requests a minute that each key may send; 0: no limit.")
    ] = 0.0


@dataclass(frozen=True)
class LimitOptions:
    """Limits of memory, requests and time."""

    memory: Annotated[
        float,
        typer.Option(metavar="GB", min=0, help="Memory of all models, above which unused ones are unloaded."),
    ] = 0.0
    sentences: Annotated[
        int, typer.Option(metavar="N", min=1, max=4096, help="Sentences that are decoded at the same time.")
    ] = 64
    queue: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sentences that may wait; above it, requests are refused (503).")
    ] = 1024
    characters: Annotated[int, typer.Option(metavar="N", min=1, help="Characters of a request, at most.")] = 50_000
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time limit of a request.")] = 60.0
    drain: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long accepted requests may take after SIGTERM.")
    ] = 30.0


@dataclass(frozen=True)
class TLSOptions:
    """The certificate for HTTPS."""

    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A certificate (PEM), for HTTPS.", show_default=False)
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key of the certificate (PEM).", show_default=False)
    ] = None


@grouped
def serve(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]RUN ...",
            help="Run directories of translation and language models, with a name if it should not be that of the "
            "directory. A name such as en-es gives the languages of a translation model.",
            show_default=False,
        ),
    ],
    *,
    access: AccessOptions,
    glossary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="Terms and their translations, for all requests, or for those to one run: see `regard translate "
            "--glossary`. May be given several times.",
            show_default=False,
        ),
    ] = None,
    limits: LimitOptions,
    tls: TLSOptions,
    logs: Annotated[
        bool, typer.Option("--log/--no-log", help="Log every request to stderr as a JSON object, without texts.")
    ] = True,
    device: options.Device = "auto",
) -> None:
    """Serve translation and language models over HTTP.

    Programs that speak to LibreTranslate, DeepL or OpenAI can use it unchanged, and its own interface (/v1/translate)
    has n-best lists and scores; /openapi.json describes all. Sentences of all clients share batches: each joins between
    two steps of the decoder and leaves when it is done, with the result of `regard translate`.

    It listens on this machine only unless --host says otherwise. /healthz, /readyz and /metrics (Prometheus) are for
    operation. SIGTERM or Ctrl-C ends it after it has answered what it has accepted. Needs regard[serve].

    Examples:

        regard serve runs/en-es

        regard serve en-es=runs/one de-en=runs/two runs/stories --memory 4

        regard serve runs/en-es --glossary terms.tsv

        regard serve runs/en-es --host 0.0.0.0 --keys keys.txt --tls-cert cert.pem --tls-key key.pem
    """
    given = service_server.Options(
        host=access.host,
        port=access.port,
        keys=access.keys,
        auth=access.auth,
        rate=access.rate,
        glossaries=glossary or (),
        device=device,
        memory_gb=limits.memory,
        rows=limits.sentences,
        characters=limits.characters,
        queue=limits.queue,
        seconds=limits.timeout,
        drain_seconds=limits.drain,
        certificate=tls.tls_cert,
        private_key=tls.tls_key,
        logs=logs,
    )
    server = service_server.open_service(runs, given)
    with suppress(OSError):  # a full disk behind stderr must not keep the server from answering
        note(f"regard: {server.address} serves {', '.join(runs)} (Ctrl-C ends it)")
    with devices.held_memory(devices.pick(device)):
        server.run()
