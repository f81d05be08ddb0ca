"""From a model to its output: greedy and beam search, sampling, and the scores of given output."""

from regard.decoding.results import Hypothesis, Report
from regard.decoding.scoring import score
from regard.decoding.search import SearchRequest, search

__all__ = ["Hypothesis", "Report", "SearchRequest", "score", "search"]
