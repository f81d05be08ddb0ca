"""Judges, which answer yes or no: a function, a model or a person. Sorting with a judge, and explaining its answers.

A judge that says which of two things comes first can sort any number of them; the cost is the number of questions.
Hiding parts of the two things shows what an answer depends on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from regard.decoding.sampling import fold
from regard.errors import UserError
from regard.interpret.explain.rise import BlackBox, Explanation, Progress, explain
from regard.runs import LoadedRun

Thing = TypeVar("Thing")
BEFORE = "Does {} come before {}?"


class Prefers(Protocol):
    """The part of a judge that sorting needs."""

    def prefers(self, a: Any, b: Any) -> bool: ...


class Judge(ABC):
    """Answers questions about things with yes or no; `question` is the one that compares two of them."""

    question = BEFORE

    @abstractmethod
    def answer(self, question: str, *things: Any) -> bool:
        """Answer a question, which has a {} for each of the things."""

    def prefers(self, a: Any, b: Any) -> bool:
        """Whether `a` comes before `b`."""
        return self.answer(self.question, a, b)


class Function(Judge):
    """Answers every question with the result of a function of the things."""

    def __init__(self, function: Callable[..., bool], question: str = BEFORE) -> None:
        self.function, self.question = function, question

    def answer(self, question: str, *things: Any) -> bool:
        return bool(self.function(*things))


class Scorer(Judge):
    """Answers by a score: the thing with the higher score comes first; to a single thing the answer is yes above 0.

    `score` maps a list of things to numbers; `Scorer.of(run)` uses the log-probabilities of a run.
    """

    def __init__(self, score: Callable[[list[Any]], Sequence[float]], question: str = "Does {} score more than {}?"):
        self.score, self.question = score, question

    @classmethod
    def of(cls, loaded: LoadedRun) -> Scorer:
        """Score texts by their log-probability; a run on pairs takes (source, target) tuples."""
        if not loaded.task.scores_pairs:
            raise UserError(f"a run for {loaded.task.name} gives texts no score: it cannot compare them")
        has_source = loaded.task.has_source

        def score(things: list[Any]) -> list[float]:
            pairs = [(str(thing[0]), str(thing[1])) if has_source else ("", str(thing)) for thing in things]
            return [sum(logprobs) for logprobs in loaded.score_pairs(pairs)[0]]

        return cls(score, "Is {} more probable than {}?")

    def answer(self, question: str, *things: Any) -> bool:
        first, *others = (float(score) for score in self.score(list(things)))
        return first > (others[0] if others else 0.0)


class Person(Judge):
    """A person at the terminal, who answers y or n; `read` and `write` ask and reply."""

    def __init__(
        self, question: str = BEFORE, read: Callable[[str], str] = input, write: Callable[[str], None] = print
    ) -> None:
        self.question, self.read, self.write = question, read, write

    def answer(self, question: str, *things: Any) -> bool:
        text = question.format(*map(repr, things))
        while True:
            try:
                reply = self.read(f"{text} (y/n) ").strip().lower()
            except EOFError:
                raise UserError(f"no answer to: {text}") from None
            if reply in ("y", "yes", "n", "no"):
                return reply.startswith("y")
            self.write("Please answer y or n.")


class Unreliable(Judge):
    """A simulated person: gives the opposite of another judge's answer at this error rate.

    Which answers are wrong is a function of the seed and the number of the question.
    """

    def __init__(self, judge: Judge, error: float = 0.1, seed: int = 0) -> None:
        if not 0.0 <= error <= 1.0:
            raise UserError(f"error = {error}: a rate between 0 and 1")
        self.judge, self.error, self.seed, self.asked = judge, error, seed, 0
        self.question = judge.question

    def answer(self, question: str, *things: Any) -> bool:
        wrong = fold(self.seed, self.asked) < self.error * 2.0**64
        self.asked += 1
        return self.judge.answer(question, *things) != wrong


@dataclass(frozen=True)
class Sorted(Generic[Thing]):
    """Things in a judge's order, and the number of questions that it took."""

    things: tuple[Thing, ...]
    questions: int

    def __str__(self) -> str:
        return f"{', '.join(map(repr, self.things))} ({self.questions} question{'' if self.questions == 1 else 's'})"


def sort_by(judge: Prefers, things: Sequence[Thing]) -> Sorted[Thing]:
    """Merge sort with a judge: at most `most_questions(n)` questions, even if answers contradict each other.

    It is stable: things that the judge does not distinguish keep their order.

    >>> print(sort_by(Function(lambda a, b: len(str(a)) < len(str(b))), [42, "twenty", 7]))
    7, 42, 'twenty' (3 questions)
    """
    if len(things) < 2:
        return Sorted(tuple(things), 0)
    middle = len(things) // 2
    left, right = sort_by(judge, things[:middle]), sort_by(judge, things[middle:])
    merged: list[Thing] = []
    first, second, questions = list(left.things), list(right.things), left.questions + right.questions
    while first and second:
        questions += 1
        merged.append(second.pop(0) if judge.prefers(second[0], first[0]) else first.pop(0))
    return Sorted((*merged, *first, *second), questions)


def most_questions(count: int) -> int:
    """The most questions that sorting `count` things takes: those of both halves, and `count` - 1 to merge them.

    >>> [most_questions(n) for n in (1, 2, 3, 4, 8)]
    [0, 1, 3, 5, 17]
    """
    return 0 if count < 2 else most_questions(count // 2) + most_questions(count - count // 2) + count - 1


def explain_answer(
    judge: Prefers, a: Any, b: Any, *, hidden: Any = None, progress: Progress | None = None, **sampling: Any
) -> Explanation:
    """Explain a judge's preference of `a` over `b`: the score is 1 if it prefers `a`, else 0, with parts hidden.

    The parts of a text are its words, those of a mapping its entries; anything else is one part. Hidden parts are left
    out (a thing of one part becomes None) or replaced by `hidden`. With n parts it takes 2^n questions, or `masks`.
    """
    first, second = _parts(a), _parts(b)

    def masked(keep: Sequence[bool]) -> tuple[Any, Any]:
        return _without(a, keep[: len(first)], hidden), _without(b, keep[len(first) :], hidden)

    def preferences(pairs: list[tuple[Any, Any]]) -> np.ndarray:
        return np.array([float(judge.prefers(*pair)) for pair in pairs])

    return explain(BlackBox(preferences, (*first, *second), masked), progress=progress, **sampling)


def _parts(thing: Any) -> list[str]:
    if isinstance(thing, str):
        return thing.split()
    return [f"{key} = {value}" for key, value in thing.items()] if isinstance(thing, Mapping) else [repr(thing)]


def _without(thing: Any, keep: Sequence[bool], hidden: Any) -> Any:
    """Make the thing with only some of its parts."""
    if isinstance(thing, str):
        shown = [word if kept else hidden for word, kept in zip(thing.split(), keep, strict=True)]
        return " ".join(str(word) for word in shown if word is not None)
    if isinstance(thing, Mapping):
        entries = zip(thing.items(), keep, strict=True)
        shown_entries = {key: value if kept else hidden for (key, value), kept in entries if kept or hidden is not None}
        return shown_entries
    return thing if keep[0] else hidden
