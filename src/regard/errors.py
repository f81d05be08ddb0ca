"""The one kind of failure a user is meant to read: a sentence, and an exit status."""


class UserError(Exception):
    """Something the user can mend. The command line prints its text as one line and exits with status 2."""
