"""Load a `Recipe` from a built-in name or a TOML file, and `--set`.

A recipe is a stack of layers: the recipes that it extends, oldest first, then the recipe itself, then `--set`. Later
layers override earlier ones.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args, get_origin

from regard.errors import UserError, first_line
from regard.files import read_text
from regard.recipes.errors import SettingsLayer, Table, check, fields_at, key_of, one_line_error
from regard.recipes.schema import OPTIONAL_SECTIONS, Recipe, families
from regard.recipes.to_toml import toml_value
from regard.registry import TASKS

# Mutually exclusive ways to give the training data: a layer that uses one drops the inherited others.
SINGLE_KEYS = (
    *("corpus", "pairs", "text", "graph", "molecules", "trajectories", "images", "captions", "speech"),
    "mix",
)
DATA_KEYS = (*({key} for key in SINGLE_KEYS), {"source", "target"})
FILE_KEYS = {"source", "target", *SINGLE_KEYS[1:], "valid", "test"}
MAX_DOTS = 2000  # in a line: the time of the parser is quadratic in the parts of a dotted key
LIST_HINT = "regard recipes lists them"


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a built-in recipe or a .toml file, with `section.key=value` overrides. Errors are one-line `UserError`s.

        load("en-es", ["model.size=small", "training.steps=100"])

    A file may extend a built-in recipe or another file with `extends = "en-es"` at its top. Three rules for settings
    that belong together:

    - giving training data in one way (corpus; pairs; text; source and target; mix) drops inherited data given in
      another way and their `count`, and the inherited `task`;
    - giving `model.size` drops the inherited settings that sizes determine (widths, layers, dropout); giving another
      `model.family` drops the whole inherited section and the `task`, and sections that the family does not use;
    - file names are looked up in `data.folder`. In a file, a relative folder is relative to that file, and if none is
      given, it is the folder of the file that names the data, so that a recipe next to its data works from anywhere.
      In `--set`, a relative folder is relative to the current directory.
    """
    layers = _stack(name_or_path)
    _default_folder(layers)
    if overrides:
        layers.append(_from_command_line(overrides))
    return check(layers, _merge)


def parse(text: str, name: str = "recipe.toml") -> Recipe:
    """Read a recipe that `to_toml` wrote. Unlike `load`, it extends nothing and sets no folder."""
    return check([SettingsLayer(name, _toml(text, name), text)], _merge)


def validate(table: Table, name: str) -> Recipe:
    """Check the settings of a recipe that is stored as JSON in the file `name`."""
    return check([SettingsLayer(name, table)], _merge)


def with_changes(recipe: Recipe, overrides: Sequence[str] = (), data: Table | None = None) -> Recipe:
    """Return a recipe with `section.key=value` overrides and other data, applied as later layers."""
    layers = [SettingsLayer("the recipe", recipe.model_dump())]
    layers += [_from_command_line(overrides)] if overrides else []
    layers += [SettingsLayer("the data given", {"data": data})] if data else []
    return check(layers, _merge)


def names() -> list[tuple[str, str]]:
    """The built-in recipes: name and `about`, sorted by name."""
    recipes = []
    for name in sorted(_built_in()):
        abouts = (layer.table.get("about") for layer in reversed(_stack(name)))
        recipes.append((name, next((str(about) for about in abouts if about), "")))
    return recipes


def _built_in() -> dict[str, Traversable]:
    files = resources.files("regard.recipes").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or os.sep in name


def _stack(name_or_path: str) -> list[SettingsLayer]:
    """The layers of a recipe: those that it extends, oldest first, and itself last."""
    layers: list[SettingsLayer] = []
    seen: list[str] = []
    wanted, context = name_or_path, ""
    while True:
        identity = os.path.realpath(wanted) if _is_path(wanted) else wanted
        if identity in seen:
            cycle = " -> ".join(layer.name for layer in reversed(layers[: len(layers) - seen.index(identity)]))
            raise one_line_error(f"{context}extends forms a cycle: {cycle} -> {wanted}")
        seen.append(identity)
        layer = _from_file(wanted, context) if _is_path(wanted) else _from_package(wanted, context)
        layers.insert(0, layer)
        if "extends" not in layer.table:
            return layers
        parent = layer.table.pop("extends")
        context = f"{layer.where(('extends',))}: "
        if not isinstance(parent, str):
            raise one_line_error(f"{context}extends = {toml_value(parent)}: must be the name of one recipe, in quotes")
        wanted = os.path.normpath(os.path.join(layer.folder or "", parent)) if _is_path(parent) else parent


def _from_package(name: str, context: str) -> SettingsLayer:
    files = _built_in()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3)
        beginning = [other for other in sorted(files) if name and other.startswith(name)]
        within = [other for other in sorted(files) if name and name in other]
        near += [other for other in beginning or within if other not in near]
        near += [f"{name}.toml"] if os.path.isfile(f"{name}.toml") else []
        hint = f"did you mean {' or '.join(near)}? {LIST_HINT}" if near else LIST_HINT
        raise one_line_error(f"{context}unknown recipe {name!r}; {hint}")
    text = files[name].read_text(encoding="utf-8")
    label = f"recipe {name}"
    return SettingsLayer(label, _toml(text, label), text)


