"""From names, TOML files and `--set` to a checked `Recipe`, and back to TOML.

A recipe is a stack of layers: the recipes it extends, oldest first, then the one that was named, then `--set`. Later
layers win. Whatever is wrong is reported as one line that says where (file and line, or `--set`), what, and what is
allowed, because a settings error is the first thing a newcomer meets.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from regard.errors import UserError
from regard.recipes.schema import PRESETS, Recipe

Table = dict[str, Any]
Key = tuple[str | int, ...]  # ("data", "mix", 0, "weight") is data.mix[0].weight

# Ways to name the training data that exclude each other: a layer that takes one lets go of the inherited others.
KINDS_OF_DATA = ({"corpus"}, {"pairs"}, {"source", "target"}, {"mix"})
NAMES_OF_FILES = {"source", "target", "pairs", "mix", "valid", "test"}
LIST_THEM = "regard recipes lists them"


# ---------------------------------------------------------------------------------------------------------------------
# Loading


@dataclass(frozen=True)
class Layer:
    """One place where settings were written: a built-in recipe, a file, or the command line."""

    name: str
    table: Table
    text: str = ""  # the TOML, to find line numbers in
    folder: str | None = None  # of a file given by its path
    sets: tuple[str, ...] = ()  # of the command line: section.key=value, as typed

    def where(self, key: Key) -> str:
        """`my.toml, line 3`, or `--set training.steps=-3`: what the user has to look at to mend `key`."""
        if self.sets:
            dotted = _dotted(key)
            typed = [entry for entry in self.sets if _inside(entry.partition("=")[0].strip(), dotted)]
            return " ".join(f"--set {entry}" for entry in typed or self.sets)
        line = _line_of(key, self.text)
        return f"{self.name}, line {line}" if line else self.name


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name, or in that .toml file, with `section.key=value` overrides; or a one-line `UserError`.

        load("en-es", ["model.size=small", "training.steps=100"])

    A file may build on a built-in recipe or on another file with `extends = "en-es"` at its top. Three rules say what
    "later wins" means where settings belong together:

    - naming training data one way (corpus; pairs; source and target; mix) drops an inherited other way;
    - giving `model.size` drops inherited widths, layers and dropout: they belonged to the other size;
    - file names are looked up in `data.folder`. In a file, a relative folder is relative to that file, and if none is
      given, the folder of the file that names the data is taken, so that a recipe beside its data works from anywhere.
      In `--set`, a relative folder is relative to the current directory.
    """
    layers = _stack(name_or_path)
    _default_folder(layers)
    if overrides:
        layers.append(_from_command_line(overrides))
    return _check(layers)


def parse(text: str, name: str = "recipe.toml") -> Recipe:
    """The recipe that `to_toml` wrote, exactly: nothing is extended and no folder is filled in. For stored recipes."""
    return _check([Layer(name, _toml(text, name), text)])


def names() -> list[tuple[str, str]]:
    """The built-in recipes, by name, each with what it is for."""
    return [(name, str(_merge(_stack(name)).get("about", ""))) for name in sorted(_built_in())]


def _built_in() -> dict[str, Any]:
    files = resources.files("regard.recipes").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or os.sep in name


def _stack(name_or_path: str) -> list[Layer]:
    """The layers of a recipe: those it extends, oldest first, and itself last."""
    layers: list[Layer] = []
    seen: list[str] = []
    wanted, blame = name_or_path, ""
    while True:
        identity = os.path.realpath(wanted) if _is_path(wanted) else wanted
        if identity in seen:
            circle = " -> ".join(layer.name for layer in reversed(layers[: len(layers) - seen.index(identity)]))
            raise UserError(_one_line(f"{blame}extends goes round in a circle: {circle} -> {wanted}"))
        seen.append(identity)
        layer = _from_file(wanted, blame) if _is_path(wanted) else _from_package(wanted, blame)
        layers.insert(0, layer)
        if "extends" not in layer.table:
            return layers
        parent = layer.table.pop("extends")
        blame = f"{layer.where(('extends',))}: "
        if not isinstance(parent, str):
            raise UserError(_one_line(f"{blame}extends = {_value(parent)}: must be the name of one recipe, in quotes"))
        wanted = os.path.normpath(os.path.join(layer.folder or "", parent)) if _is_path(parent) else parent


