"""Texts with gaps in, guesses for the gaps out.

A gap is written [MASK] or <mask>, here and nowhere else: to the tokenizer either is text like any other. With bpe,
whose pieces begin with the blank before a word, one blank before a gap belongs to the gap: "the [MASK] sat" is read as
"the", a gap, " sat", and " cat" may stand in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.data.packing import sentence_batches
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import BertSettings, Recipe
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import MASK

GAP = re.compile(rf"\[MASK\]|{re.escape(MASK)}")
BATCH_TOKENS = 2048  # read at once; changes speed, not results


@dataclass(frozen=True)
class Guess:
    """A piece of text that may stand in a gap, and how likely the model holds it."""

    text: str
    probability: float


@dataclass(frozen=True)
class Filled:
    """A text with its gaps filled in. `guesses` are the likeliest for each gap, best first, and the best are in `text`.

    Every gap is guessed by itself, with the others still open.
    """

    source: str
    text: str
    guesses: tuple[tuple[Guess, ...], ...]
    truncated: bool = False  # the text was longer than the model reads: gaps after its end stay, without guesses

    def as_dict(self) -> dict[str, Any]:
        """The filled text in strings, numbers, lists and dicts, as `json.dumps` takes it."""
        guesses = [[asdict(guess) for guess in gap] for gap in self.guesses]
        return {"source": self.source, "text": self.text, "guesses": guesses, "truncated": self.truncated}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class MaskFiller:
    """Fills in gaps with one model and its tokenizer. What a text gets does not depend on the texts beside it."""

    model: SequenceModel
    tokenizer: Tokenizer
    longest: int  # the most tokens the model reads, the marks before and after the text included
    lowercase: bool = False

    @classmethod
    def for_recipe(cls, model: SequenceModel, tokenizer: Tokenizer, recipe: Recipe) -> MaskFiller:
        settings = recipe.model
        if not isinstance(settings, BertSettings) or settings.task != "fill":
            raise UserError('this model fills in no gaps: that takes family = "bert" and task = "fill"')
        return cls(model, tokenizer, settings.max_positions, recipe.data.lowercase)

    def __call__(self, texts: Sequence[str], *, top: int = 5, lenient: bool = False) -> list[Filled]:
        """The `top` guesses for every gap of every text.

        A text that is too long, or has no gap, is an error; `lenient` truncates the former and returns the latter as
        it is, so that one line does not cost a whole stream.
        """
        whole = [self._tokens(text) if lenient else self.encode(text)[:-1] for text in texts]
        read = [[*tokens[: self.longest - 1], EOS] for tokens in whole]
        found: list[Filled | None] = [None] * len(texts)
        for group in sentence_batches([len(tokens) for tokens in read], BATCH_TOKENS):
            together = self._fill([texts[i] for i in group], [read[i] for i in group], top)
            for i, filled in zip(group, together, strict=True):
                found[i] = replace(filled, truncated=len(read[i]) <= len(whole[i]))
        return [filled for filled in found if filled is not None]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the mask where its gaps are, between the begin and the end mark."""
        if GAP.search(text) is None:
            raise UserError(f"there is no [MASK] to fill in: {_short(text)}")
        tokens = self._tokens(text)
        if len(tokens) + 1 > self.longest:
            most = self.longest - 2
            raise UserError(f"the text has {len(tokens) - 1} tokens, more than the {most} of the model: {_short(text)}")
        return [*tokens, EOS]

    def _tokens(self, text: str) -> list[int]:
        """All tokens of a text after the begin mark, with the mask where its gaps are."""
        parts = self._parts(text)
        pieces = self.tokenizer.encode_batch([part.lower() if self.lowercase else part for part in parts])
        tokens = [BOS, *pieces[0]]
        for piece in pieces[1:]:
            tokens += [self.tokenizer.tag(MASK), *piece]
        return tokens

    def _parts(self, text: str) -> list[str]:
        """What stands before, between and after the gaps."""
        *before, last = GAP.split(text)
        return [*map(self._before, before), last]

    def _before(self, part: str) -> str:
        """A part before a gap, without the blank that belongs to the gap."""
        return part.removesuffix(" ") if self.tokenizer.unit == "bpe" else part

    def _fill(self, texts: list[str], read: list[list[int]], top: int) -> list[Filled]:
        """One pass over texts that are alike in length."""
        mask, silent = self.tokenizer.tag(MASK), sorted({*self.tokenizer.forbidden(), EOS})
        row = PackedTokens.from_lists(read).to(next(self.model.parameters()).device)
        with torch.inference_mode():
            chances = self.model.logits(SeqBatch(row, row, row.ids))[row.ids == mask].float().softmax(-1)  # [gaps, V]
            chances[:, silent] = -1.0  # marks and line breaks are never a guess
            best = chances.topk(min(top, len(self.tokenizer) - len(silent)))
        counts = [tokens.count(mask) for tokens in read]
        parts = (part.cpu().split(counts) for part in (best.values, best.indices))
        return [self._filled(*one) for one in zip(texts, *parts, strict=True)]

    def _filled(self, text: str, chances: Tensor, ids: Tensor) -> Filled:
        """chances and ids [gaps that were read, top] -> the text with the first of each in its gap."""
        guesses = tuple(
            tuple(Guess(self.tokenizer.token_texts([token])[0], chance) for token, chance in zip(*gap, strict=True))
            for gap in zip(ids.tolist(), chances.tolist(), strict=True)
        )
        *before, last = GAP.split(text)
        gaps = GAP.findall(text)
        unread = len(gaps) - len(guesses)
        filled = [self._before(part) + gap[0].text for part, gap in zip(before, guesses, strict=False)]
        filled += [part + gap for part, gap in list(zip(before, gaps, strict=True))[len(guesses) :]]
        return Filled(text, "".join(filled) + last, guesses + ((),) * unread)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
