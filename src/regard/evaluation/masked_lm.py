"""How well a model fills in gaps: loss and accuracy at the places that BERT's training would have it guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from regard.data.masking import MaskingPolicy
from regard.data.packing import generator, sentence_batches
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import chunk


@dataclass(frozen=True)
class MaskedLMScore:
    """Mean -log p of what stood in the gaps, in nats, and the percentage that the model's first guess got right."""

    loss: float
    accuracy: float
    gaps: int


def masked_lm_score(
    model: SequenceModel,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    longest: int,
    share: float,
    device: torch.device | str,
    seed: int = 0,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> MaskedLMScore:
    """Make gaps in documents as training does, a `share` of their tokens drawn by `seed`, and have them filled in.

    Documents longer than the model reads are cut into pieces. `batch_tokens` are read at once, which changes nothing;
    `progress` is called with the number of gaps just filled in.
    """
    pieces = [p for ids in tokenizer.encode_batch(list(documents)) for p in chunk(ids, longest - 2)]
    read, clean, gaps = _with_gaps(tokenizer, [[BOS, *piece, EOS] for piece in pieces], share, seed)
    loss, right, total = 0.0, 0, 0
    with torch.no_grad():
        for group in sentence_batches([len(piece) for piece in read], batch_tokens):
            row = PackedTokens.from_lists([read[i] for i in group])
            labels, counted = (torch.tensor([x for i in group for x in side[i]]) for side in (clean, gaps))
            batch = SeqBatch(row, row, labels, counted).to(device)
            logits, answers = model.logits(batch)[batch.loss_mask].float(), batch.labels[batch.loss_mask]
            loss += functional.cross_entropy(logits, answers, reduction="sum").item()
            right += int((logits.argmax(-1) == answers).sum())
            total += len(answers)
            if progress is not None:
                progress(len(answers))
    if not total:
        raise UserError("no text to score")
    return MaskedLMScore(loss / total, 100 * right / total, total)


def _with_gaps(tokenizer: Tokenizer, texts: list[list[int]], share: float, seed: int) -> tuple[list[list[int]], ...]:
    """What is read of each text, what stood there, and where the gaps are: all texts at once, whatever the batches."""
    row = PackedTokens.from_lists(texts)
    made = MaskingPolicy.of(tokenizer, share).mask(SeqBatch(row, row, row.ids), generator(seed))
    assert made.loss_mask is not None
    return tuple([part.tolist() for part in row.layout.split(x)] for x in (made.inputs.ids, row.ids, made.loss_mask))
