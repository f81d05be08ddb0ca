"""Text generation: prompts of raw text in, continuations out.

A language model's context is `longest` tokens. A longer prompt keeps its last `longest // 2` tokens. When the
context is full and more tokens are wanted, its last half becomes a new prompt. Both depend on the text alone, so that
requesting more tokens never changes the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from regard.data.packing import sentence_batches
from regard.decoding.results import Hypothesis
from regard.decoding.sampling import fold
from regard.decoding.search import Runner, SearchRequest, search, select_runner
from regard.decoding.watching import Beams
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.errors import changed
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import BOS, EOS, PAD, UNK, Tokenizer, encode_stream

DEFAULTS = {"method": "sample", "temperature": 0.8, "top_p": 0.95}  # for recipes that do not sample

Watch = Callable[[int, int, str], None]  # prompt number, sample number, text so far


@dataclass(frozen=True)
class Generation:
    """The continuations of one prompt: a text for each sample, without the prompt, and its hypothesis."""

    prompt: str
    texts: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    truncated: bool = False  # whether the prompt exceeded the context and lost its beginning

    @property
    def text(self) -> str:
        """The first sample."""
        return self.texts[0]

    def as_dict(self) -> dict[str, Any]:
        """The generation as strings, numbers, lists and dicts, for `json.dumps`."""
        pairs = zip(self.texts, self.hypotheses, strict=True)
        samples = [
            {"text": text, "score": h.score, "tokens": len(h.tokens), "finished": h.finished} for text, h in pairs
        ]
        return {"prompt": self.prompt, "samples": samples, "truncated": self.truncated}

    def __str__(self) -> str:
        return self.prompt + self.text


@dataclass
class _Draft:
    """A sample of a prompt while it is generated."""

    line: int  # number of the prompt, from 0
    sample: int
    separator: str  # between the prompt and its continuation
    truncated: bool  # whether the prompt exceeded the context
    context: list[int]  # the tokens that the model is fed, BOS included
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False  # by EOS
    over: bool = False


def generation_settings(decoding: DecodingSettings, **changes: Any) -> DecodingSettings:
    """Return the recipe's settings if it samples, else the default ones, with some of them changed."""
    settings = decoding if decoding.method == "sample" else decoding.model_copy(update=DEFAULTS)
    return changed(settings, changes, "generate", ("samples", "tokens", "stop", "seed"))


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before its first stop string, and whether there is one.

    The first is the one that is complete first, so that the result does not depend on how the text arrived.

    >>> until_stop("one. two. three", ["three", ". "])
    ('one', True)
    >>> until_stop("abcd", ["abcd", "c"])
    ('ab', True)
    """
    spans = [(start + len(string), start) for string in stop if (start := text.find(string)) >= 0]
    return (text[: min(spans)[1]], True) if spans else (text, False)


def stable_part(text: str, stop: Sequence[str] = ()) -> str:
    """Return the part of a text that no continuation can change: without a partial character or stop string at the end.

    >>> stable_part("the end, and", ["\\n", "and then"])
    'the end, '
    """
    whole = text.rstrip("\ufffd")  # the decoding of an incomplete character
    partial = max((n for string in stop for n in range(1, len(string)) if whole.endswith(string[:n])), default=0)
    return whole[: len(whole) - partial]


def forbidden_ids(tokenizer: Tokenizer, stream: bool) -> list[int]:
    """Ids that are not text: special tokens and tags; EOS too if the training data had none (a stream)."""
    never_ends = stream and tokenizer.unit != "word" and tokenizer.foreign is None
    return [PAD, BOS, UNK, *range(UNK + 1, tokenizer.first), *([EOS] if never_ends else [])]


@dataclass(frozen=True)
class Generator:
    """Continues texts with one model, its tokenizer and its decoding settings.

    A continuation depends on the prompt, the settings, the seed, and the numbers of prompt and sample, not on the other
    prompts.
    """

    model: SequenceModel
    tokenizer: Tokenizer
    settings: DecodingSettings
    longest: int  # size of the context in tokens
    stream: bool  # trained on text without special tokens; False: on documents from BOS to EOS
    seed: int = 0
    lowercase: bool = False
    precision: str = "auto"  # on a GPU, as in `regard.precision`
    runner: Runner | None = None  # runs the searches, given prompts on the host; None: the fastest
    chat: Callable[[str], list[int]] | None = None  # makes a message the tokens of a conversation; None: plain text

    @classmethod
    def for_recipe(
        cls,
        model: SequenceModel,
        tokenizers: tuple[Tokenizer, Tokenizer],
        recipe: Recipe,
        settings: DecodingSettings | None = None,
    ) -> Generator:
        """Use the recipe's context and document format, and the given settings or the recipe's."""
        chosen = settings if settings is not None else generation_settings(recipe.decoding)
        stream = recipe.data.documents == "stream"
        return cls(
            model,
            tokenizers[1],
            chosen,
            recipe.model.max_positions,
            stream,
            lowercase=recipe.data.lowercase,
            precision=recipe.training.precision,
        )

    def __call__(
        self,
        prompts: Sequence[str],
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: Sequence[str] = (),
        first: int = 0,
        watch: Watch | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """Continue each prompt `samples` times with at most `tokens` tokens, or up to EOS or a stop string.

        `first` is the number of the first prompt. `watch` is called with every text as it grows, if there is one
        hypothesis per sample; `progress` with the number of samples that are newly done.
        """
        if samples < 1 or tokens < 1:
            raise UserError(f"{samples} samples of {tokens} tokens: there must be at least one of each")
        if "" in stop:
            raise UserError("a stop string cannot be empty")
        if samples > 1 and self.settings.method != "sample":
            raise UserError(f"{samples} samples: only sampling gives more than one continuation")
        drafts = [draft for line, prompt in enumerate(prompts) for draft in self._drafts(line, prompt, samples)]
        for turn in count():
            open_drafts = [draft for draft in drafts if not draft.over and len(draft.generated) < tokens]
            if not open_drafts:
                break
            sizes = [min(self.longest, len(draft.context) + tokens) for draft in open_drafts]
            for group in sentence_batches(sizes, self.settings.batch_tokens):
                batch = [open_drafts[i] for i in group]
                self._extend(batch, turn, tokens, stop, first, watch)
                if progress is not None:
                    progress(sum(draft.over or len(draft.generated) >= tokens for draft in batch))
        by_prompt = [drafts[i : i + samples] for i in range(0, len(drafts), samples)]
        return [self._generation(prompt, some, stop) for prompt, some in zip(prompts, by_prompt, strict=True)]

    # -- tokens -------------------------------------------------------------------------------------------------------

    @property
    def _eos_is_newline(self) -> bool:
        """Whether EOS stands for a newline: in a stream of word tokens, which cannot spell one."""
        return self.stream and self.tokenizer.unit == "word"

    @property
    def forbidden(self) -> list[int]:
        """Ids that are not text."""
        return forbidden_ids(self.tokenizer, self.stream)

    def _drafts(self, line: int, prompt: str, samples: int) -> list[_Draft]:
        text = prompt.lower() if self.lowercase else prompt
        separator = " " if self.tokenizer.unit == "word" and text and not text[-1].isspace() else ""
        if self.chat is not None:
            tokens = self.chat(prompt)
        elif self.stream:
            has_eos = self._eos_is_newline or self.tokenizer.foreign is not None  # imported models have EOS
            tokens = encode_stream(self.tokenizer, text) or ([EOS] if has_eos else self.tokenizer.encode("\n"))
        else:
            tokens = [BOS, *self.tokenizer.encode(text)]
        truncated = len(tokens) > self.longest
        return [_Draft(line, sample, separator, truncated, self._truncated(tokens)) for sample in range(samples)]

    def read(self, prompt: str) -> tuple[list[int], bool]:
        """Return the tokens of a prompt that the model is fed, BOS included, and whether it was truncated."""
        (draft,) = self._drafts(0, prompt, 1)
        return draft.context, draft.truncated

    def after(self, context: list[int], tokens: int) -> Hypothesis:
        """Continue a tokenized prompt, as `read` returns it, by as many tokens as the context leaves, at most."""
        draft = _Draft(0, 0, "", False, list(context))
        self._extend([draft], 0, min(tokens, self.longest - len(context) + 1), (), 0, None)
        return self._hypothesis(draft)

    def spell(self, generated: Sequence[int]) -> str:
        """Return the text of tokens that follow a prompt."""
        return self._text(_Draft(0, 0, "", False, []), generated)

    def _truncated(self, tokens: list[int]) -> list[int]:
        """Return all tokens, or if they exceed the context, BOS and the last half of the context."""
        bos = [] if self.stream else [BOS]
        return tokens if len(tokens) <= self.longest else bos + tokens[-(self.longest // 2) :]

    def _text(self, draft: _Draft, generated: Sequence[int]) -> str:
        """Decode tokens that follow the draft's prompt."""
        if not self._eos_is_newline:
            text = self.tokenizer.decode_continuation(generated)
        else:
            ends = [index for index, token in enumerate(generated) if token == EOS]
            begins = [0, *(end + 1 for end in ends)]
            lines = zip(begins, [*ends, len(generated)], strict=True)
            text = "\n".join(self.tokenizer.decode(generated[begin:end]) for begin, end in lines)
        return draft.separator + text if text and not text.startswith("\n") else text

    # -- generation ---------------------------------------------------------------------------------------------------

    def _extend(
        self, drafts: list[_Draft], turn: int, tokens: int, stop: Sequence[str], first: int, watch: Watch | None
    ) -> None:
        """Extend each draft until it is over, or the context is full, or (if EOS is a newline) its line ends."""
        contexts = [draft.context for draft in drafts]
        capacity = [self.longest - len(context) + 1 for context in contexts]  # the last token is never fed
        wanted = [tokens - len(draft.generated) for draft in drafts]
        min_length = self.settings.min_length if turn == 0 else 0
        limits = {"max_ratio": 1e-9, "max_extra": tokens, "min_length": min_length}
        source = PackedTokens.from_lists([context[:-1] for context in contexts])
        request = SearchRequest(
            source if self.runner is not None else source.to(next(self.model.parameters()).device),
            self.settings.model_copy(update=limits),
            begin=[context[-1] for context in contexts],
            prompts=[context if self.stream else context[1:] for context in contexts],
            banned=self.forbidden,
            max_length=[min(pair) for pair in zip(capacity, wanted, strict=True)],
            seed=self.seed,
            lines=[fold(first + draft.line, draft.sample, turn) for draft in drafts],
        )
        results = search(
            self.model,
            request,
            watch=self._watcher(drafts, stop, watch) if stop or watch is not None else None,
            run=self.runner or select_runner(self.model, self.precision),
        )
        for draft, (best, *_) in zip(drafts, results, strict=True):
            line_ends = best.finished and self._eos_is_newline
            new = [*best.tokens, EOS] if line_ends else list(best.tokens)
            draft.generated.extend(new)
            draft.logprobs.extend(best.logprobs)
            draft.context = self._truncated(draft.context + new)
            draft.finished = best.finished and not line_ends
            draft.over = draft.finished or until_stop(self._text(draft, draft.generated), stop)[1]

    def _watcher(
        self, drafts: list[_Draft], stop: Sequence[str], watch: Watch | None
    ) -> Callable[[list[int], Beams], Tensor]:
        """Return a watcher that stops hypotheses with a stop string in them and calls `watch` with each text."""

        def watch_step(sentences: list[int], beams: Beams) -> Tensor:
            stopped = torch.zeros_like(beams.alive)
            tokens = beams.tokens.tolist()
            for n, k in beams.alive.nonzero().tolist():
                draft = drafts[sentences[n]]
                text, ends = until_stop(self._text(draft, draft.generated + tokens[n][k]), stop)
                stopped[n, k] = ends
                if watch is not None and beams.alive.shape[1] == 1:
                    watch(draft.line, draft.sample, text if ends else stable_part(text, stop))
            return stopped

        return watch_step

    def _generation(self, prompt: str, drafts: list[_Draft], stop: Sequence[str]) -> Generation:
        texts = [until_stop(self._text(draft, draft.generated), stop)[0] for draft in drafts]
        return Generation(prompt, tuple(texts), tuple(map(self._hypothesis, drafts)), drafts[0].truncated)

    def _hypothesis(self, draft: _Draft) -> Hypothesis:
        return Hypothesis.of(draft.generated, draft.logprobs, self.settings.length_penalty, draft.finished)
