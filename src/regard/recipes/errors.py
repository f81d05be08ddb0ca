"""Checking a recipe, and saying what is wrong with it.

Whatever is wrong is reported as one line that says where (file and line, or `--set`), what, and what is allowed,
because a settings error is the first thing a newcomer meets.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from regard.errors import UserError
from regard.recipes import foreign
from regard.recipes.schema import Recipe, families
from regard.recipes.to_toml import toml_value

Table = dict[str, Any]
Key = tuple[str | int, ...]  # ("data", "mix", 0, "weight") is data.mix[0].weight

LONGEST_VALUE = 60  # characters of a wrong value that a message repeats
ALLOWED = {  # by how pydantic's name of the fault begins
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text in quotes",
    "list": 'a list, such as ["a", "b"]',
    "tuple": "a list, such as [0.9, 0.98]",
}


@dataclass(frozen=True)
class SettingsLayer:
    """One place where settings were written: a built-in recipe, a file, or the command line."""

    name: str
    table: Table
    text: str = ""  # the TOML, to find line numbers in
    folder: str | None = None  # of a file given by its path
    sets: tuple[str, ...] = ()  # of the command line: section.key=value, as typed

    def where(self, key: Key) -> str:
        """`my.toml, line 3`, or `--set training.steps=-3`: what the user has to look at to mend `key`."""
        if self.sets:
            typed = [entry for entry in self.sets if _overlap(key_of(entry), _dotted(key))]
            return " ".join(f"--set {entry}" for entry in typed or self.sets)
        line = _line_of(key, self.text)
        return f"{self.name}, line {line}" if line else self.name


def complaint(text: str) -> UserError:
    """An error of one line, whatever line breaks a file name or a value in it has."""
    return UserError(re.sub(r"\s*[\r\n]\s*", " ", text))


def check(layers: Sequence[SettingsLayer], merge: Callable[[Sequence[SettingsLayer]], Table]) -> Recipe:
    """The recipe that the layers merge into, or a `UserError` that blames the layer which brought the fault in."""
    try:
        return Recipe.model_validate(merge(layers))
    except ValidationError:
        first, *others = _faults(merge(layers))
    # The layer to blame is the last one without which the fault would not be there.
    while len(layers) > 1 and _essence(first) in map(_essence, _faults(merge(layers[:-1]))):
        layers = layers[:-1]
    more = f" (and {len(others)} more)" if others else ""
    raise complaint(_explain(first, layers[-1]) + more)


class SettingFault(UserError):
    """A value that a setting cannot have."""

    def __init__(self, name: str, value: Any, rule: str) -> None:
        super().__init__(f"{name} = {value!r}: {rule}")
        self.name, self.value, self.rule = name, value, rule


def refuse_unknown(given: Iterable[str], known: Sequence[str], function: str) -> None:
    """Raise a TypeError for keywords that a Python function does not take, with the nearest and all that it takes."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{function}() has no keyword {name!r}: {hint}It takes {', '.join(known)}")


Section = TypeVar("Section", bound=BaseModel)


def changed(section: Section, changes: Mapping[str, Any], function: str, also: Sequence[str] = ()) -> Section:
    """A section with some settings changed, as keywords of a Python function that takes `also` others.

    An unknown keyword is a TypeError that lists those there are; a value that cannot be is a `SettingFault`.
    """
    refuse_unknown(changes, [*also, *type(section).model_fields], function)
    try:
        return type(section).model_validate({**section.model_dump(), **changes})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        rule = fault["msg"].replace("Input should be", "must be")
        raise SettingFault(".".join(map(str, fault["loc"])), fault["input"], rule) from None


def fields_at(sections: Sequence[str], family: str | None = None) -> dict[str, FieldInfo]:
    """The settings in a section: of () the recipe's, of ("data", "mix") a corpus's; none if it is not a section.

    Of ("model",) those of a family, or of all of them together.
    """
    if tuple(sections) == ("model",):
        kinds_of_model = [families()[family]] if family in families() else list(families().values())
        return {name: field for kind in kinds_of_model for name, field in kind.model_fields.items()}
    fields = Recipe.model_fields
    for section in sections:
        annotation = fields[section].annotation if section in fields else None
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        fields = next((kind.model_fields for kind in kinds if issubclass(kind, BaseModel)), {})
    return fields


