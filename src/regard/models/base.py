"""The interface of all model families: forward pass, loss, decoding states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps, tensor_io
from regard.attention import BeamTree, KVCache, MultiHeadAttention, SourceCache
from regard.attention.kv_cache import fixed_sources, keep_sources, source_tensors
from regard.nn import losses
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import SizedSettings


class LinearFn(Protocol):
    """A linear layer as a function: x [..., I], weight [O, I] and bias [O] -> [..., O]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class DecodingState(Protocol):
    """The decoding state of N sentences with K beams each.

    Data of a sentence is stored once; data of a beam is reordered.
    """

    def reorder(self, parents: Tensor) -> Self:
        """Beam k of sentence n continues beam `parents[n, k]`; K may change."""
        ...

    def keep(self, sentences: Tensor) -> Self:
        """Select sentences, in this order: [M] indices into the present N."""
        ...


@dataclass(frozen=True)
class StaticShape:
    """What is constant in a state for CUDA graphs: N sentences of K beams, and capacities in tokens."""

    sentences: int
    beams: int
    capacity: int  # of the output
    source: int


class StaticState(DecodingState, Protocol):
    """A decoding state in tensors of constant shapes and addresses, which steps and `reorder` change in place."""

    def grown(self, capacity: int) -> Self:
        """Return a state with capacity for this many output tokens."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the state, in a fixed order."""
        ...


class DecoderState:
    """The state of an attention decoder: one KV cache per layer, and the cross-attention caches.

    `length` [N] are the source lengths of an encoder-decoder; None for decoder-only models, which are fed the source.
    """

    def __init__(
        self, tree: BeamTree, own: list[KVCache], cross: Sequence[SourceCache] = (), length: Tensor | None = None
    ) -> None:
        self.tree, self.own, self.cross, self.length = tree, own, cross, length

    @classmethod
    def start(
        cls, layers: int, tree: BeamTree, cross: Sequence[SourceCache] = (), length: Tensor | None = None
    ) -> Self:
        return cls(tree, [KVCache(tree) for _ in range(layers)], cross, length)

    def reorder(self, parents: Tensor) -> Self:
        self.tree.follow(parents)
        return self

    def keep(self, sentences: Tensor) -> DecoderState:
        tree = self.tree.keep(sentences)
        own = [cache.keep(sentences, tree) for cache in self.own]
        length = None if self.length is None else self.length[sentences]
        return DecoderState(tree, own, keep_sources(self.cross, sentences), length)

    def fixed(self, shape: StaticShape, attentions: Sequence[MultiHeadAttention]) -> DecoderState:
        """A state of constant shapes and addresses, whose layers' self-attentions are given."""
        prompt = shape.source if self.length is None else 0
        like = [attention.cached_like() for attention in attentions]
        tree = self.tree.fixed(shape.beams, shape.capacity, prompt, like[0][0].device)
        own = [cache.fixed(tree, empty) for cache, empty in zip(self.own, like, strict=True)]
        return DecoderState(tree, own, fixed_sources(self.cross, shape.source), self.length)

    def grown(self, capacity: int) -> DecoderState:
        tree = self.tree.grown(capacity)
        return DecoderState(tree, [cache.grown(tree) for cache in self.own], self.cross, self.length)

    def restart(self, started: DecoderState) -> None:
        """Copy a newly started state of other sources into the tensors of this one."""
        assert self.length is not None and started.length is not None
        size = self.cross[0].key.shape[2]
        for own, new in zip(
            source_tensors(self.cross), source_tensors(fixed_sources(started.cross, size)), strict=True
        ):
            own.copy_(new)
        self.length.copy_(started.length)
        self.tree.restart()
        for cache in self.own:
            for tensor in cache.tensors():
                tensor.zero_()

    def trim(self, entries: int) -> None:
        """Keep the last `entries` tokens, in a state with one beam per sentence."""
        for cache in self.own:
            cache.trim(entries)
        self.tree.entries = min(self.tree.entries, entries)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.tree.tensors()
        for cache in self.own:
            yield from cache.tensors()
        yield from source_tensors(self.cross)
        yield from () if self.length is None else (self.length,)


