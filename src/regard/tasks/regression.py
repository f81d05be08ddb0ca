"""Regression on texts."""

from __future__ import annotations

from typing import Any

from regard.data.labelled import NumberedTexts, Numbers
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset
from regard.tasks.labelled_text import LabelledTextTask
from regard.tasks.numbers import NumberTask


@TASKS.register("regression")
class RegressionTask(NumberTask, LabelledTextTask):
    """Trains on pairs of a text and a number, or several between spaces."""

    name = "regression"
    about = "predict numbers from a text"
    verbs = frozenset({"predict", "evaluate"})
    trace = None
    labelled = NumberedTexts

    def target_encoder(self, run: RunDir) -> Numbers:
        return Numbers(run.scales)

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        packer = self.packer(dataset, static)
        sizes = f"numbers: {len(run.scales)} each; vocabulary {len(run.tokenizers[0]):,}"
        return [f"data: {self._describe_data(dataset, packer)}; {sizes}"]

    def describe_batch(self, run: RunDir, batch: Any) -> list[dict[str, Any]]:
        texts, tokenizer = batch.source.layout.split(batch.source.ids), run.tokenizers[0]
        pairs = zip(texts, batch.labels, strict=True)
        return [
            {"text": tokenizer.decode(ids.tolist()), "numbers": self.prediction(run, label).numbers}
            for ids, label in pairs
        ]
