"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017): encoder and decoder.

Shapes: T target tokens and S source tokens of packed batches, D width, V vocabulary, N sentences, K beams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention import BeamTree, Causal, attention_layout
from regard.models.base import SequenceModel
from regard.models.decoder_state import DecoderState, StaticDecoderState, StaticShape
from regard.models.transformer_settings import TransformerSettings
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, DecoderBlock, EncoderBlock
from regard.nn.embedding import TokenEmbedding
from regard.nn.guided_alignment import alignment_loss
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.registry import MODELS
from regard.special_tokens import BOS, UNK


class EncoderDecoder(SequenceModel):
    """p(next token) = softmax(W · decoder(target so far, encoder(source))), for any kind of source.

    A family defines `embed_source`, and makes the module that it uses: `source_embedding`.
    """

    has_static_state = can_restart = True
    settings: TransformerSettings

    def __init__(self, settings: TransformerSettings, source_embedding: nn.Module, target_size: int) -> None:
        super().__init__()
        self.settings = settings
        block = BlockConfig.from_settings(settings)
        self.static_shapes = block.only_dot_scores
        self.source_embedding = source_embedding
        self.target_embedding = TokenEmbedding(target_size, settings, _embedding_norm(settings))
        self.encoder = BlockStack.of(block, EncoderBlock, settings.encoder_layers)
        self.decoder = BlockStack.of(replace(block, causal=True), DecoderBlock, settings.decoder_layers)
        if not settings.tie_embeddings:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
            nn.init.xavier_uniform_(self.output)
        if settings.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(target_size))

    def embed_source(self, source: Any) -> tuple[Tensor, PackedLayout]:
        """Embed the source: vectors [S, D], and their layout, which may be shorter than that of the source."""
        raise NotImplementedError  # implemented by each family

    def encoded_length(self, length: int) -> int:
        """The length of an encoded source, for a source of this length."""
        return length

    def encode(self, source: Any) -> tuple[Tensor, PackedLayout]:
        """The encoded source [S, D], and its layout."""
        x, layout = self.embed_source(source)
        return self.encoder(x, attention_layout(layout, layout), is_token=layout.is_token), layout

    def decode(self, inputs: PackedTokens, encoded: Tensor, source_layout: PackedLayout) -> Tensor:
        """Target tokens [T] and the encoded source [S, D] -> [T, D]."""
        layout, inputs = inputs.layout, self._corrupt_words(inputs)
        x = self.target_embedding(inputs.ids, layout.position, _lengths(layout, source_layout))  # [T, D]
        self_layout, cross_layout = attention_layout(layout, layout, Causal()), attention_layout(layout, source_layout)
        x = self.decoder(x, self_layout, cross_layout, source=encoded, is_token=layout.is_token)
        return layout.zero_padding(x)

    def _corrupt_words(self, inputs: PackedTokens) -> PackedTokens:
        """Replace random target tokens in training, by UNK (Bowman et al. 2016) or by random ones; BOS stays."""
        dropout, noise = self.settings.word_dropout, self.settings.word_noise
        if not self.training or not (dropout or noise):
            return inputs
        ids, is_word = inputs.ids, inputs.ids != BOS
        if dropout:
            ids = ids.masked_fill((torch.rand(ids.shape, device=ids.device) < dropout) & is_word, UNK)
        if noise:
            random = torch.randint_like(ids, UNK, len(self.target_embedding.table))
            ids = random.where((torch.rand(ids.shape, device=ids.device) < noise) & is_word, ids)
        return replace(inputs, ids=ids)

    def features(self, batch: Any) -> Tensor:
        return self.decode(batch.inputs, *self.encode(batch.source))

    def lm_head(self) -> tuple[Tensor, Tensor | None]:
        table = self.target_embedding.table if self.settings.tie_embeddings else self.output
        return table, self.output_bias if self.settings.output_bias else None

    def project(self, hidden: Tensor) -> Tensor:
        return taps.tap(self, "logits", self.linear(hidden, *self.lm_head()))

    def logit_lens(self, stream: Tensor, batch: Any) -> Tensor:
        return self.project(self.decoder.last_norm(stream))

    def start(self, source: Any) -> DecoderState:
        return self.start_encoded(*self.encode(source))

    def start_encoded(self, encoded: Tensor, layout: PackedLayout) -> DecoderState:
        """The state before the first token, of an encoded source [S, D]."""
        cross = [cast(DecoderBlock, block).cross_attn.source_kv(encoded, layout) for block in self.decoder]
        return DecoderState.start(len(self.decoder), BeamTree(len(layout)), cross, layout.length)

    def static_state(self, state: DecoderState, shape: StaticShape) -> StaticDecoderState:
        encoded = replace(shape, source=self.encoded_length(shape.source))
        return StaticDecoderState.of(state, encoded, [cast(DecoderBlock, block).self_attn for block in self.decoder])

    def restart(self, state: StaticDecoderState, source: Any) -> None:
        state.restart(self.start(source))

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        assert state.length is not None
        state.tree.append(None, tokens.device)
        position = state.tree.position.index  # [N*K], or [1] for all
        position = position[None] if len(position) == 1 else position.view(tokens.shape)
        if state.tree.is_static and self.settings.positions == "learned":  # finished sentences are still fed
            position = position.clamp(max=self.settings.max_positions - 1)
        x = self.target_embedding(tokens, position, state.length[:, None]).flatten(0, 1)  # [N, K, D] -> [N*K, D]
        x = self.decoder(x, state.self_kv, state.cross_kv)
        return self.project(x).unflatten(0, tokens.shape), state


@MODELS.register("transformer")
class Transformer(EncoderDecoder):
    """An encoder-decoder whose source is text.

    If the vocabulary is shared and embeddings are tied, source embedding, target embedding and W are one table.
    """

    Settings = TransformerSettings
    source_embedding: TokenEmbedding

    def __init__(self, settings: TransformerSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__(settings, TokenEmbedding(source_size, settings, _embedding_norm(settings)), target_size)
        if shared:
            self.target_embedding.table = self.source_embedding.table

    def embed_source(self, source: PackedTokens) -> tuple[Tensor, PackedLayout]:
        layout = source.layout
        return self.source_embedding(source.ids, layout.position, _lengths(layout, layout)), layout

    def forward(self, batch: SeqBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss; with links in the batch, also the loss of the attention that is to learn them."""
        if batch.links is None:
            return super().forward(batch, smoothing, r_drop)
        assert self.settings.guided_head is not None
        layer, head = self.settings.guided_head
        attention = cast(DecoderBlock, self.decoder[layer]).cross_attn
        attention.guided_head = head
        try:
            loss = super().forward(batch, smoothing, r_drop)
            assert attention.guided_qk is not None
            layouts = batch.inputs.layout, batch.source.layout
            return loss + alignment_loss(*attention.guided_qk, attention.score, *layouts, batch.links)
        finally:
            attention.guided_head = attention.guided_qk = None


def _embedding_norm(settings: TransformerSettings) -> nn.Module | None:
    return BlockConfig.from_settings(settings).make_norm() if settings.embedding_norm else None


def _lengths(layout: PackedLayout, lengths_from: PackedLayout) -> Tensor:
    """[T] for each token of `layout` the length of its sentence in `lengths_from`; 1 for padding."""
    return F.pad(lengths_from.length, (0, 1), value=1)[layout.segment_ids]
