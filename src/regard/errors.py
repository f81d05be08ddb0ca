"""The one kind of failure a user is meant to read: a sentence, and an exit status."""

from __future__ import annotations

import re

# Control characters but tab and line feed, overrides of the writing direction, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class RegardWarning(UserWarning):
    """Something the user should know that does not stop the work; the command line prints it as one line."""


class UserError(Exception):
    """Something the user can mend. The command line prints its text as one line and exits with status 2."""


def printable(text: str) -> str:
    r"""Escape what a terminal would obey instead of showing it. For text that may come from foreign files.

    >>> print(printable("\x1b[2Jgone"))
    \x1b[2Jgone
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: Exception) -> str:
    """Of what somebody else's error says, which may be pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
