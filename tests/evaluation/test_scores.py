"""Scores agree with formulas computed by hand, and Moses tokens with the published files."""

from __future__ import annotations

import lzma
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.errors import UserError
from regard.evaluation import moses_tokenize, moses_tokenized_bleu, score_texts

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "multi30k"


def test_identical_texts_score_a_hundred() -> None:
    texts = ["the cat sat on the mat .", "a dog runs through the snow ."]
    scores = score_texts(texts, texts)
    assert scores.bleu == pytest.approx(100.0)
    assert scores.chrf == pytest.approx(100.0)
    assert scores.exact == 100.0
    assert scores.lines == 2
    assert scores.perplexity is None


def test_bleu_follows_its_formula() -> None:
    # output    a b c d e f       6 tokens      reference  a b c d e g h     7 tokens
    # 1-grams   a b c d e of 6            5/6
    # 2-grams   ab bc cd de of 5          4/5
    # 3-grams   abc bcd cde of 4          3/4
    # 4-grams   abcd bcde of 3            2/3
    # brevity penalty exp(1 - 7/6), as 6 < 7
    expected = 100 * math.exp(1 - 7 / 6) * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert score_texts(["a b c d e f"], ["a b c d e g h"]).bleu == pytest.approx(expected, abs=1e-6)


def test_bleu_sums_counts_over_the_corpus_and_clips_them() -> None:
    # line 1    the the the the the against  the cat the mat here     matches 2 (clipped), 0, 0, 0 of 5, 4, 3, 2
    # line 2    a b c d e           against  a b c d e                matches 5, 4, 3, 2 of 5, 4, 3, 2
    # together  7/10, 4/8, 3/6, 2/4; 10 tokens against 10: no brevity penalty
    expected = 100 * (7 / 10 * 4 / 8 * 3 / 6 * 2 / 4) ** 0.25
    scores = score_texts(["the the the the the", "a b c d e"], ["the cat the mat here", "a b c d e"])
    assert scores.bleu == pytest.approx(expected, abs=1e-6)


def test_chrf_follows_its_formula() -> None:
    # "abcdef" against "abcdeg": of 6, 5, 4, 3, 2, 1 character n-grams 5, 4, 3, 2, 1, 0 match. Both sides have equally
    # many, so precision = recall = F for each order, and chrF is the F of the mean precision and the mean recall.
    expected = 100 * (5 / 6 + 4 / 5 + 3 / 4 + 2 / 3 + 1 / 2 + 0) / 6
    assert score_texts(["abcdef"], ["abcdeg"]).chrf == pytest.approx(expected, abs=1e-6)


def test_exact_matches_are_counted() -> None:
    outputs, references = ["a cat", "A dog", "a cow ", "a hen"], ["a cat", "a dog", "a cow", "an owl"]
    assert score_texts(outputs, references).exact == 50.0  # the cat and the cow
    assert score_texts(outputs, references, lowercase=True).exact == 75.0  # and the dog


def test_signatures_describe_the_settings() -> None:
    texts = ["The cat sat on the mat."]
    plain, lower = score_texts(texts, texts), score_texts(texts, texts, lowercase=True, tokenize="intl")
    assert "case:mixed" in plain.bleu_signature and "tok:13a" in plain.bleu_signature
    assert "case:lc" in lower.bleu_signature and "tok:intl" in lower.bleu_signature
    assert "nrefs:1" in plain.chrf_signature and "case:mixed" in plain.chrf_signature
    assert "case:lc" in lower.chrf_signature
    assert "version:" in plain.bleu_signature


def test_lowercase_ignores_case() -> None:
    outputs, references = ["The Cat Sat On The Mat"], ["the cat sat on the mat"]
    assert score_texts(outputs, references).bleu < 1
    assert score_texts(outputs, references, lowercase=True).bleu == pytest.approx(100.0)


def test_lines_must_pair_up() -> None:
    with pytest.raises(UserError, match="2 outputs but 3 references"):
        score_texts(["a", "b"], ["a", "b", "c"])
    with pytest.raises(UserError, match="1 outputs but 2 references"):
        moses_tokenized_bleu(["a"], ["a", "b"], language="en")
    with pytest.raises(UserError, match="no lines"):
        score_texts([], [])


def test_an_unknown_tokenization_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="13a"):
        score_texts(["a"], ["a"], tokenize="words")


def test_moses_tokens_by_hand() -> None:
    pytest.importorskip("sacremoses")
    assert moses_tokenize(["One man's T-shirt, blue."], language="en") == ["one man &apos;s t-shirt , blue ."]
    assert moses_tokenize(["One man’s hat"], language="en", lowercase=False) == ["One man &apos;s hat"]


def test_moses_bleu_compares_token_by_token() -> None:
    pytest.importorskip("sacremoses")
    # output  the man 's dog runs .   (6 tokens) against  the man 's dog sleeps .  (6 tokens)
    # matches 5/6, 3/5 (the man, man 's, 's dog), 2/4, 1/3; equally long
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    bleu, signature = moses_tokenized_bleu(["The man's dog runs."], ["the man &apos;s dog sleeps ."], language="en")
    assert bleu == pytest.approx(expected, abs=1e-6)
    assert "tok:none" in signature and "case:lc" in signature


def test_without_sacremoses_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match=r"pip install regard\[moses\]"):
        moses_tokenize(["a"], language="en")


def test_importing_scores_imports_neither_torch_nor_sacrebleu() -> None:
    check = "import sys, regard.evaluation; sys.exit('torch' in sys.modules or 'sacrebleu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the Multi30k test files in {DATA} (REGARD_DATA sets the folder)")
@pytest.mark.parametrize("language", ["en", "de"])
def test_published_token_files_are_reproduced(language: str) -> None:
    pytest.importorskip("sacremoses")
    raw = _lines(DATA / f"test_2016_flickr.{language}.xz")
    published = _lines(DATA / f"test_2016_flickr.lc.norm.tok.{language}.xz")
    ours = moses_tokenize(raw, language=language)
    assert len(ours) == len(published) == 1000
    assert [(a, b) for a, b in zip(ours, published, strict=True) if a != b] == []
    assert moses_tokenized_bleu(raw, published, language=language)[0] == pytest.approx(100.0)


def _lines(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().removesuffix("\n").split("\n")
