"""From names, TOML files and `--set` to a checked `Recipe`.

A recipe is a stack of layers: the recipes it extends, oldest first, then the one that was named, then `--set`. Later
layers win.
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
from typing import Any, get_args

from regard.errors import UserError, first_line
from regard.files import read_text
from regard.recipes.errors import SettingsLayer, Table, check, complaint, fields_at, key_of
from regard.recipes.schema import Recipe, families
from regard.recipes.to_toml import toml_value

# Ways to name the training data that exclude each other: a layer that takes one lets go of the inherited others.
KINDS_OF_DATA = ({"corpus"}, {"pairs"}, {"text"}, {"source", "target"}, {"mix"})
NAMES_OF_FILES = {"source", "target", "pairs", "text", "mix", "valid", "test"}
MAX_DOTS = 2000  # in a line: the parser's time grows with the square of the parts of a dotted key
LIST_THEM = "regard recipes lists them"


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name, or in that .toml file, with `section.key=value` overrides; or a one-line `UserError`.

        load("en-es", ["model.size=small", "training.steps=100"])

    A file may build on a built-in recipe or on another file with `extends = "en-es"` at its top. Three rules say what
    "later wins" means where settings belong together:

    - naming training data one way (corpus; pairs; text; source and target; mix) drops an inherited other way and its
      `count`, and the inherited `task`;
    - giving `model.size` drops inherited widths, layers and dropout: they belonged to the other size; giving another
      `model.family` drops the whole inherited section and the `task`;
    - file names are looked up in `data.folder`. In a file, a relative folder is relative to that file, and if none is
      given, the folder of the file that names the data is taken, so that a recipe beside its data works from anywhere.
      In `--set`, a relative folder is relative to the current directory.
    """
    layers = _stack(name_or_path)
    _default_folder(layers)
    if overrides:
        layers.append(_from_command_line(overrides))
    return check(layers, _merge)


def parse(text: str, name: str = "recipe.toml") -> Recipe:
    """The recipe that `to_toml` wrote, exactly: nothing is extended and no folder is filled in. For stored recipes."""
    return check([SettingsLayer(name, _toml(text, name), text)], _merge)


def with_changes(recipe: Recipe, overrides: Sequence[str] = (), data: Table | None = None) -> Recipe:
    """A recipe with `section.key=value` overrides and other data, as if later layers had given them."""
    layers = [SettingsLayer("the recipe", recipe.model_dump())]
    layers += [_from_command_line(overrides)] if overrides else []
    layers += [SettingsLayer("the data given", {"data": data})] if data else []
    return check(layers, _merge)


def names() -> list[tuple[str, str]]:
    """The built-in recipes, by name, each with what it is for."""
    found = []
    for name in sorted(_built_in()):
        abouts = (layer.table.get("about") for layer in reversed(_stack(name)))
        found.append((name, next((str(about) for about in abouts if about), "")))
    return found


def _built_in() -> dict[str, Traversable]:
    files = resources.files("regard.recipes").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or os.sep in name


def _stack(name_or_path: str) -> list[SettingsLayer]:
    """The layers of a recipe: those it extends, oldest first, and itself last."""
    layers: list[SettingsLayer] = []
    seen: list[str] = []
    wanted, blame = name_or_path, ""
    while True:
        identity = os.path.realpath(wanted) if _is_path(wanted) else wanted
        if identity in seen:
            circle = " -> ".join(layer.name for layer in reversed(layers[: len(layers) - seen.index(identity)]))
            raise complaint(f"{blame}extends goes round in a circle: {circle} -> {wanted}")
        seen.append(identity)
        layer = _from_file(wanted, blame) if _is_path(wanted) else _from_package(wanted, blame)
        layers.insert(0, layer)
        if "extends" not in layer.table:
            return layers
        parent = layer.table.pop("extends")
        blame = f"{layer.where(('extends',))}: "
        if not isinstance(parent, str):
            raise complaint(f"{blame}extends = {toml_value(parent)}: must be the name of one recipe, in quotes")
        wanted = os.path.normpath(os.path.join(layer.folder or "", parent)) if _is_path(parent) else parent


def _from_package(name: str, blame: str) -> SettingsLayer:
    files = _built_in()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3)
        beginning = [other for other in sorted(files) if name and other.startswith(name)]
        within = [other for other in sorted(files) if name and name in other]
        near += [other for other in beginning or within if other not in near]
        near += [f"{name}.toml"] if os.path.isfile(f"{name}.toml") else []
        hint = f"did you mean {' or '.join(near)}? {LIST_THEM}" if near else LIST_THEM
        raise complaint(f"{blame}unknown recipe {name!r}; {hint}")
    text = files[name].read_text(encoding="utf-8")
    label = f"recipe {name}"
    return SettingsLayer(label, _toml(text, label), text)


