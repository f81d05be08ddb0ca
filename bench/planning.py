"""Planned against measured: memory and time of a training step on this GPU.

    python -m bench.planning --out planning.json [--only base] [--steps 20]

Each case trains a few steps as `regard train` does, captured as a CUDA graph unless the case says otherwise, on batches
of the planner's synthetic sentences. The planner gets the matmul rate measured here; all other constants are its own.
`kernels` are milliseconds by kind of kernel, from the profiler, beside the planner's: they show which constant is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from regard import accelerate, devices
from regard.benchmark import matrix_rate
from regard.planning import HARDWARE, speed
from regard.planning.plan import rank_memory
from regard.planning.trace import Example, is_attention, trace
from regard.recipes import load
from regard.registry import OPTIMIZERS
from regard.training.captured_step import make_step

CAPTURED = "training.backend=captured"  # compiling takes half a minute
GPT = ["text.vocabulary=50304", "model.dropout=0.1"]
CASES: dict[str, tuple[str, list[str]]] = {
    "base": ("wmt14-en-de-base", []),
    "big": ("wmt14-en-de-big", []),
    "gpt2-124m": ("wikitext2", ["model.size=gpt2", "training.batch_tokens=32768", *GPT]),
    "gpt2-350m": ("wikitext2", ["model.size=gpt2-medium", "training.batch_tokens=16384", CAPTURED, *GPT]),
    "gpt2-774m": ("wikitext2", ["model.size=gpt2-large", "training.batch_tokens=16384", CAPTURED, *GPT]),
    "base-captured": ("wmt14-en-de-base", [CAPTURED]),
    "big-captured": ("wmt14-en-de-big", [CAPTURED]),
    "base-accumulated": ("wmt14-en-de-base", ["training.accumulate=4"]),
    "base-plain": ("wmt14-en-de-base", ["training.backend=plain"]),
    "base-checkpointed": ("wmt14-en-de-base", ["training.checkpoint_activations=true"]),
    "gpt2-124m-rows": ("stories", ["model.size=gpt2", "training.batch_tokens=32768", *GPT]),
    "base-compiled": ("wmt14-en-de-base", ["training.backend=compiled"]),
}
TINY = ["model.width=64", "model.ffn_width=128", "model.heads=2", "training.batch_tokens=1024", "text.vocabulary=512"]


def bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy of 1 GiB, read and written."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(recipe: Any, device: torch.device, steps: int) -> dict[str, Any]:
    """Train a few steps; return the peak of the memory and the median time of a step."""
    settings = recipe.training
    example = Example.of(recipe, gpu=device.type == "cuda")
    torch.manual_seed(1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = example.model(recipe).to(device)
    backend, shape = example.backend, example.shape
    if shape is not None:
        static = shape.unflatten(shape.flatten(example.batch).to(device))
        backend = accelerate.for_training(model, settings, device, backend, static)
    else:
        accelerate.for_training(model, settings, device, "plain")
    optimizer = OPTIMIZERS[settings.optimizer](model, settings)
    update = make_step(model, optimizer, None, settings, device, shape)
    batches, numbers = dict.fromkeys(range(settings.accumulate), example.batch), count(1)
    for _ in range(6):
        update(batches, next(numbers), 1e-5)
    seconds = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        update(batches, next(numbers), 1e-5)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    kinds = profiled(lambda: update(batches, next(numbers), 1e-5), device)
    return {
        "backend": backend,
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() if device.type == "cuda" else 0,
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "targets": example.targets * settings.accumulate,
        "kernels": kinds,
    }


def kind(name: str) -> str:
    """The kind of a kernel, by its name on the device or by its operator's."""
    low = name.lower()
    if is_attention(name) or any(
        part in low for part in ("_forward", "_backward_queries", "_backward_keys", "flash", "cudnn")
    ):
        return "attention"
    if any(part in low for part in ("gemm", "nvjet", "cutlass", "mm", "xmma")) and "memcpy" not in low:
        return "matmul"
    if "cross_entropy" in low:
        return "loss"
    if "add_norm" in low:
        return "norm"
    if any(part in low for part in ("adam", "multi_tensor", "lpnorm", "foreach")):
        return "update"
    return "other"


