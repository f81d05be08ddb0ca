"""Perplexity in overlapping windows: every token is scored once, with the stated context."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from regard.errors import UserError
from regard.metrics.perplexity import TextScore, text_perplexity, windows
from regard.models import SequenceModel, build
from regard.models.gpt import GPTSettings
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, Tokenizer, encode_stream, train

LETTERS = train([], "char", 300)
TEXTS = ["the cat sat\n", "on the mat\n", "and ate a rat", "", "é\n"]


class Bigram(SequenceModel):
    """Next-token log-probabilities given the last token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)

    def logits(self, batch: SeqBatch) -> Tensor:
        return self.table[batch.inputs.ids]


class Remembering(Bigram):
    """Next-token log-probabilities given the mean of the context."""

    def logits(self, batch: SeqBatch) -> Tensor:
        assert batch.source.layout.tokens == 0
        return torch.cat([self.after(ids) for ids in batch.inputs.layout.split(batch.inputs.ids)])

    def after(self, ids: Tensor) -> Tensor:
        seen = torch.arange(1, len(ids) + 1)[:, None]
        return (self.table[ids].cumsum(0) / seen).log_softmax(-1)


def score(model: SequenceModel, tokenizer: Tokenizer, texts: list[str], **options: object) -> TextScore:
    usual = {"context": 6, "stride": 3, "stream": False, "device": "cpu"}
    return text_perplexity(model, tokenizer, texts, **{**usual, **options})  # type: ignore[arg-type]


def one_by_one(
    after: Callable[[list[int], int], float], run: list[int], context: int, stride: int, begin: int | None
) -> list[float]:
    """-log p of every token but the first, each by a call of its own of `after(what is seen, token)`: the slow twin.

    Token i is scored by the first window that holds it as a label: windows begin at 0, stride, 2 * stride, ...
    """
    losses = []
    for i in range(1, len(run)):
        start = next(s for s in range(0, len(run), stride) if s < i <= s + context)
        seen = run[start:i]
        if begin is not None:
            seen[0] = begin
        losses.append(after(seen, run[i]))
    return losses


@pytest.mark.parametrize("positions", range(12))
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_every_token_is_scored_once_with_enough_context(positions: int, stride: int) -> None:
    context, run = 4, list(range(100, 101 + positions))
    scored = []
    for window in windows(run, context, stride):
        assert 1 <= len(window.inputs) <= context
        assert window.labels == [token + 1 for token in window.inputs]  # tokens count up, so labels are one ahead
        for position in range(len(window.inputs) - window.scored, len(window.inputs)):
            scored.append(window.labels[position])
            assert position >= min(context - stride, window.labels[position] - 101)
    assert scored == run[1:]


def test_without_tokens_there_is_no_window() -> None:
    assert list(windows([], 4, 2)) == list(windows([7], 4, 2)) == []


def test_a_bigram_table_gives_the_sum_computed_by_hand() -> None:
    model = Bigram(len(LETTERS))
    run = [BOS, *LETTERS.encode("ab"), EOS]
    nats = -sum(float(model.table[a, b]) for a, b in pairwise(run))
    found = score(model, LETTERS, ["ab"])
    assert found.tokens == 3 and found.bytes == 2
    assert found.loss == pytest.approx(nats / 3, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / 3), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / 2, rel=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stride_does_not_matter_to_a_bigram_model(stream: bool) -> None:
    model = Bigram(len(LETTERS))
    runs = [encode_stream(LETTERS, TEXTS)] if stream else [[BOS, *LETTERS.encode(text), EOS] for text in TEXTS]
    nats = -sum(float(model.table[a, b]) for run in runs for a, b in pairwise(run))
    for context, stride in [(6, 1), (6, 3), (6, 5), (2, 1), (100, 50), *([(6, 6), (1, 1)] if stream else [])]:
        found = score(model, LETTERS, TEXTS, context=context, stride=stride, stream=stream)
        assert found.tokens == sum(len(run) - 1 for run in runs)
        assert found.loss * found.tokens == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("context", "stride"), [(5, 1), (5, 2), (5, 5), (8, 3), (100, 50)])
