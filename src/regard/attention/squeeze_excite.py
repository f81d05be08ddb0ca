"""Gates: numbers between 0 and 1 that say how much of something passes. Unlike attention's, they need not sum to 1.

LSTM and GRU cells have theirs in `regard.nn.recurrent`; a gated feed-forward layer in `regard.nn.blocks`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import taps
from regard.packed import PackedLayout


class SqueezeExcite(nn.Module):
    """A gate over channels (Hu, Shen and Sun 2018): x * sigmoid(W_2 relu(W_1 mean(x))), the mean over a sentence.

    It sees the whole sentence, so it is for what reads and not for what writes.
    """

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, squeezed)
        self.excite = nn.Linear(squeezed, width)
        nn.init.zeros_(self.excite.weight)  # every gate starts half open, and stands still for a moment

    def forward(self, x: Tensor, rows: PackedLayout) -> Tensor:
        """x [T, D] of sentences as `rows` says -> [T, D]; fill comes out as zeros."""
        gate = taps.tap(self, "gate", torch.sigmoid(self.excite(F.relu(self.squeeze(rows.mean(x))))))
        return x.where(rows.is_token[:, None], 0.0) * F.pad(gate, (0, 0, 0, 1))[rows.segment_ids]
