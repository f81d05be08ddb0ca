"""GPT: a Transformer decoder without an encoder (Radford et al. 2018, 2019).

It models plain text, or pairs as one text: the source, then the target. Shapes: T target tokens and S source tokens of
packed batches, D width, V vocabulary, N sentences, K beams.
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
from regard.attention import BeamTree, Causal, Mask, Segments, StaticPackedLayout, attention_layout
from regard.errors import UserError
from regard.models.base import SequenceModel
from regard.models.decoder_state import DecoderState, StaticDecoderState, StaticShape
from regard.models.gpt_settings import GPTSettings
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack, EncoderBlock
from regard.nn.embedding import TokenEmbedding
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.registry import MASKS, MODELS

__all__ = ["GPT", "GPTSettings"]

NEG_LOGIT = -1e4  # for tokens that are never predicted; finite, so that label smoothing gives finite losses
INIT_STD = 0.02  # standard deviation of initial weights, as in GPT-2


def sparse_mask(settings: GPTSettings) -> Mask | None:
    """The mask that the settings select; None: causal."""
    mask: Mask = MASKS[settings.mask].of_size(settings.mask_size, settings.memory_size)
    return None if mask == Causal() else mask


@dataclass(frozen=True)
class Concatenated:
    """Two packed batches as one: the source of each sentence, then its target; the padding of both at the end.

    `order` [S + T] indexes [source tokens, target tokens] in the order of the joint batch; `target` [T] is the index of
    each target token in the joint batch.
    """

    layout: PackedLayout
    order: Tensor
    target: Tensor

    @classmethod
    def of(cls, source: PackedLayout, target: PackedLayout) -> Concatenated:
        size = source.size + target.size
        layout: PackedLayout
        if isinstance(source, StaticPackedLayout) and isinstance(target, StaticPackedLayout):
            layout = StaticPackedLayout(source.offsets + target.offsets, size, source.max_len + target.max_len)
        else:
            lengths = [s + t for s, t in zip(source.lengths, target.lengths, strict=True)]
            layout = PackedLayout(lengths, size, target.device)
        # Padding has the largest segment id, so a stable sort by segment moves it to the end.
        order = torch.cat([source.segment_ids, target.segment_ids]).argsort(stable=True)
        return cls(layout, order, order.argsort()[source.size :])


@MODELS.register("gpt")
class GPT(SequenceModel):
    """p(next token) = softmax(W · decoder(source and target so far)), with norms before each sub-layer and at the end.

    The settings also describe Llama and its relatives: grouped queries, RMS norms, gated layers, scaled rotary
    positions, windows in some of the layers.
    If embeddings are tied, W is the embedding table. A source with a separate vocabulary has a separate embedding.
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
        self.source_embedding.positions = self.embedding.positions  # positions continue from source to target
        self.decoder = BlockStack.of(block, EncoderBlock, settings.layers, settings.layer_changes)
        self.static_shapes = self.mask is None and block.only_dot_scores  # sparse masks are computed on the host
        if not settings.tie_embeddings:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
        self.register_buffer("unused", torch.tensor(settings.unused, dtype=torch.long), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal with a small deviation, smaller for projections into the residual stream; biases stay zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or ".score." in name:
                continue  # scores initialise their own parameters
            if self.settings.scale_embeddings and name.endswith("embedding.table"):
                continue  # as in `Transformer`
            into_stream = name.endswith(("self_attn.out_proj.weight", "feed_forward.w_out.weight"))
            nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * self.settings.layers) if into_stream else INIT_STD)

    def features(self, batch: SeqBatch) -> Tensor:
        source, inputs = batch.source, batch.inputs
        if source.layout.empty:  # plain text
            self._check_length(inputs.layout)
            x = self._decode(self._embed(self.embedding, inputs.ids, inputs.layout.position), inputs.layout)
        else:
            joint = Concatenated.of(source.layout, inputs.layout)
            self._check_length(joint.layout)
            source_length = F.pad(source.layout.length, (0, 1))[inputs.layout.segment_ids]  # [T]
            source_x = self._embed(self.source_embedding, source.ids, source.layout.position)  # [S, D]
            target_x = self._embed(self.embedding, inputs.ids, inputs.layout.position + source_length)  # [T, D]
            x = torch.cat([source_x, target_x]).index_select(0, joint.order)  # [S + T, D]
            x = self._decode(x, joint.layout).index_select(0, joint.target)  # [T, D]
        return inputs.layout.zero_padding(x)

    def _embed(self, embedding: nn.Module, ids: Tensor, position: Tensor) -> Tensor:
        return embedding(ids, position, position)  # its position encodings do not read the length

    def _decode(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """All blocks and the last norm, [T, D] -> [T, D]."""
        causal = attention_layout(layout, layout, Causal())
        if self.mask is None:
            return self.decoder(x, causal, is_token=layout.is_token)
        sparse, full = attention_layout(layout, layout, self.mask), self.settings.global_layers
        layouts = [causal if i in full else sparse for i in range(len(self.decoder))]
        return self.decoder(x, layouts, is_token=layout.is_token)

    def _check_length(self, layout: PackedLayout) -> None:
        if not isinstance(layout, StaticPackedLayout):  # a static layout's `max_len` is only a bound
            self._check_position(layout.max_len)

    def _check_position(self, length: int) -> None:
        longest = self.settings.max_positions
        if self.settings.positions == "learned" and length > longest:
            raise UserError(f"a sequence of {length} tokens is too long: this model has {longest} positions")

    def _table(self) -> Tensor:
        return self.embedding.table if self.settings.tie_embeddings else self.output

    def lm_head(self) -> tuple[Tensor, None] | None:
        return None if self.settings.unused or self.settings.logit_softcap else (self._table(), None)

    def project(self, hidden: Tensor) -> Tensor:
        logits, cap = self.linear(hidden, self._table()), self.settings.logit_softcap
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if self.settings.unused:
            logits = logits.index_fill(-1, self.unused, NEG_LOGIT)
        return taps.tap(self, "logits", logits)

    def logit_lens(self, stream: Tensor, batch: SeqBatch) -> Tensor:
        return self.project(self.decoder.last_norm(stream))

    def start(self, source: PackedTokens) -> DecoderState:
        """Prefill: all prompts at once, padded on the left, so that all end at the same position."""
        layout = source.layout
        padding = None if layout.equal_lengths else layout.max_len - layout.length
        tree = BeamTree(len(layout), self.mask, padding)
        state = DecoderState.start(len(self.decoder), tree, unmasked=self.settings.global_layers)
        if layout.max_len:
            state.tree.append(layout.max_len, layout.device)
            position = state.tree.position.index.clamp(min=0)
            ids = layout.pad(source.ids).gather(1, position.expand(len(layout), -1))
            self._extend(state, self.source_embedding, ids)
        return state

    def static_state(self, state: DecoderState, shape: StaticShape) -> StaticDecoderState:
        return StaticDecoderState.of(state, shape, [cast(EncoderBlock, block).self_attn for block in self.decoder])

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        state.tree.append(None, tokens.device)
        x = self._extend(state, self.embedding, tokens.flatten())  # [N, K] -> [N*K, D]
        return self.project(x).unflatten(0, tokens.shape), state

    def _extend(self, state: DecoderState, embedding: nn.Module, ids: Tensor) -> Tensor:
        """Feed the tokens of a step [N*K] or of prompts [N, T], which the tree has entered: [..., D]."""
        tree, longest = state.tree, self.settings.max_positions
        position = tree.position.index.clamp(min=0)
        if not tree.is_static and tree.length > longest:
            self._check_position(int(position.max()) + 1)
        if self.settings.positions == "learned":  # with static shapes, finished sentences are still fed
            position = position.clamp(max=longest - 1)
        return self.decoder(self._embed(embedding, ids, position.expand_as(ids)), state.self_kv)

    def segments(self, ids: Tensor) -> Iterator[Tensor]:
        """Process long texts in segments of `mask_size` tokens: ids [B, L] -> logits [B, at most `mask_size`, V] each.

        Each layer keeps the last `memory_size` keys of earlier segments, as Transformer-XL does, so memory does not
        grow with the text. The logits equal those of one pass with the mask "segments".
        """
        if not isinstance(self.mask, Segments):
            raise UserError(
                f'only a model with mask = "segments" reads in segments, and this one has {self.settings.mask!r}'
            )
        state = DecoderState.start(len(self.decoder), BeamTree(len(ids)))
        for segment in ids.split(self.mask.length, dim=1):
            state.trim(self.mask.memory)
            state.tree.append(segment.shape[1], ids.device)
            yield self.project(self._extend(state, self.embedding, segment))
