"""The settings of GPT and of the decoders that derive from it: Llama, Mistral, Qwen, Gemma, OLMo."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from regard.attention import RopeScaling
from regard.nn import flops
from regard.nn.block_config import BlockConfig
from regard.packed import SeqBatch
from regard.recipes.schema import Activation, PositionsName, ScoreName, SizedSettings, TokenNorm
from regard.registry import MASKS, NameIn

Layer = Annotated[int, Field(ge=0)]


class GPTSettings(SizedSettings):
    """A decoder-only language model. With pairs, it continues the source with the target."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        # gpt2 and larger as in "Language Models are Unsupervised Multitask Learners", table 2
        "nano": dict(width=128, heads=4, layers=4, ffn_width=512, max_positions=64, dropout=0.0),
        "mini": dict(width=384, heads=6, layers=6, ffn_width=1536, max_positions=256, dropout=0.2),
        "gpt2": dict(width=768, heads=12, layers=12, ffn_width=3072, max_positions=1024, dropout=0.1),
        "gpt2-medium": dict(width=1024, heads=16, layers=24, ffn_width=4096, max_positions=1024, dropout=0.1),
        "gpt2-large": dict(width=1280, heads=20, layers=36, ffn_width=5120, max_positions=1024, dropout=0.1),
        "gpt2-xl": dict(width=1600, heads=25, layers=48, ffn_width=6400, max_positions=1024, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "mini"
    TASKS: ClassVar[tuple[str, ...]] = ("language-modelling", "translation")
    shares_context: ClassVar[bool] = True
    causal: ClassVar[bool] = True

    family: Literal["gpt"] = Field("gpt", description="model family")
    size: Literal["nano", "mini", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = Field(
        "mini", description="preset for the sizes below; each can be set separately"
    )
    width: int = Field(..., ge=2, description="embedding and hidden size")
    heads: int = Field(..., ge=1, description="attention heads")
    kv_heads: int = Field(
        0, ge=0, description="heads of keys and values, each shared by several query heads; 0: as many as heads"
    )
    head_width: int = Field(0, ge=0, description="features of a head; 0: width / heads")
    layers: int = Field(..., ge=1, description="number of layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on embeddings and on the output of each sub-layer"
    )
    activation: Activation = Field("gelu-tanh", description="activation of the feed-forward layers")
    norm: TokenNorm = Field("layer", description="normalisation layer")
    norm_place: Literal["before", "output", "both"] = Field(
        "before", description="normalise the input of each sub-layer, its output (as OLMo 2), or both (as Gemma 2)"
    )
    norm_bias: bool = Field(True, description='norm = "layer": with a bias')
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the normalisation layers")
    qk_norm: bool = Field(False, description="normalise the queries and keys of each head, which bounds the scores")
    qk_norm_all: bool = Field(False, description="with qk_norm: normalise all heads together, as OLMo 2")
    qkv_bias: bool = Field(True, description="biases of the queries, keys and values")
    out_bias: bool = Field(True, description="bias of the output projection of attention")
    ffn_bias: bool = Field(True, description="biases of the feed-forward layers")
    softcap: float = Field(0.0, ge=0, description="bound attention scores s by c tanh(s / c); 0: no bound")
    logit_softcap: float = Field(0.0, ge=0, description="bound the logits in the same way; 0: no bound")
    score: ScoreName = Field("scaled-dot", description="attention score of queries and keys")
    positions: PositionsName = Field(
        "learned", description="position encoding; rotary and relative are applied in attention"
    )
    position_base: float = Field(
        10000.0, gt=1, description="base of sinusoidal and rotary positions: the longest wavelength is 2 pi times this"
    )
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = Field(
        "none", description="rotary positions for longer contexts: divide all frequencies, or only the low ones"
    )
    rope_factor: float = Field(1.0, gt=0, description="rope_scaling: what frequencies are divided by")
    rope_original: int = Field(0, ge=0, description="rope_scaling: context length before it")
    rope_turns: tuple[float, float] = Field(
        (1.0, 4.0),
        description="rope_scaling: below the first number of turns in that context, a frequency is divided; above the "
        "second, it is not",
    )
    rope_attention: float = Field(1.0, gt=0, description="rope_scaling: factor on queries and keys")
    local_base: float | None = Field(
        None,
        gt=1,
        description="position_base of the layers with a sparse mask, not scaled; not set: the same",
    )
    unrotated_layers: list[Layer] = Field([], description="layers (from 0) without rotary positions, as in SmolLM3")
    max_positions: int = Field(..., ge=2, description="context length in tokens")
    tie_embeddings: bool = Field(True, description="output projection = token embedding")
    scale_embeddings: bool = Field(False, description="multiply embeddings by sqrt(width)")
    mask: Annotated[str, NameIn(MASKS)] = Field(
        "causal", description="attention mask: all earlier tokens (causal), or a sparse pattern of them"
    )
    mask_size: int = Field(
        128, ge=1, description="sparse masks: size in tokens of the window, stride, block or segment"
    )
    global_layers: list[Layer] = Field(
        [], description="layers (from 0) that attend to all earlier tokens in spite of the mask"
    )
    memory_size: int = Field(
        0, ge=0, description='mask = "segments": tokens before a segment that it attends to (Transformer-XL)'
    )
    unused: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="token ids that are never predicted, because an imported model does not have them"
    )

    @model_validator(mode="after")
    def _check_options(self) -> GPTSettings:
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.rope_scaling in ("llama3", "yarn"):
            first, last = self.rope_turns
            if not self.rope_original or not 0 < first < last:
                raise ValueError("rope_scaling needs rope_original, and rope_turns in ascending order")
        if self.positions != "rotary" and (self.rope_scaling != "none" or self.local_base or self.unrotated_layers):
            raise ValueError('rope_scaling, local_base and unrotated_layers are for positions = "rotary"')
        return self

    @property
    def qk_norm_eps(self) -> float:
        return self.norm_eps

    @property
    def rope(self) -> RopeScaling | None:
        if self.rope_scaling == "none":
            return None
        numbers = self.rope_factor, self.rope_original, self.rope_turns, self.rope_attention
        return RopeScaling(self.rope_scaling, *numbers)

    def layer_changes(self, layer: int) -> dict[str, Any]:
        """The fields of `BlockConfig` in which a layer differs from the others."""
        if layer in self.unrotated_layers:
            return {"positions": "none"}
        if self.local_base and self.mask != "causal" and layer not in self.global_layers:
            return {"position_base": self.local_base, "rope": None}
        return {}

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return 0, self.layers

    def forward_flops(self, batch: SeqBatch, target_size: int) -> int:
        target = batch.inputs.layout.lengths
        joint = [s + t for s, t in zip(batch.source.layout.lengths, target, strict=True)]
        decoder = self.layers * flops.encoder_block(BlockConfig.from_settings(self), joint)
        return decoder + 2 * sum(target) * self.width * target_size

    def summary(self) -> str:
        return "GPT"
