"""The hyperparameters of Transformer blocks, and the attention layers and norms that they describe."""

from __future__ import annotations

from dataclasses import dataclass, fields

from regard.attention import DistanceBuckets, MultiHeadAttention, RopeScaling, Score, SoftCapped
from regard.attention.multihead import QK_NORM_EPS, AttentionOptions
from regard.nn.norms import BatchNorm, LayerNorm, RMSNorm
from regard.registry import NORMS, POSITIONS, SCORES


@dataclass(frozen=True)
class BlockConfig:
    """The hyperparameters of a Transformer block. Names are those of the registries (`regard.registry`)."""

    width: int
    heads: int
    ffn_width: int
    dropout: float = 0.0
    activation: str = "relu"
    norm: str = "layer"
    norm_first: bool = True
    norm_place: str = ""  # see `place`; "": before or after, as `norm_first` says
    norm_bias: bool = True
    norm_eps: float = 1e-5
    se_dim: int = 0  # squeezed features of the gate after an encoder's feed-forward layer; 0: no gate
    kv_heads: int = 0  # this and the next six are fields of `AttentionOptions`
    head_width: int = 0
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: bool = False
    qk_norm_all: bool = False
    qk_norm_eps: float = QK_NORM_EPS
    ffn_bias: bool = True
    zero_init: bool = False
    score: str = "scaled-dot"
    cross_score: str | None = None  # score of cross-attention; None: as `score`
    positions: str = "none"  # rotary and relative positions replace the score of self-attention
    position_base: float = 10000.0
    rope: RopeScaling | None = None
    position_buckets: int = 32  # this and the next two are fields of `DistanceBuckets`
    position_distance: int = 128
    causal: bool = False  # whether tokens attend to earlier ones only
    softcap: float = 0.0  # scores s of self-attention become c tanh(s / c); 0: they stay

    @classmethod
    def from_settings(cls, settings: object) -> BlockConfig:
        """Take the fields that a family's settings have; the others keep their defaults."""
        given = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**given)

    @property
    def only_dot_scores(self) -> bool:
        """Whether all scores are dot products, as the fused kernels require."""
        if self.softcap or not POSITIONS[self.positions].is_dot:
            return False
        return all(SCORES[name].is_dot for name in (self.score, self.cross_score or self.score))

    @property
    def head_features(self) -> int:
        """Features of a head."""
        return self.head_width or self.width // self.heads

    @property
    def place(self) -> str:
        """Where residual connections have their norm: before, after, output or both (`Residual`)."""
        return self.norm_place or ("before" if self.norm_first else "after")

    @property
    def has_last_norm(self) -> bool:
        """Whether a stack of blocks ends with a norm: unless each block does."""
        return self.place != "after"

    def make_norm(self) -> LayerNorm | RMSNorm | BatchNorm:
        without = {} if self.norm_bias or self.norm != "layer" else {"bias": False}
        return NORMS[self.norm](self.width, eps=self.norm_eps, **without)

    def make_self_attn(self) -> MultiHeadAttention:
        score = self._positional_score() or self._make_score(self.score)
        return self._make_attn(SoftCapped(score, self.softcap) if self.softcap else score)

    def make_cross_attn(self, source_width: int) -> MultiHeadAttention:
        return self._make_attn(self._make_score(self.cross_score or self.score), source_width)

    def _make_attn(self, score: Score, source_width: int | None = None) -> MultiHeadAttention:
        options = AttentionOptions(**{field.name: getattr(self, field.name) for field in fields(AttentionOptions)})
        return MultiHeadAttention(
            self.width, self.heads, source_width, score, options=options, zero_init=self.zero_init
        )

    def _make_score(self, name: str) -> Score:
        score: Score = SCORES[name](self.head_features, self.head_features, self.heads)
        return score

    def _positional_score(self) -> Score | None:
        score: Score | None = POSITIONS[self.positions].score(
            self.head_features,
            self.heads,
            self.position_base,
            self.rope,
            DistanceBuckets(self.position_buckets, self.position_distance, self.causal),
        )
        return score
