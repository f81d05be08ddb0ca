"""BERT (Devlin et al. 2019): a Transformer encoder that predicts masked tokens, or the class of a text.

Its input is [BOS, w1 .. wn, EOS]. Shapes: S tokens of a packed batch, N texts, D width, V vocabulary, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from regard import taps, tensor_io
from regard.attention import PackedQK, StaticPackedLayout, Window, attention_layout
from regard.dropout import dropout
from regard.errors import UserError
from regard.models.base import SequenceModel
from regard.nn import flops, losses, positions
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, EncoderBlock
from regard.nn.norms import NoNorm
from regard.packed import Batch, PackedLayout, PackedTokens, SeqBatch
from regard.recipes.schema import Activation, PositionsName, ScoreName, SizedSettings, TokenNorm
from regard.registry import MODELS

TOKEN_TYPES = 2  # BERT distinguishes the two texts of a pair; here all tokens have the first type
POOLERS: dict[str, Any] = {"tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}
INIT_STD = 0.02  # standard deviation of initial embeddings, as in BERT
NEG_LOGIT = -30.0  # bias of tokens that an imported model does not have; finite, so that all scores are finite


@dataclass(frozen=True)
class TextClassBatch(Batch):
    """N texts and the ids [N] of their classes, or numbers [N, C].

    Of static batches `class_ids` is padded to the maximum number of texts.
    """

    source: PackedTokens
    class_ids: Tensor

    @classmethod
    def from_lists(cls, texts: list[list[int]], labels: Sequence[Any] | None = None) -> TextClassBatch:
        """Create a batch from token lists; without labels, all ids are 0."""
        ids = torch.zeros(len(texts), dtype=torch.long) if labels is None else torch.tensor(list(labels))
        return cls(PackedTokens.from_lists(texts), ids)

    @property
    def labels(self) -> Tensor:
        return self.class_ids[: len(self.source.layout)]

    @property
    def target_mask(self) -> Tensor:
        return self.source.layout.length > 0

    @property
    def num_targets(self) -> int:
        return len(self.source.layout)


class BertSettings(SizedSettings):
    """An encoder-only model that predicts masked tokens or the class of a text."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=128, heads=2, layers=2, ffn_width=512, dropout=0.1),
        "mini": dict(width=256, heads=4, layers=4, ffn_width=1024, dropout=0.1),
        "small": dict(width=512, heads=8, layers=4, ffn_width=2048, dropout=0.1),
        "base": dict(width=768, heads=12, layers=12, ffn_width=3072, dropout=0.1),
        "large": dict(width=1024, heads=16, layers=24, ffn_width=4096, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "mini"
    TASKS: ClassVar[tuple[str, ...]] = ("masked-lm", "classification", "regression")
    adds_bos: ClassVar[bool] = True  # the position that pooling = "first" takes, as [CLS] in BERT
    extra_tags: ClassVar[tuple[str, ...]] = ("<mask>",)

    family: Literal["bert"] = Field("bert", description="model family")
    size: Literal["tiny", "mini", "small", "base", "large"] = Field(
        "mini", description="preset for the sizes below; each can be set separately"
    )
    task: Literal["fill", "classify", "regress"] = Field(
        "fill", description="predict masked tokens (fill), the class of a text (classify), or numbers (regress)"
    )
    width: int = Field(..., ge=2, description="embedding and hidden size")
    heads: int = Field(..., ge=1, description="attention heads; each has width / heads features")
    layers: int = Field(..., ge=1, description="number of layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(
        ..., ge=0, lt=1, description="dropout probability, on embeddings and on the output of each sub-layer"
    )
    activation: Activation = Field("gelu", description="activation of the feed-forward layers")
    norm: TokenNorm = Field("layer", description="normalisation layer")
    norm_first: bool = Field(
        False, description="normalise before each sub-layer (pre-norm, more stable); false: after it, as in BERT"
    )
    norm_eps: float = Field(1e-12, gt=0, description="epsilon of the normalisation layers")
    score: ScoreName = Field("scaled-dot", description="attention score of queries and keys")
    positions: PositionsName = Field(
        "learned", description="position encoding; rotary and relative are applied in attention"
    )
    position_base: float = Field(
        10000.0, gt=1, description="base of sinusoidal and rotary positions: the longest wavelength is 2 pi times this"
    )
    window: int = Field(
        0, ge=0, description="attend to this many tokens on either side, except in global_layers; 0: to all"
    )
    global_layers: list[Annotated[int, Field(ge=0)]] = Field([], description="layers (from 0) without the window")
    local_base: float | None = Field(
        None, gt=1, description="position_base of the layers with a window; not set: the same"
    )
    first_norm: bool = Field(
        True, description="norm_first: normalise also before the first attention; false: as ModernBERT"
    )
    max_positions: int = Field(512, ge=2, description="maximum tokens of a text")
    pooling: Literal["mean", "first"] = Field(
        "mean", description="classification: the mean over all tokens, or the first token, as in BERT"
    )
    pooler_activation: Literal["tanh", "relu", "gelu"] = Field(
        "tanh", description="classification: activation of the head"
    )
    pooler_norm: bool = Field(False, description="classification: normalise in the head, as ModernBERT")
    mask_prob: float = Field(0.15, gt=0, lt=1, description="fraction of tokens to predict; 80 % of these are masked")

    @property
    def tasks(self) -> tuple[str, ...]:
        return ({"fill": "masked-lm", "classify": "classification", "regress": "regression"}[self.task],)

    def layer_changes(self, layer: int) -> dict[str, Any]:
        """The fields of `BlockConfig` in which a layer differs from the others."""
        local = self.window and self.local_base and layer not in self.global_layers
        return {"position_base": self.local_base} if local else {}

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.layers, 0

    def forward_flops(self, batch: SeqBatch | TextClassBatch, target_size: int) -> int:
        encoder = self.layers * flops.encoder_block(BlockConfig.from_settings(self), batch.source.layout.lengths)
        return encoder + 2 * batch.num_targets * self.width * (self.width + target_size)

    def summary(self) -> str:
        return "BERT"


class BertEmbedding(nn.Module):
    """dropout(norm(E[id] + position encoding + token type)).

    With sinusoidal positions, whose amplitude is 1, token vectors are scaled by sqrt(D) to a similar size.
    """

    def __init__(self, vocabulary: int, settings: BertSettings, norm: nn.Module) -> None:
        super().__init__()
        width, sinusoidal = settings.width, settings.positions.startswith("sinusoidal")
        self.table = nn.Parameter(torch.empty(vocabulary, width))
        self.token_types = nn.Parameter(torch.empty(TOKEN_TYPES, width))
        self.positions = positions.make(
            settings.positions, width, base=settings.position_base, longest=settings.max_positions
        )
        self.scale = math.sqrt(width) if sinusoidal else 1.0
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=1 / math.sqrt(width) if sinusoidal else INIT_STD)
        self.norm = norm
        self.dropout = settings.dropout

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """ids and position [S] -> [S, D]."""
        tokens = taps.tap(self, "tokens", F.embedding(ids, self.table) * self.scale)
        positions = taps.tap(self, "positions", self.positions(position, position))  # lengths are not read
        x = self.norm(tokens + positions + self.token_types[0])
        return taps.tap(self, "stream", dropout(x, self.dropout, self.training))


