"""Cache of tokenized corpora: memory-mapped arrays on disk, shared by all runs.

A corpus is tokenized once. A cache entry is a folder of plain arrays and a JSON file:

    source.ids, target.ids              concatenated token ids, uint16 or uint32; every sequence ends with EOS, except
                                        labels such as classes, which are one number each
    source.offsets, target.offsets      [n + 1] int64, the start of each sequence
    links.ids, links.offsets            with `training.guided_alignment`: links between the tokens of each pair
    about.json                          dtype of the ids, number of pairs kept and dropped, digests of the arrays,
                                        checksum of this file

Plain text is stored as pairs with empty sources. Documents longer than the model's context are split into chunks, one
sequence each; only the last one ends with EOS. A stream (`data.documents = "stream"`) is one sequence without special
tokens.

The folder's name is a digest of everything that determines its content, so entries never become stale: when the input
changes, so does the name. Files count by their content, not by path or time, so that entries that were built on one
machine are found on another. The cache may be deleted at any time. Opening an entry verifies its digests; a damaged one
is rebuilt.

All cores tokenize, in processes that each encode a block of pairs; this process reads and writes, in order, so that the
files do not depend on the number of processes, nor memory on the size of the corpus. Processes on one machine that need
the same entry wait for the first of them to build it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from regard.data import builtin
from regard.data.corpora import TextPair, corpora, describe, files, read_options, read_pairs
from regard.data.pharaoh import Link, PairLinks
from regard.data.token_store import LINK_BITS, Array, CorpusReport, Ragged, TokenStore, join_link
from regard.data.workers import map_in_order
from regard.errors import UserError
from regard.files import checksum, json_checksum, write_text
from regard.text import EOS, Tokenizer, train
from regard.text.encode import ContextBudget, chunk, encode_lines, prefix_ids, stream_parts
from regard.text.words import split_words

if TYPE_CHECKING:
    from regard.recipes.schema import Corpus, DataSettings, Recipe

VERSION = 5  # of the layout above, of how text is split and of how inputs are identified
CHUNK_PAIRS = 10_000  # encoded at once: enough for the library's threads, few enough for little memory
DRAFT_MAX_AGE = 24 * 3600  # seconds

Item = TypeVar("Item")
Progress = Callable[[str, int], None]  # called with the corpus's name and the number of pairs read so far
LINKS = "links"
FILES = [f"{side}.{part}" for side in ("source", "target") for part in ("ids", "offsets")]
LINK_FILES = [f"{LINKS}.{part}" for part in ("ids", "offsets")]


def cache_folder() -> Path:
    """The folder of the token cache: below `REGARD_CACHE` or the user's cache directory."""
    home = os.environ.get("REGARD_CACHE")
    if home:
        return Path(home).expanduser().absolute() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard" / "tokens"


class LabelEncoder(Protocol):
    """Encodes targets that are not texts, such as the names of classes, as numbers."""

    dtype: str  # of the numbers: "uint16" or "uint32"

    def encode(self, corpus: str, targets: Sequence[str]) -> list[list[int]]:
        """Encode targets; `corpus` is their corpus, for the message of an error."""

    def to_json(self) -> str:
        """A text that determines the encoding."""


def learn_tokenizers(recipe: Recipe, labels: bool = False) -> tuple[Tokenizer, Tokenizer]:
    """Train the source and the target tokenizer; both are the same object if `text.shared` is set.

    They are trained on at most `text.sample` pairs, drawn uniformly from all corpora (regardless of their weights). The
    sample does not depend on the run's seed, so that runs with different seeds have the same vocabulary. `labels`: the
    targets are labels, not texts, and nothing is learned from them.
    """
    text, sample = recipe.text, _vocabulary_sample(recipe)
    source_tags, target_tags = tags_of(recipe)
    if text.shared:
        sides = (0,) if labels else (1,) if recipe.data.kind == "text" else (0, 1)
        texts = (pair[side] for pair in sample for side in sides)
        both = train(texts, text.unit, text.vocabulary, list(dict.fromkeys(source_tags + target_tags)))
        return both, both
    source = train((pair[0] for pair in sample), text.unit, text.vocabulary, source_tags)
    return source, _target_tokenizer(recipe, sample)


