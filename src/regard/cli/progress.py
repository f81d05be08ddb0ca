"""A progress bar, where there is a terminal to show it in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counted(
    what: str, total: int | Callable[[], int | None] | None, quiet: bool, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Call what this yields with how many more are done.

    A `total` that takes time to find out may be a function, which is called on a thread of its own.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """How many are done in a second."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f}/s")

    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(compact=True),
        "left",
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None if callable(total) else total, completed=done)
        if callable(total):
            threading.Thread(target=lambda: bar.update(task, total=total()), daemon=True).start()
        yield lambda more: bar.advance(task, more)
