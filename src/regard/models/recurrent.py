"""Recurrent encoder-decoders (Sutskever et al. 2014; Cho et al. 2014), without and with attention to the source.

Without attention, one vector carries the whole source to the decoder. With Bahdanau's attention (2015) the decoder
attends before each step, with its last state, and its cell reads the context vector beside the token. With Luong's
(2015) it attends after each step, with its new state; multi-head attention is used in the same way.

Shapes: T target and S source tokens of packed batches; N sentences of L positions in the padded view; B sequences (N,
or N * K beams); I inputs, D width, E encoder width, V vocabulary. The recurrent layers are in `regard.nn.recurrent`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from regard import taps
from regard.attention import (
    AttentionLayout,
    MultiHeadAttention,
    PackedQK,
    Score,
    SourceCache,
    attend,
)
from regard.attention.backends import AttentionWeights
from regard.attention.kv_cache import select_sources, source_tensors
from regard.dropout import dropout
from regard.models.base import SequenceModel
from regard.models.decoder_state import StaticShape
from regard.nn import flops
from regard.nn.recurrent import RecurrentLayer, States, reversal_index, shifted_outputs
from regard.packed import PackedLayout, PackedTokens, SeqBatch
from regard.recipes.schema import ScoreName, SizedSettings
from regard.registry import MODELS, SCORES


class RecurrentSettings(SizedSettings):
    """A recurrent encoder-decoder, with attention or with a single vector between encoder and decoder."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=128, encoder_width=128, embedding=128, encoder_layers=1, decoder_layers=1, dropout=0.1),
        "small": dict(width=256, encoder_width=256, embedding=256, encoder_layers=2, decoder_layers=2, dropout=0.2),
        "base": dict(width=512, encoder_width=512, embedding=512, encoder_layers=2, decoder_layers=2, dropout=0.3),
    }
    DEFAULT_SIZE: ClassVar[str] = "small"
    TASKS: ClassVar[tuple[str, ...]] = ("translation",)

    family: Literal["recurrent"] = Field("recurrent", description="model family")
    size: Literal["tiny", "small", "base"] = Field(
        "small", description="preset for the sizes below; each can be set separately"
    )
    cell: Literal["lstm", "gru"] = Field("lstm", description="recurrent cell")
    width: int = Field(..., ge=2, description="size of the decoder's state")
    encoder_width: int = Field(..., ge=2, description="size of the encoder's state, both directions together")
    embedding: int = Field(..., ge=2, description="embedding size")
    encoder_layers: int = Field(..., ge=1, description="number of encoder layers")
    decoder_layers: int = Field(..., ge=1, description="number of decoder layers")
    bidirectional: bool = Field(True, description="encode the source in both directions")
    attention: Literal["none", "bahdanau", "luong", "multihead"] = Field(
        "bahdanau",
        description="cross-attention, before each step (bahdanau, with the previous state) or after it",
    )
    score: ScoreName | None = Field(
        None, description="attention score; not set: additive for bahdanau, dot for luong, scaled-dot for multihead"
    )
    heads: int = Field(4, ge=1, description='heads of attention = "multihead"; each has width / heads features')
    feed: Literal["start", "every"] = Field(
        "start",
        description="the encoder's last state initialises the decoder (start), or is also an input of every step",
    )
    dropout: float = Field(
        ...,
        ge=0,
        lt=1,
        description="dropout probability, on embeddings, between layers and before the output projection",
    )
    max_positions: int = Field(1024, ge=2, description="maximum tokens of a source or target")
    tie_embeddings: bool = Field(
        True, description="output projection = target embedding (= source embedding, if text.shared)"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> RecurrentSettings:  # overrides: only multihead attention has heads
        if self.attention == "multihead" and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self

    @model_validator(mode="after")
    def _check_directions(self) -> RecurrentSettings:
        if self.bidirectional and self.encoder_width % 2:
            raise ValueError(f"encoder_width {self.encoder_width} must be even: each direction has half of it")
        return self

    @model_validator(mode="after")
    def _check_score(self) -> RecurrentSettings:
        if self.attention == "none" and self.score is not None:
            raise ValueError('attention = "none" has no score')
        one_head = self.attention in ("bahdanau", "luong")
        if one_head and self.width != self.encoder_width and SCORES[self.attention_score].equal_widths:
            others = [name for name, score in SCORES.items() if not score.equal_widths]
            raise ValueError(
                f'score = "{self.attention_score}" needs width = encoder_width '
                f'({", ".join(others)} and attention = "multihead" do not)'
            )
        return self

    @property
    def attention_score(self) -> str:
        """The name of the score: `score`, or the usual one of this attention."""
        return self.score or {"bahdanau": "additive", "luong": "dot"}.get(self.attention, "scaled-dot")

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        return self.encoder_layers, self.decoder_layers

    def forward_flops(self, batch: SeqBatch, target_size: int) -> int:
        e, d, i = self.encoder_width, self.width, self.embedding
        source_lengths, target_lengths = batch.source.layout.lengths, batch.inputs.layout.lengths
        source, target, sentences = sum(source_lengths), sum(target_lengths), len(target_lengths)
        gates, states = (4, 2) if self.cell == "lstm" else (3, 1)
        directions = 2 if self.bidirectional else 1
        encoder = decoder = attention = 0
        for layer in range(self.encoder_layers):
            encoder += 2 * source * gates * e * ((e if layer else i) + e // directions)
        fed = e if self.feed == "every" else 0
        attends_first = self.attention == "bahdanau"
        for layer in range(self.decoder_layers):
            inputs = d if layer else i + fed + (e if attends_first else 0)
            decoder += 2 * target * gates * d * (inputs + d) + 2 * sentences * e * d * states
        extra = fed + (i if attends_first else 0)  # features that the output reads beside the state
        if self.attention == "multihead":
            attention = 4 * target * d * d + 4 * source * e * d
            attention += flops.attention(SCORES[self.attention_score], d, self.heads, target_lengths, source_lengths)
            extra += d
        elif self.attention != "none":
            pairs = flops.num_pairs(target_lengths, source_lengths)
            attention = SCORES[self.attention_score].flops(d, e, target, source, pairs) + 2 * pairs * e
            extra += e
        features = i if self.tie_embeddings else d
        return encoder + decoder + attention + 2 * target * features * (d + extra + target_size)

    def summary(self) -> str:
        if self.attention == "none":
            return f"{self.cell.upper()}, {'context fed' if self.feed == 'every' else 'no attention'}"
        return f"{self.cell.upper()}, {'multihead' if self.attention == 'multihead' else self.attention_score}"


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class ScaledEmbedding(nn.Module):
    """dropout(E[id] · sqrt(I)). With that factor the table has the scale of an output projection, and can be tied."""

    def __init__(self, vocabulary: int, settings: RecurrentSettings) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocabulary, settings.embedding))
        nn.init.normal_(self.table, std=1 / math.sqrt(settings.embedding))
        self.dropout, self.scale = settings.dropout, math.sqrt(settings.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T, I]."""
        tokens = F.embedding(ids, self.table) * self.scale
        return taps.tap(self, "stream", dropout(tokens, self.dropout, self.training))


class EncoderLayer(nn.Module):
    """One recurrent layer; if bidirectional, the concatenation of a forward and a backward one."""

    def __init__(self, settings: RecurrentSettings, inputs: int) -> None:
        super().__init__()
        width = settings.encoder_width // (2 if settings.bidirectional else 1)
        self.forward_cell = RecurrentLayer(settings.cell, inputs, width)
        self.backward_cell = RecurrentLayer(settings.cell, inputs, width) if settings.bidirectional else None

    def forward(self, x: Tensor, layout: PackedLayout, reversal: Tensor | None) -> Tensor:
        """x [S, I] -> [S, E]; `reversal` is the `reversal_index` of the layout."""
        x = layout.pad(x)  # [N, L, I]
        outputs, _ = self.forward_cell(x, self.forward_cell.zero_state(x))
        if self.backward_cell is not None:
            backward, _ = self.backward_cell(x, self.backward_cell.zero_state(x), reversal)
            outputs = torch.cat([outputs, backward], -1)
        return taps.tap(self, "stream", layout.flatten(outputs))


class DecoderLayer(nn.Module):
    """A recurrent layer that starts from the source vector s: h = tanh(W s) and, for an LSTM, c = tanh(V s)."""

    def __init__(self, settings: RecurrentSettings, inputs: int) -> None:
        super().__init__()
        self.cell = RecurrentLayer(settings.cell, inputs, settings.width)
        self.bridge = _linear(settings.encoder_width, settings.width * (2 if settings.cell == "lstm" else 1))

    def begin(self, summary: Tensor) -> States:
        """Source vectors [N, E] -> the initial states."""
        return self.bridge(summary).tanh().split(self.cell.cell.hidden_size, -1)

    def forward(self, x: Tensor, summary: Tensor, layout: PackedLayout) -> Tensor:
        """x [T, I] and source vectors [N, E] -> [T, D]."""
        outputs, _ = self.cell(layout.pad(x), self.begin(summary))
        return taps.tap(self, "stream", layout.flatten(outputs))

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step of every beam: x [B, I] -> [B, D], and the new states."""
        outputs, states = self.cell(x[:, None], states)
        return taps.tap(self, "stream", outputs[:, 0]), states