def learn_target_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train the target tokenizer alone, for a recipe without a shared vocabulary."""
    return _target_tokenizer(recipe, _vocabulary_sample(recipe))


def _target_tokenizer(recipe: Recipe, sample: list[TextPair]) -> Tokenizer:
    text, (_, tags) = recipe.text, tags_of(recipe)
    return train((pair[1] for pair in sample), text.target_unit or text.unit, text.vocabulary, tags)


def _vocabulary_sample(recipe: Recipe) -> list[TextPair]:
    """Sample the pairs that the tokenizers are trained on."""
    pairs = chain.from_iterable(read_pairs(corpus, recipe.data) for corpus in corpora(recipe.data))
    return _sample(pairs, recipe.text.sample, seed=1)


def tags_of(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The distinct tags of the sources and of the targets."""
    mix = corpora(recipe.data)
    sources = [corpus.source_tag for corpus in mix if corpus.source_tag]
    targets = [corpus.target_tag for corpus in mix if corpus.target_tag]
    return list(dict.fromkeys([*sources, *recipe.model.extra_tags])), list(dict.fromkeys(targets))


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
    stores: list[TokenStore] = []
    for corpus in corpora(recipe.data):
        linked = None if links is None else PairLinks(links, sum(store.report.read for store in stores))
        job = _CorpusJob(corpus, recipe, source_tokenizer, target_encoder, linked)
        stores.append(_cached(job, progress or (lambda name, pairs: None), say or (lambda line: None)))
    if links is not None:
        PairLinks(links).check_count(sum(store.report.read for store in stores))
    return stores


def stored(recipe: Recipe, source_tokenizer: Tokenizer, target_encoder: Tokenizer | LabelEncoder) -> dict[Path, bool]:
    """The cache folders of the recipe's corpora that exist, and whether each is undamaged."""
    jobs = [_CorpusJob(corpus, recipe, source_tokenizer, target_encoder) for corpus in corpora(recipe.data)]
    folders = [cache_folder() / job.key() for job in jobs]
    return {folder: _open(folder) is not None for folder in folders if folder.exists()}


