"""Read columns of text from TSV, CSV and JSON-lines files; header and quoting are detected unless they are set.

Quoting follows RFC 4180: a quoted field starts and ends with a quotation mark, and those inside are doubled. In CSV,
fields may always be quoted. In TSV they mostly are not, and a sentence may start or end with a quotation mark of its
own, so a TSV file counts as quoted only if all its quotation marks are as one of three kinds of program writes them:
programs that quote every field, those that quote fields with a tab, a line break or a quotation mark (pandas, Python),
and those that also quote fields with a comma (spreadsheets).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from regard.data.lines import COMPRESSED
from regard.errors import UserError

QUOTED_RECORDS = 2000  # records with quotation marks that are examined to detect the quoting of a TSV file
OPEN_LINES = 1000  # maximum number of lines of a quoted field during that detection
MAX_FIELD = 1 << 24  # characters of a quoted field; without a limit, an unclosed quote runs to the end of the file
FIRST_RECORDS = 20  # examined to detect the delimiter of a CSV file
SUFFIXES = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
FIELD = re.compile(r'"([^"]*(?:""[^"]*)*)"(?=[\t\n]|$)|([^"\t\n]*)(?=[\t\n]|$)')
NUMBER = re.compile(r"\s*[-+]?[\d.,]*\s*|NA|nan|NaN")
NAMES = """
    source target src tgt trg input output text label class sentence sentence1 sentence2 translation reference id score
    image caption audio file
    english german french spanish italian portuguese dutch russian chinese japanese arabic
    ar bg bn ca cs da de el en es et fa fi fr ga he hi hr hu is it ja ko lt lv mt nl no pl pt ro ru sk sl sr sv sw ta th
    tr uk ur vi zh
""".split()  # noqa: SIM905  usual column names in a header
QUOTED_HINT = "data.quoted = true reads fields in quotation marks"

Lines = Callable[[bool], Iterator[str]]  # the lines of a file, with their line feeds or without
Record = tuple[int, list[str]]  # the number of its first line, and its fields


@dataclass(frozen=True)
class ReadOptions:
    """The settings for reading a file; None means that it is detected. `names` are the default names of the columns.

    `lists_files`: the first column names files, relative to the folder of this one.
    """

    names: tuple[str, ...]
    format: str = "auto"
    columns: tuple[str | int, ...] | None = None
    quoted: bool | None = None
    header: bool | None = None
    lists_files: bool = False

    def kind(self, path: Path) -> str:
        """The format of a file: tsv, csv, jsonl, parquet or text; "dataset" for a folder."""
        if path.is_dir():
            return "dataset"
        if self.format != "auto":
            return self.format
        suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
        return SUFFIXES.get(suffixes[-1], "text") if suffixes else "text"


@dataclass(frozen=True)
class Layout:
    """The layout of a TSV or CSV file."""

    delimiter: str
    quoted: bool
    header: tuple[str, ...] | None
    indices: tuple[int, ...]  # indices of the selected columns, from 0
    width: int  # number of fields of every record
    summary: str  # what was detected, for a message


def json_rows(path: Path, lines: Lines, options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """The values of the selected keys in every line's object, or in its "translation" object."""
    given = options.columns or ()
    names = tuple(str(name) for name in given) if given and all(isinstance(n, str) for n in given) else options.names
    wanted = "{" + ", ".join(f'"{name}": "..."' for name in names) + "}"
    for number, line in enumerate(lines(False), 1):
        try:
            entry = json.loads(line)
            inner = entry.get("translation")
            values = tuple((inner if isinstance(inner, dict) and name not in entry else entry)[name] for name in names)
            "".join(values).encode()  # fails if one is not a string, or holds half a surrogate pair
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            hint = "" if given else f" (or set data.columns to {len(names)} of its keys)"
            raise UserError(f"{path}, line {number}: expected {wanted}{hint}, found {line[:60]!r}") from error
        yield values


def rows(path: Path, lines: Lines, layout: Layout) -> Iterator[tuple[str, ...]]:
    """The selected fields of every record after the header."""
    records = _records(path, lines, layout.delimiter, layout.quoted)
    for number, fields in islice(records, 0 if layout.header is None else 1, None):
        if len(fields) != layout.width:
            hint = f"; {QUOTED_HINT}" if _open_quotes(fields, layout.quoted) else ""
            raise UserError(f"{path}, line {number}: expected {layout.width} columns, not {len(fields)}{hint}")
        yield tuple(fields[index] for index in layout.indices)


def detect(path: Path, lines: Lines, options: ReadOptions) -> Layout:
    """Detect the layout of a TSV or CSV file as far as `options` leave it open."""
    kind = options.kind(path)
    quoted = options.quoted
    if quoted is None:
        quoted = kind == "csv" or looks_quoted(lines(False))
    delimiter = "\t" if kind == "tsv" else _delimiter(path, lines, quoted, len(options.names))
    _, first = next(_records(path, lines, delimiter, quoted), (1, []))
    header = tuple(field.strip() for field in first) if _has_header(first, options) else None
    if _open_quotes(first, quoted) and len(first) < len(options.names):
        raise UserError(f"{path}, line 1: expected {len(options.names)} columns, not {len(first)}; {QUOTED_HINT}")
    indices = _column_indices(path, first, header, options)
    facts = [f"header {', '.join(header)}"] if header is not None else []
    facts += ["quoted fields"] if quoted and kind == "tsv" else []
    if kind == "csv" and delimiter != ",":
        facts.append("separated by " + ("tabs" if delimiter == "\t" else delimiter))
    return Layout(delimiter, quoted, header, indices, len(first), f"{path}: {'; '.join(facts)}" if facts else "")


