"""The command line: one thin file a verb, and one place where failures become a line and an exit status.

Exit statuses: 0 all well; 1 a fault in regard itself; 2 something the user can mend (one line says what);
130 stopped by Ctrl-C; 143 stopped by SIGTERM; 129 by SIGHUP; 141 the reader of the output went away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

LONGEST_LINE = 2000  # characters of a message: it may repeat what a file holds


# oneDNN, and PyTorch's layer over it, keep the code generated for each shape of matrix. Their own defaults, 1024 shapes
# each, take up to a gigabyte.
CODE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
CACHED_SHAPES = "64"


def configure_libraries() -> None:
    """Set what the libraries inside PyTorch read from the environment when they are loaded. The user's settings win."""
    for cache in CODE_CACHES:
        os.environ.setdefault(cache, CACHED_SHAPES)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `regard` with these arguments (default: the command line's) and exit with its status."""
    configure_libraries()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get("REGARD_DEBUG"))
    sys.exit(_run([word for word in words if word != "--debug"], debug))


def _run(words: list[str], debug: bool) -> int:
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if category.__name__ == "RegardWarning":  # one line, without the place in the code that it comes from
                _complain(f"warning: {message}", 0)
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        return _status(words, debug)


def _status(words: list[str], debug: bool) -> int:
    try:
        from regard.cli.app import command

        # Not the parser's own `main`: that would turn Ctrl-C and a broken pipe into exit statuses of its own.
        with command().make_context("regard", words) as context:
            command().invoke(context)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as stop:  # or `partial.Stopped`, which has a message and a status
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has written ^C
        return _complain(str(stop) or "stopped", getattr(stop, "status", 130))
    except (BrokenPipeError, SystemExit):  # the latter is how rich, which writes the help, takes the former
        _let_go_of_stdout()
        return 141
    except Exception as error:
        return _failed(error, debug, next((word for word in words if not word.startswith("-")), ""))


def _failed(error: Exception, debug: bool, verb: str) -> int:
    """What the user can mend, usage mistakes, signals that asked training to stop, and our own faults."""
    from regard.errors import UserError

    if hasattr(error, "exit_code"):  # how the argument parser leaves after --help and --version, or reports misuse
        return _misuse(error) if hasattr(error, "format_message") else error.exit_code
    if type(error).__name__ == "Interrupted":
        return _complain(str(error), getattr(error, "status", 130))
    if debug:
        raise error
    if isinstance(error, UserError):
        return _complain(str(error), 2)
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM):
        from regard.files import errno_text

        if error.filename is None:  # files that are written go by name, so it was the output
            _let_go_of_stdout()
        return _complain(f"{error.filename or 'standard output'}: {errno_text(error)}", 2)
    if _out_of_memory(error):
        return _complain(f"out of memory: {_less_memory(verb)}", 2)
    return _complain(f"a fault in regard: {type(error).__name__}: {error} (--debug shows where; please report it)", 1)


def _out_of_memory(error: Exception) -> bool:
    """Whether the system, Python, PyTorch or CUDA had no memory left; most of them say so in words only."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    said = str(error).lower()
    return any(words in said for words in ("out of memory", "allocate memory", "not enough memory", "bad_alloc"))


def _less_memory(verb: str) -> str:
    """What a user of this verb can do about it."""
    if verb == "train":
        return "lower training.batch_tokens, set training.checkpoint_activations = true, or choose a smaller model"
    if verb in ("look", "draw", "explain"):
        return "give a shorter text"
    if verb in ("translate", "generate", "evaluate", "compare", "fill"):
        return "lower --beam or --samples, or decoding.batch_tokens in the run's recipe.toml; shorter lines also help"
    return "use a machine with more of it"


def _misuse(error: Any) -> int:
    """A wrong or missing argument, in a line; after the help that a bare `regard` shows there is nothing to add."""
    said = error.format_message().replace("Input should be", "must be").replace("Value error, ", "").rstrip(".")
    context = getattr(error, "ctx", None)
    if hasattr(error, "option_name") and context is not None and context.command.name == "train":
        from regard.recipes.errors import settings_called

        if meant := [name for name in settings_called(error.option_name) if "." in name]:
            said = f"No such option: {error.option_name}; settings are given as --set {meant[0]}=VALUE"
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return _complain(f"{said}{hint}", 2) if said else 2


def _let_go_of_stdout() -> None:
    """What is still in its buffer cannot be written; without this, Python would try and complain once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(line: str, status: int) -> int:
    from regard.errors import printable

    line = printable(" ".join(line.split()))
    with contextlib.suppress(OSError):  # the terminal may be gone
        print("regard: " + (line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "..."), file=sys.stderr)
    return status
