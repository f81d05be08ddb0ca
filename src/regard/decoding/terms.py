"""Terms that outputs must or must not contain, tracked token by token inside the one search.

A term is a list of alternatives, and an alternative a pattern of token ids and token classes (such as "ends a word").
Every beam carries which beginnings of which patterns its last tokens match: the Shift-And algorithm (Baeza-Yates and
Gonnet 1992), which needs no branches, so that a step with terms can be captured like any other.

Beams are shared out as in Post and Vilar (2018), with the round robin of Hu et al. (2019): candidates with the same
number of tokens still needed form a bank. The best of every bank are kept first, then the second best, and so on.
Candidates that could no longer fit their terms in before the maximum length are dropped, so that every term is found
that fits at all. A beam whose most likely next token is EOS continues with a token of a term only: what a model writes
after its end is no translation. A single beam (greedy search) then completes all its terms.

What the many candidates of a step would match is computed in integers whose bits are positions of patterns
(`TermBits`), as Shift-And does it; `TermProgress.after` is the definition.

Shapes: N sentences, K beams, C terms, A alternatives, L symbols of a pattern, M candidates, V the vocabulary, Y token
ids in the patterns of a sentence, W words of 64 bits, R numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.text import EOS

NO_TOKEN = -1  # padding in lists of token ids
LEFT, INNER, RIGHT = -2, -3, -4  # symbols of patterns that match the tokens of a class: see `TokenClasses`
CLASSES = (LEFT, INNER, RIGHT)
UNREACHABLE = 1 << 20  # tokens that an alternative needs if it does not exist
WORD_BITS = 64
FAR = 1 << 14  # tokens that it needs if it must begin a word without a space: only chance leads there


@dataclass(frozen=True)
class Term:
    """One of the alternatives must occur in the output; with `avoid`, none may.

    Alternatives are token ids, and classes before the first or after the last id.
    """

    alternatives: tuple[tuple[int, ...], ...]
    avoid: bool = False


class TokenClasses(NamedTuple):
    """The tokens that each class symbol matches, [V] bool each."""

    left: Tensor  # a word may begin after it without a space; the beginning of the output counts as such a token
    inner: Tensor  # it is ordinary text: not the beginning of the output
    right: Tensor  # a word may end before it


class TermBits(NamedTuple):
    """The patterns of N sentences in the bits of int64: bit a * L + l is symbol l of alternative a."""

    ids: Tensor  # [N, Y] the token ids in a sentence's patterns, padded with NO_TOKEN
    of_ids: Tensor  # [N, Y + 1, C, W] the positions of each id; none in the last row, for all other tokens
    of_classes: Tensor  # [N, 3, C, W] the positions of each class symbol
    ends: Tensor  # [N, C, W] the last position of each pattern
    rest: Tensor  # [N, C, W, R] the positions after which a pattern needs 0, 1, ... R - 1 more tokens

    @classmethod
    def of(cls, patterns: Tensor, rest: Tensor) -> TermBits:
        """Make them from the tensors of a `TermTable`."""
        symbols = patterns.shape[-1]
        each = [row[row >= 0].unique() for row in patterns.flatten(1)]
        width = 1 << (max(1, *map(len, each)) - 1).bit_length()  # few shapes, as in `TermTable.of`
        ids = torch.stack([F.pad(row, (0, width - len(row)), value=NO_TOKEN) for row in each])
        n, c, a, position = (patterns >= 0).nonzero(as_tuple=True)
        row = (ids[n] == patterns[n, c, a, position][:, None]).byte().argmax(-1)
        bit = a * symbols + position
        ends = torch.arange(symbols) == (patterns != NO_TOKEN).sum(-1, keepdim=True) - 1
        of_ids = torch.zeros(len(ids), width + 1, *packed_bits(ends.flatten(-2)).shape[1:], dtype=torch.long)
        of_ids.index_put_((n, row, c, bit // WORD_BITS), 1 << bit % WORD_BITS, accumulate=True)  # each bit once
        of_classes = [packed_bits((patterns == symbol).flatten(-2)) for symbol in CLASSES]
        of_rest = [packed_bits((rest[..., 1:] == count).flatten(-2)) for count in range(symbols + 1)]
        return cls(ids, of_ids, torch.stack(of_classes, 1), packed_bits(ends.flatten(-2)), torch.stack(of_rest, -1))

    def hits(self, tokens: Tensor, classes: Tensor) -> Tensor:
        """The positions that each of tokens [N, K, M] matches, [N, K, M, C, W]; `classes` are those of the table."""
        width = self.ids.shape[1]
        is_id = tokens[..., None] == self.ids[:, None, None]
        row = torch.where(is_id, torch.arange(width, device=tokens.device), width).amin(-1)
        of_ids = self.of_ids.flatten(2)
        words = of_ids.gather(1, row.flatten(1)[..., None].expand(-1, -1, of_ids.shape[-1]))
        words = words.view(*tokens.shape, *self.ends.shape[1:])
        belongs = classes[:, tokens.clamp(max=classes.shape[1] - 1)]  # [3, N, K, M]
        for member, bits in zip(belongs, self.of_classes.unbind(1), strict=True):
            words |= torch.where(member[..., None, None], bits[:, None, None], 0)
        return words


def packed_bits(bits: Tensor) -> Tensor:
    """Pack bits [..., S] into words [..., W] of 64 bits, the first one as the least significant.

    >>> packed_bits(torch.tensor([[True, False, True, True]])).tolist()
    [[13]]
    """
    size = bits.shape[-1]
    width = min(size, WORD_BITS)
    values = 1 << torch.arange(width, device=bits.device)
    return (F.pad(bits, (0, -size % width)).unflatten(-1, (-1, width)) * values).sum(-1)


@dataclass(frozen=True)
class TermTable:
    """The terms of N sentences as tensors."""

    patterns: Tensor  # [N, C, A, L] token ids and class symbols, padded with NO_TOKEN
    rest: Tensor  # [N, C, A, L + 1] tokens that a pattern needs from each position on; UNREACHABLE beyond its end
    avoid: Tensor  # [N, C] bool
    classes: Tensor  # [3, V] bool, in the order of CLASSES
    bits: TermBits

    @classmethod
    def of(
        cls, terms: Sequence[Sequence[Term]], device: torch.device, classes: TokenClasses | None = None
    ) -> TermTable | None:
        """Make the table of the terms of each sentence; None if there are no terms."""
        every = [term for sentence in terms for term in sentence]
        if not every:
            return None
        if any(EOS in alternative or not alternative for term in every for alternative in term.alternatives):
            raise ValueError("a term cannot contain EOS or be empty")
        if any(LEFT in alternative[1:] for term in every for alternative in term.alternatives):
            raise ValueError("LEFT can only be the first symbol of a term")
        sizes = max(map(len, terms)), max(len(term.alternatives) for term in every)
        longest = max(len(alternative) for term in every for alternative in term.alternatives)
        # Powers of two: few shapes, so that searches share captured steps and batches
        shape = [len(terms), *(1 << (size - 1).bit_length() for size in (*sizes, longest))]
        patterns = torch.full(shape, NO_TOKEN)
        avoid = torch.zeros(shape[:2], dtype=torch.bool)
        for n, sentence in enumerate(terms):
            for c, term in enumerate(sentence):
                avoid[n, c] = term.avoid
                for a, alternative in enumerate(term.alternatives):
                    symbols = [symbol for symbol in alternative if not (term.avoid and symbol == RIGHT)]
                    patterns[n, c, a, : len(symbols)] = torch.tensor(symbols)
        table = torch.ones(len(CLASSES), 1, dtype=torch.bool) if classes is None else torch.stack([*classes])
        rest = _rest(patterns)
        return cls(patterns, rest, avoid, table, TermBits.of(patterns, rest)).to(device)

    def to(self, device: torch.device) -> TermTable:
        moved = self.with_sentences(*(x.to(device) for x in self.sentence_tensors()))
        return replace(moved, classes=self.classes.to(device))

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.sentence_tensors(), self.classes

    def sentence_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have a row for each sentence."""
        return self.patterns, self.rest, self.avoid, *self.bits

    def with_sentences(self, patterns: Tensor, rest: Tensor, avoid: Tensor, *bits: Tensor) -> TermTable:
        """Return a table of other sentences with the same classes."""
        return replace(self, patterns=patterns, rest=rest, avoid=avoid, bits=TermBits(*bits))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensors of a sentence."""
        return *self.patterns.shape[1:], self.bits.ids.shape[1]

    def select(self, sentences: Tensor) -> TermTable:
        """Select sentences, [M] indices into the present N."""
        return self.with_sentences(*(x.index_select(0, sentences) for x in self.sentence_tensors()))

    @property
    def any_term(self) -> bool:
        """Whether any sentence has a term (read by the host)."""
        return bool((self.patterns != NO_TOKEN).any())

    @property
    def length(self) -> Tensor:
        """[N, C, A] the number of symbols of each pattern."""
        return (self.patterns != NO_TOKEN).sum(-1)

    @property
    def full(self) -> Tensor:
        """[N, C] the fewest tokens of each required term after other text; 0 if there is none, or it is avoided."""
        fewest = (self.rest[..., 0] - (self.patterns[..., 0] == INNER).long()).amin(-1)
        return fewest.masked_fill(self.avoid | (fewest >= UNREACHABLE), 0)

    @property
    def capacity_needed(self) -> Tensor:
        """[N] tokens for the longest alternatives of all required terms, one more for each, and EOS."""
        tokens = (self.patterns >= 0).sum(-1).masked_fill(self.avoid[..., None], 0)
        return tokens.amax(-1).sum(-1) + (self.full > 0).sum(-1) + 1

    def hits(self, tokens: Tensor) -> Tensor:
        """Whether each of tokens [N, K, M] matches each symbol: [N, K, M, C, A, L] bool."""
        patterns = self.patterns[:, None, None]
        hit = patterns == tokens[..., None, None, None]
        belongs = self.classes[:, tokens.clamp(max=self.classes.shape[1] - 1)]  # [3, N, K, M]
        for symbol, member in zip(CLASSES, belongs, strict=True):
            hit |= (patterns == symbol) & member[..., None, None, None]
        return hit


def _rest(patterns: Tensor) -> Tensor:
    """See `TermTable.rest`. INNER needs a token at the beginning; a search does not count on one that LEFT matches."""
    needed = (patterns >= 0).long() + (patterns == INNER).long() + FAR * (patterns == LEFT).long()
    ids = needed.flip(-1).cumsum(-1).flip(-1)
    rest = F.pad(ids, (0, 1))
    exists = torch.arange(rest.shape[-1], device=patterns.device) <= (patterns != NO_TOKEN).sum(-1, keepdim=True)
    exists &= (patterns != NO_TOKEN).any(-1, keepdim=True)
    return rest.masked_fill(~exists, UNREACHABLE)


class Match(NamedTuple):
    """The matches of hypotheses so far. Leading dimensions are those of the hypotheses."""

    partial: Tensor  # [..., C, A, L + 1] bool: the last tokens match the first l symbols of the pattern
    met: Tensor  # [..., C] bool: the term has occurred


class Candidates(NamedTuple):
    """Tokens for each beam, [N, K, any]."""

    tokens: Tensor
    valid: Tensor  # bool


@dataclass(eq=False)
class TermProgress:
    """The matches of each beam of a search, in tensors that a step changes in place."""

    table: TermTable
    match: Match  # of the beams: [N, K, ...]
    unmet: Tensor  # [N, K] terms that each finished hypothesis does not contain
    deadline: Tensor  # [N] tokens after which a single beam that has tried to end must end

    @classmethod
    def create(cls, table: TermTable, beams: int) -> TermProgress:
        count, terms, alternatives, symbols = table.patterns.shape
        partial = torch.empty(
            count, beams, terms, alternatives, symbols + 1, dtype=torch.bool, device=table.rest.device
        )
        unmet = torch.empty(count, beams, dtype=torch.long, device=table.rest.device)
        return cls(table, Match(partial, partial.new_empty(count, beams, terms)), unmet, unmet[:, 0].clone())

    def reset(self) -> None:
        """Nothing is matched but the beginning of the output, which is a word's left boundary."""
        self.match.partial.zero_()
        self.match.partial[..., 0] = True
        self.match.partial[..., 1] = (self.table.patterns[..., 0] == LEFT)[:, None]
        self.match.met.zero_()
        self.unmet.zero_()
        self.deadline.fill_(UNREACHABLE)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the state, without those of the table."""
        return *self.match, self.unmet, self.deadline

    def select(self, table: TermTable, sentences: Tensor) -> TermProgress:
        """Select sentences, [M] indices into the present N; `table` is that of these sentences."""
        match = Match(*(x.index_select(0, sentences) for x in self.match))
        return TermProgress(table, match, *(x.index_select(0, sentences) for x in (self.unmet, self.deadline)))

    # -- candidates ----------------------------------------------------------------------------------------------------

    def candidates(self, beams: int) -> Candidates:
        """The next token of the longest beginning of every alternative that each beam has matched, and EOS.

        [N, K, C * A + 1], for the first `beams` beams.
        """
        table, match = self.table, self._beams(beams)
        position = torch.arange(match.partial.shape[-1], device=table.rest.device)
        inside = match.partial & (position < table.length[:, None, ..., None])
        longest = torch.where(inside, position, 0).amax(-1)  # [N, K, C, A]
        patterns = table.patterns[:, None].expand(-1, beams, -1, -1, -1)
        token = patterns.gather(-1, longest[..., None]).squeeze(-1)
        wanted = ~match.met & ~table.avoid[:, None]
        tokens, valid = _compacted(token.flatten(2), ((token >= 0) & wanted[..., None]).flatten(2))
        same = (tokens[..., :, None] == tokens[..., None, :]) & valid[..., None, :]
        valid &= ~same.tril(-1).any(-1)  # each token once
        avoided, active = self._avoided(beams)
        valid &= ~((tokens[..., :, None] == avoided[..., None, :]) & active[..., None, :]).any(-1)
        tokens, valid = _compacted(tokens, valid)
        has_terms = (table.full > 0).any(-1)[:, None, None].expand(-1, beams, 1)
        ends = tokens.new_full((*tokens.shape[:-1], 1), EOS)
        return Candidates(torch.cat([tokens.clamp(min=0), ends], -1), torch.cat([valid, has_terms], -1))

    def mask_avoided(self, logits: Tensor) -> None:
        """Put -inf in place at the tokens of logits [N, K, V] that would complete an avoided term."""
        tokens, active = self._avoided(logits.shape[1])
        value = torch.where(active, -torch.inf, torch.inf).to(logits.dtype)
        logits.scatter_reduce_(-1, tokens.clamp(min=0), value, "amin")

    def _avoided(self, beams: int) -> Candidates:
        """The last token of each alternative, [N, K, C * A]; valid: the term is avoided, and all before it matches."""
        table, match = self.table, self._beams(beams)
        last = (table.length - 1).clamp(min=0)[:, None, ..., None].expand(-1, beams, -1, -1, 1)
        token = table.patterns[:, None].expand(-1, beams, -1, -1, -1).gather(-1, last)
        active = match.partial.gather(-1, last) & table.avoid[:, None, :, None, None] & (token >= 0)
        return Candidates(token.flatten(2), active.flatten(2))

    def _beams(self, count: int) -> Match:
        return Match(self.match.partial[:, :count], self.match.met[:, :count])

    # -- what candidates would match -----------------------------------------------------------------------------------

    def after(self, tokens: Tensor) -> Match:
        """The matches of each beam after each of tokens [N, K, M]: [N, K, M, ...]."""
        match, hits = self._beams(tokens.shape[1]), self.table.hits(tokens)
        longer = match.partial[:, :, None, ..., :-1] & hits
        partial = F.pad(longer, (1, 0), value=True)
        end = torch.arange(partial.shape[-1], device=tokens.device) == self.table.length[..., None]
        end &= (self.table.length > 0)[..., None]
        return Match(partial, match.met[:, :, None] | (partial & end[:, None, None]).any(-1).any(-1))

    def needed(self, match: Match) -> Tensor:
        """Tokens that suffice to meet all terms: those of the terms not met, less what the longest match has of one.

        `match` is [N, K, ...] or [N, K, M, ...]. A pattern of which only a class is missing needs no more tokens.
        """
        rest = self.table.rest.view(len(self.table.rest), *[1] * (match.met.dim() - 2), *self.table.rest.shape[1:])
        left = torch.where(match.partial, rest, UNREACHABLE).amin(-1).amin(-1)  # [..., C]
        return self._needed(match.met, left)

    def needed_after(self, tokens: Tensor) -> Tensor:
        """`needed(after(tokens))` for tokens [N, K, M], computed in bits: [N, K, M]."""
        table, bits, match = self.table, self.table.bits, self._beams(tokens.shape[1])
        symbols = table.patterns.shape[-1]
        if symbols > WORD_BITS:  # a pattern of two words: too rare for code of its own
            return self.needed(self.after(tokens))
        begun = packed_bits(match.partial[..., 1:].flatten(-2))  # [N, K, C, W]
        # The shift moves the last position of a pattern to the first of the next one, which may always begin.
        reached = ((begun << 1) | _first_bits(symbols))[:, :, None] & bits.hits(tokens, table.classes)
        met = match.met[:, :, None] | ((reached & bits.ends[:, None, None]) != 0).any(-1)
        after = (reached[..., None] & bits.rest[:, None, None]) != 0  # [N, K, M, C, W, R]
        count = torch.arange(after.shape[-1], device=tokens.device)
        left = torch.where(after, count, UNREACHABLE).amin((-1, -2))
        return self._needed(met, torch.minimum(left, table.rest[..., 0].amin(-1)[:, None, None]))

    def _needed(self, met: Tensor, left: Tensor) -> Tensor:
        """See `needed`, given which terms are met and the tokens that each still needs, [N, K, C] or [N, K, M, C]."""
        full = self.table.full.view(len(met), *[1] * (met.dim() - 2), -1).masked_fill(met, 0)
        begun = torch.where(full > 0, full - left, -UNREACHABLE).amax(-1)
        return full.sum(-1) - begun.masked_fill((full == 0).all(-1), 0)

    def end_in_time(self, would_end: Tensor, step: Tensor, needed: Tensor, left: Tensor) -> Tensor:
        """Return how many tokens [N] single beams have left: at most those `needed`, once they `would_end`."""
        torch.minimum(self.deadline, torch.where(would_end, step + needed + 1, UNREACHABLE), out=self.deadline)
        return torch.minimum(left, self.deadline - step)

    def unmet_terms(self) -> Tensor:
        """The number of required terms that each beam does not contain, [N, K]; the output's end ends a word."""
        whole = (self.match.partial & (self.table.rest == 0)[:, None]).any(-1).any(-1)
        return ((self.table.full > 0)[:, None] & ~(self.match.met | whole)).sum(-1)

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """Beam k continues beam `parents[n, k]` with `tokens[n, k]`."""
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        for mine, chosen in zip(self.match, [x[rows, parents] for x in self.match], strict=True):
            mine.copy_(chosen)
        for mine, new in zip(self.match, self.after(tokens[..., None]), strict=True):
            mine.copy_(new[:, :, 0])


