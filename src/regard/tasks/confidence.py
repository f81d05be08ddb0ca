"""Confidence of translated words and sentences: the model's probabilities, calibrated on held-out data.

The raw confidence of a word is the product of its tokens' probabilities; that of a sentence is the geometric mean of
all its tokens' probabilities, EOS included. A calibration maps them to how often such words are right: a word is right
if it is in a longest common subsequence with the reference. The calibrated confidence of a sentence is the expected
share of its words that are right. `regard calibrate` fits the maps on held-out data and writes them into the run
directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from regard.decoding import Hypothesis
from regard.errors import UserError
from regard.metrics.calibration import CalibrationCurve, correct_words, expected_calibration_error, isotonic
from regard.run_dir import RunDir
from regard.tasks.aligner import AttentionView
from regard.tasks.translator import Answer
from regard.text import Tokenizer
from regard.text.display import space_at

FILE = "calibration.json"  # in a run directory
VERSION = 1


@dataclass(frozen=True)
class WordConfidence:
    """A word of an output, and how likely it is right."""

    text: str
    confidence: float


@dataclass(frozen=True)
class Confidence:
    """The confidence in a translation: in each word, and the share of words that is expected to be right."""

    words: tuple[WordConfidence, ...]
    sentence: float
    calibrated: bool


@dataclass(frozen=True)
class Calibration:
    """Curves from raw to calibrated confidence, of words and of sentences; and the attention that aligns words best."""

    words: CalibrationCurve
    sentences: CalibrationCurve
    attention: AttentionView | None = None

    @classmethod
    def fit(cls, answers: Sequence[Answer], references: Sequence[str], tokenizer: Tokenizer) -> Calibration:
        """Fit the curves to translations and their references."""
        words, sentences = observations(answers, references, tokenizer)
        if not words[0]:
            raise UserError("there are no translated words to calibrate on")
        return cls(isotonic(*words), isotonic(*sentences))

    @classmethod
    def read(cls, run: RunDir) -> Calibration | None:
        """Read the calibration of a run; None: it has none."""
        path = run.path / FILE
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r}")
            words, sentences = ([tuple(map(float, content[k][axis])) for axis in "xy"] for k in ("words", "sentences"))
            attention = content.get("attention")
            view = None if attention is None else AttentionView(**attention)
            return cls(CalibrationCurve(*words), CalibrationCurve(*sentences), view)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a calibration that this version reads ({error}): calibrate again") from error

    def to_json(self) -> dict[str, Any]:
        """The content of the calibration file."""
        return {"version": VERSION, **asdict(self)}


def word_tokens(tokenizer: Tokenizer, hypothesis: Hypothesis) -> list[tuple[list[int], list[int]]]:
    """The words of a hypothesis: the positions of its tokens, and the tokens. A word begins with white space."""
    texts = tokenizer.token_texts(hypothesis.tokens)
    words: list[tuple[list[int], list[int]]] = []
    for position, token in enumerate(hypothesis.tokens):
        if token < tokenizer.first:
            continue
        if not words or space_at(texts, position):
            words.append(([], []))
        words[-1][0].append(position)
        words[-1][1].append(token)
    return words


def raw_words(tokenizer: Tokenizer, hypothesis: Hypothesis) -> list[WordConfidence]:
    """The words of a hypothesis with the products of their tokens' probabilities."""
    words = []
    for positions, tokens in word_tokens(tokenizer, hypothesis):
        text = tokenizer.decode(tokens).strip()
        if text:
            words.append(WordConfidence(text, math.exp(sum(hypothesis.logprobs[p] for p in positions))))
    return words


def raw_sentence(hypothesis: Hypothesis) -> float:
    """The geometric mean of the tokens' probabilities."""
    return math.exp(sum(hypothesis.logprobs) / max(len(hypothesis.logprobs), 1))


def confidence(answer: Answer, tokenizer: Tokenizer, calibration: Calibration | None = None) -> Confidence:
    """The confidence of an answer's best translation; a blank one is certain."""
    if not answer.hypotheses:
        return Confidence((), 1.0, calibration is not None)
    best = answer.hypotheses[0]
    words, sentence = raw_words(tokenizer, best), raw_sentence(best)
    if calibration is None:
        return Confidence(tuple(words), sentence, False)
    calibrated = [WordConfidence(word.text, calibration.words(word.confidence)) for word in words]
    return Confidence(tuple(calibrated), calibration.sentences(sentence), True)


Observations = tuple[list[float], list[float]]  # confidences, and how right each was


def observations(
    answers: Sequence[Answer], references: Sequence[str], tokenizer: Tokenizer, calibration: Calibration | None = None
) -> tuple[Observations, Observations]:
    """The confidences of words and of sentences, with 1 for a word that is right, and the share of right words."""
    words: Observations = ([], [])
    sentences: Observations = ([], [])
    for answer, reference in zip(answers, references, strict=True):
        rated = confidence(answer, tokenizer, calibration)
        right = correct_words([word.text for word in rated.words], reference.split())
        if not right:
            continue
        words[0].extend(word.confidence for word in rated.words)
        words[1].extend(map(float, right))
        sentences[0].append(rated.sentence)
        sentences[1].append(sum(right) / len(right))
    return words, sentences


def calibration_errors(
    answers: Sequence[Answer], references: Sequence[str], tokenizer: Tokenizer, calibration: Calibration | None
) -> tuple[float, float]:
    """The expected calibration errors of words and of sentences."""
    words, sentences = observations(answers, references, tokenizer, calibration)
    return expected_calibration_error(*words), expected_calibration_error(*sentences)
