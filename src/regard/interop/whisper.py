"""Convert between Whisper in Hugging Face's layout and our speech model with Whisper's features, stem and prompt.

preprocessor_config.json says how sound becomes features, generation_config.json which tokens are never generated and
what the prompt is. Whisper's keys have no bias: ours are zeros, and any bias of the keys leaves attention unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.interop.common import (
    Imported,
    activation,
    architecture,
    count,
    end_of_text,
    fraction,
    hf_activation,
    layers,
    rows,
    token,
    unsupported_settings,
)
from regard.interop.fast_tokenizers import FILE, read_fast_tokenizer, vocabulary_of
from regard.interop.generation import POWER, beams, length_penalty
from regard.interop.hf_folder import Fields, Files, HFFolder, TensorInfo, as_json, short_repr
from regard.interop.name_map import Entry, IgnoredTensors, VocabularyRows, inverse, layered
from regard.interop.vocabularies import ids_of
from regard.models.speech import FRAME, WHISPER_RATE, SpeechSettings
from regard.recipes.schema import Recipe
from regard.tasks.speech_prompt import LANGUAGE, NO_TIMESTAMPS, languages, task_token
from regard.tensor_io import Tensors
from regard.text import BOS, EOS, Tokenizer
from regard.text.fast_tokenizer import FastTokenizer

CLASS = "WhisperForConditionalGeneration"
FEATURES = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # holds the features' settings since transformers 5
SPECIAL, TIME = re.compile(r"<\|.*\|>"), re.compile(r"<\|[0-9.]+\|>")
HOP, WINDOW = 160, 400  # samples from one frame of features to the next, and of each
TASKS = ("transcribe", "translate")
TARGETS, OUTPUT = "model.decoder.embed_tokens.weight", "proj_out.weight"
SOURCE_POSITIONS, TARGET_POSITIONS = (f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder"))
FRAMES_PER_BATCH = 4  # windows that are decoded together
# For --from: a batch of a few windows, and what suits a published model better than the defaults.
TRAINING = {"batch_tokens": 256, "learning_rate": 1e-5, "warmup": 100, "optimizer": "adamw", "label_smoothing": 0.0}


class KeysWithoutBias:
    """Biases of queries and values, or of values alone, with zeros for the keys between or before them."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([*parts[:-1], torch.zeros_like(parts[-1]), parts[-1]])

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        *first, _, last = whole.chunk(count + 1)
        return [*first, last]