def _from_package(name: str, blame: str) -> Layer:
    files = _built_in()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3)
        near += [other for other in sorted(files) if name and name in other and other not in near]
        near += [f"{name}.toml"] if os.path.isfile(f"{name}.toml") else []
        hint = f"did you mean {' or '.join(near)}? {LIST_THEM}" if near else LIST_THEM
        raise UserError(_one_line(f"{blame}unknown recipe {name!r}; {hint}"))
    text = files[name].read_text(encoding="utf-8")
    label = f"recipe {name}"
    return Layer(label, _toml(text, label), text)


def _from_file(path: str, blame: str) -> Layer:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(_one_line(f"{blame}{path}: no such file")) from None
    except IsADirectoryError:
        inside = os.path.join(path, "recipe.toml")
        hint = f"; its recipe is {inside}" if os.path.isfile(inside) else ""
        raise UserError(_one_line(f"{blame}{path}: a folder, not a recipe{hint}")) from None
    except OSError as error:
        raise UserError(_one_line(f"{blame}{path}: cannot be read ({error.strerror})")) from None
    except UnicodeDecodeError:
        raise UserError(_one_line(f"{blame}{path}: not a text file in UTF-8")) from None
    table, folder = _toml(text, path), os.path.dirname(path)
    _absolute_folder(table, folder)
    return Layer(path, table, text, folder=folder)


def _toml(text: str, name: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (.*)\)", str(error), flags=re.DOTALL)
        what, place = found.groups() if found else (str(error), "somewhere")
        raise UserError(_one_line(f"{name}, {place}: not valid TOML: {what[:1].lower()}{what[1:]}")) from None


def _from_command_line(overrides: Sequence[str]) -> Layer:
    """`section.key=value` strings as one layer, so that their order matters only where two give the same key."""
    table: Table = {}
    for entry in overrides:
        dotted, equals, raw = entry.partition("=")
        *sections, last = key = [part.strip() for part in dotted.split(".")]
        if not equals or not all(key):
            raise UserError(_one_line(f"--set {entry}: must look like section.key=value"))
        inner = table
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = _typed(raw.strip(), entry, wants_text=_takes_text(key))
    _absolute_folder(table, "")
    return Layer("--set", table, sets=tuple(overrides))


