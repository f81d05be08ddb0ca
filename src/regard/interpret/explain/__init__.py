"""Explanations of black boxes: the importance of each part of an input (RISE, or exact), and its standard error.

`explain(f, "some words")` explains any callable of texts or lists, `explain_image(f, pixels)` any callable of images,
`Model.explain` a trained run, and `explain_answer` a judge, which may be a person.
"""

from regard.interpret.explain.curve import Curve, curves
from regard.interpret.explain.image_masks import explain_image
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
    "explain_image",
    "sort_by",
    "stream",
]