@dataclass(frozen=True)
class _CorpusJob:
    """One corpus to tokenize."""

    corpus: Corpus
    recipe: Recipe
    source_tokenizer: Tokenizer
    target_encoder: Tokenizer | LabelEncoder
    links: PairLinks | None = None

    @property
    def data(self) -> DataSettings:
        return self.recipe.data

    @cached_property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a sequence: longer pairs are dropped, longer documents split."""
        context = self.recipe.model.max_positions
        return min(context, self.recipe.training.batch_tokens if self.corpus.plain else self.data.max_length)

    @cached_property
    def max_pair_tokens(self) -> int | None:
        """The maximum number of tokens of both sides together, where they share the model's context."""
        budget = ContextBudget.of(self.recipe)
        return budget.positions if budget.shared and not self.corpus.plain else None

    def fits(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether a pair is short enough."""
        if self.max_pair_tokens is not None and len(source) + len(target) > self.max_pair_tokens:
            return False
        return max(len(source), len(target)) <= self.max_tokens

    def key(self) -> str:
        """A digest of everything that determines the tokens."""
        corpus, data = self.corpus, self.data
        spec = [corpus.corpus, corpus.text, corpus.count, corpus.source_tag, corpus.target_tag]
        limits = [self.max_tokens, data.lowercase, asdict(read_options(corpus, data)), prefix_ids(self.recipe)]
        limits += [data.documents, data.held_out] if corpus.plain else [self.max_pair_tokens, data.spellings]
        limits += [] if corpus.plain else [data.held_out, data.split_seed]
        tokenizers = [self.source_tokenizer.to_json(), self.target_encoder.to_json()]
        links = [] if self.links is None else [[_identity(self.links.path), self.links.first]]
        content = json.dumps([VERSION, spec, limits, self._inputs(), tokenizers, *links])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _inputs(self) -> list[Any]:
        """What identifies the input: files by name and content; a built-in corpus by the files that define it."""
        if self.corpus.corpus is None:
            paths = [file.absolute() for group in files(self.corpus, self.data) for path in group for file in _in(path)]
            return [_identity(path) for path in paths]
        package = Path(builtin.__file__).parent
        definitions = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".tsv"))
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in definitions]

    def encode(self, pairs: list[TextPair]) -> tuple[list[list[int]], list[list[int]]]:
        """Encode both sides of `pairs`, with special tokens and tags; labels have neither."""
        prefix = [*prefix_ids(self.recipe), *_tag_ids(self.source_tokenizer, self.corpus.source_tag)]
        sources = [[*prefix, *ids, EOS] for ids in self.source_tokenizer.encode_batch([pair[0] for pair in pairs])]
        targets = [pair[1] for pair in pairs]
        if not isinstance(self.target_encoder, Tokenizer):
            return sources, self.target_encoder.encode(describe(self.corpus), targets)
        prefix = _tag_ids(self.target_encoder, self.corpus.target_tag)
        return sources, [[*prefix, *ids, EOS] for ids in self.target_encoder.encode_batch(targets)]

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer of targets that are texts, such as the documents of plain text."""
        assert isinstance(self.target_encoder, Tokenizer)
        return self.target_encoder

    @property
    def streamed(self) -> bool:
        """Whether the corpus is one sequence."""
        return self.corpus.plain and self.data.documents == "stream"

    def encode_block(self, block: _TextBlock) -> _TokenBlock:
        """Encode a block; this runs in several processes."""
        counts: dict[str, int] = {}
        if self.streamed:
            sides = [[], encode_lines(self.text_tokenizer, block.texts)]
        else:
            sides, counts = (_encode_documents if self.corpus.plain else _encode_pairs)(self, block.texts)
        dtypes = [_id_dtype(self.source_tokenizer), _id_dtype(self.target_encoder)]
        if block.links is not None:
            sides.append(_encode_links(self, block.texts, block.links))
            dtypes.append("uint32")
        return _TokenBlock([Ragged.of(side, dtype) for side, dtype in zip(sides, dtypes, strict=True)], counts)

    def split_document(self, ids: list[int]) -> list[list[int]]:
        """Split a document's tokens into sequences of at most `max_tokens`, and add the special tokens."""
        if not ids:
            return []
        tag = _tag_ids(self.text_tokenizer, self.corpus.target_tag)
        prefix = prefix_ids(self.recipe)
        if prefix:
            return [[*prefix, *part, EOS] for part in chunk([*tag, *ids], self.max_tokens - len(prefix) - 1)]
        parts = chunk([*tag, *ids, EOS], self.max_tokens)
        if parts[-1] == [EOS]:  # a sequence of EOS alone would teach the model to end a text at its start
            parts[-1].insert(0, parts[-2].pop())
        return parts


@dataclass(frozen=True)
class _TextBlock:
    """Pairs, or parts of a stream, that are encoded at once."""

    texts: list[Any]
    links: list[list[Link]] | None = None  # of each pair


@dataclass(frozen=True)
class _TokenBlock:
    """The tokens of a block: source, target and perhaps links; and how many of what there were."""

    sides: list[Ragged]
    counts: dict[str, int]


def _identity(path: Path) -> list[str]:
    """What identifies a file on any machine: its name, which may tell its format, and its content."""
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
            digest: str = hashlib.file_digest(file, _new_hash).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    with suppress(UserError):  # it only saves time
        write_text(memo, json.dumps({"file": facts, "digest": digest}))
    return digest


def _in(path: Path) -> list[Path]:
    """The files in a folder, or the file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _tag_ids(tokenizer: Tokenizer, tag: str | None) -> list[int]:
    return [tokenizer.tag(tag)] if tag else []


def _cached(job: _CorpusJob, progress: Progress, say: Callable[[str], None]) -> TokenStore:
    cache = cache_folder()
    folder = cache / job.key()
    store = _open(folder)
    if store is None:
        try:
            with _build_lock(folder, say):
                store = _open(folder)  # another process may have built it meanwhile
                if store is None:
                    if folder.exists():
                        say(f"the tokens of {describe(job.corpus)} in {folder} are damaged: rebuilding them")
                    _build_entry(job, folder, progress)
                    _remove_stale_drafts(cache)
        except OSError as error:
            hint = "set REGARD_CACHE to a writable folder with enough space"
            raise UserError(f"cannot write tokens to {cache}: {error.strerror or error}; {hint}") from error
        store = _open(folder) if store is None else store
    if store is None:
        raise UserError(f"the tokens just written to {folder} are gone or damaged; try again")
    return store


@contextmanager
def _build_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time build an entry; others wait. Where files cannot be locked, each builds a draft."""
    locks = folder.parent.with_name("locks")
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"{folder.name}.lock", "wb") as file:
        with suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another process, which tokenizes the same corpus")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
        yield