def test_windows_in_batches_equal_one_token_at_a_time(context: int, stride: int, stream: bool) -> None:
    model = Remembering(len(LETTERS))
    begin = None if stream else BOS
    runs = [encode_stream(LETTERS, TEXTS)] if stream else [[BOS, *LETTERS.encode(text), EOS] for text in TEXTS]

    def after(seen: list[int], token: int) -> float:
        return -float(model.after(torch.tensor(seen))[-1][token])

    losses = [loss for run in runs for loss in one_by_one(after, run, context, stride, begin)]
    for batch_tokens in (1, 17, 4096):
        found = score(model, LETTERS, TEXTS, context=context, stride=stride, stream=stream, batch_tokens=batch_tokens)
        assert found.tokens == len(losses)
        assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_gpt_scores_windows_as_it_scores_one_token_at_a_time(positions: str, stream: bool) -> None:
    context, stride = 8, 3
    sizes = {"width": 16, "heads": 2, "layers": 2, "ffn_width": 16, "max_positions": context}
    settings = GPTSettings.model_validate({"size": "nano", "positions": positions, **sizes})
    torch.manual_seed(1)
    model = build(settings, len(LETTERS), len(LETTERS), shared=True).eval()
    runs = [encode_stream(LETTERS, TEXTS)] if stream else [[BOS, *LETTERS.encode(text), EOS] for text in TEXTS]

    def after(seen: list[int], token: int) -> float:
        batch = SeqBatch(
            PackedTokens.from_lists([[]]), PackedTokens.from_lists([seen]), torch.zeros(len(seen), dtype=torch.long)
        )
        with torch.no_grad():
            return -float(model.logits(batch)[-1].log_softmax(-1)[token])

    losses = [loss for run in runs for loss in one_by_one(after, run, context, stride, None if stream else BOS)]
    found = score(model, LETTERS, TEXTS, context=context, stride=stride, stream=stream)
    assert found.tokens == len(losses)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_bytes_of_a_stream_exclude_the_unscored_token() -> None:
    model = Bigram(len(LETTERS))
    assert score(model, LETTERS, ["abc\n"], stream=True).bytes == 3
    assert score(model, LETTERS, ["aé\n"], stream=True).bytes == 3  # é is two
    assert score(model, LETTERS, ["aé\n"]).bytes == 4


def test_words_of_a_stream_have_eos_at_line_ends() -> None:
    words = train(["the cat sat the cat"], "word", 300)
    the, cat, sat = (words.encode(word)[0] for word in ("the", "cat", "sat"))
    assert encode_stream(words, ["the cat\n", "sat\n\n", "cat"]) == [the, cat, EOS, sat, EOS, EOS, cat]
    assert encode_stream(words, "the cat\nsat\n\ncat") == encode_stream(words, ["the cat\n", "sat\n\n", "cat"])


@pytest.mark.parametrize("unit", ["char", "bpe"])
def test_a_stream_is_the_text(unit: str) -> None:
    tokenizer = train(TEXTS, unit, 300)
    assert tokenizer.decode(encode_stream(tokenizer, TEXTS)) == "".join(TEXTS)
    assert encode_stream(tokenizer, "".join(TEXTS)) != []


def test_progress_counts_the_scored_tokens() -> None:
    seen: list[int] = []
    found = score(Bigram(len(LETTERS)), LETTERS, TEXTS, progress=seen.append, batch_tokens=10)
    assert sum(seen) == found.tokens and len(seen) > 1


def test_invalid_arguments_are_errors() -> None:
    for stride in (0, 7):
        with pytest.raises(UserError, match=f"a stride of {stride} for a context of 6"):
            score(Bigram(len(LETTERS)), LETTERS, TEXTS, stride=stride)
    for texts in ([], [""], ["a"]):
        with pytest.raises(UserError, match="no text to score"):
            score(Bigram(len(LETTERS)), LETTERS, texts, stream=True)


def test_with_unknown_words_there_are_no_bits_per_byte() -> None:
    words = train(["the cat sat"], "word", 260)
    known, partly = (score(Bigram(len(words)), words, [text]) for text in ("the cat sat", "the zebra sat"))
    assert known.bits_per_byte is not None and known.unknown == 0
    assert partly.bits_per_byte is None and partly.unknown == 1
    assert partly.tokens == known.tokens == 4  # including EOS
