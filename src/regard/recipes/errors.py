"""Check a recipe, and report what is invalid.

An error is one line that says where it is (file and line, or `--set`), what it is, and which values are allowed.
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

MAX_VALUE_CHARS = 60  # maximum length of an invalid value in a message
ALLOWED = {  # by the start of the type of a pydantic error
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text in quotes",
    "list": 'a list, such as ["a", "b"]',
    "tuple": "a list, such as [0.9, 0.98]",
}


@dataclass(frozen=True)
class SettingsLayer:
    """One source of settings: a built-in recipe, a file, or the command line."""

    name: str
    table: Table
    text: str = ""  # the TOML, in which line numbers are found
    folder: str | None = None  # the folder of a file that was given by path
    sets: tuple[str, ...] = ()  # for the command line: section.key=value, as typed

    def where(self, key: Key) -> str:
        """The place where `key` was set: `my.toml, line 3`, or `--set training.steps=-3`."""
        if self.sets:
            typed = [entry for entry in self.sets if _overlap(key_of(entry), _dotted(key))]
            return " ".join(f"--set {entry}" for entry in typed or self.sets)
        line = _line_of(key, self.text)
        return f"{self.name}, line {line}" if line else self.name


def one_line_error(text: str) -> UserError:
    """Make an error of one line: replace the line breaks that a file name or a value may contain."""
    return UserError(re.sub(r"\s*[\r\n]\s*", " ", text))


def check(layers: Sequence[SettingsLayer], merge: Callable[[Sequence[SettingsLayer]], Table]) -> Recipe:
    """Merge the layers into a recipe; a `UserError` names the layer that causes it."""
    try:
        return Recipe.model_validate(merge(layers))
    except ValidationError:
        first, *others = _faults(merge(layers))
    # The cause is the last layer without which the error would not occur.
    while len(layers) > 1 and _identity(first) in map(_identity, _faults(merge(layers[:-1]))):
        layers = layers[:-1]
    more = f" (and {len(others)} more)" if others else ""
    raise one_line_error(_explain(first, layers[-1]) + more)


class SettingFault(UserError):
    """An invalid value of a setting."""

    def __init__(self, name: str, value: Any, rule: str) -> None:
        super().__init__(f"{name} = {value!r}: {rule}")
        self.name, self.value, self.rule = name, value, rule


def refuse_unknown(given: Iterable[str], known: Sequence[str], function: str) -> None:
    """Raise a TypeError for an unknown keyword of a Python function; it names the most similar one and all others."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{function}() has no keyword {name!r}: {hint}It takes {', '.join(known)}")


Section = TypeVar("Section", bound=BaseModel)


def changed(section: Section, changes: Mapping[str, Any], function: str, also: Sequence[str] = ()) -> Section:
    """Return a section with some settings changed, given as keywords of a Python function.

    An unknown keyword is a TypeError that lists the settings and `also`, the other keywords of the function; an invalid
    value is a `SettingFault`.
    """
    refuse_unknown(changes, [*also, *type(section).model_fields], function)
    try:
        return type(section).model_validate({**section.model_dump(), **changes})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        rule = fault["msg"].replace("Input should be", "must be")
        raise SettingFault(".".join(map(str, fault["loc"])), fault["input"], rule) from None


def fields_at(sections: Sequence[str], family: str | None = None) -> dict[str, FieldInfo]:
    """The settings of a section: those of the recipe for (), of a corpus for ("data", "mix"); none if there is no such.

    For ("model",), those of a family, or of all families together.
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
    """The errors of a table: unknown keys first, and no missing key of a section that has another error, its cause."""
    try:
        Recipe.model_validate(table)
        return []
    except ValidationError as error:
        errors = map(_without_family, error.errors(include_url=False))
        faults = sorted(errors, key=lambda fault: fault["type"] != "extra_forbidden")
    affected = {fault["loc"][:-1] for fault in faults if fault["type"] != "missing"}
    return [fault for fault in faults if fault["type"] != "missing" or fault["loc"][:-1] not in affected]


def _without_family(fault: ErrorDetails) -> ErrorDetails:
    """Turn pydantic's model.gpt.width, which names the family, into model.width."""
    key = fault["loc"]
    if key[:1] == ("model",) and len(key) > 1 and key[1] in families():
        fault["loc"] = (key[0], *key[2:])
        fault["ctx"] = {**fault.get("ctx", {}), "family": key[1]}
    elif fault["type"] == "union_tag_invalid":
        fault["loc"] = (*key, "family")
        given = fault["input"]
        fault["input"] = given["family"] if isinstance(given, dict) else given
    return fault


def _identity(fault: ErrorDetails) -> tuple[Any, ...]:
    """A key that is equal for the same error in two merges of layers."""
    given = fault["input"]  # the content of a section may differ between the merges
    return fault["loc"], fault["msg"], None if isinstance(given, dict) else repr(given)