class SequenceModel(nn.Module):
    """Base class of all models: a family implements `features` (or `forward`), `start` and `step`.

    It registers itself (`@MODELS.register("gpt")`) and names the class of its settings, which recipes are checked with.
    """

    Settings: ClassVar[type[SizedSettings]]
    has_static_state = False  # whether decoding states have a form of constant shapes, for CUDA graphs
    is_decoder_only = False  # whether the source is a prompt, which the output continues in the same cache
    can_restart = False  # whether a static state can be reused for other sources (`restart`)
    static_shapes = False  # whether `forward` on static batches never waits for the device, as CUDA graphs require
    # What `accelerate` replaces by faster equivalents: the output projection, and that projection with the loss.
    linear: LinearFn = staticmethod(F.linear)  # type: ignore[arg-type]
    linear_cross_entropy = staticmethod(losses.linear_cross_entropy)

    def forward(self, batch: SeqBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss: label-smoothed cross-entropy, summed over the targets that count, in float32.

        (1 - e) · -log p(label) + e · mean over the vocabulary of -log p, as F.cross_entropy defines it. With `r_drop`,
        the batch is passed through the model twice (`losses.r_drop_loss`). The loss is what `forward` returns, so that
        wrappers which synchronise gradients see the whole pass; it is a sum, since only the trainer knows how many
        targets all processes have together.
        """
        loss_mask = batch.inputs.layout.is_token if batch.loss_mask is None else batch.loss_mask
        projection = self.lm_head()
        if projection is None:
            logits = self.logits(batch)
            if r_drop:
                return losses.r_drop_loss(logits, self.logits(batch), batch.labels, loss_mask, smoothing, r_drop)
            return losses.cross_entropy(logits, batch.labels, loss_mask, smoothing)
        hidden = self.features(batch)
        if r_drop:
            hidden = torch.stack([hidden, self.features(batch)])
        elif taps.has_listeners():  # the fused loss never holds all logits: compute them for the listener
            written = taps.offer(self, "logits", taps.Deferred(lambda: F.linear(hidden, *projection)))
            if written is not None:
                return losses.cross_entropy(written, batch.labels, loss_mask, smoothing)
        return self.linear_cross_entropy(hidden, *projection, batch.labels, loss_mask, smoothing, r_drop)

    def logits(self, batch: SeqBatch) -> Tensor:
        """Logits [T, V] for every target token, teacher-forced."""
        return self.project(self.features(batch))

    def features(self, batch: SeqBatch) -> Tensor:
        """[T, D] features before the output projection; zeros for padding, so that no gradient reaches it."""
        raise NotImplementedError  # implemented by each family

    def project(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        raise NotImplementedError  # implemented by each family

    def lm_head(self) -> tuple[Tensor, Tensor | None] | None:
        """W [V, D] and bias [V] if `project(h)` is exactly W h + bias; else None."""
        return None

    def start(self, source: PackedTokens) -> Any:
        """The decoding state before the first target token, with one beam per sentence."""
        raise NotImplementedError  # implemented by each family

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Feed one token per beam, [N, K]; return logits [N, K, V] for the next token, and the new state.

        The caller may overwrite the logits.
        """
        raise NotImplementedError  # implemented by each family

    def static_state(self, state: Any, shape: StaticShape) -> Any:
        """Convert the result of `start` to a `StaticState`."""
        raise NotImplementedError  # implemented by families that have one

    def restart(self, state: Any, source: PackedTokens) -> None:
        """Reuse a static state for other sources of the same padded size."""
        raise NotImplementedError  # implemented by families that can restart

    def logit_lens(self, stream: Tensor, batch: SeqBatch) -> Tensor:
        """Logits from the residual stream at any depth, [..., D] -> [..., V].

        Applies the final norm and the output projection, as after the last layer.
        """
        raise NotImplementedError  # implemented by each family

    def init_from(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Load another run's weights. A family may leave out the head of that run's task."""
        tensor_io.load_into_model(self, tensors, origin)
