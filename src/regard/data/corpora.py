"""Read sentence pairs (line-aligned files, or files of pairs) or plain text, from files or built-in corpora.

Files with columns are parsed by `delimited` (TSV, CSV, JSON lines) and `tables` (Parquet, datasets on disk).

Everything is streamed, so a corpus may be larger than memory. Every error names the file and the line. Plain text is
read as pairs too: a document is ("", text); a stream is read as one pair for each line, with its line feed.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regard.data import builtin
from regard.data.delimited import Layout, Lines, ReadOptions, detect, json_rows, rows
from regard.data.lines import COMPRESSED, read_lines
from regard.data.smiles import spellings
from regard.data.tables import dataset_rows, parquet_rows
from regard.errors import UserError
from regard.recipes.schema import MANIFESTS

if TYPE_CHECKING:
    from regard.recipes.schema import Corpus, DataSettings

TextPair = tuple[str, str]
Names = str | list[str]  # a file name, a glob, or a list of them


def corpora(data: DataSettings) -> list[Corpus]:
    """The corpora that a recipe trains on: those of `data.mix`, or `data` itself."""
    return list(data.mix) or [data]


def describe(corpus: Corpus) -> str:
    """Name a corpus in a message: its name, or its files."""
    given = (*corpus.tables, corpus.text, corpus.images, corpus.source, corpus.target)
    names = [name for name in given if name is not None]
    return corpus.corpus or " and ".join(", ".join(_listed(name)) for name in names)


def names_of(corpus: Corpus) -> list[str]:
    """The names and globs of a corpus's files, as the recipe has them."""
    names = (*corpus.tables, corpus.text, corpus.images, corpus.source, corpus.target)
    return [name for listed in names if listed is not None for name in _listed(listed)]


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else names


class MissingData(UserError):
    """A file that a recipe names does not exist."""


def locate(name: str, folder: str | None = None) -> Path:
    """Find the file `name`, relative to `folder`; the suffixes `.gz`, `.xz` and `.zst` may be omitted."""
    path = Path(folder or ".") / Path(name).expanduser()
    for candidate in (path, *(path.with_name(path.name + suffix) for suffix in COMPRESSED)):
        if os.path.exists(candidate):  # Path.exists raises if a parent folder is not accessible
            if not os.path.isfile(candidate) and not os.path.isdir(candidate):
                raise UserError(f"{candidate} is a pipe or a device, and data are read more than once: name a file")
            return candidate
    raise MissingData(f"no such file: {path} (nor with .gz, .xz or .zst); set the folder with --data FOLDER")


def expand(names: Names, folder: str | None = None) -> list[Path]:
    """The files that names and globs stand for, in the order of the list; the files of a glob are sorted by name."""
    paths = []
    for name in _listed(names):
        pattern = Path(folder or ".") / Path(name).expanduser()
        if not glob.has_magic(name) or os.path.exists(pattern):
            paths.append(locate(name, folder))
            continue
        found = sorted(glob.glob(str(pattern), recursive=True))
        if not found:
            raise UserError(f"no file matches {pattern}; set the folder with --data FOLDER")
        paths += [locate(match) for match in found]
    return paths


def files(corpus: Corpus, data: DataSettings) -> list[tuple[Path, ...]]:
    """The files of a corpus: (source, target) for line-aligned ones, (file,) otherwise; none for a built-in corpus."""
    if corpus.source is not None and corpus.target is not None:
        return _aligned_files("data.source", corpus.source, "data.target", corpus.target, data.folder)
    names = next((names for names in (*corpus.tables, corpus.text, corpus.images) if names is not None), None)
    if names is None and corpus.corpus is None:
        raise no_data(data)
    return [] if names is None else [(path,) for path in expand(names, data.folder)]


def no_data(data: DataSettings) -> UserError:
    """The error for an imported run, whose recipe names no data."""
    wanted = "data.text or data.pairs" if data.kind in ("text", "pairs") else f"data.{data.kind}"
    return UserError(f"the recipe has no training data (its weights were imported): set {wanted}")


