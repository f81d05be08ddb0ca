"""Compare the logits of a run with those of transformers on the same random tokens and texts, images or sounds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import tasks
from regard.errors import UserError, first_line
from regard.interop.common import architecture
from regard.interop.hf_folder import HFFolder, short_repr
from regard.interop.name_map import inverse
from regard.interop.vocabularies import ids_of
from regard.models import SequenceModel
from regard.models.bert import Bert, BertSettings, TextClassBatch
from regard.models.gpt import GPTSettings
from regard.models.speech import SpeechModel
from regard.models.vit import ImageBatch, ViT
from regard.packed import FeatureBatch, PackedTokens, SeqBatch
from regard.run_dir import RunDir
from regard.tasks.image_classification import ImageClassificationTask
from regard.tasks.speech import SpeechTask
from regard.text import BOS, EOS, Tokenizer

TOLERANCE = 1e-4  # larger differences are not rounding errors
FEATURE_TOLERANCE = 1e-3  # for features of sound; NumPy and PyTorch differ by up to 3e-5
SOUNDS = (0.1, 0.6, 1.0)  # lengths of random sounds, as shares of what the model reads
LENGTHS = (1, 2, 7, 20, 60)  # lengths of the random texts in tokens; truncated to what the model can read


def largest_difference(run: RunDir, folder: str | Path, seed: int = 0) -> float:
    """The largest absolute difference of the logits of a run and a Hugging Face directory, in float32 on the CPU.

    Both read random tokens and random texts, or random images, or random sounds. Texts are encoded by the folder's
    tokenizer, images scaled by its image processor, sounds become features by its feature extractor, and everything it
    returns is passed to their model.
    """
    return max(float((theirs - ours).abs().max()) for theirs, ours in logit_pairs(run, Path(folder), seed))


@torch.inference_mode()
def logit_pairs(run: RunDir, folder: Path, seed: int = 0, count: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    """Their logits and ours of the same inputs, `count` of images; of a model without a head, hidden states."""
    ours, (theirs, reader), draw = run.model("cpu"), _load(folder), random.Random(seed)
    if isinstance(ours, ViT):
        yield from _image_logits(run, ours, theirs, reader, seed, count)
        return
    if isinstance(ours, SpeechModel):
        yield from _speech_logits(run, ours, theirs, reader, seed)
        return
    for tokens, inputs in _inputs(run, reader, draw):
        yield _logits(run, ours, theirs, tokens, inputs, draw)


def checked(run: RunDir, folder: str | Path) -> float:
    """Return the largest difference; raise an error if it is more than rounding."""
    difference = largest_difference(run, folder)
    if not difference <= TOLERANCE:
        raise UserError(
            f"the logits of {run.path} and {folder} differ by up to {difference:.2g}, more than {TOLERANCE:.0e}"
        )
    return difference


def _load(path: Path) -> tuple[Any, Any]:
    """Load their model, of the class named in config.json, and their tokenizer or image processor."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
    try:
        import transformers
    except ImportError:
        raise UserError("--check needs transformers: pip install 'regard[formats]'") from None
    folder = HFFolder(path)
    name, model_type = architecture(folder), folder.setting("model_type")
    if name is None:
        raise UserError(
            f"{path / 'config.json'} names no architectures, so --check cannot tell which model to compare with"
        )
    kind = {"GPT2Model": "GPT2LMHeadModel", "BertForPreTraining": "BertForMaskedLM"}.get(name, name)
    config = getattr(getattr(transformers, kind, None), "config_class", None)
    if getattr(config, "model_type", None) != model_type:
        raise folder.config.error("architectures", f"names {short_repr(name)}, not a class for this model_type")
    transformers.utils.logging.disable_progress_bar()
    try:
        if model_type == "vit":  # with Pillow: torchvision scales images otherwise
            pillow = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
            reader = transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True, **pillow)
        elif model_type == "whisper":
            kinds = transformers.AutoFeatureExtractor, transformers.AutoTokenizer
            reader = tuple(kind.from_pretrained(path, local_files_only=True) for kind in kinds)
        else:
            reader = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        # In float32 from the start: position tables computed in half precision would stay rounded.
        model = getattr(transformers, kind).from_pretrained(
            path, use_safetensors=True, local_files_only=True, torch_dtype=torch.float32, attn_implementation="eager"
        )
    except Exception as error:  # transformers raises many types
        raise UserError(f"transformers could not load {path}: {first_line(error)}") from error
    return model.eval(), reader


