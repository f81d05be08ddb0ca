"""The common part of all tasks on texts: files, the token cache, packed batches, teacher forcing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from regard.data.corpora import TextPair, corpora, detected_layouts, files, held_out, held_out_files, locate
from regard.data.corpus_encoder import LabelEncoder
from regard.data.links import LinkedPacker
from regard.data.packing import Packer, fill_ratio, sentence_batches
from regard.data.stream import BatchStream, PlannedBatches
from regard.data.token_cache import build
from regard.data.token_store import TokenStore
from regard.errors import UserError
from regard.packed import SeqBatch
from regard.recipes.schema import DataSettings, Recipe
from regard.run_dir import RunDir
from regard.tasks.base import Dataset, Task
from regard.tasks.validator import Validator
from regard.text import BOS, Tokenizer, encode_side
from regard.text.encode import ContextBudget, prefix_ids

Tokenizers = tuple[Tokenizer, Tokenizer]
LINKS_FILE = "links.txt"  # in a run directory


@dataclass(frozen=True)
class TokenDataset(Dataset):
    """The token caches of a recipe's corpora."""

    stores: list[TokenStore]

    @property
    def digest(self) -> str:
        return "".join(store.digest for store in self.stores)


def check_files(data: DataSettings, resumed: bool) -> list[str]:
    """Raise a UserError if a file of a recipe is missing; return what was detected in its files."""
    for corpus in corpora(data):
        files(corpus, data)
    if not resumed:  # a run that was moved can be resumed without its test set
        try:
            held_out_files(data, "test")
        except UserError as error:
            raise UserError(f"data.test: {error}; data.test = [] trains without a test set") from error
    return detected_layouts(data)


class TextTask(Task):
    """A task whose examples are texts or pairs of texts."""

    def check_files(self, resumed: bool) -> list[str]:
        self.links(Path())
        return check_files(self.recipe.data, resumed)

    def held_out(self, split: str) -> list[TextPair]:
        return held_out(self.recipe.data, split)

    def digest(self, examples: Sequence[Any]) -> str:
        return hashlib.blake2b(json.dumps(examples).encode(), digest_size=16).hexdigest()

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> TokenDataset:
        encoder = self.target_encoder(run)
        return TokenDataset(build(self.recipe, run.tokenizers[0], encoder, progress, say, self.links(run.path)))

    def links(self, run: Path) -> Path | None:
        """The file of links that guided alignment learns, for a run in this folder; None: no guided alignment."""
        guided = self.recipe.training.guided_alignment
        if guided is None or guided == "own":
            return None if guided is None else run / LINKS_FILE
        return locate(guided, self.recipe.data.folder)

    def target_encoder(self, run: RunDir) -> Tokenizer | LabelEncoder:
        """The encoder of the targets in the token cache."""
        return run.tokenizers[1]

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        return self.packer(dataset, static)

    def packer(self, dataset: Dataset, static: bool) -> PlannedBatches:
        """The packed batches, before a task alters them."""
        assert isinstance(dataset, TokenDataset)
        linked = any(store.links is not None for store in dataset.stores)
        packer = partial(LinkedPacker, link_weight=self.recipe.training.guided_weight) if linked else Packer
        cost = 1 / (6 * self.recipe.model.width)  # 4 D FLOPs a pair, 24 D² a token in a block of width D
        return packer(dataset.stores, self.weights, pair_cost=cost, **self.packing(static))

    def packing(self, static: bool) -> dict[str, Any]:
        """The settings of a `Packer`."""
        settings = self.recipe.training
        return {
            "target_budget": settings.batch_tokens,
            "seed": settings.seed,
            "pool": settings.sort_buffer,
            "static": static,
        }

    def describe_batch(self, run: RunDir, batch: Any) -> list[dict[str, Any]]:
        (source, target), labels = run.tokenizers, batch.inputs.layout.split(batch.labels)
        pairs = zip(batch.source.layout.split(batch.source.ids), labels, strict=True)
        return [{"source": source.decode(a.tolist()), "target": target.decode(b.tolist())} for a, b in pairs]

    @cached_property
    def weights(self) -> list[float]:
        """The number of times that an epoch visits an example of each corpus."""
        return [corpus.weight for corpus in corpora(self.recipe.data)]

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        packer = self.packer(dataset, static)
        shares = fill_ratio(packer.batch_at(0))
        padded = shares.pop("padded")
        source, target = run.tokenizers
        sizes = f"{len(source):,}" if source is target else f"{len(source):,} and {len(target):,}"
        budgets = f"{packer.target_budget:,} target and {packer.source_budget:,} source tokens"
        used = " and ".join(f"{100 * shares[side]:.0f} %" for side in ("target", "source") if side in shares)
        padding = "" if static else f"; {100 - 100 * padded:.0f} % of the positions in attention are padding"
        return [
            f"data: {self._describe_data(dataset, packer)}; vocabulary {sizes}",
            f"batches: up to {budgets if packer.source_budget else f'{packer.target_budget:,} tokens'} "
            f"(the first one is {used} full{padding})",
        ]

    def _describe_data(self, dataset: Dataset, packer: PlannedBatches) -> str:
        """The amount of training data, and of what was left out, in words."""
        assert isinstance(dataset, TokenDataset)
        stores = dataset.stores
        counts = {name: sum(getattr(store.report, name) for store in stores) for name in asdict(stores[0].report)}
        empty, long = counts["dropped_empty"], counts["dropped_long"] + packer.dropped_long
        if self.data == "pairs":
            dropped = f"{empty:,} empty and {long:,} over-long dropped" if empty or long else "none dropped"
            return f"{counts['pairs'] - packer.dropped_long:,} {self.members}, {dropped}"
        chunked = self.members == "documents" and counts["pairs"] > counts["documents"]
        chunks = f" in {counts['pairs']:,} chunks" if chunked else ""
        return f"{counts['documents']:,} {self.members}{chunks}, {_rounded(counts['target_tokens'])} tokens"


