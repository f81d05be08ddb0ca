"""Scores of output texts, of language models on text, and of word alignments."""