def _build_entry(job: _CorpusJob, folder: Path, progress: Progress) -> None:
    """Write a cache entry to a draft folder and rename it when it is complete, so that no reader sees half of one."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.draft")
    draft.mkdir(parents=True)
    try:
        _write(job, draft, progress)
        try:
            draft.rename(folder)
        except OSError:  # the folder exists
            if _open(folder) is None:  # damaged; otherwise another process has written the same entry
                shutil.rmtree(folder)
                draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(job: _CorpusJob, folder: Path, progress: Progress) -> None:
    counts: Counter[str] = Counter()
    with ExitStack() as files:
        source = files.enter_context(_SideWriter(folder, "source", _id_dtype(job.source_tokenizer)))
        target = files.enter_context(_SideWriter(folder, "target", _id_dtype(job.target_encoder)))
        writers = [source, target]
        if job.links is not None:
            writers.append(files.enter_context(_SideWriter(folder, LINKS, "uint32")))
        for block in map_in_order(job.encode_block, _blocks(job, counts)):
            for writer, sequences in zip(writers, block.sides, strict=True):
                writer.add(sequences, joined=job.streamed)
            counts.update(block.counts)
            progress(describe(job.corpus), counts["read"])
        if job.streamed:
            for writer in writers:
                writer.end_sequence()
            counts.update(documents=counts["read"], pairs=1 if target.total else 0)
    if not counts["pairs"]:
        limit = f"{job.max_tokens} tokens"
        if job.max_pair_tokens is not None:
            limit += f" or than {job.max_pair_tokens} for both sides"
        dropped = f"{counts['empty']} blank, {counts['long']} longer than {limit}"
        what = "text" if job.corpus.plain else f"sentence pairs ({dropped})"
        raise UserError(f"{describe(job.corpus)}: no usable {what}")
    report = CorpusReport(
        counts["pairs"], counts["empty"], counts["long"], source.total, target.total, counts["documents"]
    )
    about = {"version": VERSION, "source": source.dtype, "target": target.dtype, "report": asdict(report)}
    about["digest"] = "".join(writer.digest() for writer in writers)
    about |= {LINKS: writers[2].total} if job.links is not None else {}
    about["checksum"] = json_checksum(about)
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _is_blank(pair: TextPair) -> bool:
    return not (pair[0].strip() and pair[1].strip())


def _blocks(job: _CorpusJob, counts: Counter[str]) -> Iterator[_TextBlock]:
    """What is encoded at once: pairs or parts of a stream. Counts the pairs or lines as they are read."""

    def counted() -> Iterator[TextPair]:
        for pair in read_pairs(job.corpus, job.data):
            counts["read"] += 1
            yield pair

    if job.streamed:
        for parts in _chunks(stream_parts(job.text_tokenizer, (text for _, text in counted()))):
            yield _TextBlock(parts)
        return
    lines = None if job.links is None else job.links.read()
    for pairs in _chunks(counted()):
        links = None if lines is None else list(islice(lines, len(pairs)))
        if job.links is not None and links is not None and len(links) < len(pairs):
            raise UserError(f"{job.links.path} has fewer lines than there are training pairs")
        yield _TextBlock(pairs, links)


def _encode_pairs(job: _CorpusJob, pairs: list[TextPair]) -> tuple[list[list[list[int]]], dict[str, int]]:
    """The sources and targets of the pairs that are neither blank nor too long, and the counts."""
    nonblank = [pair for pair in pairs if not _is_blank(pair)]
    encoded = list(zip(*job.encode(nonblank), strict=True))
    fitting = [pair for pair in encoded if job.fits(*pair)]
    counts = {"pairs": len(fitting), "empty": len(pairs) - len(nonblank), "long": len(nonblank) - len(fitting)}
    return [[ids for ids, _ in fitting], [ids for _, ids in fitting]], counts


def _encode_links(job: _CorpusJob, pairs: list[TextPair], chunk_links: list[list[Link]]) -> list[list[int]]:
    """The links between the tokens of the pairs that `_encode_pairs` keeps, from links between words.

    A pair whose words, encoded one by one, are not its tokens (it has white space other than single spaces) has none.
    """
    linked = [(pair, links) for pair, links in zip(pairs, chunk_links, strict=True) if not _is_blank(pair)]
    kept = [pair for pair, _ in linked]
    encoded = job.encode(kept)
    sides = []
    for tokenizer, tag, texts in (
        (job.source_tokenizer, job.corpus.source_tag, [source for source, _ in kept]),
        (job.text_tokenizer, job.corpus.target_tag, [target for _, target in kept]),
    ):
        sides.append(split_words(tokenizer, texts, tag=tag, max_len=1 << LINK_BITS, lowercase=False))
    token_links = []
    for n, (_, links) in enumerate(linked):
        if job.fits(encoded[0][n], encoded[1][n]):
            source, target = sides[0][n], sides[1][n]
            same = source.tokens == encoded[0][n] and target.tokens == encoded[1][n]
            token_links.append(_token_links(source.words, target.words, links) if same else [])
    return token_links


def _token_links(sources: list[int], targets: list[int], links: list[Link]) -> list[int]:
    """Links between words as links between all tokens of both; `sources` and `targets` give the word of each token."""
    source_tokens, target_tokens = _positions(sources), _positions(targets)
    return [join_link(s, t) for i, j in sorted(set(links)) for s in source_tokens[i] for t in target_tokens[j]]


def _positions(words: list[int]) -> dict[int, list[int]]:
    """The positions of the tokens of each word."""
    positions: dict[int, list[int]] = defaultdict(list)
    for position, word in enumerate(words):
        positions[word].append(position)
    return positions


def _encode_documents(job: _CorpusJob, pairs: list[TextPair]) -> tuple[list[list[list[int]]], dict[str, int]]:
    """Documents, split into sequences, with empty sources, and the counts."""
    texts = [text for _, text in pairs if text.strip()]
    sequences = [part for ids in job.text_tokenizer.encode_batch(texts) for part in job.split_document(ids)]
    counts = {"pairs": len(sequences), "empty": len(pairs) - len(texts), "documents": len(texts)}
    return [[[] for _ in sequences], sequences], counts


def _id_dtype(encoder: Tokenizer | LabelEncoder) -> str:
    """The type of the ids that an encoder returns."""
    if not isinstance(encoder, Tokenizer):
        return encoder.dtype
    return "uint16" if len(encoder) <= 1 << 16 else "uint32"


class _SideWriter:
    """Appends the sequences of one side to its two files."""

    def __init__(self, folder: Path, side: str, dtype: str) -> None:
        self.dtype = dtype
        self.total = 0
        names = ("ids", "offsets")
        self._files = {name: open(folder / f"{side}.{name}", "wb") for name in names}  # noqa: SIM115  see __exit__
        self._hashes = {name: _new_hash() for name in names}
        self._write("offsets", np.zeros(1, np.int64))

    def _write(self, name: str, numbers: Array) -> None:
        content = numbers.tobytes()
        self._hashes[name].update(content)
        self._files[name].write(content)

    def digest(self) -> str:
        """The concatenated digests of both files."""
        return "".join(digest.hexdigest() for digest in self._hashes.values())

    def __enter__(self) -> _SideWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, sequences: Ragged, joined: bool = False) -> None:
        """Append sequences; if `joined`, as parts of one sequence, which `end_sequence` ends."""
        self._write("ids", sequences.ids)
        if not joined:
            self._write("offsets", sequences.offsets[1:] + self.total)
        self.total += len(sequences.ids)

    def end_sequence(self) -> None:
        self._write("offsets", np.array([self.total], np.int64))


def _open(folder: Path) -> TokenStore | None:
    """Open a cache entry; None if it does not exist or is not what was written."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        names = [*FILES, *(LINK_FILES if LINKS in about else ())]
        if about.pop("checksum") != json_checksum(about) or about["digest"] != _digest(folder, names):
            return None
        report = CorpusReport(**about["report"])
        source = _side(folder, "source", about["source"], report.source_tokens)
        target = _side(folder, "target", about["target"], report.target_tokens)
        links = _side(folder, LINKS, "uint32", about[LINKS]) if LINKS in about else None
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except OSError as error:
        raise UserError(f"cannot read the tokens in {folder}: {error.strerror or error}") from error
    complete = len(source) == len(target) == report.pairs and (links is None or len(links) == report.pairs)
    return TokenStore(source, target, report, about["digest"], links) if complete else None


