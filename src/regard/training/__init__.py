"""Training: from a recipe to a run directory."""

from regard.training.setup import train

__all__ = ["train"]
