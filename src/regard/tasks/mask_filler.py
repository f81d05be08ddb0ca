"""Masked-token prediction: texts with masks in, guesses for the masks out.

A mask is written [MASK] or <mask>. Only this module knows that; to the tokenizer both are ordinary text. Most tokens
begin with the space before a word, so there one space before a mask belongs to it: "the [MASK] sat" is read as "the",
a mask, " sat", and may be filled with " cat".
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
from regard.models.bert import BertSettings
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import Recipe
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import MASK

MASK_PATTERN = re.compile(rf"\[MASK\]|{re.escape(MASK)}")
BATCH_TOKENS = 2048  # tokens per batch; affects speed, not results


@dataclass(frozen=True)
class Guess:
    """A token's text for a mask, and its probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class Filled:
    """A text with its masks filled in. `guesses` are the most probable for each mask, best first; `text` has the best.

    Each mask is predicted independently, with the others still masked.
    """

    source: str
    text: str
    guesses: tuple[tuple[Guess, ...], ...]
    truncated: bool = False  # whether the text exceeded the context: masks after its end stay, without guesses

    def as_dict(self) -> dict[str, Any]:
        """The filled text as strings, numbers, lists and dicts, for `json.dumps`."""
        guesses = [[asdict(guess) for guess in mask] for mask in self.guesses]
        return {"source": self.source, "text": self.text, "guesses": guesses, "truncated": self.truncated}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class MaskFiller:
    """Fills in masks with one model and its tokenizer. The result for a text does not depend on the other texts."""

    model: SequenceModel
    tokenizer: Tokenizer
    longest: int  # size of the context in tokens, BOS and EOS included
    lowercase: bool = False

    @classmethod
    def for_recipe(cls, model: SequenceModel, tokenizer: Tokenizer, recipe: Recipe) -> MaskFiller:
        settings = recipe.model
        if not isinstance(settings, BertSettings) or settings.task != "fill":
            raise UserError('this model does not predict masked tokens: it needs family = "bert" and task = "fill"')
        return cls(model, tokenizer, settings.max_positions, recipe.data.lowercase)

    def __call__(self, texts: Sequence[str], *, top: int = 5, lenient: bool = False) -> list[Filled]:
        """Return the `top` guesses for every mask of every text.

        A text that is too long, or has no mask, is an error; `lenient` truncates the former and returns the latter
        unchanged, so that one line does not end a whole stream.
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
        """Return BOS, the tokens of a text with its masks, and EOS."""
        if MASK_PATTERN.search(text) is None:
            raise UserError(f"there is no [MASK] to fill in: {_short(text)}")
        tokens = self._tokens(text)
        if len(tokens) + 1 > self.longest:
            most = self.longest - 2
            raise UserError(f"the text has {len(tokens) - 1} tokens, more than the {most} of the model: {_short(text)}")
        return [*tokens, EOS]

    def _tokens(self, text: str) -> list[int]:
        """Return BOS and all tokens of a text with its masks."""
        *before, last = MASK_PATTERN.split(text)
        parts = [*map(self._before, before), last]
        first, *others = self.tokenizer.encode_batch([part.lower() if self.lowercase else part for part in parts])
        return [BOS, *first, *(token for part in others for token in (self.tokenizer.tag(MASK), *part))]

    def _before(self, part: str) -> str:
        """Remove the space that belongs to the mask from the part before it."""
        return part.removesuffix(" ") if self.tokenizer.mask_takes_space else part

    def _guess(self, token: int) -> str:
        """The text of a token in place of a mask, with the space before it if the mask took that."""
        if not self.tokenizer.mask_takes_space:
            return self.tokenizer.token_texts([token])[0]
        return self.tokenizer.token_texts([self.tokenizer.first, token])[1]  # not at the start of a text

    def _fill(self, texts: list[str], read: list[list[int]], top: int) -> list[Filled]:
        """Fill in a batch of texts."""
        mask, excluded = self.tokenizer.tag(MASK), sorted({*self.tokenizer.forbidden(), EOS})
        row = PackedTokens.from_lists(read).to(next(self.model.parameters()).device)
        with torch.inference_mode():
            probs = self.model.logits(SeqBatch(row, row, row.ids))[row.ids == mask].float().softmax(-1)  # [masks, V]
            probs[:, excluded] = -1.0  # special tokens and line breaks are never guessed
            best = probs.topk(min(top, len(self.tokenizer) - len(excluded)))
        counts = [tokens.count(mask) for tokens in read]
        parts = (part.cpu().split(counts) for part in (best.values, best.indices))
        return [self._filled(*one) for one in zip(texts, *parts, strict=True)]

    def _filled(self, text: str, probs: Tensor, ids: Tensor) -> Filled:
        """Fill in the best tokens: probs and ids [masks within the context, top]."""
        guesses = tuple(
            tuple(Guess(self._guess(token), prob) for token, prob in zip(*mask, strict=True))
            for mask in zip(ids.tolist(), probs.tolist(), strict=True)
        )
        *before, last = MASK_PATTERN.split(text)
        masks = MASK_PATTERN.findall(text)
        filled = [self._before(part) + best[0].text for part, best in zip(before, guesses, strict=False)]
        filled += [part + mask for part, mask in list(zip(before, masks, strict=True))[len(guesses) :]]
        return Filled(text, "".join(filled) + last, guesses + ((),) * (len(masks) - len(guesses)))


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