class MaskedLMHead(nn.Module):
    """norm(gelu(W x)) E^T + b: logits of the token at each position, with the token embedding E."""

    def __init__(self, vocabulary: int, settings: BertSettings, norm: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(settings.width, settings.width)
        self.norm = norm
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        _initialise(self.dense)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, D] -> norm(gelu(W x)) [S, D]."""
        return self.norm(F.gelu(self.dense(x)))


class ClassifierHead(nn.Module):
    """W dropout(f(P x)): logits of the classes, from the first token of a text or the mean of its tokens.

    f is tanh, or another activation, and a norm after it if the settings say so.
    """

    def __init__(self, classes: int, settings: BertSettings, norm: nn.Module) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = POOLERS[settings.pooler_activation]
        self.norm = norm if settings.pooler_norm else None
        self.pooler = nn.Linear(settings.width, settings.width)
        self.out = nn.Linear(settings.width, classes)
        self.dropout = settings.dropout
        _initialise(self.pooler, self.out)

    def forward(self, text: Tensor) -> Tensor:
        """One vector per text, [N, D] -> [N, classes]."""
        pooled = self.activation(self.pooler(text))
        pooled = pooled if self.norm is None else self.norm(pooled)
        return self.out(dropout(pooled, self.dropout, self.training))


@MODELS.register("bert")
class Bert(SequenceModel):
    """A stack of encoder blocks over the whole text, with a head for the task.

    `fill`: logits [S, V] of every token, for a `SeqBatch`. `classify`: logits [N, C] of the class of every text, for a
    `TextClassBatch`.
    """

    Settings = BertSettings

    def __init__(self, settings: BertSettings, source_size: int, target_size: int, shared: bool = False) -> None:
        super().__init__()
        self.settings = settings
        block = BlockConfig.from_settings(settings)
        self.static_shapes = block.only_dot_scores and not settings.window
        self.embedding = BertEmbedding(source_size, settings, block.make_norm())
        self.encoder = BlockStack.of(block, EncoderBlock, settings.layers, settings.layer_changes)
        if settings.norm_first and not settings.first_norm:
            self.encoder[0].self_attn_residual.norm = NoNorm()
        if settings.task == "fill":
            self.mlm_head = MaskedLMHead(source_size, settings, block.make_norm())
        else:
            self.classifier = ClassifierHead(target_size, settings, block.make_norm())

    def encode(self, source: PackedTokens) -> Tensor:
        """Tokens [S] -> [S, D]."""
        layout, longest = source.layout, self.settings.max_positions
        if self.settings.positions == "learned" and layout.max_len > longest:
            raise UserError(f"a text of {layout.max_len} tokens is too long: this model has {longest} positions")
        x = self.embedding(source.ids, layout.position)
        x = self.encoder(x, self._layouts(layout), is_token=layout.is_token)
        return x if self.encoder.norm is None else taps.tap(self, "stream", x)

    def _layouts(self, layout: PackedLayout) -> PackedQK | list[PackedQK]:
        full, window = attention_layout(layout, layout), self.settings.window
        if not window:
            return full
        local = attention_layout(layout, layout, Window(window, window))
        return [full if i in self.settings.global_layers else local for i in range(len(self.encoder))]

    def logits(self, batch: SeqBatch | TextClassBatch) -> Tensor:
        """Logits [S, V] of the tokens to fill masks, or [N, C] of the classes."""
        if self.settings.task == "fill":
            return super().logits(batch)
        return taps.tap(self, "logits", self._classes(self.encode(batch.source), batch.source.layout))

    def logit_lens(self, stream: Tensor, batch: SeqBatch | TextClassBatch) -> Tensor:
        """The same as `logits`, from the residual stream [S, D] after any block."""
        x = self.encoder.last_norm(stream)
        if self.settings.task == "fill":
            return self.project(self.mlm_head(x))
        return self._classes(x, batch.source.layout)

    def features(self, batch: SeqBatch) -> Tensor:
        x = self.encode(batch.source)
        return self.mlm_head(batch.source.layout.zero_padding(x))

    def lm_head(self) -> tuple[Tensor, Tensor | None] | None:
        return (self.embedding.table, self.mlm_head.bias) if self.settings.task == "fill" else None

    def project(self, hidden: Tensor) -> Tensor:
        return taps.tap(self, "logits", self.linear(hidden, self.embedding.table, self.mlm_head.bias))

    def forward(self, batch: SeqBatch | TextClassBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss; to fill masks, logits are computed for masked positions only."""
        static = isinstance(batch.source.layout, StaticPackedLayout)  # nothing may depend on the number of masks
        if isinstance(batch, TextClassBatch) or batch.loss_mask is None or r_drop > 0 or static:
            return super().forward(batch, smoothing, r_drop)
        hidden = self.mlm_head(self.encode(batch.source)[batch.loss_mask])
        labels = batch.labels[batch.loss_mask]
        return losses.cross_entropy(self.project(hidden), labels, torch.ones_like(labels, dtype=torch.bool), smoothing)

    def _classes(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """x [S, D] -> the class logits of each text, [N, C]."""
        if self.settings.pooling == "mean":
            return self.classifier(layout.mean(x))
        first = layout.offsets[:-1].clamp(max=len(x) - 1)  # clamped for the unused entries of static layouts
        return self.classifier(x.index_select(0, first))

    def start(self, source: PackedTokens) -> Any:
        raise UserError("BERT writes no text: it predicts masked tokens (regard fill) or a class (regard predict)")

    def init_from(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Load another run's weights. A classifier may take the body of a model for another task or other classes.

        Its head then keeps its initial weights; `tensors` may also be a `body` without a head.
        """
        initial = tensor_io.model_tensors(self)
        if self.settings.task == "classify":
            theirs = tensors.get("classifier.out.bias")
            if theirs is None or theirs.shape != initial["classifier.out.bias"].shape:
                head = {name: initial[name] for name in initial.keys() - self.body(initial).keys()}
                tensors = self.body(tensors) | head
        super().init_from(tensors, origin)

    @staticmethod
    def body(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights but the head's, which belong to a task and its classes."""
        return {name: t for name, t in tensors.items() if not name.startswith(("mlm_head.", "classifier."))}


def _initialise(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