def _digest(folder: Path, names: list[str]) -> str:
    """Hash the arrays on disk, each file in its own thread."""

    def digest(name: str) -> str:
        with open(folder / name, "rb", buffering=0) as file:
            return hashlib.file_digest(file, _new_hash).hexdigest()

    with ThreadPoolExecutor(len(names)) as threads:
        return "".join(threads.map(digest, names))


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=8)


def _side(folder: Path, side: str, dtype: str, tokens: int) -> Ragged:
    ids: Array
    if tokens == 0 and (folder / f"{side}.ids").stat().st_size == 0:  # sources of plain text: mmap refuses empty files
        ids = np.zeros(0, dtype)
    else:
        ids = np.memmap(folder / f"{side}.ids", dtype, "r")
    offsets = np.memmap(folder / f"{side}.offsets", np.int64, "r")
    if not len(ids) == tokens == offsets[-1]:
        raise ValueError(f"{folder}: damaged")
    return Ragged(np.asarray(ids), np.asarray(offsets))  # plain views: slicing a memmap object is slow


def _remove_stale_drafts(cache: Path) -> None:
    """Remove drafts that a killed process left behind: those not written to for a day."""
    for draft in cache.glob("*.draft"):
        with suppress(OSError):  # another process may be removing it too
            newest = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
            if time.time() - newest > DRAFT_MAX_AGE:
                shutil.rmtree(draft, ignore_errors=True)


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    while chunk := list(islice(items, CHUNK_PAIRS)):
        yield chunk


def _sample(pairs: Iterable[TextPair], size: int, seed: int) -> list[TextPair]:
    """Draw at most `size` pairs uniformly (reservoir sampling)."""
    draw = random.Random(seed).random
    reservoir: list[TextPair] = []
    for count, pair in enumerate(pairs, 1):
        if len(reservoir) < size:
            reservoir.append(pair)
        elif (index := int(draw() * count)) < size:
            reservoir[index] = pair
    return reservoir
