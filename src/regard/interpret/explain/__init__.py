"""Which inputs mattered, with whatever answers as a black box: RISE, its exact counterpart, and how far to trust it.

`explain(f, "some words")` asks any callable; `Model.explain` asks a trained run; `explain_answer` asks a judge, who may
be a person.
"""

from regard.interpret.explain.curve import Curve, curves
from regard.interpret.explain.judge import Function, Judge, Person, Scorer, Sorted, Unreliable, explain_answer, sort_by
from regard.interpret.explain.rise import BlackBox, Explanation, Sampling, explain, stream

__all__ = [
    "BlackBox",
    "Curve",
    "Explanation",
    "Function",
    "Judge",
    "Person",
    "Sampling",
    "Scorer",
    "Sorted",
    "Unreliable",
    "curves",
    "explain",
    "explain_answer",
    "sort_by",
    "stream",
]