def _open_quotes(fields: list[str], quoted: bool) -> bool:
    """Whether a record may have been split inside a quoted field."""
    return not quoted and any(field.startswith('"') for field in fields)


def _has_header(first: list[str], options: ReadOptions) -> bool:
    """Whether the first record names the columns."""
    if options.header is not None:
        return options.header
    columns = options.columns or ()
    if any(isinstance(column, str) for column in columns):
        return True
    names = [field.strip().lower() for field in first]
    if all(name in names for name in options.names):
        return True
    chosen = [names[int(column) - 1] for column in columns if int(column) <= len(names)] or names
    return len(set(chosen)) == len(options.names) and all(name in NAMES for name in chosen)


def _column_indices(
    path: Path, first: list[str], header: tuple[str, ...] | None, options: ReadOptions
) -> tuple[int, ...]:
    """The indices of the selected columns, from 0."""
    count = len(options.names)
    names = list(header or ())
    if options.columns is None:
        lower = [name.lower() for name in names]
        if all(name in lower for name in options.names):
            return tuple(lower.index(name) for name in options.names)
        if len(first) not in (0, count):
            listed = f" ({', '.join(names)})" if names else ""
            raise UserError(f"{path}, line 1: expected {count} columns, not {len(first)}{listed}: set data.columns")
        return tuple(range(count))
    indices = []
    for column in options.columns:
        if isinstance(column, str) and column not in names:
            why = f"the first line has {', '.join(names) or 'none'}" if header is not None else "data.header is false"
            raise UserError(f"{path} has no column {column!r}: {why}")
        index = names.index(column) if isinstance(column, str) else column - 1
        if first and index >= len(first):
            raise UserError(f"{path} has no column {column}: there are {len(first)}")
        indices.append(index)
    return tuple(indices)


def _records(path: Path, lines: Lines, delimiter: str, quoted: bool) -> Iterator[Record]:
    if not quoted:
        yield from ((number, line.split(delimiter)) for number, line in enumerate(lines(False), 1))
        return
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD))
    reader = csv.reader(lines(True), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            hint = "data.quoted = false reads quotation marks as text"
            raise UserError(f"{path}, line {number}: not properly quoted ({error}); {hint}") from error
        if fields:
            yield number, fields


def _delimiter(path: Path, lines: Lines, quoted: bool, columns: int) -> str:
    """Detect the delimiter of a CSV file: the first of , ; and tab that splits the first records into equally many."""
    for delimiter in ",;\t":
        try:
            counts = {len(fields) for _, fields in islice(_records(path, lines, delimiter, quoted), FIRST_RECORDS)}
        except UserError:
            continue
        if len(counts) == 1 and counts.pop() >= columns:
            return delimiter
    return ","


def looks_quoted(lines: Iterator[str]) -> bool:
    """Whether the fields of a TSV file are quoted; see the module's docstring.

    >>> looks_quoted(iter(['"a"\\t"b"', '"c"\\t"d"'])), looks_quoted(iter(['"a"\\tb', 'c\\t"d"']))
    (True, False)
    >>> looks_quoted(iter(['a\\tb', '"say ""c"" now"\\td']))
    True
    """
    every = minimal = commas = True  # kinds of program that may have written the records so far
    records = fields_quoted = doubled = 0
    for number, record in enumerate(_whole_records(lines)):
        if '"' not in record:
            every = every and (number == 0 or all(NUMBER.fullmatch(field) for field in record.split("\t")))
            commas = commas and "," not in record
            continue
        fields = _fields(record)
        if fields is None:
            return False
        records += 1
        for text, quoted in fields:
            special = any(character in text for character in '"\t\n\r')
            every = every and (quoted or NUMBER.fullmatch(text) is not None)
            minimal = minimal and (special or not quoted)
            commas = commas and quoted == (special or "," in text)
            fields_quoted += quoted
            doubled += quoted and '"' in text
        if not (every or minimal or commas) or records >= QUOTED_RECORDS:
            break
    return (every and records > 1) or (minimal and doubled > 0) or (commas and (doubled > 0 or fields_quoted > 2))


def _whole_records(lines: Iterator[str]) -> Iterator[str]:
    """Join lines while a quote is open: a complete record has an even number of quotation marks."""
    for line in lines:
        quotes, parts = line.count('"'), [line]
        while quotes % 2 and len(parts) < OPEN_LINES and (following := next(lines, None)) is not None:
            parts.append(following)
            quotes += following.count('"')
        yield "\n".join(parts)


def _fields(record: str) -> list[tuple[str, bool]] | None:
    """Parse a tab-separated record into (field, whether it is quoted); None if it is not properly quoted."""
    fields, start = [], 0
    while True:
        match = FIELD.match(record, start)
        if match is None or record[match.end() : match.end() + 1] == "\n":
            return None
        quoted = match[1] is not None
        fields.append((match[1].replace('""', '"') if quoted else match[2], quoted))
        start = match.end() + 1
        if start > len(record):
            return fields
