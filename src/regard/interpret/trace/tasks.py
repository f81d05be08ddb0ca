"""What a model of each kind reads and writes, so that a trace can be recorded without asking which kind it is.

`read` turns text into tokens, `own` lets the model write, `given` takes an output from somebody else, `going_on` takes
the output so far and lets the model add one token; `batch` lays both out for one teacher-forced pass, and `sides` says
which tokens the rows of that pass are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.decoding import Hypothesis
from regard.errors import UserError
from regard.interpret.explain.models import CONTINUED
from regard.interpret.trace.tokens import TokenSide, TokenSpan, is_mark
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import Recipe
from regard.runs import LoadedRun
from regard.text import BOS, EOS, PAD, Tokenizer, encode_side, encode_stream
from regard.text.encode import MASK
from regard.text.tokenizers import join_tokens

Scores = Callable[[SeqBatch], Tensor]  # one pass: logits [T, V]


@dataclass(frozen=True)
class Output:
    """An output: its tokens, end mark included where there is one; how many of them were given; its text and score."""

    tokens: tuple[int, ...]
    text: str
    score: float | None = None  # as the search reports it; None: of the log-probabilities of the pass
    given: int = 0


@dataclass(frozen=True)
class TokenSides:
    """The tokens of one pass. The rows of its logits belong to `target`, one each."""

    source: TokenSide
    inputs: TokenSide
    target: TokenSide

    @property
    def joined(self) -> bool:
        """Whether what was read and what was written are one row."""
        return not len(self.source)


class TraceTask(ABC):
    """What one model does with a text."""

    reads: tuple[str, ...] = ("source",)  # the sides of a pass that hold what was read
    last: int | None = EOS  # the token that nothing follows
    one_row = False  # whether what is read and what is written are one row, of which every place predicts the next

    def __init__(self, loaded: LoadedRun) -> None:
        self.kind = kind_of(loaded.recipe)
        self.source, self.target = loaded.tokenizers

    @abstractmethod
    def read(self, text: str) -> tuple[list[int], bool]:
        """The tokens that the model reads, and whether the text had to be cut."""

    @abstractmethod
    def own(self, tokens: list[int], scores: Scores) -> Output:
        """What the model itself writes."""

    @abstractmethod
    def given(self, tokens: list[int], target: str) -> Output:
        """An output that is given as text."""

    @abstractmethod
    def going_on(self, tokens: list[int], after: Sequence[int], scores: Scores) -> Output:
        """The output so far, and the likeliest token after it."""

    @abstractmethod
    def batch(self, tokens: list[int], said: Sequence[int]) -> SeqBatch:
        """One teacher-forced pass."""

    @abstractmethod
    def sides(self, tokens: list[int], said: Output) -> TokenSides:
        """Which tokens stand where in that pass."""

    @abstractmethod
    def forbidden(self) -> list[int]:
        """Ids that the search never writes."""


class TranslateTask(TraceTask):
    """From a source sentence to a target sentence; a class is a sentence of one word."""

    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__(loaded)
        self.translator = loaded.translator()
        tag = self.translator.target_tag
        self.tag = (self.target.tag(tag),) if tag else ()

    def read(self, text: str) -> tuple[list[int], bool]:
        (tokens,), (cut,) = self.translator.encode([text])
        return tokens, cut

    def own(self, tokens: list[int], scores: Scores) -> Output:
        (best,) = self.translator.of_tokens([tokens])
        return _said(best, self.target, len(self.tag))

    def given(self, tokens: list[int], target: str) -> Output:
        if self.kind == "classify":
            return self._class(target)
        room = self.translator.room.target(len(tokens))
        tag, lower = self.translator.target_tag, self.translator.lowercase
        (found,), (cut,) = encode_side(self.target, [target], tag=tag, max_len=room, lowercase=lower)
        if cut:
            raise UserError(f"the target is longer than the {room - 1} tokens that this model can write here")
        return Output(tuple(found), target, given=len(self.tag))

    def _class(self, target: str) -> Output:
        named = self.target.encode(target)
        if len(named) != 1 or named[0] < self.target.first:
            raise UserError(f"there is no class {target!r}")
        return Output((*named, EOS), target)

    def going_on(self, tokens: list[int], after: Sequence[int], scores: Scores) -> Output:
        room = self.translator.room.target(len(tokens))
        so_far = [*self.tag, *after]
        _check_ids(so_far, self.target, room, EOS)
        logits = scores(self.batch(tokens, [*so_far, PAD]))[-1]
        following = _likeliest(logits, self.forbidden())
        said = (*so_far, following)
        return Output(said, self.target.decode(said), given=len(so_far))

    def batch(self, tokens: list[int], said: Sequence[int]) -> SeqBatch:
        return SeqBatch.from_lists([tokens], [list(said)], bos=BOS)

    def sides(self, tokens: list[int], said: Output) -> TokenSides:
        written = (
            TokenSpan(said.tokens[: said.given], self.target, given=True),
            TokenSpan(said.tokens[said.given :], self.target),
        )
        inputs = TokenSide((TokenSpan([BOS, *said.tokens[:-1]], self.target),))
        return TokenSides(TokenSide((TokenSpan(tokens, self.source),)), inputs, TokenSide(written))

    def forbidden(self) -> list[int]:
        return self.translator.forbidden


class DecoderOnlyPairTask(TranslateTask):
    """GPT on pairs: source and target are one row, and every place of it predicts the next."""

    reads = ("inputs",)
    one_row = True

    def sides(self, tokens: list[int], said: Output) -> TokenSides:
        read = TokenSpan(tokens, self.source, given=True)
        begin = TokenSpan([BOS, *said.tokens[: said.given]], self.target, given=True)
        written = TokenSpan(said.tokens[said.given :], self.target)
        fed = TokenSpan([BOS, *said.tokens[:-1]], self.target)
        return TokenSides(
            TokenSide(),
            TokenSide((read, fed)),
            TokenSide((TokenSpan(tokens[1:], self.source, given=True), begin, written)),
        )


class GenerateTask(TraceTask):
    """GPT on plain text: what was read and what follows are one row, and every place of it predicts the next."""

    reads = ("inputs",)
    one_row = True

    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__(loaded)
        self.continuer = loaded.generator(method="beam", beam=1)
        self.last = (
            None if self.continuer.stream else EOS
        )  # in a stream it stands for a line's end, and more may follow

    def read(self, text: str) -> tuple[list[int], bool]:
        return self.continuer.read(text)

    def own(self, tokens: list[int], scores: Scores) -> Output:
        found = self.continuer.after(tokens, CONTINUED)
        said = (*found.tokens, EOS) if found.finished else found.tokens
        return Output(said, self.continuer.spell(found.tokens), found.score)

    def given(self, tokens: list[int], target: str) -> Output:
        lower = target.lower() if self.continuer.lowercase else target
        found = encode_stream(self.target, lower) if self.continuer.stream else self.target.encode(lower)
        room = self.continuer.longest - len(tokens) + 1
        if not found or len(found) > room:
            what = "nothing" if not found else f"{len(found)} tokens"
            raise UserError(f"the target is {what}: after this text the model has room for 1 to {room} tokens")
        return Output(tuple(found), target)

    def going_on(self, tokens: list[int], after: Sequence[int], scores: Scores) -> Output:
        _check_ids(after, self.target, self.continuer.longest - len(tokens) + 1, self.last)
        logits = scores(self.batch(tokens, [*after, PAD]))[-1]
        said = (*after, _likeliest(logits, self.forbidden()))
        return Output(said, self.continuer.spell(said), given=len(after))

    def batch(self, tokens: list[int], said: Sequence[int]) -> SeqBatch:
        inputs = PackedTokens.from_lists([[*tokens, *said[:-1]]])
        return SeqBatch(PackedTokens.from_lists([[]]), inputs, PackedTokens.from_lists([[*tokens[1:], *said]]).ids)

    def sides(self, tokens: list[int], said: Output) -> TokenSides:
        before = TokenSpan([*tokens[1:], *said.tokens[: said.given]], self.target, given=True)
        written = TokenSpan(said.tokens[said.given :], self.target)
        inputs = TokenSide((TokenSpan(tokens, self.target, given=True), TokenSpan(said.tokens[:-1], self.target)))
        return TokenSides(TokenSide(), inputs, TokenSide((before, written)))

    def forbidden(self) -> list[int]:
        return self.continuer.forbidden


class FillTask(TraceTask):
    """BERT: what stands in the gaps of a text. The row is read whole, and every place of it is guessed."""

    reads = ("source", "inputs")

    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__(loaded)
        self.filler = loaded.filler()
        self.mask = self.source.tag(MASK)

    def read(self, text: str) -> tuple[list[int], bool]:
        return self.filler.encode(text), False

    def own(self, tokens: list[int], scores: Scores) -> Output:
        logits = scores(self.batch(tokens, tokens))
        guess = [
            _likeliest(row, self.forbidden()) if token == self.mask else token
            for token, row in zip(tokens, logits, strict=True)
        ]
        words = [token for token in guess if not is_mark(token, self.source)]
        return Output(tuple(guess), join_tokens(self.source.token_texts(words)))

    def given(self, tokens: list[int], target: str) -> Output:
        raise UserError("a model that fills in gaps shows its own guesses, and no other target")

    def going_on(self, tokens: list[int], after: Sequence[int], scores: Scores) -> Output:
        raise UserError("a model that fills in gaps writes nothing that could go on")

    def batch(self, tokens: list[int], said: Sequence[int]) -> SeqBatch:
        row = PackedTokens.from_lists([tokens])
        return SeqBatch(row, row, row.ids)

    def sides(self, tokens: list[int], said: Output) -> TokenSides:
        side = TokenSide((TokenSpan(tokens, self.source),))
        pairs = zip(said.tokens, tokens, strict=True)
        target = TokenSide(tuple(TokenSpan([token], self.source, given=read != self.mask) for token, read in pairs))
        return TokenSides(side, side, target)

    def forbidden(self) -> list[int]:
        return sorted({*self.source.forbidden(), EOS})


def kind_of(recipe: Recipe) -> str:
    """What a run does with a text: translate, generate, fill or classify."""
    if recipe.fills:
        return "fill"
    if recipe.classifies:
        return "classify"
    return "generate" if recipe.data.is_text else "translate"


def task_of(loaded: LoadedRun) -> TraceTask:
    """What this model does."""
    kind = kind_of(loaded.recipe)
    if kind == "translate" and loaded.recipe.model.family == "gpt":
        return DecoderOnlyPairTask(loaded)
    return {"fill": FillTask, "generate": GenerateTask}.get(kind, TranslateTask)(loaded)


def _said(best: Hypothesis, tokenizer: Tokenizer, given: int) -> Output:
    tokens = (*best.tokens, EOS) if best.finished else best.tokens
    return Output(tokens, tokenizer.decode(best.tokens), best.score, given)


def _likeliest(logits: Tensor, forbidden: Sequence[int]) -> int:
    """[V] -> the likeliest token that may be written."""
    free = logits.clone()
    free[torch.tensor(list(forbidden), dtype=torch.long, device=logits.device)] = float("-inf")
    return int(free.argmax())


def _check_ids(ids: Sequence[int], tokenizer: Tokenizer, room: int, last: int | None) -> None:
    """Whether these ids may stand before a further one; nothing comes after `last`."""
    if any(not 0 <= token < len(tokenizer) for token in ids):
        raise UserError(f"there is no token {max(ids)}: this model has {len(tokenizer)}")
    if last in ids:
        raise UserError("the output so far has come to its end: nothing follows the end mark")
    if len(ids) >= room:
        raise UserError(f"the output so far has {len(ids)} tokens, and the model has room for {room} here")
