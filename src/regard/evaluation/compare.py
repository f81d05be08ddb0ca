"""Compare models on the same sentences: their scores, and how each depends on the length of sentences.

The functions work on outputs that exist already.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from regard.errors import UserError
from regard.files import parse_json, read_text
from regard.metrics.classes import ClassScores
from regard.metrics.text_scores import TextScores

Metric = Literal["bleu", "chrf", "exact"]
METRICS: dict[str, str] = {"bleu": "BLEU", "chrf": "chrF", "exact": "exact matches (%)"}
ACCURACY = "accuracy (%)"  # the name of "exact" for classes
RESAMPLES = 1000  # bootstrap samples for the confidence intervals


# -- sentences by length ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """The sentences whose sources have `low` to `high` words: their line numbers and mean length."""

    low: int
    high: int
    mean: float
    lines: tuple[int, ...]

    @property
    def label(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}–{self.high}"

    def of(self, texts: Sequence[str]) -> list[str]:
        return [texts[i] for i in self.lines]


def buckets(sources: Sequence[str], wanted: int | Sequence[int]) -> list[Bucket]:
    """Group lines by the number of words in their source.

    `wanted` is a number of buckets, which are made as equal in size as possible, or the maximum length of each bucket
    except the last: (5, 10) gives the buckets 1 to 5, 6 to 10, and above. `low` and `high` are lengths that occur;
    empty buckets are left out.
    """
    lengths = [len(source.split()) for source in sources]
    number: dict[int, int] = {}  # length -> which bucket
    seen = 0
    for length, count in sorted(Counter(lengths).items()):
        if isinstance(wanted, int):
            number[length] = int(wanted * (seen + count / 2) / len(lengths))  # by the median line of this length
        else:
            number[length] = sum(length > edge for edge in wanted)
        seen += count
    members: dict[int, list[int]] = {}
    for line, length in enumerate(lengths):
        members.setdefault(number[length], []).append(line)
    return [_bucket(members[k], lengths) for k in sorted(members)]


def _bucket(lines: Sequence[int], lengths: Sequence[int]) -> Bucket:
    chosen = [lengths[line] for line in lines]
    return Bucket(min(chosen), max(chosen), sum(chosen) / len(chosen), tuple(lines))


def parse_buckets(text: str) -> int | tuple[int, ...]:
    """Parse `--buckets`: "6" is a number of buckets, "5,10,15" are the maximum lengths of the buckets."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise UserError(f"--buckets {text}: must be a number of buckets (6), or the lengths they end at (5,10,15)")
    numbers = tuple(int(part) for part in parts)
    if len(numbers) == 1:
        if numbers[0] < 1:
            raise UserError(f"--buckets {text}: there must be at least one")
        return numbers[0]
    if any(one >= next for one, next in pairwise(numbers)):
        raise UserError(f"--buckets {text}: the lengths must rise")
    return numbers


@dataclass(frozen=True)
class ScoreInterval:
    """A score and its 95 % confidence interval."""

    score: float
    low: float
    high: float


def measure(
    metric: Metric, outputs: Sequence[str], references: Sequence[str], lowercase: bool = False
) -> ScoreInterval:
    """A score from 0 to 100 with its interval: bootstrap for BLEU and chrF, Wilson's for exact matches."""
    if metric == "exact":
        pairs = list(zip(outputs, references, strict=True))
        if lowercase:
            pairs = [(output.lower(), reference.lower()) for output, reference in pairs]
        return wilson(sum(output.strip() == reference.strip() for output, reference in pairs), len(pairs))
    from sacrebleu.metrics import BLEU, CHRF

    scorer = BLEU(lowercase=lowercase) if metric == "bleu" else CHRF(lowercase=lowercase)
    if len(outputs) == 1:  # nothing to resample
        score = scorer.corpus_score(outputs, [references]).score
        return ScoreInterval(score, score, score)
    result = scorer.corpus_score(outputs, [references], n_bootstrap=RESAMPLES)
    # sacreBLEU has the mean of the resampled scores and half the width of the interval in private fields only
    return ScoreInterval(result.score, max(0.0, result._mean - result._ci), min(100.0, result._mean + result._ci))


