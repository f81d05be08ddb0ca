"""Whether two models are one: ours and transformers' on the same random inputs, logit by logit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.formats.folders import Folder
from regard.formats.tables import inverse
from regard.formats.vocabularies import ids_of
from regard.models import Translator
from regard.models.bert import Bert
from regard.recipes.schema import BertSettings, GPTSettings
from regard.rows import PairBatch, TokenRow
from regard.runs import Run
from regard.text import BEGIN, END, Tokenizer

BOUND = 1e-4  # more than that is not rounding
LENGTHS = (1, 2, 7, 20, 60)  # of the random texts, in tokens; one that does not fit the model is cut


def largest_difference(run: Run, folder: str | Path, seed: int = 0) -> float:
    """The largest difference of a logit between a run and a Hugging Face directory, in float32 on the CPU."""
    theirs, ours = _load(Path(folder)), run.model("cpu")
    draw = random.Random(seed)
    with torch.inference_mode():
        pairs = _pairs(run, ours, theirs, draw)
        return max(float((one - other).abs().max()) for one, other in pairs)


def checked(run: Run, folder: str | Path) -> float:
    """The largest difference, which has to be rounding."""
    found = largest_difference(run, folder)
    if not found <= BOUND:
        raise UserError(f"the logits of {run.path} and {folder} differ by up to {found:.2g}, more than {BOUND:.0e}")
    return found


def _load(path: Path) -> Any:
    """Their model, by the class that config.json names."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    try:
        import transformers
    except ImportError:
        raise UserError("--check needs transformers: pip install 'regard[formats]'") from None
    (architecture,) = Folder(path).setting("architectures") or [""]
    if not architecture:
        raise UserError(
            f"{path / 'config.json'} names no architectures, so --check cannot tell which model to compare with"
        )
    kind = {"GPT2Model": "GPT2LMHeadModel", "BertForPreTraining": "BertForMaskedLM"}.get(architecture, architecture)
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, kind).from_pretrained(path, use_safetensors=True, local_files_only=True)
    return model.float().eval()


def _pairs(run: Run, ours: Translator, theirs: Any, draw: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of theirs and of ours, [T, V'] in the order of their ids, for a few random texts."""
    settings = run.recipe.model
    source, target = run.tokenizers
    for length in LENGTHS:
        text = _random(source, min(length, settings.max_positions - 2), draw)
        if isinstance(settings, BertSettings):
            row = TokenRow.of([[BEGIN, *text, END]])
            if isinstance(ours, Bert) and type(theirs).__name__ == "BertModel":  # without a head: what would go into it
                yield theirs(input_ids=_theirs(row, source)).last_hidden_state[0], ours.encode(row)
                continue
            inputs = row if settings.task == "fill" else TokenRow.of([[BEGIN]])
            found = ours(PairBatch(row, inputs, inputs.ids))
            columns = inverse(ids_of(source)) if settings.task == "fill" else range(target.first, len(target))
            other = theirs(input_ids=_theirs(row, source)).logits
        elif isinstance(settings, GPTSettings):
            row = TokenRow.of([text])
            found = ours(PairBatch(TokenRow.of([[]]), row, row.ids))
            columns = inverse(ids_of(target))
            other = theirs(input_ids=_theirs(row, target)).logits
        else:
            answer = _random(target, min(length + 3, settings.max_positions - 2), draw)
            batch = PairBatch.of([[*text, END]], [[*answer, END]], begin=BEGIN)
            found = ours(batch)
            columns = inverse(ids_of(target))
            read, fed = _theirs(batch.source, source), _theirs(batch.inputs, target)
            other = theirs(input_ids=read, decoder_input_ids=fed).logits
        yield other.flatten(0, -2), found[:, torch.tensor(list(columns))]


def _random(tokenizer: Tokenizer, length: int, draw: random.Random) -> list[int]:
    """Random pieces that both models have."""
    known: Sequence[int] = [ours for ours in range(tokenizer.first, len(tokenizer)) if ids_of(tokenizer)[ours] >= 0]
    return draw.choices(known, k=max(1, length))


def _theirs(row: TokenRow, tokenizer: Tokenizer) -> Tensor:
    return torch.tensor([[ids_of(tokenizer)[token] for token in row.ids.tolist()]])