def _from_file(path: str, blame: str) -> SettingsLayer:
    try:
        text = read_text(Path(path), "utf-8-sig")
    except FileNotFoundError:
        raise complaint(f"{blame}{path}: no such file") from None
    except IsADirectoryError:
        inside = os.path.join(path, "recipe.toml")
        hint = f"; its recipe is {inside}" if os.path.isfile(inside) else ""
        raise complaint(f"{blame}{path}: a folder, not a recipe{hint}") from None
    except OSError as error:
        raise complaint(f"{blame}{path}: cannot be read ({error.strerror})") from None
    except UserError as error:
        raise complaint(f"{blame}{error}") from None
    except UnicodeDecodeError:
        raise complaint(f"{blame}{path}: not a text file in UTF-8") from None
    table, folder = _toml(text, path), os.path.dirname(path)
    _absolute_folder(table, folder)
    return SettingsLayer(path, table, text, folder=folder)


def _toml(text: str, name: str) -> Table:
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise complaint(f"{name}: not valid TOML: it is nested too deeply")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (.*)\)", str(error), flags=re.DOTALL)
        what, place = found.groups() if found else (str(error), "somewhere")
        raise complaint(f"{name}, {place}: not valid TOML: {what[:1].lower()}{what[1:]}") from None
    except RecursionError:
        raise complaint(f"{name}: not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, or a date that does not exist
        raise complaint(f"{name}: not valid TOML: {first_line(error)}") from None


def _from_command_line(overrides: Sequence[str]) -> SettingsLayer:
    """`section.key=value` strings as one layer, so that their order matters only where two give the same key."""
    table: Table = {}
    for entry in overrides:
        dotted, equals, raw = entry.partition("=")
        *sections, last = key = [part.strip() for part in dotted.split(".")]
        if not equals or not all(key):
            raise complaint(f"--set {entry}: must look like section.key=value")
        inner = table
        for section in sections:
            inner[section] = _section(inner, section)
            inner = inner[section]
        inner[last] = _typed(raw.strip(), entry, wants_text=_takes_text(key))
    _absolute_folder(table, "")
    return SettingsLayer("--set", table, sets=tuple(overrides))


def _typed(raw: str, entry: str, wants_text: bool = False) -> Any:
    """A value from the command line: TOML, or a bare word. Shells eat quotes, so [a,b] is a list of bare words."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
        if parsed.keys() == {"value"} and (isinstance(parsed["value"], str) or not wants_text):
            return parsed["value"]
    except RecursionError:
        raise complaint(f"--set {key_of(entry)}: the value is nested too deeply") from None
    except ValueError:  # not TOML, or a number of thousands of digits
        if wants_text:
            return raw
        if raw.startswith("[") and raw.endswith("]"):
            return [_typed(item.strip(), entry) for item in raw[1:-1].split(",")]
        if raw.startswith(("[", "{", '"', "'")):
            raise complaint(f"--set {entry}: the value is neither valid TOML nor a bare word") from None
    return raw


def _takes_text(key: Sequence[str]) -> bool:
    """Whether the setting is free text, so that `data.folder=2024` is a name and not a number."""
    field = fields_at(key[:-1]).get(key[-1])
    return field is not None and str in (field.annotation, *get_args(field.annotation))


def _section(table: Table, name: str) -> Table:
    """A section's own table; an empty one where there is none, or where something else is written in its place."""
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _absolute_folder(table: Table, start: str) -> None:
    data = _section(table, "data")
    if isinstance(data.get("folder"), str):
        data["folder"] = os.path.abspath(os.path.join(start, os.path.expanduser(data["folder"])))


def _default_folder(layers: list[SettingsLayer]) -> None:
    """Where no layer gives `data.folder`, the last file that names data gives its own; see `load`."""
    data = [_section(layer.table, "data") for layer in layers]
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


def _merge(layers: Sequence[SettingsLayer]) -> Table:
    merged: Table = {}
    for layer in layers:
        _let_go(merged, layer.table)
        _update(merged, layer.table)
    return merged


def _let_go(merged: Table, newer: Table) -> None:
    """Drop the inherited settings that `newer` replaces as a group (see `load`)."""
    data = _section(newer, "data")
    taken = [kind for kind in KINDS_OF_DATA if any(data.get(key) for key in kind)]
    for kind in KINDS_OF_DATA:
        for key in kind if taken and kind not in taken else ():
            if _section(merged, "data").pop(key, None):
                _section(merged, "data").pop("count", None)  # it was of the other data
    if taken:
        merged.pop("task", None)
    model, inherited = _section(newer, "model"), _section(merged, "model")
    if "family" in model and model["family"] != inherited.get("family", "transformer"):
        inherited.clear()
        merged.pop("task", None)
    family = families().get(str(model.get("family", inherited.get("family", "transformer"))))
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
