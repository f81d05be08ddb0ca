"""The settings of the Transformer, as recipes give them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from regard.nn import flops
from regard.nn.block_config import BlockConfig
from regard.recipes.schema import Activation, ScoreName, SizedSettings
from regard.registry import NORMS, POSITIONS, NameIn


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
    heads: int = Field(..., ge=1, description="attention heads")
    head_width: int = Field(0, ge=0, description="features of a head; 0: width / heads")
    encoder_layers: int = Field(..., ge=1, description="number of encoder layers")
    decoder_layers: int = Field(..., ge=1, description="number of decoder layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on embeddings and on the output of each sub-layer"
    )
    word_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that an input token of the decoder becomes the unknown token in training, so that it "
        "relies less on the words before it and more on the source",
    )
    word_noise: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that an input token of the decoder becomes a random one of the vocabulary in "
        "training, so that the next word follows less from the words before it, which may be wrong",
    )
    activation: Activation = Field("relu", description="activation of the feed-forward layers")
    se_dim: int = Field(
        0, ge=0, description="squeezed size of squeeze-and-excitation in the feed-forward layers; 0: off"
    )
    norm: Annotated[str, NameIn(NORMS)] = Field("layer", description="normalisation layer")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the normalisation layers")
    embedding_norm: bool = Field(False, description="normalise the embeddings, as BART")
    biases: bool = Field(True, description="biases of the linear layers; false: none, as T5")
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
        "sinusoidal", description="position encoding; rotary, relative and bucketed are applied in self-attention"
    )
    position_buckets: int = Field(32, ge=4, description="bucketed positions: groups of distances with a bias each")
    position_distance: int = Field(
        128, ge=2, description="bucketed positions: distance from which all have the same bias"
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

    @model_validator(mode="after")
    def _check_buckets(self) -> TransformerSettings:
        if self.position_buckets % 4 or self.position_distance <= self.position_buckets // 2:
            raise ValueError("position_buckets must be a multiple of 4, and position_distance more than half of it")
        return self

    @property
    def qkv_bias(self) -> bool:
        return self.biases

    @property
    def out_bias(self) -> bool:
        return self.biases

    @property
    def ffn_bias(self) -> bool:
        return self.biases

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.encoder_layers, self.decoder_layers

    def forward_flops(self, batch: Any, target_size: int) -> int:
        block, source, target = (
            BlockConfig.from_settings(self),
            batch.source.layout.lengths,
            batch.inputs.layout.lengths,
        )
        encoder = self.encoder_layers * flops.encoder_block(block, source)
        decoder = self.decoder_layers * flops.decoder_block(block, target, source)
        return encoder + decoder + 2 * sum(target) * self.width * target_size

    @property
    def guided_head(self) -> tuple[int, int] | None:
        """The layer and the head, from 0, that guided alignment trains: in the last layer but one."""
        return max(self.decoder_layers - 2, 0), 0

    def summary(self) -> str:
        return "Transformer"
