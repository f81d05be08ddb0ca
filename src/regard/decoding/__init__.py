"""From a model to its output: greedy and beam search, sampling, and the scores of given output."""

from regard.decoding.beam_state import Hypothesis, Report
from regard.decoding.search import SearchRequest, score, search

__all__ = ["Hypothesis", "Report", "SearchRequest", "score", "search"]
