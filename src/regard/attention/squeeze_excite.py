"""Squeeze-and-excitation: a gate between 0 and 1 per feature. Unlike attention weights, gates need not sum to 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.packed import PackedLayout


class SqueezeExcite(nn.Module):
    """x * sigmoid(W_2 relu(W_1 mean(x))), with the mean over each sentence (Hu, Shen and Sun 2018).

    A gate depends on the whole sentence, so it is for encoders, not for decoders.
    """

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, squeezed)
        self.excite = nn.Linear(squeezed, width)
        nn.init.zeros_(self.excite.weight)  # gates do not depend on the input at first

    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """x [T, D] -> [T, D]; zeros for padding."""
        mean = layout.mean(x)  # [N, D]
        gate = taps.tap(self, "gate", torch.sigmoid(self.excite(F.relu(self.squeeze(mean)))))  # [N, D]
        return x.where(layout.is_token[:, None], 0.0) * F.pad(gate, (0, 0, 0, 1))[layout.segment_ids]