def _image_logits(
    run: RunDir, ours: ViT, theirs: Any, processor: Any, seed: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Their logits and ours of random images of several sizes."""
    task, random = tasks.of(run.recipe), np.random.default_rng(seed)
    assert isinstance(task, ImageClassificationTask)
    side, channels = task.shape.side, task.shape.channels
    sizes = (side, side), (2 * side + 1, 3 * side), (side // 2 + 3, side + 5)
    for height, width in islice(cycle(sizes), count):
        image = random.integers(0, 256, (height, width, channels)).astype(np.uint8)
        found = _call(theirs, processor(image, return_tensors="pt", input_data_format="channels_last"))
        (batch,) = (some.batch for some in task.batches(run, [task.shape.of_array(image)]))
        assert isinstance(batch, ImageBatch)
        if not hasattr(found, "logits"):  # it has no head
            yield found.last_hidden_state[0], ours.encode(batch.images)
        else:
            yield found.logits, ours.logits(batch)


def _speech_logits(
    run: RunDir, ours: SpeechModel, theirs: Any, reader: tuple[Any, Any], seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Their logits and ours of random texts that are said to be in random sounds of several lengths."""
    task, (extractor, tokenizer), target = tasks.of(run.recipe), reader, run.tokenizers[1]
    assert isinstance(task, SpeechTask)
    draw, noise, columns = random.Random(seed), np.random.default_rng(seed), torch.tensor(inverse(ids_of(target)))
    start = theirs.config.decoder_start_token_id
    for share, length in zip(SOUNDS, LENGTHS[2:], strict=True):
        size = round(share * task.longest * task.settings.sample_rate)
        sound = noise.standard_normal(size).astype(np.float32) * np.sin(np.linspace(0, 20, size, dtype=np.float32))
        features = task.features(0.1 * sound)
        inputs = extractor(0.1 * sound, sampling_rate=task.settings.sample_rate, return_tensors="pt")
        if not np.abs(inputs["input_features"][0].T.numpy() - features).max() <= FEATURE_TOLERANCE:
            raise UserError(f"the features of {run.path} and those of the folder's feature extractor differ")
        tokens = _random(target, min(length, task.settings.max_positions - 1), draw)
        text = target.decode(tokens)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != _theirs(target.encode(text), target):
            raise UserError(f"the tokenizers of {run.path} and of the folder split {text!r} into different tokens")
        batch = FeatureBatch.from_lists([features], [[*tokens, EOS]], bos=BOS)
        written = torch.tensor([[start, *_theirs(tokens, target)]])
        found = _call(theirs, {**inputs, "decoder_input_ids": written}).logits[0]
        yield found[:, : len(columns)], ours.logits(batch)[:, columns]


def _inputs(run: RunDir, theirs: Any, draw: random.Random) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Our ids and the inputs of their model, for random tokens and for random texts."""
    settings, (source, _) = run.recipe.model, run.tokenizers
    prefix, suffix = _template(run)
    for length in LENGTHS:
        tokens = _random(source, min(length, settings.max_positions - 2), draw)
        ids = [*prefix, *tokens, *suffix]
        yield ids, {"input_ids": torch.tensor([_theirs(ids, source)])}
        text = source.decode(tokens)
        ids = [*prefix, *source.encode(text), *suffix]
        inputs = dict(theirs(text, return_tensors="pt"))
        if inputs["input_ids"][0].tolist() != _theirs(ids, source):
            raise UserError(f"the tokenizers of {run.path} and of the folder split {text!r} into different tokens")
        if 0 < len(ids) <= settings.max_positions:  # a text may be encoded as more tokens than it was decoded from
            yield ids, inputs


def _template(run: RunDir) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    settings = run.recipe.model
    if isinstance(settings, BertSettings):
        return [BOS], [EOS]
    if isinstance(settings, GPTSettings):
        return [] if run.recipe.data.documents == "stream" else [BOS], []
    tag = run.recipe.data.source_tag
    return [run.tokenizers[0].tag(tag)] if tag else [], [EOS]


def _logits(
    run: RunDir, ours: SequenceModel, theirs: Any, tokens: list[int], inputs: dict[str, Tensor], draw: random.Random
) -> tuple[Tensor, Tensor]:
    """Their logits and ours, [T, V'] in the order of their ids."""
    settings, (_, target) = run.recipe.model, run.tokenizers
    packed = PackedTokens.from_lists([tokens])
    columns: Sequence[int] = inverse(ids_of(target))
    if isinstance(settings, BertSettings):
        if isinstance(ours, Bert) and type(theirs).__name__.endswith("Model"):  # it has no head: compare hidden states
            return _call(theirs, inputs).last_hidden_state[0], ours.encode(packed)
        if settings.task == "classify":
            return _call(theirs, inputs).logits, ours.logits(TextClassBatch.from_lists([tokens]))
        logits = ours.logits(SeqBatch(packed, packed, packed.ids))
    elif isinstance(settings, GPTSettings):
        logits = ours.logits(SeqBatch(PackedTokens.from_lists([[]]), packed, packed.ids))
    else:
        output = _random(target, min(len(tokens) + 2, settings.max_positions - 2), draw)
        batch = SeqBatch.from_lists([tokens], [[*output, EOS]], bos=BOS)
        logits = ours.logits(batch)
        begin = theirs.config.decoder_start_token_id
        decoder_inputs = [begin, *_theirs(batch.inputs.ids.tolist()[1:], target)]
        inputs = {**inputs, "decoder_input_ids": torch.tensor([decoder_inputs])}
    found = _call(theirs, inputs).logits.flatten(0, -2)
    return found[:, : len(columns)], logits[:, torch.tensor(list(columns))]  # they may have a row for padding


def _call(theirs: Any, inputs: Mapping[str, Tensor]) -> Any:
    """The outputs of their model; it may not take what the folder's tokenizer returns."""
    try:
        return theirs(**inputs)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise UserError(
            f"transformers' {type(theirs).__name__} fails on {', '.join(inputs)}: {first_line(error)}"
        ) from error


def _random(tokenizer: Tokenizer, length: int, draw: random.Random) -> list[int]:
    """Draw random tokens that both models have."""
    known: Sequence[int] = [ours for ours in range(tokenizer.first, len(tokenizer)) if ids_of(tokenizer)[ours] >= 0]
    return draw.choices(known, k=max(1, length))


def _theirs(tokens: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [ids_of(tokenizer)[token] for token in tokens]
