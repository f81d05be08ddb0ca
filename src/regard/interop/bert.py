"""Convert between BERT in Hugging Face's layout and ours: masked language models and classifiers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from regard.data.labelled import class_name
from regard.errors import UserError
from regard.interop.common import (
    Imported,
    activation,
    architecture,
    count,
    fraction,
    hf_activation,
    layers,
    rows,
    unsupported_settings,
)
from regard.interop.hf_folder import Files, HFFolder, TensorInfo, short_repr
from regard.interop.name_map import Entry, IgnoredTensors, VocabularyRows, layered
from regard.interop.vocabularies import (
    added_tokens,
    id_of,
    ids_of,
    read_fast,
    read_wordpiece,
    unsupported_tokenizer,
    write_fast,
    write_wordpiece,
)
from regard.models.bert import NEG_LOGIT, TOKEN_TYPES, BertSettings
from regard.recipes.schema import Recipe
from regard.special_tokens import SPECIAL_TOKENS
from regard.tensor_io import Tensors
from regard.text import PAD, Tokenizer
from regard.text.encode import MASK
from regard.text.tokenizers import WordPieceTokenizer

CLASSES = {"fill": "BertForMaskedLM", "classify": "BertForSequenceClassification"}  # by task
BODY = "bert."  # prefix of the body's names, unless only the body was saved

POSITIONS = "bert.embeddings.position_embeddings.weight"
ENCODER = [
    Entry(POSITIONS, "embedding.positions.table"),
    Entry("bert.embeddings.token_type_embeddings.weight", "embedding.token_types"),
    Entry("bert.embeddings.LayerNorm.{p}", "embedding.norm.{p}"),
    Entry("bert.encoder.layer.{i}.attention.self.{query,key,value}.{p}", "encoder.{i}.self_attn.qkv_proj.{p}"),
    Entry("bert.encoder.layer.{i}.attention.output.dense.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("bert.encoder.layer.{i}.attention.output.LayerNorm.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("bert.encoder.layer.{i}.intermediate.dense.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("bert.encoder.layer.{i}.output.dense.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("bert.encoder.layer.{i}.output.LayerNorm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
EMBEDDING = "bert.embeddings.word_embeddings.weight"
MLM_HEAD = [
    Entry("cls.predictions.transform.dense.{p}", "mlm_head.dense.{p}"),
    Entry("cls.predictions.transform.LayerNorm.{p}", "mlm_head.norm.{p}"),
]
BIAS = "cls.predictions.bias"
CLASSIFIER = [
    Entry("bert.pooler.dense.{p}", "classifier.pooler.{p}"),
    Entry("classifier.{p}", "classifier.out.{p}"),
]


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings = cast(BertSettings, recipe.model)
    body = [Entry(EMBEDDING, "embedding.table", VocabularyRows(ids_of(source))), *layered(ENCODER, settings.layers)]
    return [*body, *(_mlm_head(source) if settings.task == "fill" else layered(CLASSIFIER))]


def _mlm_head(tokenizer: Tokenizer) -> list[Entry]:
    return [*layered(MLM_HEAD), Entry(BIAS, "mlm_head.bias", VocabularyRows(ids_of(tokenizer), absent=NEG_LOGIT))]


def ignored(recipe: Recipe) -> IgnoredTensors:
    """Tensors of a file that are not converted: masked LM uses neither the pooler nor next-sentence prediction."""
    dropped = [r"bert\.embeddings\.position_ids"]
    if cast(BertSettings, recipe.model).task == "classify":
        return IgnoredTensors(dropped)
    dropped += [r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"]
    copies = {"cls.predictions.decoder.weight": EMBEDDING, "cls.predictions.decoder.bias": BIAS}
    return IgnoredTensors(dropped, copies)


def canonical(header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors by the names in the table: old files have gamma and beta; a saved body has no prefix."""
    tensors = {}
    for name, info in header.items():
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        tensors[name] = info
    return tensors if EMBEDDING in tensors else {BODY + name: info for name, info in tensors.items()}


def defaults(target: Tokenizer) -> Tensors:
    return {}


def constants(recipe: Recipe) -> Tensors:
    return {}


