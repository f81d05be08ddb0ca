"""Reading sentence pairs (two line-aligned files, one file of pairs) or plain text, from files or built-in corpora.

How a file of columns (TSV, CSV, JSON lines) is taken apart is in `tables`.

Everything is a stream, so a corpus may be larger than memory, and every complaint names the file and the line. Plain
text comes as pairs too: a document is ("", text), and of one long stream each line is one, with its line feed.
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

from regard.data.delimited import Layout, Lines, Reading, detect, json_rows, rows
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.recipes.schema import Corpus, DataSettings

TextPair = tuple[str, str]
MAX_LINE_BYTES = 1 << 27  # 128 MiB: above any real line, and below what a small compressed file can expand to


def corpora(data: DataSettings) -> list[Corpus]:
    """The corpora a recipe trains on: those of its mix, or its only one."""
    return list(data.mix) or [data]


def describe(corpus: Corpus) -> str:
    """What to call a corpus in a message: its name, or its files."""
    return corpus.corpus or corpus.pairs or corpus.text or f"{corpus.source} and {corpus.target}"


def locate(name: str, folder: str | None = None) -> Path:
    """The file that a name means: relative names are looked up in `folder`; `.gz` and `.xz` need not be written out."""
    path = Path(folder or ".") / Path(name).expanduser()
    for candidate in (path, path.with_name(path.name + ".gz"), path.with_name(path.name + ".xz")):
        if os.path.exists(candidate):  # Path.exists would raise where a folder may not be entered
            if not os.path.isfile(candidate) and not os.path.isdir(candidate):
                raise UserError(f"{candidate} is a pipe or a device, and data are read more than once: name a file")
            return candidate
    raise UserError(f"no such file: {path} (nor with .gz or .xz after it); --data FOLDER says where to look")


def files(corpus: Corpus, data: DataSettings) -> list[Path]:
    """The files a corpus is read from; none for a built-in one."""
    names = [name for name in (corpus.pairs, corpus.text, corpus.source, corpus.target) if name is not None]
    if not names and corpus.corpus is None:
        raise UserError("the recipe has no training data (its weights were imported): set data.text or data.pairs")
    return [locate(name, data.folder) for name in names]


def read_pairs(corpus: Corpus, data: DataSettings, split: str = "train") -> Iterator[TextPair]:
    """Stream the (source, target) texts of one corpus. `split` is of interest to built-in corpora only.

    Plain text gives ("", document); what `data.held_out` sets aside at its end is left out. Tags are not part of the
    text; they are put in front when text becomes tokens.
    """
    if corpus.plain:
        texts = _texts(corpus, data, split)
        if data.held_out and corpus.text is not None:
            texts = _before(texts, _border(corpus, data), data.documents)
        pairs: Iterator[TextPair] = (("", text) for text in islice(texts, corpus.count))
        return _checked(pairs, describe(corpus), data.lowercase, "text")
    if corpus.corpus is not None:
        pairs = _built_in(corpus.corpus, split, corpus.count)
    else:
        pairs = islice(_from_files(files(corpus, data), reading(corpus, data)), corpus.count)
    return _checked(pairs, describe(corpus), data.lowercase)


def held_out(data: DataSettings, split: str) -> list[TextPair]:
    """The held-out pairs: the recipe's `valid` or `test` files, or else the built-in corpora's own split.

    Plain text of files may also hold out its own end, `data.held_out`. A stream is one document, ("", the whole text).
    """
    if data.is_text:
        return _held_out_text(data, split)
    given = {"valid": data.valid, "test": data.test}.get(split)
    if given is not None:
        paths = [locate(name, data.folder) for name in given]
        return list(_checked(_from_files(paths, reading(data, data)), " and ".join(given), data.lowercase))
    names = dict.fromkeys(corpus.corpus for corpus in corpora(data) if corpus.corpus is not None)
    if not names:
        wanted = f"set data.{split}" if split in ("valid", "test") else "only built-in corpora have other splits"
        raise UserError(f"the recipe has no {split} pairs: {wanted}")
    return [pair for name in names for pair in _checked(_built_in(name, split), f"{name} ({split})", data.lowercase)]


def _held_out_text(data: DataSettings, split: str) -> list[TextPair]:
    given = {"valid": data.valid, "test": data.test}.get(split)
    if given is not None:
        name = " and ".join(given)
        how = reading(data, data)
        texts = chain.from_iterable(_documents(locate(file, data.folder), data.documents, how) for file in given)
    else:
        mix, own = corpora(data), data.held_out > 0 and split in ("valid", "test")
        parts = [corpus for corpus in mix if corpus.corpus is not None or own]
        if not parts:
            share = f"data.{split}, or data.held_out to a share of the training text"
            wanted = f"set {share}" if split in ("valid", "test") else "only built-in corpora have other splits"
            raise UserError(f"the recipe has no {split} text: {wanted}")
        name = f"{' and '.join(map(describe, parts))} ({split})"
        texts = chain.from_iterable(_set_aside(corpus, data, split) for corpus in parts)
    pairs = list(_checked((("", text) for text in texts), name, data.lowercase, "text"))
    return [("", "".join(text for _, text in pairs))] if data.documents == "stream" else pairs


def _set_aside(corpus: Corpus, data: DataSettings, split: str) -> Iterator[str]:
    """What training does not see of a corpus: a built-in one's split, or the end of a file."""
    texts = _texts(corpus, data, split)
    return texts if corpus.corpus is not None else _from(texts, _border(corpus, data), data.documents)


