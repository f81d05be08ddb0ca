"""Cross-attention weights of one forward pass. L layers, N sentences, H heads, T target tokens, S source tokens."""

from __future__ import annotations

import numpy as np
import torch

from regard.errors import UserError
from regard.interpret.recorder import Recorder
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.runs import LoadedRun
from regard.tasks.translator import Answer
from regard.text import BOS, EOS


class NoAttention(UserError):
    """The model has no cross-attention."""


def cross_attention(model: SequenceModel, batch: SeqBatch) -> np.ndarray:
    """Run a teacher-forced pass and return the weights of every cross-attention: [L, N, H, T, S], padded."""
    with torch.inference_mode(), Recorder(model) as seen:
        model.logits(batch)
        layers = [attended.offered() for name, attended in seen.attention.items() if name.endswith("cross_attn")]
    if not layers:
        raise NoAttention("this model does not attend to its source: there are no weights to show or to align words by")
    weights: np.ndarray = torch.stack(layers).float().cpu().numpy()
    return weights


def answer_attention(loaded: LoadedRun, answer: Answer) -> np.ndarray:
    """Compute the cross-attention of an answer's best hypothesis: [L, H, T, S]."""
    loaded.require_single()
    best = answer.hypotheses[0]
    tokens = [*best.tokens, EOS] if best.finished else list(best.tokens)
    batch = SeqBatch.from_lists([list(answer.source)], [tokens], bos=BOS).to(loaded.device)
    return cross_attention(loaded.module, batch)[:, 0]
