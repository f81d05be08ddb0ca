"""The files of tokenized corpora: memory-mapped arrays, and a JSON file about them.

    source.ids, target.ids              concatenated token ids, uint16 or uint32; every sequence ends with EOS, except
                                        labels such as classes, which are one number each
    source.offsets, target.offsets      [n + 1] int64, the start of each sequence
    links.ids, links.offsets            with `training.guided_alignment`: links between the tokens of each pair
    about.json                          dtype of the ids, number of pairs kept and dropped, names and digests of the
                                        files, checksum of this file

A file of `FILE_BYTES` is continued in the next: source.ids, source.ids.1, source.ids.2. They are mapped, not read, and
verified by as many threads as there are files.

Plain text is stored as pairs with empty sources. Documents longer than the model's context are split into chunks, one
sequence each; only the last one ends with EOS. A stream (`data.documents = "stream"`) is one sequence without special
tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import cast

import numpy as np

from regard.data.cache_entry import folder_digest, new_hash
from regard.data.token_store import Array, ChunkedArray, CorpusReport, Ragged, TokenStore
from regard.errors import UserError
from regard.files import json_checksum

VERSION = 5  # version of the layout above, of splitting text and of identifying inputs
LINKS = "links"
FILES = [f"{side}.{part}" for side in ("source", "target") for part in ("ids", "offsets")]
LINK_FILES = [f"{LINKS}.{part}" for part in ("ids", "offsets")]
FILE_BYTES = 2**30  # a multiple of the size of every number


class ArrayWriter:
    """Appends numbers to an array in one file or, if it grows, in several."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.names: list[str] = []
        self._digests: list[str] = []
        self._open()

    def _open(self) -> None:
        self.names.append(self._path.name + (f".{len(self.names)}" if self.names else ""))
        self._file = open(self._path.with_name(self.names[-1]), "wb")  # noqa: SIM115  see `close`
        self._hash, self._room = new_hash(), FILE_BYTES

    def write(self, numbers: Array) -> None:
        content = memoryview(numbers.tobytes())
        while len(content):
            if not self._room:
                self.close()
                self._open()
            part, content = content[: self._room], content[self._room :]
            self._hash.update(part)
            self._file.write(part)
            self._room -= len(part)

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._digests.append(self._hash.hexdigest())

    def digest(self) -> str:
        """The concatenated digests of the files, after they were closed."""
        return "".join(self._digests)


class SideWriter:
    """Appends the sequences of one side to its two arrays."""

    def __init__(self, folder: Path, side: str, dtype: str) -> None:
        self.dtype = dtype
        self.total = 0
        self.ids, self.offsets = (ArrayWriter(folder / f"{side}.{name}") for name in ("ids", "offsets"))
        self.offsets.write(np.zeros(1, np.int64))

    def __enter__(self) -> SideWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.ids.close()
        self.offsets.close()

    def add(self, sequences: Ragged, joined: bool = False) -> None:
        """Append sequences; if `joined`, as parts of one sequence, which `end_sequence` ends."""
        self.ids.write(sequences.ids)
        if not joined:
            self.offsets.write(sequences.offsets[1:] + self.total)
        self.total += len(sequences.ids)

    def end_sequence(self) -> None:
        self.offsets.write(np.array([self.total], np.int64))


def write_about(folder: Path, writers: list[SideWriter], report: CorpusReport) -> None:
    """Write about.json, after the arrays: those of the source, of the target, and of links if there are any."""
    about = {"version": VERSION, "source": writers[0].dtype, "target": writers[1].dtype, "report": asdict(report)}
    arrays = [array for writer in writers for array in (writer.ids, writer.offsets)]
    about["digest"] = "".join(array.digest() for array in arrays)
    about["files"] = [name for array in arrays for name in array.names]
    about |= {LINKS: writers[2].total} if len(writers) > 2 else {}
    about["checksum"] = json_checksum(about)
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def open_tokens(folder: Path) -> TokenStore | None:
    """Open the arrays in a folder; None if they do not exist or are not what was written."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        expected = [*FILES, *(LINK_FILES if LINKS in about else ())]
        names = about.get("files", expected)
        if [name for name in names if re.sub(r"\.[0-9]+$", "", name) not in expected]:
            return None
        if about.pop("checksum") != json_checksum(about) or about["digest"] != folder_digest(folder, names):
            return None
        report = CorpusReport(**about["report"])
        source = _side(folder, names, "source", about["source"], report.source_tokens)
        target = _side(folder, names, "target", about["target"], report.target_tokens)
        links = _side(folder, names, LINKS, "uint32", about[LINKS]) if LINKS in about else None
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except OSError as error:
        raise UserError(f"cannot read the tokens in {folder}: {error.strerror or error}") from error
    complete = len(source) == len(target) == report.pairs and (links is None or len(links) == report.pairs)
    return TokenStore(source, target, report, about["digest"], links) if complete else None


def _side(folder: Path, names: list[str], side: str, dtype: str, tokens: int) -> Ragged:
    ids, offsets = _array(folder, names, f"{side}.ids", dtype), _array(folder, names, f"{side}.offsets", "int64")
    if not len(ids) == tokens == offsets[-1]:
        raise ValueError(f"{folder}: damaged")
    return Ragged(ids, offsets)


def _array(folder: Path, names: list[str], name: str, dtype: str) -> Array:
    """The array whose first file has this name."""
    files = [folder / each for each in names if re.fullmatch(rf"{re.escape(name)}(\.[0-9]+)?", each)]
    if len(files) == 1 and not files[0].stat().st_size:  # sources of plain text: mmap refuses empty files
        return np.zeros(0, dtype)
    parts = [np.asarray(np.memmap(file, dtype, "r")) for file in files]  # plain views: slicing a memmap object is slow
    return parts[0] if len(parts) == 1 else cast(Array, ChunkedArray(parts))
