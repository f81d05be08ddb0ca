"""Classification of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from regard.arguments import text_list
from regard.data.corpora import TextPair, corpora, read_pairs
from regard.data.labelled import ClassIds, LabelledTexts, class_name
from regard.data.packing import BatchStream, sentence_batches
from regard.errors import UserError
from regard.models.bert import TextClassBatch
from regard.recipes.schema import Recipe
from regard.registry import TASKS
from regard.run_dir import RunDir
from regard.tasks.base import Dataset, TraceSpec
from regard.tasks.classes import ClassTask, InputBatch
from regard.tasks.text import TextTask, TokenDataset, batch_tokens
from regard.text import encode_side
from regard.text.encode import ContextBudget, prefix_ids


@TASKS.register("classification")
class ClassificationTask(ClassTask, TextTask):
    """Trains on pairs of a text and the name of its class; `training.batch_tokens` counts tokens of texts."""

    name = "classification"
    about = "name the class of a text"
    data = "pairs"
    sections = ("text",)
    usage = "'a sentence'"
    verbs = frozenset({"predict", "evaluate", "compare", "look", "draw", "explain", "bench", "export"})
    has_source = True
    trace = TraceSpec("classify")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if not recipe.text.shared:
            raise ValueError("classification reads one text: text.shared must be true (classes have no vocabulary)")
        if any(corpus.target_tag for corpus in corpora(recipe.data)):
            raise ValueError("target_tag is a tag of texts, and the targets of classification are classes")

    def held_out(self, split: str) -> list[TextPair]:
        return [(text, class_name(name)) for text, name in super().held_out(split)]

    @property
    def members(self) -> str:
        return "texts"

    def class_names(self) -> list[str]:
        pairs = (pair for corpus in corpora(self.recipe.data) for pair in read_pairs(corpus, self.recipe.data))
        names = sorted({class_name(name) for text, name in pairs if text.strip() and name.strip()})
        if len(names) < 2:
            only = f"all are {names[0]!r}" if names else "there is none"
            raise UserError(f"the training data need at least two classes, and {only}")
        return names

    def target_encoder(self, run: RunDir) -> ClassIds:
        return ClassIds(run.classes)

    def packer(self, dataset: Dataset, static: bool) -> LabelledTexts:
        assert isinstance(dataset, TokenDataset)
        settings = self.recipe.training
        return LabelledTexts(
            dataset.stores,
            self.weights,
            target_budget=settings.batch_tokens,
            seed=settings.seed,
            pool=settings.sort_buffer,
            static=static,
        )

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        return self.packer(dataset, static)

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

    def batches(self, run: RunDir, inputs: Sequence[Any], labels: Sequence[int] | None = None) -> Iterator[InputBatch]:
        tokens, truncated = self.encode(run, inputs)
        for group in sentence_batches(list(map(len, tokens)), batch_tokens(self.recipe)):
            classes = None if labels is None else [labels[i] for i in group]
            batch = TextClassBatch.from_lists([tokens[i] for i in group], classes)
            yield InputBatch(group, batch, frozenset(i for i in group if truncated[i]))

    def read_input(self, argument: str) -> str:
        return argument

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        return text_list("predict", given), isinstance(given, str)

    def show_input(self, index: int, given: Any) -> str:
        return str(given)
