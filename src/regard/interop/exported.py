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

from regard.interop.agreement import Agreement, Exported, agreements, compare_logits, require_agreement
from regard.interop.check import logit_pairs
from regard.interop.name_map import inverse
from regard.interop.onnx_translate import OnnxSearch, log_softmax
from regard.interop.portable import never_generated, tokens_of
from regard.interop.vocabularies import ids_of
from regard.run_dir import RunDir
from regard.text import EOS

BATCH = 16  # texts at a time
IMAGES = 32  # random ones, of image classifiers


class CTranslate2Model:
    """A folder that CTranslate2 reads; it takes and returns the spellings of tokens."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        import ctranslate2

        path = folder / "tokenizer.json"
        self.tokenizer = library.Tokenizer.from_file(str(path)) if path.exists() else None
        self.is_decoder = run.recipe.data.kind == "text"
        kind = ctranslate2.Generator if self.is_decoder else ctranslate2.Translator
        self.model = kind(str(folder), device="cpu", intra_threads=torch.get_num_threads())
        self.spellings = [tokens_of(tokenizer) for tokenizer in run.tokenizers]
        self.ids = [{word: number for number, word in enumerate(words)} for words in self.spellings]

    def _spell(self, tokens: list[list[int]], side: int) -> list[list[str]]:
        return [[self.spellings[side][token] for token in each] for each in tokens]

    def encode(self, text: str) -> list[int] | None:
        if self.tokenizer is None:
            return None
        return [self.ids[0].get(token, -1) for token in self.tokenizer.encode(text).tokens]

    def translate(self, sources: list[list[int]], prefix: list[int], beam: int, limit: int) -> list[list[int]]:
        found = self.model.translate_batch(
            self._spell(sources, 0),
            target_prefix=self._spell([prefix] * len(sources), 1) if prefix else None,
            beam_size=beam,
            length_penalty=0,
            max_decoding_length=limit + len(prefix),
            max_batch_size=BATCH,
        )
        tokens = [[self.ids[1][token] for token in each.hypotheses[0]] for each in found]
        return [each[len(prefix) :] for each in tokens]

    def continue_(self, contexts: list[list[int]], limit: int) -> list[list[int]]:
        found = self.model.generate_batch(
            self._spell(contexts, 1), max_length=limit, include_prompt_in_result=False, max_batch_size=1
        )
        return [[token for token in each.sequences_ids[0] if token != EOS] for each in found]

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        if self.is_decoder:
            whole = [[*source, *target] for source, target in zip(sources, targets, strict=True)]
            found = self.model.score_batch(self._spell(whole, 1), max_batch_size=1)
            return [each.log_probs[len(each.log_probs) - len(t) :] for each, t in zip(found, targets, strict=True)]
        # it adds EOS
        given = self._spell([target[:-1] if target[-1] == EOS else target for target in targets], 1)
        found = self.model.score_batch(self._spell(sources, 0), given, max_batch_size=BATCH)
        return [list(each.log_probs[: len(t)]) for each, t in zip(found, targets, strict=True)]

    def logits(self, source: list[int]) -> np.ndarray:
        raise NotImplementedError  # no such model is exported to CTranslate2

    def columns(self) -> None:
        return None


class OnnxModel:
    """A folder of ONNX files, run by onnxruntime."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        import onnxruntime

        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.translator: OnnxSearch | None = None
        if (folder / "encoder.onnx").exists():
            self.translator = OnnxSearch(folder, torch.get_num_threads())
        else:
            (path,) = folder.glob("*.onnx")
            self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def translate(self, sources: list[list[int]], prefix: list[int], beam: int, limit: int) -> list[list[int]]:
        assert self.translator is not None
        return [self.translator.search(source, beam, limit, prefix=prefix) for source in sources]

    def continue_(self, contexts: list[list[int]], limit: int) -> list[list[int]]:
        return [self._continue(context, limit)[0] for context in contexts]

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        pairs = zip(sources, targets, strict=True)
        if self.translator is not None:
            return [self.translator.score(source, target) for source, target in pairs]
        return [self._continue(source, len(target), target)[1] for source, target in pairs]

    def _continue(self, ids: list[int], limit: int, given: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """The most likely tokens, or the given ones, and their log-probabilities."""
        layers, heads, features = self.config["cache_shape"]
        cache = [np.zeros((layers, 1, heads, 0, features), np.float32) for _ in range(2)]
        output: list[int] = []
        logprobs: list[float] = []
        fed, begin = ids, 0
        while len(output) < limit:
            inputs = {"input_ids": np.array([fed]), "position": np.arange(begin, begin + len(fed))}
            logits, *cache = self.session.run(None, inputs | dict(zip(("keys", "values"), cache, strict=True)))
            begin += len(fed)
            token = given[len(output)] if given else int(logits[0].argmax())
            if token == EOS and not given:
                break
            output.append(token)
            logprobs.append(float(log_softmax(logits[0])[token]))
            fed = [token]
        return output, logprobs

    def logits(self, source: list[int]) -> np.ndarray:
        ids = np.array([source])
        (found,) = self.session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        logits: np.ndarray = found.reshape(-1, found.shape[-1])
        return logits

    def columns(self) -> None:
        return None


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
        self.is_decoder = not self.model.config.is_encoder_decoder
        self.theirs = [ids_of(tokenizer) for tokenizer in run.tokenizers]
        self.ours: list[Sequence[int]] = [inverse(ids) for ids in self.theirs]
        generates = self.model.can_generate()  # encoders have no generation_config
        ends = (self.model.generation_config if generates else self.model.config).eos_token_id
        self.special = {*(ends if isinstance(ends, list) else [ends]), self.model.config.pad_token_id}
        self.classes = len(run.classes)
        banned = set() if self.classes else {*never_generated(run)}
        self.banned = [number for number, token in enumerate(self.ours[1]) if token in banned]  # not EOS = BOS

    def _ids(self, tokens: Sequence[int], side: int) -> torch.Tensor:
        return torch.tensor([[self.theirs[side][token] for token in tokens]])

    def _start(self, prefix: Sequence[int]) -> torch.Tensor:
        start = torch.tensor([[self.model.config.decoder_start_token_id]])
        return torch.cat([start, self._ids(prefix, 1).long()], dim=1)

    def encode(self, text: str) -> list[int]:
        ours = self.ours[0]
        return [ours[token] if token < len(ours) else -1 for token in self.tokenizer(text)["input_ids"]]

    def _generate(self, limit: int, start: int, **inputs: Any) -> list[int]:
        with torch.inference_mode():
            mask = torch.ones_like(inputs["input_ids"])
            out = self.model.generate(**inputs, attention_mask=mask, do_sample=False, max_new_tokens=limit)[0].tolist()
        tokens = []
        for token in out[start:]:
            if token in self.special:
                break
            tokens.append(self.ours[1][token])
        return tokens

    def translate(self, sources: list[list[int]], prefix: list[int], beam: int, limit: int) -> list[list[int]]:
        settings: dict[str, Any] = {"num_beams": beam, "forced_eos_token_id": None, "forced_bos_token_id": None}
        if beam > 1:
            settings |= {"length_penalty": 0.0, "early_stopping": "never"}
        start = self._start(prefix)
        return [
            self._generate(limit, start.shape[1], input_ids=self._ids(source, 0), decoder_input_ids=start, **settings)
            for source in sources
        ]

    def continue_(self, contexts: list[list[int]], limit: int) -> list[list[int]]:
        settings: dict[str, Any] = {"num_beams": 1}
        if self.model.generation_config.suppress_tokens is None:  # of imported models: the run never generates tags
            settings["suppress_tokens"] = self.banned
        return [
            self._generate(limit, len(context), input_ids=self._ids(context, 1), **settings) for context in contexts
        ]

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        return [self._score(source, target) for source, target in zip(sources, targets, strict=True)]

    def _score(self, source: list[int], target: list[int]) -> list[float]:
        wanted = self._ids(target, 1)[0].long()
        with torch.inference_mode():
            if self.is_decoder:
                logits = self.model(input_ids=self._ids([*source, *target], 1)).logits[0, len(source) - 1 : -1]
            else:
                start = self._start(target[:-1])
                logits = self.model(input_ids=self._ids(source, 0), decoder_input_ids=start).logits[0]
        chosen = logits[torch.arange(len(wanted)), wanted]
        allowed = logits.index_fill(-1, torch.tensor(self.banned, dtype=torch.long), -torch.inf)
        found: list[float] = (chosen - allowed.logsumexp(-1)).tolist()
        return found

    def logits(self, source: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found = self.model(input_ids=self._ids(source, 0)).logits
        logits: np.ndarray = found.flatten(0, -2).numpy()
        return logits

    def columns(self) -> Sequence[int] | None:
        return None if self.classes else self.ours[1]


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
    if find_spec(package) is None:
        return None
    if run.recipe.data.kind not in ("images", "speech"):
        return agreements(run, opener(run, folder))
    found = compare_logits(run, logit_pairs(run, folder, count=IMAGES))
    require_agreement(run, found)
    return [found]
