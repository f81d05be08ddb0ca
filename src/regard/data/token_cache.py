"""Cache of tokenized corpora, on disk and shared by all runs.

A corpus is tokenized once (`corpus_encoder`) and stored in a folder of plain arrays (`token_files`). The folder's name
is a digest of everything that determines its content, so entries never become stale: when the input changes, so does
the name. Files count by their content, not by path or time, so that entries that were built on one machine are found on
another. The cache may be deleted at any time. Opening an entry verifies its digests; a damaged one is rebuilt.

All cores tokenize, in processes that each encode a block of pairs; this process reads and writes, in order, so that the
files do not depend on the number of processes, nor memory on the size of the corpus. Processes on one machine that need
the same entry wait for the first of them to build it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.data import builtin
from regard.data.cache_entry import CacheEntry, cache_home, new_hash
from regard.data.corpora import TextPair, corpora, describe, files, read_options, read_pairs
from regard.data.corpus_encoder import CorpusEncoder, LabelEncoder, TextBlock
from regard.data.pharaoh import PairLinks
from regard.data.token_files import LINKS, VERSION, SideWriter, open_tokens, write_about
from regard.data.token_store import CorpusReport, TokenStore
from regard.data.workers import map_in_order
from regard.errors import UserError
from regard.files import checksum, write_text
from regard.text import Tokenizer
from regard.text.encode import prefix_ids, stream_parts

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe

CHUNK_PAIRS = 10_000  # encoded at once: enough for the library's threads, few enough for little memory

Item = TypeVar("Item")
Progress = Callable[[str, int], None]  # called with the corpus's name and the number of pairs read so far


def cache_folder() -> Path:
    """The folder of the token cache."""
    return cache_home() / "tokens"


def build(
    recipe: Recipe,
    source_tokenizer: Tokenizer,
    target_encoder: Tokenizer | LabelEncoder,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    links: Path | None = None,
) -> list[TokenStore]:
    """Tokenize every corpus of the recipe's mix, or open its cache entry if there is an undamaged one.

    `say` is called with a message when a damaged entry is rebuilt. `links` is a Pharaoh file with a line for each pair
    of all corpora, one corpus after the other.
    """
    progress, say = progress or (lambda name, pairs: None), say or (lambda line: None)
    stores: list[TokenStore] = []
    for corpus in corpora(recipe.data):
        linked = None if links is None else PairLinks(links, sum(store.report.read for store in stores))
        encoder = CorpusEncoder(corpus, recipe, source_tokenizer, target_encoder)
        entry = CacheEntry(_folder(encoder, linked), f"the tokens of {describe(corpus)}", open_tokens)
        stores.append(entry.opened(partial(_write, encoder, linked, progress), say))
    if links is not None:
        PairLinks(links).check_count(sum(store.report.read for store in stores))
    return stores


def stored(recipe: Recipe, source_tokenizer: Tokenizer, target_encoder: Tokenizer | LabelEncoder) -> dict[Path, bool]:
    """The cache folders of the recipe's corpora that exist, and whether each is undamaged."""
    encoders = [CorpusEncoder(corpus, recipe, source_tokenizer, target_encoder) for corpus in corpora(recipe.data)]
    folders = [_folder(encoder, None) for encoder in encoders]
    return {folder: open_tokens(folder) is not None for folder in folders if folder.exists()}


# -- names of entries --------------------------------------------------------------------------------------------------


def _folder(encoder: CorpusEncoder, links: PairLinks | None) -> Path:
    """The folder of an entry, named by a digest of everything that determines its content."""
    corpus, data = encoder.corpus, encoder.data
    spec = [corpus.corpus, corpus.text, corpus.count, corpus.source_tag, corpus.target_tag]
    limits = [encoder.max_tokens, data.lowercase, asdict(read_options(corpus, data)), prefix_ids(encoder.recipe)]
    limits += [data.documents, data.held_out] if corpus.plain else [encoder.max_pair_tokens, data.spellings]
    limits += [] if corpus.plain else [data.held_out, data.split_seed]
    tokenizers = [encoder.source_tokenizer.to_json(), encoder.target_encoder.to_json()]
    linked = [] if links is None else [[_identity(links.path), links.first]]
    content = json.dumps([VERSION, spec, limits, _inputs(encoder), tokenizers, *linked])
    return cache_folder() / hashlib.sha256(content.encode()).hexdigest()[:32]