def _explain(fault: ErrorDetails, layer: SettingsLayer) -> str:
    """`my.toml, line 3: training.steps = -3: must be at least 1`."""
    key, kind, given = fault["loc"], fault["type"], fault["input"]
    if kind == "missing" and isinstance(key[-1], int):  # a list of fixed length that is too short
        key = key[:-1]
        rule = f"must have {len(given) + 1} entries"
    elif kind == "missing":
        what = f"the section [{_dotted(key)}]" if fields_at([str(part) for part in key]) else _dotted(key)
        return f"{layer.where(key)}: {what} is missing"
    elif kind == "extra_forbidden":
        return f"{layer.where(key)}: unknown key {_dotted(key)}{_nearest_key(key, fault)}"
    elif kind == "value_error":
        named = f"{_dotted(key)}: " if key else ""  # a rule that concerns several sections has no key
        return f"{layer.where(key)}: {named}{fault['ctx']['error']}"
    else:
        rule = _rule(fault)
    if _dotted(key) in map(key_of, layer.sets):  # `where` already shows key and value
        return f"{layer.where(key)}: {rule}"
    value = toml_value(given)
    value = value if len(value) <= MAX_VALUE_CHARS else value[: MAX_VALUE_CHARS - 3] + "..."
    return f"{layer.where(key)}: {_dotted(key)} = {value}: {rule}"


def _rule(fault: ErrorDetails) -> str:
    """Describe the allowed values."""
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
            return f"must be a section, [{_dotted(fault['loc'])}]"
    for start, allowed in ALLOWED.items():
        if fault["type"].startswith(start):
            return f"must be {allowed}"
    return fault["msg"].replace("Input should be", "must be")


def _or(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]])


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _nearest_key(key: Key, fault: ErrorDetails) -> str:
    """Suggest a similar name in the same section, else one in another section: `; did you mean training.steps?`."""
    *section, last = (str(part) for part in key if not isinstance(part, int))
    family = fault.get("ctx", {}).get("family")
    if ours := _foreign(last, family):
        units = f" ({foreign.UNITS[ours[0]]})" if ours[0] in foreign.UNITS else ""
        return f"; did you mean {' and '.join(ours)}?{units}"
    if near := difflib.get_close_matches(last, fields_at(section, family), n=1):
        return f"; did you mean {'.'.join([*section, near[0]])}?"
    if owners := [name for name, kind in families().items() if section == ["model"] and last in kind.model_fields]:
        return f" of the {family} family; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
    keys = _all_keys()
    if near := difflib.get_close_matches(last, keys, n=1):
        return f"; did you mean {keys[near[0]]}?"
    return "; regard recipes NAME shows every key"


def _all_keys() -> dict[str, str]:
    """The dotted key of every section and setting, by name: `{"steps": "training.steps", ...}`; the first wins."""
    keys: dict[str, str] = {}
    for name in Recipe.model_fields:
        keys.setdefault(name, name)
        for inner in fields_at([name]):
            keys.setdefault(inner, f"{name}.{inner}")
    return keys


def _foreign(name: str, family: str | None) -> list[str]:
    """The settings, or options of the command line, that correspond to a name in another toolkit; for this family."""
    ours = [setting.partition(".") for setting in foreign.SETTINGS.get(name.lower().replace("-", "_"), [])]
    return [section + dot + inner for section, dot, inner in ours if not dot or inner in fields_at([section], family)]


def settings_called(option: str) -> list[str]:
    """The settings that an unknown option such as `--lr` or `--batch-size` may refer to."""
    name = option.lstrip("-").replace("-", "_")
    return [_all_keys()[name]] if name in _all_keys() else _foreign(name, None)


def _line_of(key: Key, text: str) -> int | None:
    """The line of the first statement that sets `key`, in valid TOML.

    Parses each statement separately with the TOML parser: this handles every way to write a key, in linear time.
    """
    table: Key = ()  # opened by the last [header]
    arrays: dict[Key, int] = {}  # number of entries so far of each array of tables
    for line, statement in _statements(text):
        parsed = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _opened(parsed, arrays)
            parsed = {}
        if table[: len(key)] == key or (table == key[: len(table)] and _has(parsed, key[len(table) :])):
            return line
    return None


# Brackets and line feeds in strings (multi-line ones are matched first) and comments do not count, nor do line feeds in
# brackets.
_TOML_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""+|\'\'\'.*?\'\'\'+|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n', re.DOTALL
)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the statements of valid TOML, each with the number of its first line."""
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
    """The key of the table that a [header] or an [[array]] entry opens; counts the entries in `arrays`."""
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
    """The key of `training.steps = 5`: `training.steps`."""
    return entry.partition("=")[0].strip()


def _overlap(typed: str, key: str) -> bool:
    """Whether two dotted keys are equal, or one contains the other."""
    return (key + ".").startswith((typed + ".", typed + "[")) or (typed + ".").startswith(key + ".")
