"""Chat templates of imported models: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UserError, first_line
from regard.files import write_text
from regard.text.fast_tokenizer import FastTokenizer
from regard.text.tokenizers import Tokenizer

FILE = "chat_template.jinja"  # in a run directory
MAX_CHARACTERS = 1 << 20  # maximum length of a conversation
MAX_TEMPLATE = 1 << 18
MAX_BYTES = 1 << 28  # bytes that applying a template may allocate
MAX_SECONDS = 10

Messages = list[dict[str, str]]  # such as {"role": "user", "content": "Hello"}
Apply = Callable[[str, Messages, dict[str, Any]], str]

if TYPE_CHECKING:
    from jinja2 import Environment, Template


@cache
def _environment() -> Environment:
    """Jinja in a sandbox, with the tags, functions and filters that transformers offers to templates."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chat templates need jinja2: pip install 'regard[formats]'") from None

    class GenerationTag(Extension):
        """{% generation %} ... {% endgeneration %} marks what the model writes; here it is its content only."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class ChatEnvironment(ImmutableSandboxedEnvironment):
        """A sandbox in which no operator makes a value larger than a text may be."""

        intercepted_binops = frozenset({"+", "*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size(operator, left, right) > MAX_CHARACTERS:
                raise TemplateError(f"{operator} would make a value larger than {MAX_CHARACTERS:,}")
            return super().call_binop(context, operator, left, right)

    def raise_exception(reason: str) -> Any:
        raise TemplateError(reason)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = to_json
    return environment


def _size(operator: str, left: Any, right: Any) -> int:
    """About how large the result of an operator is: elements of a sequence, bits of a power."""
    sizes = [len(side) if isinstance(side, str | bytes | list | tuple) else None for side in (left, right)]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    count = left if sizes[0] is None else right
    return max(size or 0 for size in sizes) * count if isinstance(count, int) else 0


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Let the process allocate no more than `MAX_BYTES` in addition, where the system has such a limit (Linux)."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + MAX_BYTES, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _time_limit() -> Iterator[None]:
    """Interrupt Python code of this thread after `MAX_SECONDS`, by tracing it line by line."""
    end, before = time.monotonic() + MAX_SECONDS, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise UserError(f"it ran for more than {MAX_SECONDS} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment().from_string(checked(template))


def apply(template: str, messages: Messages, names: dict[str, Any]) -> str:
    """Apply a Jinja template, in a sandbox, to messages and other names. It limits the memory of the whole process."""
    _environment()  # a missing package is not a fault of the template
    pieces, length = [], 0
    try:
        with _memory_limit(), _time_limit():
            for piece in _compiled(template).generate(messages=messages, add_generation_prompt=True, **names):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise UserError(f"it made a text of more than {MAX_CHARACTERS:,} characters")
    except MemoryError:
        raise UserError("the chat template failed: it needs too much memory") from None
    except Exception as error:  # a template is a program of someone else: it may fail in any way
        raise UserError(f"the chat template failed: {first_line(error)[:200]}") from error
    return "".join(pieces)


def render(template: str, messages: Messages, tokenizer: FastTokenizer, apply: Apply = apply) -> str:
    """Apply a template to messages, which must not spell special tokens, with the names that transformers gives it."""
    for message in messages:
        if spelled := tokenizer.specials_in(message["content"]):
            raise UserError(f"a message must not contain {spelled[0]}, a special token of the model")
    roles = tokenizer.foreign.roles if tokenizer.foreign is not None else {}
    return apply(template, messages, {"tools": None, "documents": None, **roles})


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a run and its tokenizer; `apply` renders the template."""

    text: str
    tokenizer: FastTokenizer
    apply: Apply = apply

    @classmethod
    def of_run(cls, run: Path, tokenizer: Tokenizer, apply: Apply = apply) -> ChatTemplate:
        template = read(run)
        if not isinstance(tokenizer, FastTokenizer):
            raise UserError(f"{run}: chat templates need the tokenizer of an imported model")
        return cls(template, tokenizer, apply)

    def encode(self, messages: Messages) -> list[int]:
        """The tokens of a conversation, up to where the answer begins."""
        return self.tokenizer.encode_with_specials(render(self.text, messages, self.tokenizer, self.apply))


def checked(template: str) -> str:
    """Return a template; one that is too long is an error."""
    if len(template) > MAX_TEMPLATE:
        raise UserError(f"the chat template has more than {MAX_TEMPLATE:,} characters")
    return template


def read(run: Path) -> str:
    """The chat template of a run."""
    file = run / FILE
    if not file.is_file():
        raise UserError(f"{run} has no chat template: leave --chat out")
    return file.read_text(encoding="utf-8")


def copy(origin: Path, run: Path) -> None:
    """Copy the chat template of a run, if it has one, to a run that takes over its tokenizer."""
    if (origin / FILE).is_file():
        write_text(run / FILE, checked(read(origin)))
