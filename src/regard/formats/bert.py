"""BERT in Hugging Face's layout, and ours: to fill in masked tokens, or to name the class of a text."""

from __future__ import annotations

import re
from typing import Any, cast

from regard.errors import UserError
from regard.formats.counterparts import Imported, activation, count, insist, spelt_activation
from regard.formats.folders import Files, Folder
from regard.formats.tables import Entry, Leftovers, Rows, layered
from regard.formats.vocabularies import ids_of, read_wordpiece, write_fast, write_wordpiece
from regard.marks import SPECIALS
from regard.models.bert import KINDS, NEVER
from regard.recipes.schema import BertSettings, Recipe
from regard.text import FILL, Tokenizer
from regard.text.tokenizers import Foreign, WordPieceTokenizer, WordTokenizer
from regard.weights import Tensors

CLASSES = {"fill": "BertForMaskedLM", "classify": "BertForSequenceClassification"}  # by task
BODY = "bert."  # what the body's names begin with, unless only the body was saved

ENCODER = [
    Entry("bert.embeddings.position_embeddings.weight", "embedding.positions.table"),
    Entry("bert.embeddings.token_type_embeddings.weight", "embedding.kinds"),
    Entry("bert.embeddings.LayerNorm.{p}", "embedding.norm.{p}"),
    Entry("bert.encoder.layer.{i}.attention.self.{query,key,value}.{p}", "encoder.{i}.own.query_key_value.{p}"),
    Entry("bert.encoder.layer.{i}.attention.output.dense.{p}", "encoder.{i}.own.out.{p}"),
    Entry("bert.encoder.layer.{i}.attention.output.LayerNorm.{p}", "encoder.{i}.own_residual.norm.{p}"),
    Entry("bert.encoder.layer.{i}.intermediate.dense.{p}", "encoder.{i}.feed_forward.into.{p}"),
    Entry("bert.encoder.layer.{i}.output.dense.{p}", "encoder.{i}.feed_forward.out.{p}"),
    Entry("bert.encoder.layer.{i}.output.LayerNorm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
EMBEDDING = "bert.embeddings.word_embeddings.weight"
FILLER = [
    Entry("cls.predictions.transform.dense.{p}", "filler.dense.{p}"),
    Entry("cls.predictions.transform.LayerNorm.{p}", "filler.norm.{p}"),
]
BIAS = "cls.predictions.bias"


def entries(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> list[Entry]:
    settings = cast(BertSettings, recipe.model)
    body = [Entry(EMBEDDING, "embedding.table", Rows(ids_of(source))), *layered(ENCODER, settings.layers)]
    return [*body, *(_filler(source) if settings.task == "fill" else _classifier(target))]


def _filler(tokenizer: Tokenizer) -> list[Entry]:
    return [*layered(FILLER), Entry(BIAS, "filler.bias", Rows(ids_of(tokenizer), absent=NEVER))]


def _classifier(classes: Tokenizer) -> list[Entry]:
    """Ours also has rows for the special ids, which are never a class."""
    ids = [-1] * classes.first + list(range(len(classes) - classes.first))
    return [
        *layered([Entry("bert.pooler.dense.{p}", "classifier.pooler.{p}")]),
        Entry("classifier.weight", "classifier.out.weight", Rows(ids)),
        Entry("classifier.bias", "classifier.out.bias", Rows(ids, absent=NEVER)),
    ]


def leftovers(recipe: Recipe) -> Leftovers:
    """Filling in needs neither the pooler nor the head that told whether one sentence follows another."""
    dropped = [r"bert\.embeddings\.position_ids"]
    if cast(BertSettings, recipe.model).task == "classify":
        return Leftovers(dropped)
    dropped += [r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"]
    copies = {"cls.predictions.decoder.weight": EMBEDDING, "cls.predictions.decoder.bias": BIAS}
    return Leftovers(dropped, copies)


def renamed(tensors: Tensors, folder: Folder) -> Tensors:
    """Old files say gamma and beta; a body alone has no prefix."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        found[name] = tensor
    return found if EMBEDDING in found else {BODY + name: tensor for name, tensor in found.items()}


def read(folder: Folder) -> Imported:
    folder.insist(
        is_decoder=False, add_cross_attention=False, position_embedding_type="absolute", type_vocab_size=KINDS
    )
    (architecture,) = folder.setting("architectures") or ["BertModel"]
    tasks = {"BertForPreTraining": "fill", "BertModel": "fill"} | {name: task for task, name in CLASSES.items()}
    if architecture not in tasks:
        raise UserError(f"{folder.path}: {architecture} has no counterpart here ({', '.join(tasks)} have)")
    task = tasks[architecture]
    source = read_wordpiece(folder, count(folder, "vocab_size", 30522))
    target = _classes(folder) if task == "classify" else source
    settings = {
        "family": "bert",
        "task": task,
        "width": count(folder, "hidden_size", 768),
        "heads": count(folder, "num_attention_heads", 12),
        "layers": count(folder, "num_hidden_layers", 12),
        "inner": count(folder, "intermediate_size", 3072),
        "dropout": folder.setting("hidden_dropout_prob", 0.1),
        "activation": activation(folder, "hidden_act", "gelu"),
        "norm_eps": folder.setting("layer_norm_eps", 1e-12),
        "pool": "first",
        "max_positions": count(folder, "max_position_embeddings", 512),
    }
    if task == "fill" and settings["activation"] != "gelu":
        raise UserError(f"{folder.path}: hidden_act = {folder.setting('hidden_act')!r}: our head has gelu only")
    words = {"shared": False, "target_unit": "word"} if task == "classify" else {}
    recipe = {
        "data": {"imported": "pairs" if task == "classify" else "text"},
        "text": {"unit": "wordpiece", "vocabulary": max(260, len(source)), **words},
        "model": settings,
    }
    return Imported(Recipe.model_validate(recipe), source, target, headless=architecture == "BertModel")


def _classes(folder: Folder) -> WordTokenizer:
    """The classes in the order of their ids, as words: spaces in a name become underscores."""
    if folder.setting("problem_type") not in (None, "single_label_classification"):
        raise UserError(f"{folder.path}: problem_type = {folder.setting('problem_type')!r} has no counterpart here")
    usual = {str(number): f"LABEL_{number}" for number in range(folder.setting("num_labels", 2))}
    named = {int(number): str(name) for number, name in folder.setting("id2label", usual).items()}
    if len(named) < 2:
        raise UserError(f"{folder.path}: a classifier needs two classes, not {len(named)}")
    names = [named[number] for number in sorted(named)]
    tokenizer = WordTokenizer((), ["_".join(name.split()) for name in names])
    if len(set(tokenizer.words)) < len(names) or not all(tokenizer.words):
        raise UserError(f"{folder.path}: two classes have the same name, or one has none")
    tokenizer.foreign = Foreign([-1] * len(SPECIALS) + sorted(named), [None] * len(SPECIALS))
    return tokenizer


def config(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> dict[str, Any]:
    settings = cast(BertSettings, recipe.model)
    insist(settings, "BERT", norm="layer", norm_first=False, positions="learned")
    if settings.task == "classify":
        insist(settings, "BERT", pool="first")
    if settings.task == "fill":
        insist(settings, "BERT", activation="gelu")
    ids = ids_of(source)
    found: dict[str, Any] = {
        "architectures": [CLASSES[settings.task]],
        "model_type": "bert",
        "vocab_size": max(ids) + 1,
        "type_vocab_size": KINDS,
        "hidden_size": settings.width,
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "intermediate_size": settings.inner,
        "hidden_dropout_prob": settings.dropout,
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": spelt_activation(settings.activation, "BERT"),
        "layer_norm_eps": settings.norm_eps,
        "max_position_embeddings": settings.max_positions,
        "pad_token_id": ids[FILL],
        "dtype": "float32",
    }
    if settings.task == "classify":
        names = target.pieces(range(target.first, len(target)))
        labels = {str(number): name.strip() for number, name in enumerate(names)}
        found |= {"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}
    return found


def files(recipe: Recipe, source: Tokenizer, target: Tokenizer) -> Files:
    if isinstance(source, WordPieceTokenizer):
        return write_wordpiece(source)
    return write_fast(source, "<s> $A </s>")