def _texts(corpus: Corpus, data: DataSettings, split: str) -> Iterator[str]:
    """The documents of a corpus of plain text; of a stream its lines, with their line feeds."""
    if corpus.corpus is None:
        how = reading(corpus, data)
        return chain.from_iterable(_documents(path, data.documents, how) for path in files(corpus, data))
    end = "\n" if data.documents == "stream" else ""
    return (text + end for _, text in _built_in(corpus.corpus, split, None))


def _documents(path: Path, kind: str, how: Reading) -> Iterator[str]:
    """The documents of a file: its lines, what stands between blank lines, or, of a stream, lines with line feeds.

    In a file with columns every record is one.
    """
    if how.kind(path) != "text":
        texts = (text for (text,) in _rows(path, how))
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


def _border(corpus: Corpus, data: DataSettings) -> int:
    """Where the held-out end of a text begins: in characters of a stream, else in documents."""
    total = sum(len(text) if data.documents == "stream" else 1 for text in _texts(corpus, data, "train"))
    return int(round(1 - data.held_out, 12) * total)  # 1 - 0.8 is a little less than 0.2


def _before(texts: Iterator[str], border: int, kind: str) -> Iterator[str]:
    """What comes before the border; a line of a stream is cut there."""
    if kind != "stream":
        yield from islice(texts, border)
        return
    for text in texts:
        if border <= 0:
            return
        yield text[:border]
        border -= len(text)


def _from(texts: Iterator[str], border: int, kind: str) -> Iterator[str]:
    """What comes from the border on."""
    if kind != "stream":
        yield from islice(texts, border, None)
        return
    for text in texts:
        if len(text) > border:
            yield text[border:]
        border = max(border - len(text), 0)


def read_lines(path: str | Path, *, ends: bool = False) -> Iterator[str]:
    """Stream the lines of a plain, .gz or .xz file, without their line feeds, or with them."""
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
    """The text of lines of bytes, such as those of a file; `name` is for complaints.

    Bytes that are not UTF-8 are an error; if `on_error` is given, it is called and they are replaced by U+FFFD.

    Only a line feed ends a line (Python's own text reading would also cut at a carriage return, and a line-aligned
    neighbour would be one line off from there on). A carriage return before it, and a byte-order mark, are dropped.
    A line of more than MAX_LINE_BYTES is an error; `stream` should cut it there, so that memory stays bounded.
    """
    for number, line in enumerate(stream, 1):
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{name}, line {number}: longer than {MAX_LINE_BYTES >> 20} MB; break it into lines")
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
    begun: list[bytes] = []  # blocks of a line whose end has not come yet
    size = 0  # their bytes
    for block in blocks:
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end, b"\n"])
            begun, size = [], 0
        begun.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            yield b"".join(begun)
            begun, size = [], 0
    if size:
        yield b"".join(begun)


