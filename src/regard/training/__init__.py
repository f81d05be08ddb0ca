"""Training: from a recipe to a run directory."""

from regard.training.start import train

__all__ = ["train"]
