"""Compare training speed on one GPU with other libraries, eager and compiled for length buckets.

    python -m bench.gpu_training [--quick] [--only NAME ...] [--profile] [--out FILE.json]

Transformer base (width 512, 6+6 layers, 8 heads, ffn_width 2,048, 37,000 shared subwords) on synthetic sentence pairs
with log-normal lengths of about 27 tokens; GPT-2 124M on windows of 1,024 tokens. A step is forward, backward, gradient
clipping and fused AdamW, in bf16 with fp32 weights. The result is in target tokens per second, without padding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch

from bench import machine

VOCABULARY = 37_000
BASE = {"size": "base", "dropout": 0.1, "max_positions": 512}
FLOPS_A_TOKEN = 0.38e9  # Transformer base: one target token and its source token, forward and backward
GPT_FLOPS_A_TOKEN = 6 * 124e6 + 12 * 12 * 768 * 1024  # weights, and attention at context 1,024 (nanoGPT's formula)


@dataclass(frozen=True)
class Rate:
    """The result of one case."""

    name: str
    tokens: float  # target tokens per second, without padding, the median
    spread: tuple[float, float]
    milliseconds: float  # per step
    real: float  # target tokens per step
    gigabytes: float  # peak
    ready: float  # seconds of compilation, graph capture and warm-up
    rate: float  # share of the matmul rate

    def __str__(self) -> str:
        return (
            f"{self.name:<44}{self.tokens:>11,.0f} tokens/s ({self.spread[0]:,.0f} to {self.spread[1]:,.0f})"
            f"{self.milliseconds:>8.1f} ms{self.real:>8,.0f} real{self.gigabytes:>7.1f} GB"
            f"{self.ready:>7.1f} s to get ready{100 * self.rate:>6.1f} % of the matrix rate"
        )


def matrix_rate() -> float:
    """Return the bf16 FLOP/s of this GPU in matmuls of 8,192 x 8,192."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 20 * 2 * 8192**3 / (time.perf_counter() - start))
    return best


def measured(name: str, step: Callable[[], int], flops: float, peak: float, *, warm: int, laps: int, each: int) -> Rate:
    """Time `laps` laps of `each` steps after `warm` steps; `step` returns its number of target tokens."""
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    ready, rates, real, seconds = time.perf_counter() - start, [], 0, 0.0
    for _ in range(laps):
        start, tokens = time.perf_counter(), 0
        for _ in range(each):
            tokens += step()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        rates.append(tokens / took)
        real, seconds = real + tokens, seconds + took
    middle = statistics.median(rates)
    steps = laps * each
    memory = torch.cuda.max_memory_allocated() / 1e9
    share = middle * flops / peak
    return Rate(name, middle, (min(rates), max(rates)), 1000 * seconds / steps, real / steps, memory, ready, share)


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Return log-normal lengths of sources and targets, correlated; about 27 on average."""
    random = torch.Generator().manual_seed(seed)
    log = 3.15 + 0.55 * torch.randn(count, generator=random)
    source = (log.exp() + 1).clamp(3, 200)
    target = (log + 0.15 * torch.randn(count, generator=random)).exp().add(1).clamp(3, 200)
    return [(int(s), int(t)) for s, t in zip(source.tolist(), target.tolist(), strict=True)]


# -- ours --------------------------------------------------------------------------------------------------------------


def packed(budget: int, batches: int) -> list[Any]:
    """Return static batches of random pairs, packed as in `regard train`."""
    from regard.data.budgets import SOURCE_MULTIPLE
    from regard.packed import SeqBatch

    random, found = torch.Generator().manual_seed(1), []
    room = -(-round(budget * 1.02) // SOURCE_MULTIPLE) * SOURCE_MULTIPLE
    pairs = iter(lengths(2 * batches * budget // 20, 2))
    for _ in range(batches):
        sources, targets = [], []
        used = [0, 0]
        for s, t in pairs:
            if used[0] + s > room or used[1] + t > budget:
                break
            used = [used[0] + s, used[1] + t]
            for n, side in ((s, sources), (t, targets)):
                side.append(torch.randint(5, VOCABULARY, (n,), generator=random).tolist())
        found.append(SeqBatch.from_lists(sources, targets, bos=1, source_size=room, target_size=budget))
    return found


def ours(model: Any, batches: list[Any], shape: Any, kind: str, settings: Any) -> Callable[[], int]:
    """Return regard's training step, which cycles through the batches."""
    from regard import accelerate
    from regard.training.captured_step import make_step

    device = torch.device("cuda")
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    accelerate.fuse(model)
    if kind == "compiled":
        accelerate.compile_parts(model)
    update = make_step(model, optimizer, None, settings, device, None if kind == "plain" else shape)
    turn = cycle(batches)
    numbers = count(1)
    return lambda: update({0: next(turn)}, next(numbers), 1e-4)


def transformer(budget: int, kind: str) -> Callable[[], int]:
    from regard.models.transformer import Transformer
    from regard.models.transformer_settings import TransformerSettings
    from regard.recipes.schema import TrainingSettings
    from regard.training.static_batch import StaticBatchShape

    torch.manual_seed(1)
    batches = packed(budget, 8)
    most = max(len(batch.inputs.layout) for batch in batches)
    for layout in (layout for batch in batches for layout in (batch.source.layout, batch.inputs.layout)):
        layout.bounds = most, 200
    shape = StaticBatchShape(batches[0])
    settings = TrainingSettings(precision="bf16", label_smoothing=0.1, max_grad_norm=1.0)
    model = Transformer(TransformerSettings.model_validate(BASE), VOCABULARY, VOCABULARY)
    return ours(model, batches, shape, kind, settings)


