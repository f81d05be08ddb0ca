"""Translate with a model that `regard export --to onnx` wrote. Needs numpy, onnxruntime and tokenizers, nothing else.

    python translate.py FOLDER 'a sentence' 'another one'        # or lines on standard input
    python translate.py FOLDER --beam 1 < sentences.txt

encoder.onnx turns source tokens into the keys and values that the decoder attends to; decoder.onnx computes one step:
the logits of the next token, and the keys and values of the token just fed, appended to those before it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class OnnxSearch:
    """Greedy and beam search over an encoder and a decoder in ONNX."""

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        import onnxruntime
        import tokenizers

        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(str(folder / name), options, providers=onnxruntime.get_available_providers())
            for name in ("encoder.onnx", "decoder.onnx")
        )
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        other = folder / "target_tokenizer.json"
        self.target = tokenizers.Tokenizer.from_file(str(other)) if other.exists() else self.tokenizer

    def __call__(self, text: str, beam: int = 4, length_penalty: float | None = None) -> str:
        """The translation of a text."""
        text = text.lower() if self.config["lowercase"] else text
        if not text.strip():
            return ""
        alpha = self.config["length_penalty"] if length_penalty is None else length_penalty
        tags = self.config["source_tags"]
        ids = [*tags, *self.tokenizer.encode(text).ids[len(tags) - self.config["max_positions"] :]]
        wanted = self.config["max_ratio"] * len(ids) + self.config["max_extra"]
        limit = int(min(wanted, self.config["max_positions"] - 1))
        found = self.search(ids, beam, limit, alpha, self.config["target_tags"])
        return str(self.target.decode(found, skip_special_tokens=True))

    def search(
        self, source: list[int], beam: int, limit: int, alpha: float = 0.0, prefix: Sequence[int] = ()
    ) -> list[int]:
        """The tokens of the best output, of at most `limit` tokens, for one source; `beam` 1 is greedy search.

        The output begins with the prefix, and is returned without it.
        """
        eos = self.config["eos"]
        cross, cache = self._start(source)
        fed = [self.config["bos"], *prefix]
        for step, token in enumerate(fed[:-1]):
            _, cache = self._step(np.array([[token]]), step, cache, cross)
        tokens, scores = np.array([fed[-1:]], np.int64), np.zeros(1)
        finished: list[tuple[float, list[int]]] = []
        for step in range(limit):
            logits, cache = self._step(tokens[:, -1:], len(prefix) + step, cache, cross)
            total = scores[:, None] + log_softmax(logits)  # [beams, V]
            best = np.argsort(-total, axis=None, kind="stable")[: 2 * beam]
            kept: list[tuple[Any, Any]] = []
            for parent, token in zip(*np.unravel_index(best, total.shape), strict=True):
                if len(kept) == beam:
                    break
                if token == eos or step == limit - 1:
                    output = tokens[parent, 1:].tolist() + ([] if token == eos else [int(token)])
                    finished.append((float(total[parent, token]) / _penalty(alpha, step + 1), output))
                if token != eos:
                    kept.append((parent, token))
            live = max(total[parent, token] for parent, token in kept)
            if self._is_over(finished, live, alpha, limit):
                break
            rows = np.array([parent for parent, _ in kept])
            tokens = np.concatenate([tokens[rows], np.array([[token] for _, token in kept], np.int64)], axis=1)
            scores = np.array([total[parent, token] for parent, token in kept])
            cache = [part[:, rows] for part in cache]
        return max(finished, key=lambda each: each[0])[1]

    def score(self, source: list[int], target: list[int]) -> list[float]:
        """The log-probability of every token of a target."""
        cross, cache = self._start(source)
        found = []
        for step, (fed, token) in enumerate(zip([self.config["bos"], *target], target, strict=False)):
            logits, cache = self._step(np.array([[fed]]), step, cache, cross)
            found.append(float(log_softmax(logits[0])[token]))
        return found

    def _start(self, source: list[int]) -> tuple[list[Any], list[Any]]:
        """The keys and values of a source, and an empty cache."""
        layers, heads, features = self.config["cache_shape"]
        ids = np.array([source], np.int64)
        cross = self.encoder.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        return cross, [np.zeros((layers, 1, heads, 0, features), np.float32) for _ in range(2)]

    @staticmethod
    def _is_over(finished: list[tuple[float, list[int]]], live: float, alpha: float, limit: int) -> bool:
        """Whether no live hypothesis can become the best: log-probabilities only fall."""
        return bool(finished) and max(score for score, _ in finished) >= live / _penalty(alpha, limit)

    def _step(self, tokens: Any, step: int, cache: list[Any], cross: list[Any]) -> tuple[Any, list[Any]]:
        keys, values = (np.repeat(part, len(tokens), axis=1) for part in cross)
        mask = np.ones((len(tokens), keys.shape[3]), np.int64)
        inputs = {"token": tokens[:, 0], "position": np.array([step]), "source_mask": mask}
        inputs |= {"keys": cache[0], "values": cache[1], "cross_keys": keys, "cross_values": values}
        logits, *cache = self.decoder.run(None, inputs)
        return logits, cache


def log_softmax(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _penalty(alpha: float, length: int) -> float:
    """GNMT's length penalty."""
    return float(((5 + length) / 6) ** alpha)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("text", nargs="*")
    parser.add_argument("--beam", type=int, default=4)
    given = parser.parse_intermixed_args()
    translate = OnnxSearch(given.folder)
    for line in given.text or sys.stdin:
        print(translate(line.rstrip("\n"), given.beam), flush=True)


if __name__ == "__main__":
    main()