def wilson(right: int, of: int) -> ScoreInterval:
    """A percentage and Wilson's interval, with z = 1.96:

    (p + z²/2n ± z · sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    """
    z, p = 1.959964, right / of
    middle = p + z * z / (2 * of)
    half = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    scale = 100 / (1 + z * z / of)
    return ScoreInterval(100 * p, max(0.0, (middle - half) * scale), min(100.0, (middle + half) * scale))


# -- facts about each run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSummary:
    """Steps, seconds (including validations) and tokens per second of a run's training."""

    steps: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None

    @classmethod
    def of(cls, metrics: Path) -> TrainingSummary:
        """Read a run's metrics.jsonl; incomplete lines are skipped."""
        steps = seconds = speed = None
        try:
            lines = read_text(metrics, errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            try:
                facts = parse_json(line)
                steps, seconds = int(facts["step"]), float(facts["seconds"])
                if facts.get("tokens") and seconds > 0:
                    speed = float(facts["tokens"]) / seconds
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                continue
        return cls(steps, seconds, speed)


@dataclass(frozen=True)
class RunScores:
    """A run and its scores."""

    name: str
    model: str  # in a few words
    parameters: int
    training: TrainingSummary
    perplexity: float
    scores: TextScores | ClassScores
    by_length: tuple[ScoreInterval, ...]  # one per bucket
    moses: tuple[float, str] | None = None  # lower-cased Moses-tokenised BLEU, and its signature

    def as_json(self, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """All numbers, unrounded."""
        row: dict[str, Any] = {"run": self.name, "model": self.model, "parameters": self.parameters}
        row |= asdict(self.training) | {"perplexity": self.perplexity}
        if isinstance(self.scores, ClassScores):
            row |= {"accuracy": self.scores.accuracy, "macro_f1": self.scores.macro_f1}
        else:
            row |= {"bleu": self.scores.bleu, "chrf": self.scores.chrf, "exact": self.scores.exact}
        row |= {"moses_bleu": self.moses[0]} if self.moses is not None else {}
        row["by_length"] = [
            {"from": b.low, "to": b.high, "mean_length": b.mean, "sentences": len(b.lines), **asdict(m)}
            for b, m in zip(buckets, self.by_length, strict=True)
        ]
        return row


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many last parts as it takes to make the names distinct."""
    parts = [path.resolve().parts for path in paths]
    for i, path in enumerate(parts):
        if path in parts[:i]:
            raise UserError(f"{paths[i]} is given twice")
    deepest = max(map(len, parts))
    for depth in range(1, deepest + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def rows(runs: Sequence[RunScores], same_vocabulary: bool) -> tuple[list[str], list[list[str]]]:
    """The headings and the cells of the table. Perplexities that cannot be compared get a star."""
    star = "" if same_vocabulary else "*"
    with_moses = any(s.moses is not None for s in runs)
    heads = ["run", "model", "parameters", "training", "tokens/s", f"perplexity{star}"]
    classes = isinstance(runs[0].scores, ClassScores)
    if classes:
        heads = [*heads[:4], "examples/s", heads[-1], "accuracy", "macro-F1"]
    else:
        heads += ["BLEU", "chrF", "exact"]
    heads += ["Moses BLEU"] if with_moses else []
    cells = []
    for s in runs:
        speed = s.training.tokens_per_second
        row = [
            s.name,
            s.model,
            f"{s.parameters:,}",
            clock(s.training.seconds),
            "–" if speed is None else f"{speed:,.0f}",
        ]
        row.append(f"{s.perplexity:.3f}{star}")
        if isinstance(s.scores, ClassScores):
            row += [f"{s.scores.accuracy:.2f} %", f"{s.scores.macro_f1:.2f}"]
        else:
            row += [f"{s.scores.bleu:.2f}", f"{s.scores.chrf:.2f}", f"{s.scores.exact:.2f} %"]
        row += [("–" if s.moses is None else f"{s.moses[0]:.2f}")] if with_moses else []
        cells.append(row)
    return heads, cells


def clock(seconds: float | None) -> str:
    """Format seconds: 2:05, 1:00:00; a dash if unknown."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
