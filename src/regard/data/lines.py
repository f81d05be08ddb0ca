"""Stream the lines of plain and compressed files, with bounded memory."""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from regard.errors import UserError

MAX_LINE_BYTES = 1 << 27  # 128 MiB: above any real line, and below what a small compressed file can expand to
COMPRESSED = (".gz", ".xz", ".zst")


def read_lines(path: str | Path, *, ends: bool = False) -> Iterator[str]:
    """Stream the lines of a plain, .gz, .xz or .zst file; `ends` keeps their line feeds."""
    return decode_lines(read_bytes(path), str(path), ends=ends)


def read_bytes(path: str | Path) -> Iterator[bytes]:
    """Stream the lines of a plain, .gz, .xz or .zst file as bytes, with their line feeds."""
    try:
        with open_compressed(Path(path), "rb") as stream:
            yield from iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def describe_invalid(error: UnicodeDecodeError, number: int) -> str:
    """Say what is wrong with a line that is not UTF-8. Some programs of Windows write UTF-16, with a mark in front."""
    if number == 1 and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "this is UTF-16, not UTF-8; iconv -f UTF-16 -t UTF-8 converts it"
    return f"not valid UTF-8 (byte {error.start + 1} of the line)"


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
                raise UserError(f"{name}, line {number}: {describe_invalid(error, number)}") from error
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


def open_compressed(path: Path, mode: str, suffix: str | None = None) -> BinaryIO:
    """Open a file for reading ("rb") or writing ("wb"), with the compression of `suffix`, by default the file's."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}
    return cast(BinaryIO, openers.get((suffix or path.suffix).lower(), open)(path, mode))


def _open_zst(path: Path, mode: str) -> IO[bytes]:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: .zst files need pyarrow: pip install 'regard[datasets]'") from None
    if mode == "wb":
        return cast(IO[bytes], pyarrow.output_stream(str(path), compression="zstd"))
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 16)
