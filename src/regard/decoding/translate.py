"""Lines of raw text in, as many lines of raw text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from regard.data.corpora import corpora
from regard.data.packing import sentence_batches
from regard.decoding.beam_state import Hypothesis
from regard.decoding.search import SearchRequest, search, select_runner
from regard.models import SequenceModel
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import Tokenizer, encode_side
from regard.text.encode import ContextBudget, prefix_ids


@dataclass(frozen=True)
class Answer:
    """What came out for one line: the texts, best first, and how they were made. A blank line has one blank text."""

    texts: tuple[str, ...] = ("",)
    hypotheses: tuple[Hypothesis, ...] = ()
    source: tuple[int, ...] = ()
    truncated: bool = False  # the line was longer than the model reads


@dataclass(frozen=True)
class Translator:
    """Translates lines with one model, its tokenizers and its decoding settings.

    What comes out for a line depends on the line, the settings, the seed and (when sampling) the line's number: never
    on what else is translated with it.
    """

    model: SequenceModel
    tokenizers: tuple[Tokenizer, Tokenizer]
    settings: DecodingSettings
    longest: int  # the most tokens the model reads or writes
    lowercase: bool = False
    source_tag: str | None = None
    target_tag: str | None = None
    seed: int = 0
    front: tuple[int, ...] = ()  # marks before every source
    shares_context: bool = False  # whether what it reads and what it writes are that long together
    precision: str = "auto"  # as `devices.autocast` has it, on a GPU
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
        """As the recipe says: its decoding settings (or others), its longest sentence, its first corpus's tags."""
        first = corpora(recipe.data)[0]
        return cls(
            model,
            tokenizers,
            settings if settings is not None else recipe.decoding,
            recipe.model.max_positions,
            recipe.data.lowercase,
            first.source_tag,
            first.target_tag,
            front=prefix_ids(recipe),
            shares_context=recipe.model.shares_context,
            precision=recipe.training.precision,
        )

    @property
    def room(self) -> ContextBudget:
        return ContextBudget(self.longest, self.shares_context)

    def encode(self, lines: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """Source tokens of each line with tag and end mark, none for a blank one; and which had to be cut."""
        tokens, cut = encode_side(
            self.tokenizers[0],
            lines,
            tag=self.source_tag,
            max_len=self.room.source,
            lowercase=self.lowercase,
            prefix=self.front,
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
        """Translate; `first` is the number of the first line, `prefixes` what each translation must begin with."""
        sources, cut = self.encode(lines)
        forced = self._prefixes(sources, prefixes)
        answers = [Answer()] * len(lines)
        full = [i for i, source in enumerate(sources) if source]
        for group in sentence_batches([len(sources[i]) for i in full], self.settings.batch_tokens):
            chosen = [full[i] for i in group]
            found = self._search([sources[i] for i in chosen], [forced[i] for i in chosen], chosen, first, nbest)
            for i, hypotheses in zip(chosen, found, strict=True):
                texts = tuple(self.tokenizers[1].decode(h.tokens) for h in hypotheses)
                answers[i] = Answer(texts, tuple(hypotheses), tuple(sources[i]), cut[i])
            if progress is not None:
                progress(len(chosen))
        return answers

    def of_tokens(self, sources: list[list[int]]) -> list[Hypothesis]:
        """The best output for each source that is tokens already, marks included, as `encode` gives them."""
        found = self._search(sources, self._prefixes(sources, None), list(range(len(sources))), 0, 1)
        return [best for best, *_ in found]

    def _prefixes(self, sources: list[list[int]], prefixes: Sequence[str] | None) -> list[list[int]]:
        """What each translation begins with, cut so that there is a place for the end mark."""
        tag = [self.tokenizers[1].tag(self.target_tag)] if self.target_tag else []
        rooms = [self.room.target(len(source)) - 1 for source in sources]
        if prefixes is None:
            return [tag[:room] for room in rooms]
        pieces = self.tokenizers[1].encode_batch(list(prefixes))
        return [[*tag, *ids][:room] for ids, room in zip(pieces, rooms, strict=True)]

    def _search(
        self, sources: list[list[int]], prefixes: list[list[int]], lines: list[int], first: int, nbest: int
    ) -> list[list[Hypothesis]]:
        device = next(self.model.parameters()).device
        request = SearchRequest(
            PackedTokens.from_lists(sources).to(device),
            self.settings,
            nbest,
            prefixes=prefixes if any(prefixes) else None,
            banned=self.forbidden,
            max_length=[self.room.target(len(source)) for source in sources],
            seed=self.seed,
            lines=[first + i for i in lines],
        )
        with torch.inference_mode():
            return search(self.model, request, run=select_runner(self.model, self.precision))
