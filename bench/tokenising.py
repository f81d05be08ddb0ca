"""Tokenizing a corpus of line-aligned files: lines per second and memory, against `datasets.map`.

    python -m bench.tokenising --lines 10000000 --processes 2 --turns 1

The corpus is the built-in English-Spanish one, repeated, in gzipped or plain files in a temporary folder. Both tokenize
both sides with the same BPE vocabulary and write the tokens to disk; they take turns, since the machine may be busy.
Each runs in a process of its own, whose peak memory and processor time are reported, and those of its children (the
largest one's memory, the sum of their times): the latter tell more where other programs use the machine. `--seconds`
bounds the whole: no turn begins after it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

UNIQUE = 100_000  # pairs of the built-in corpus, which are repeated


def write_corpus(folder: Path, lines: int, suffix: str) -> None:
    from regard.data import builtin
    from regard.data.lines import open_compressed

    pairs = [(pair.source, pair.target) for pair in builtin.pairs("en-es", "train", UNIQUE)]
    with open_compressed(folder / f"a.en{suffix}", "wb") as en, open_compressed(folder / f"a.es{suffix}", "wb") as es:
        for source, target in islice(cycle(pairs), lines):
            en.write(f"{source}\n".encode())
            es.write(f"{target}\n".encode())


def ours(folder: Path, suffix: str, processes: int) -> dict[str, Any]:
    from regard.data import workers
    from regard.data.token_cache import build
    from regard.recipes.schema import Recipe
    from regard.text import Tokenizer

    os.environ["REGARD_CACHE"] = str(folder / "cache")
    workers.usable_cores = lambda: processes
    data = {"folder": str(folder), "source": f"a.en{suffix}", "target": f"a.es{suffix}"}
    recipe = Recipe.model_validate({"data": data, "text": {"vocabulary": 8000}})
    tokenizer = Tokenizer.from_json((folder / "tokenizer.json").read_text())
    start = time.perf_counter()
    (store,) = build(recipe, tokenizer, tokenizer)
    return {"seconds": time.perf_counter() - start, "tokens": store.report.source_tokens + store.report.target_tokens}


def theirs(folder: Path, suffix: str, processes: int) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_DATASETS_CACHE"] = str(folder / "hf")
    import datasets

    from regard.text import EOS, Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_json((folder / "tokenizer.json").read_text())
    start = time.perf_counter()
    sides = [
        datasets.load_dataset("text", data_files=str(folder / f"a.{side}{suffix}"), split="train")
        for side in ("en", "es")
    ]
    both = datasets.concatenate_datasets(
        [sides[0].rename_column("text", "en"), sides[1].rename_column("text", "es")], axis=1
    )

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {side: [[*ids, EOS] for ids in tokenizer.encode_batch(batch[side])] for side in ("en", "es")}

    features = datasets.Features({side: datasets.Sequence(datasets.Value("uint16")) for side in ("en", "es")})
    found = both.map(encode, batched=True, batch_size=10_000, num_proc=processes, features=features)
    return {"seconds": time.perf_counter() - start, "rows": len(found)}


def child(given: argparse.Namespace) -> None:
    found = (ours if given.child == "ours" else theirs)(given.folder, given.suffix, given.processes)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peaks, used = ([round(u.ru_maxrss / 1024) for u in usages], [round(u.ru_utime + u.ru_stime, 2) for u in usages])
    print(json.dumps({**found, "megabytes": peaks, "processor seconds": used}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--suffix", default="", choices=["", ".gz", ".xz", ".zst"])
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no measurement after this time")
    parser.add_argument("--only", nargs="*", default=["ours", "one process", "datasets.map"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given)
        return
    from regard.data import builtin
    from regard.text import train

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, given.lines, given.suffix)
        sample = [text for pair in builtin.pairs("en-es", "train", 20_000) for text in (pair.source, pair.target)]
        (folder / "tokenizer.json").write_text(train(sample, "bpe", 8000, []).to_json())
        rates: dict[str, list[float]] = {name: [] for name in given.only}
        for turn in range(given.turns):
            for what in given.only:
                if time.perf_counter() - begin > given.seconds:
                    print(f"turn {turn + 1}, {what}: no time left")
                    continue
                processes = 1 if what == "one process" else given.processes
                part = "theirs" if what == "datasets.map" else "ours"
                command = [sys.executable, "-m", "bench.tokenising", "--child", part, "--folder", str(folder)]
                command += ["--suffix", given.suffix, "--processes", str(processes)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(what, done.stderr[-500:])
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                rates[what].append(given.lines / found["seconds"])
                print(f"turn {turn + 1}, {what}: {rates[what][-1]:,.0f} lines/s, {found}", flush=True)
                subprocess.run(["rm", "-rf", str(folder / "cache"), str(folder / "hf")], check=True)
        for what, each in rates.items():
            if each:
                print(f"{what}: median {statistics.median(each):,.0f} lines/s")


if __name__ == "__main__":
    main()
