"""Chat templates of imported models: a conversation becomes the text that the model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.errors import UserError, first_line
from regard.text.fast_tokenizer import FastTokenizer

FILE = "chat_template.jinja"  # in a run directory
MAX_CHARACTERS = 1 << 20


def render(template: str, messages: list[dict[str, str]], tokenizer: FastTokenizer) -> str:
    """Apply a Jinja template, in a sandbox, to messages such as {"role": "user", "content": "Hello"}."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chat templates need jinja2: pip install 'regard[formats]'") from None
    for message in messages:
        if spelled := tokenizer.specials_in(message["content"]):
            raise UserError(f"a message must not contain {spelled[0]}, a special token of the model")

    def raise_exception(reason: str) -> Any:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    specials = tokenizer.foreign.spellings if tokenizer.foreign is not None else [None] * 4
    names = {"bos_token": specials[1] or "", "eos_token": specials[2] or ""}
    try:
        text = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)
    except Exception as error:  # a template is a program of someone else: it may fail in any way
        raise UserError(f"the chat template failed: {first_line(error)[:200]}") from error
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"the chat template made a text of more than {MAX_CHARACTERS:,} characters")
    return text


def read(run: Path) -> str:
    """The chat template of a run."""
    file = run / FILE
    if not file.is_file():
        raise UserError(f"{run} has no chat template: leave --chat out")
    return file.read_text(encoding="utf-8")
