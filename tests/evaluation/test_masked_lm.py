"""Scores of masked language models that follow from how tokens are masked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.errors import UserError
from regard.metrics.masked_lm import masked_lm_score
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.text import BOS, EOS, train

LETTERS = train([], "char", 300, tags=["<mask>"])
TEXTS = ["the cat sat on the mat " * 40, "", "and the rat ate the cat " * 30, "a"]


class Even(SequenceModel):
    """Predicts the uniform distribution."""

    def logits(self, batch: SeqBatch) -> Tensor:
        return torch.zeros(batch.inputs.layout.size, len(LETTERS))


class Copying(SequenceModel):
    """Predicts the token it reads."""

    longest = 0

    def logits(self, batch: SeqBatch) -> Tensor:
        rows = batch.source.layout
        self.longest = max(self.longest, rows.max_len)
        for text in rows.split(batch.source.ids):
            assert text[0] == BOS and text[-1] == EOS
        return 20.0 * torch.nn.functional.one_hot(batch.source.ids, len(LETTERS))


def test_a_uniform_model_has_the_loss_of_the_uniform_distribution() -> None:
    found = masked_lm_score(Even(), LETTERS, TEXTS, longest=50, share=0.15, device="cpu")
    assert found.loss == pytest.approx(math.log(len(LETTERS)), rel=1e-6)
    tokens = sum(map(len, TEXTS))
    assert abs(found.masks - 0.15 * tokens) < 4 * math.sqrt(0.15 * 0.85 * tokens)


def test_a_copying_model_is_right_where_a_masked_token_was_kept() -> None:
    """One in ten is kept; a random token is right one time in 256."""
    found = masked_lm_score(Copying(), LETTERS, TEXTS, longest=50, share=0.5, device="cpu")
    expected = 0.1 + 0.1 / 256
    assert abs(found.accuracy / 100 - expected) < 4 * math.sqrt(expected * (1 - expected) / found.masks)


def test_scores_depend_on_the_seed_and_not_on_batches() -> None:
    usual = {"longest": 50, "share": 0.3, "device": "cpu"}
    whole = masked_lm_score(Copying(), LETTERS, TEXTS, **usual)  # type: ignore[arg-type]
    seen: list[int] = []
    small = masked_lm_score(Copying(), LETTERS, TEXTS, batch_tokens=60, progress=seen.append, **usual)  # type: ignore[arg-type]
    assert (small.masks, small.accuracy) == (whole.masks, whole.accuracy) and small.loss == pytest.approx(whole.loss)
    assert sum(seen) == whole.masks and len(seen) > 1
    assert masked_lm_score(Copying(), LETTERS, TEXTS, seed=1, **usual) != whole  # type: ignore[arg-type]


def test_long_texts_are_split_into_chunks() -> None:
    model = Copying()
    masked_lm_score(model, LETTERS, TEXTS, longest=50, share=0.5, device="cpu")
    assert model.longest == 50


@pytest.mark.parametrize("texts", [[], [""]])
def test_empty_text_is_an_error(texts: list[str]) -> None:
    with pytest.raises(UserError, match="no text to score"):
        masked_lm_score(Even(), LETTERS, texts, longest=50, share=0.15, device="cpu")