def read(folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
    folder.require(
        is_decoder=False, add_cross_attention=False, position_embedding_type="absolute", type_vocab_size=TOKEN_TYPES
    )
    kind = architecture(folder) or "BertModel"
    tasks = {"BertForPreTraining": "fill", "BertModel": "fill"} | {name: task for task, name in CLASSES.items()}
    if kind not in tasks:
        raise UserError(f"{folder.path}: {short_repr(kind)} has no counterpart here ({', '.join(tasks)} have)")
    task = tasks[kind]
    source = _tokenizer(folder, rows(folder, "vocab_size", 30522, header, EMBEDDING))
    classes = class_names(folder, header) if task == "classify" else ()
    settings = {
        "family": "bert",
        "task": task,
        "width": count(folder, "hidden_size", 768),
        "heads": count(folder, "num_attention_heads", 12),
        "layers": layers(folder, "num_hidden_layers", 12),
        "ffn_width": count(folder, "intermediate_size", 3072),
        "dropout": fraction(folder, "hidden_dropout_prob", 0.1),
        "activation": activation(folder, "hidden_act", "gelu"),
        "norm_eps": fraction(folder, "layer_norm_eps", 1e-12),
        "pooling": "first",
        "max_positions": rows(folder, "max_position_embeddings", 512, header, POSITIONS),
    }
    if task == "fill" and settings["activation"] != "gelu":
        raise UserError(f"{folder.path}: hidden_act = {folder.setting('hidden_act')!r}: our head supports gelu only")
    recipe = {
        "data": {"imported": "pairs" if task == "classify" else "text"},
        "text": {"unit": source.unit, "vocabulary": max(260, len(source))},
        "model": settings,
    }
    headless = kind == "BertModel"
    return Imported(Recipe.model_validate(recipe), source, source, headless=headless, classes=classes)


def _tokenizer(folder: HFFolder, size: int) -> Tokenizer:
    """Read BERT's WordPiece, or the BPE or words of a model exported from regard."""
    kind = folder.json("tokenizer.json").object("model").content.get("type")
    if folder.has("vocab.txt") or kind not in ("BPE", "WordLevel"):
        return read_wordpiece(folder, size)
    added = added_tokens(folder, size)
    roles = zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)
    pad, bos, eos, unk = (id_of(folder, folder.specials.get(role, default), added) for role, default in roles)
    mask = folder.specials.get("mask_token", MASK)
    return read_fast(folder, size, (pad, bos, eos, unk), {MASK: added[mask]} if mask in added else {})


def class_names(
    folder: HFFolder,
    header: Mapping[str, TensorInfo],
    weight: str = "classifier.weight",
    number_duplicates: bool = False,
) -> tuple[str, ...]:
    """The names of the classes in the order of their ids; `weight` has a row for each.

    Classes of the same name are refused, or numbered with `number_duplicates`: ImageNet has two of the name "crane".
    """
    if folder.setting("problem_type") not in (None, "single_label_classification"):
        raise UserError(
            f"{folder.path}: problem_type = {short_repr(folder.setting('problem_type'))} has no counterpart here"
        )
    given = folder.config.object("id2label")
    size = len(given.content) or count(folder, "num_labels", 2)
    if (info := header.get(weight)) is not None and info.shape[:1] != (size,):
        name = "id2label" if given.content else "num_labels"
        raise folder.config.error(name, f"has {size} classes, but {weight} has shape {info.shape}")
    keys = [str(number) for number in range(size)]
    if given.content and given.content.keys() != set(keys):
        raise folder.config.error("id2label", f"must number its classes from 0 to {size - 1}")
    names = tuple(class_name(given.text(key) or f"LABEL_{key}") for key in keys)
    if number_duplicates:
        often = Counter(names)
        names = tuple(f"{name} ({n})" if often[name] > 1 else name for n, name in enumerate(names))
    if len(names) < 2:
        raise UserError(f"{folder.path}: a classifier needs two classes, not {len(names)}")
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"{folder.path}: two classes have the same name, or one has none")
    return names


def unsupported(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[str]:
    """The settings of a run that BERT cannot express."""
    settings = cast(BertSettings, recipe.model)
    head = {"pooling": "first"} if settings.task == "classify" else {"activation": "gelu"}
    problems = unsupported_settings(settings, "BERT", norm="layer", norm_first=False, positions="learned", **head)
    if not isinstance(source, WordPieceTokenizer):
        problems += unsupported_tokenizer(source)
    return problems


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings, ids = cast(BertSettings, recipe.model), ids_of(source)
    return {
        "architectures": [CLASSES[settings.task]],
        "model_type": "bert",
        "vocab_size": max(ids) + 1,
        "type_vocab_size": TOKEN_TYPES,
        "hidden_size": settings.width,
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "intermediate_size": settings.ffn_width,
        "hidden_dropout_prob": settings.dropout,
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": hf_activation(settings.activation),
        "layer_norm_eps": settings.norm_eps,
        "max_position_embeddings": settings.max_positions,
        "position_embedding_type": "absolute",
        "pad_token_id": ids[PAD],
        "dtype": "float32",
    }


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    if isinstance(source, WordPieceTokenizer):
        return write_wordpiece(source)
    return write_fast(source, "<s> $A </s>", cls_token="<s>", sep_token="</s>")
