"""Tokens on disk, mapped into memory, and kept between runs.

A corpus is turned into tokens once. A stored corpus is a folder of plain arrays and a JSON file:

    source.ids, target.ids              all tokens end to end, uint16 or uint32; every sentence ends with the end mark
    source.offsets, target.offsets      [n + 1] int64, where each sentence begins
    about.json                          the type of the ids, how many pairs were kept and dropped, digests of the arrays
                                        and a checksum of its own

Plain text is pairs whose sources have no tokens at all. Documents longer than the model's context are cut into pieces,
one sentence each, of which the last has the end mark; a stream is one sentence without marks.

The folder's name is a digest of all that decides its content, so it never needs to be brought up to date: when the
input changes, so does the name. The cache may be deleted at any time. Opening a store compares all of it with its
digests; one that is damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from regard.data.corpora import TextPair, corpora, describe, files, read_pairs, reading
from regard.errors import UserError
from regard.files import json_checksum
from regard.text import EOS, UNK, Tokenizer, train
from regard.text.encode import MASK, ContextBudget, chunk, encode_lines, prefix_ids, stream_parts

if TYPE_CHECKING:
    from regard.recipes.schema import Corpus, DataSettings, Recipe

VERSION = 4  # of the layout above, and of how text is cut
CHUNK = 10_000  # pairs encoded at once: many enough for the library's threads, few enough for any memory
DAY = 24 * 3600

Item = TypeVar("Item")
Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[str, int], None]  # called with the corpus's name and the number of pairs read so far
FILES = [f"{side}.{part}" for side in ("source", "target") for part in ("ids", "offsets")]


@dataclass(frozen=True)
class Ragged:
    """Sentences end to end: `ids` [T] and `offsets` [n + 1]; sentence i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Array
    offsets: Array

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], dtype: str = "uint32") -> Ragged:
        """In memory, from lists.

        >>> Ragged.of([[5, 6, 2], [7, 2]]).offsets.tolist()
        [0, 3, 5]
        """
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        return cls(np.fromiter(chain.from_iterable(sentences), dtype, offsets[-1]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Array:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> Array:
        """[n] int32, held in memory."""
        return np.diff(self.offsets).astype(np.int32)

    def gather(self, which: Array) -> Array:
        """The tokens of the sentences `which` [k], end to end, without a loop over sentences."""
        begins = self.offsets[which]
        lengths = self.offsets[which + 1] - begins
        ends = lengths.cumsum()
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - (ends - lengths), lengths)
        return self.ids[places]


@dataclass(frozen=True)
class CorpusReport:
    """What became of a corpus. Tokens count marks and tags. Of plain text `pairs` are the pieces of its documents."""

    pairs: int
    dropped_empty: int
    dropped_long: int
    source_tokens: int
    target_tokens: int
    documents: int = 0  # of plain text; of a stream, its lines


@dataclass(frozen=True)
class TokenStore:
    """The tokens of n sentence pairs; each sentence ends with the end mark and begins with its corpus's tag, if any."""

    source: Ragged
    target: Ragged
    report: CorpusReport
    digest: str = ""  # of what is stored: a run that goes on has to find the same

    @classmethod
    def of(cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> TokenStore:
        """In memory, from token lists that carry their marks."""
        source, target = Ragged.of(sources), Ragged.of(targets)
        return cls(source, target, CorpusReport(len(sources), 0, 0, len(source.ids), len(target.ids)))

    def __len__(self) -> int:
        return len(self.source)


def cache_folder() -> Path:
    """Where tokens are kept: `REGARD_CACHE`, or the user's cache folder."""
    home = os.environ.get("REGARD_CACHE")
    if home:
        return Path(home).expanduser().absolute() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard" / "tokens"


def learn_tokenizers(recipe: Recipe) -> tuple[Tokenizer, Tokenizer]:
    """The source's and the target's tokenizer; one and the same if the recipe shares it.

    They are learnt from at most `text.sample` pairs, drawn evenly from all corpora (whatever their weights); always the
    same ones, so that runs of other seeds have the same vocabulary.
    """
    text, sample = recipe.text, _drawn(recipe)
    source_tags, target_tags = tags_of(recipe)
    if text.shared:
        texts = (pair[1] for pair in sample) if recipe.data.is_text else chain.from_iterable(sample)
        both = train(texts, text.unit, text.vocabulary, list(dict.fromkeys(source_tags + target_tags)))
        return both, both
    source = train((pair[0] for pair in sample), text.unit, text.vocabulary, source_tags)
    return source, _target_tokenizer(recipe, sample)


def learn_target_tokenizer(recipe: Recipe) -> Tokenizer:
    """The second of the tokenizers that would be learnt, where the recipe shares none; the first is not."""
    return _target_tokenizer(recipe, _drawn(recipe))


def _target_tokenizer(recipe: Recipe, sample: list[TextPair]) -> Tokenizer:
    text, (_, tags) = recipe.text, tags_of(recipe)
    return train((pair[1] for pair in sample), text.target_unit or text.unit, text.vocabulary, tags)


def _drawn(recipe: Recipe) -> list[TextPair]:
    """The pairs that vocabularies are learnt from."""
    pairs = chain.from_iterable(read_pairs(corpus, recipe.data) for corpus in corpora(recipe.data))
    return _sample(pairs, recipe.text.sample, seed=1)


def tags_of(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The tags of the sources and of the targets, each once."""
    mix = corpora(recipe.data)
    sources = [corpus.source_tag for corpus in mix if corpus.source_tag]
    targets = [corpus.target_tag for corpus in mix if corpus.target_tag]
    sources += [MASK] if recipe.model.family == "bert" else []
    return list(dict.fromkeys(sources)), list(dict.fromkeys(targets))


def build(
    recipe: Recipe,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> list[TokenStore]:
    """The tokens of every corpus of the recipe's mix, from the cache where they are there already, undamaged.

    `say` is called with a line for people when a damaged store is made again.
    """
    jobs = [_CorpusJob(corpus, recipe, source_tokenizer, target_tokenizer) for corpus in corpora(recipe.data)]
    return [_cached(job, progress or (lambda name, pairs: None), say or (lambda line: None)) for job in jobs]


def stored(recipe: Recipe, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> dict[Path, bool]:
    """The folders of the cache that hold the recipe's corpora, and whether each is undamaged."""
    jobs = [_CorpusJob(corpus, recipe, source_tokenizer, target_tokenizer) for corpus in corpora(recipe.data)]
    folders = [cache_folder() / job.key() for job in jobs]
    return {folder: _open(folder) is not None for folder in folders if folder.exists()}


@dataclass(frozen=True)
class _CorpusJob:
    """One corpus to be turned into tokens."""

    corpus: Corpus
    recipe: Recipe
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    @property
    def data(self) -> DataSettings:
        return self.recipe.data

    @cached_property
    def longest(self) -> int:
        """The most tokens of a sentence: longer pairs are dropped, longer documents cut so that batches hold them."""
        context = self.recipe.model.max_positions
        return min(context, self.recipe.training.batch_tokens if self.corpus.plain else self.data.max_length)

    @cached_property
    def together(self) -> int | None:
        """The most tokens of a pair, where source and target share the model's context."""
        room = ContextBudget.of(self.recipe)
        return room.places if room.shared and not self.corpus.plain else None

    def holds(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether a pair is short enough."""
        both = len(source) + len(target)
        return max(len(source), len(target)) <= self.longest and (self.together is None or both <= self.together)

    def key(self) -> str:
        """A digest of all that decides the tokens."""
        corpus, data = self.corpus, self.data
        spec = [corpus.corpus, corpus.text, corpus.count, corpus.source_tag, corpus.target_tag]
        limits = [self.longest, data.lowercase, asdict(reading(corpus, data)), prefix_ids(self.recipe)]
        limits += [data.documents, data.held_out] if corpus.plain else [self.together]
        tokenizers = [self.source_tokenizer.to_json(), self.target_tokenizer.to_json()]
        content = json.dumps([VERSION, spec, limits, self._inputs(), tokenizers])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _inputs(self) -> list[Any]:
        """What tells the input from other input: files by path, size and time; a built-in corpus by what makes it."""
        if self.corpus.corpus is None:
            paths = [path.absolute() for path in files(self.corpus, self.data)]
            return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        import regard.data.builtin

        home = Path(regard.data.builtin.__file__).parent
        parts = sorted(path for path in home.rglob("*") if path.suffix in (".py", ".tsv"))
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in parts]

    def encoded(self, chunk: list[TextPair]) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of both sides of a chunk of pairs, marks and tags included."""
        corpus = self.corpus
        head = [
            *prefix_ids(self.recipe),
            *([self.source_tokenizer.tag(corpus.source_tag)] if corpus.source_tag else []),
        ]
        sources = [[*head, *ids, EOS] for ids in self.source_tokenizer.encode_batch([pair[0] for pair in chunk])]
        head = [self.target_tokenizer.tag(corpus.target_tag)] if corpus.target_tag else []
        targets = [[*head, *ids, EOS] for ids in self.target_tokenizer.encode_batch([pair[1] for pair in chunk])]
        if self.recipe.model.family == "bert":
            self._check_classes([target for _, target in chunk], targets)
        return sources, targets

    def _check_classes(self, names: list[str], targets: list[list[int]]) -> None:
        for name, ids in zip(names, targets, strict=True):
            if len(ids) != 2:
                raise UserError(f"{describe(self.corpus)}: a class must be one word, and {name[:60]!r} is not")
            if ids[0] == UNK:
                raise UserError(
                    f"{describe(self.corpus)}: {name[:60]!r} is not among the classes that were learnt: "
                    "choose another --out, or raise text.vocabulary or text.sample"
                )

    def pieces(self, ids: list[int]) -> list[list[int]]:
        """A document's tokens with their marks, in pieces no longer than the longest."""
        if not ids:
            return []
        head = [self.target_tokenizer.tag(self.corpus.target_tag)] if self.corpus.target_tag else []
        front = prefix_ids(self.recipe)
        if front:
            return [[*front, *piece, EOS] for piece in chunk([*head, *ids], self.longest - len(front) - 1)]
        pieces = chunk([*head, *ids, EOS], self.longest)
        if pieces[-1] == [EOS]:  # alone it would teach that a text ends where it begins
            pieces[-1].insert(0, pieces[-2].pop())
        return pieces


def _cached(job: _CorpusJob, progress: Progress, say: Callable[[str], None]) -> TokenStore:
    home = cache_folder()
    folder = home / job.key()
    store = _open(folder)
    if store is None:
        if folder.exists():
            say(f"the tokens of {describe(job.corpus)} in {folder} are damaged: making them again")
        try:
            _make(job, folder, progress)
            _sweep(home)
        except OSError as error:
            hint = "set REGARD_CACHE to a folder with room to write"
            raise UserError(f"cannot keep tokens in {home}: {error.strerror or error}; {hint}") from error
        store = _open(folder)
    if store is None:
        raise UserError(f"the tokens just written to {folder} are gone or damaged; try again")
    return store


def _make(job: _CorpusJob, folder: Path, progress: Progress) -> None:
    """Write a store beside its final place and move it there in one step, so that nobody ever sees half of one."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.draft")
    draft.mkdir(parents=True)
    try:
        _write(job, draft, progress)
        try:
            draft.rename(folder)
        except OSError:  # something is there
            if _open(folder) is None:  # and it is damaged; if not, another process was faster with the very same
                shutil.rmtree(folder)
                draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(job: _CorpusJob, folder: Path, progress: Progress) -> None:
    counts: Counter[str] = Counter()
    with (
        _SideWriter(folder, "source", job.source_tokenizer) as source,
        _SideWriter(folder, "target", job.target_tokenizer) as target,
    ):
        if job.corpus.plain and job.data.documents == "stream":
            counts.update(_add_stream(job, source, target, progress))
        else:
            add = _add_documents if job.corpus.plain else _add_pairs
            for chunk in _chunks(read_pairs(job.corpus, job.data)):
                counts.update(read=len(chunk), **add(job, chunk, source, target))
                progress(describe(job.corpus), counts["read"])
    if not counts["pairs"]:
        both = f", or both sides than {job.together}" if job.together is not None else ""
        found = f"{counts['empty']} blank, {counts['long']} longer than {job.longest} tokens{both}"
        what = "text" if job.corpus.plain else f"sentence pairs ({found})"
        raise UserError(f"{describe(job.corpus)}: no usable {what}")
    report = CorpusReport(
        counts["pairs"], counts["empty"], counts["long"], source.total, target.total, counts["documents"]
    )
    about = {"version": VERSION, "source": source.dtype, "target": target.dtype, "report": asdict(report)}
    about["digest"] = source.digest() + target.digest()
    about["checksum"] = json_checksum(about)
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _add_pairs(job: _CorpusJob, chunk: list[TextPair], source: _SideWriter, target: _SideWriter) -> dict[str, int]:
    """Pairs, but for those that are blank or too long."""
    full = [pair for pair in chunk if pair[0].strip() and pair[1].strip()]
    sources, targets = job.encoded(full)
    fits = [job.holds(one, other) for one, other in zip(sources, targets, strict=True)]
    source.add([ids for ids, kept in zip(sources, fits, strict=True) if kept])
    target.add([ids for ids, kept in zip(targets, fits, strict=True) if kept])
    return {"pairs": sum(fits), "empty": len(chunk) - len(full), "long": len(full) - sum(fits)}


def _add_documents(job: _CorpusJob, chunk: list[TextPair], source: _SideWriter, target: _SideWriter) -> dict[str, int]:
    """Documents in pieces, beside sources of no tokens."""
    texts = [text for _, text in chunk if text.strip()]
    tokens = job.target_tokenizer.encode_batch(texts)
    pieces = [piece for ids in tokens for piece in job.pieces(ids)]
    source.add([[] for _ in pieces])
    target.add(pieces)
    return {"pairs": len(pieces), "empty": len(chunk) - len(texts), "documents": len(texts)}


def _add_stream(job: _CorpusJob, source: _SideWriter, target: _SideWriter, progress: Progress) -> dict[str, int]:
    """All lines of a stream end to end without marks, as one sentence."""
    lines = 0

    def read() -> Iterator[str]:
        nonlocal lines
        for _, text in read_pairs(job.corpus, job.data):
            lines += 1
            yield text

    for parts in _chunks(stream_parts(job.target_tokenizer, read())):
        target.extend(encode_lines(job.target_tokenizer, parts))
        progress(describe(job.corpus), lines)
    source.end()
    target.end()
    return {"documents": lines, "pairs": 1 if target.total else 0}


class _SideWriter:
    """Appends the sentences of one side to its two files."""

    def __init__(self, folder: Path, side: str, tokenizer: Tokenizer) -> None:
        self.dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
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
        """Of both files."""
        return "".join(one.hexdigest() for one in self._hashes.values())

    def __enter__(self) -> _SideWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, sentences: list[list[int]]) -> None:
        part = Ragged.of(sentences, self.dtype)
        self._write("ids", part.ids)
        self._write("offsets", part.offsets[1:] + self.total)
        self.total += len(part.ids)

    def extend(self, parts: list[list[int]]) -> None:
        """Tokens of a sentence that goes on until `end`."""
        tokens = Ragged.of(parts, self.dtype).ids
        self._write("ids", tokens)
        self.total += len(tokens)

    def end(self) -> None:
        self._write("offsets", np.array([self.total], np.int64))


def _open(folder: Path) -> TokenStore | None:
    """The store in a folder; None if there is none, or if it is not what was written."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about.pop("checksum") != json_checksum(about) or about["digest"] != _digest(folder):
            return None
        report = CorpusReport(**about["report"])
        source = _side(folder, "source", about["source"], report.source_tokens)
        target = _side(folder, "target", about["target"], report.target_tokens)
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except OSError as error:
        raise UserError(f"cannot read the tokens in {folder}: {error.strerror or error}") from error
    whole = len(source) == len(target) == report.pairs
    return TokenStore(source, target, report, about["digest"]) if whole else None


def _digest(folder: Path) -> str:
    """The digests of the arrays as they are on disk, each file on a thread of its own."""

    def digest(name: str) -> str:
        with open(folder / name, "rb", buffering=0) as file:
            return hashlib.file_digest(file, _new_hash).hexdigest()

    with ThreadPoolExecutor(len(FILES)) as threads:
        return "".join(threads.map(digest, FILES))


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=8)


def _side(folder: Path, side: str, dtype: str, tokens: int) -> Ragged:
    ids: Array
    if tokens == 0 and (folder / f"{side}.ids").stat().st_size == 0:  # sources of plain text: nothing to map
        ids = np.zeros(0, dtype)
    else:
        ids = np.memmap(folder / f"{side}.ids", dtype, "r")
    offsets = np.memmap(folder / f"{side}.offsets", np.int64, "r")
    if not len(ids) == tokens == offsets[-1]:
        raise ValueError(f"{folder}: damaged")
    return Ragged(np.asarray(ids), np.asarray(offsets))  # plain views: slicing a memmap object is slow


def _sweep(home: Path) -> None:
    """Remove drafts that a killed process left behind: those that nothing was written to for a day."""
    for draft in home.glob("*.draft"):
        with suppress(OSError):  # another process may be removing it too
            newest = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
            if time.time() - newest > DAY:
                shutil.rmtree(draft, ignore_errors=True)


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    while chunk := list(islice(items, CHUNK)):
        yield chunk


def _sample(pairs: Iterable[TextPair], size: int, seed: int) -> list[TextPair]:
    """At most `size` of the pairs, every one equally likely to be among them (a reservoir), drawn by seed."""
    draw = random.Random(seed).random
    kept: list[TextPair] = []
    for count, pair in enumerate(pairs, 1):
        if len(kept) < size:
            kept.append(pair)
        elif (place := int(draw() * count)) < size:
            kept[place] = pair
    return kept
