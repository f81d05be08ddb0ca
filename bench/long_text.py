"""Measure time and memory of a training step on long texts, for each attention mask.

    python bench/long_text.py [--out FILE.json] [--threads 2] [--kernel auto|fused] [--longest 8192]

Two layers of width 256 with 4 heads, one text, forward and backward, on the CPU. Every case runs in its own process, so
that its peak resident memory can be measured; the figure is the peak minus the memory before the first step. The first
step also computes which keys each block of queries may attend to; later steps reuse this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

LENGTHS = (1024, 2048, 4096, 8192)
MASKS = ("causal", "window", "strided", "fixed")
MODEL = {
    "width": 256,
    "heads": 4,
    "layers": 2,
    "ffn_width": 1024,
    "dropout": 0.0,
    "mask_size": 128,
    "positions": "rotary",
}
VOCABULARY = 256


def measure(mask: str, length: int, threads: int, kernel: str) -> dict[str, float]:
    """Return the seconds of the first and of a later step, and the peak megabytes of the steps."""
    import torch

    from regard import attention
    from regard.models.gpt import GPT, GPTSettings
    from regard.packed import PackedTokens, SeqBatch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    settings = GPTSettings.model_validate({**MODEL, "mask": mask, "max_positions": length})
    model = GPT(settings, VOCABULARY, VOCABULARY).train()
    row = PackedTokens.from_lists([torch.randint(0, VOCABULARY, (length,)).tolist()])
    batch = SeqBatch(PackedTokens.from_lists([[]]), row, row.ids.roll(-1))
    before = _peak()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with attention.use_backend(kernel):
            model(batch).backward()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    return {"first": seconds[0], "seconds": seconds[1], "megabytes": _peak() - before}


def _peak() -> float:
    """Return the peak resident memory of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def in_own_process(mask: str, length: int, threads: int, kernel: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", mask, str(length), "--threads", str(threads), "--kernel", kernel]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def table(results: dict[str, dict[int, dict[str, float]]], field: str, form: str) -> str:
    lines = [f"{'':>8}" + "".join(f"{mask:>10}" for mask in results)]
    for length in next(iter(results.values())):
        lines.append(f"{length:>8}" + "".join(f"{cases[length][field]:>10{form}}" for cases in results.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernel", default="auto", help="auto, fused or blocks")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="omit longer texts")
    parser.add_argument("--case", nargs=2, metavar=("MASK", "LENGTH"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(given.case[0], int(given.case[1]), given.threads, given.kernel)))
        return
    import torch

    about = f"{platform.machine()}, {given.threads} threads, torch {torch.__version__}, kernel {given.kernel}"
    results: dict[str, dict[int, dict[str, float]]] = {mask: {} for mask in MASKS}
    for length in (n for n in LENGTHS if n <= given.longest):
        for mask in MASKS:
            results[mask][length] = in_own_process(mask, length, given.threads, given.kernel)
            print(f"{mask} {length}: {results[mask][length]['seconds']:.2f} s", file=sys.stderr)
    print(f"{about}\n\nseconds per step\n{table(results, 'seconds', '.2f')}")
    print(f"\nseconds of the first step\n{table(results, 'first', '.2f')}")
    print(f"\nmegabytes at the peak\n{table(results, 'megabytes', '.0f')}")
    if given.out:
        given.out.write_text(json.dumps({"about": about, "model": MODEL, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
