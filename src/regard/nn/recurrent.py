"""Recurrent layers: an LSTM or a GRU over sentences, forward or backward, whose gates can be recorded and replaced.

Shapes: N sentences of L positions in the padded view, B sequences (N, or N * K beams), I inputs, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import requested_backend
from regard.packed import PackedLayout

States = tuple[Tensor, ...]  # the state of a cell: (h,) of a GRU, (h, c) of an LSTM, [B, D] each


class RecurrentLayer(nn.Module):
    """One layer in one direction, over sentences in the padded view; padding comes last and affects no token.

    LSTM: i, f, o = sigmoid(W x + U h), g = tanh(W x + U h), c' = f c + i g, h' = o tanh(c').
    GRU: r, z = sigmoid(W x + U h), n = tanh(W x + r (U h)), h' = (1 - z) n + z h. Each with its own W, U and biases.

    `advance` and `loop` are the definition; PyTorch's fused cell is used unless the plain backend is requested. The
    gates (i, f, o or r, z) are offered at the tap "gates" as [B, L, 3 or 2, D], where a listener may replace them.
    """

    def __init__(self, cell: str, inputs: int, width: int) -> None:
        super().__init__()
        self.lstm = cell == "lstm"
        self.cell: nn.RNNBase = (nn.LSTM if self.lstm else nn.GRU)(inputs, width, batch_first=True)
        weight, recurrent, *biases = self.weights
        for matrix in weight.split(width):
            nn.init.xavier_uniform_(matrix)
        for matrix in recurrent.split(width):
            nn.init.orthogonal_(matrix)
        for bias in biases:
            nn.init.zeros_(bias)
        if self.lstm:  # a forget gate that starts open (Jozefowicz et al. 2015)
            nn.init.ones_(biases[0][width : 2 * width])

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W [4D or 3D, I], U [4D or 3D, D] and their biases, each stacked in the order i, f, g, o or r, z, n."""
        weight, recurrent, bias, recurrent_bias = self.cell.all_weights[0]
        return weight, recurrent, bias, recurrent_bias

    def project(self, x: Tensor) -> Tensor:
        """W x + b for all positions at once, [B, L, I] -> [B, L, 4D or 3D]; x may hold the first of the inputs only.

        In an LSTM, U h is only ever added to it, so it includes the bias of U h.
        """
        weight, _, bias, recurrent_bias = self.weights
        return F.linear(x, weight[:, : x.shape[-1]], bias + recurrent_bias if self.lstm else bias)

    def advance(self, projected: Tensor, states: States, gates: Tensor | None = None) -> States:
        """One step: `projected` [B, 4D or 3D] is from `project`; `gates` [B, 3 or 2, D] replace the computed ones."""
        h, (_, recurrent, _, bias) = states[0], self.weights
        width = h.shape[1]
        if self.lstm:
            both, g, o = torch.addmm(projected, h, recurrent.t()).split([2 * width, width, width], 1)
            i, f, o = (*both.sigmoid().chunk(2, 1), o.sigmoid()) if gates is None else gates.unbind(1)
            c = torch.addcmul(f * states[1], i, g.tanh())
            return o * c.tanh(), c
        to_gates, to_new = projected.split([2 * width, width], 1)
        from_gates, from_new = F.linear(h, recurrent, bias).split([2 * width, width], 1)
        r, z = (to_gates + from_gates).sigmoid().chunk(2, 1) if gates is None else gates.unbind(1)
        new = torch.addcmul(to_new, r, from_new).tanh()
        return (torch.lerp(new, h.to(new.dtype), z.to(new.dtype)),)

    def loop(self, x: Tensor, states: States, gates: Tensor | None = None) -> tuple[Tensor, States]:
        """Step by step: x [B, L, I] -> outputs [B, L, D] and the last states."""
        outputs = []
        for t, projected in enumerate(self.project(x).unbind(1)):
            states = self.advance(projected, states, None if gates is None else gates[:, t])
            outputs.append(states[0])
        return torch.stack(outputs, 1), states

    def run(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """`loop`, by PyTorch's fused cell unless the plain backend is requested."""
        if requested_backend() == "plain":
            return self.loop(x, states)
        first = tuple(s.unsqueeze(0).contiguous() for s in states)
        outputs, last = self.cell(x, first if self.lstm else first[0])
        return outputs, tuple(s.squeeze(0) for s in (last if self.lstm else (last,)))

    def zero_state(self, x: Tensor) -> States:
        """The initial states of an encoder: zeros."""
        zeros = x.new_zeros(len(x), self.cell.hidden_size)
        return (zeros, zeros) if self.lstm else (zeros,)

    def forward(self, x: Tensor, states: States, reversal: Tensor | None = None) -> tuple[Tensor, States]:
        """x [B, L, I] -> outputs [B, L, D] and the last states; with a `reversal_index`, from end to start."""
        x = x if reversal is None else reverse_sentences(x, reversal)
        outputs, last = self.run(x, states)
        gates = self.offer(x, outputs, states, reversal)
        if gates is not None:
            outputs, last = self.loop(x, states, gates if reversal is None else reverse_sentences(gates, reversal))
        return outputs if reversal is None else reverse_sentences(outputs, reversal), last

    def offer(self, x: Tensor, outputs: Tensor, states: States, reversal: Tensor | None = None) -> Tensor | None:
        """Offer the gates at their tap; return their replacement, or None."""
        if not taps.has_listeners():
            return None
        return taps.offer(self, "gates", RecurrentGates(self, x, outputs, states[0], reversal))


@dataclass(frozen=True)
class RecurrentGates:
    """The gates of a recurrent layer, offered at a tap: computed on demand from its inputs and outputs."""

    owner: RecurrentLayer
    x: Tensor  # [B, L, I], reversed if the layer runs backward
    outputs: Tensor  # [B, L, D], likewise
    first: Tensor  # [B, D] the initial state
    reversal: Tensor | None = None
    override: Tensor | None = None  # replacement by a listener

    def replaced(self, value: Tensor) -> RecurrentGates:
        return replace(self, override=value)

    def __call__(self) -> Tensor:
        """[B, L, 3, D] (input, forget, output) or [B, L, 2, D] (reset, update), in the order of the sentence."""
        if self.override is not None:
            return self.override
        _, recurrent, _, bias = self.owner.weights
        earlier = F.linear(shifted_outputs(self.first, self.outputs), recurrent, None if self.owner.lstm else bias)
        gates = (self.owner.project(self.x) + earlier).unflatten(-1, (-1, self.first.shape[-1]))
        gates = gates[:, :, [0, 1, 3] if self.owner.lstm else [0, 1]].sigmoid()
        return gates if self.reversal is None else reverse_sentences(gates, self.reversal)


def shifted_outputs(first: Tensor, outputs: Tensor) -> Tensor:
    """The state before each step: initial state [B, D] and outputs [B, L, D] -> [B, L, D]."""
    return torch.cat([first[:, None].to(outputs.dtype), outputs[:, :-1]], 1)


def reversal_index(layout: PackedLayout) -> Tensor:
    """[N * L] indices into the padded view that reverse every sentence; padding stays in place."""
    position = torch.arange(layout.max_len, device=layout.device).expand(len(layout), -1)
    position = torch.where(layout.padded_is_token, layout.length[:, None] - 1 - position, position)
    return (position + torch.arange(len(layout), device=layout.device)[:, None] * layout.max_len).flatten()


def reverse_sentences(padded: Tensor, reversal: Tensor) -> Tensor:
    """Reverse every sentence of [N, L, ...] by its `reversal_index`; twice is the identity."""
    return padded.flatten(0, 1).index_select(0, reversal).unflatten(0, padded.shape[:2])
