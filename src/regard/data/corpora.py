"""Read sentence pairs (two line-aligned files, or one file of pairs) or plain text, from files or built-in corpora.

Files with columns (TSV, CSV, JSON lines) are parsed by `delimited`.

Everything is streamed, so a corpus may be larger than memory. Every error names the file and the line. Plain text is
read as pairs too: a document is ("", text); a stream is read as one pair for each line, with its line feed.
"""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from regard.data import builtin
from regard.data.delimited import Layout, Lines, ReadOptions, detect, json_rows, rows
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.recipes.schema import Corpus, DataSettings

TextPair = tuple[str, str]
MAX_LINE_BYTES = 1 << 27  # 128 MiB: above any real line, and below what a small compressed file can expand to


def corpora(data: DataSettings) -> list[Corpus]:
    """The corpora that a recipe trains on: those of `data.mix`, or `data` itself."""
    return list(data.mix) or [data]


def describe(corpus: Corpus) -> str:
    """Name a corpus in a message: its name, or its files."""
    return corpus.corpus or corpus.pairs or corpus.text or f"{corpus.source} and {corpus.target}"


def locate(name: str, folder: str | None = None) -> Path:
    """Find the file `name`, relative to `folder`; the suffixes `.gz` and `.xz` may be omitted."""
    path = Path(folder or ".") / Path(name).expanduser()
    for candidate in (path, path.with_name(path.name + ".gz"), path.with_name(path.name + ".xz")):
        if os.path.exists(candidate):  # Path.exists raises if a parent folder is not accessible
            if not os.path.isfile(candidate) and not os.path.isdir(candidate):
                raise UserError(f"{candidate} is a pipe or a device, and data are read more than once: name a file")
            return candidate
    raise UserError(f"no such file: {path} (nor with .gz or .xz); set the folder with --data FOLDER")


def files(corpus: Corpus, data: DataSettings) -> list[Path]:
    """The files of a corpus; an empty list for a built-in one."""
    names = [name for name in (corpus.pairs, corpus.text, corpus.source, corpus.target) if name is not None]
    if not names and corpus.corpus is None:
        raise UserError("the recipe has no training data (its weights were imported): set data.text or data.pairs")
    return [locate(name, data.folder) for name in names]


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
    return _checked(pairs, describe(corpus), data.lowercase)


def held_out(data: DataSettings, split: str) -> list[TextPair]:
    """Read the held-out pairs: the recipe's `valid` or `test` files, or else that split of the built-in corpora.

    For plain text from files, `data.held_out` may also hold out the end of the training text. A stream is one document,
    ("", the whole text).
    """
    if data.kind == "text":
        return _held_out_text(data, split)
    given = {"valid": data.valid, "test": data.test}.get(split)
    if given is not None:
        paths = [locate(name, data.folder) for name in given]
        return list(_checked(_from_files(paths, read_options(data, data)), " and ".join(given), data.lowercase))
    names = dict.fromkeys(corpus.corpus for corpus in corpora(data) if corpus.corpus is not None)
    if not names:
        wanted = f"set data.{split}" if split in ("valid", "test") else "only built-in corpora have other splits"
        raise UserError(f"the recipe has no {split} pairs: {wanted}")
    return [pair for name in names for pair in _checked(_built_in(name, split), f"{name} ({split})", data.lowercase)]


def _held_out_text(data: DataSettings, split: str) -> list[TextPair]:
    given = {"valid": data.valid, "test": data.test}.get(split)
    if given is not None:
        name = " and ".join(given)
        options = read_options(data, data)
        texts = chain.from_iterable(_documents(locate(file, data.folder), data.documents, options) for file in given)
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
        return chain.from_iterable(_documents(path, data.documents, options) for path in files(corpus, data))
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
    """Where the held-out end of a text starts: an index of characters in a stream, otherwise of documents."""
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


def read_lines(path: str | Path, *, ends: bool = False) -> Iterator[str]:
    """Stream the lines of a plain, .gz or .xz file; `ends` keeps their line feeds."""
    return decode_lines(read_bytes(path), str(path), ends=ends)


