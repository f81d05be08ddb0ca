"""Columns of text from TSV, CSV and JSON-lines files; header and quoting are detected unless settings say.

A field is quoted as RFC 4180 has it: it begins and ends with a quotation mark, and those inside are doubled. In CSV
fields may always be quoted. In TSV they mostly are not, and a sentence may well begin or end with a quotation mark of
its own, so a TSV file counts as quoted only where every mark in it is as one of three kinds of program writes them:
those that quote every field, those that quote fields with a tab, a line break or a mark in them (pandas, Python), and
those that also quote fields with a comma (spreadsheets).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from regard.errors import UserError

QUOTED_RECORDS = 2000  # records with quotation marks that are looked at to tell how a TSV file is quoted
OPEN_LINES = 1000  # lines that a quoted field may go over, while that is being found out
MAX_FIELD = 1 << 24  # characters of a quoted field; a mark that is never closed would run to the end of the file
FIRST_RECORDS = 20  # that tell what separates the fields of a CSV file
SUFFIXES = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl"}
FIELD = re.compile(r'"([^"]*(?:""[^"]*)*)"(?=[\t\n]|$)|([^"\t\n]*)(?=[\t\n]|$)')
NUMBER = re.compile(r"\s*[-+]?[\d.,]*\s*|NA|nan|NaN")
NAMES = """
    source target src tgt trg input output text label class sentence sentence1 sentence2 translation reference id score
    english german french spanish italian portuguese dutch russian chinese japanese arabic
    ar bg bn ca cs da de el en es et fa fi fr ga he hi hr hu is it ja ko lt lv mt nl no pl pt ro ru sk sl sr sv sw ta th
    tr uk ur vi zh
""".split()  # noqa: SIM905  what columns are called where a file has a header
QUOTED_HINT = "data.quoted = true reads fields in quotation marks"

Lines = Callable[[bool], Iterator[str]]  # the lines of a file, with their line feeds or without
Record = tuple[int, list[str]]  # the number of its first line, and its fields


@dataclass(frozen=True)
class Reading:
    """How settings say that a file is read; what is None is detected. `names` are the usual names of its columns."""

    names: tuple[str, ...]
    format: str = "auto"
    columns: tuple[str | int, ...] | None = None
    quoted: bool | None = None
    header: bool | None = None

    def kind(self, path: Path) -> str:
        """tsv, csv or jsonl; text where the file is none of them."""
        if self.format != "auto":
            return self.format
        suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".xz")]
        return SUFFIXES.get(suffixes[-1], "text") if suffixes else "text"


@dataclass(frozen=True)
class Layout:
    """How a file of fields is laid out."""

    delimiter: str
    quoted: bool
    header: tuple[str, ...] | None
    places: tuple[int, ...]  # of the wanted columns
    width: int  # fields of every record
    said: str  # what was detected, in words


def json_rows(path: Path, lines: Lines, reading: Reading) -> Iterator[tuple[str, ...]]:
    """The values of the wanted keys of every line's object, or of its "translation" object."""
    given = reading.columns or ()
    names = tuple(str(name) for name in given) if given and all(isinstance(n, str) for n in given) else reading.names
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
    """The wanted fields of every record after the header."""
    records = _records(path, lines, layout.delimiter, layout.quoted)
    for number, fields in islice(records, 0 if layout.header is None else 1, None):
        if len(fields) != layout.width:
            hint = f"; {QUOTED_HINT}" if _open_quotes(fields, layout.quoted) else ""
            raise UserError(f"{path}, line {number}: expected {layout.width} columns, not {len(fields)}{hint}")
        yield tuple(fields[place] for place in layout.places)


def detect(path: Path, lines: Lines, reading: Reading) -> Layout:
    """Find out the layout of a TSV or CSV file, as far as settings leave it open."""
    kind = reading.kind(path)
    quoted = reading.quoted
    if quoted is None:
        quoted = kind == "csv" or looks_quoted(lines(False))
    delimiter = "\t" if kind == "tsv" else _delimiter(path, lines, quoted, len(reading.names))
    _, first = next(_records(path, lines, delimiter, quoted), (1, []))
    header = tuple(field.strip() for field in first) if _has_header(first, reading) else None
    if _open_quotes(first, quoted) and len(first) < len(reading.names):
        raise UserError(f"{path}, line 1: expected {len(reading.names)} columns, not {len(first)}; {QUOTED_HINT}")
    places = _places(path, first, header, reading)
    facts = [f"header {', '.join(header)}"] if header is not None else []
    facts += ["quoted fields"] if quoted and kind == "tsv" else []
    facts += (
        ["separated by " + ("tabs" if delimiter == "\t" else delimiter)] if kind == "csv" and delimiter != "," else []
    )
    return Layout(delimiter, quoted, header, places, len(first), f"{path}: {'; '.join(facts)}" if facts else "")


