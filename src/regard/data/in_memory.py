"""Training data given in Python: pairs or texts as tuples, dicts, pandas or `datasets` objects.

They are written to a JSON-lines file in the cache, which is read as any other corpus is. Its name is a digest of its
content: a run that is resumed with other data sees another name, and the same data are not written twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from regard.data.token_cache import cache_folder
from regard.errors import UserError

LINES = 1000  # written at once


def file_of(given: Any, names: Sequence[str], columns: Sequence[str] | None, what: str) -> str:
    """The absolute path of a file with the data: one that was named, or one written with the keys `names`.

    `columns` are what those are called in the data given, where they have names; `what` is for complaints.
    """
    if isinstance(given, str | os.PathLike):
        return os.path.abspath(os.path.expanduser(os.fspath(given)))
    folder = cache_folder().parent / "data"
    draft = folder / f"{os.getpid()}-{secrets.token_hex(4)}.draft"
    digest = hashlib.blake2b(digest_size=16)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            values = _rows(given, list(names), None if columns is None else list(columns), what)
            lines = (json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n" for row in values)
            while chunk := "".join(islice(lines, LINES)).encode():
                digest.update(chunk)
                file.write(chunk)
        path = folder / f"{digest.hexdigest()}.jsonl"
        if not path.exists():  # one that is there keeps its time, and with it the tokens that were made of it
            os.replace(draft, path)
    except UnicodeEncodeError:
        raise UserError(f"{what}: not valid Unicode (half of a surrogate pair)") from None
    except OSError as error:
        hint = "set REGARD_CACHE to a folder with room to write"
        raise UserError(f"cannot keep {what} in {folder}: {error.strerror or error}; {hint}") from error
    finally:
        draft.unlink(missing_ok=True)
    return str(path)


def _rows(given: Any, names: list[str], columns: list[str] | None, what: str) -> Iterator[tuple[str, ...]]:
    """The wanted values of every row, checked to be strings."""
    for place, row in enumerate(_values(given, names, columns, what)):
        for name, value in zip(names, row, strict=True):
            if not isinstance(value, str):
                raise TypeError(
                    f"{what}, row {place}: {name} must be a string, not {type(value).__name__} ({repr(value)[:40]})"
                )
        yield tuple(str(value) for value in row)


def _values(given: Any, names: list[str], columns: list[str] | None, what: str) -> Iterator[Sequence[Any]]:
    if hasattr(given, "itertuples"):  # a pandas DataFrame
        chosen = _chosen(list(given.columns), names, columns, what)
        return zip(*(given[column] for column in chosen), strict=True)
    if isinstance(given, Mapping):
        chosen = _chosen(list(given), names, columns, what)
        return zip(*(given[column] for column in chosen), strict=True)
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise TypeError(
            f"{what}: expected rows of {' and '.join(names)}, a DataFrame or a Dataset, not {repr(given)[:40]}"
        )
    return (_row(row, names, columns, f"{what}, row {place}") for place, row in enumerate(given))


def _chosen(
    there: list[Any], names: list[str], columns: list[str] | None, what: str, in_order: bool = True
) -> list[Any]:
    """Which of the columns that are there are wanted; `in_order`: without names, all if there are as many."""
    as_they_are = in_order and len(there) == len(names) and not set(names) <= set(there)
    wanted = columns or (there if as_they_are else names)
    missing = [column for column in wanted if column not in there]
    if missing:
        listed = ", ".join(map(str, there))
        raise UserError(f"{what} has no column {missing[0]!r}: it has {listed}; say which with columns=")
    return list(wanted)


def _row(row: Any, names: list[str], columns: list[str] | None, where: str) -> Sequence[Any]:
    if isinstance(row, Mapping):
        inner = row.get("translation")
        if isinstance(inner, Mapping) and not set(columns or names) <= set(row):
            row = inner
        return [row[column] for column in _chosen(list(row), names, columns, where, in_order=False)]
    if isinstance(row, str) and len(names) == 1:
        return [row]
    values = list(row) if isinstance(row, Iterable) and not isinstance(row, str | bytes) else []
    if len(values) != len(names):
        raise TypeError(f"{where}: expected {' and '.join(names)}, not {repr(row)[:40]}")
    return values
