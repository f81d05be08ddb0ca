"""The interface of all tasks."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe

_DATA = {"pairs": "pairs", "text": "plain text"}  # kinds of data in messages
Output = Literal["sequence", "fills", "class"]


@dataclass(frozen=True)
class TraceSpec:
    """What a trace of a model shows, as plain data, so that tasks do not import `interpret`.

    `kind` is the name of the task in a trace's header (`model.task`), which pictures and the page read. `input_sides`
    are the token sides of a trace that hold what the model reads: "source", "inputs" or both. `joined` says that input
    and output are one sequence in which every position predicts the next (a language model). `has_alignment`: words of
    the output can be aligned with words of the source.
    """

    kind: str
    input_sides: tuple[str, ...] = ("source",)
    joined: bool = False
    has_alignment: bool = False


class Task(ABC):
    """What a model is trained for. One instance serves one recipe.

    The attributes answer what other modules want to know of a run; nothing outside `models`, `tasks`, `recipes` and
    `interop` needs to know the model family or the kind of the data.
    """

    name: ClassVar[str]  # the value of `recipe.task`
    about: ClassVar[str]  # one line for help texts
    data: ClassVar[str]  # the kind of data that it trains on, as `recipe.data.kind` has it: "pairs", "text", ...
    measures: ClassVar[tuple[str, ...]]  # what `training.best` may name
    verb: ClassVar[str]  # the command that uses a trained model, which is also the method of `regard.Model`
    usage: ClassVar[str]  # an example of the arguments after `regard VERB RUN`
    verbs: ClassVar[frozenset[str]]  # all commands that apply to a run of this task
    has_source: ClassVar[bool]  # whether an example is a pair (source, target) of texts; if not, `source` is empty
    output: ClassVar[Output]  # a sequence of tokens, guesses for masked tokens of the input, or a class
    scores_pairs: ClassVar[bool]  # whether a model gives (source, target) a log-probability
    trace: ClassVar[TraceSpec | None]  # None: its models cannot be traced

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def members(self) -> str:
        """What the data are made of, in messages: "pairs", "documents", "lines"."""
        if self.data != "text":
            return self.data
        return "lines" if self.recipe.data.documents == "stream" else "documents"

    @property
    def trained_on(self) -> str:
        """What the data are, in messages: "pairs", "plain text"."""
        return _DATA.get(self.data, self.data)

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Raise a ValueError if other settings do not suit the task."""
        if cls.name not in recipe.model.tasks:
            suited = " or ".join(recipe.model.tasks)
            raise ValueError(f'task = "{cls.name}" is not one of the {recipe.model.family} family, which does {suited}')
        if recipe.data.kind != cls.data:
            given, needed = (_DATA.get(kind, kind) for kind in (recipe.data.kind, cls.data))
            raise ValueError(f'task = "{cls.name}" trains on {needed}, and the data are {given}')
        if recipe.training.best not in cls.measures:
            choices = " or ".join(f'"{measure}"' for measure in cls.measures)
            raise ValueError(
                f'training.best = "{recipe.training.best}" needs another task; for {cls.name} it is {choices}'
            )