def _open(path: Path) -> BinaryIO:
    openers: dict[str, Callable[..., object]] = {".gz": gzip.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(path.suffix.lower(), open)(path, "rb"))


def _built_in(name: str, split: str, count: int | None = None) -> Iterator[TextPair]:
    from regard.data.builtin import pairs

    return ((pair.source, pair.target) for pair in pairs(name, split, count))


def reading(corpus: Corpus, data: DataSettings) -> Reading:
    """How the files of a corpus are read; what a part of a mix does not say, [data] says."""
    format = data.format if corpus.format == "auto" else corpus.format
    columns, quoted, header = (
        getattr(data if getattr(corpus, name) is None else corpus, name) for name in ("columns", "quoted", "header")
    )
    names = ("text",) if data.is_text else ("source", "target")
    return Reading(names, format, None if columns is None else tuple(columns), quoted, header)


def detected(data: DataSettings) -> list[str]:
    """What was found out of the layout of the recipe's training and validation files, a line for each."""
    single = [(path, reading(corpus, data)) for corpus in corpora(data) for path in _single(files(corpus, data))]
    given = [locate(name, data.folder) for name in data.valid or ()]
    single += [(path, reading(data, data)) for path in (given if data.is_text else _single(given))]
    found = [_layout(path, how).said for path, how in single if how.kind(path) in ("tsv", "csv")]
    return [line for line in dict.fromkeys(found) if line]


def _single(paths: list[Path]) -> list[Path]:
    """The one file of pairs; none of two that are line-aligned."""
    return paths if len(paths) == 1 else []


def _from_files(paths: Sequence[Path], how: Reading) -> Iterator[TextPair]:
    """The pairs of one file of pairs, or of two line-aligned files."""
    if len(paths) == 2:
        return _aligned(*paths)
    [path] = paths
    if how.kind(path) == "text":
        wanted = ".csv, .tsv or .jsonl (and .gz or .xz after that), or data.format must say what it is"
        raise UserError(f"{path}: a file of pairs must be called {wanted}")
    return ((source, target) for source, target in _rows(path, how))


def _rows(path: Path, how: Reading) -> Iterator[tuple[str, ...]]:
    """The wanted columns of a file that has columns."""
    lines = _lines_of(path)
    return json_rows(path, lines, how) if how.kind(path) == "jsonl" else rows(path, lines, _layout(path, how))


def _lines_of(path: Path) -> Lines:
    return lambda ends: read_lines(path, ends=ends)


def _layout(path: Path, how: Reading) -> Layout:
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return _known_layout(path, how, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=64)
def _known_layout(path: Path, how: Reading, size: int, time: int) -> Layout:
    """The layout of a file, found out once while its size and time stay the same."""
    return detect(path, _lines_of(path), how)


def _aligned(source: Path, target: Path) -> Iterator[TextPair]:
    left, right = read_lines(source), read_lines(target)
    for number, (one, other) in enumerate(zip_longest(left, right), 1):
        if one is None or other is None:
            longer = number + sum(1 for _ in (left if other is None else right))
            counts = (longer, number - 1) if other is None else (number - 1, longer)
            raise UserError(f"not line-aligned: {source} has {counts[0]} lines, {target} has {counts[1]}")
        yield one, other


def _checked(pairs: Iterator[TextPair], name: str, lowercase: bool, what: str = "sentence pairs") -> Iterator[TextPair]:
    """The pairs, lower-cased if asked for; none at all is an error."""
    empty = True
    for source, target in pairs:
        empty = False
        yield (source.lower(), target.lower()) if lowercase else (source, target)
    if empty:
        raise UserError(f"{name}: no {what}")