def _open_quotes(fields: list[str], quoted: bool) -> bool:
    """Whether a record may have been torn apart within a quoted field."""
    return not quoted and any(field.startswith('"') for field in fields)


def _has_header(first: list[str], reading: Reading) -> bool:
    """Whether the first record names the columns."""
    if reading.header is not None:
        return reading.header
    columns = reading.columns or ()
    if any(isinstance(column, str) for column in columns):
        return True
    names = [field.strip().lower() for field in first]
    if all(name in names for name in reading.names):
        return True
    chosen = [names[int(column) - 1] for column in columns if int(column) <= len(names)] or names
    return len(set(chosen)) == len(reading.names) and all(name in NAMES for name in chosen)


def _places(path: Path, first: list[str], header: tuple[str, ...] | None, reading: Reading) -> tuple[int, ...]:
    """Where the wanted columns stand, from 0."""
    count = len(reading.names)
    names = list(header or ())
    if reading.columns is None:
        lower = [name.lower() for name in names]
        if all(name in lower for name in reading.names):
            return tuple(lower.index(name) for name in reading.names)
        if len(first) not in (0, count):
            said = f" ({', '.join(names)})" if names else ""
            raise UserError(f"{path}, line 1: expected {count} columns, not {len(first)}{said}: set data.columns")
        return tuple(range(count))
    places = []
    for column in reading.columns:
        if isinstance(column, str) and column not in names:
            there = f"the first line has {', '.join(names) or 'none'}" if header is not None else "data.header is false"
            raise UserError(f"{path} has no column {column!r}: {there}")
        place = names.index(column) if isinstance(column, str) else column - 1
        if first and place >= len(first):
            raise UserError(f"{path} has no column {column}: there are {len(first)}")
        places.append(place)
    return tuple(places)


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
    """What separates the fields of a CSV file: the first of , ; and tab that gives all first records equally many."""
    for delimiter in ",;\t":
        try:
            counts = {len(fields) for _, fields in islice(_records(path, lines, delimiter, quoted), FIRST_RECORDS)}
        except UserError:
            continue
        if len(counts) == 1 and counts.pop() >= columns:
            return delimiter
    return ","


def looks_quoted(lines: Iterator[str]) -> bool:
    """Whether the fields of a TSV file are quoted; see the top of this file.

    >>> looks_quoted(iter(['"a"\\t"b"', '"c"\\t"d"'])), looks_quoted(iter(['"a"\\tb', 'c\\t"d"']))
    (True, False)
    >>> looks_quoted(iter(['a\\tb', '"say ""c"" now"\\td']))
    True
    """
    every = minimal = commas = True  # which programs may have written what was seen so far
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
            special = any(sign in text for sign in '"\t\n\r')
            every = every and (quoted or NUMBER.fullmatch(text) is not None)
            minimal = minimal and (special or not quoted)
            commas = commas and quoted == (special or "," in text)
            fields_quoted += quoted
            doubled += quoted and '"' in text
        if not (every or minimal or commas) or records >= QUOTED_RECORDS:
            break
    return (every and records > 1) or (minimal and doubled > 0) or (commas and (doubled > 0 or fields_quoted > 2))


def _whole_records(lines: Iterator[str]) -> Iterator[str]:
    """Lines, joined where a quotation mark is open at the end of one: a whole record has an even number of them."""
    for line in lines:
        marks, parts = line.count('"'), [line]
        while marks % 2 and len(parts) < OPEN_LINES and (following := next(lines, None)) is not None:
            parts.append(following)
            marks += following.count('"')
        yield "\n".join(parts)


def _fields(record: str) -> list[tuple[str, bool]] | None:
    """The fields of a tab-separated record, each with whether it is quoted; None where quoting explains it not."""
    found, place = [], 0
    while True:
        match = FIELD.match(record, place)
        if match is None or record[match.end() : match.end() + 1] == "\n":
            return None
        quoted = match[1] is not None
        found.append((match[1].replace('""', '"') if quoted else match[2], quoted))
        place = match.end() + 1
        if place > len(record):
            return found
