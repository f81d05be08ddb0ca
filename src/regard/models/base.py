"""The interface of all model families: loss, logits, decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps, tensor_io
from regard.models.decoder_state import StaticShape
from regard.nn import linear_cross_entropy, losses
from regard.nn.r_drop import r_drop_loss
from regard.recipes.schema import SizedSettings


class LinearFn(Protocol):
    """A linear layer as a function: x [..., I], weight [O, I] and bias [O] -> [..., O]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


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
    linear_cross_entropy = staticmethod(linear_cross_entropy.linear_cross_entropy)

    def forward(self, batch: Any, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss: label-smoothed cross-entropy, summed over the targets that count, in float32.

        If the labels are numbers instead of ids, it is the squared error. Cross-entropy is
        (1 - e) · -log p(label) + e · mean over the vocabulary of -log p, as F.cross_entropy defines it. With `r_drop`,
        the batch is passed through the model twice (`nn.r_drop`). The loss is what `forward` returns, so that
        wrappers which synchronise gradients see the whole pass; it is a sum, since only the trainer knows how many
        targets all processes have together.
        """
        if self.lm_head() is not None:
            return self.token_loss(lambda: self.features(batch), batch, smoothing, r_drop)
        loss_mask, logits = batch.target_mask, self.logits(batch)
        if batch.labels.is_floating_point():
            return losses.squared_error(logits, batch.labels, loss_mask)
        if r_drop:
            return r_drop_loss(logits, self.logits(batch), batch.labels, loss_mask, smoothing, r_drop)
        return losses.cross_entropy(logits, batch.labels, loss_mask, smoothing)

    def token_loss(
        self, features: Callable[[], Tensor], batch: Any, smoothing: float = 0.0, r_drop: float = 0.0
    ) -> Tensor:
        """The loss of the features [T, D] of a pass, which `features` makes, for a family with an `lm_head`."""
        projection, loss_mask = self.lm_head(), batch.target_mask
        assert projection is not None
        hidden = features()
        if r_drop:
            hidden = torch.stack([hidden, features()])
        elif taps.has_listeners():  # the fused loss never holds all logits: compute them for the listener
            written = taps.offer(self, "logits", taps.Deferred(lambda: F.linear(hidden, *projection)))
            if written is not None:
                return losses.cross_entropy(written, batch.labels, loss_mask, smoothing)
        return self.linear_cross_entropy(hidden, *projection, batch.labels, loss_mask, smoothing, r_drop)

    def logits(self, batch: Any) -> Tensor:
        """Logits [T, V] for every target token, teacher-forced; or [N, C] for the class of each input."""
        return self.project(self.features(batch))

    def features(self, batch: Any) -> Tensor:
        """[T, D] features before the output projection; zeros for padding, so that no gradient reaches it."""
        raise NotImplementedError  # implemented by each family

    def project(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        raise NotImplementedError  # implemented by each family

    def lm_head(self) -> tuple[Tensor, Tensor | None] | None:
        """W [V, D] and bias [V] if `project(h)` is exactly W h + bias; else None."""
        return None

    def start(self, source: Any) -> Any:
        """The decoding state before the first target token, with one beam per sentence.

        `source` is what the family reads: `PackedTokens` or `PackedFeatures`.
        """
        raise NotImplementedError  # implemented by each family

    def step(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Feed one token per beam, [N, K]; return logits [N, K, V] for the next token, and the new state.

        The caller may overwrite the logits.
        """
        raise NotImplementedError  # implemented by each family

    def static_state(self, state: Any, shape: StaticShape) -> Any:
        """Convert the result of `start` to a `StaticState`."""
        raise NotImplementedError  # implemented by families that have one

    def restart(self, state: Any, source: Any) -> None:
        """Reuse a static state for other sources of the same padded size."""
        raise NotImplementedError  # implemented by families that can restart

    def logit_lens(self, stream: Tensor, batch: Any) -> Tensor:
        """Logits from the residual stream at any depth, [..., D] -> [..., V].

        Applies the final norm and the output projection, as after the last layer.
        """
        raise NotImplementedError  # implemented by each family

    @staticmethod
    def body(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights without those of a task's head."""
        return dict(tensors)

    def init_from(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Load another run's weights. A family may leave out the head of that run's task."""
        tensor_io.load_into_model(self, tensors, origin)
