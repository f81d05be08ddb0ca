"""What a speech model attends to in a recording, and when CTC recognises each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from regard.data.log_mel import HOP, WINDOW
from regard.data.speech import Recording
from regard.decoding.ctc import BLANK, align
from regard.errors import UserError
from regard.models.speech import SpeechModel
from regard.packed import FeatureBatch
from regard.runs import LoadedRun
from regard.tasks.aligner import cross_attention
from regard.tasks.speech import SpeechTask
from regard.text import BOS, EOS
from regard.text.display import labels

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SoundAttention:
    """A recording and its text on one axis of time: T tokens, S' frames of the encoder, n frames of B bands.

    `attention` [T + 1, S'] is the decoder's, EOS last; `ctc` [T, S'] the probability of each token in each frame, and
    `blank` [S'] that of the blank; `starts` [T] are the frames where tokens begin on CTC's best path. Those of a model
    without a decoder, or without CTC, are None.
    """

    text: str
    tokens: tuple[str, ...]
    features: Array  # [n, B]
    seconds: float
    frame: float  # seconds from one of the encoder's frames to the next
    sample_rate: int
    attention: Array | None
    ctc: Array | None
    blank: Array | None
    starts: tuple[int, ...] | None
    layers: str  # which layers and heads the attention is of, in words


def sound_attention(
    loaded: LoadedRun, given: str, target: str | None = None, layer: int | None = None, head: int | None = None
) -> SoundAttention:
    """Transcribe a sound file (or take `target` as its text), and record attention and CTC.

    `layer` and `head` count from 0; None: the mean of all.
    """
    task, model = loaded.task, loaded.module
    if not isinstance(task, SpeechTask) or not isinstance(model, SpeechModel):
        raise UserError(f"{loaded.run.path} was trained for {task.name}: only speech models have this view")
    sound = task.read_argument(given)
    samples = sound.samples(task.settings.sample_rate) if isinstance(sound, Recording) else sound
    features = task.features(samples)
    tokenizer = loaded.run.tokenizers[1]
    if target is None:
        (answer,) = loaded.writer()([features])
        ids, text = list(answer.hypotheses[0].tokens), answer.texts[0]
    else:
        ((*ids, _),), _ = task.encode_texts(loaded.run, [target])
        text = target
    batch = FeatureBatch.from_lists([features], [[*ids, EOS]], bos=BOS).to(loaded.device)
    with torch.inference_mode():
        encoded, layout = model.encode(batch.source)
        log_probs = model.ctc_log_probs(encoded, layout)[0].cpu() if model.has_ctc else None
    weights, layers = _attention(model, batch, layer, head) if model.has_decoder else (None, "")
    return SoundAttention(
        text,
        labels(tokenizer.token_texts(ids)),
        features,
        len(samples) / task.settings.sample_rate,
        HOP * task.settings.subsample,
        task.settings.sample_rate,
        weights,
        None if log_probs is None else log_probs[:, ids].T.exp().numpy(),
        None if log_probs is None else log_probs[:, BLANK].exp().numpy(),
        None if log_probs is None else tuple(_starts(log_probs, ids)),
        layers,
    )


def time_of(frame: float, index: int) -> float:
    """The time, in seconds, in the middle of what one of the encoder's frames begins with."""
    return index * frame + WINDOW / 2


def _starts(log_probs: torch.Tensor, ids: list[int]) -> list[int]:
    try:
        return align(log_probs, ids)
    except ValueError:  # a text that CTC cannot express in so few frames
        return []


def _attention(model: SpeechModel, batch: FeatureBatch, layer: int | None, head: int | None) -> tuple[Array, str]:
    weights = cross_attention(model, batch)[:, 0].cpu().numpy()  # [L, H, T + 1, S']
    layers, heads = weights.shape[:2]
    if layer is not None and layer >= layers:
        raise UserError(f"--layer {layer + 1}: this model has {layers} decoder layers")
    if head is not None and head >= heads:
        raise UserError(f"--head {head + 1}: a layer has {heads} heads")
    chosen = weights if layer is None else weights[layer : layer + 1]
    mean: Array = chosen.mean((0, 1)) if head is None else chosen[:, head].mean(0)
    of_layer = f"mean of {layers} layers" if layer is None else f"layer {layer + 1} of {layers}"
    return mean, f"{of_layer}, {'mean of its heads' if head is None else f'head {head + 1}'}"