def _faults(table: Table) -> list[ErrorDetails]:
    """Unknown keys first (they cause the rest), and no "missing" that only follows from another fault beside it."""
    try:
        Recipe.model_validate(table)
        return []
    except ValidationError as error:
        found = map(_without_family, error.errors(include_url=False))
        faults = sorted(found, key=lambda fault: fault["type"] != "extra_forbidden")
    hurt = {fault["loc"][:-1] for fault in faults if fault["type"] != "missing"}
    return [fault for fault in faults if fault["type"] != "missing" or fault["loc"][:-1] not in hurt]


def _without_family(fault: ErrorDetails) -> ErrorDetails:
    """Pydantic says model.gpt.width, after the settings it checked against; the user has written model.width."""
    loc = fault["loc"]
    if loc[:1] == ("model",) and len(loc) > 1 and loc[1] in families():
        fault["loc"] = (loc[0], *loc[2:])
        fault["ctx"] = {**fault.get("ctx", {}), "family": loc[1]}
    elif fault["type"] == "union_tag_invalid":
        fault["loc"] = (*loc, "family")
        given = fault["input"]
        fault["input"] = given["family"] if isinstance(given, dict) else given
    return fault


def _essence(fault: ErrorDetails) -> tuple[Any, ...]:
    """What two layers' faults have in common if they are the same one."""
    given = fault["input"]  # a section's content differs between layers even where its fault does not
    return fault["loc"], fault["msg"], None if isinstance(given, dict) else repr(given)


def _explain(fault: ErrorDetails, layer: SettingsLayer) -> str:
    """`my.toml, line 3: training.steps = -3: must be at least 1`."""
    key, kind, given = fault["loc"], fault["type"], fault["input"]
    if kind == "missing" and isinstance(key[-1], int):  # a pair with one entry
        key = key[:-1]
        rule = f"must have {len(given) + 1} entries"
    elif kind == "missing":
        what = f"the section [{_dotted(key)}]" if fields_at([str(part) for part in key]) else _dotted(key)
        return f"{layer.where(key)}: {what} is missing"
    elif kind == "extra_forbidden":
        return f"{layer.where(key)}: unknown key {_dotted(key)}{_nearest_key(key, fault)}"
    elif kind == "value_error":
        named = f"{_dotted(key)}: " if key else ""  # a rule between sections belongs to none of them
        return f"{layer.where(key)}: {named}{fault['ctx']['error']}"
    else:
        rule = _rule(fault)
    if _dotted(key) in map(key_of, layer.sets):  # then `where` shows key and value already
        return f"{layer.where(key)}: {rule}"
    value = toml_value(given)
    value = value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."
    return f"{layer.where(key)}: {_dotted(key)} = {value}: {rule}"


def _rule(fault: ErrorDetails) -> str:
    """What is allowed, in plain words."""
    limits = fault.get("ctx", {})
    match fault["type"]:
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}"
        case "greater_than":
            return f"must be more than {limits['gt']:g}"
        case "less_than_equal":
            return f"must be at most {limits['le']:g}"
        case "less_than":
            return f"must be less than {limits['lt']:g}"
        case "literal_error":
            return "must be " + limits["expected"].replace("'", "")
        case "union_tag_invalid":
            return "must be " + _or(list(families()))
        case "too_short":
            return f"must have at least {_entries(limits['min_length'])}"
        case "too_long":
            return f"must have at most {_entries(limits['max_length'])}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a section of its own, [{_dotted(fault['loc'])}]"
    for start, allowed in ALLOWED.items():
        if fault["type"].startswith(start):
            return f"must be {allowed}"
    return fault["msg"].replace("Input should be", "must be")


