"""Texts with a label each, such as a class: their entries in the token cache, and their batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
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
    found = ids.get(class_name(name))
    if found is None:
        known = ", ".join([*ids][:10]) + (", ..." if len(ids) > 10 else "")
        raise UserError(f"{corpus}: {class_name(name)[:60]!r} is not a class of this model, which has {known}")
    return found


class LabelledTexts(Packer):
    """Batches of texts of at most `target_budget` tokens, with the label of each text."""

    members = "texts"

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float], **settings: Any) -> None:
        super().__init__([_texts(store) for store in stores], weights, **settings)
        self.labels = np.concatenate([store.target.ids for store in stores]).astype(np.int64)  # one for each text

    def _read(self, members: Array) -> TextClassBatch:
        layout = self._layout(self._target_lengths[members], self.target_budget, self.longest[1])
        texts = self._gather([store.target for store in self.stores], members, layout)
        labels = np.zeros(self.sentences if self.static else len(members), np.int64)
        labels[: len(members)] = self.labels[members]
        return TextClassBatch(PackedTokens(torch.from_numpy(texts), layout), torch.from_numpy(labels))


def _texts(store: TokenStore) -> TokenStore:
    """The texts of a store as the targets of empty sources, which is how plain text is packed."""
    empty = Ragged(np.zeros(0, store.source.ids.dtype), np.zeros(len(store) + 1, np.int64))
    return TokenStore.of_ragged(empty, store.source)
