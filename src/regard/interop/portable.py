"""The common part of exports that are not in Hugging Face's layout: suitable runs, tokenizers, and tables."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from regard.errors import UserError
from regard.files import errno_text
from regard.interop.hf_folder import Files
from regard.interop.vocabularies import unsupported_tokenizer, write_fast, write_foreign, write_sentencepiece
from regard.run_dir import RunDir
from regard.special_tokens import SPECIAL_TOKENS
from regard.tasks.generator import forbidden_ids
from regard.text import Tokenizer
from regard.text.fast_tokenizer import FastTokenizer
from regard.text.tokenizers import BytePairTokenizer, SentencePieceTokenizer, WordTokenizer, bpe_vocabulary

# Settings that every export reads, or that do not matter to a trained model.
SUPPORTED = {
    *("family", "size", "width", "heads", "layers", "encoder_layers", "decoder_layers", "ffn_width", "max_positions"),
    *("norm", "norm_first", "norm_eps", "activation", "positions", "position_base"),
    *("tie_embeddings", "scale_embeddings", "output_bias", "dropout", "zero_init", "task", "pooling", "mask_prob"),
    *("mask_size", "memory_size"),  # only with another mask than the default
}
NEG_LOGIT = -1e9  # the logit of tokens that are never generated


def unsupported(run: RunDir, whose: str, read: Collection[str] = (), **choices: tuple[str, ...]) -> list[str]:
    """Why a run cannot be exported; `choices` are the values that a setting may have.

    Settings that are listed neither in `SUPPORTED` nor in `read` must have their defaults.
    """
    settings, problems = run.recipe.model, []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        allowed = choices.get(name)
        if (allowed is not None and value not in allowed) or (
            name not in SUPPORTED and name not in read and value != field.get_default()
        ):
            only = "" if allowed is None else f" (only {', '.join(allowed)} have)"
            problems.append(f"model.{name} = {value!r} has no counterpart in {whose}{only}")
    for tokenizer in dict.fromkeys(run.tokenizers):
        if tokenizer.foreign is None:
            problems += unsupported_tokenizer(tokenizer)
    return list(dict.fromkeys(problems))


def require(package: str, extra: str) -> None:
    """Raise a UserError if a package is not installed."""
    if find_spec(package) is None:
        raise UserError(f"this export needs {package}: pip install 'regard[{extra}]'")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder, which must not exist yet or be empty; it is removed if writing into it fails."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise UserError(f"{path} could not be written: {errno_text(error)}") from error
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def tokens_of(tokenizer: Tokenizer) -> list[str]:
    """The spellings of all tokens, as in tokenizer.json; each is unique.

    Of an imported tokenizer, special tokens have their original spelling; rows without a token have a name of ours.
    """
    special: list[str] = [*SPECIAL_TOKENS, *tokenizer.tags]
    if tokenizer.foreign is not None:
        given = tokenizer.foreign.spellings
        special = [
            spelling if spelling and spelling not in given[number + 1 :] else f"<unused {number}>"
            for number, spelling in enumerate(given)
        ]
    if isinstance(tokenizer, BytePairTokenizer):
        return [*special, *bpe_vocabulary(tokenizer.merges)]
    assert isinstance(tokenizer, WordTokenizer | FastTokenizer | SentencePieceTokenizer)
    return [*special, *tokenizer.words]


def text_template(run: RunDir) -> str:
    """The special tokens around a text that a language model reads."""
    return "$A" if run.recipe.data.documents == "stream" else "<s> $A"


def tokenizer_files(run: RunDir, template: str) -> Files:
    """tokenizer.json of the source and, if it is another one, target_tokenizer.json; those of an imported run."""
    source, target = run.tokenizers
    if isinstance(source, FastTokenizer):
        return {"tokenizer.json": source.model.encode()}
    if isinstance(source, SentencePieceTokenizer) and isinstance(target, SentencePieceTokenizer):
        written = write_sentencepiece(source, target, run.recipe.text.shared)
        return {name: content for name, content in written.items() if name.endswith(".spm")}
    if source.foreign is not None:
        return {"tokenizer.json": write_foreign(source, template)}
    files = {"tokenizer.json": write_fast(source, template)["tokenizer.json"]}
    if target is not source and target.to_json() != source.to_json():
        files["target_tokenizer.json"] = write_fast(target, "$A")["tokenizer.json"]
    return files


def never_generated(run: RunDir) -> list[int]:
    """The ids that are not generated: special tokens and tags, and in translations line breaks."""
    target = run.tokenizers[1]
    if run.recipe.data.kind == "pairs":
        return target.forbidden()
    return forbidden_ids(target, run.recipe.data.documents == "stream")


def position_table(positions: nn.Module, count: int) -> np.ndarray | None:
    """The vectors that are added to the tokens at each position, [count, D]; None if there are none."""
    if not getattr(positions, "adds_vectors", True):
        return None
    index = torch.arange(count)
    with torch.no_grad():
        table: np.ndarray = positions(index, index).numpy()
    return table


def write_files(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
