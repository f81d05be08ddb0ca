"""Import encoders related to BERT: RoBERTa, XLM-R, CamemBERT, DistilBERT, ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.interop.bert import class_names
from regard.interop.common import Imported, activation, architecture, context, count, fraction, layers, rows
from regard.interop.fast_tokenizers import FILE, read_fast_tokenizer, spelled, vocabulary_of
from regard.interop.hf_folder import HFFolder, TensorInfo, short_repr
from regard.interop.name_map import Entry, IgnoredTensors, TensorMap, VocabularyRows, layered
from regard.interop.rope import FULL, SLIDING, number
from regard.interop.vocabularies import checked_vocabulary, ids_of, read_bpe, read_wordpiece
from regard.models.bert import NEG_LOGIT, TOKEN_TYPES, BertSettings
from regard.recipes.schema import Recipe
from regard.tensor_io import Tensors
from regard.text import Tokenizer
from regard.text.encode import MASK

OFFSET = 2  # rows before the first position, in models that number positions from the padding token on


@dataclass(frozen=True)
class WithoutFirst:
    """Drops the first rows of a table, which no token has."""

    rows: int

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0][self.rows :]

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [torch.cat([whole[: self.rows], whole])]


class OneTokenType:
    """A table with one token type becomes ours, whose second row is not read."""

    def ours(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([parts[0]] * TOKEN_TYPES)

    def theirs(self, whole: Tensor, count: int) -> Sequence[Tensor]:
        return [whole[:1]]


ROBERTA = [
    Entry("embeddings.LayerNorm.{p}", "embedding.norm.{p}"),
    Entry("encoder.layer.{i}.attention.self.{query,key,value}.{p}", "encoder.{i}.self_attn.qkv_proj.{p}"),
    Entry("encoder.layer.{i}.attention.output.dense.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("encoder.layer.{i}.attention.output.LayerNorm.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("encoder.layer.{i}.intermediate.dense.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("encoder.layer.{i}.output.dense.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("encoder.layer.{i}.output.LayerNorm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
DISTILBERT = [
    Entry("embeddings.LayerNorm.{p}", "embedding.norm.{p}"),
    Entry("transformer.layer.{i}.attention.{q,k,v}_lin.{p}", "encoder.{i}.self_attn.qkv_proj.{p}"),
    Entry("transformer.layer.{i}.attention.out_lin.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("transformer.layer.{i}.sa_layer_norm.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("transformer.layer.{i}.ffn.lin1.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("transformer.layer.{i}.ffn.lin2.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("transformer.layer.{i}.output_layer_norm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
]
MODERNBERT = [
    Entry("embeddings.norm.{p}", "embedding.norm.{p}"),
    Entry("layers.{i}.attn_norm.{p}", "encoder.{i}.self_attn_residual.norm.{p}"),
    Entry("layers.{i}.attn.Wqkv.{p}", "encoder.{i}.self_attn.qkv_proj.{p}"),
    Entry("layers.{i}.attn.Wo.{p}", "encoder.{i}.self_attn.out_proj.{p}"),
    Entry("layers.{i}.mlp_norm.{p}", "encoder.{i}.feed_forward_residual.norm.{p}"),
    Entry("layers.{i}.mlp.Wi.{p}", "encoder.{i}.feed_forward.w_in.{p}"),
    Entry("layers.{i}.mlp.Wo.{p}", "encoder.{i}.feed_forward.w_out.{p}"),
    Entry("final_norm.{p}", "encoder.norm.{p}"),
]


@dataclass(frozen=True)
class EncoderImporter:
    """A model type. Names of tensors are those of the body, which have `prefix`, and of the heads, which do not."""

    name: str  # prefix of its classes: RobertaForMaskedLM
    prefix: str
    body: Sequence[Entry]
    embedding: str
    mlm: tuple[str, str, str, str]  # dense layer, norm and bias of the head, and the copy of the embedding
    classifier: tuple[str, str]  # dense layer and output
    positions: str | None = None  # the table of learned positions
    offset: int = 0
    pooler: str = "tanh"

    def canonical(self, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors by the names in the table; a saved body has no prefix."""
        return dict(header) if self._embedding in header else {self.prefix + n: info for n, info in header.items()}

    @property
    def _embedding(self) -> str:
        return self.prefix + self.embedding

    # -- settings ------------------------------------------------------------------------------------------------------

    def read(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> Imported:
        folder.require(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
        kind = architecture(folder) or f"{self.name}Model"
        tasks = {f"{self.name}{end}": "classify" if "Class" in end else "fill" for end in ENDINGS}
        if kind not in tasks:
            raise UserError(f"{folder.path}: {short_repr(kind)} has no counterpart here ({', '.join(tasks)} have)")
        task = tasks[kind]
        size = rows(folder, "vocab_size", None, header, self._embedding)
        tokenizer = _tokenizer(folder, size)
        classes = class_names(folder, header, f"{self.classifier[1]}.weight") if task == "classify" else ()
        special = self._modernbert(folder) if self.name == "ModernBert" else self._roberta(folder, header)
        if task == "fill" and special["activation"].removeprefix("gated-") != "gelu" and self.name != "ModernBert":
            raise folder.config.error("hidden_act", f"= {special['activation']!r}: our head supports gelu only")
        recipe = Recipe.model_validate(
            {
                "data": {"imported": "pairs" if task == "classify" else "text"},
                "text": {"unit": tokenizer.unit, "vocabulary": max(260, len(tokenizer))},
                "model": {
                    "family": "bert",
                    "task": task,
                    "pooler_activation": self.pooler,
                    "pooling": "first",
                    **special,
                },
            }
        )
        settings = cast(BertSettings, recipe.model)
        table = self._entries(settings, tokenizer, header)
        extra = self._zeros(settings, {entry.ours for entry in table}, header)
        maps = TensorMap(table, self._ignored(settings), extra=extra)
        headless = kind == f"{self.name}Model"
        return Imported(recipe, tokenizer, tokenizer, headless=headless, classes=classes, tensors=maps)

    def _roberta(self, folder: HFFolder, header: Mapping[str, TensorInfo]) -> dict[str, Any]:
        """Settings of RoBERTa and, by other names, of DistilBERT."""
        distil = self.name == "DistilBert"
        assert self.positions is not None
        if self.offset:
            folder.require(pad_token_id=self.offset - 1)  # positions are numbered from it on
        positions = rows(folder, "max_position_embeddings", 512, header, self.prefix + self.positions)
        act, dropout = ("activation", "dropout") if distil else ("hidden_act", "hidden_dropout_prob")
        return {
            "width": count(folder, "dim" if distil else "hidden_size", 768),
            "heads": count(folder, "n_heads" if distil else "num_attention_heads", 12),
            "layers": layers(folder, "n_layers" if distil else "num_hidden_layers", 12),
            "ffn_width": count(folder, "hidden_dim" if distil else "intermediate_size", 3072),
            "dropout": fraction(folder, dropout, 0.1),
            "activation": activation(folder, act, "gelu"),
            "norm_eps": 1e-12 if distil else fraction(folder, "layer_norm_eps", 1e-12),
            "max_positions": positions - self.offset,
        }

    def _modernbert(self, folder: HFFolder) -> dict[str, Any]:
        config, depth = folder.config, layers(folder, "num_hidden_layers", 22)
        folder.require(classifier_activation="gelu", hidden_activation="gelu", decoder_bias=True)
        given, every = config.items("layer_types"), config.integer("global_attn_every_n_layers") or 3
        if given and (len(given) != depth or any(kind not in (FULL, SLIDING) for kind in given)):
            raise config.error("layer_types", f"must name {FULL} or {SLIDING} for each of {depth} layers")
        full = [i for i in range(depth) if (given[i] == FULL if given else i % every == 0)]
        rope = config.object("rope_parameters")
        bases = [
            number(rope.object(kind), "rope_theta", number(config, old, default))
            for kind, old, default in ((FULL, "global_rope_theta", 16e4), (SLIDING, "local_rope_theta", 1e4))
        ]
        for kind in (FULL, SLIDING):
            if rope.object(kind).content.get("rope_type", "default") != "default":
                raise rope.error("rope_type", "must be default to have a counterpart here")
        pooling = config.text("classifier_pooling") or "cls"
        return {
            "width": count(folder, "hidden_size", 768),
            "heads": count(folder, "num_attention_heads", 12),
            "layers": depth,
            "ffn_width": count(folder, "intermediate_size", 1152),
            "dropout": fraction(folder, "mlp_dropout", 0.0),
            "activation": "gated-gelu",
            "norm_first": True,
            "first_norm": False,
            "norm_eps": fraction(folder, "norm_eps", 1e-5),
            "positions": "rotary",
            "position_base": bases[0],
            "local_base": bases[1],
            "window": (config.integer("local_attention") or 128) // 2,
            "global_layers": full,
            "pooling": {"cls": "first"}.get(pooling, pooling),
            "pooler_norm": True,
            "max_positions": context(folder, "max_position_embeddings", 8192),
        }

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _entries(self, settings: BertSettings, tokenizer: Tokenizer, header: Mapping[str, TensorInfo]) -> list[Entry]:
        ids, prefix = ids_of(tokenizer), self.prefix
        table = [Entry(self._embedding, "embedding.table", VocabularyRows(ids))]
        table += layered([Entry(prefix + e.theirs, e.ours, e.transform) for e in self.body], settings.layers)
        if self.positions is not None:
            table.append(Entry(prefix + self.positions, "embedding.positions.table", WithoutFirst(self.offset)))
        if (types := f"{prefix}embeddings.token_type_embeddings.weight") in header:
            table.append(Entry(types, "embedding.token_types", OneTokenType()))
        if settings.task == "fill":
            dense, norm, bias, _ = self.mlm
            table += layered(
                [Entry(f"{dense}.{{p}}", "mlm_head.dense.{p}"), Entry(f"{norm}.{{p}}", "mlm_head.norm.{p}")]
            )
            table.append(Entry(bias, "mlm_head.bias", VocabularyRows(ids, absent=NEG_LOGIT)))
        else:
            dense, out = self.classifier
            table += layered(
                [Entry(f"{dense}.{{p}}", "classifier.pooler.{p}"), Entry(f"{out}.{{p}}", "classifier.out.{p}")]
            )
            if settings.pooler_norm:
                table += layered([Entry("head.norm.{p}", "classifier.norm.{p}")])
        if self.name != "ModernBert":
            return table
        optional = [e for e in table if e.theirs.endswith(".bias") and e.theirs != self.mlm[2]]
        absent = {e.ours for e in optional if e.sources()[0] not in header}
        absent |= {
            e.ours for e in table if e.ours.startswith("encoder.0.self_attn_residual.norm")
        }  # it has no such norm
        return [entry for entry in table if entry.ours not in absent]

    def _zeros(self, settings: BertSettings, ours: set[str], header: Mapping[str, TensorInfo]) -> Tensors:
        """Our tensors without a counterpart, which are zeros: token types, and biases that ModernBERT leaves out."""
        width, inner = settings.width, settings.ffn_width * (2 if settings.activation.startswith("gated") else 1)
        shapes: dict[str, tuple[int, ...]] = {"embedding.token_types": (TOKEN_TYPES, width)}
        names = ["embedding.norm.bias", "encoder.norm.bias", "mlm_head.dense.bias", "mlm_head.norm.bias"]
        names += ["classifier.pooler.bias", "classifier.norm.bias"]
        wanted = "mlm_head" if settings.task == "fill" else "classifier"
        shapes |= {n: (width,) for n in names if n.startswith(("e", wanted)) and (settings.norm_first or n[0] != "e")}
        for i in range(settings.layers):
            block = f"encoder.{i}"
            shapes |= {f"{block}.self_attn.qkv_proj.bias": (3 * width,), f"{block}.feed_forward.w_in.bias": (inner,)}
            parts = (
                "self_attn.out_proj",
                "feed_forward.w_out",
                "self_attn_residual.norm",
                "feed_forward_residual.norm",
            )
            shapes |= {f"{block}.{part}.bias": (width,) for part in parts}
        if not settings.first_norm:
            del shapes["encoder.0.self_attn_residual.norm.bias"]
        if not settings.pooler_norm:
            shapes.pop("classifier.norm.bias", None)
        return {name: torch.zeros(shape) for name, shape in shapes.items() if name not in ours}

    def _ignored(self, settings: BertSettings) -> IgnoredTensors:
        dropped = [r".*\.position_ids", rf"{self.prefix}pooler\.dense\.(weight|bias)", r".*\.rotary_emb\.\w*inv_freq"]
        if settings.task == "classify":
            return IgnoredTensors(dropped)
        _, _, bias, copy = self.mlm
        copies = {copy: self._embedding, copy.replace("weight", "bias"): bias}
        return IgnoredTensors(dropped, {name: original for name, original in copies.items() if name != original})


ENDINGS = ("ForMaskedLM", "ForSequenceClassification", "Model")
_ROBERTA: dict[str, Any] = dict(
    prefix="roberta.",
    body=ROBERTA,
    embedding="embeddings.word_embeddings.weight",
    mlm=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder.weight"),
    classifier=("classifier.dense", "classifier.out_proj"),
    positions="embeddings.position_embeddings.weight",
    offset=OFFSET,
)
ENCODERS = {  # by model_type
    "roberta": EncoderImporter("Roberta", **_ROBERTA),
    "xlm-roberta": EncoderImporter("XLMRoberta", **_ROBERTA),
    "camembert": EncoderImporter("Camembert", **_ROBERTA),
    "distilbert": EncoderImporter(
        "DistilBert",
        "distilbert.",
        DISTILBERT,
        "embeddings.word_embeddings.weight",
        ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector.weight"),
        ("pre_classifier", "classifier"),
        "embeddings.position_embeddings.weight",
        pooler="relu",
    ),
    "modernbert": EncoderImporter(
        "ModernBert",
        "model.",
        MODERNBERT,
        "embeddings.tok_embeddings.weight",
        ("head.dense", "head.norm", "decoder.bias", "decoder.weight"),
        ("head.dense", "classifier"),
        pooler="gelu",
    ),
}


def _tokenizer(folder: HFFolder, size: int) -> Tokenizer:
    """The tokenizer with its mask; [CLS] and [SEP], or <s> and </s>, are BOS and EOS."""
    if not folder.has(FILE) and folder.has("vocab.txt"):
        return read_wordpiece(folder, size)
    fast = folder.has(FILE)
    vocabulary = vocabulary_of(folder, size) if fast else checked_vocabulary(folder.json("vocab.json"), size)
    usual = {"pad": "<pad>", "cls": "<s>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    found = {}
    for role, default in usual.items():
        spelling = spelled(folder, f"{role}_token", vocabulary)
        found[role] = vocabulary.get(default, vocabulary.get(f"[{role.upper()}]")) if spelling is None else spelling
        if found[role] is None:
            raise UserError(f"{folder.path}: the tokenizer has no {role}_token")
    specials = found["pad"], found["cls"], found["sep"], found["unk"]
    named = {MASK: cast(int, found["mask"])}
    return read_fast_tokenizer(folder, size, specials, named) if fast else read_bpe(folder, size, specials, named)
