"""How good the output is: BLEU, chrF and exact matches against references; perplexity of plain text."""

from regard.evaluation.scores import Scores, moses_tokenize, moses_tokenized_bleu, score_texts

__all__ = ["Scores", "moses_tokenize", "moses_tokenized_bleu", "score_texts"]
