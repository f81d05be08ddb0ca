"""The interface of all tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from regard.data.stream import BatchStream
from regard.data.vocabulary import learn_tokenizers
from regard.errors import UserError
from regard.models import SequenceModel
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.tasks.validator import Validator
from regard.text import Tokenizer

_DATA = {"pairs": "pairs", "text": "plain text", "graph": "a graph"}  # kinds of data in messages
Output = Literal["sequence", "fills", "class", "numbers"]
Explained = Literal["translation", "continuation", "class", "masks", "image class"]


@dataclass(frozen=True)
class TraceSpec:
    """The contents of a trace of a model, as plain data, so that tasks do not import `interpret`.

    `kind` is the name of the task in a trace's header (`model.task`), which pictures and the page read. `input_sides`
    are the token sides of a trace that hold what the model reads: "source", "inputs" or both. `joined` says that input
    and output are one sequence in which every position predicts the next (a language model). `has_alignment`: words of
    the output can be aligned with words of the source.
    """

    kind: str
    input_sides: tuple[str, ...] = ("source",)
    joined: bool = False
    has_alignment: bool = False


class Dataset(ABC):
    """The training examples of a recipe, ready to be made into batches."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of the contents: a resumed run has to find the same."""


class Task(ABC):
    """The purpose of a model. One instance serves one recipe.

    Methods that need the tokenizers of a run take its run directory. The attributes are what other modules read of
    a run: nothing outside `models`, `tasks`, `recipes` and `interop` depends on the model family or the kind of data.
    """

    name: str  # the value of `recipe.task`
    about: str  # one line for help texts
    data: str  # the kind of data that it trains on, as `recipe.data.kind` has it: "pairs", "text", ...
    measures: tuple[str, ...]  # what `training.best` may name
    sections: tuple[str, ...] = ("text", "decoding")  # sections of a recipe that have an effect
    verb: str  # the command that uses a trained model, which is also the method of `regard.Model`
    usage: str  # an example of the arguments after `regard VERB RUN`
    builtin_usage: str | None = None  # the same for a run on a built-in corpus, for which the user has no files
    verbs: frozenset[str]  # all commands that apply to a run of this task
    has_source: bool  # whether the input is the first of a pair of texts; if not, the first is empty
    has_labels = False  # whether the second of a pair is a label, such as a class, not a text
    output: Output  # a sequence of tokens, guesses for masked tokens of the input, a class, or numbers
    scores_pairs: bool  # whether a model gives (source, target) a log-probability
    trace: TraceSpec | None  # None: its models cannot be traced
    explained: Explained | None = None  # what `regard explain` explains; None: it is not for this task
    targets = "tokens"  # what `Batch.num_targets` counts, in reports of speed

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def require_verb(self, verb: str, run: Path) -> None:
        """Raise a UserError if a command does not apply to runs of this task."""
        if verb not in self.verbs:
            *names, last = sorted(self.verbs)
            trained = f"{run}, which was trained for {self.name}"
            raise UserError(f"`regard {verb}` does not apply to {trained}: use {', '.join(names)} or {last}")

    @property
    def members(self) -> str:
        """The unit of the data in messages: "pairs", "documents", "lines"."""
        if self.data != "text":
            return self.data
        return "lines" if self.recipe.data.documents == "stream" else "documents"

    @property
    def trained_on(self) -> str:
        """The kind of the data in messages: "pairs", "plain text"."""
        return _DATA.get(self.data, self.data)

    @property
    def example_usage(self) -> str:
        """Arguments after `regard VERB RUN` that work for this run, where that is possible."""
        builtin = self.builtin_usage if self.recipe.data.corpus is not None else None
        return builtin or self.usage

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Raise a ValueError if other settings do not suit the task."""
        if cls.name not in recipe.model.tasks:
            suited = " or ".join(recipe.model.tasks)
            raise ValueError(f'task = "{cls.name}" is not for this {recipe.model.family} model, which is for {suited}')
        if recipe.data.kind != cls.data:
            given, needed = (_DATA.get(kind, kind) for kind in (recipe.data.kind, cls.data))
            raise ValueError(f'task = "{cls.name}" needs {needed}, but the data are {given}')
        if recipe.training.best not in cls.measures:
            choices = " or ".join(f'"{measure}"' for measure in cls.measures)
            raise ValueError(
                f'training.best = "{recipe.training.best}" is not measured for {cls.name}: it must be {choices}'
            )

    def class_names(self) -> list[str]:
        """The names of the classes, in the order of their ids; none unless `output` is "class"."""
        return []

    def same_outputs(self, other: Recipe) -> bool:
        """Whether outputs are the same kind of text as those of another recipe, so that its vocabulary suits them."""
        return True

    def feature_names(self) -> list[str]:
        """The names of the features of nodes, in the order of their ids; none unless the data are graphs."""
        return []

    def scales(self) -> list[tuple[float, float]]:
        """Mean and standard deviation of each number in the training data; none unless `output` is "numbers"."""
        return []

    def examples(self) -> list[str]:
        """Inputs to begin with, for the page; none where inputs are texts."""
        return []

    # -- data ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def check_files(self, resumed: bool) -> list[str]:
        """Raise a UserError if a file is missing; return lines that say what was detected in the files."""

    @abstractmethod
    def held_out(self, split: str) -> list[Any]:
        """The examples of a held-out split, "valid" or "test"."""

    @abstractmethod
    def digest(self, examples: Sequence[Any]) -> str:
        """A digest of held-out examples: a resumed run has to find the same."""

    def learn_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Learn the vocabularies of sources and targets from the training data."""
        return learn_tokenizers(self.recipe, labels=self.has_labels)

    @abstractmethod
    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Dataset:
        """The training examples. `progress` is called with a name and the examples read; `say` with warnings."""

    @abstractmethod
    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        """The training batches, of constant shapes if `static`. `batch.num_targets` is what the loss is divided by."""

    @abstractmethod
    def describe_batch(self, run: RunDir, batch: Any) -> list[dict[str, Any]]:
        """The examples of a batch as JSON, for a report of what went wrong with it."""

    @abstractmethod
    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        """Describe the training data in lines for the log."""

    # -- measuring ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> Validator:
        """Measures a model on held-out examples, again and again in the course of training."""

    @abstractmethod
    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        """The work of a benchmark in words, and a function that does it and counts the output tokens."""