class TextValidator(Validator):
    """Measures a model on held-out texts; of plain text, the source of each pair is empty."""

    def __init__(
        self, recipe: Recipe, tokenizers: Tokenizers, pairs: Sequence[tuple[str, str]], device: torch.device
    ) -> None:
        super().__init__(recipe, device)
        self.tokenizers, self.pairs = tokenizers, list(pairs)


def encode_pairs(
    pairs: Sequence[tuple[str, str]], tokenizers: Tokenizers, recipe: Recipe
) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """The source and target tokens of text pairs for teacher forcing, and which pairs were truncated."""
    first = corpora(recipe.data)[0]
    prefix, budget, plain = prefix_ids(recipe), ContextBudget.of(recipe), recipe.data.kind == "text"
    sources, source_cut = encode_side(
        tokenizers[0],
        [source for source, _ in pairs],
        tag=first.source_tag,
        max_len=budget.source,
        lowercase=recipe.data.lowercase,
        prefix=prefix,
    )
    sources = [[] for _ in pairs] if plain else sources
    targets, target_cut = encode_side(
        tokenizers[1],
        [target for _, target in pairs],
        tag=first.target_tag,
        max_len=[budget.target(len(source)) for source in sources],
        lowercase=recipe.data.lowercase,
        prefix=prefix if plain else (),  # the target of plain text is what the model reads
    )
    return sources, targets, [(a and not plain) or b for a, b in zip(source_cut, target_cut, strict=True)]


def token_batches(
    sources: list[list[int]], targets: list[list[int]], recipe: Recipe
) -> list[tuple[list[int], SeqBatch]]:
    """Batches for teacher forcing of pairs of similar lengths, each with the indices of its pairs."""
    lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
    groups = sentence_batches(lengths, batch_tokens(recipe))
    return [(g, SeqBatch.from_lists([sources[i] for i in g], [targets[i] for i in g], bos=BOS)) for g in groups]


def pair_batches(
    pairs: Sequence[tuple[str, str]], tokenizers: Tokenizers, recipe: Recipe
) -> list[tuple[list[int], SeqBatch]]:
    """Text pairs as batches for teacher forcing, each with the indices of its pairs."""
    sources, targets, _ = encode_pairs(pairs, tokenizers, recipe)
    return token_batches(sources, targets, recipe)


def batch_tokens(recipe: Recipe) -> int:
    """Tokens per batch of validation: small training batches would be slow, and the size changes no result."""
    return max(recipe.training.batch_tokens, 2048)


def _rounded(count: int) -> str:
    """
    >>> _rounded(2_100_400), _rounded(12_345)
    ('2.1 million', '12,345')
    """
    return f"{count / 1e6:,.1f} million" if count >= 1_000_000 else f"{count:,}"
