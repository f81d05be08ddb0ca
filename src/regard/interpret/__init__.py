"""Interpretability: recorder, interventions, traces, explanations, alignments from attention."""