NO_KEY_BIAS = KeysWithoutBias()
ENDS = [
    Entry("model.encoder.conv1.{p}", "source_embedding.convolutions.0.{p}"),
    Entry("model.encoder.conv2.{p}", "source_embedding.convolutions.1.{p}"),
    Entry("model.encoder.layer_norm.{p}", "encoder.norm.{p}"),
    Entry("model.decoder.layer_norm.{p}", "decoder.norm.{p}"),
]
ENCODER = [
    Entry("model.encoder.layers.{i}.self_attn.{q,k,v}_proj.weight", "encoder.{i}.self_attn.qkv_proj.weight"),
    Entry("model.encoder.layers.{i}.self_attn.{q,v}_proj.bias", "encoder.{i}.self_attn.qkv_proj.bias", NO_KEY_BIAS),
    Entry("model.encoder.layers.{i}.self_attn.out_proj.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("model.encoder.layers.{i}.self_attn_layer_norm.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("model.encoder.layers.{i}.fc1.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("model.encoder.layers.{i}.fc2.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("model.encoder.layers.{i}.final_layer_norm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
CROSS = "model.decoder.layers.{i}.encoder_attn"
DECODER = [
    *(
        Entry(e.theirs.replace("encoder", "decoder"), e.ours.replace("encoder", "decoder"), e.transform)
        for e in ENCODER
    ),
    Entry(f"{CROSS}.q_proj.{{p}}", "decoder.{i}.cross_attn.q_proj.{p}"),
    Entry(f"{CROSS}.{{k,v}}_proj.weight", "decoder.{i}.cross_attn.kv_proj.weight"),
    Entry(f"{CROSS}.v_proj.bias", "decoder.{i}.cross_attn.kv_proj.bias", NO_KEY_BIAS),
    Entry(f"{CROSS}.out_proj.{{p}}", "decoder.{i}.cross_attn.out_proj.{p}"),
    Entry(f"{CROSS}_layer_norm.{{p}}", "decoder.{i}.cross_attn_residual.norm.{p}"),
]


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings, vocabulary = cast(SpeechSettings, recipe.model), VocabularyRows(ids_of(target))
    table = [
        *layered(ENDS),
        *layered(ENCODER, settings.encoder_layers),
        *layered(DECODER, settings.decoder_layers),
        Entry(SOURCE_POSITIONS, "source_embedding.positions.table"),
        Entry(TARGET_POSITIONS, "target_embedding.positions.table"),
        Entry(TARGETS, "target_embedding.table", vocabulary),
    ]
    return table if settings.tie_embeddings else [*table, Entry(OUTPUT, "output", vocabulary)]


def ignored(recipe: Recipe) -> IgnoredTensors:
    """A tied output may be stored twice."""
    tied = cast(SpeechSettings, recipe.model).tie_embeddings
    return IgnoredTensors(copies={OUTPUT: TARGETS} if tied else {})


def canonical(header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return dict(header)


def defaults(target: Tokenizer) -> Tensors:
    return {}


def constants(recipe: Recipe) -> Tensors:
    return {}


# -- import ------------------------------------------------------------------------------------------------------------


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    folder.require(quantization_config=None, is_encoder_decoder=True)
    kind = architecture(folder) or CLASS
    if kind != CLASS:
        raise folder.config.error("architectures", f"= {short_repr(kind)} has no counterpart here (only {CLASS} has)")
    for name in ("attention_heads", "ffn_dim"):
        sizes = count(folder, f"encoder_{name}"), count(folder, f"decoder_{name}")
        if sizes[0] != sizes[1]:
            raise folder.config.error(f"decoder_{name}", f"= {sizes[1]} must equal encoder_{name} = {sizes[0]} here")
    size = rows(folder, "vocab_size", None, header, TARGETS)
    tokenizer = _tokenizer(folder, size)
    settings = {
        "family": "speech",
        "width": count(folder, "d_model"),
        "heads": count(folder, "encoder_attention_heads"),
        "encoder_layers": layers(folder, "encoder_layers"),
        "decoder_layers": layers(folder, "decoder_layers"),
        "ffn_width": count(folder, "encoder_ffn_dim"),
        "dropout": fraction(folder, "dropout", 0.0),
        "activation": activation(folder, "activation_function", "gelu"),
        "positions": "learned",
        "source_positions": "learned",
        "max_positions": rows(folder, "max_target_positions", 448, header, TARGET_POSITIONS),
        "tie_embeddings": folder.config.boolean("tie_word_embeddings", True),
        "scale_embeddings": False,
        "sample_rate": WHISPER_RATE,
        "subsample": 2,
        "ctc_weight": 0.0,
        "band_masks": (0, 0),
        "frame_masks": (0, 0),
        "stem": "whisper",
        **_features(folder, rows(folder, "max_source_positions", 1500, header, SOURCE_POSITIONS)),
    }
    prompt, data = _prompt(folder, tokenizer)
    recipe = {
        "data": {"imported": "speech", **data},
        "text": {"unit": tokenizer.unit, "vocabulary": max(260, len(tokenizer))},
        "model": {**settings, "prompt": prompt},
        "training": TRAINING,
        "decoding": {
            "beam": beams(folder, 1),
            "length_penalty": length_penalty(folder),
            "batch_tokens": FRAMES_PER_BATCH * round(settings["window"] / FRAME),
            **_suppressed(folder, tokenizer, size),
        },
    }
    return Imported(Recipe.model_validate(recipe), tokenizer, tokenizer.target_side())


def _tokenizer(folder: HFFolder, size: int) -> Tokenizer:
    """The tokenizer, whose tokens such as <|en|> and <|0.00|> are tags, never part of a text."""
    eos, begin = end_of_text(folder, 50256, size), token(folder, "decoder_start_token_id", 50257, size)
    if begin is None:
        raise folder.config.error("decoder_start_token_id", "is missing, or outside the vocabulary")
    vocabulary_of(folder, size)
    return read_fast_tokenizer(folder, size, (None, begin, eos, None), reserved=SPECIAL)


def _features(folder: HFFolder, frames: int) -> dict[str, Any]:
    """The settings of the features, for an encoder of so many frames."""
    given = folder.json(FEATURES)
    if not folder.has(FEATURES):
        given = folder.json(PROCESSOR).object("feature_extractor")
    if not given.content:
        raise UserError(f"{folder.path} has no {FEATURES}, which says how sound becomes features")
    if (kind := given.text("feature_extractor_type")) not in (None, "WhisperFeatureExtractor"):
        raise given.error("feature_extractor_type", f"= {short_repr(kind)} has no counterpart here")
    fixed = {"sampling_rate": WHISPER_RATE, "hop_length": HOP, "n_fft": WINDOW, "padding_value": 0, "dither": 0}
    for name, value in {**fixed, "do_normalize": False}.items():
        if given.content.get(name, value) not in (value, None):
            what = short_repr(given.content[name])
            raise given.error(name, f"= {what} has no counterpart here (only {value!r} has)")
    bands, seconds = count(folder, "num_mel_bins", 80), given.integer("chunk_length")
    seconds = 30 if seconds is None else seconds
    stated = given.integer("feature_size")
    if bands != (80 if stated is None else stated):
        raise given.error("feature_size", f"= {stated}, but config.json has num_mel_bins = {bands}")
    if seconds * WHISPER_RATE != 2 * frames * HOP:  # as whole numbers, however large
        needed = f"max_source_positions = {frames}, which is {2 * frames * FRAME:g} seconds"
        raise given.error("chunk_length", f"= {short_repr(seconds)}, but config.json has {needed}")
    return {"features": "whisper", "mels": bands, "window": seconds}


def _generation(folder: HFFolder) -> Fields:
    """generation_config.json, or config.json of a model from before there was one."""
    given = folder.json("generation_config.json")
    return given if given.content else folder.config


def _suppressed(folder: HFFolder, tokenizer: Tokenizer, size: int) -> dict[str, list[int]]:
    given, ours, forbidden = _generation(folder), inverse(ids_of(tokenizer)), {*tokenizer.forbidden()}
    found = {}
    for name, setting in (("suppress_tokens", "suppress_ids"), ("begin_suppress_tokens", "begin_suppress_ids")):
        listed = given.items(name)
        if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < size for one in listed):
            raise given.error(name, f"must list ids of the {size} tokens")
        found[setting] = sorted({ours[one] for one in listed} - forbidden)
    if EOS in found["suppress_ids"]:
        raise given.error("suppress_tokens", "has the token that ends a text")
    return found


def _prompt(folder: HFFolder, tokenizer: Tokenizer) -> tuple[str, dict[str, str]]:
    """The kind of the prompt, and its language and task where generation_config.json names them."""
    given = _generation(folder)
    if given.boolean("return_timestamps"):
        raise given.error("return_timestamps", "= true has no counterpart here: texts are written without times")
    if NO_TIMESTAMPS not in tokenizer.tags:
        raise UserError(f"{folder.path / FILE}: added_tokens lack {NO_TIMESTAMPS}, which ends the prompt")
    language, task = given.text("language"), given.text("task")
    forced = _forced(folder, given, tokenizer) if language is None and task is None else []
    multilingual = given.boolean("is_multilingual")
    if multilingual is None:
        multilingual = bool(languages(tokenizer)) and forced != [NO_TIMESTAMPS]
    if not multilingual:
        return "whisper-en", {}
    for tag in forced:
        language = LANGUAGE.sub(r"\1", tag) if LANGUAGE.fullmatch(tag) else language
        task = next((name for name in TASKS if tag == task_token(name)), task)
    code = None if language is None else LANGUAGE.sub(r"\1", language)
    if code is not None and code not in languages(tokenizer):
        raise given.error("language", f"= {short_repr(language)} is not the code of a language that the tokenizer has")
    if task not in (None, *TASKS):
        raise given.error("task", f"= {short_repr(task)} has no counterpart here ({' and '.join(TASKS)} have)")
    missing = [task_token(name) for name in (task or TASKS[0],) if task_token(name) not in tokenizer.tags]
    if missing:
        raise UserError(f"{folder.path / FILE}: added_tokens lack {missing[0]}, which the prompt needs")
    chosen = {"language": code, "speech_task": task}
    return "whisper", {name: value for name, value in chosen.items() if value is not None}


def _forced(folder: HFFolder, given: Fields, tokenizer: Tokenizer) -> list[str]:
    """The tags of forced_decoder_ids, which older files have instead of language and task."""
    fields = given if given.items("forced_decoder_ids") else folder.config
    ours, names = inverse(ids_of(tokenizer)), []
    for pair in fields.items("forced_decoder_ids"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.error("forced_decoder_ids", f"must list pairs of numbers, not {short_repr(pair)}")
        theirs = pair[1]
        if theirs is None:
            continue
        if not isinstance(theirs, int) or isinstance(theirs, bool) or not 0 <= theirs < len(ours):
            raise fields.error("forced_decoder_ids", f"has {short_repr(theirs)}, which is no token")
        if not EOS + 2 <= ours[theirs] < tokenizer.first:
            raise fields.error("forced_decoder_ids", f"has {theirs}, which is not a special token")
        names.append(tokenizer.tags[ours[theirs] - EOS - 2])
    return names


# -- export ------------------------------------------------------------------------------------------------------------


def unsupported(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """The settings of a run that Whisper cannot express."""
    wanted: dict[str, Any] = {"features": "whisper", "stem": "whisper", "source_positions": "learned"}
    wanted |= {"positions": "learned", "norm": "layer", "norm_first": True, "norm_eps": 1e-5, "embedding_norm": False}
    wanted |= {"biases": True, "qk_norm": False, "se_dim": 0, "scale_embeddings": False, "output_bias": False}
    wanted |= {"ctc_weight": 0.0, "head_width": 0}
    problems = unsupported_settings(recipe.model, "Whisper", **wanted)
    if not isinstance(target, FastTokenizer):
        problems.append(f'text.unit = "{target.unit}" has no counterpart in Whisper (only imported tokenizers have)')
    return problems


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings, ids = cast(SpeechSettings, recipe.model), ids_of(target)
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("attention_heads", settings.heads), ("ffn_dim", settings.ffn_width))
    }
    return {
        "architectures": [CLASS],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": max(ids) + 1,
        "num_mel_bins": settings.mels,
        "d_model": settings.width,
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        **sides,
        "dropout": settings.dropout,
        "activation_function": hf_activation(settings.activation),
        "max_source_positions": settings.max_frames,
        "max_target_positions": settings.max_positions,
        "scale_embedding": False,
        "tie_word_embeddings": settings.tie_embeddings,
        **_roles(target),
        "dtype": "float32",
    }


def _roles(target: Tokenizer) -> dict[str, int]:
    ids = ids_of(target)
    ends = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), ids[EOS])
    return ends | {"decoder_start_token_id": ids[BOS]}


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    """The settings of the features and of generation, and the tokenizer as it was imported."""
    assert isinstance(target, FastTokenizer) and target.foreign is not None
    names = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"}
    return {
        FEATURES: as_json(_feature_settings(cast(SpeechSettings, recipe.model))),
        "generation_config.json": as_json(_generation_settings(recipe, target)),
        FILE: target.model.encode(),
        "tokenizer_config.json": as_json({**target.foreign.roles, **names}),
    }


def _feature_settings(settings: SpeechSettings) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": settings.mels,
        "sampling_rate": WHISPER_RATE,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "chunk_length": round(settings.window),
        "n_samples": round(settings.window * WHISPER_RATE),
        "nb_max_frames": round(settings.window / FRAME),
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _generation_settings(recipe: Recipe, target: Tokenizer) -> dict[str, Any]:
    """Special tokens are suppressed; timestamps are not, so that transformers can write them."""
    settings, decoding, ids = cast(SpeechSettings, recipe.model), recipe.decoding, ids_of(target)
    specials = [target.tag(tag) for tag in target.tags if SPECIAL.fullmatch(tag) and not TIME.fullmatch(tag)]
    found = {
        **_roles(target),
        "suppress_tokens": sorted({ids[BOS], *(ids[token] for token in (*specials, *decoding.suppress_ids))}),
        "begin_suppress_tokens": sorted(ids[token] for token in decoding.begin_suppress_ids),
        "no_timestamps_token_id": ids[target.tag(NO_TIMESTAMPS)],
        "is_multilingual": settings.prompt == "whisper",
        "return_timestamps": False,
        "num_beams": decoding.beam,
        "length_penalty": round(POWER * decoding.length_penalty, 6),
        "max_length": settings.max_positions,
    }
    if settings.prompt != "whisper":
        return found
    codes = {f"<|{code}|>": ids[token] for code, token in languages(target).items()}
    tasks = {task: ids[target.tag(task_token(task))] for task in TASKS if task_token(task) in target.tags}
    found |= {"lang_to_id": codes, "task_to_id": tasks, "task": recipe.data.speech_task}
    return found if recipe.data.language is None else found | {"language": f"<|{recipe.data.language}|>"}
