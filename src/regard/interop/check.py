"""Whether two models are one: ours and transformers' on the same random tokens and texts, logit by logit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError, first_line
from regard.interop.common import architecture
from regard.interop.hf_folder import HFFolder, shown
from regard.interop.name_map import inverse
from regard.interop.vocabularies import ids_of
from regard.models import SequenceModel
from regard.models.bert import Bert
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import BertSettings, GPTSettings
from regard.run_dir import RunDir
from regard.text import BOS, EOS, Tokenizer

BOUND = 1e-4  # more than that is not rounding
LENGTHS = (1, 2, 7, 20, 60)  # of the random texts, in tokens; one that does not fit the model is cut


def largest_difference(run: RunDir, folder: str | Path, seed: int = 0) -> float:
    """The largest difference of a logit between a run and a Hugging Face directory, in float32 on the CPU.

    Both read random tokens, and random texts: these go through the folder's tokenizer, and all that it returns goes
    into the model, as when it is called by hand.
    """
    ours, (theirs, tokenizer) = run.model("cpu"), _load(Path(folder))
    draw = random.Random(seed)
    with torch.inference_mode():
        return max(
            float((one - other).abs().max())
            for tokens, inputs in _inputs(run, tokenizer, draw)
            for one, other in [_logits(run, ours, theirs, tokens, inputs, draw)]
        )


def checked(run: RunDir, folder: str | Path) -> float:
    """The largest difference, which has to be rounding."""
    found = largest_difference(run, folder)
    if not found <= BOUND:
        raise UserError(f"the logits of {run.path} and {folder} differ by up to {found:.2g}, more than {BOUND:.0e}")
    return found


def _load(path: Path) -> tuple[Any, Any]:
    """Their model, by the class that config.json names, and their tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    try:
        import transformers
    except ImportError:
        raise UserError("--check needs transformers: pip install 'regard[formats]'") from None
    folder = HFFolder(path)
    named, model_type = architecture(folder), folder.setting("model_type")
    if named is None:
        raise UserError(
            f"{path / 'config.json'} names no architectures, so --check cannot tell which model to compare with"
        )
    kind = {"GPT2Model": "GPT2LMHeadModel", "BertForPreTraining": "BertForMaskedLM"}.get(named, named)
    config = getattr(getattr(transformers, kind, None), "config_class", None)
    if getattr(config, "model_type", None) != model_type:
        raise folder.config.fault("architectures", f"names {shown(named)}, which is no class for this model_type")
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        # float32 from the start: positions that are computed in half precision stay rounded
        model = getattr(transformers, kind).from_pretrained(
            path, use_safetensors=True, local_files_only=True, torch_dtype=torch.float32
        )
    except Exception as error:  # whatever theirs raise
        raise UserError(f"transformers could not load {path}: {first_line(error)}") from error
    return model.eval(), tokenizer


def _inputs(run: RunDir, theirs: Any, draw: random.Random) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Our ids and what their model is called with, for random tokens and for random texts."""
    settings, (source, _) = run.recipe.model, run.tokenizers
    front, back = _around(run)
    for length in LENGTHS:
        tokens = _random(source, min(length, settings.max_positions - 2), draw)
        ids = [*front, *tokens, *back]
        yield ids, {"input_ids": torch.tensor([_theirs(ids, source)])}
        text = source.decode(tokens)
        ids = [*front, *source.encode(text), *back]
        inputs = dict(theirs(text, return_tensors="pt"))
        if inputs["input_ids"][0].tolist() != _theirs(ids, source):
            raise UserError(f"the tokenizers of {run.path} and of the folder cut {text!r} into different tokens")
        if 0 < len(ids) <= settings.max_positions:  # a text may be cut into more tokens than it was made of
            yield ids, inputs


def _around(run: RunDir) -> tuple[list[int], list[int]]:
    """The special tokens in front of a text and after it."""
    settings = run.recipe.model
    if isinstance(settings, BertSettings):
        return [BOS], [EOS]
    if isinstance(settings, GPTSettings):
        return [] if run.recipe.data.documents == "stream" else [BOS], []
    return [], [EOS]


def _logits(
    run: RunDir, ours: SequenceModel, theirs: Any, tokens: list[int], inputs: dict[str, Tensor], draw: random.Random
) -> tuple[Tensor, Tensor]:
    """Logits of theirs and of ours, [T, V'] in the order of their ids."""
    settings, (_, target) = run.recipe.model, run.tokenizers
    row = PackedTokens.from_lists([tokens])
    columns: Sequence[int] = inverse(ids_of(target))
    if isinstance(settings, BertSettings):
        if isinstance(ours, Bert) and type(theirs).__name__ == "BertModel":  # without a head: what would go into it
            return theirs(**inputs).last_hidden_state[0], ours.encode(row)
        fed = row if settings.task == "fill" else PackedTokens.from_lists([[BOS]])
        found = ours.logits(SeqBatch(row, fed, fed.ids))
        if settings.task == "classify":
            columns = range(target.first, len(target))
    elif isinstance(settings, GPTSettings):
        found = ours.logits(SeqBatch(PackedTokens.from_lists([[]]), row, row.ids))
    else:
        answer = _random(target, min(len(tokens) + 2, settings.max_positions - 2), draw)
        batch = SeqBatch.from_lists([tokens], [[*answer, EOS]], bos=BOS)
        found = ours.logits(batch)
        inputs = {**inputs, "decoder_input_ids": torch.tensor([_theirs(batch.inputs.ids.tolist(), target)])}
    return theirs(**inputs).logits.flatten(0, -2), found[:, torch.tensor(list(columns))]


def _random(tokenizer: Tokenizer, length: int, draw: random.Random) -> list[int]:
    """Random pieces that both models have."""
    known: Sequence[int] = [ours for ours in range(tokenizer.first, len(tokenizer)) if ids_of(tokenizer)[ours] >= 0]
    return draw.choices(known, k=max(1, length))


def _theirs(tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [ids_of(tokenizer)[token] for token in tokens]