def _typed(raw: str, entry: str, wants_text: bool = False) -> Any:
    """A value from the command line: TOML, or a bare word. Shells eat quotes, so [a,b] is a list of bare words."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
        if parsed.keys() == {"value"} and (isinstance(parsed["value"], str) or not wants_text):
            return parsed["value"]
    except tomllib.TOMLDecodeError:
        if wants_text:
            return raw
        if raw.startswith("[") and raw.endswith("]"):
            return [_typed(item.strip(), entry) for item in raw[1:-1].split(",")]
        if raw.startswith(("[", "{", '"', "'")):
            raise UserError(_one_line(f"--set {entry}: the value is neither valid TOML nor a bare word")) from None
    return raw


def _takes_text(key: Sequence[str]) -> bool:
    """Whether the setting is free text, so that `data.folder=2024` is a name and not a number."""
    field = getattr(_settings_at(key[:-1]), "model_fields", {}).get(key[-1])
    return field is not None and str in (field.annotation, *get_args(field.annotation))


def _absolute_folder(table: Table, start: str) -> None:
    data = table.get("data")
    if isinstance(data, dict) and isinstance(data.get("folder"), str):
        data["folder"] = os.path.abspath(os.path.join(start, os.path.expanduser(data["folder"])))


def _default_folder(layers: list[Layer]) -> None:
    """Where no layer gives `data.folder`, the last file that names data gives its own; see `load`."""
    sections = [layer.table.get("data") for layer in layers]
    data = [section if isinstance(section, dict) else {} for section in sections]
    if layers[-1].folder is None or any("folder" in section for section in data):
        return
    naming = [
        layer for layer, section in zip(layers, data, strict=True) if any(section.get(key) for key in NAMES_OF_FILES)
    ]
    if naming:
        owner = next((layer for layer in reversed(naming) if layer.folder is not None), layers[-1])
        section = owner.table.setdefault("data", {})
        if isinstance(section, dict):
            section["folder"] = os.path.abspath(owner.folder or "")


def _merge(layers: Sequence[Layer]) -> Table:
    merged: Table = {}
    for layer in layers:
        _let_go(merged, layer.table)
        _update(merged, layer.table)
    return merged


def _let_go(merged: Table, newer: Table) -> None:
    """Drop the inherited settings that `newer` replaces as a group (see `load`)."""
    old, new = merged.get("data"), newer.get("data")
    if isinstance(old, dict) and isinstance(new, dict):
        taken = [kind for kind in KINDS_OF_DATA if any(new.get(key) for key in kind)]
        for kind in KINDS_OF_DATA:
            if taken and kind not in taken:
                _drop(old, kind)
    old, new = merged.get("model"), newer.get("model")
    if isinstance(old, dict) and isinstance(new, dict) and "size" in new:
        _drop(old, set().union(*PRESETS.values()))


def _drop(table: Table, keys: set[str]) -> None:
    for key in keys:
        table.pop(key, None)


def _update(merged: Table, newer: Table) -> None:
    for key, value in newer.items():
        if isinstance(value, dict):
            if not isinstance(merged.get(key), dict):
                merged[key] = {}
            _update(merged[key], value)
        else:
            merged[key] = value


# ---------------------------------------------------------------------------------------------------------------------
# Checking


def _check(layers: list[Layer]) -> Recipe:
    try:
        return Recipe.model_validate(_merge(layers))
    except ValidationError as error:
        first, *others = _faults(error)
    # The layer to blame is the last one without which the fault would not be there.
    while len(layers) > 1 and any(_same(first, fault) for fault in _faults_of(layers[:-1])):
        layers = layers[:-1]
    more = f" (and {len(others)} more)" if others else ""
    raise UserError(_one_line(_explain(first, layers[-1]) + more))


def _faults_of(layers: list[Layer]) -> list[ErrorDetails]:
    try:
        Recipe.model_validate(_merge(layers))
    except ValidationError as error:
        return _faults(error)
    return []


def _faults(error: ValidationError) -> list[ErrorDetails]:
    """Unknown keys first (they cause the rest), and no "missing" that only follows from another fault beside it."""
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    hurt = {fault["loc"][:-1] for fault in faults if fault["type"] != "missing"}
    return [fault for fault in faults if fault["type"] != "missing" or fault["loc"][:-1] not in hurt]


def _same(one: ErrorDetails, other: ErrorDetails) -> bool:
    def essence(fault: ErrorDetails) -> tuple[Any, ...]:
        given = fault["input"]  # a section's content differs between layers even where its fault does not
        return fault["loc"], fault["msg"], None if isinstance(given, dict) else repr(given)

    return essence(one) == essence(other)


def _explain(fault: ErrorDetails, layer: Layer) -> str:
    """`my.toml, line 3: training.steps = -3: must be at least 1`."""
    key, kind, given = fault["loc"], fault["type"], fault["input"]
    if kind == "missing" and isinstance(key[-1], int):  # a pair with one entry
        key = key[:-1]
        rule = f"must have {len(given) + 1} entries"
    elif kind == "missing":
        what = f"the section [{_dotted(key)}]" if _settings_at([str(part) for part in key]) else _dotted(key)
        return f"{layer.where(key)}: {what} is missing"
    elif kind == "extra_forbidden":
        return f"{layer.where(key)}: unknown key {_dotted(key)}{_nearest_key(key)}"
    elif kind == "value_error":
        return f"{layer.where(key)}: {_dotted(key)}: {fault['ctx']['error']}"
    else:
        rule = _rule(fault)
    typed = {entry.partition("=")[0].strip() for entry in layer.sets}  # then `where` has shown key and value already
    shown = "" if _dotted(key) in typed else f"{_dotted(key)} = {_shortened(_value(given))}: "
    return f"{layer.where(key)}: {shown}{rule}"


def _rule(fault: ErrorDetails) -> str:
    """What is allowed, in plain words."""
    limits = fault.get("ctx", {})
    match fault["type"]:
        case "greater_than_equal":
            return f"must be at least {_number(limits['ge'])}"
        case "greater_than":
            return f"must be more than {_number(limits['gt'])}"
        case "less_than_equal":
            return f"must be at most {_number(limits['le'])}"
        case "less_than":
            return f"must be less than {_number(limits['lt'])}"
        case "literal_error":
            return "must be " + limits["expected"].replace("'", "")
        case "too_short":
            return f"must have at least {_entries(limits['min_length'])}"
        case "too_long":
            return f"must have at most {_entries(limits['max_length'])}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a section of its own, [{_dotted(fault['loc'])}]"
    for start, allowed in (
        ("int", "a whole number"),
        ("float", "a number"),
        ("bool", "true or false"),
        ("string", "text in quotes"),
        ("list", 'a list, such as ["a", "b"]'),
        ("tuple", "a list, such as [0.9, 0.98]"),
    ):
        if fault["type"].startswith(start):
            return f"must be {allowed}"
    return fault["msg"].replace("Input should be", "must be")


def _number(limit: float) -> str:
    return f"{limit:g}"


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _nearest_key(key: Key) -> str:
    """`; did you mean training.steps?`: a like name in the same section, else the same or a like name in another."""
    *section, last = (str(part) for part in key if not isinstance(part, int))
    prefix = "".join(f"{part}." for part in section)
    every = list(_all_keys())
    if near := difflib.get_close_matches(last, getattr(_settings_at(section), "model_fields", {}), n=1):
        return f"; did you mean {prefix}{near[0]}?"
    leaves = [dotted.rpartition(".")[2] for dotted in every]
    if near := difflib.get_close_matches(last, leaves, n=1):
        return f"; did you mean {every[leaves.index(near[0])]}?"
    return "; regard recipes NAME shows every key"


def _settings_at(sections: Sequence[str]) -> type[BaseModel] | None:
    """The settings class of a section: () is the recipe, ("data", "mix") a corpus."""
    settings: type[BaseModel] | None = Recipe
    for section in sections:
        field = settings.model_fields.get(section) if settings else None
        settings = _settings_in(field.annotation) if field else None
    return settings


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _all_keys() -> Iterator[str]:
    for name in Recipe.model_fields:
        yield name
        section = _settings_at([name])
        yield from (f"{name}.{key}" for key in (section.model_fields if section else ()))


def _line_of(key: Key, text: str) -> int | None:
    """The line where `key` is first written: the end of the shortest beginning of the text that has it.

    Asking the TOML parser, rather than looking for the name, is right for every way to write a key.
    """
    lines, statement = text.split("\n"), 1
    for end in range(1, len(lines) + 1):
        try:
            table = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a statement of several lines
        if _has(table, key):
            return statement
        statement = end + 1
    return None


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


def _inside(dotted: str, key: str) -> bool:
    """Whether one of two dotted keys is the other or lies within it."""
    return (key + ".").startswith(dotted + ".") or (dotted + ".").startswith(key + ".") or key.startswith(dotted + "[")


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _one_line(text: str) -> str:
    return re.sub(r"\s*[\r\n]\s*", " ", text)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def describe(recipe: Recipe) -> str:
    """The whole recipe as TOML, with every setting's meaning beside it; `parse` reads back an equal recipe.

    Optional settings that are not set appear as comments, so that the text is also the list of what could be set.
    """
    parts = [_comment(recipe), "\n".join(_lines(recipe)), ""]
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        if isinstance(section, BaseModel):
            parts += [_comment(section), f"[{name}]", *_lines(section), ""]
            for key in type(section).model_fields:
                for table in _tables(getattr(section, key)):
                    parts += [f"[[{name}.{key}]]", *_lines(table, unset=False), ""]
    return "\n".join(parts)


to_toml = describe  # what a run keeps as recipe.toml


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Every setting in which two recipes differ: `{"training.steps": (100, 200)}`, in the schema's order."""
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    return {key: (one, other) for key, (one, other) in pairs.items() if one != other}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    flat: Table = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _comment(section: BaseModel) -> str:
    paragraph = (type(section).__doc__ or "").strip().split("\n\n")[0]
    return "\n".join(f"# {line.strip()}" for line in paragraph.splitlines())


def _tables(value: Any) -> list[BaseModel]:
    return [entry for entry in value if isinstance(entry, BaseModel)] if isinstance(value, list) else []


def _lines(section: BaseModel, unset: bool = True) -> list[str]:
    """`key = value    # meaning`, the meanings in one column unless a value is too long for that."""
    rows: list[tuple[str, str]] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel) or _tables(value):
            continue  # has a table of its own
        if value is not None:
            rows.append((f"{key} = {_value(value)}", field.description or ""))
        elif unset:
            rows.append((f"# {key} =", field.description or ""))
    column = max((len(setting) for setting, _ in rows if len(setting) <= 40), default=0)
    return [f"{setting:<{column}}  # {meaning}" if meaning else setting for setting, meaning in rows]


def _value(value: Any) -> str:
    """A Python value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for one character that TOML wants escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(str(key))} = {_value(entry)}" for key, entry in value.items()) + "}"
    return str(value)
