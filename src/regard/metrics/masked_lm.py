"""Loss and accuracy of a masked language model on the tokens that BERT's training would mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from regard.data.masking import MaskingPolicy
from regard.data.packing import sentence_batches
from regard.data.stream import generator
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import chunk


@dataclass(frozen=True)
class MaskedLMScore:
    """Mean -log p of the masked tokens, in nats, and the percentage that the model's first guess got right."""

    loss: float
    accuracy: float
    masks: int


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
    """Mask a `share` of the tokens of documents, drawn by `seed` as in training, and score the model's guesses.

    Documents longer than the model reads are cut into chunks. `batch_tokens` changes speed, not results; `progress` is
    called with the number of masks just scored.
    """
    texts = [part for ids in tokenizer.encode_batch(list(documents)) for part in chunk(ids, longest - 2)]
    masked, clean, masks = _masked(tokenizer, [[BOS, *text, EOS] for text in texts], share, seed)
    loss, right, total = 0.0, 0, 0
    with torch.no_grad():
        for group in sentence_batches([len(text) for text in masked], batch_tokens):
            inputs = PackedTokens.from_lists([masked[i] for i in group])
            labels, loss_mask = (torch.tensor([x for i in group for x in side[i]]) for side in (clean, masks))
            batch = SeqBatch(inputs, inputs, labels, loss_mask).to(device)
            batch_loss, batch_right = score_masks(model, batch)
            loss += batch_loss
            right += batch_right
            total += batch.num_targets
            if progress is not None:
                progress(batch.num_targets)
    if not total:
        raise UserError("no text to score")
    return MaskedLMScore(loss / total, 100 * right / total, total)


def score_masks(model: SequenceModel, batch: SeqBatch) -> tuple[float, int]:
    """The summed loss of a batch's masked tokens, and how many the model's first guess gets right."""
    logits, labels = model.logits(batch)[batch.loss_mask].float(), batch.labels[batch.loss_mask]
    loss = functional.cross_entropy(logits, labels, reduction="sum").item()
    return loss, int((logits.argmax(-1) == labels).sum())


def _masked(tokenizer: Tokenizer, texts: list[list[int]], share: float, seed: int) -> tuple[list[list[int]], ...]:
    """The masked tokens, the clean tokens and the masks of each text, all drawn at once: batches do not matter."""
    clean = PackedTokens.from_lists(texts)
    batch = MaskingPolicy.of(tokenizer, share).mask(SeqBatch(clean, clean, clean.ids), generator(seed))
    assert batch.loss_mask is not None
    return tuple(
        [part.tolist() for part in clean.layout.split(x)] for x in (batch.inputs.ids, clean.ids, batch.loss_mask)
    )
