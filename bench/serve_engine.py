"""Continuous batching against offline batches: equal results, and throughput with many callers.

    python -m bench.serve_engine --device cuda --callers 64 --sentences 2000

The model is a Transformer with random weights (sharpened, so that few decisions are close). Offline: all sentences at
once, sorted by length into batches. Served: every caller, a thread, sends one sentence at a time to one engine. Both
are measured alternately; the figures are target tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from random import Random
from typing import Any

import torch

from regard.data.packing import sentence_batches
from regard.decoding import SearchRequest, search
from regard.decoding.continuous import Engine, EngineRunner
from regard.decoding.decisive import decisive
from regard.decoding.search import select_runner
from regard.models import build
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import BOS, EOS, PAD

BOUND = {"bf16": 0.05, "fp32": 1e-3}  # of a disturbance of the logits; what it changes is a tie


def model_of(size: str, vocabulary: int, device: str) -> Any:
    given = {"data": {"corpus": "copy"}, "model": {"family": "transformer", "size": size, "dropout": 0.0}}
    torch.manual_seed(0)
    model = build(Recipe.model_validate(given).model, vocabulary, vocabulary, True)
    with torch.no_grad():
        model.source_embedding.table.mul_(3)
    return model.eval().to(device)


def lines_of(count: int, vocabulary: int) -> list[list[int]]:
    random = Random(0)
    lengths = [max(3, min(60, round(random.lognormvariate(3, 0.5)))) for _ in range(count)]
    return [[*(random.randrange(8, vocabulary) for _ in range(n)), EOS] for n in lengths]


class Measured:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.precision = arguments.device, arguments.precision
        self.model = model_of(arguments.size, arguments.vocabulary, self.device)
        self.lines = lines_of(arguments.sentences, arguments.vocabulary)
        self.settings = DecodingSettings(beam=arguments.beam, max_ratio=1.2, max_extra=3)
        self.engine = Engine(self.model, precision=self.precision, rows=arguments.rows).start()

    def request(self, numbers: list[int], host: bool) -> SearchRequest:
        source = PackedTokens.from_lists([self.lines[n] for n in numbers])
        return SearchRequest(
            source if host else source.to(self.device), self.settings, banned=[PAD, BOS], lines=list(numbers)
        )

    def batches(self) -> list[list[int]]:
        return sentence_batches([len(line) for line in self.lines], self.settings.batch_tokens)

    def offline(self) -> tuple[dict[int, Any], float]:
        found, began = {}, time.perf_counter()
        with torch.inference_mode():
            for numbers in self.batches():
                run = select_runner(self.model, self.precision)
                found.update(zip(numbers, search(self.model, self.request(numbers, False), run=run), strict=True))
        return found, time.perf_counter() - began

    def ties(self, size: float) -> set[int]:
        """The sentences whose translation changes if logits are disturbed by up to `size`."""
        ties: set[int] = set()
        with torch.inference_mode():
            for numbers in self.batches():
                request = self.request(numbers, False)
                decided = decisive(self.model, request, search(self.model, request), size)
                ties |= {n for n, is_decided in zip(numbers, decided, strict=True) if not is_decided}
        return ties

    def served(self, callers: int) -> tuple[dict[int, Any], list[float], float]:
        found: dict[int, Any] = {}
        waits: list[float] = []
        order = iter(range(len(self.lines)))
        lock, run = threading.Lock(), EngineRunner(self.engine)

        def call() -> None:
            while True:
                with lock:
                    number = next(order, None)
                if number is None:
                    return
                began = time.perf_counter()
                (found[number],) = search(self.model, self.request([number], True), run=run)
                waits.append(time.perf_counter() - began)

        threads = [threading.Thread(target=call) for _ in range(callers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found, waits, time.perf_counter() - began


def tokens(found: dict[int, Any]) -> int:
    return sum(len(hypotheses[0].logprobs) for hypotheses in found.values())


def equality(measured: Measured) -> dict[str, Any]:
    expected, _ = measured.offline()
    got, _, _ = measured.served(64)
    bound = BOUND[measured.precision]
    differ = [n for n in expected if expected[n][0].tokens != got[n][0].tokens]
    ties = measured.ties(bound)
    return {
        "sentences": len(expected),
        "different": len(differ),
        "of them without a tie": len(set(differ) - ties),
        "sentences with a tie": len(ties),
        "bound": bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    measured = Measured(arguments)
    print("warming up", flush=True)
    lines = measured.lines
    for callers in (64, 1):  # captures the steps of several sizes
        measured.lines = lines[: 3 * callers]
        measured.served(callers)
    measured.lines = lines
    measured.offline()
    print(json.dumps({"equality": equality(measured)}), flush=True)
    for callers in arguments.callers:
        ratios, rates, waits = [], [], []
        for _ in range(arguments.repeat):
            offline, offline_seconds = measured.offline()
            served, waited, served_seconds = measured.served(callers)
            rates.append((tokens(offline) / offline_seconds, tokens(served) / served_seconds))
            ratios.append(rates[-1][1] / rates[-1][0])
            waits += waited
        waits.sort()
        entry = {
            "callers": callers,
            "offline tokens/s": round(statistics.median(a for a, _ in rates)),
            "served tokens/s": round(statistics.median(b for _, b in rates)),
            "served/offline": [round(r, 3) for r in sorted(ratios)],
            "p50 ms": round(1000 * waits[len(waits) // 2], 1),
            "p99 ms": round(1000 * waits[int(len(waits) * 0.99)], 1),
        }
        print(json.dumps(entry), flush=True)
    measured.engine.close()


if __name__ == "__main__":
    main()
