"""Measure the time from starting `regard translate` to its first translation, minus that of a bare `import torch`.

    python -m bench.startup [--repeats 5] [--threads 2]

A small Transformer (a vocabulary of 8,000, random weights) translates one short sentence into at most 12 tokens on the
CPU. The time is that of the whole process. Runs alternate with `import torch` alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import heading
from bench.tables import Comparison, Measured, table

VOCABULARY = 8000


def write(folder: Path) -> None:
    """Write a run with random weights."""
    import torch

    from regard import tensor_io
    from regard.recipes.schema import Recipe
    from regard.run_dir import RunDir
    from regard.text.tokenizers import WordTokenizer

    recipe = Recipe.model_validate(
        {
            "data": {"imported": "pairs"},
            "text": {"unit": "word", "vocabulary": VOCABULARY},
            "model": {"family": "transformer", "size": "small"},
            "decoding": {"max_ratio": 1.0, "max_extra": 6},
        }
    )
    run = RunDir.create(folder, recipe)
    tokenizer = WordTokenizer([], [f"w{n}" for n in range(4, VOCABULARY)])
    run.save_tokenizers(tokenizer, tokenizer)
    torch.manual_seed(1)
    tensor_io.save(run.best, tensor_io.model_tensors(run.fresh_model()), {"step": 0, "weights": "random"})


def seconds(words: list[str], threads: int) -> float:
    begin = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - begin


def measure(repeats: int = 5, threads: int = 2) -> list[Comparison]:
    """Run both commands in turn; the first round, which reads files from disk, is discarded."""
    with tempfile.TemporaryDirectory(prefix="regard-bench-") as home:
        run = Path(home) / "run"
        write(run)
        commands = {
            "first": ["-m", "regard", "translate", str(run), "w10 w11 w12 w13 w14", "--device", "cpu", "--quiet"],
            "torch": ["-c", "import torch"],
        }
        rounds = [{name: seconds(words, threads) for name, words in commands.items()} for _ in range(repeats + 1)]
    beyond = [turn["first"] - turn["torch"] for turn in rounds[1:]]
    return [
        Comparison("regard translate: start to first output, less `import torch`", "s", Measured("regard", beyond), [])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print(heading(given.threads) + "\n")
    print(table(measure(given.repeats, given.threads)))


if __name__ == "__main__":
    main()
