"""Prompts of raw text in, continuations of raw text out.

A language model sees at most `longest` tokens. A prompt longer than that loses its beginning: the last half of the
context's worth is kept. And when the context is full while more tokens are wanted, the model goes on with the last half
of what it has as a new prompt. Both depend on the text alone, so asking for more tokens never changes the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from regard.data.packing import sentence_batches
from regard.decoding.beam_state import Beams, Hypothesis
from regard.decoding.sampling import fold
from regard.decoding.search import SearchRequest, search, select_runner
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.errors import changed
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import BOS, EOS, PAD, UNK, Tokenizer, encode_stream

USUAL = {"method": "sample", "temperature": 0.8, "top_p": 0.95}  # where a recipe does not say how it samples

Watch = Callable[[int, int, str], None]  # the prompt's number, the sample's, its text so far


@dataclass(frozen=True)
class Generation:
    """What came after one prompt: a text for each sample, without the prompt, and how it was made."""

    prompt: str
    texts: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...]
    truncated: bool = False  # the prompt was longer than the model sees, and lost its beginning

    @property
    def text(self) -> str:
        """The first sample."""
        return self.texts[0]

    def as_dict(self) -> dict[str, Any]:
        """The continuation in strings, numbers, lists and dicts, as `json.dumps` takes it."""
        pairs = zip(self.texts, self.hypotheses, strict=True)
        samples = [
            {"text": text, "score": h.score, "tokens": len(h.tokens), "finished": h.finished} for text, h in pairs
        ]
        return {"prompt": self.prompt, "samples": samples, "truncated": self.truncated}

    def __str__(self) -> str:
        return self.prompt + self.text


@dataclass
class _Draft:
    """A sample of a prompt while it is written."""

    line: int  # the prompt's number, from 0
    sample: int
    joint: str  # what stands between the prompt and what follows
    cut: bool  # the prompt did not fit
    view: list[int]  # what the model sees at present, mark in front
    written: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False  # by the end mark
    over: bool = False


def generation(decoding: DecodingSettings, **changes: Any) -> DecodingSettings:
    """Settings to generate with: the recipe's if it samples, else the usual ones; and some of them changed."""
    usual = decoding if decoding.method == "sample" else decoding.model_copy(update=USUAL)
    return changed(usual, changes, "generate", ("samples", "tokens", "stop", "seed"))


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string in it, and whether there is one.

    The first is the one that is complete first, so that it does not matter in which pieces the text came.

    >>> until_stop("one. two. three", ["three", ". "])
    ('one', True)
    >>> until_stop("abcd", ["abcd", "c"])
    ('ab', True)
    """
    found = [(place + len(string), place) for string in stop if (place := text.find(string)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def settled(text: str, stop: Sequence[str] = ()) -> str:
    """As much of a text without stop strings as stays whatever follows: no half character, no half stop string.

    >>> settled("the end, and", ["\\n", "and then"])
    'the end, '
    """
    whole = text.rstrip("\ufffd")  # how the first bytes of a character are decoded
    held = max((n for string in stop for n in range(1, len(string)) if whole.endswith(string[:n])), default=0)
    return whole[: len(whole) - held]


@dataclass(frozen=True)
class Generator:
    """Continues texts with one model, its tokenizer and its decoding settings.

    What follows a prompt depends on the prompt, the settings, the seed, the prompt's number and the sample's: never on
    what else is continued with it.
    """

    model: SequenceModel
    tokenizer: Tokenizer
    settings: DecodingSettings
    longest: int  # the most tokens the model sees at once
    stream: bool  # trained on text without marks; False: on documents from a begin mark to an end mark
    seed: int = 0
    lowercase: bool = False
    precision: str = "auto"  # as `devices.autocast` has it, on a GPU

    @classmethod
    def for_recipe(
        cls,
        model: SequenceModel,
        tokenizers: tuple[Tokenizer, Tokenizer],
        recipe: Recipe,
        settings: DecodingSettings | None = None,
    ) -> Generator:
        """As the recipe says: how it was trained, and how it samples if it says so."""
        chosen = settings if settings is not None else generation(recipe.decoding)
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
        """Continue each prompt `samples` times with at most `tokens` tokens, or up to an end mark or a stop string.

        `first` is the number of the first prompt. `watch` is called with every text as it grows, where there is one
        hypothesis a sample; `progress` with how many more samples are done.
        """
        if samples < 1 or tokens < 1:
            raise UserError(f"{samples} samples of {tokens} tokens: there must be at least one of each")
        if "" in stop:
            raise UserError("a stop string cannot be empty")
        if samples > 1 and self.settings.method != "sample":
            raise UserError(f"{samples} samples: only sampling gives more than one continuation")
        drafts = [draft for line, prompt in enumerate(prompts) for draft in self._drafts(line, prompt, samples)]
        for turn in count():
            going = [draft for draft in drafts if not draft.over and len(draft.written) < tokens]
            if not going:
                break
            sizes = [min(self.longest, len(draft.view) + tokens) for draft in going]
            for group in sentence_batches(sizes, self.settings.batch_tokens):
                chosen = [going[i] for i in group]
                self._write(chosen, turn, tokens, stop, first, watch)
                if progress is not None:
                    progress(sum(draft.over or len(draft.written) >= tokens for draft in chosen))
        of = [drafts[i : i + samples] for i in range(0, len(drafts), samples)]
        return [self._continuation(prompt, some, stop) for prompt, some in zip(prompts, of, strict=True)]

    # -- tokens -------------------------------------------------------------------------------------------------------

    @property
    def _lines_end_with_marks(self) -> bool:
        """Words cannot spell a newline: in a stream of them the end mark stands for it."""
        return self.stream and self.tokenizer.unit == "word"

    @property
    def forbidden(self) -> list[int]:
        """What is not text: special ids and tags. A stream never saw the end mark (an imported model may have)."""
        never_ends = self.stream and not self._lines_end_with_marks and self.tokenizer.foreign is None
        return [PAD, BOS, UNK, *range(UNK + 1, self.tokenizer.first), *([EOS] if never_ends else [])]

    def _drafts(self, line: int, prompt: str, samples: int) -> list[_Draft]:
        text = prompt.lower() if self.lowercase else prompt
        joint = " " if self.tokenizer.unit == "word" and text and not text[-1].isspace() else ""
        if self.stream:
            ends = self._lines_end_with_marks or self.tokenizer.foreign is not None  # an imported model's texts do
            tokens = encode_stream(self.tokenizer, text) or ([EOS] if ends else self.tokenizer.encode("\n"))
        else:
            tokens = [BOS, *self.tokenizer.encode(text)]
        cut = len(tokens) > self.longest
        return [_Draft(line, sample, joint, cut, self._fitting(tokens)) for sample in range(samples)]

    def read(self, prompt: str) -> tuple[list[int], bool]:
        """The tokens that the model sees of a prompt, mark in front, and whether it had to be cut."""
        (draft,) = self._drafts(0, prompt, 1)
        return draft.view, draft.cut

    def after(self, view: list[int], tokens: int) -> Hypothesis:
        """What comes after a prompt that is tokens already, as `read` gives them; no more than fits beside it."""
        draft = _Draft(0, 0, "", False, list(view))
        self._write([draft], 0, min(tokens, self.longest - len(view) + 1), (), 0, None)
        return self._hypothesis(draft)

    def spell(self, written: Sequence[int]) -> str:
        """The text of tokens that follow a prompt."""
        return self._text(_Draft(0, 0, "", False, []), written)

    def _fitting(self, tokens: list[int]) -> list[int]:
        """What the model can see of tokens: all, or the mark and the last half where they do not fit."""
        mark = [] if self.stream else [BOS]
        return tokens if len(tokens) <= self.longest else mark + tokens[-(self.longest // 2) :]

    def _text(self, draft: _Draft, written: Sequence[int]) -> str:
        """What tokens after the prompt spell."""
        if not self._lines_end_with_marks:
            text = self.tokenizer.decode(written)
        else:
            ends = [place for place, token in enumerate(written) if token == EOS]
            begins = [0, *(end + 1 for end in ends)]
            lines = zip(begins, [*ends, len(written)], strict=True)
            text = "\n".join(self.tokenizer.decode(written[begin:end]) for begin, end in lines)
        return draft.joint + text if text and not text.startswith("\n") else text

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(
        self, drafts: list[_Draft], turn: int, tokens: int, stop: Sequence[str], first: int, watch: Watch | None
    ) -> None:
        """Go on with each draft until it is over, or the context is full, or (words in a stream) its line ends."""
        views = [draft.view for draft in drafts]
        rooms = [self.longest - len(view) + 1 for view in views]  # the last token written is never read
        wanted = [tokens - len(draft.written) for draft in drafts]
        fewest = self.settings.min_length if turn == 0 else 0
        long_enough = {"max_ratio": 1e-9, "max_extra": tokens, "min_length": fewest}
        request = SearchRequest(
            PackedTokens.from_lists([view[:-1] for view in views]).to(next(self.model.parameters()).device),
            self.settings.model_copy(update=long_enough),
            begin=[view[-1] for view in views],
            prompts=[view if self.stream else view[1:] for view in views],
            banned=self.forbidden,
            max_length=[min(pair) for pair in zip(rooms, wanted, strict=True)],
            seed=self.seed,
            lines=[fold(first + draft.line, draft.sample, turn) for draft in drafts],
        )
        found = search(
            self.model,
            request,
            watch=self._watcher(drafts, stop, watch) if stop or watch is not None else None,
            run=select_runner(self.model, self.precision),
        )
        for draft, (best, *_) in zip(drafts, found, strict=True):
            line_ends = best.finished and self._lines_end_with_marks
            new = [*best.tokens, EOS] if line_ends else list(best.tokens)
            draft.written.extend(new)
            draft.logprobs.extend(best.logprobs)
            draft.view = self._fitting(draft.view + new)
            draft.finished = best.finished and not line_ends
            draft.over = draft.finished or until_stop(self._text(draft, draft.written), stop)[1]

    def _watcher(
        self, drafts: list[_Draft], stop: Sequence[str], watch: Watch | None
    ) -> Callable[[list[int], Beams], Tensor]:
        """Reads along: stops hypotheses with a stop string in them, and tells `watch` how each text grows."""

        def read(inside: list[int], beams: Beams) -> Tensor:
            stopped = torch.zeros_like(beams.alive)
            rows = beams.tokens.tolist()
            for n, k in beams.alive.nonzero().tolist():
                draft = drafts[inside[n]]
                text, ends = until_stop(self._text(draft, draft.written + rows[n][k]), stop)
                stopped[n, k] = ends
                if watch is not None and beams.alive.shape[1] == 1:
                    watch(draft.line, draft.sample, text if ends else settled(text, stop))
            return stopped

        return read

    def _continuation(self, prompt: str, drafts: list[_Draft], stop: Sequence[str]) -> Generation:
        texts = [until_stop(self._text(draft, draft.written), stop)[0] for draft in drafts]
        return Generation(prompt, tuple(texts), tuple(map(self._hypothesis, drafts)), drafts[0].cut)

    def _hypothesis(self, draft: _Draft) -> Hypothesis:
        return Hypothesis.of(draft.written, draft.logprobs, self.settings.length_penalty, draft.finished)
