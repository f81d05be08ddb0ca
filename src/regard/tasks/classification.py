"""Classification of texts."""

from __future__ import annotations

from typing import Any

from regard.data.corpora import TextPair, corpora, read_pairs
from regard.data.labelled import ClassIds, class_name
from regard.errors import UserError
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.classes import ClassTask
from regard.tasks.labelled_text import LabelledTextTask


@TASKS.register("classification")
class ClassificationTask(ClassTask, LabelledTextTask):
    """Trains on pairs of a text and the name of its class; `training.batch_tokens` counts tokens of texts."""

    name = "classification"
    about = "name the class of a text"
    verbs = frozenset({"predict", "evaluate", "compare", "look", "draw", "explain", "bench", "export"})
    trace = TraceSpec("classify")
    explained = "class"

    def held_out(self, split: str) -> list[TextPair]:
        return [(text, class_name(name)) for text, name in super().held_out(split)]

    def class_names(self) -> list[str]:
        pairs = (pair for corpus in corpora(self.recipe.data) for pair in read_pairs(corpus, self.recipe.data))
        names = sorted({class_name(name) for text, name in pairs if text.strip() and name.strip()})
        if len(names) < 2:
            only = f"all are {names[0]!r}" if names else "there is none"
            raise UserError(f"the training data need at least two classes, and {only}")
        return names

    def target_encoder(self, run: RunDir) -> ClassIds:
        return ClassIds(run.classes)

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        packer = self.packer(dataset, static)
        first = packer.batch_at(0)
        used = f"the first one has {first.num_targets:,} texts and {first.source.layout.tokens:,} tokens"
        sizes = f"{len(run.classes):,} classes; vocabulary {len(run.tokenizers[0]):,}"
        return [
            f"data: {self._describe_data(dataset, packer)}; {sizes}",
            f"batches: up to {packer.target_budget:,} tokens ({used})",
        ]

    def describe_batch(self, run: RunDir, batch: Any) -> list[dict[str, Any]]:
        texts, tokenizer = batch.source.layout.split(batch.source.ids), run.tokenizers[0]
        pairs = zip(texts, batch.labels.tolist(), strict=True)
        return [{"text": tokenizer.decode(ids.tolist()), "class": run.classes[label]} for ids, label in pairs]
