"""regard look"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.output import note
from regard.server import page_server


def look(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...] [TEXT]",
            help="Run directories, and a text to start with.",
            show_default=False,
        ),
    ],
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port; 0: any free one.")] = 0,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="A loopback address of this machine; others are refused.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    token: Annotated[
        bool,
        typer.Option("--token/--no-token", help="Require the secret token that the printed address contains."),
    ] = True,
    device: options.Device = "auto",
) -> None:
    """Look inside runs, live, on a page in the browser.

    Type a sentence and see what the model outputs, where each head attends, what each layer would have predicted (logit
    lens), what changes when a head is switched off or a word is hidden, and which words the output depends on. Several
    runs are shown side by side.

    The page is served to this machine only and loads nothing from the network. Its address contains a secret token that
    is new each time, so that other users of the machine cannot open it. Ctrl-C ends the server. Needs regard[serve].

    Examples:

        regard look runs/en-es

        regard look runs/ladder-additive runs/ladder-transformer 'this cat is very large'

        regard look runs/stories --port 8000 --no-browser
    """
    paths, text = _split(runs)
    options.check_utf8(TEXT=text)
    server = page_server.open_server(paths, text=text, device=device, host=host, port=port, token=token)
    note(f"regard: {server.link} shows {', '.join(map(str, paths))} (Ctrl-C ends it)")
    server.run(browser=browser)


def _split(words: list[str]) -> tuple[list[Path], str]:
    """Split the words into run directories and the text, which is the last word if it does not look like a path."""
    *rest, last = words
    looks_like_text = any(character.isspace() for character in last) or "/" not in last
    if rest and looks_like_text and not (last and os.path.exists(last)):
        return [Path(word) for word in rest], last
    return [Path(word) for word in words], ""
