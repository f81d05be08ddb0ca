"""`regard translate -o FILE` in a terminal: the progress bar, Ctrl-C, and --resume."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.cli import partial, run
from regard.errors import Interrupted
from regard.files import write_text

CTRL_C = b"\x03"
COLUMNS = 200
SECONDS = 60  # after which a command that hangs is killed


def _in_terminal(words: list[str], interrupt: Callable[[], bool] = lambda: False) -> tuple[int, str]:
    """Run a command in a forked process with a terminal; return its exit status and its output without escapes.

    Forked, because importing torch takes longer than the test. Ctrl-C is typed as soon as `interrupt()` is true.
    """
    process, terminal = pty.fork()
    if process == 0:
        termios.tcsetwinsize(0, (50, COLUMNS))
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in enumerate("rww"))  # not pytest's
        os._exit(run(words, debug=False))
    screen, typed, deadline = b"", False, time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if not typed and interrupt():
                os.write(terminal, CTRL_C)
                typed = True
            if select.select([terminal], [], [], 0.005)[0]:
                try:
                    block = os.read(terminal, 1 << 16)
                except OSError:  # Linux: the process has closed the terminal
                    break
                if not block:
                    break
                screen += block
        else:
            os.kill(process, signal.SIGKILL)
    finally:
        os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return status, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())


def _lines(screen: str) -> list[str]:
    """The lines that a terminal of `COLUMNS` shows at the end: long lines wrap, and text is overwritten after a \\r."""
    lines, column = [""], 0
    for character in screen:
        if character == "\r":
            column = 0
            continue
        if character == "\n" or column == COLUMNS:
            lines, column = [*lines, ""], 0
        if character != "\n":
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_ctrl_c_keeps_the_part_and_resume_completes_it(
    regard: Callable, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("regard.cli.inputs.CHUNK_LINES", 8)
    source, out, part = tmp_path / "in.txt", tmp_path / "out.txt", tmp_path / "out.txt.part"
    source.write_text("".join(f"{' '.join('abcdefgh'[: n % 8 + 1])}\n" for n in range(64)))
    words = ["translate", str(trained), "-i", str(source), "-o", str(out), "--beam", "1", "--device", "cpu"]

    status, screen = _in_terminal(words, interrupt=Path(f"{part}.json").exists)
    assert status == 130 and not out.exists()
    complete = part.read_text().count("\n")
    assert 0 < complete < 64 and complete % 8 == 0
    assert re.search(r"translating .* \d+/", screen)
    hint = f"{part} has the output of {complete:,} lines: the same command with --resume continues it"
    assert _lines(screen)[-2:] == [f"regard: stopped; {hint}", ""] and "Traceback" not in screen
    assert "" not in _lines(screen)[:-1]

    status, screen = _in_terminal([*words, "--resume"])
    assert re.search(r"translating .* \d+/64 [\d,]+/s \d\d:\d\d left", screen)  # the rate and the time left
    assert status == 0 and f"resuming after line {complete:,}" in _lines(screen)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.txt", "out.txt"]
    assert out.read_text() == regard("translate", trained, "-i", source, "--beam", 1).out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_output_and_its_state_are_both_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def interrupted(file: Path, text: str) -> None:
        os.kill(os.getpid(), number)
        write_text(file, text)

    monkeypatch.setattr(partial, "write_text", interrupted)
    with (
        pytest.raises(Interrupted, match="has the output of 2 lines") as caught,
        partial.partial_output(tmp_path / "out", {}, resume=False) as out,
    ):
        out.write(["a", "b"], ["A", "B"])
    assert caught.value.status == 128 + number
    state = json.loads((tmp_path / "out.part.json").read_text())
    assert (tmp_path / "out.part").read_text() == "A\nB\n" and (state["lines"], state["bytes"]) == (2, 4)


@pytest.mark.parametrize("before", ["", "^C", "Once upon a ti^C", "a line\n"])
def test_the_message_after_ctrl_c_starts_a_line_without_a_blank_line_before_it(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        sys.stderr.write(before)
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.command", interrupted)
    status, screen = _in_terminal([])
    shown = before.removesuffix("\n")
    assert (status, _lines(screen)) == (130, [*([shown] if shown else []), "regard: stopped", ""])