def _or(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]])


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _nearest_key(key: Key, fault: ErrorDetails) -> str:
    """`; did you mean training.steps?`: a like name in the same section, else the same or a like name in another."""
    *section, last = (str(part) for part in key if not isinstance(part, int))
    family = fault.get("ctx", {}).get("family")
    if ours := _foreign(last, family):
        units = f" ({foreign.UNITS[ours[0]]})" if ours[0] in foreign.UNITS else ""
        return f"; did you mean {' and '.join(ours)}?{units}"
    if near := difflib.get_close_matches(last, fields_at(section, family), n=1):
        return f"; did you mean {'.'.join([*section, near[0]])}?"
    if owners := [name for name, kind in families().items() if section == ["model"] and last in kind.model_fields]:
        return f" of the {family} family; it is one of {' and '.join(owners)}"
    every = _every()
    if near := difflib.get_close_matches(last, every, n=1):
        return f"; did you mean {every[near[0]]}?"
    return "; regard recipes NAME shows every key"


def _every() -> dict[str, str]:
    """Every name of a section or setting, and where it first occurs: `{"steps": "training.steps", ...}`."""
    every: dict[str, str] = {}
    for name in Recipe.model_fields:
        every.setdefault(name, name)
        for inner in fields_at([name]):
            every.setdefault(inner, f"{name}.{inner}")
    return every


def _foreign(name: str, family: str | None) -> list[str]:
    """Our settings (or options of the command line) for what another toolkit calls so, in [model] of this family."""
    ours = [setting.partition(".") for setting in foreign.SETTINGS.get(name.lower().replace("-", "_"), [])]
    return [section + dot + inner for section, dot, inner in ours if not dot or inner in fields_at([section], family)]


def settings_called(option: str) -> list[str]:
    """The settings that somebody may mean who types `--lr` or `--batch-size`; none if there are no such."""
    name = option.lstrip("-").replace("-", "_")
    return [_every()[name]] if name in _every() else _foreign(name, None)


def _line_of(key: Key, text: str) -> int | None:
    """The line of the statement that first writes `key`, in TOML that is known to be valid.

    Every statement is given to the TOML parser by itself, which is right for every way to write a key, and linear.
    """
    table: Key = ()  # the one that the last [header] opened
    arrays: dict[Key, int] = {}  # entries so far of each array of tables
    for line, statement in _statements(text):
        found = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _opened(found, arrays)
            found = {}
        if table[: len(key)] == key or (table == key[: len(table)] and _has(found, key[len(table) :])):
            return line
    return None


# Strings (of several lines first) and comments hide brackets and line feeds; brackets hide line feeds.
_TOML_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""+|\'\'\'.*?\'\'\'+|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n', re.DOTALL
)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of valid TOML that are not blank, each with the number of its first line."""
    begin, line, depth = 0, 1, 0
    for token in _TOML_TOKEN.finditer(text + "\n"):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and depth == 0:
            statement = text[begin : token.start()]
            if statement.strip() and not statement.lstrip().startswith("#"):
                yield line, statement
            line += statement.count("\n") + 1
            begin = token.end()


def _opened(header: Table, arrays: dict[Key, int]) -> Key:
    """The key of the table that a [header] or an [[array]] entry opens; counts the latter in `arrays`."""
    key: Key = ()
    inner: Any = header
    while inner:
        ((part, inner),) = inner.items()
        key = (*key, part)
        if isinstance(inner, list):
            arrays[key] = arrays.get(key, 0) + 1
            inner = inner[0]
        if key in arrays:
            key = (*key, arrays[key] - 1)
    return key


def _has(table: Any, key: Key) -> bool:
    for part in key:
        if isinstance(part, int):
            if not isinstance(table, list) or part >= len(table):
                return False
        elif not isinstance(table, dict) or part not in table:
            return False
        table = table[part]
    return True


def _dotted(key: Key) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def key_of(entry: str) -> str:
    """`training.steps` of `training.steps = 5`."""
    return entry.partition("=")[0].strip()


def _overlap(typed: str, key: str) -> bool:
    """Whether one of two dotted keys is the other or lies within it."""
    return (key + ".").startswith((typed + ".", typed + "[")) or (typed + ".").startswith(key + ".")
