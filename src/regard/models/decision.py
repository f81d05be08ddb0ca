"""The Decision Transformer (Chen et al. 2021): the next action from the return to go, states and actions so far.

A trajectory is one sequence of three tokens a step: the return that is still to come, the state, the action. The action
is predicted from the state's token, so that it depends on everything before it. Without returns, the same model
imitates its data (behaviour cloning). S steps of a packed batch, N windows, F features of a state, A actions, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from regard import taps
from regard.attention import Causal, attention_layout
from regard.dropout import dropout
from regard.models.base import SequenceModel
from regard.nn import flops
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, EncoderBlock
from regard.packed import Batch, PackedLayout
from regard.recipes.schema import Activation, ScoreName, SizedSettings, TokenNorm
from regard.registry import MODELS

INIT_STD = 0.02


@dataclass(frozen=True)
class DecisionBatch(Batch):
    """N windows of trajectories, concatenated: `layout` has their numbers of steps.

    `actions` are ids [S], or numbers [S, A]: those that were taken, and the labels.
    """

    layout: PackedLayout
    returns: Tensor  # [S] to go, scaled
    states: Tensor  # [S, F] standardised
    actions: Tensor
    times: Tensor  # [S] the number of the step in its episode

    @property
    def labels(self) -> Tensor:
        return self.actions

    @property
    def target_mask(self) -> Tensor:
        return torch.ones(len(self.actions), dtype=torch.bool, device=self.actions.device)

    @property
    def num_targets(self) -> int:
        return len(self.actions)


class DecisionSettings(SizedSettings):
    """A causal Transformer over returns, states and actions."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=64, heads=4, layers=2, ffn_width=128, dropout=0.0),
        "small": dict(width=128, heads=4, layers=3, ffn_width=512, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "tiny"
    TASKS: ClassVar[tuple[str, ...]] = ("decisions",)

    family: Literal["decision"] = Field("decision", description="model family")
    size: Literal["tiny", "small"] = Field("tiny", description="preset for the sizes below; each can be set separately")
    condition: Literal["return", "none"] = Field(
        "return", description="condition on the return to go; none: imitate the data (behaviour cloning)"
    )
    actions: Literal["discrete", "continuous"] = Field("discrete", description="kind of actions")
    context: int = Field(20, ge=1, description="steps that the model reads")
    max_steps: int = Field(1000, ge=1, description="longest episode; later steps count as the last one")
    width: int = Field(..., ge=2, description="embedding and hidden size")
    heads: int = Field(..., ge=1, description="attention heads; each has width / heads features")
    layers: int = Field(..., ge=1, description="number of layers")
    ffn_width: int = Field(..., ge=1, description="hidden size of the feed-forward layers")
    dropout: float = Field(..., ge=0, lt=1, description="dropout probability, on tokens and the output of sub-layers")
    activation: Activation = Field("gelu", description="activation of the feed-forward layers")
    norm: TokenNorm = Field("layer", description="normalisation layer, before each sub-layer")
    score: ScoreName = Field("scaled-dot", description="attention score of queries and keys")

    @property
    def tokens_per_step(self) -> int:
        return 3 if self.condition == "return" else 2

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return 0, self.layers

    def forward_flops(self, batch: DecisionBatch, target_size: int) -> int:
        lengths = [self.tokens_per_step * n for n in batch.layout.lengths]
        inputs = 2 * batch.num_targets * self.width * (batch.states.shape[1] + (self.condition == "return"))
        inputs += 2 * batch.num_targets * self.width * target_size * (self.actions == "continuous")
        blocks = self.layers * flops.encoder_block(BlockConfig.from_settings(self), lengths)
        return inputs + blocks + 2 * batch.num_targets * self.width * target_size

    def summary(self) -> str:
        return "Decision Transformer" if self.condition == "return" else "behaviour cloning"


@MODELS.register("decision")
class DecisionTransformer(SequenceModel):
    """W · decoder(return, state, action, return, state, ...) at the tokens of states."""

    Settings = DecisionSettings

    def __init__(self, settings: DecisionSettings, source_size: int, target_size: int, shared: bool = False) -> None:
        super().__init__()
        self.settings = settings
        width, discrete = settings.width, settings.actions == "discrete"
        self.embed_return = nn.Linear(1, width) if settings.condition == "return" else None
        self.embed_state = nn.Linear(source_size, width)
        self.embed_action: nn.Module = nn.Embedding(target_size, width) if discrete else nn.Linear(target_size, width)
        self.times = nn.Parameter(torch.randn(settings.max_steps, width) * INIT_STD)
        self.decoder = BlockStack.of(BlockConfig.from_settings(settings), EncoderBlock, settings.layers)
        self.head = nn.Linear(width, target_size)

    def encode(self, batch: DecisionBatch) -> Tensor:
        """[S, D] after the last layer, at the tokens of states."""
        times = F.embedding(batch.times.clamp(max=self.settings.max_steps - 1), self.times)
        tokens = [self.embed_state(batch.states), self.embed_action(batch.actions)]
        if self.embed_return is not None:
            tokens.insert(0, self.embed_return(batch.returns[:, None]))
        x = (torch.stack(tokens, 1) + times[:, None]).flatten(0, 1)  # [3 S, D]: return, state, action of each step
        x = dropout(taps.tap(self, "tokens", x), self.settings.dropout, self.training)
        layout = PackedLayout([len(tokens) * n for n in batch.layout.lengths], device=x.device)
        x = self.decoder(x, attention_layout(layout, layout, Causal()), is_token=layout.is_token)
        return x.unflatten(0, (-1, len(tokens)))[:, -2]

    def logits(self, batch: DecisionBatch) -> Tensor:
        """[S, A]: logits of the actions of each step, or the actions themselves if they are continuous."""
        return taps.tap(self, "logits", self.head(self.encode(batch)))
