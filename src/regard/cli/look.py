"""regard look"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.output import note
from regard.server import serve


def look(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...] [TEXT]",
            help="Run directories, and a text to begin with.",
            show_default=False,
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    host: Annotated[str, typer.Option(help="An address of this machine's own; others are refused.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    token: Annotated[
        bool, typer.Option("--token/--no-token", help="Answer only those who open the address printed here.")
    ] = True,
    device: options.Device = "auto",
) -> None:
    """Look inside runs, live, on a page in the browser.

    Type a sentence and see what the model says, where it looks, what each layer would have said, what happens when a
    head is switched off or a word is hidden, and which words the output depends on. Several runs stand side by side.

    The page is served by this machine for this machine and fetches nothing from elsewhere. Its address carries a token
    of this start, so that other users of the machine cannot open it. Ctrl-C ends it. It needs regard[serve].

    Examples:

        regard look runs/en-es

        regard look runs/ladder-additive runs/ladder-transformer 'this cat is very large'

        regard look runs/stories --port 8000 --no-browser
    """
    paths, text = _apart(runs)
    options.readable(TEXT=text)
    server = serve.open_server(paths, text=text, device=device, host=host, port=port, token=token)
    note(f"regard: {server.link} shows {', '.join(map(str, paths))} (Ctrl-C ends it)")
    server.run(browser=browser)


def _apart(words: list[str]) -> tuple[list[Path], str]:
    """Runs, and the text where the last word is none: a folder, or something that looks like one, is a run."""
    *rest, last = words
    looks_like_text = any(sign.isspace() for sign in last) or "/" not in last
    if rest and looks_like_text and not (last and os.path.exists(last)):
        return [Path(word) for word in rest], last
    return [Path(word) for word in words], ""
