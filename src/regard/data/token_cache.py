"""Cache of tokenized corpora, on disk and shared by all runs.

A corpus is tokenized once (`corpus_encoder`) and stored in a folder of plain arrays (`token_files`). The folder's name
is a digest of everything that determines its content (`cache_key`), so entries never become stale: when the input
changes, so does the name. The cache may be deleted at any time. Opening an entry verifies its digests; a damaged one is
rebuilt. Processes on one machine that need the same entry wait for the first of them to build it.

All cores tokenize, in processes that each encode a block of pairs; this process reads and writes, in order, so that the
files do not depend on the number of processes, nor memory on the size of the corpus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from regard.data.cache_entry import CacheEntry
from regard.data.cache_key import entry_folder
from regard.data.corpora import TextPair, corpora, describe, read_pairs
from regard.data.corpus_encoder import CorpusEncoder, LabelEncoder, TextBlock
from regard.data.pharaoh import PairLinks
from regard.data.token_files import LINKS, SideWriter, open_tokens, write_about
from regard.data.token_store import CorpusReport, TokenStore
from regard.data.workers import map_in_order
from regard.errors import UserError
from regard.text import Tokenizer
from regard.text.encode import stream_parts

if TYPE_CHECKING:
    from regard.recipes.schema import Recipe

BLOCK_PAIRS = 10_000  # encoded at once: enough for the library's threads, few enough for little memory

Item = TypeVar("Item")
Progress = Callable[[str, int], None]  # called with the corpus's name and the number of pairs read so far


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
        entry = CacheEntry(entry_folder(encoder, linked), f"the tokens of {describe(corpus)}", open_tokens)
        stores.append(entry.opened(partial(_write, encoder, linked, progress), say))
    if links is not None:
        PairLinks(links).check_count(sum(store.report.read for store in stores))
    return stores


def stored(recipe: Recipe, source_tokenizer: Tokenizer, target_encoder: Tokenizer | LabelEncoder) -> dict[Path, bool]:
    """The cache folders of the recipe's corpora that exist, and whether each is undamaged."""
    encoders = [CorpusEncoder(corpus, recipe, source_tokenizer, target_encoder) for corpus in corpora(recipe.data)]
    folders = [entry_folder(encoder, None) for encoder in encoders]
    return {folder: open_tokens(folder) is not None for folder in folders if folder.exists()}


class _Corpus:
    """The pairs of a corpus (lines, of a stream) in blocks to encode; `read` is how many were read so far."""

    def __init__(self, encoder: CorpusEncoder, links: PairLinks | None) -> None:
        self.encoder, self.links, self.read = encoder, links, 0

    def blocks(self) -> Iterator[TextBlock]:
        if self.encoder.streamed:
            texts = (text for _, text in self._pairs())
            for parts in _in_blocks(stream_parts(self.encoder.text_tokenizer, texts)):
                yield TextBlock(parts)
        elif self.links is None:
            for pairs in _in_blocks(self._pairs()):
                yield TextBlock(pairs)
        else:
            lines = self.links.read()
            for pairs in _in_blocks(self._pairs()):
                links = list(islice(lines, len(pairs)))
                if len(links) < len(pairs):
                    raise UserError(f"{self.links.path} has fewer lines than there are training pairs")
                yield TextBlock(pairs, links)

    def _pairs(self) -> Iterator[TextPair]:
        for pair in read_pairs(self.encoder.corpus, self.encoder.data):
            self.read += 1
            yield pair


def _in_blocks(items: Iterator[Item]) -> Iterator[list[Item]]:
    while block := list(islice(items, BLOCK_PAIRS)):
        yield block


def _write(encoder: CorpusEncoder, links: PairLinks | None, progress: Progress, folder: Path) -> None:
    """Tokenize a corpus into a folder."""
    corpus = _Corpus(encoder, links)
    counts: Counter[str] = Counter()
    dtypes = dict(zip(("source", "target"), encoder.dtypes, strict=True)) | ({} if links is None else {LINKS: "uint32"})
    with ExitStack() as opened:
        writers = [opened.enter_context(SideWriter(folder, side, dtype)) for side, dtype in dtypes.items()]
        for block in map_in_order(encoder.encode_block, corpus.blocks()):
            for writer, sequences in zip(writers, block.sides, strict=True):
                writer.add(sequences, joined=encoder.streamed)
            counts.update(block.counts)
            progress(describe(encoder.corpus), corpus.read)
        if encoder.streamed:
            for writer in writers:
                writer.end_sequence()
            counts.update(documents=corpus.read, pairs=1 if writers[1].total else 0)
    if not counts["pairs"]:
        raise _nothing_usable(encoder, counts)
    tokens = writers[0].total, writers[1].total
    report = CorpusReport(counts["pairs"], counts["empty"], counts["long"], *tokens, counts["documents"])
    write_about(folder, writers, report)


def _nothing_usable(encoder: CorpusEncoder, counts: Counter[str]) -> UserError:
    """The error for a corpus of which nothing is left to train on."""
    name, limit = describe(encoder.corpus), f"{encoder.max_tokens} tokens"
    if encoder.corpus.plain:
        return UserError(f"{name}: no usable text")
    if encoder.max_pair_tokens is not None:
        limit += f" or than {encoder.max_pair_tokens} for both sides"
    dropped = f"{counts['empty']} blank, {counts['long']} longer than {limit}"
    return UserError(f"{name}: no usable sentence pairs ({dropped})")
