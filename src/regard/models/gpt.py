"""GPT: the Transformer's decoder alone, which continues what it is given (Radford et al. 2018, 2019).

Text is continued; a pair is one text, the source and then the target. T target tokens and S source tokens in flat rows,
D width, V vocabulary, N sentences, K beams, B = N * K rows of a cache, P places of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention import BeamTree, Causal, Fixed, Mask, Segments, Strided, Window, pack, placed
from regard.errors import UserError
from regard.models.embedding import Embedding
from regard.models.family import DecoderState, StaticShape, Translator
from regard.nn.blocks import BlockSettings, BlockStack, EncoderBlock
from regard.recipes.schema import GPTSettings
from regard.rows import PairBatch, Rows, StaticRows, TokenRow

NEVER = -1e4  # the logit of what is never predicted; finite, so that smoothed losses are
SPREAD = 0.02  # standard deviation that weights begin with, as GPT-2's


def sparse_mask(settings: GPTSettings) -> Mask | None:
    """What a token sees of what came before; None: all of it. A window of n tokens counts the token itself."""
    if settings.mask == "segments":
        return Segments(settings.reach, settings.memory)
    if settings.mask == "window":
        return Window(settings.reach - 1)
    return {"strided": Strided, "fixed": Fixed}[settings.mask](settings.reach) if settings.mask != "causal" else None


@dataclass(frozen=True)
class Joined:
    """Two flat rows laid as one: each sentence's source, then its target; the fill of both at the end.

    `order` [S + T] is which place of [source row, target row] each joined place holds, `target` [T] the joined place
    of each target place.
    """

    rows: Rows
    order: Tensor
    target: Tensor

    @classmethod
    def of(cls, source: Rows, target: Rows) -> Joined:
        size = source.size + target.size
        if isinstance(source, StaticRows) and isinstance(target, StaticRows):
            rows: Rows = StaticRows(source.offsets + target.offsets, size, source.longest + target.longest)
        else:
            rows = Rows([s + t for s, t in zip(source.lengths, target.lengths, strict=True)], size, target.device)
        order = torch.cat([source.sentence, target.sentence]).argsort(stable=True)  # fill is of the last sentence + 1
        return cls(rows, order, order.argsort()[source.size :])


class GPT(Translator):
    """softmax(W · decoder(source and target so far)), normalised before each sub-layer and at the end.

    One embedding table serves input and output when they are tied; a source with a vocabulary of its own has its own.
    """

    has_static_state = is_decoder_only = True
    unused: Tensor

    def __init__(self, settings: GPTSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__()
        self.settings = settings
        self.mask = sparse_mask(settings)
        score = placed(settings.positions, settings.width, settings.heads, settings.position_base)
        block = BlockSettings.of(settings, score)
        self.embedding = Embedding(target_size, settings)
        self.source_embedding = self.embedding if shared else Embedding(source_size, settings)
        self.source_embedding.positions = self.embedding.positions  # places are counted through both
        self.decoder = BlockStack.of(block, EncoderBlock, settings.layers)
        self.static_shapes = self.mask is None  # sparse masks are laid out on the host
        if not settings.tied:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
        self.register_buffer("unused", torch.tensor(settings.unused, dtype=torch.long), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Small and normal; what is added to the stream is smaller the more layers add to it; biases stay zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or (self.settings.scaled and name.endswith("embedding.table")):
                continue  # scaled token vectors begin as the Transformer's
            added = name.endswith(("own.out.weight", "feed_forward.out.weight"))
            nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * self.settings.layers) if added else SPREAD)

    def hidden(self, batch: PairBatch) -> Tensor:
        source, inputs = batch.source, batch.inputs
        if source.rows.empty:  # plain text
            self._fits(inputs.rows)
            x = self._through(self._embed(self.embedding, inputs.ids, inputs.rows.position), inputs.rows)
        else:
            joined = Joined.of(source.rows, inputs.rows)
            self._fits(joined.rows)
            before = F.pad(source.rows.length, (0, 1))[inputs.rows.sentence]  # [T] source tokens of the sentence
            both = [
                self._embed(self.source_embedding, source.ids, source.rows.position),
                self._embed(self.embedding, inputs.ids, inputs.rows.position + before),
            ]
            x = self._through(torch.cat(both).index_select(0, joined.order), joined.rows).index_select(0, joined.target)
        return inputs.rows.cleared(x)

    def _embed(self, embedding: nn.Module, ids: Tensor, position: Tensor) -> Tensor:
        return embedding(ids, position, position)  # none of its kinds of positions reads a length

    def _through(self, embedded: Tensor, rows: Rows) -> Tensor:
        """All blocks and the last norm over whole sentences, [T, D] -> [T, D]."""
        own = pack(rows, rows, Causal() if self.mask is None else self.mask)
        return self.decoder(embedded, own, real=rows.real)

    def _fits(self, rows: Rows) -> None:
        if not isinstance(rows, StaticRows):  # of which only a bound is known; they are made of sentences that fit
            self._has_places(rows.longest)

    def _has_places(self, longest: int) -> None:
        most = self.settings.max_positions
        if self.settings.positions == "learned" and longest > most:
            raise UserError(f"{longest} tokens in one sequence are too many: this model has places for {most}")

    def _table(self) -> Tensor:
        return self.embedding.table if self.settings.tied else self.output

    def projection(self) -> tuple[Tensor, None] | None:
        return None if self.settings.unused else (self._table(), None)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden, self._table())
        if self.settings.unused:
            logits = logits.index_fill(-1, self.unused, NEVER)
        return taps.tap(self, "logits", logits)

    def read_off(self, stream: Tensor, batch: PairBatch) -> Tensor:
        return self.logits(self.decoder.last_norm(stream))

    def start(self, source: TokenRow) -> DecoderState:
        """The prompts go in together, the shorter ones with padding before them, so that all end together."""
        rows = source.rows
        padding = None if rows.even else rows.longest - rows.length
        state = DecoderState.start(len(self.decoder), BeamTree(len(rows), self.mask, padding))
        if rows.longest:
            state.tree.enter(rows.longest, rows.device)
            position = state.tree.position.index.clamp(min=0)
            ids = rows.pad(source.ids).gather(1, position.expand(len(rows), -1))
            self._extend(state, self.source_embedding, ids)
        return state

    def static_state(self, state: DecoderState, shape: StaticShape) -> DecoderState:
        return state.fixed(shape, [cast(EncoderBlock, block).own for block in self.decoder])

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        state.tree.enter(None, tokens.device)
        x = self._extend(state, self.embedding, tokens.flatten())  # [N, K] -> [N*K, D]
        return self.logits(x).unflatten(0, tokens.shape), state

    def _extend(self, state: DecoderState, embedding: nn.Module, ids: Tensor) -> Tensor:
        """Feed tokens that the tree knows of, [N*K] of a step or [N, T] of prompts: [..., D]."""
        tree, most = state.tree, self.settings.max_positions
        position = tree.position.index.clamp(min=0)
        if tree.cursor is None and tree.length > most:  # then some sentence may have run out of positions
            self._has_places(int(position.max()) + 1)
        if self.settings.positions == "learned":  # in constant shapes, sentences that are done are still fed, to no end
            position = position.clamp(max=most - 1)
        return self.decoder(self._embed(embedding, ids, position.expand_as(ids)), state.own)

    def segments(self, ids: Tensor) -> Iterator[Tensor]:
        """A long text segment by segment: [B, L] tokens -> logits [B, at most `reach`, V], one after the other.

        Each layer keeps the last `memory` keys of the segments before, as Transformer-XL does, so memory does not grow
        with the text. The logits are those of one pass under the mask "segments".
        """
        if not isinstance(self.mask, Segments):
            raise UserError(
                f'only a model with mask = "segments" reads in segments, and this one has {self.settings.mask!r}'
            )
        state = DecoderState.start(len(self.decoder), BeamTree(len(ids)))
        for segment in ids.split(self.mask.length, dim=1):
            state.trim(self.mask.memory)
            state.tree.enter(segment.shape[1], ids.device)
            yield self.logits(self._extend(state, self.embedding, segment))