def _first_bits(symbols: int) -> int:
    """The bits of the first symbols of all patterns in a word, as a signed integer."""
    value = sum(1 << bit for bit in range(0, WORD_BITS, symbols))
    return value - (value >> (WORD_BITS - 1) << WORD_BITS)


def _compacted(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Drop columns of candidates [N, K, M], on a CPU, until those of some beam are all valid; their order stays.

    Most alternatives have no next token, or that of another one. What a candidate would match is computed for every
    symbol of every alternative. A captured step cannot depend on how many are valid.
    """
    if not valid.is_cpu:
        return tokens, valid
    width = int(valid.sum(-1).max())
    order = valid.logical_not().byte().argsort(dim=-1, stable=True)[..., :width]
    return tokens.gather(-1, order), valid.gather(-1, order)


def allowed(needed: Tensor, before: Tensor, tokens: Tensor, left: Tensor) -> Tensor:
    """Whether candidates [N, K, M] leave enough tokens for the terms that they do not contain yet.

    `needed` [N, K, M] tokens suffice after the candidate, and `before` [N, K] before it, of `left` [N] tokens before
    it; the last one is for EOS. A beam that has too few for its terms is not restricted.
    """
    available = (left - 1)[:, None]  # tokens before EOS, the candidate included
    hopeless = before > available
    in_time = (needed < available[..., None]) & (tokens != EOS)
    return (needed == 0) | in_time | hopeless[..., None]


def share_out(total: Tensor, bank: Tensor, count: int) -> Tensor:
    """Select `count` of candidates [N, M] with log-probabilities `total`: the best of every bank, then the second, ...

    Among candidates of the same rank in their banks, the more likely ones come first. Return their indices [N, count];
    with one bank, those of the `count` best.
    """
    order = total.sort(dim=-1, descending=True, stable=True)
    size = total.shape[-1]
    position = torch.arange(size, device=total.device)
    key = _ranks(bank.gather(-1, order.indices)) * size + position  # rank in the bank, then the order of all
    key = torch.where(order.values == -torch.inf, size * size + position, key)
    chosen = key.topk(count, largest=False).indices
    return order.indices.gather(-1, chosen)


def _ranks(bank: Tensor) -> Tensor:
    """For each of [N, M], the number of entries before it in the same bank.

    >>> _ranks(torch.tensor([[7, 7, 3, 7, 3]])).tolist()
    [[0, 1, 0, 2, 1]]
    """
    by_bank = bank.sort(dim=-1, stable=True)
    position = torch.arange(bank.shape[-1], device=bank.device).expand_as(bank)
    begins = F.pad(by_bank.values[:, 1:] != by_bank.values[:, :-1], (1, 0), value=True)
    first = torch.where(begins, position, 0).cummax(-1).values
    return torch.empty_like(bank).scatter_(-1, by_bank.indices, position - first)
