"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    description: str, total: int | Callable[[], int | None] | None, quiet: bool, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by a number of items.

    A `total` that takes time to compute may be a function, which is called on another thread.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console  # here, because rich would slow down every command, also without a terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """Items per second."""

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
        task = bar.add_task(description, total=None if callable(total) else total, completed=done)
        if callable(total):
            threading.Thread(target=lambda: bar.update(task, total=total()), daemon=True).start()
        yield lambda count: bar.advance(task, count)
