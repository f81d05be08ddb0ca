"""Decoding: greedy search, beam search, sampling, and the scores of given outputs."""

from regard.decoding.results import Hypothesis
from regard.decoding.scoring import score
from regard.decoding.search import SearchRequest, search

__all__ = ["Hypothesis", "SearchRequest", "score", "search"]