def _aligned_files(
    source_key: str, source: Names, target_key: str, target: Names, folder: str | None
) -> list[tuple[Path, ...]]:
    sources, targets = expand(source, folder), expand(target, folder)
    if len(sources) != len(targets):
        counts = f"{source_key} has {len(sources)} and {target_key} has {len(targets)}"
        raise UserError(f"every source file needs a target file, but {counts}")
    return list(zip(sources, targets, strict=True))


def held_out_files(data: DataSettings, split: str) -> list[tuple[Path, ...]]:
    """The files of `data.valid` or `data.test`, as `files` returns them; none if it is not set."""
    names = {"valid": data.valid, "test": data.test}.get(split) or []
    if data.kind != "text" and len(names) == 2:
        return _aligned_files(f"data.{split}[0]", names[0], f"data.{split}[1]", names[1], data.folder)
    return [(path,) for path in expand(names, data.folder)]


def read_pairs(corpus: Corpus, data: DataSettings, split: str = "train") -> Iterator[TextPair]:
    """Stream the (source, target) texts of one corpus, without tags. `split` matters to built-in corpora only.

    Plain text gives ("", document), without the part that `data.held_out` holds out.
    """
    if corpus.plain:
        texts = _texts(corpus, data, split)
        if data.held_out and corpus.text is not None:
            texts = _before(texts, _held_out_start(corpus, data), data.documents)
        pairs: Iterator[TextPair] = (("", text) for text in islice(texts, corpus.count))
        return _checked(pairs, describe(corpus), data.lowercase, "text")
    if corpus.corpus is not None:
        pairs = _built_in(corpus.corpus, split, corpus.count)
    else:
        pairs = islice(_from_files(files(corpus, data), read_options(corpus, data)), corpus.count)
        if data.held_out:
            held_out_rows = _held_out_rows(corpus, data)
            pairs = (pair for number, pair in enumerate(pairs) if number not in held_out_rows)
    if data.spellings:
        pairs = ((text, label) for smiles, label in pairs for text in (smiles, *spellings(smiles, data.spellings)))
    return _checked(pairs, describe(corpus), data.lowercase)


def _held_out_rows(corpus: Corpus, data: DataSettings) -> dict[int, str]:
    """The rows of a corpus of pairs that `data.held_out` holds out, and the split that each belongs to."""
    rows = islice(_from_files(files(corpus, data), read_options(corpus, data)), corpus.count)
    total = sum(1 for _ in rows)
    order = np.random.Generator(np.random.PCG64(data.split_seed)).permutation(total).tolist()
    count = round(data.held_out * total)
    if not count:
        raise UserError(
            f"{describe(corpus)}: data.held_out = {data.held_out} of {total} pairs is less than one pair: raise it"
        )
    return dict.fromkeys(order[:count], "valid") | dict.fromkeys(order[count : 2 * count], "test")


def held_out(data: DataSettings, split: str) -> list[TextPair]:
    """Read the held-out pairs: the recipe's `valid` or `test` files, or else that split of the built-in corpora.

    For plain text from files, `data.held_out` may also hold out the end of the training text. A stream is one document,
    ("", the whole text).
    """
    if data.kind == "text":
        return _held_out_text(data, split)
    given = {"valid": data.valid, "test": data.test}.get(split)
    if given is not None:
        pairs = _from_files(held_out_files(data, split), read_options(data, data))
        return list(_checked(pairs, " and ".join(given), data.lowercase))
    if data.held_out and split in ("valid", "test"):
        return [pair for corpus in corpora(data) for pair in _held_out_pairs(corpus, data, split)]
    names = dict.fromkeys(corpus.corpus for corpus in corpora(data) if corpus.corpus is not None)
    if not names:
        wanted = "only built-in corpora have other splits"
        if split in ("valid", "test"):
            wanted = f"set data.{split}, or data.held_out to a share of them"
        raise UserError(f"the recipe has no {split} pairs: {wanted}")
    return [pair for name in names for pair in _checked(_built_in(name, split), f"{name} ({split})", data.lowercase)]


