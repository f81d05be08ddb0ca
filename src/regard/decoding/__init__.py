"""From a model to its output: greedy and beam search, sampling, and the scores of given output."""

from regard.decoding.hypotheses import Hypothesis, Report
from regard.decoding.search import score, search

__all__ = ["Hypothesis", "Report", "score", "search"]