class SourceAttention(nn.Module):
    """softmax(score(x, s)) @ s, without projections. Has the interface of `MultiHeadAttention`."""

    def __init__(self, settings: RecurrentSettings) -> None:
        super().__init__()
        self.score: Score = SCORES[settings.attention_score](settings.width, settings.encoder_width)

    def forward(self, x: Tensor, layout: AttentionLayout, source: Tensor | None = None) -> Tensor:
        """x [T, D] and source [S, E] -> [T, E]; source is None if the layout caches it."""
        key = value = None if source is None else source[:, None]
        heads = attend(x[:, None], key, value, layout, score=self.score, owner=self)
        return taps.tap(self, "heads", heads).flatten(-2)

    def source_kv(self, source: Tensor, layout: PackedLayout) -> SourceCache:
        """Compute the keys and values of the source [S, E] once, for all decoding steps."""
        key, value = (layout.pad(t)[:, None].contiguous() for t in (self.score.project_keys(source), source))
        return SourceCache(key, value, PackedQK(layout, layout).allowed)


class AttentionFirstLayer(DecoderLayer):
    """A layer that attends to the source with its last state; the cell reads the context vector beside x (Bahdanau).

    The context depends on the last state, so this is a loop over positions even in training. In a decoder of several
    layers only the first one attends (as in Wu et al. 2016), so that the others need no loop.
    """

    def __init__(self, settings: RecurrentSettings, inputs: int) -> None:
        super().__init__(settings, inputs + settings.encoder_width)
        self.cross_attn = SourceAttention(settings)

    def forward(self, x: Tensor, summary: Tensor, layout: PackedQK, source: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [T, I], source vectors [N, E] and source [S, E] -> outputs [T, D] and context vectors [T, E]."""
        packed = layout.queries
        x, states = packed.pad(x), self.begin(summary)
        memory = self.cross_attn.source_kv(source, layout.keys)
        outputs, contexts = self._loop(x, states, memory)
        if taps.has_listeners():
            outputs, contexts = self._offer(x, states, memory, layout, outputs, contexts)
        return taps.tap(self, "stream", packed.flatten(outputs)), packed.flatten(contexts)

    def _loop(
        self, x: Tensor, states: States, memory: SourceCache, gates: Tensor | None = None, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [N, L, I] -> outputs [N, L, D] and contexts [N, L, E]; gates, or contexts (`given`), may be replaced."""
        weight = self.cell.weights[0][:, x.shape[-1] :].t()  # [E, 4D or 3D], the columns that read the context
        score, outputs, contexts = self.cross_attn.score, [], []
        for t, projected in enumerate(self.cell.project(x).unbind(1)):
            if given is None:
                context = attend(states[0][:, None], None, None, memory, score=score)[:, 0]
            else:
                context = given[:, t]
            projected = torch.addmm(projected, context, weight)
            states = self.cell.advance(projected, states, None if gates is None else gates[:, t])
            outputs.append(states[0])
            contexts.append(context)
        return torch.stack(outputs, 1), torch.stack(contexts, 1)

    def _offer(
        self, x: Tensor, states: States, memory: SourceCache, layout: PackedQK, outputs: Tensor, contexts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Offer the weights and gates of the whole loop at their taps; repeat the loop with replacements, if any.

        Replaced gates lead to other states and so to other weights, which are then offered again.
        """
        replaced = self._offer_weights(states, memory, layout, outputs, contexts)
        if replaced is not None:
            outputs, contexts = self._loop(x, states, memory, given=replaced)
        gates = self.cell.offer(torch.cat([x, contexts.to(x.dtype)], -1), outputs, states)
        if gates is not None:
            outputs, contexts = self._loop(x, states, memory, gates, replaced)
            if replaced is None:
                replaced = self._offer_weights(states, memory, layout, outputs, contexts)
                if replaced is not None:
                    outputs, contexts = self._loop(x, states, memory, gates, replaced)
        return outputs, contexts

    def _offer_weights(
        self, states: States, memory: SourceCache, layout: PackedQK, outputs: Tensor, contexts: Tensor
    ) -> Tensor | None:
        """Offer the attention of all steps as one; return replaced contexts [N, L, E], or None."""
        query = shifted_outputs(states[0], outputs)[:, None]  # [N, 1, L, D]
        offered = AttentionWeights(query, memory.key, memory.value, memory.allowed, self.cross_attn.score, layout)
        weights = taps.offer(self.cross_attn, "weights", offered)
        if weights is not None:
            contexts = (weights.to(memory.value.dtype) @ memory.value)[:, 0]
        heads = layout.queries.flatten(contexts)[:, None]  # [T, 1, E]
        replaced = taps.tap(self.cross_attn, "heads", heads)
        if replaced is not heads:
            return layout.queries.pad(replaced[:, 0])
        return None if weights is None else contexts

    def attend_and_step(self, x: Tensor, states: States, memory: SourceCache) -> tuple[Tensor, Tensor, States]:
        """One step of every beam: x [B, I] -> output [B, D], context [B, E], and the new states."""
        context = self.cross_attn(states[0], memory)
        outputs, states = self.step(torch.cat([x, context], -1), states)
        return outputs, context, states


class Readout(nn.Module):
    """dropout(tanh(W [state; ...])): the input of the output projection.

    With Luong's or multi-head attention, the new state attends to the source, and the context is concatenated to it.
    """

    def __init__(self, settings: RecurrentSettings, extra_width: int) -> None:
        super().__init__()
        self.cross_attn: SourceAttention | MultiHeadAttention | None = None
        if settings.attention == "multihead":
            width = settings.width // settings.heads
            score: Score = SCORES[settings.attention_score](width, width, settings.heads)
            self.cross_attn = MultiHeadAttention(settings.width, settings.heads, settings.encoder_width, score)
            extra_width += settings.width
        elif settings.attention == "luong":
            self.cross_attn = SourceAttention(settings)
            extra_width += settings.encoder_width
        self.mix = _linear(
            settings.width + extra_width, settings.embedding if settings.tie_embeddings else settings.width
        )
        self.dropout = settings.dropout

    def forward(
        self, state: Tensor, extra: Sequence[Tensor], layout: AttentionLayout | None, source: Tensor | None
    ) -> Tensor:
        """state [T, D] and what is concatenated to it, [T, ...] each -> [T, features of the output projection]."""
        parts = [state, *extra]
        if self.cross_attn is not None:
            assert layout is not None
            parts.append(self.cross_attn(state, layout, source))
        mixed = self.mix(torch.cat(parts, -1)).tanh()
        return taps.tap(self, "stream", dropout(mixed, self.dropout, self.training))


class RecurrentState:
    """The decoding state of N sentences with K beams: recurrent states per beam; source vector and keys per sentence.

    With static shapes (`fixed`), `reorder` copies new states into the tensors of the old ones.
    """

    def __init__(self, layers: list[States], summary: Tensor, memory: SourceCache | None, beams: int = 1) -> None:
        self.layers = layers  # each tensor [N*K, D]
        self.summary = summary  # [N, E]
        self.memory = memory
        self.beams = beams
        self._constant: list[States] | None = None

    def _select(self, beams: Tensor) -> None:
        self.layers = [tuple(s.index_select(0, beams) for s in states) for states in self.layers]

    def reorder(self, parents: Tensor) -> RecurrentState:
        if self.beams > 1 or parents.shape[1] > 1:
            first = torch.arange(len(parents), device=parents.device)[:, None] * self.beams
            self._select((first + parents).flatten())
        self.beams = parents.shape[1]
        if self._constant is not None:
            for constant, states in zip(self._constant, self.layers, strict=True):
                for old, new in zip(constant, states, strict=True):
                    old.copy_(new)
            self.layers = list(self._constant)
        return self

    def select(self, sentences: Tensor) -> RecurrentState:
        beams = sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)
        layers = [tuple(s.index_select(0, beams.flatten()) for s in states) for states in self.layers]
        memory = None if self.memory is None else select_sources([self.memory], sentences)[0]
        selected = RecurrentState(layers, self.summary.index_select(0, sentences), memory, self.beams)
        selected._constant = None if self._constant is None else list(layers)
        return selected

    def fixed(self, shape: StaticShape) -> RecurrentState:
        """A state with static shapes and addresses, in which all beams of a sentence start equal."""
        layers = [tuple(x.repeat_interleave(shape.beams, 0) for x in states) for states in self.layers]
        memory = None if self.memory is None else self.memory.fixed(shape.source)
        made = RecurrentState(layers, self.summary, memory, shape.beams)
        made._constant = list(layers)
        return made

    def compact(self) -> None:
        """Do nothing: beams read all tensors."""

    def grown(self, capacity: int, source: int = 0) -> RecurrentState:
        if self.memory is None or self.memory.key.shape[2] >= source:
            return self
        made = RecurrentState(self.layers, self.summary, self.memory.fixed(source), self.beams)
        made._constant = self._constant
        return made

    def tensors(self) -> Iterator[Tensor]:
        for states in self.layers:
            yield from states
        yield self.summary
        yield from source_tensors([] if self.memory is None else [self.memory])


@MODELS.register("recurrent")
class Recurrent(SequenceModel):
    """p(next token) = softmax(W · readout(decoder(target so far, encoder(source)))).

    The source vector (the last states of the encoder, in both directions) initialises every layer of the decoder; with
    feed = "every" it is also concatenated to each target token and to each state that is read out.
    """

    Settings = RecurrentSettings
    has_static_state = True

    def __init__(self, settings: RecurrentSettings, source_size: int, target_size: int, shared: bool = True) -> None:
        super().__init__()
        self.settings = settings
        self.source_embedding = ScaledEmbedding(source_size, settings)
        self.target_embedding = ScaledEmbedding(target_size, settings)
        if shared:
            self.target_embedding.table = self.source_embedding.table
        e, fed = settings.encoder_width, settings.encoder_width if settings.feed == "every" else 0
        attends_first = settings.attention == "bahdanau"
        first = AttentionFirstLayer if attends_first else DecoderLayer
        self.encoder = nn.ModuleList(
            EncoderLayer(settings, e if number else settings.embedding) for number in range(settings.encoder_layers)
        )
        self.decoder = nn.ModuleList([first(settings, settings.embedding + fed)])
        self.decoder.extend(DecoderLayer(settings, settings.width) for _ in range(settings.decoder_layers - 1))
        self.readout = Readout(settings, fed + (e + settings.embedding if attends_first else 0))
        if not settings.tie_embeddings:
            self.output = nn.Parameter(torch.empty(target_size, settings.width))
            nn.init.xavier_uniform_(self.output)

    def _between(self, x: Tensor) -> Tensor:
        """Dropout between layers."""
        return dropout(x, self.settings.dropout, self.training)

    def encode(self, source: PackedTokens) -> tuple[Tensor, Tensor]:
        """Source tokens [S] -> encoder outputs [S, E], and the source vectors [N, E]."""
        layout = source.layout
        reversal = reversal_index(layout) if self.settings.bidirectional else None
        x = self.source_embedding(source.ids)
        for number, layer in enumerate(self.encoder):
            x = layer(self._between(x) if number else x, layout, reversal)
        first, last = layout.offsets[:-1], layout.offsets[1:] - 1
        if reversal is None:
            return x, x.index_select(0, last)
        forward, backward = x.chunk(2, -1)
        return x, torch.cat([forward.index_select(0, last), backward.index_select(0, first)], -1)

    def features(self, batch: SeqBatch) -> Tensor:
        source, summary = self.encode(batch.source)
        packed, layout = batch.inputs.layout, PackedQK(batch.inputs.layout, batch.source.layout)
        x = embedded = self.target_embedding(batch.inputs.ids)
        extra: list[Tensor] = []
        if self.settings.feed == "every":
            extra = [packed.flatten(summary[:, None].expand(-1, packed.max_len, -1))]
            x = torch.cat([x, *extra], -1)
        for number, layer in enumerate(self.decoder):
            if isinstance(layer, AttentionFirstLayer):
                x, context = layer(x, summary, layout, source)
                extra += [context, embedded]
            else:
                x = layer(self._between(x) if number else x, summary, packed)
        return packed.zero_padding(self.readout(x, extra, layout, source))

    def lm_head(self) -> tuple[Tensor, None]:
        return self.target_embedding.table if self.settings.tie_embeddings else self.output, None

    def project(self, hidden: Tensor) -> Tensor:
        return taps.tap(self, "logits", self.linear(hidden, *self.lm_head()))

    def logit_lens(self, stream: Tensor, batch: SeqBatch) -> Tensor:
        """Logits from the readout, [..., features of the output projection]; other layers have no logits."""
        return self.project(stream)

    def static_state(self, state: RecurrentState, shape: StaticShape) -> RecurrentState:
        return state.fixed(shape)

    def start(self, source: PackedTokens) -> RecurrentState:
        encoded, summary = self.encode(source)
        first = self.decoder[0]
        cross = first.cross_attn if isinstance(first, AttentionFirstLayer) else self.readout.cross_attn
        memory = None if cross is None else cross.source_kv(encoded, source.layout)
        return RecurrentState([layer.begin(summary) for layer in self.decoder], summary, memory)  # type: ignore[operator]

    def step(self, state: RecurrentState, tokens: Tensor) -> tuple[Tensor, RecurrentState]:
        x = embedded = self.target_embedding(tokens.flatten())
        extra: list[Tensor] = []
        if self.settings.feed == "every":
            extra = [state.summary.repeat_interleave(tokens.shape[1], 0)]
            x = torch.cat([x, *extra], -1)
        for number, layer in enumerate(self.decoder):
            states = state.layers[number]
            if isinstance(layer, AttentionFirstLayer):
                assert state.memory is not None
                x, context, state.layers[number] = layer.attend_and_step(x, states, state.memory)
                extra += [context, embedded]
            else:
                assert isinstance(layer, DecoderLayer)
                x, state.layers[number] = layer.step(self._between(x) if number else x, states)
        return self.project(self.readout(x, extra, state.memory, None)).unflatten(0, tokens.shape), state
