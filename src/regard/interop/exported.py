"""Exported models, opened by the libraries that they are for, to compare them with the run (`interop.agreement`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as library
import torch

from regard.interop.agreement import Agreement, Exported, agreements
from regard.interop.name_map import inverse
from regard.interop.onnx_translate import OnnxSearch
from regard.interop.vocabularies import ids_of
from regard.run_dir import RunDir
from regard.text import EOS

BATCH = 16  # texts at a time


class CTranslate2Model:
    """A folder that CTranslate2 reads."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        import ctranslate2

        self.tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        kind = ctranslate2.Generator if run.recipe.data.kind == "text" else ctranslate2.Translator
        self.model = kind(str(folder), device="cpu", intra_threads=torch.get_num_threads())
        other = folder / "target_tokenizer.json"
        self.target = library.Tokenizer.from_file(str(other)) if other.exists() else self.tokenizer

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        return [self.tokenizer.encode(text).tokens for text in texts]

    def translate(self, texts: list[str], beam: int, limit: int) -> list[list[int]]:
        found = self.model.translate_batch(
            self._tokens(texts), beam_size=beam, length_penalty=0, max_decoding_length=limit, max_batch_size=BATCH
        )
        return [[self.target.token_to_id(token) or 0 for token in each.hypotheses[0]] for each in found]

    def continue_(self, texts: list[str], limit: int) -> list[list[int]]:
        found = self.model.generate_batch(
            self._tokens(texts), max_length=limit, include_prompt_in_result=False, max_batch_size=1
        )
        return [[token for token in each.sequences_ids[0] if token != EOS] for each in found]

    def predict(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError  # no such model is exported to CTranslate2


class OnnxModel:
    """A folder of ONNX files, run by onnxruntime."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        import onnxruntime

        self.fills = getattr(run.recipe.model, "task", "fill") == "fill"
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if (folder / "encoder.onnx").exists():
            self.translator = OnnxSearch(folder, torch.get_num_threads())
        else:
            (path,) = folder.glob("*.onnx")
            self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def translate(self, texts: list[str], beam: int, limit: int) -> list[list[int]]:
        return [self.translator.search(self.tokenizer.encode(text).ids, beam, limit) for text in texts]

    def continue_(self, texts: list[str], limit: int) -> list[list[int]]:
        return [self._continue(self.tokenizer.encode(text).ids, limit) for text in texts]

    def _continue(self, ids: list[int], limit: int) -> list[int]:
        layers, heads, features = self.config["cache_shape"]
        cache = [np.zeros((layers, 1, heads, 0, features), np.float32) for _ in range(2)]
        output: list[int] = []
        fed, begin = ids, 0
        while len(output) < limit:
            given = {"input_ids": np.array([fed]), "position": np.arange(begin, begin + len(fed))}
            logits, *cache = self.session.run(None, given | dict(zip(("keys", "values"), cache, strict=True)))
            begin, token = begin + len(fed), int(logits[0].argmax())
            if token == EOS:
                break
            output.append(token)
            fed = [token]
        return output

    def predict(self, texts: list[str]) -> list[list[int]]:
        found = []
        for text in texts:
            ids = np.array([self.tokenizer.encode(text).ids])
            (logits,) = self.session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
            found.append(logits.argmax(-1).flatten().tolist())
        return found


class HuggingFaceModel:
    """A folder that transformers reads, with its tokenizer."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        (kind,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = getattr(transformers, kind).from_pretrained(folder).float().eval()
        self.ours: Sequence[int] = inverse(ids_of(run.tokenizers[1]))
        self.special = {self.model.config.eos_token_id, self.model.config.pad_token_id}

    def _generate(self, text: str, limit: int, **settings: Any) -> list[int]:
        inputs = self.tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            out = self.model.generate(**inputs, do_sample=False, max_new_tokens=limit, **settings)[0].tolist()
        start = 1 if self.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        tokens = []
        for token in out[start:]:
            if token in self.special:
                break
            tokens.append(self.ours[token])
        return tokens

    def translate(self, texts: list[str], beam: int, limit: int) -> list[list[int]]:
        settings: dict[str, Any] = {"num_beams": beam, "forced_eos_token_id": None}
        if beam > 1:
            settings |= {"length_penalty": 0.0, "early_stopping": "never"}
        return [self._generate(text, limit, **settings) for text in texts]

    def continue_(self, texts: list[str], limit: int) -> list[list[int]]:
        return [self._generate(text, limit, num_beams=1) for text in texts]

    def predict(self, texts: list[str]) -> list[list[int]]:
        found = []
        for text in texts:
            inputs = self.tokenizer(text, return_tensors="pt")
            with torch.inference_mode():
                found.append(self.model(**inputs).logits.argmax(-1).flatten().tolist())
        return found


OPENERS: dict[str, tuple[str, Callable[[RunDir, Path], Exported]]] = {  # with the package that each needs
    "ctranslate2": ("ctranslate2", CTranslate2Model),
    "onnx": ("onnxruntime", OnnxModel),
    "huggingface": ("transformers", HuggingFaceModel),
}


def verify(run: RunDir, folder: Path, to: str) -> list[Agreement] | None:
    """Compare an export with its run; None if the format has no reader here, or it is not installed."""
    if to not in OPENERS:
        return None
    package, opener = OPENERS[to]
    return None if find_spec(package) is None else agreements(run, opener(run, folder))
