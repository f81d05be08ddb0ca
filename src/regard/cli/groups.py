"""Groups of options: dataclasses whose fields are options, so that a verb takes a few parameters instead of thirty."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from regard.cli import options


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Let parameters of a verb be groups: on the command line, each of their fields is an option of its own."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        parameters += _options(groups[name]) if name in groups else [_option(name, hints[name], parameter.default)]

    @wraps(verb)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_option(field.name, hints[field.name], field.default) for field in fields(group)]


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    weights: options.Weights = "best"
    device: options.Device = "auto"
    precision: options.Precision = "auto"
    threads: options.Threads = None

    def settings(self) -> dict[str, Any]:
        """The arguments of `api.load`; the threads are set already."""
        return {"weights": self.weights, "device": self.device, "precision": self.precision}


@dataclass(frozen=True)
class ScoreOptions:
    """How held-out data are translated, and how translations are scored."""

    beam: options.Beam = None
    length_penalty: options.LengthPenalty = None
    lowercase: options.Lowercase = False
    moses: options.Moses = None
    moses_reference: options.MosesReference = None

    def decoding(self) -> dict[str, object]:
        """The decoding settings that were given."""
        return options.changed(beam=self.beam, length_penalty=self.length_penalty)

    def given(self) -> dict[str, object]:
        """The options that were given, for `options.refuse`."""
        return options.changed(**vars(self) | {"lowercase": self.lowercase or None})


@dataclass(frozen=True)
class PairFileOptions:
    """Files of held-out pairs, in place of a split of the run's data, and where those data are."""

    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of a split: source sentences, with --reference.")
    ] = None
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Reference translations of --source, line by line.")
    ] = None
    data: options.Data = None
