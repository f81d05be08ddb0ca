"""Names of entries of the token cache: digests of everything that determines their content.

Input files count by name and content, not by folder or time, so that an entry that was built on one machine is found on
another.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.data import builtin
from regard.data.cache_entry import cache_home, new_hash
from regard.data.corpora import files, read_options
from regard.data.corpus_encoder import CorpusEncoder
from regard.data.pharaoh import PairLinks
from regard.data.token_files import VERSION
from regard.errors import UserError
from regard.files import checksum, write_text
from regard.text.encode import prefix_ids


def cache_folder() -> Path:
    """The folder of the token cache."""
    return cache_home() / "tokens"


def entry_folder(encoder: CorpusEncoder, links: PairLinks | None) -> Path:
    """The folder of the tokens of a corpus."""
    corpus, data = encoder.corpus, encoder.data
    content = {
        "version": VERSION,
        "corpus": [corpus.corpus, corpus.text, corpus.count, corpus.source_tag, corpus.target_tag],
        "reading": [data.lowercase, asdict(read_options(corpus, data)), data.held_out],
        "division": [data.documents] if corpus.plain else [data.spellings, data.split_seed],
        "limits": [encoder.max_tokens, encoder.max_pair_tokens],
        "tokenizers": [encoder.source_tokenizer.to_json(), encoder.target_encoder.to_json()],
        "prefix": prefix_ids(encoder.recipe),
        "input": _input_identity(encoder),
        "links": None if links is None else [_file_identity(links.path), links.first],
    }
    return cache_folder() / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _input_identity(encoder: CorpusEncoder) -> list[Any]:
    """The files of a corpus; of a built-in corpus, those that define it."""
    if encoder.corpus.corpus is None:
        groups = files(encoder.corpus, encoder.data)
        return [_file_identity(file.absolute()) for group in groups for path in group for file in _files_of(path)]
    package = Path(builtin.__file__).parent
    definitions = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".tsv"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in definitions]


def _files_of(path: Path) -> list[Path]:
    """The files in a folder, or the file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _file_identity(path: Path) -> list[str]:
    """The name of a file, which may tell its format, and a digest of its content."""
    return [path.name, content_digest(path.absolute())]


def content_digest(path: Path) -> str:
    """A digest of a file's content, which is remembered as long as path, size and time stay the same."""
    try:
        state = path.stat()
        seen = [str(path), state.st_size, state.st_mtime_ns]
        known_file = cache_home() / "inputs" / f"{checksum(str(path))}.json"
        if (digest := _known_digest(known_file, seen)) is not None:
            return digest
        with open(path, "rb", buffering=0) as file:
            digest = hashlib.file_digest(file, new_hash).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    with suppress(UserError):  # it only saves time
        write_text(known_file, json.dumps({"file": seen, "digest": digest}))
    return digest


def _known_digest(known_file: Path, seen: list[Any]) -> str | None:
    """The digest that an earlier call stored for a file that has not changed since."""
    try:
        known = json.loads(known_file.read_text(encoding="utf-8"))
        return str(known["digest"]) if known["file"] == seen else None
    except (OSError, ValueError, LookupError, TypeError):  # not known, or damaged
        return None
