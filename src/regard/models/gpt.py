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
from regard.attention import BeamTree, Causal, Mask, Segments, pack
from regard.errors import UserError
from regard.models.base import SequenceModel
from regard.models.decoder_state import DecoderState, StaticShape
from regard.nn.blocks import BlockConfig, BlockStack, EncoderBlock
from regard.nn.embedding import TokenEmbedding
from regard.packed import PackedLayout, PackedTokens, SeqBatch, StaticPackedLayout
from regard.recipes.schema import GPTSettings
from regard.registry import MASKS, MODELS

NEG_LOGIT = -1e4  # the logit of what is never predicted; finite, so that smoothed losses are
INIT_STD = 0.02  # standard deviation that weights begin with, as GPT-2's


def sparse_mask(settings: GPTSettings) -> Mask | None:
    """What a token sees of what came before; None: all of it."""
    mask: Mask = MASKS[settings.mask].of_size(settings.mask_size, settings.memory_size)
    return None if mask == Causal() else mask


@dataclass(frozen=True)
class Concatenated:
    """Two flat rows laid as one: each sentence's source, then its target; the fill of both at the end.

    `order` [S + T] is which place of [source row, target row] each joined place holds, `target` [T] the joined place
    of each target place.
    """

    rows: PackedLayout
    order: Tensor
    target: Tensor

    @classmethod
    def of(cls, source: PackedLayout, target: PackedLayout) -> Concatenated:
        size = source.size + target.size
        if isinstance(source, StaticPackedLayout) and isinstance(target, StaticPackedLayout):
            rows: PackedLayout = StaticPackedLayout(
                source.offsets + target.offsets, size, source.max_len + target.max_len
            )
        else:
            rows = PackedLayout(
                [s + t for s, t in zip(source.lengths, target.lengths, strict=True)], size, target.device
            )
        order = torch.cat([source.segment_ids, target.segment_ids]).argsort(
            stable=True
        )  # fill is of the last sentence + 1
        return cls(rows, order, order.argsort()[source.size :])


@MODELS.register("gpt")
class GPT(SequenceModel):
    """softmax(W · decoder(source and target so far)), normalised before each sub-layer and at the end.

    One embedding table serves input and output when they are tied; a source with a vocabulary of its own has its own.
    """

    Settings = GPTSettings
    has_static_state = is_decoder_only = True
    unused: Tensor

    def __init__(self, settings: GPTSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__()
        self.settings = settings
        self.mask = sparse_mask(settings)
        block = BlockConfig.from_settings(settings)
        self.embedding = TokenEmbedding(target_size, settings)
        self.source_embedding = self.embedding if shared else TokenEmbedding(source_size, settings)
        self.source_embedding.positions = self.embedding.positions  # places are counted through both
        self.decoder = BlockStack.of(block, EncoderBlock, settings.layers)
        self.static_shapes = self.mask is None and block.only_dot_scores  # sparse masks are laid out on the host
        if not settings.tie_embeddings:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
        self.register_buffer("unused", torch.tensor(settings.unused, dtype=torch.long), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Small and normal; what is added to the stream is smaller the more layers add to it; biases stay zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or ".score." in name:
                continue  # scores initialise their own parameters
            if self.settings.scale_embeddings and name.endswith("embedding.table"):
                continue  # scaled token vectors begin as the Transformer's
            added = name.endswith(("self_attn.out_proj.weight", "feed_forward.w_out.weight"))
            nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * self.settings.layers) if added else INIT_STD)

    def features(self, batch: SeqBatch) -> Tensor:
        source, inputs = batch.source, batch.inputs
        if source.layout.empty:  # plain text
            self._fits(inputs.layout)
            x = self._through(self._embed(self.embedding, inputs.ids, inputs.layout.position), inputs.layout)
        else:
            joined = Concatenated.of(source.layout, inputs.layout)
            self._fits(joined.rows)
            before = F.pad(source.layout.length, (0, 1))[inputs.layout.segment_ids]  # [T] source tokens of the sentence
            both = [
                self._embed(self.source_embedding, source.ids, source.layout.position),
                self._embed(self.embedding, inputs.ids, inputs.layout.position + before),
            ]
            x = self._through(torch.cat(both).index_select(0, joined.order), joined.rows).index_select(0, joined.target)
        return inputs.layout.zero_padding(x)

    def _embed(self, embedding: nn.Module, ids: Tensor, position: Tensor) -> Tensor:
        return embedding(ids, position, position)  # none of its kinds of positions reads a length

    def _through(self, embedded: Tensor, rows: PackedLayout) -> Tensor:
        """All blocks and the last norm over whole sentences, [T, D] -> [T, D]."""
        own = pack(rows, rows, Causal() if self.mask is None else self.mask)
        return self.decoder(embedded, own, real=rows.is_token)

    def _fits(self, rows: PackedLayout) -> None:
        if not isinstance(
            rows, StaticPackedLayout
        ):  # of which only a bound is known; they are made of sentences that fit
            self._has_places(rows.max_len)

    def _has_places(self, longest: int) -> None:
        most = self.settings.max_positions
        if self.settings.positions == "learned" and longest > most:
            raise UserError(f"{longest} tokens in one sequence are too many: this model has places for {most}")

    def _table(self) -> Tensor:
        return self.embedding.table if self.settings.tie_embeddings else self.output

    def lm_head(self) -> tuple[Tensor, None] | None:
        return None if self.settings.unused else (self._table(), None)

    def project(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden, self._table())
        if self.settings.unused:
            logits = logits.index_fill(-1, self.unused, NEG_LOGIT)
        return taps.tap(self, "logits", logits)

    def logit_lens(self, stream: Tensor, batch: SeqBatch) -> Tensor:
        return self.project(self.decoder.last_norm(stream))

    def start(self, source: PackedTokens) -> DecoderState:
        """The prompts go in together, the shorter ones with padding before them, so that all end together."""
        rows = source.layout
        padding = None if rows.equal_lengths else rows.max_len - rows.length
        state = DecoderState.start(len(self.decoder), BeamTree(len(rows), self.mask, padding))
        if rows.max_len:
            state.tree.enter(rows.max_len, rows.device)
            position = state.tree.position.index.clamp(min=0)
            ids = rows.pad(source.ids).gather(1, position.expand(len(rows), -1))
            self._extend(state, self.source_embedding, ids)
        return state

    def static_state(self, state: DecoderState, shape: StaticShape) -> DecoderState:
        return state.fixed(shape, [cast(EncoderBlock, block).self_attn for block in self.decoder])

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        state.tree.enter(None, tokens.device)
        x = self._extend(state, self.embedding, tokens.flatten())  # [N, K] -> [N*K, D]
        return self.project(x).unflatten(0, tokens.shape), state

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
            yield self.project(self._extend(state, self.embedding, segment))
