"""Examples whose inputs are feature vectors and whose targets are texts: images with captions, recordings with texts.

Inputs come from manifests, tables of a file name and a text (file names are relative to the folder of the manifest), or
from built-in corpora. All feature vectors and tokens of a corpus are in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regard.data.corpora import corpora, held_out, read_pairs
from regard.data.packing import Packer, target_inputs
from regard.data.token_store import Array, CorpusReport, Ragged, TokenStore
from regard.packed import FeatureBatch, PackedFeatures, PackedTokens
from regard.recipes.schema import Corpus, DataSettings
from regard.registry import CORPORA

Example = tuple[Any, str]  # an input, or the name of its file; and its text


def training_examples(corpus: Corpus, data: DataSettings) -> list[Example]:
    """The training examples of one corpus."""
    if corpus.corpus is not None:
        return _lower(CORPORA[corpus.corpus].examples("train", corpus.count), data)
    return _lower(read_pairs(corpus, _cased(data)), data)


def held_out_examples(data: DataSettings, split: str) -> list[Example]:
    """The examples of a held-out split: of files, of the share that is held out, or of built-in corpora."""
    given = {"valid": data.valid, "test": data.test}.get(split)
    names = [corpus.corpus for corpus in corpora(data) if corpus.corpus is not None]
    if given is None and not data.held_out and names:
        distinct = dict.fromkeys(getattr(CORPORA[name], "held_out_corpus", name) for name in names)
        return _lower((example for name in distinct for example in CORPORA[name].examples(split)), data)
    return _lower(held_out(_cased(data), split), data)


def _cased(data: DataSettings) -> DataSettings:
    return data.model_copy(update={"lowercase": False})  # the names of files keep their case


def _lower(examples: Iterable[Example], data: DataSettings) -> list[Example]:
    return [(given, text.lower() if data.lowercase else text) for given, text in examples]


@dataclass(frozen=True)
class FeatureStore(TokenStore):
    """The feature vectors [n, F] and the tokens, EOS last, of the examples of a corpus.

    Stored numbers are multiplied with `scale`, so that pixels can be stored as bytes. `masked_label` is the token whose
    loss is masked, if there is one.
    """

    scale: float = 1.0
    masked_label: int | None = None

    @classmethod
    def of_features(
        cls, features: Sequence[Array], targets: Sequence[Sequence[int]], scale: float = 1.0, dropped: int = 0
    ) -> FeatureStore:
        """Concatenate the features [n, F] and the tokens of examples, one at least; `dropped` others were too long."""
        rows, tokens = Ragged.of_rows(features), Ragged.of(targets)
        report = CorpusReport(len(rows), 0, dropped, len(rows.ids), len(tokens.ids))
        return cls(rows, tokens, report, _digest(rows, tokens), scale=scale)


def _digest(*parts: Ragged) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(np.ascontiguousarray(part.ids).data)
        hashed.update(part.offsets.tobytes())
    return hashed.hexdigest()


class FeaturePacker(Packer):
    """Batches of stored examples, of at most `target_budget` tokens and `source_budget` rows of features."""

    members = "examples"

    def _read(self, members: Array) -> Any:
        sources = self._layout(self._source_lengths[members], self.source_budget, self.longest[0])
        targets = self._layout(self._target_lengths[members], self.target_budget, self.longest[1])
        values = self._gather([store.source for store in self.stores], members, sources).astype(np.float32)
        values *= getattr(self.stores[0], "scale", 1.0)
        labels = self._gather([store.target for store in self.stores], members, targets)
        masked = getattr(self.stores[0], "masked_label", None)
        return FeatureBatch(
            PackedFeatures(torch.from_numpy(values), sources),
            PackedTokens(torch.from_numpy(target_inputs(labels, targets)), targets),
            torch.from_numpy(labels),
            None if masked is None else targets.is_token & torch.from_numpy(labels != masked),
        )
