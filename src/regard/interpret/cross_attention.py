"""Cross-attention weights of an answer. L layers, H heads, T target tokens, S source tokens."""

from __future__ import annotations

import numpy as np

from regard.packed import SeqBatch
from regard.runs import LoadedRun
from regard.tasks.aligner import cross_attention
from regard.tasks.translator import Answer
from regard.text import BOS, EOS


def answer_attention(loaded: LoadedRun, answer: Answer) -> np.ndarray:
    """Compute the cross-attention of an answer's best hypothesis: [L, H, T, S]."""
    loaded.require_single()
    best = answer.hypotheses[0]
    tokens = [*best.tokens, EOS] if best.finished else list(best.tokens)
    batch = SeqBatch.from_lists([list(answer.source)], [tokens], bos=BOS).to(loaded.device)
    weights: np.ndarray = cross_attention(loaded.module, batch)[:, 0].cpu().numpy()
    return weights