def _from_file(path: str, context: str) -> SettingsLayer:
    try:
        text = read_text(Path(path), "utf-8-sig")
    except FileNotFoundError:
        raise one_line_error(f"{context}{path}: no such file") from None
    except IsADirectoryError:
        inside = os.path.join(path, "recipe.toml")
        hint = f"; its recipe is {inside}" if os.path.isfile(inside) else ""
        raise one_line_error(f"{context}{path}: a folder, not a recipe{hint}") from None
    except OSError as error:
        raise one_line_error(f"{context}{path}: cannot be read ({error.strerror})") from None
    except UserError as error:
        raise one_line_error(f"{context}{error}") from None
    except UnicodeDecodeError:
        raise one_line_error(f"{context}{path}: not a text file in UTF-8") from None
    table, folder = _toml(text, path), os.path.dirname(path)
    _absolute_folder(table, folder)
    return SettingsLayer(path, table, text, folder=folder)


def _toml(text: str, name: str) -> Table:
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise one_line_error(f"{name}: not valid TOML: it is nested too deeply")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.fullmatch(r"(.*) \(at (.*)\)", str(error), flags=re.DOTALL)
        what, where = match.groups() if match else (str(error), "unknown position")
        raise one_line_error(f"{name}, {where}: not valid TOML: {what[:1].lower()}{what[1:]}") from None
    except RecursionError:
        raise one_line_error(f"{name}: not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, or a date that does not exist
        raise one_line_error(f"{name}: not valid TOML: {first_line(error)}") from None


def _from_command_line(overrides: Sequence[str]) -> SettingsLayer:
    """Make one layer of all `section.key=value` strings; their order matters only if two set the same key."""
    table: Table = {}
    for entry in overrides:
        dotted, equals, raw = entry.partition("=")
        *sections, last = key = [part.strip() for part in dotted.split(".")]
        if not equals or not all(key):
            raise one_line_error(f"--set {entry}: must look like section.key=value")
        inner = table
        for section in sections:
            inner[section] = _section(inner, section)
            inner = inner[section]
        inner[last] = _typed(raw.strip(), entry, wants_text=_takes_text(key, raw.strip()))
    _absolute_folder(table, "")
    return SettingsLayer("--set", table, sets=tuple(overrides))


def _typed(raw: str, entry: str, wants_text: bool = False) -> Any:
    """Parse a value of the command line: TOML or a bare word. Shells remove quotes: [a,b] is a list of bare words."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
        if parsed.keys() == {"value"} and (isinstance(parsed["value"], str) or not wants_text):
            return parsed["value"]
    except RecursionError:
        raise one_line_error(f"--set {key_of(entry)}: the value is nested too deeply") from None
    except ValueError:  # not TOML, or a number of thousands of digits
        if wants_text:
            return raw
        if raw.startswith("[") and raw.endswith("]"):
            return [_typed(item.strip(), entry) for item in raw[1:-1].split(",")]
        if raw.startswith(("[", "{", '"', "'")):
            raise one_line_error(f"--set {entry}: the value is neither valid TOML nor a bare word") from None
    return raw


def _takes_text(key: Sequence[str], raw: str) -> bool:
    """Whether a value is free text: then 2024 in `data.folder=2024` is a string, not a number.

    File names may also be a list: `data.text=[a.txt, b.txt]`.
    """
    field = fields_at(key[:-1]).get(key[-1])
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    listed = raw.startswith("[") and raw.endswith("]") and any(get_origin(kind) is list for kind in kinds)
    return str in kinds and not listed


def _section(table: Table, name: str) -> Table:
    """The table of a section; an empty one if there is none, or if the value is not a table."""
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _absolute_folder(table: Table, start: str) -> None:
    data = _section(table, "data")
    if isinstance(data.get("folder"), str):
        data["folder"] = os.path.abspath(os.path.join(start, os.path.expanduser(data["folder"])))


def _default_folder(layers: list[SettingsLayer]) -> None:
    """Set `data.folder`, unless a layer does, to the folder of the last file that names data; see `load`."""
    data = [_section(layer.table, "data") for layer in layers]
    if layers[-1].folder is None or any("folder" in section for section in data):
        return
    naming = [layer for layer, section in zip(layers, data, strict=True) if any(section.get(key) for key in FILE_KEYS)]
    if naming:
        owner = next((layer for layer in reversed(naming) if layer.folder is not None), layers[-1])
        section = owner.table.setdefault("data", {})
        if isinstance(section, dict):
            section["folder"] = os.path.abspath(owner.folder or "")


def _merge(layers: Sequence[SettingsLayer]) -> Table:
    merged: Table = {}
    for layer in layers:
        _drop_replaced(merged, layer.table)
        _update(merged, layer.table)
    return merged


def _drop_replaced(merged: Table, newer: Table) -> None:
    """Drop the inherited settings that `newer` replaces as a group (see `load`)."""
    data = _section(newer, "data")
    given = [keys for keys in DATA_KEYS if any(data.get(key) for key in keys)]
    for keys in DATA_KEYS:
        for key in keys if given and keys not in given else ():
            if _section(merged, "data").pop(key, None):
                _section(merged, "data").pop("count", None)  # the count of the dropped data
    if given:
        merged.pop("task", None)
    model, inherited = _section(newer, "model"), _section(merged, "model")
    if "family" in model and model["family"] != inherited.get("family", "transformer"):
        inherited.clear()
        merged.pop("task", None)
    family = families().get(str(model.get("family", inherited.get("family", "transformer"))))
    if "family" in model and family is not None:
        for section in OPTIONAL_SECTIONS:
            if not any(section in TASKS[task].sections for task in family.TASKS):
                merged.pop(section, None)
    if "size" in model and family is not None:
        for key in set().union(*family.PRESETS.values()):
            inherited.pop(key, None)


def _update(merged: Table, newer: Table) -> None:
    for key, value in newer.items():
        if isinstance(value, dict):
            merged[key] = _section(merged, key)
            _update(merged[key], value)
        else:
            merged[key] = value
