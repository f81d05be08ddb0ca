"""Scores of output texts and of word alignments."""
