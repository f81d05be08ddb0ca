"""Training data passed from Python: pairs or texts as tuples, dicts, pandas or `datasets` objects.

They are written to a JSON-lines file in the cache, which is read like any other corpus. Its name is a digest of its
content: a run resumed with different data gets a different file, and the same data are not written twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from regard.data.cache_key import cache_folder
from regard.errors import UserError

LINES_PER_WRITE = 1000


def file_of(given: Any, names: Sequence[str], columns: Sequence[str] | None, what: str) -> str:
    """Return the absolute path of a file with the data: the given file, or one written with the keys `names`.

    `columns` are the names of these columns in the given data; `what` is used in error messages.
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
            while chunk := "".join(islice(lines, LINES_PER_WRITE)).encode():
                digest.update(chunk)
                file.write(chunk)
        path = folder / f"{digest.hexdigest()}.jsonl"
        if not path.exists():  # an existing file keeps its time, so that its cached tokens stay valid
            os.replace(draft, path)
    except UnicodeEncodeError:
        raise UserError(f"{what}: not valid Unicode (half of a surrogate pair)") from None
    except OSError as error:
        hint = "set REGARD_CACHE to a writable folder with enough space"
        raise UserError(f"cannot write {what} to {folder}: {error.strerror or error}; {hint}") from error
    finally:
        draft.unlink(missing_ok=True)
    return str(path)


def _rows(given: Any, names: list[str], columns: list[str] | None, what: str) -> Iterator[tuple[str, ...]]:
    """The selected values of every row, checked to be strings."""
    for index, row in enumerate(_values(given, names, columns, what)):
        for name, value in zip(names, row, strict=True):
            if not isinstance(value, str):
                raise TypeError(
                    f"{what}, row {index}: {name} must be a string, not {type(value).__name__} ({repr(value)[:40]})"
                )
        yield tuple(str(value) for value in row)


def _values(given: Any, names: list[str], columns: list[str] | None, what: str) -> Iterator[Sequence[Any]]:
    if hasattr(given, "itertuples"):  # a pandas DataFrame
        selected = _select_columns(list(given.columns), names, columns, what)
        return zip(*(given[column] for column in selected), strict=True)
    if isinstance(given, Mapping):
        selected = _select_columns(list(given), names, columns, what)
        return zip(*(given[column] for column in selected), strict=True)
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise TypeError(
            f"{what}: expected rows of {' and '.join(names)}, a DataFrame or a Dataset, not {repr(given)[:40]}"
        )
    return (_row(row, names, columns, f"{what}, row {index}") for index, row in enumerate(given))


def _select_columns(
    available: list[Any], names: list[str], columns: list[str] | None, what: str, by_position: bool = True
) -> list[Any]:
    """Select the columns for `names`: `columns`, those of the same names or, `by_position`, all of as many columns."""
    all_of_them = by_position and len(available) == len(names) and not set(names) <= set(available)
    selected = columns or (available if all_of_them else names)
    missing = [column for column in selected if column not in available]
    if missing:
        listed = ", ".join(map(str, available))
        raise UserError(f"{what} has no column {missing[0]!r}: it has {listed}; name the columns with columns=")
    return list(selected)


def _row(row: Any, names: list[str], columns: list[str] | None, where: str) -> Sequence[Any]:
    if isinstance(row, Mapping):
        inner = row.get("translation")
        if isinstance(inner, Mapping) and not set(columns or names) <= set(row):
            row = inner
        return [row[column] for column in _select_columns(list(row), names, columns, where, by_position=False)]
    if isinstance(row, str) and len(names) == 1:
        return [row]
    values = list(row) if isinstance(row, Iterable) and not isinstance(row, str | bytes) else []
    if len(values) != len(names):
        raise TypeError(f"{where}: expected {' and '.join(names)}, not {repr(row)[:40]}")
    return values