def _held_out_pairs(corpus: Corpus, data: DataSettings, split: str) -> Iterator[TextPair]:
    """The pairs of a corpus that `data.held_out` holds out for this split."""
    rows = _held_out_rows(corpus, data)
    pairs = _from_files(files(corpus, data), read_options(corpus, data))
    chosen = (pair for number, pair in enumerate(pairs) if rows.get(number) == split)
    return _checked(chosen, f"{describe(corpus)} ({split})", data.lowercase)


def _held_out_text(data: DataSettings, split: str) -> list[TextPair]:
    given = {"valid": data.valid, "test": data.test}.get(split)
    if given is not None:
        name = " and ".join(given)
        options = read_options(data, data)
        paths = held_out_files(data, split)
        texts = chain.from_iterable(_documents(path, data.documents, options) for (path,) in paths)
    else:
        from_training = data.held_out > 0 and split in ("valid", "test")
        parts = [corpus for corpus in corpora(data) if corpus.corpus is not None or from_training]
        if not parts:
            settings = f"data.{split}, or data.held_out to a share of the training text"
            wanted = f"set {settings}" if split in ("valid", "test") else "only built-in corpora have other splits"
            raise UserError(f"the recipe has no {split} text: {wanted}")
        name = f"{' and '.join(map(describe, parts))} ({split})"
        texts = chain.from_iterable(_held_out_part(corpus, data, split) for corpus in parts)
    pairs = list(_checked((("", text) for text in texts), name, data.lowercase, "text"))
    return [("", "".join(text for _, text in pairs))] if data.documents == "stream" else pairs


def _held_out_part(corpus: Corpus, data: DataSettings, split: str) -> Iterator[str]:
    """The part of a corpus that is not trained on: a split of a built-in corpus, or the end of a file."""
    texts = _texts(corpus, data, split)
    return texts if corpus.corpus is not None else _from(texts, _held_out_start(corpus, data), data.documents)


def _texts(corpus: Corpus, data: DataSettings, split: str) -> Iterator[str]:
    """The documents of a plain-text corpus; the lines of a stream, with their line feeds."""
    if corpus.corpus is None:
        options = read_options(corpus, data)
        return chain.from_iterable(_documents(path, data.documents, options) for (path,) in files(corpus, data))
    end = "\n" if data.documents == "stream" else ""
    return (text + end for _, text in _built_in(corpus.corpus, split, None))


def _documents(path: Path, kind: str, options: ReadOptions) -> Iterator[str]:
    """The documents of a file: lines, paragraphs between blank lines, or, for a stream, lines with their line feeds.

    In a file with columns every record is a document.
    """
    if options.kind(path) != "text":
        texts = (text for (text,) in _rows(path, options))
        yield from (f"{text}\n" for text in texts) if kind == "stream" else (text for text in texts if text.strip())
        return
    if kind == "stream":
        yield from read_lines(path, ends=True)
        return
    paragraph: list[str] = []
    for line in chain(read_lines(path), [""]):
        if line.strip() and kind == "paragraph":
            paragraph.append(line)
        elif line.strip():
            yield line
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []


def _held_out_start(corpus: Corpus, data: DataSettings) -> int:
    """The start of the held-out end of a text: an index of characters in a stream, otherwise of documents."""
    total = sum(len(text) if data.documents == "stream" else 1 for text in _texts(corpus, data, "train"))
    return int(round(1 - data.held_out, 12) * total)  # 1 - 0.8 is slightly less than 0.2


def _before(texts: Iterator[str], end: int, kind: str) -> Iterator[str]:
    """The texts before index `end`; a line of a stream is cut there."""
    if kind != "stream":
        yield from islice(texts, end)
        return
    for text in texts:
        if end <= 0:
            return
        yield text[:end]
        end -= len(text)


def _from(texts: Iterator[str], start: int, kind: str) -> Iterator[str]:
    """The texts from index `start` on."""
    if kind != "stream":
        yield from islice(texts, start, None)
        return
    for text in texts:
        if len(text) > start:
            yield text[start:]
        start = max(start - len(text), 0)


