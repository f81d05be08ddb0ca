"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017): encoder, decoder, and its decoding state.

T target tokens and S source tokens in flat rows, D width, V vocabulary, N sentences, K beams.
"""

from __future__ import annotations

from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention import Cached, Causal, Memory, Packed
from regard.blocks import BlockSettings, DecoderBlock, EncoderBlock
from regard.models.embedding import Embedding
from regard.models.family import CachedState, Translator
from regard.recipes.schema import TransformerSettings
from regard.rows import PairBatch, Rows, TokenRow


class TransformerState(CachedState):
    """Where N sentences of K beams are: a growing cache a layer (beams), stored source keys a layer (sentences)."""

    def __init__(self, own: list[Cached], cross: list[Memory], length: Tensor) -> None:
        super().__init__(own)
        self.cross = cross
        self.length = length  # [N] source lengths

    def keep(self, sentences: Tensor) -> Self:
        self.cross = [memory.keep(sentences) for memory in self.cross]
        self.length = self.length[sentences]
        return super().keep(sentences)


class Transformer(Translator):
    """softmax(W · decoder(target so far, encoder(source))).

    One embedding table serves source, target and output when the vocabulary is shared and the weights are tied.
    """

    def __init__(self, settings: TransformerSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__()
        self.settings = settings
        block = BlockSettings.of(settings)
        self.source_embedding = Embedding(source_size, settings)
        self.target_embedding = Embedding(target_size, settings)
        if shared:
            self.target_embedding.table = self.source_embedding.table
        self.encoder = nn.ModuleList(EncoderBlock(block) for _ in range(settings.encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(block) for _ in range(settings.decoder_layers))
        if settings.norm_first:  # the stream itself is never normalised on the way, so it is once at the end
            self.encoder_norm = block.make_norm()
            self.decoder_norm = block.make_norm()
        if not settings.tied:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
            nn.init.xavier_uniform_(self.output)
        if settings.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(target_size))

    def encode(self, source: TokenRow) -> Tensor:
        """[S] tokens -> [S, D]."""
        rows = source.rows
        x = self.source_embedding(source.ids, rows.position, _lengths(rows, rows))
        own = Packed(rows, rows)
        for block in self.encoder:
            x = self._block(block, x, own, rows.real)
        return self.encoder_norm(x, rows.real) if self.settings.norm_first else x

    def forward(self, batch: PairBatch) -> Tensor:
        memory = self.encode(batch.source)
        rows = batch.inputs.rows
        x = self.target_embedding(batch.inputs.ids, rows.position, _lengths(rows, batch.source.rows))
        own, cross = Packed(rows, rows, Causal()), Packed(rows, batch.source.rows)
        for block in self.decoder:
            x = self._block(block, x, own, cross, memory, rows.real)
        return self._logits(x, rows.real)

    def _logits(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """[..., D] -> [..., V]; fill is put to zero first, so that nothing in it can reach a gradient."""
        if self.settings.norm_first:
            x = self.decoder_norm(x, real)
        if real is not None:
            x = x.where(real[:, None], 0.0)
        table = self.target_embedding.table if self.settings.tied else self.output
        bias = self.output_bias if self.settings.output_bias else None
        return taps.tap(self, "logits", F.linear(x, table, bias))

    def start(self, source: TokenRow) -> TransformerState:
        memory = self.encode(source)
        cross = [cast(DecoderBlock, block).cross.remember(memory, source.rows) for block in self.decoder]
        return TransformerState([Cached() for _ in self.decoder], cross, source.rows.length)

    def step(self, state: TransformerState, tokens: Tensor) -> tuple[Tensor, TransformerState]:
        position = tokens.new_full(tokens.shape, state.own[0].length)
        x = self.target_embedding(tokens, position, state.length[:, None]).flatten(0, 1)  # [N, K, D] -> [N*K, D]
        for block, own, cross in zip(self.decoder, state.own, state.cross, strict=True):
            x = block(x, own, cross)
        return self._logits(x).unflatten(0, tokens.shape), state


def _lengths(rows: Rows, of: Rows) -> Tensor:
    """[T] for each place of `rows` the length of its sentence in `of`; 1 for fill."""
    return F.pad(of.length, (0, 1), value=1)[rows.sentence]
