"""How good the output is: BLEU, chrF and exact matches against references; perplexity of plain text."""

from regard.metrics.text_scores import TextScores, moses_tokenize, moses_tokenized_bleu, score_texts

__all__ = ["TextScores", "moses_tokenize", "moses_tokenized_bleu", "score_texts"]
