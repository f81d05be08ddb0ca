"""Recurrent layers: an LSTM or a GRU over sentences, forwards or backwards, with its gates to be seen and changed.

N sentences of L places in the padded view, B of them at once (N, or N*K beams), I inputs, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import requested_backend
from regard.packed import PackedLayout

States = tuple[Tensor, ...]  # what a cell carries from place to place: (h,) of a GRU, (h, c) of an LSTM, each [B, D]


class RecurrentLayer(nn.Module):
    """One layer in one direction, over sentences in the padded view; padding lies behind them and never matters.

    LSTM: i, f, o = sigmoid(W x + U h), g = tanh(W x + U h), c' = f c + i g, h' = o tanh(c').
    GRU: r, z = sigmoid(W x + U h), n = tanh(W x + r (U h)), h' = (1 - z) n + z h. Each with its own W, U and biases.

    `advance` and `loop` are the definition; PyTorch's fused cell does the work unless the plain kernel is chosen. The
    gates (i, f, o or r, z) are offered at the tap "gates" as [B, L, 3 or 2, D]; those a listener writes are used.
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
        if self.lstm:  # remember until there is a reason to forget (Jozefowicz et al. 2015)
            nn.init.ones_(biases[0][width : 2 * width])

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W, U and the biases of either; in each, i, f, g, o or r, z, n lie below one another."""
        weight, recurrent, bias, recurrent_bias = self.cell.all_weights[0]
        return weight, recurrent, bias, recurrent_bias

    def project(self, x: Tensor) -> Tensor:
        """What the inputs say to the gates, W x + b, for all places at once; x may be the first of the inputs alone.

        An LSTM only ever adds to it what the state says, so the state's bias is in it too.
        """
        weight, _, bias, recurrent_bias = self.weights
        return F.linear(x, weight[:, : x.shape[-1]], bias + recurrent_bias if self.lstm else bias)

    def advance(self, given: Tensor, states: States, gates: Tensor | None = None) -> States:
        """One place: `given` [B, 4D or 3D] is what `project` says; `gates` [B, 3 or 2, D] may come from elsewhere."""
        h, (_, recurrent, _, bias) = states[0], self.weights
        width = h.shape[1]
        if self.lstm:
            both, g, o = torch.addmm(given, h, recurrent.t()).split([2 * width, width, width], 1)
            i, f, o = (*both.sigmoid().chunk(2, 1), o.sigmoid()) if gates is None else gates.unbind(1)
            c = torch.addcmul(f * states[1], i, g.tanh())
            return o * c.tanh(), c
        to_gates, to_new = given.split([2 * width, width], 1)
        from_gates, from_new = F.linear(h, recurrent, bias).split([2 * width, width], 1)
        r, z = (to_gates + from_gates).sigmoid().chunk(2, 1) if gates is None else gates.unbind(1)
        new = torch.addcmul(to_new, r, from_new).tanh()
        return (torch.lerp(new, h.to(new.dtype), z.to(new.dtype)),)

    def loop(self, x: Tensor, states: States, gates: Tensor | None = None) -> tuple[Tensor, States]:
        """The equations, place after place: x [B, L, I] -> outputs [B, L, D] and the states after the last place."""
        outputs = []
        for t, given in enumerate(self.project(x).unbind(1)):
            states = self.advance(given, states, None if gates is None else gates[:, t])
            outputs.append(states[0])
        return torch.stack(outputs, 1), states

    def run(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """`loop`, by the kernel that was chosen."""
        if requested_backend() == "plain":
            return self.loop(x, states)
        first = tuple(s.unsqueeze(0).contiguous() for s in states)
        outputs, last = self.cell(x, first if self.lstm else first[0])
        return outputs, tuple(s.squeeze(0) for s in (last if self.lstm else (last,)))

    def zero_state(self, x: Tensor) -> States:
        """The states before the first place of an encoder: zeros."""
        zeros = x.new_zeros(len(x), self.cell.hidden_size)
        return (zeros, zeros) if self.lstm else (zeros,)

    def forward(self, x: Tensor, states: States, turned: Tensor | None = None) -> tuple[Tensor, States]:
        """x [B, L, I] -> outputs [B, L, D] and the states after place L. With `turned` it reads from end to start."""
        x = x if turned is None else reverse_sentences(x, turned)
        outputs, last = self.run(x, states)
        written = self.offer(x, outputs, states, turned)
        if written is not None:
            outputs, last = self.loop(x, states, written if turned is None else reverse_sentences(written, turned))
        return outputs if turned is None else reverse_sentences(outputs, turned), last

    def offer(self, x: Tensor, outputs: Tensor, states: States, turned: Tensor | None = None) -> Tensor | None:
        """Show the gates of a run; those to use instead, or None."""
        return (
            taps.offer(self, "gates", RecurrentGates(self, x, outputs, states[0], turned))
            if taps.has_listeners()
            else None
        )


@dataclass(frozen=True)
class RecurrentGates:
    """The gates of one run of a recurrence, offered at a tap: computed on demand from its inputs and outputs."""

    owner: RecurrentLayer
    x: Tensor  # as it was read: turned, where it was read from the end
    outputs: Tensor
    first: Tensor  # [B, D] the state before the first place
    turned: Tensor | None = None
    written: Tensor | None = None  # what a listener put in their place

    def replaced(self, value: Tensor) -> RecurrentGates:
        return replace(self, written=value)

    def __call__(self) -> Tensor:
        """[B, L, 3, D] (input, forget, output) or [B, L, 2, D] (reset, update), in the sentence's own order."""
        if self.written is not None:
            return self.written
        _, recurrent, _, bias = self.owner.weights
        earlier = F.linear(shifted_outputs(self.first, self.outputs), recurrent, None if self.owner.lstm else bias)
        gates = (self.owner.project(self.x) + earlier).unflatten(-1, (-1, self.first.shape[-1]))
        gates = gates[:, :, [0, 1, 3] if self.owner.lstm else [0, 1]].sigmoid()
        return gates if self.turned is None else reverse_sentences(gates, self.turned)


def shifted_outputs(first: Tensor, outputs: Tensor) -> Tensor:
    """[B, L, D] the output before each place."""
    return torch.cat([first[:, None].to(outputs.dtype), outputs[:, :-1]], 1)


def reversal_index(rows: PackedLayout) -> Tensor:
    """[N * L] the padded cell that takes each one's place when every sentence is read from its end; padding stays."""
    place = torch.arange(rows.max_len, device=rows.device).expand(len(rows), -1)
    place = torch.where(rows.padded_is_token, rows.length[:, None] - 1 - place, place)
    return (place + torch.arange(len(rows), device=rows.device)[:, None] * rows.max_len).flatten()


def reverse_sentences(padded: Tensor, turned: Tensor) -> Tensor:
    """[N, L, ...] with every sentence from end to start. Twice is as before."""
    return padded.flatten(0, 1).index_select(0, turned).unflatten(0, padded.shape[:2])
