"""The command line: one file for each verb, and one place where failures become a line and an exit status.

Exit statuses: 0 success; 1 a bug in regard; 2 an error that the user can correct (one line says what);
130 stopped by Ctrl-C; 143 stopped by SIGTERM; 129 by SIGHUP; 141 the reader of the output has closed it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from regard.cli.app import command
from regard.errors import Interrupted, RegardWarning, ReportedElsewhere, UserError, is_out_of_memory, printable
from regard.files import errno_text

MAX_MESSAGE_CHARS = 2000  # a message may quote the content of a file
PLAIN_WORDS = {  # replacements in messages of the argument parser
    "Input should be": "must be",
    "Value error, ": "",
    "a valid integer, unable to parse string as an integer": "a whole number",
    "a valid number, unable to parse string as a number": "a number",
}
COMPLETION = "_REGARD_COMPLETE"  # set by the script that `regard --install-completion` installs

# oneDNN, and PyTorch's layer over it, cache the code generated for each matrix shape. Their defaults, 1024 shapes each,
# take up to a gigabyte.
CODE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
CACHED_SHAPES = 64
SERVER_CACHED_SHAPES = 256  # batches of a server change all the time, and creating the code again takes a millisecond


def configure_libraries(verb: str = "") -> None:
    """Set the environment variables that libraries inside PyTorch read when loaded. The user's settings win."""
    for cache in CODE_CACHES:
        os.environ.setdefault(cache, str(SERVER_CACHED_SHAPES if verb == "serve" else CACHED_SHAPES))


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`). Another file would get its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the process ends)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `regard` with these arguments (default: the command line's) and exit with its status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_standard_streams()
    configure_libraries(next((word for word in words if not word.startswith("-")), ""))
    debug = "--debug" in words or bool(os.environ.get("REGARD_DEBUG"))
    sys.exit(run([word for word in words if word != "--debug"], debug))


def run(words: list[str], debug: bool) -> int:
    """Run `regard` with these words and return its exit status; `debug` raises errors instead of reporting them."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
            if issubclass(category, RegardWarning):  # one line, without the line of code that raised it
                _report(f"warning: {message}", 0)
            else:
                show_others(message, category, *location, **more)

        warnings.showwarning = show
        return _status(words, debug)


def _status(words: list[str], debug: bool) -> int:
    try:
        if COMPLETION in os.environ:
            command().main(words, "regard")
        # Otherwise not the parser's `main`, which turns Ctrl-C and a broken pipe into exit statuses of its own.
        with command().make_context("regard", words) as context:
            command().invoke(context)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as stop:
        status = stop.status if isinstance(stop, Interrupted) else 130
        if isinstance(stop, Interrupted) and not str(stop):
            return status
        if status == 130 and sys.stderr.isatty():
            _start_line()  # the terminal has written ^C
        return _report(str(stop) or "stopped", status)
    except SystemExit as stop:  # raised by completion with 0, and by rich, which writes the help, for a broken pipe
        return _broken_pipe() if stop.code else 0
    except BrokenPipeError:
        return _broken_pipe()
    except Exception as error:
        return _failed(error, debug, next((word for word in words if not word.startswith("-")), ""))


def _failed(error: Exception, debug: bool, verb: str) -> int:
    """Report an error in one line and return the exit status."""
    if hasattr(error, "exit_code"):  # how the argument parser leaves after --help and --version, or reports misuse
        return _misuse(error) if hasattr(error, "format_message") else error.exit_code
    if debug:
        raise error
    if isinstance(error, ReportedElsewhere):
        return error.status
    if isinstance(error, UserError):
        return _report(str(error), 2)
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM):
        if error.filename is None:  # errors of files have a name, so this one is of the output
            _discard_stdout()
        return _report(f"{error.filename or 'standard output'}: {errno_text(error)}", 2)
    if is_out_of_memory(error):
        return _report(f"out of memory: {_memory_advice(verb)}", 2)
    return _report(f"a bug in regard: {type(error).__name__}: {error} (--debug shows where; please report it)", 1)


def _memory_advice(verb: str) -> str:
    """Advice for a user of this verb when memory runs out."""
    if verb == "train":
        return "lower training.batch_tokens, set training.checkpoint_activations = true, or choose a smaller model"
    if verb in ("look", "draw", "explain"):
        return "give a shorter text"
    if verb in ("translate", "generate", "evaluate", "compare", "fill"):
        return "lower --beam or --samples, or decoding.batch_tokens in the run's recipe.toml; shorter lines also help"
    return "use a machine with more memory"


def _misuse(error: Any) -> int:
    """Report a wrong or missing argument in one line; nothing after the help that `regard` alone shows."""
    message = error.format_message().rstrip(".")
    for words, plain in PLAIN_WORDS.items():
        message = message.replace(words, plain)
    context = getattr(error, "ctx", None)
    if hasattr(error, "option_name") and context is not None and context.command.name == "train":
        from regard.recipes.errors import settings_called  # pydantic would slow `regard --help` down

        if settings := [name for name in settings_called(error.option_name) if "." in name]:
            message = f"No such option: {error.option_name}; settings are given as --set {settings[0]}=VALUE"
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return _report(f"{message}{hint}", 2) if message else 2


def _broken_pipe() -> int:
    _discard_stdout()
    return 141


def _discard_stdout() -> None:
    """Drop the buffered output, which cannot be written: Python would try, and print another error, at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _start_line() -> None:
    """Move the terminal's cursor to the start of a line; to the next line, unless it is at the start already.

    The spaces fill the rest of a line that has text, and wrap; on an empty line they do not reach the end.
    """
    with contextlib.suppress(OSError):
        print(" " * (os.get_terminal_size(sys.stderr.fileno()).columns - 1), end="\r", file=sys.stderr, flush=True)


def _report(line: str, status: int) -> int:
    """Print one line on standard error, and return `status`."""
    line = printable(" ".join(line.split()))
    if len(line) > MAX_MESSAGE_CHARS:
        line = line[:MAX_MESSAGE_CHARS] + "..."
    rank = os.environ.get("RANK", "0")  # set by torchrun
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"regard: {line}" if rank == "0" else f"regard (rank {rank}): {line}", file=sys.stderr)
    return status