def profiled(update: Any, device: torch.device, steps: int = 3) -> dict[str, float]:
    """Milliseconds per step by kind of kernel, and the number of kernels."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            update()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    number = 0
    for event in profiler.key_averages():
        if event.self_device_time_total:
            kinds[kind(event.key)] += event.self_device_time_total / 1000 / steps
            number += event.count
    return {**{name: round(value, 3) for name, value in kinds.items()}, "count": number / steps}


def planned(recipe: Any, hardware: Any, gpu: bool) -> dict[str, Any]:
    traced = trace(recipe, gpu=gpu)
    work = speed.Compute.of(traced, hardware)
    by_table = speed.Compute.of(traced, HARDWARE["h200" if gpu else "cpu"])
    kinds: Counter[str] = Counter()
    for kernel in traced.step:
        kinds[kind(kernel.name)] += 1000 * speed.kernel_seconds(kernel, hardware) / traced.micro_batches
    kinds["update"] += 1000 * work.update
    memory = rank_memory(traced, "plain", 1, hardware)
    return {
        "peak": memory.peak,
        "seconds": recipe.training.accumulate * work.micro_batch + work.update,
        "seconds by table": recipe.training.accumulate * by_table.micro_batch + by_table.update,
        "flops": traced.model_flops,
        "parameters": traced.parameters,
        "kernels": {**{name: round(value, 3) for name, value in kinds.items()}, "count": len(traced.step)},
        "memory": {name: value for name, value in vars(memory).items() if isinstance(value, int)},
    }


def predict(names: list[str]) -> None:
    """Print what the planner's table says of an H200, which needs no GPU."""
    for name in names:
        plan = planned(load(*CASES[name]), HARDWARE["h200"], gpu=True)
        print(f"{name}: {1000 * plan['seconds']:.1f} ms, {plan['peak'] / 1e9:.2f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("planning.json"))
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=100.0, help="start no case after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script on a CPU")
    parser.add_argument("--predict", action="store_true", help="print the plans for an H200, and measure nothing")
    given = parser.parse_args()
    if given.predict:
        predict(given.only)
        return
    begin, device = time.perf_counter(), devices.pick("auto")
    gpu = device.type == "cuda"
    hardware = replace(HARDWARE["h200" if gpu else "cpu"], matmul_rate=matrix_rate(device, "auto"))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "matmul_rate": hardware.matmul_rate,
        "bandwidth": bandwidth(device),
        "cases": {},
    }
    print(
        f"{result['device']}: {hardware.matmul_rate / 1e12:.1f} TFLOP/s, {result['bandwidth'] / 1e9:.0f} GB/s",
        flush=True,
    )
    failed = []
    for name in given.only:
        if time.perf_counter() - begin > given.seconds:
            print(f"{name}: no time left", flush=True)
            failed.append(name)
            continue
        try:
            base, sets = CASES[name]
            settings = [s for s in sets if gpu or not s.startswith("training.backend")]
            recipe = load(base, [*settings, *(TINY if given.tiny else [])])
            plan, found = planned(recipe, hardware, gpu), measure(recipe, device, given.steps)
        except Exception:  # the other cases still run
            traceback.print_exc()
            failed.append(name)
            continue
        result["cases"][name] = {"planned": plan, "measured": found}
        given.out.write_text(json.dumps(result, indent=1))
        errors = [f"{1000 * found['seconds']:.1f} ms, planned {1000 * plan['seconds']:.1f}"]
        if gpu:
            errors.append(f"{found['peak'] / 1e9:.2f} GB, planned {plan['peak'] / 1e9:.2f}")
            errors += [f"{plan[key] / found[key] - 1:+.1%} {key}" for key in ("seconds", "peak")]
            errors.append(f"{plan['seconds by table'] / found['seconds'] - 1:+.1%} seconds by the table's matmul rate")
        print(f"{name} ({found['backend']}): {'; '.join(errors)}; {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache() if gpu else None
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