def _built_in(name: str, split: str, count: int | None = None) -> Iterator[TextPair]:
    return ((pair.source, pair.target) for pair in builtin.pairs(name, split, count))


def read_options(corpus: Corpus, data: DataSettings) -> ReadOptions:
    """The settings for reading the files of a corpus: those that a corpus of a mix leaves open are those of `data`."""
    format = data.format if corpus.format == "auto" else corpus.format
    columns, quoted, header = (
        getattr(data if getattr(corpus, name) is None else corpus, name) for name in ("columns", "quoted", "header")
    )
    names = ("text",) if data.kind == "text" else MANIFESTS.get(data.kind, ("source", "target"))
    columns = None if columns is None else tuple(columns)
    return ReadOptions(names, format, columns, quoted, header, lists_files=data.kind in MANIFESTS)


def detected_layouts(data: DataSettings) -> list[str]:
    """Describe the detected layouts of the recipe's training and validation files, one line each."""
    groups = [(group, read_options(corpus, data)) for corpus in corpora(data) for group in files(corpus, data)]
    groups += [(group, read_options(data, data)) for group in held_out_files(data, "valid")]
    single = [(group[0], options) for group, options in groups if len(group) == 1]
    lines = [_layout(path, options).summary for path, options in single if options.kind(path) in ("tsv", "csv")]
    return [line for line in dict.fromkeys(lines) if line]


def _from_files(groups: Sequence[tuple[Path, ...]], options: ReadOptions) -> Iterator[TextPair]:
    """The pairs of files of pairs, (path,), and of line-aligned files, (source, target)."""
    for group in groups:
        yield from _aligned(*group) if len(group) == 2 else _pairs_of(group[0], options)


def _pairs_of(path: Path, options: ReadOptions) -> Iterator[TextPair]:
    if options.kind(path) == "text":
        raise UserError(
            f"{path}: the name of a file of pairs must end in .csv, .tsv or .jsonl (optionally with .gz, .xz or .zst) "
            "or in .parquet, or data.format must be set"
        )
    folder = path.parent if options.lists_files else Path()
    return (
        (str(folder / source) if options.lists_files else source, target) for source, target in _rows(path, options)
    )


def _rows(path: Path, options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """The selected columns of a file with columns."""
    kind, lines = options.kind(path), _lines_of(path)
    if kind in ("parquet", "dataset"):
        return parquet_rows(path, options) if kind == "parquet" else dataset_rows(path, options)
    return json_rows(path, lines, options) if kind == "jsonl" else rows(path, lines, _layout(path, options))


def _lines_of(path: Path) -> Lines:
    return lambda ends: read_lines(path, ends=ends)


def _layout(path: Path, options: ReadOptions) -> Layout:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return _cached_layout(path, options, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=64)
def _cached_layout(path: Path, options: ReadOptions, size: int, time: int) -> Layout:
    """Detect the layout of a file once, as long as its size and time stay the same."""
    return detect(path, _lines_of(path), options)


def _aligned(source: Path, target: Path) -> Iterator[TextPair]:
    for path in (source, target):
        if path.is_dir() or path.suffix.lower() == ".parquet":
            raise UserError(f"{path}: source and target are files of lines; a table of both is data.pairs")
    left, right = read_lines(source), read_lines(target)
    for number, (source_line, target_line) in enumerate(zip_longest(left, right), 1):
        if source_line is None or target_line is None:
            longer = number + sum(1 for _ in (left if target_line is None else right))
            counts = (longer, number - 1) if target_line is None else (number - 1, longer)
            raise UserError(f"not line-aligned: {source} has {counts[0]} lines, {target} has {counts[1]}")
        yield source_line, target_line


def _checked(pairs: Iterator[TextPair], name: str, lowercase: bool, what: str = "sentence pairs") -> Iterator[TextPair]:
    """Yield the pairs, lower-cased if `lowercase` is set; raise an error if there are none."""
    empty = True
    for source, target in pairs:
        empty = False
        yield (source.lower(), target.lower()) if lowercase else (source, target)
    if empty:
        raise UserError(f"{name}: no {what}")
