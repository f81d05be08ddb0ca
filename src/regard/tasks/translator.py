"""Translation of raw text: lines in, as many lines out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from regard.data.corpora import corpora
from regard.data.packing import sentence_batches
from regard.decoding.results import Hypothesis
from regard.decoding.search import Runner, SearchRequest, search, select_runner
from regard.decoding.terms import Term
from regard.models import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.tasks.glossary import Glossary, Requirement, term, token_classes
from regard.text import Tokenizer, encode_side
from regard.text.encode import ContextBudget, prefix_ids


@dataclass(frozen=True)
class Answer:
    """The translations of one line, best first, with their hypotheses. A blank line has one blank translation."""

    texts: tuple[str, ...] = ("",)
    hypotheses: tuple[Hypothesis, ...] = ()
    source: tuple[int, ...] = ()
    truncated: bool = False  # whether the line was longer than the model's context
    unmet: tuple[Requirement, ...] = ()  # terms of the glossary that the best translation lacks

    @property
    def text(self) -> str:
        """The best translation."""
        return self.texts[0]


@dataclass(frozen=True)
class Translator:
    """Translates lines with one model, its tokenizers and its decoding settings.

    The translation of a line depends on the line, the settings, the seed and (in sampling) the line number, not on the
    other lines.
    """

    model: SequenceModel
    tokenizers: tuple[Tokenizer, Tokenizer]
    settings: DecodingSettings
    longest: int  # maximum number of tokens of source and target
    lowercase: bool = False
    source_tag: str | None = None
    target_tag: str | None = None
    seed: int = 0
    source_prefix: tuple[int, ...] = ()  # special tokens before every source
    shares_context: bool = False  # whether `longest` is the maximum of source and target together
    precision: str = "auto"  # on a GPU, as in `regard.precision`
    runner: Runner | None = None  # runs the searches, given sources on the host; None: the fastest
    glossary: Glossary | None = None
    forbidden: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forbidden", self.tokenizers[1].forbidden())

    @classmethod
    def for_recipe(
        cls,
        model: SequenceModel,
        tokenizers: tuple[Tokenizer, Tokenizer],
        recipe: Recipe,
        settings: DecodingSettings | None = None,
    ) -> Translator:
        """Use the recipe's decoding settings (or the given ones), its maximum length, and its first corpus's tags."""
        first = corpora(recipe.data)[0]
        return cls(
            model,
            tokenizers,
            settings if settings is not None else recipe.decoding,
            recipe.model.max_positions,
            recipe.data.lowercase,
            first.source_tag,
            first.target_tag,
            source_prefix=prefix_ids(recipe),
            shares_context=recipe.model.shares_context,
            precision=recipe.training.precision,
        )

    @property
    def budget(self) -> ContextBudget:
        return ContextBudget(self.longest, self.shares_context)

    def encode(self, lines: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """Return the source tokens of each line with tag and EOS, none for a blank line; and which were truncated."""
        tokens, cut = encode_side(
            self.tokenizers[0],
            lines,
            tag=self.source_tag,
            max_len=self.budget.source,
            lowercase=self.lowercase,
            prefix=self.source_prefix,
        )
        return [t if line.strip() else [] for t, line in zip(tokens, lines, strict=True)], cut

    def __call__(
        self,
        lines: Sequence[str],
        *,
        nbest: int = 1,
        first: int = 0,
        prefixes: Sequence[str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Translate lines, of which the first has the number `first`; each translation begins with its prefix."""
        sources, truncated = self.encode(lines)
        forced = self._prefixes(sources, prefixes)
        answers = [Answer()] * len(lines)
        required = [self.requirements(line) for line in lines]
        terms = [self.terms(requirements) for requirements in required]
        for batch in self._batches(sources, terms):
            prefix, required_terms = [forced[i] for i in batch], [terms[i] for i in batch]
            numbers = [first + i for i in batch]
            results = self._search([sources[i] for i in batch], prefix, required_terms, numbers, nbest)
            for i, hypotheses in zip(batch, results, strict=True):
                answers[i] = self.answer(sources[i], hypotheses, required[i], truncated[i])
            if progress is not None:
                progress(len(batch))
        return answers

    def _batches(self, sources: list[list[int]], terms: list[list[Term]]) -> Iterator[list[int]]:
        """Yield the numbers of the lines of each batch; lines with terms are apart, because their steps cost more."""
        for has_terms in (False, True):
            chosen = [i for i, source in enumerate(sources) if source and bool(terms[i]) == has_terms]
            for group in sentence_batches([len(sources[i]) for i in chosen], self.settings.batch_tokens):
                yield [chosen[i] for i in group]

    def requirements(self, line: str) -> list[Requirement]:
        """Return what the glossary requires of the translation of a line."""
        required = [] if self.glossary is None else self.glossary.requirements(line)
        return [requirement.lower() for requirement in required] if self.lowercase else required

    def terms(self, requirements: Sequence[Requirement]) -> list[Term]:
        """Return the token patterns of requirements, of those that the vocabulary can express."""
        patterns = [term(requirement, self.tokenizers[1]) for requirement in requirements]
        return [pattern for pattern in patterns if pattern is not None]

    def answer(
        self,
        source: Sequence[int],
        hypotheses: Sequence[Hypothesis],
        requirements: Sequence[Requirement] = (),
        truncated: bool = False,
    ) -> Answer:
        """Decode the hypotheses of a line, and check what was required of its translation."""
        texts = tuple(self.tokenizers[1].decode(h.tokens) for h in hypotheses)
        unmet = tuple(requirement for requirement in requirements if not requirement.is_met(texts[0]))
        return Answer(texts, tuple(hypotheses), tuple(source), truncated, unmet)

    def of_tokens(self, sources: list[list[int]]) -> list[Hypothesis]:
        """Return the best output for each tokenized source, special tokens included, as `encode` returns it."""
        results = self._search(sources, self._prefixes(sources, None), [[]] * len(sources), range(len(sources)), 1)
        return [best for best, *_ in results]

    def _prefixes(self, sources: list[list[int]], prefixes: Sequence[str] | None) -> list[list[int]]:
        """Return the tokens that each translation begins with, truncated to leave one position for EOS."""
        tag = [self.tokenizers[1].tag(self.target_tag)] if self.target_tag else []
        limits = [self.budget.target(len(source)) - 1 for source in sources]
        if prefixes is None:
            return [tag[:limit] for limit in limits]
        tokens = self.tokenizers[1].encode_batch(list(prefixes))
        return [[*tag, *ids][:limit] for ids, limit in zip(tokens, limits, strict=True)]

    def _search(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]],
        terms: list[list[Term]],
        lines: Sequence[int],
        nbest: int,
    ) -> list[list[Hypothesis]]:
        source = PackedTokens.from_lists(sources)
        request = SearchRequest(
            source if self.runner is not None else source.to(next(self.model.parameters()).device),
            self.settings,
            nbest,
            prefixes=prefixes if any(prefixes) else None,
            banned=self.forbidden,
            max_length=[self.budget.target(len(source)) for source in sources],
            seed=self.seed,
            lines=lines,
            terms=terms if any(terms) else None,
            classes=token_classes(self.tokenizers[1]) if any(terms) else None,
        )
        with torch.inference_mode():
            return search(self.model, request, run=self.runner or select_runner(self.model, self.precision))
