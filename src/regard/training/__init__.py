"""Training: from a recipe to a run directory."""