def gpt2(windows: int, kind: str) -> Callable[[], int]:
    from regard.models.gpt import GPT, GPTSettings
    from regard.packed import PackedLayout, PackedTokens, SeqBatch
    from regard.recipes.schema import TrainingSettings
    from regard.training.static_batch import StaticBatchShape

    torch.manual_seed(1)
    context, vocabulary = 1024, 50304
    batches = []
    for _ in range(4):
        ids = torch.randint(0, vocabulary, (windows * context,))
        rows, nothing = PackedLayout([context] * windows), PackedLayout([0] * windows)
        batches.append(SeqBatch(PackedTokens(ids[:0], nothing), PackedTokens(ids, rows), ids.roll(-1)))
    shape = StaticBatchShape(batches[0])
    settings = TrainingSettings(precision="bf16", label_smoothing=0.0, max_grad_norm=1.0)
    model = GPT(GPTSettings.model_validate({"size": "gpt2", "dropout": 0.0}), vocabulary, vocabulary)
    return ours(model, batches, shape, kind, settings)


def profile(step: Callable[[], int], rows: int = 25) -> str:
    """Return the profile of a few steps by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    return seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=rows, max_name_column_width=90)


def idle(step: Callable[[], int], milliseconds: float) -> float:
    """Return the share of about two seconds of steps in which no kernel ran."""
    from regard.benchmark import idle_share

    def made(steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return idle_share(made, max(round(2000 / milliseconds), 5))


def peer(kind: str, budget: int, compiled: bool) -> tuple[Callable[[], int], int]:
    """Return the training step of nn.Transformer or Marian, and after how many steps every bucket was used."""
    from bench import gpu_peers

    made = {"nn.Transformer": gpu_peers.TorchTransformer, "Marian": gpu_peers.Marian}[kind]
    pairs = lengths(16 * budget // 20, 2)
    sizes = gpu_peers.Sizes()
    return gpu_peers.translator(made, pairs, budget, compiled=compiled, device="cuda", sizes=sizes)


def peer_gpt2(plain: bool) -> tuple[Callable[[], int], int]:
    from bench import gpu_peers

    return gpu_peers.gpt2(64, plain=plain, compiled=True, device="cuda", sizes=gpu_peers.Sizes()), 1


@dataclass(frozen=True)
class Case:
    """One row of the table; `make` returns the step, and after how many steps every shape was used."""

    make: Callable[[], tuple[Callable[[], int], int]]
    flops: float
    slow: bool = False  # takes minutes to compile


def _ours(make: Callable[[], Callable[[], int]], flops: float) -> Case:
    return Case(lambda: (make(), 1), flops)


CASES = {
    "transformer-32k": _ours(lambda: transformer(32_768, "compiled"), FLOPS_A_TOKEN),
    "transformer-32k-captured": _ours(lambda: transformer(32_768, "captured"), FLOPS_A_TOKEN),
    "transformer-32k-marian-compiled": Case(lambda: peer("Marian", 32_768, True), FLOPS_A_TOKEN, slow=True),
    "transformer-32k-torch-compiled": Case(lambda: peer("nn.Transformer", 32_768, True), FLOPS_A_TOKEN, slow=True),
    "transformer-32k-marian": Case(lambda: peer("Marian", 32_768, False), FLOPS_A_TOKEN),
    "transformer-32k-torch": Case(lambda: peer("nn.Transformer", 32_768, False), FLOPS_A_TOKEN),
    "transformer-8k": _ours(lambda: transformer(8_192, "compiled"), FLOPS_A_TOKEN),
    "transformer-8k-captured": _ours(lambda: transformer(8_192, "captured"), FLOPS_A_TOKEN),
    "transformer-8k-marian-compiled": Case(lambda: peer("Marian", 8_192, True), FLOPS_A_TOKEN, slow=True),
    "transformer-8k-marian": Case(lambda: peer("Marian", 8_192, False), FLOPS_A_TOKEN),
    "gpt2": _ours(lambda: gpt2(64, "compiled"), GPT_FLOPS_A_TOKEN),
    "gpt2-plain-compiled": Case(lambda: peer_gpt2(plain=True), GPT_FLOPS_A_TOKEN),
    "gpt2-huggingface-compiled": Case(lambda: peer_gpt2(plain=False), GPT_FLOPS_A_TOKEN),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help="of: " + ", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no cases that take minutes to compile")
    parser.add_argument("--profile", action="store_true", help="also list the time per kernel, and the idle time")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    given = parser.parse_args()
    print(machine.heading())
    peak = matrix_rate()
    print(f"matrix rate {peak / 1e12:.0f} TFLOP/s in bf16\n", flush=True)
    found = []
    chosen = given.only or [name for name, case in CASES.items() if not (given.quick and case.slow)]
    for name in chosen:
        case = CASES[name]
        torch.cuda.empty_cache()
        try:
            step, shapes = case.make()
            rounds = max(10, shapes)  # every lap uses every bucket
            rate = measured(
                name, step, case.flops, peak, warm=max(6, shapes), laps=3 if given.quick else 7, each=rounds
            )
        except Exception as error:
            print(f"{name}: failed: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            continue
        print(rate, flush=True)
        found.append(rate.__dict__)
        if given.profile:
            print(
                f"{100 * idle(step, rate.milliseconds):.1f} % of the time without a kernel\n{profile(step)}", flush=True
            )
        del step
        torch._dynamo.reset()
    if given.out:
        facts = {"about": machine.about(), "matrix_rate": peak, "rates": found}
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
