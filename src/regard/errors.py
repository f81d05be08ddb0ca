"""The one kind of failure a user is meant to read: a sentence, and an exit status."""


class UserError(Exception):
    """Something the user can mend. The command line prints its text as one line and exits with status 2."""


def first_line(error: Exception) -> str:
    """Of what somebody else's error says, which may be pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