def _inputs(encoder: CorpusEncoder) -> list[Any]:
    """The identity of the input: names and contents of files; of a built-in corpus, those that define it."""
    if encoder.corpus.corpus is None:
        groups = files(encoder.corpus, encoder.data)
        return [_identity(file.absolute()) for group in groups for path in group for file in _in(path)]
    package = Path(builtin.__file__).parent
    definitions = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".tsv"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in definitions]


def _identity(path: Path) -> list[str]:
    """The identity of a file on any machine: its name, which may tell its format, and its content."""
    return [path.name, content_digest(path.absolute())]


def content_digest(path: Path) -> str:
    """A digest of a file's content, computed once as long as its path, size and time stay the same."""
    try:
        state = path.stat()
        facts = [str(path), state.st_size, state.st_mtime_ns]
        memo = cache_folder().with_name("inputs") / f"{checksum(str(path))}.json"
        try:
            known = json.loads(memo.read_text(encoding="utf-8"))
            if known["file"] == facts:
                return str(known["digest"])
        except (OSError, ValueError, LookupError, TypeError):
            pass  # not known, or damaged
        with open(path, "rb", buffering=0) as file:
            digest: str = hashlib.file_digest(file, new_hash).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    with suppress(UserError):  # it only saves time
        write_text(memo, json.dumps({"file": facts, "digest": digest}))
    return digest


def _in(path: Path) -> list[Path]:
    """The files in a folder, or the file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(encoder: CorpusEncoder, links: PairLinks | None, progress: Progress, folder: Path) -> None:
    """Tokenize a corpus into a folder."""
    counts: Counter[str] = Counter()
    name = describe(encoder.corpus)
    with ExitStack() as opened:
        dtypes = dict(zip(("source", "target"), encoder.dtypes, strict=True))
        dtypes |= {} if links is None else {LINKS: "uint32"}
        writers = [opened.enter_context(SideWriter(folder, side, dtype)) for side, dtype in dtypes.items()]
        for block in map_in_order(encoder.encode_block, _blocks(encoder, links, counts)):
            for writer, sequences in zip(writers, block.sides, strict=True):
                writer.add(sequences, joined=encoder.streamed)
            counts.update(block.counts)
            progress(name, counts["read"])
        if encoder.streamed:
            for writer in writers:
                writer.end_sequence()
            counts.update(documents=counts["read"], pairs=1 if writers[1].total else 0)
    if not counts["pairs"]:
        limit = f"{encoder.max_tokens} tokens"
        if encoder.max_pair_tokens is not None:
            limit += f" or than {encoder.max_pair_tokens} for both sides"
        dropped = f"{counts['empty']} blank, {counts['long']} longer than {limit}"
        raise UserError(f"{name}: no usable {'text' if encoder.corpus.plain else f'sentence pairs ({dropped})'}")
    tokens = writers[0].total, writers[1].total
    report = CorpusReport(counts["pairs"], counts["empty"], counts["long"], *tokens, counts["documents"])
    write_about(folder, writers, report)


def _blocks(encoder: CorpusEncoder, links: PairLinks | None, counts: Counter[str]) -> Iterator[TextBlock]:
    """Yield what is encoded at once, pairs or parts of a stream; count the pairs or lines as they are read."""

    def counted() -> Iterator[TextPair]:
        for pair in read_pairs(encoder.corpus, encoder.data):
            counts["read"] += 1
            yield pair

    if encoder.streamed:
        for parts in _chunks(stream_parts(encoder.text_tokenizer, (text for _, text in counted()))):
            yield TextBlock(parts)
        return
    lines = None if links is None else links.read()
    for pairs in _chunks(counted()):
        of_pairs = None if lines is None else list(islice(lines, len(pairs)))
        if links is not None and of_pairs is not None and len(of_pairs) < len(pairs):
            raise UserError(f"{links.path} has fewer lines than there are training pairs")
        yield TextBlock(pairs, of_pairs)


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    while chunk := list(islice(items, CHUNK_PAIRS)):
        yield chunk