def read_bytes(path: str | Path) -> Iterator[bytes]:
    """Stream the lines of a plain, .gz or .xz file as bytes, with their line feeds."""
    try:
        with _open(Path(path)) as stream:
            yield from iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def decode_lines(
    stream: Iterable[bytes],
    name: str,
    *,
    ends: bool = False,
    on_error: Callable[[UnicodeDecodeError], None] | None = None,
) -> Iterator[str]:
    """Decode lines of bytes, such as those of a file; `name` is used in error messages.

    Bytes that are not UTF-8 are an error; if `on_error` is given, it is called and they are replaced by U+FFFD.

    Only a line feed ends a line: Python's text mode also splits at a carriage return, which would shift every following
    line of a line-aligned file. A carriage return before the line feed and a byte-order mark are dropped.
    A line of more than MAX_LINE_BYTES is an error; `stream` should cut it there, so that memory stays bounded.
    """
    for number, line in enumerate(stream, 1):
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{name}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; split it into lines")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            if on_error is None:
                where = f"byte {error.start + 1} of the line"
                raise UserError(f"{name}, line {number}: not valid UTF-8 ({where})") from error
            on_error(error)
            text = line.decode("utf-8", "replace")
        if number == 1:
            text = text.removeprefix("\ufeff")
        bare = text.removesuffix("\n")
        end = "\n" if ends and bare != text else ""
        yield bare.removesuffix("\r") + end


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split blocks of bytes into lines with their line feeds, in time linear in their length.

    The last line may lack its line feed. A line that grows above MAX_LINE_BYTES is yielded before its end.
    """
    pending: list[bytes] = []  # parts of a line whose end has not been read yet
    size = 0  # their bytes
    for block in blocks:
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join([*pending, end, b"\n"])
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            yield b"".join(pending)
            pending, size = [], 0
    if size:
        yield b"".join(pending)


def _open(path: Path) -> BinaryIO:
    openers: dict[str, Callable[..., object]] = {".gz": gzip.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(path.suffix.lower(), open)(path, "rb"))


def _built_in(name: str, split: str, count: int | None = None) -> Iterator[TextPair]:
    return ((pair.source, pair.target) for pair in builtin.pairs(name, split, count))


def read_options(corpus: Corpus, data: DataSettings) -> ReadOptions:
    """How the files of a corpus are read: a setting that a corpus of a mix leaves open is taken from `data`."""
    format = data.format if corpus.format == "auto" else corpus.format
    columns, quoted, header = (
        getattr(data if getattr(corpus, name) is None else corpus, name) for name in ("columns", "quoted", "header")
    )
    names = ("text",) if data.kind == "text" else ("source", "target")
    return ReadOptions(names, format, None if columns is None else tuple(columns), quoted, header)


def detected_layouts(data: DataSettings) -> list[str]:
    """Describe the detected layouts of the recipe's training and validation files, one line each."""
    single = [(path, read_options(corpus, data)) for corpus in corpora(data) for path in _single(files(corpus, data))]
    valid = [locate(name, data.folder) for name in data.valid or ()]
    single += [(path, read_options(data, data)) for path in (valid if data.kind == "text" else _single(valid))]
    lines = [_layout(path, options).summary for path, options in single if options.kind(path) in ("tsv", "csv")]
    return [line for line in dict.fromkeys(lines) if line]


def _single(paths: list[Path]) -> list[Path]:
    """The file of pairs; an empty list for two line-aligned files."""
    return paths if len(paths) == 1 else []


def _from_files(paths: Sequence[Path], options: ReadOptions) -> Iterator[TextPair]:
    """The pairs of one file of pairs, or of two line-aligned files."""
    if len(paths) == 2:
        return _aligned(*paths)
    [path] = paths
    if options.kind(path) == "text":
        raise UserError(
            f"{path}: the name of a file of pairs must end in .csv, .tsv or .jsonl (optionally with .gz or .xz), "
            "or data.format must be set"
        )
    return ((source, target) for source, target in _rows(path, options))


def _rows(path: Path, options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """The selected columns of a file with columns."""
    lines = _lines_of(path)
    if options.kind(path) == "jsonl":
        return json_rows(path, lines, options)
    return rows(path, lines, _layout(path, options))


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
