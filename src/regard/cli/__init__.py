"""The command line: one thin file a verb, and one place where failures become a line and an exit status.

Exit statuses: 0 all well; 1 a fault in regard itself; 2 something the user can mend (one line says what);
130 stopped by Ctrl-C; 143 stopped by SIGTERM; 141 the reader of the output went away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `regard` with these arguments (default: the command line's) and exit with its status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get("REGARD_DEBUG"))
    sys.exit(_run([word for word in words if word != "--debug"], debug))


def _run(words: list[str], debug: bool) -> int:
    from regard.cli.app import app
    from regard.errors import UserError

    try:
        status = app(words, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except UserError as error:
        if debug:
            raise
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
        return 141
    except Exception as error:
        return _unexpected(error, debug)


def _unexpected(error: Exception, debug: bool) -> int:
    """Usage mistakes, signals that asked training to stop, the system's refusals, and our own faults."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # how the argument parser reports misuse
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return _complain(f"{error.format_message()}{hint}", 2)
    if type(error).__name__ in ("Interrupted", "Abort"):
        return _complain(str(error) or "stopped", getattr(error, "status", 130))
    if debug:
        raise error
    if isinstance(error, OSError) and error.errno is not None:
        from regard.files import reason

        return _complain(f"{error.filename or 'a file'}: {reason(error)}", 2)
    if isinstance(error, MemoryError) or "out of memory" in str(error):
        return _complain("out of memory: lower training.batch_tokens (or decoding.batch_tokens)", 2)
    return _complain(f"a fault in regard: {type(error).__name__}: {error} (--debug shows where; please report it)", 1)


def _complain(line: str, status: int) -> int:
    print("regard: " + " ".join(line.split()), file=sys.stderr)
    return status
