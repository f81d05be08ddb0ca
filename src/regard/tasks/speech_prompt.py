"""Whisper's prompt: the special tokens that name the language of a recording and what is to be written of it.

    <|startoftranscript|> <|de|> <|translate|> <|notimestamps|> It is raining. <|endoftext|>

The first is BOS and the last EOS. Models of English alone have neither a language nor a task in their prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from regard.errors import UserError
from regard.text import Tokenizer

LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
TRANSCRIBE, TRANSLATE = "transcribe", "translate"
NO_TIMESTAMPS = "<|notimestamps|>"
KINDS = ("whisper", "whisper-en")  # values of model.prompt that stand for a prompt


def task_token(task: str) -> str:
    return f"<|{task}|>"


def languages(tokenizer: Tokenizer) -> dict[str, int]:
    """The token of each language, by its code, such as "en"."""
    return {found[1]: tokenizer.tag(tag) for tag in tokenizer.tags if (found := LANGUAGE.fullmatch(tag))}


@dataclass(frozen=True)
class Prompt:
    """The tokens that every text begins with. `language` None: it is detected in each recording."""

    kind: str  # model.prompt of the recipe
    tokenizer: Tokenizer
    language: str | None = None
    task: str = TRANSCRIBE

    def __post_init__(self) -> None:
        if self.language is None and self.task == TRANSCRIBE:
            return
        if self.kind != "whisper":
            raise UserError("this model takes no language and no task: only multilingual ones with a prompt do")
        known = languages(self.tokenizer)
        if self.language is not None and self.language not in known:
            raise UserError(f"the model knows no language {self.language!r}; it knows {', '.join(known)}")
        if task_token(self.task) not in self.tokenizer.tags:
            raise UserError(f"the model knows no task {self.task!r}; it knows {TRANSCRIBE} and {TRANSLATE}")

    @property
    def detects(self) -> bool:
        """Whether the language must be detected."""
        return self.kind == "whisper" and self.language is None

    def ids(self, language: int | None = None) -> list[int]:
        """The tokens after BOS; `language` is the token of the one that was detected."""
        if self.kind not in KINDS:
            return []
        last = [self.tokenizer.tag(NO_TIMESTAMPS)]
        if self.kind != "whisper":
            return last
        if language is None:
            if self.language is None:
                raise UserError("data.language is not set: the prompt of a text names the language of its recording")
            language = languages(self.tokenizer)[self.language]
        return [language, self.tokenizer.tag(task_token(self.task)), *last]

    def language_of(self, tokens: tuple[int, ...]) -> str | None:
        """The code of the language that an output with its prompt begins with."""
        first = tokens[:1] if self.kind == "whisper" else ()
        return next((code for code, token in languages(self.tokenizer).items() if first == (token,)), None)
