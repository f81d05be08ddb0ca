"""The common part of tasks from feature vectors to texts: examples, batches, validation, decoding."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.corpora import corpora, describe
from regard.data.features import Example, FeaturePacker, FeatureStore, held_out_examples, training_examples
from regard.data.packing import sentence_batches
from regard.data.stream import BatchStream
from regard.data.vocabulary import sample, tags_of
from regard.decoding import Hypothesis
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import FeatureBatch
from regard.recipes.schema import Corpus
from regard.run_dir import RunDir
from regard.tasks.axes import EXAMPLE, EXAMPLES, Hidden, Inspection
from regard.tasks.base import Dataset, Output, Task
from regard.tasks.text import batch_tokens, check_files
from regard.tasks.text_writer import TextWriter
from regard.tasks.translator import Answer
from regard.tasks.validator import OutputValidator, text_scores
from regard.text import BOS, UNK, Tokenizer, encode_side, split_at_word, train

Features = npt.NDArray[Any]  # [n, F]


@dataclass(frozen=True)
class FeatureDataset(Dataset):
    """The feature vectors and tokens of a recipe's corpora."""

    stores: list[FeatureStore]

    @property
    def digest(self) -> str:
        return "".join(store.digest for store in self.stores)


class FeatureTextTask(Task):
    """A task whose examples are pairs of an input, which the model reads as feature vectors, and a text.

    A subclass defines how inputs become features. What `training_examples` reads from a manifest is the name of a file.
    """

    measures: tuple[str, ...] = ("loss", "bleu", "exact")
    has_source = False
    rows = "rows of features"  # name of the rows of an input, for messages
    output: Output = "sequence"
    scores_pairs = False
    scale = 1.0  # what stored features are multiplied with
    writer_class: type[TextWriter] = TextWriter  # how outputs are searched for
    prompt_settings: tuple[str, ...] = ()  # settings of a writer that are not those of [decoding]

    @abstractmethod
    def read_input(self, argument: str) -> Any:
        """The input that a file holds; a UserError if it does not."""

    @abstractmethod
    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        """The inputs that an argument of `regard.Model` stands for, and whether it is a single one."""

    @abstractmethod
    def inspect(self, given: Any) -> Inspection:
        """An input as the model reads it: its features [n, F], and what the rows of the encoded source are."""

    @abstractmethod
    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """The same input without some of its elements."""

    def read_argument(self, argument: str) -> Any:
        """The input that an argument of the command line stands for: a file, or an example such as "test 3"."""
        found = EXAMPLE.fullmatch(argument.strip())
        if found is None:
            return self.read_input(argument)
        split, number = found[1], int(found[2])
        examples = self.held_out_examples(split)
        if not 1 <= number <= len(examples):
            raise UserError(f"there is no example {argument.strip()!r}: {split} has {len(examples)}, counted from 1")
        return self._read(examples[number - 1 : number], f"{split} {number}")[0][0]

    def examples(self) -> list[str]:
        """Inputs to begin with, for the page."""
        return [f"test {n}" for n in range(1, EXAMPLES + 1)]

    @abstractmethod
    def stored_features(self, given: Any) -> Features:
        """The features [n, F] of an input, as they are stored: before they are multiplied with `scale`."""

    @abstractmethod
    def show_input(self, index: int, given: Any) -> str:
        """A held-out input in words, for the samples of a validation."""

    def features(self, given: Any) -> Features:
        """The features [n, F] of an input, in float32, as the model reads them."""
        with torch.autocast("cpu", enabled=False):  # validation in bf16 computes them inside its context
            return self.stored_features(given).astype(np.float32) * np.float32(self.scale)

    def stored_parts(self, given: Any) -> list[Features]:
        """The features of the parts in which an input is read, as they are stored: usually one."""
        return [self.stored_features(given)]

    def parts(self, given: Any) -> list[Features]:
        """The features of the parts of an input, in float32, as the model reads them."""
        return [part.astype(np.float32) * np.float32(self.scale) for part in self.stored_parts(given)]

    def write(
        self,
        write: TextWriter,
        inputs: Sequence[Any],
        *,
        nbest: int = 1,
        first: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Write the texts of inputs, of which the first has the number `first`; those of parts are joined."""
        parts = [self.parts(given) for given in inputs]
        if all(len(each) == 1 for each in parts):
            return write([part for (part,) in parts], nbest=nbest, first=first, progress=progress)
        if nbest > 1:
            raise UserError("an input that is read in several parts has one text: nbest must be 1")
        written = iter(write([part for each in parts for part in each], first=first))
        answers = [join_answers([next(written) for _ in each]) for each in parts]
        if progress is not None:
            progress(len(inputs))
        return answers

    def scores(self, outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Scores of outputs: fields of `Validation`."""
        return text_scores(outputs, references)

    # -- data ---------------------------------------------------------------------------------------------------------

    def training_examples(self, corpus: Corpus) -> list[Example]:
        """The training examples of one corpus; an input may be the name of a file."""
        return training_examples(corpus, self.recipe.data)

    def held_out_examples(self, split: str) -> list[Example]:
        """The examples of a held-out split; an input may be the name of a file."""
        return held_out_examples(self.recipe.data, split)

    def check_files(self, resumed: bool) -> list[str]:
        return check_files(self.recipe.data, resumed)

    def held_out(self, split: str) -> list[Example]:
        return self._read(self.held_out_examples(split), f"the {split} data")

    def digest(self, examples: Sequence[Any]) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for given, text in examples:
            for part in self.stored_parts(given):
                hashed.update(np.ascontiguousarray(part).data)
            hashed.update(text.encode())
        return hashed.hexdigest()

    def _read(self, examples: Sequence[Example], where: str) -> list[Example]:
        """Read the files of a manifest; the line is named if one cannot be read."""
        read = []
        for number, (given, text) in enumerate(examples, 1):
            try:
                read.append((self.read_input(given) if isinstance(given, str) else given, text))
            except UserError as error:
                raise UserError(f"{where}, example {number}: {error}") from error
        return read

    def learn_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Learn the vocabulary of the training texts."""
        recipe, data = self.recipe, self.recipe.data
        texts = (("", text) for corpus in corpora(data) for _, text in self.training_examples(corpus))
        if data.masked_word is not None:
            texts = (("", "".join(split_at_word(text, data.masked_word))) for _, text in texts)
        drawn = (text for _, text in sample(texts, recipe.text.sample, seed=1))
        both = train(drawn, recipe.text.unit, recipe.text.vocabulary, tags_of(recipe)[1])
        return both, both

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> FeatureDataset:
        return FeatureDataset([self._store(run, corpus) for corpus in corpora(self.recipe.data)])

    def _store(self, run: RunDir, corpus: Any) -> FeatureStore:
        examples = self._read(self.training_examples(corpus), describe(corpus))
        targets, _ = self.encode_texts(run, [text for _, text in examples])
        fits = [i for i, target in enumerate(targets) if len(target) <= self.recipe.data.max_length]
        if not fits:
            raise UserError(f"{describe(corpus)}: no {self.members} of at most {self.recipe.data.max_length} tokens")
        features = [self.stored_features(examples[i][0]) for i in fits]
        dropped = len(examples) - len(fits)
        store = FeatureStore.of_features(features, [targets[i] for i in fits], self.scale, dropped)
        return replace(store, masked_label=self.masked_label)

    def encode_texts(self, run: RunDir, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """The tokens of texts, EOS last, and which texts were truncated."""
        recipe = self.recipe
        tag = corpora(recipe.data)[0].target_tag
        return encode_side(
            run.tokenizers[1],
            texts,
            tag=tag,
            max_len=recipe.model.max_positions,
            lowercase=recipe.data.lowercase,
            masked_word=recipe.data.masked_word,
        )

    @property
    def masked_label(self) -> int | None:
        """The token whose loss is masked, if there is one."""
        return None if self.recipe.data.masked_word is None else UNK

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        return self.packer(dataset, static)

    def packer(self, dataset: Dataset, static: bool) -> FeaturePacker:
        """The packed batches."""
        assert isinstance(dataset, FeatureDataset)
        settings = self.recipe.training
        return FeaturePacker(
            dataset.stores,
            [corpus.weight for corpus in corpora(self.recipe.data)],
            target_budget=settings.batch_tokens,
            seed=settings.seed,
            pool=settings.sort_buffer,
            static=static,
            pair_cost=1 / (6 * self.recipe.model.width),
        )

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        assert isinstance(dataset, FeatureDataset)
        packer, counts = self.packer(dataset, static), [store.report for store in dataset.stores]
        kept, dropped = sum(c.pairs for c in counts), sum(c.dropped_long for c in counts) + packer.dropped_long
        long = f", {dropped:,} over-long dropped" if dropped else ""
        budgets = f"{packer.target_budget:,} tokens and {packer.source_budget:,} {self.rows}"
        return [
            f"data: {kept - packer.dropped_long:,} {self.members}{long}; vocabulary {len(run.tokenizers[1]):,}",
            f"batches: up to {budgets}",
        ]

    def describe_batch(self, run: RunDir, batch: Any) -> list[dict[str, Any]]:
        texts = batch.inputs.layout.split(batch.labels)
        pairs = zip(batch.source.layout.split(batch.source.values), texts, strict=True)
        return [{"features": a.tolist(), "target": run.tokenizers[1].decode(b.tolist())} for a, b in pairs]

    # -- measuring ----------------------------------------------------------------------------------------------------

    def batches(self, run: RunDir, examples: Sequence[Example]) -> list[tuple[list[int], FeatureBatch]]:
        """Batches for teacher forcing, each with the indices of its examples."""
        features = [self.features(given) for given, _ in examples]
        targets, _ = self.encode_texts(run, [text for _, text in examples])
        lengths = [max(len(f), len(t)) for f, t in zip(features, targets, strict=True)]
        groups = sentence_batches(lengths, batch_tokens(self.recipe))

        def batch(group: list[int]) -> FeatureBatch:
            sources, texts = [features[i] for i in group], [targets[i] for i in group]
            return FeatureBatch.from_lists(sources, texts, bos=BOS, masked_label=self.masked_label)

        return [(group, batch(group)) for group in groups]

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> FeatureTextValidator:
        return FeatureTextValidator(self, run, examples, device)

    def writer(self, run: RunDir, model: SequenceModel, **changes: Any) -> TextWriter:
        """Make a writer with the recipe's decoding settings and these changes."""
        settings = self.recipe.decoding.model_copy(update=changes)
        return self.writer_class.for_recipe(model, run.tokenizers[1], self.recipe, settings)

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        write, features = self.writer(run, model), [self.features(given) for given in inputs]

        def tokens() -> int:
            best = [answer.hypotheses[0] for answer in write(features) if answer.hypotheses]
            return sum(len(hypothesis.tokens) + hypothesis.finished for hypothesis in best)

        return self.members, tokens


def join_answers(answers: Sequence[Answer]) -> Answer:
    """One answer for the best texts of the parts of an input; its score is their sum."""
    best = [answer.hypotheses[0] for answer in answers]
    tokens = tuple(chain.from_iterable(hypothesis.tokens for hypothesis in best))
    logprobs = tuple(chain.from_iterable(hypothesis.logprobs for hypothesis in best))
    score, finished = sum(hypothesis.score for hypothesis in best), all(hypothesis.finished for hypothesis in best)
    text = " ".join(filter(None, (answer.text for answer in answers)))
    return Answer((text,), (Hypothesis(tokens, logprobs, score, finished),))


class FeatureTextValidator(OutputValidator):
    """The loss of the references, and scores of greedy outputs."""

    def __init__(self, task: FeatureTextTask, run: RunDir, examples: Sequence[Example], device: torch.device) -> None:
        super().__init__(task.recipe, device)
        self.task, self.run, self.examples = task, run, list(examples)
        self.references = [text for _, text in self.examples]

    @cached_property
    def _batches(self) -> Sequence[FeatureBatch]:
        return [batch.to(self.device) for _, batch in self.task.batches(self.run, self.examples)]

    @cached_property
    def _features(self) -> list[Features]:
        """The features of the examples that are decoded, which may be slow to compute."""
        return [self.task.features(given) for given, _ in self.examples[: self.recipe.training.validate_lines]]

    def _inputs(self, count: int) -> Sequence[Features]:
        return self._features[:count]

    def _writer(self, model: SequenceModel) -> TextWriter:
        return self.task.writer(self.run, model, method="beam", beam=1)

    def _show(self, index: int) -> str:
        return self.task.show_input(index, self.examples[index][0])

    def _scores(self, outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return self.task.scores(outputs, references)
