"""Learning the tokenizers of a recipe from its corpora."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from regard.data.corpora import TextPair, corpora, read_pairs
from regard.text import Tokenizer, train

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe


def learn_tokenizers(recipe: Recipe, labels: bool = False) -> tuple[Tokenizer, Tokenizer]:
    """Train the source and the target tokenizer; both are the same object if `text.shared` is set.

    They are trained on at most `text.sample` pairs, drawn uniformly from all corpora (regardless of their weights). The
    sample does not depend on the run's seed, so that runs with different seeds have the same vocabulary. `labels`: the
    targets are labels, not texts, and nothing is learned from them.
    """
    text, pairs = recipe.text, _vocabulary_sample(recipe)
    source_tags, target_tags = tags_of(recipe)
    if text.shared:
        sides = (0,) if labels else (1,) if recipe.data.kind == "text" else (0, 1)
        texts = (pair[side] for pair in pairs for side in sides)
        both = train(texts, text.unit, text.vocabulary, list(dict.fromkeys(source_tags + target_tags)))
        return both, both
    source = train((pair[0] for pair in pairs), text.unit, text.vocabulary, source_tags)
    return source, _target_tokenizer(recipe, pairs)


def learn_target_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train the target tokenizer alone, for a recipe without a shared vocabulary."""
    return _target_tokenizer(recipe, _vocabulary_sample(recipe))


def _target_tokenizer(recipe: Recipe, pairs: list[TextPair]) -> Tokenizer:
    text, (_, tags) = recipe.text, tags_of(recipe)
    return train((pair[1] for pair in pairs), text.target_unit or text.unit, text.vocabulary, tags)


def _vocabulary_sample(recipe: Recipe) -> list[TextPair]:
    """Sample the pairs that the tokenizers are trained on."""
    pairs = chain.from_iterable(read_pairs(corpus, recipe.data) for corpus in corpora(recipe.data))
    return sample(pairs, recipe.text.sample, seed=1)


def tags_of(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The distinct tags of the sources and of the targets."""
    mix = corpora(recipe.data)
    sources = [corpus.source_tag for corpus in mix if corpus.source_tag]
    targets = [corpus.target_tag for corpus in mix if corpus.target_tag]
    return list(dict.fromkeys([*sources, *recipe.model.extra_tags])), list(dict.fromkeys(targets))


def sample(pairs: Iterable[TextPair], size: int, seed: int) -> list[TextPair]:
    """Draw at most `size` pairs uniformly (reservoir sampling)."""
    draw = random.Random(seed).random
    reservoir: list[TextPair] = []
    for count, pair in enumerate(pairs, 1):
        if len(reservoir) < size:
            reservoir.append(pair)
        elif (index := int(draw() * count)) < size:
            reservoir[index] = pair
    return reservoir
