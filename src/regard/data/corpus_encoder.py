"""Encoding of corpora: from pairs, documents and running text to sequences of tokens that fit a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from regard.data.corpora import TextPair, describe
from regard.data.pharaoh import Link
from regard.data.token_store import LINK_BITS, Ragged, join_link
from regard.text import EOS, Tokenizer
from regard.text.encode import ContextBudget, chunk, encode_lines, prefix_ids
from regard.text.words import split_words

if TYPE_CHECKING:
    from regard.recipes.schema import Corpus, DataSettings, Recipe


class LabelEncoder(Protocol):
    """Encodes targets that are not texts, such as the names of classes, as numbers."""

    dtype: str  # dtype of the stored tokens: "uint16" or "uint32"

    def encode(self, corpus: str, targets: Sequence[str]) -> list[list[int]]:
        """Encode targets; `corpus` is their corpus, for the message of an error."""

    def to_json(self) -> str:
        """A text that determines the encoding."""


@dataclass(frozen=True)
class TextBlock:
    """Pairs, or parts of a stream, that are encoded at once."""

    texts: list[Any]
    links: list[list[Link]] | None = None  # links of each pair


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of a block: source, target and perhaps links; and the number of pairs kept and dropped."""

    sides: list[Ragged]
    counts: dict[str, int]


@dataclass(frozen=True)
class CorpusEncoder:
    """Encodes the pairs, documents or lines of one corpus of a recipe."""

    corpus: Corpus
    recipe: Recipe
    source_tokenizer: Tokenizer
    target_encoder: Tokenizer | LabelEncoder

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

    def encode(self, pairs: list[TextPair]) -> tuple[list[list[int]], list[list[int]]]:
        """Encode both sides of `pairs`, with special tokens and tags; labels have neither."""
        prefix = [*prefix_ids(self.recipe), *_tag_ids(self.source_tokenizer, self.corpus.source_tag)]
        sources = _between(prefix, self.source_tokenizer.encode_batch([pair[0] for pair in pairs]))
        targets = [pair[1] for pair in pairs]
        if not isinstance(self.target_encoder, Tokenizer):
            return sources, self.target_encoder.encode(describe(self.corpus), targets)
        prefix = _tag_ids(self.target_encoder, self.corpus.target_tag)
        return sources, _between(prefix, self.target_encoder.encode_batch(targets))

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer of targets that are texts, such as the documents of plain text."""
        assert isinstance(self.target_encoder, Tokenizer)
        return self.target_encoder

    @property
    def streamed(self) -> bool:
        """Whether the corpus is one sequence."""
        return self.corpus.plain and self.data.documents == "stream"

    @cached_property
    def dtypes(self) -> tuple[str, str]:
        """The types of the ids of sources and targets."""
        return _id_dtype(self.source_tokenizer), _id_dtype(self.target_encoder)

    def encode_block(self, block: TextBlock) -> TokenBlock:
        """Encode a block; this runs in several processes."""
        counts: dict[str, int] = {}
        if self.streamed:
            sides = [[], encode_lines(self.text_tokenizer, block.texts)]
        else:
            sides, counts = (_encode_documents if self.corpus.plain else _encode_pairs)(self, block.texts)
        dtypes = [*self.dtypes]
        if block.links is not None:
            sides.append(_encode_links(self, block.texts, block.links))
            dtypes.append("uint32")
        return TokenBlock([Ragged.of(side, dtype) for side, dtype in zip(sides, dtypes, strict=True)], counts)

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


def _between(prefix: list[int], texts: list[list[int]]) -> list[list[int]]:
    """Add a prefix and EOS to new lists of tokens; without a prefix, in place, which saves copying them."""
    if prefix:
        return [[*prefix, *ids, EOS] for ids in texts]
    for ids in texts:
        ids.append(EOS)
    return texts


def _is_blank(pair: TextPair) -> bool:
    return not (pair[0].strip() and pair[1].strip())


def _encode_pairs(corpus: CorpusEncoder, pairs: list[TextPair]) -> tuple[list[list[list[int]]], dict[str, int]]:
    """The sources and targets of the pairs that are neither blank nor too long, and the counts."""
    nonblank = [pair for pair in pairs if not _is_blank(pair)]
    encoded = list(zip(*corpus.encode(nonblank), strict=True))
    fitting = [pair for pair in encoded if corpus.fits(*pair)]
    counts = {"pairs": len(fitting), "empty": len(pairs) - len(nonblank), "long": len(nonblank) - len(fitting)}
    return [[ids for ids, _ in fitting], [ids for _, ids in fitting]], counts


def _encode_links(corpus: CorpusEncoder, pairs: list[TextPair], chunk_links: list[list[Link]]) -> list[list[int]]:
    """The links between the tokens of the pairs that `_encode_pairs` keeps, from links between words.

    A pair whose words, encoded one by one, are not its tokens (it has white space other than single spaces) has none.
    """
    linked = [(pair, links) for pair, links in zip(pairs, chunk_links, strict=True) if not _is_blank(pair)]
    kept = [pair for pair, _ in linked]
    encoded = corpus.encode(kept)
    sides = []
    for tokenizer, tag, texts in (
        (corpus.source_tokenizer, corpus.corpus.source_tag, [source for source, _ in kept]),
        (corpus.text_tokenizer, corpus.corpus.target_tag, [target for _, target in kept]),
    ):
        sides.append(split_words(tokenizer, texts, tag=tag, max_len=1 << LINK_BITS, lowercase=False))
    token_links = []
    for n, (_, links) in enumerate(linked):
        if corpus.fits(encoded[0][n], encoded[1][n]):
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


def _encode_documents(corpus: CorpusEncoder, pairs: list[TextPair]) -> tuple[list[list[list[int]]], dict[str, int]]:
    """Documents, split into sequences, with empty sources, and the counts."""
    texts = [text for _, text in pairs if text.strip()]
    sequences = [part for ids in corpus.text_tokenizer.encode_batch(texts) for part in corpus.split_document(ids)]
    counts = {"pairs": len(sequences), "empty": len(pairs) - len(texts), "documents": len(texts)}
    return [[[] for _ in sequences], sequences], counts


def _id_dtype(encoder: Tokenizer | LabelEncoder) -> str:
    """The type of the ids that an encoder returns."""
    if not isinstance(encoder, Tokenizer):
        return encoder.dtype
    return "uint16" if len(encoder) <= 1 << 16 else "uint32"


def _tag_ids(tokenizer: Tokenizer, tag: str | None) -> list[int]:
    return [tokenizer.tag(tag)] if tag else []
