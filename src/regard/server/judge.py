"""Sorting by asking the person at the page. The page holds the answers; each time, the sorting is gone through anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.errors import UserError
from regard.interpret.explain.judge import Judge, most_questions, sort_by


class UnansweredQuestion(Exception):
    """A question that nobody has answered yet."""

    def __init__(self, *things: Any) -> None:
        self.things = things


class RecordedJudge(Judge):
    """Somebody whose answers are known, as far as they go."""

    def __init__(self, answers: Sequence[bool]) -> None:
        self.answers, self.asked = list(answers), 0

    def answer(self, question: str, *things: Any) -> bool:
        if self.asked == len(self.answers):
            raise UnansweredQuestion(*things)
        self.asked += 1
        return self.answers[self.asked - 1]


def sorting(things: Sequence[Any], answers: Sequence[bool]) -> dict[str, Any]:
    """The next question, "does the first come before the second?", or the things in order.

    >>> sorting(["twenty", 42], [])
    {'ask': [42, 'twenty'], 'questions': 0, 'most': 1}
    >>> sorting(["twenty", 42], [True])
    {'sorted': [42, 'twenty'], 'questions': 1}
    """
    judge = RecordedJudge(answers)
    try:
        found = sort_by(judge, list(things))
    except UnansweredQuestion as question:
        return {"ask": list(question.things), "questions": judge.asked, "most": most_questions(len(things))}
    if judge.asked < len(answers):
        raise UserError(f"{len(answers)} answers, but {judge.asked} questions were enough")
    return {"sorted": list(found.things), "questions": found.questions}
