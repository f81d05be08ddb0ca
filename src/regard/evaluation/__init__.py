"""Scores of translations (BLEU, chrF, exact matches), and comparisons of runs."""

from regard.metrics.text_scores import TextScores, moses_tokenize, moses_tokenized_bleu, score_texts

__all__ = ["TextScores", "moses_tokenize", "moses_tokenized_bleu", "score_texts"]
