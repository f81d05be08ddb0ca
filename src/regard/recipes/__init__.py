"""Recipes: named, complete settings for data, text, model, training and decoding.

    recipe = load("en-es", ["training.steps=100"])      # built in, or the path of a .toml file
    print(describe(recipe))                             # every setting with its description, as TOML

This package does not import torch.
"""

from regard.recipes.load import load, names, parse, validate
from regard.recipes.schema import Recipe
from regard.recipes.to_toml import describe, differences, to_toml

__all__ = ["Recipe", "describe", "differences", "load", "names", "parse", "to_toml", "validate"]
