"""Write a `Recipe` as TOML with comments, and list the settings in which two recipes differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from regard.recipes.schema import DataSettings, Recipe
from regard.registry import NameIn

# Characters that JSON does not escape, but that TOML forbids or a terminal acts on.
_CONTROL = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def describe(recipe: Recipe) -> str:
    """Return the whole recipe as TOML, with a description of every setting; `parse` reads back an equal recipe.

    Optional settings that are not set appear as comments. Settings that have no effect for the task are left out.
    """
    parts = [_comment(recipe), *_lines(recipe), ""]
    for name, section in recipe:
        if isinstance(section, BaseModel) and recipe.has_section(name):
            unused = section.unused if isinstance(section, DataSettings) else ()
            parts += [_comment(section), f"[{name}]", *_lines(section, unused=unused), ""]
            for key, value in section:
                for table in _tables(value):
                    parts += [f"[[{name}.{key}]]", *_lines(table, unset=False), ""]
    return "\n".join(parts)


to_toml = describe  # the content of recipe.toml in a run directory


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Every setting in which two recipes differ: `{"training.steps": (100, 200)}`, in the schema's order."""
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    values = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: (one, other) for key, (one, other) in values.items() if one != other}


def toml_value(value: Any) -> str:
    """A Python value as TOML: `toml_value([True, "a"])` is `[true, "a"]`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # TOML has JSON's escapes
        return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(entry)}" for key, entry in value.items()) + "}"
    return str(value)


def shown(value: Any) -> str:
    """A setting's value in a message: `shown(None)` is `not set`."""
    return "not set" if value is None else toml_value(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _comment(section: BaseModel) -> str:
    """The first paragraph of a section's docstring."""
    paragraph = (type(section).__doc__ or "").strip().split("\n\n")[0]
    return "\n".join(f"# {line.strip()}" for line in paragraph.splitlines())


def _tables(value: Any) -> list[BaseModel]:
    """The entries of a list that are written as [[tables]], such as those of data.mix."""
    return [entry for entry in value if isinstance(entry, BaseModel)] if isinstance(value, list) else []


def _lines(section: BaseModel, unset: bool = True, unused: Sequence[str] = ()) -> list[str]:
    """Lines of `key = value  # description`; the descriptions are aligned, except after a long value."""
    rows: list[tuple[str, str]] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel) or _tables(value) or key in unused:
            continue  # written as a table
        if value is not None:
            rows.append((f"{key} = {toml_value(value)}", _description(field)))
        elif unset:
            rows.append((f"# {key} =", _description(field)))
    column = max((len(setting) for setting, _ in rows if len(setting) <= 40), default=0)
    return [f"{setting:<{column}}  # {text}" if text else setting for setting, text in rows]


def _description(field: FieldInfo) -> str:
    """The description of a setting and, if it is a choice, the values that it can have."""
    text = field.description or ""
    kinds = (field.annotation, *get_args(field.annotation))
    choices = [list(get_args(kind)) for kind in kinds if get_origin(kind) is Literal]
    parts = (*field.metadata, *(part for kind in kinds for part in get_args(kind)))
    choices += [part.names() for part in parts if isinstance(part, NameIn)]
    return "".join([text, *(f" [{', '.join(map(str, names))}]" for names in choices if len(names) > 1)])
