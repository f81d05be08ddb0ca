"""Errors and warnings that the command line reports as one line."""

from __future__ import annotations

import errno
import re

# Control characters except tab and line feed, bidirectional controls, and unpaired surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class RegardWarning(UserWarning):
    """A problem that does not stop a command, which prints it as one line."""


class UserError(Exception):
    """An error that the user can correct. The command line prints its text as one line and exits with status 2."""


class ReportedElsewhere(UserError):
    """An error that another process has reported: the command line prints nothing more, and exits with `status`."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(KeyboardInterrupt):
    """A signal stopped a command, and complete results are saved; `status` is the exit status.

    Without a message, another process reports it.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def printable(text: str) -> str:
    r"""Escape control characters, which a terminal would act on. For text from files that may not be trusted.

    >>> print(printable("\x1b[2Jgone"))
    \x1b[2Jgone
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters: messages of libraries can be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "allow_pickle" in lines[0]:  # NumPy's advice to load it with pickle would execute code
        return "not a NumPy file of numbers"
    return lines[0][:200] if lines else type(error).__name__


def is_out_of_memory(error: Exception) -> bool:
    """Whether the system, Python, PyTorch or CUDA had no memory left; most of them say so only in the message."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    message = str(error).lower()
    return any(words in message for words in ("out of memory", "allocate memory", "not enough memory", "bad_alloc"))
