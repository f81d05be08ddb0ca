"""Texts with a label each, such as a class: their entries in the token cache, and their batches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.packing import Packer
from regard.data.token_store import Array, Ragged, TokenStore
from regard.errors import UserError
from regard.models.bert import TextClassBatch
from regard.packed import PackedTokens


class ClassIds:
    """Encodes the names of classes as their ids, which the token cache stores as the targets of texts."""

    dtype = "uint16"

    def __init__(self, names: Sequence[str]) -> None:
        self.ids = {name: number for number, name in enumerate(names)}
        if len(self.ids) > 1 << 16:
            raise UserError(f"{len(self.ids):,} classes: at most {1 << 16:,} are supported")

    def encode(self, corpus: str, targets: Sequence[str]) -> list[list[int]]:
        return [[class_id(name, self.ids, corpus)] for name in targets]

    def to_json(self) -> str:
        return json.dumps([*self.ids])


def class_name(text: str) -> str:
    """The name of a class as it is stored: one line, without white space around it.

    >>> class_name(" science  fiction\\n")
    'science fiction'
    """
    return " ".join(text.split())


def class_id(name: str, ids: dict[str, int], corpus: str) -> int:
    """The id of a class; `corpus` is where its name occurs, for the message if there is no such class."""
    number = ids.get(class_name(name))
    if number is None:
        known = ", ".join([*ids][:10]) + (", ..." if len(ids) > 10 else "")
        raise UserError(f"{corpus}: {class_name(name)[:60]!r} is not a class of this model, which has {known}")
    return number


class Numbers:
    """Encodes numbers, standardised to mean 0 and deviation 1, as the bits of float32."""

    dtype = "uint32"

    def __init__(self, scales: Sequence[tuple[float, float]]) -> None:
        self.scales = list(scales)

    def encode(self, corpus: str, targets: Sequence[str]) -> list[list[int]]:
        return self.standardised(corpus, targets).view(np.uint32).tolist()

    def standardised(self, corpus: str, targets: Sequence[str]) -> npt.NDArray[np.float32]:
        """Texts of C numbers each -> [N, C]."""
        rows = [parse_numbers(target, corpus, len(self.scales)) for target in targets]
        means, deviations = np.array(self.scales).T
        return ((np.array(rows).reshape(-1, len(means)) - means) / deviations).astype(np.float32)

    def to_json(self) -> str:
        return json.dumps(self.scales)


def parse_numbers(text: str, corpus: str, count: int | None = None) -> list[float]:
    """The numbers of a text, between spaces: at least one, all finite; `corpus` is where it occurs, for a message.

    >>> parse_numbers("-0.77 1e3", "a corpus")
    [-0.77, 1000.0]
    """
    try:
        numbers = [float(word) for word in text.split()]
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        raise UserError(f"{corpus}: {text[:60]!r} is not a finite number, or several between spaces")
    if count is not None and len(numbers) != count:
        raise UserError(f"{corpus}: {text[:60]!r} has {len(numbers)} numbers, and others have {count}")
    return numbers


class LabelledTexts(Packer):
    """Batches of texts of at most `target_budget` tokens, with the label of each text."""

    members = "texts"

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], **settings: Any) -> None:
        super().__init__([_texts(store) for store in stores], weights, **settings)
        ids = np.concatenate([store.target.ids for store in stores])
        self.labels: Array = ids.astype(np.int64)  # one for each text

    def _read(self, members: Array) -> TextClassBatch:
        layout = self._layout(self._target_lengths[members], self.target_budget, self.longest[1])
        texts = self._gather([store.target for store in self.stores], members, layout)
        count = self.sentences if self.static else len(members)
        labels = np.zeros((count, *self.labels.shape[1:]), self.labels.dtype)
        labels[: len(members)] = self.labels[members]
        return TextClassBatch(PackedTokens(torch.from_numpy(texts), layout), torch.from_numpy(labels))


class NumberedTexts(LabelledTexts):
    """The same, with the numbers of each text, as `Numbers` encodes them."""

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], **settings: Any) -> None:
        super().__init__(stores, weights, **settings)
        bits = [np.ascontiguousarray(store.target.ids, np.uint32) for store in stores]
        self.labels = np.concatenate(bits).view(np.float32).reshape(len(self._target_lengths), -1)


def _texts(store: TokenStore) -> TokenStore:
    """The texts of a store as the targets of empty sources, which is how plain text is packed."""
    empty = Ragged(np.zeros(0, store.source.ids.dtype), np.zeros(len(store) + 1, np.int64))
    return TokenStore.of_ragged(empty, store.source)
