"""The share of cross-attention inside the region of the image that each word of a caption refers to.

The region of a word is the patches with pixels of the shapes that it refers to. Chance is the region's share of all
patches: what attention that is spread evenly over the image would have inside.

N images, L layers, H heads, J words, T tokens, P patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.data.features import Example
from regard.models import SequenceModel
from regard.run_dir import RunDir
from regard.tasks.aligner import AttentionView, by_view, cross_attention, target_rows, views
from regard.tasks.feature_text import FeatureTextTask
from regard.text.words import split_words


class WordRegion(NamedTuple):
    """The part that a word has in a caption, and the patches [P] of the shapes that it speaks of."""

    role: str
    patches: np.ndarray


@dataclass(frozen=True)
class RegionShares:
    """Shares of attention inside the regions of words, by their role: [V, words] for all `views`; chance [words]."""

    layers: int
    heads: int
    inside: dict[str, np.ndarray]
    chance: dict[str, np.ndarray]

    def share(self, view: AttentionView, roles: Sequence[str] = ()) -> float:
        """The mean share over the words of these roles (default: all), by one view, in percent."""
        number = views(self.layers, self.heads).index(view)
        return 100 * float(np.concatenate([self.inside[role][number] for role in roles or self.inside]).mean())

    def by_chance(self, roles: Sequence[str] = ()) -> float:
        """The share of all patches that are inside, in percent."""
        return 100 * float(np.concatenate([self.chance[role] for role in roles or self.chance]).mean())

    def best_head(self, roles: Sequence[str]) -> AttentionView:
        """The head with the largest share for words of these roles."""
        heads = [view for view in views(self.layers, self.heads) if view.head is not None]
        return max(heads, key=lambda view: self.share(view, roles))


def region_shares(
    task: FeatureTextTask,
    run: RunDir,
    model: SequenceModel,
    examples: Sequence[tuple[Example, Sequence[WordRegion]]],
    device: torch.device,
) -> RegionShares:
    """Force the captions of examples, whose words have regions, and measure where the decoder attends."""
    inside: dict[str, list[np.ndarray]] = {}
    chance: dict[str, list[float]] = {}
    layers = heads = 0
    texts, recipe = [text for (_, text), _ in examples], task.recipe
    words = split_words(
        run.tokenizers[1],
        texts,
        tag=None,
        max_len=recipe.model.max_positions,
        lowercase=recipe.data.lowercase,
    )
    for indices, batch in task.batches(run, [example for example, _ in examples]):
        weights = cross_attention(model, batch.to(device)).cpu().numpy()  # [L, N, H, T, P]
        layers, heads = len(weights), weights.shape[2]
        for k, n in enumerate(indices):
            unpadded = weights[:, k, :, : len(words[n].tokens)]
            by_word = by_view(target_rows(words[n])[:, None, None] @ unpadded)  # [V, J, P]
            for j, region in enumerate(examples[n][1]):
                inside.setdefault(region.role, []).append(by_word[:, j, region.patches].sum(-1))
                chance.setdefault(region.role, []).append(float(region.patches.mean()))
    stacked: dict[str, Any] = {role: np.stack(shares, 1) for role, shares in inside.items()}
    return RegionShares(layers, heads, stacked, {role: np.array(shares) for role, shares in chance.items()})
