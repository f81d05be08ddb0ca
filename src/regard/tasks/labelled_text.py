"""The common part of tasks that predict a label for each text: the token cache, batches, and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from regard.arguments import text_list
from regard.data.corpora import corpora
from regard.data.labelled import LabelledTexts
from regard.data.packing import sentence_batches
from regard.data.stream import BatchStream
from regard.models.bert import TextClassBatch
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.tasks.base import Dataset
from regard.tasks.classes import InputBatch, PredictionTask
from regard.tasks.text import TextTask, TokenDataset, batch_tokens
from regard.text import encode_side
from regard.text.encode import ContextBudget, prefix_ids


class LabelledTextTask(PredictionTask, TextTask):
    """A task on pairs of a text and a label; `training.batch_tokens` counts tokens of texts."""

    data = "pairs"
    sections = ("text",)
    usage = "'a sentence'"
    targets = "texts"
    has_source = True
    labelled: ClassVar[type[LabelledTexts]] = LabelledTexts  # the batches

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if not recipe.text.shared:
            raise ValueError(f"{cls.name} reads one text: text.shared must be true (labels have no vocabulary)")
        if any(corpus.target_tag for corpus in corpora(recipe.data)):
            raise ValueError(f"target_tag is a tag of texts, and the targets of {cls.name} are labels")

    @property
    def members(self) -> str:
        return "texts"

    @property
    def trained_on(self) -> str:
        return "texts and their labels"

    def packer(self, dataset: Dataset, static: bool) -> LabelledTexts:
        assert isinstance(dataset, TokenDataset)
        return self.labelled(dataset.stores, self.weights, **self.packing(static))

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        return self.packer(dataset, static)

    def encode(self, run: RunDir, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """The tokens of texts as the model reads them, and which texts were truncated."""
        recipe = self.recipe
        return encode_side(
            run.tokenizers[0],
            texts,
            tag=corpora(recipe.data)[0].source_tag,
            max_len=ContextBudget.of(recipe).source,
            lowercase=recipe.data.lowercase,
            prefix=prefix_ids(recipe),
        )

    def batches(self, run: RunDir, inputs: Sequence[Any], labels: Sequence[Any] | None = None) -> Iterator[InputBatch]:
        tokens, truncated = self.encode(run, inputs)
        for group in sentence_batches(list(map(len, tokens)), batch_tokens(self.recipe)):
            chosen = None if labels is None else [labels[i] for i in group]
            batch = TextClassBatch.from_lists([tokens[i] for i in group], chosen)
            yield InputBatch(group, batch, frozenset(i for i in group if truncated[i]))

    def read_input(self, argument: str) -> str:
        return argument

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        return text_list("predict", given), isinstance(given, str)

    def show_input(self, index: int, given: Any) -> str:
        return str(given)
