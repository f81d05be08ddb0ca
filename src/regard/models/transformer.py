"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017): encoder and decoder.

Shapes: T target tokens and S source tokens of packed batches, D width, V vocabulary, N sentences, K beams.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from regard import taps
from regard.attention import BeamTree, Causal, pack
from regard.models.base import SequenceModel
from regard.models.decoder_state import DecoderState, StaticShape
from regard.nn import flops
from regard.nn.blocks import BlockConfig, BlockStack, DecoderBlock, EncoderBlock
from regard.nn.embedding import TokenEmbedding
from regard.nn.guided_alignment import alignment_loss
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.recipes.schema import Activation, ScoreName, SizedSettings
from regard.registry import MODELS, NORMS, POSITIONS, NameIn


class TransformerSettings(SizedSettings):
    """The encoder-decoder of "Attention Is All You Need"."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        # base and big as in "Attention Is All You Need", table 3
        "tiny": dict(width=128, heads=4, encoder_layers=2, decoder_layers=2, ffn_width=512, dropout=0.1),
        "small": dict(width=256, heads=4, encoder_layers=3, decoder_layers=3, ffn_width=1024, dropout=0.1),
        "base": dict(width=512, heads=8, encoder_layers=6, decoder_layers=6, ffn_width=2048, dropout=0.1),
        "big": dict(width=1024, heads=16, encoder_layers=6, decoder_layers=6, ffn_width=4096, dropout=0.3),
    }
    DEFAULT_SIZE: ClassVar[str] = "small"
    TASKS: ClassVar[tuple[str, ...]] = ("translation",)

    family: Literal["transformer"] = Field("transformer", description="model family")
    size: Literal["tiny", "small", "base", "big"] = Field(
        "small", description="preset for the sizes below; each can be set separately"
    )
    width: int = Field(..., ge=2, description="embedding and hidden size")
    heads: int = Field(..., ge=1, description="attention heads; each has width / heads features")
    encoder_layers: int = Field(..., ge=1, description="number of encoder layers")
    decoder_layers: int = Field(..., ge=1, description="number of decoder layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on embeddings and on the output of each sub-layer"
    )
    activation: Activation = Field("relu", description="activation of the feed-forward layers")
    se_dim: int = Field(
        0, ge=0, description="squeezed size of squeeze-and-excitation in the feed-forward layers; 0: off"
    )
    norm: Annotated[str, NameIn(NORMS)] = Field("layer", description="normalisation layer")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the normalisation layers")
    embedding_norm: bool = Field(False, description="normalise the embeddings, as BART")
    norm_first: bool = Field(
        True, description="normalise before each sub-layer (pre-norm, more stable); false: after it, as in the paper"
    )
    qk_norm: bool = Field(False, description="normalise the queries and keys of each head, which bounds the scores")
    zero_init: bool = Field(
        False, description="initialise output projections to zero, so that each block starts as the identity"
    )
    score: ScoreName = Field("scaled-dot", description="attention score of queries and keys")
    cross_score: ScoreName | None = Field(None, description="score of cross-attention; not set: same as score")
    positions: Annotated[str, NameIn(POSITIONS)] = Field(
        "sinusoidal", description="position encoding; rotary and relative are applied in self-attention"
    )
    position_base: float = Field(
        10000.0, gt=1, description="base of sinusoidal and rotary positions: the longest wavelength is 2 pi times this"
    )
    max_positions: int = Field(1024, ge=2, description="maximum tokens of a source or target")
    tie_embeddings: bool = Field(
        True, description="output projection = target embedding (= source embedding, if text.shared)"
    )
    scale_embeddings: bool = Field(True, description="multiply embeddings by sqrt(width), as in the paper")
    output_bias: bool = Field(False, description="add a bias to the logits")

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.encoder_layers, self.decoder_layers

    def forward_flops(self, batch: SeqBatch, target_size: int) -> int:
        block, source, target = (
            BlockConfig.from_settings(self),
            batch.source.layout.lengths,
            batch.inputs.layout.lengths,
        )
        encoder = self.encoder_layers * flops.encoder_block(block, source)
        decoder = self.decoder_layers * flops.decoder_block(block, target, source)
        return encoder + decoder + 2 * sum(target) * self.width * target_size

    @property
    def guided_head(self) -> tuple[int, int]:
        """The layer and the head, from 0, that guided alignment trains: in the last layer but one."""
        return max(self.decoder_layers - 2, 0), 0

    def summary(self) -> str:
        return "Transformer"


@MODELS.register("transformer")
class Transformer(SequenceModel):
    """p(next token) = softmax(W · decoder(target so far, encoder(source))).

    If the vocabulary is shared and embeddings are tied, source embedding, target embedding and W are one table.
    """

    Settings = TransformerSettings
    has_static_state = can_restart = True

    def __init__(self, settings: TransformerSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__()
        self.settings = settings
        block = BlockConfig.from_settings(settings)
        self.static_shapes = block.only_dot_scores
        norms = [block.make_norm() if settings.embedding_norm else None for _ in range(2)]
        self.source_embedding = TokenEmbedding(source_size, settings, norms[0])
        self.target_embedding = TokenEmbedding(target_size, settings, norms[1])
        if shared:
            self.target_embedding.table = self.source_embedding.table
        self.encoder = BlockStack.of(block, EncoderBlock, settings.encoder_layers)
        self.decoder = BlockStack.of(block, DecoderBlock, settings.decoder_layers)
        if not settings.tie_embeddings:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
            nn.init.xavier_uniform_(self.output)
        if settings.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(target_size))

    def encode(self, source: PackedTokens) -> Tensor:
        """Source tokens [S] -> [S, D]."""
        layout = source.layout
        x = self.source_embedding(source.ids, layout.position, _lengths(layout, layout))
        return self.encoder(x, pack(layout, layout), is_token=layout.is_token)

    def features(self, batch: SeqBatch) -> Tensor:
        encoded = self.encode(batch.source)  # [S, D]
        layout, source_layout = batch.inputs.layout, batch.source.layout
        x = self.target_embedding(batch.inputs.ids, layout.position, _lengths(layout, source_layout))  # [T, D]
        self_layout, cross_layout = pack(layout, layout, Causal()), pack(layout, source_layout)
        x = self.decoder(x, self_layout, cross_layout, source=encoded, is_token=layout.is_token)
        return layout.zero_padding(x)

    def forward(self, batch: SeqBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss; with links in the batch, also the loss of the attention that is to learn them."""
        if batch.links is None:
            return super().forward(batch, smoothing, r_drop)
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

    def lm_head(self) -> tuple[Tensor, Tensor | None]:
        table = self.target_embedding.table if self.settings.tie_embeddings else self.output
        return table, self.output_bias if self.settings.output_bias else None

    def project(self, hidden: Tensor) -> Tensor:
        return taps.tap(self, "logits", self.linear(hidden, *self.lm_head()))

    def logit_lens(self, stream: Tensor, batch: SeqBatch) -> Tensor:
        return self.project(self.decoder.last_norm(stream))

    def start(self, source: PackedTokens) -> DecoderState:
        encoded = self.encode(source)
        cross = [cast(DecoderBlock, block).cross_attn.source_kv(encoded, source.layout) for block in self.decoder]
        return DecoderState.start(len(self.decoder), BeamTree(len(source.layout)), cross, source.layout.length)

    def static_state(self, state: DecoderState, shape: StaticShape) -> DecoderState:
        return state.fixed(shape, [cast(DecoderBlock, block).self_attn for block in self.decoder])

    def restart(self, state: DecoderState, source: PackedTokens) -> None:
        state.restart(self.start(source))

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        assert state.length is not None
        state.tree.enter(None, tokens.device)
        position = state.tree.position.index  # [N*K], or [1] for all
        position = position[None] if len(position) == 1 else position.view(tokens.shape)
        if state.tree.cursor is not None and self.settings.positions == "learned":  # finished sentences are still fed
            position = position.clamp(max=self.settings.max_positions - 1)
        x = self.target_embedding(tokens, position, state.length[:, None]).flatten(0, 1)  # [N, K, D] -> [N*K, D]
        x = self.decoder(x, state.self_kv, state.cross_kv)
        return self.project(x).unflatten(0, tokens.shape), state


def _lengths(layout: PackedLayout, lengths_from: PackedLayout) -> Tensor:
    """[T] for each token of `layout` the length of its sentence in `lengths_from`; 1 for padding."""
    return F.pad(lengths_from.length, (0, 1), value=1)[layout.segment_ids]
