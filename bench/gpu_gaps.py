"""Measure on a GPU what the documents call not measured, the most important first, within a time limit.

    python -m bench.gpu_gaps --out gaps.json [--seconds 1500] [--data DATA] [--only NAME ...]
    python -m bench.gpu_gaps --out gaps.json --device cpu --quick        # tiny sizes, to try every case without a GPU

Each case is one or several commands in processes of their own, with a time limit. After each case, the file gets what
it printed, its exit status and what it wrote, so that nothing is lost if the next one hangs or the time is up; cases
that the file has with status 0 are not measured again, unless --only names them. Where a command may take ten minutes,
call it several times with --seconds 580 and the same file. DATA contains fashion-mnist, cifar10 (cifar10-train.npz and
cifar10-test.npz, see docs/vision.md), europarl-en-fr, europarl-en-de and alignments; without it, the cases that need it
are left out. The others need torchvision and what bench/requirements.txt lists.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import machine

KEPT = 20_000  # last characters of what a case printed
ENDING = 10  # seconds in which torchrun ends its workers
LEAST = 20  # seconds that a case has to have left


@dataclass(frozen=True)
class Case:
    """Commands for `python -m`, separated by ";". OUT, DEVICE, WORK and DATA in them are replaced."""

    what: str
    seconds: float  # limit
    words: str
    quick: str  # in place of words, to try the case
    needs_data: bool = False
    packages: tuple[str, ...] = ()


def classifier(recipe: str, folder: str, seeds: Iterable[int], changes: str = "") -> str:
    """Train and evaluate a recipe with each seed."""
    return "; ".join(
        f"regard train {recipe} --data DATA/{folder} --seed {seed} --out WORK/{seed} --quiet {changes}; "
        f"regard evaluate WORK/{seed} --json --quiet"
        for seed in seeds
    )


TINY = "bench.distribution --tiny --rounds 1 --steps 1 --out OUT --only "
TRIED = "training.steps=20 training.warmup=5 model.size=tiny model.width=64 model.heads=2 training.batch_tokens=2048"
TRIED_IMAGES = (
    "--set training.steps=2 --set training.validate_every=2 --set model.size=tiny --set training.batch_tokens=32"
)
TEXT, GUIDED = "bench.hansards DATA WORK/text", "bench.guided WORK/text --out WORK/runs --together"
CASES = {
    "fsdp-774m": Case(
        "captured FSDP steps of GPT-2 774M: time, memory and loss against the plain path",
        210,
        "bench.distribution --only fsdp-774m --out OUT",
        TINY + "fsdp-774m",
    ),
    "saving": Case(
        "how long training waits for a save, plain and under FSDP",
        130,
        "bench.distribution --only saving --out OUT",
        TINY + "saving",
    ),
    "fashion-mnist": Case(
        "Fashion-MNIST, three seeds",
        280,
        classifier("fashion-mnist-gpu", "fashion-mnist", (1, 2, 3)),
        classifier("fashion-mnist-gpu", "fashion-mnist", (1,), TRIED_IMAGES),
        needs_data=True,
    ),
    "vision": Case(
        "training of a ViT against torchvision's, compiled",
        170,
        "bench.gpu_vision --only cifar base --modes default --laps 3 --device DEVICE --out OUT",
        "bench.gpu_vision --only cifar base --modes default --laps 1 --tiny --device DEVICE --out OUT",
        packages=("torchvision",),
    ),
    "imported": Case(
        "an imported decoder against transformers, eager and compiled, at batch 1 and 32",
        230,
        "bench.imported --device DEVICE",
        "bench.imported --device DEVICE --tiny --tokens 4 --repeats 1 --batches 1 --threads 1",
        packages=("transformers",),
    ),
    "engine": Case(
        "continuous batching against offline batches",
        130,
        "bench.serve_engine --device DEVICE --precision bf16 --size base --sentences 1500 --callers 64 --repeat 2",
        "bench.serve_engine --device DEVICE --sentences 8 --callers 2 --repeat 1 --rows 4 --vocabulary 100",
    ),
    "server": Case(
        "servers under load, and offline decoding: regard and Hugging Face's generate behind FastAPI",
        220,
        "bench.serve_load --device DEVICE --size base --seconds 6 --repeats 1",
        "bench.serve_load --device DEVICE --size tiny --seconds 1 --repeats 1 --clients 2 --systems regard --threads 1",
        packages=("locust", "fastapi", "uvicorn", "transformers"),
    ),
    "ddp-captured": Case(
        "captured and compiled DDP steps, whose sums overlap with the backward pass",
        170,
        "bench.distribution --only base-captured base-compiled --out OUT",
        TINY + "base-captured base-compiled",
    ),
    "fsdp-base": Case(
        "base under FSDP, with a profile",
        100,
        "bench.distribution --only fsdp-base --out OUT",
        TINY + "fsdp-base",
    ),
    "nccl": Case(
        "one process under torchrun with NCCL: training, SIGTERM, SIGKILL, resuming",
        220,
        "bench.distribution --functional --out OUT",
        "bench.distribution --functional --tiny --out OUT",
    ),
    "europarl-de-en": Case(
        "word alignment of German and English, without and with guidance",
        480,
        f"{TEXT} --german; {GUIDED}",
        f"{TEXT} --german --pairs 300; {GUIDED} --settings {TRIED}",
        needs_data=True,
    ),
    "hansards": Case(
        "word alignment of the Hansards, without and with guidance",
        480,
        f"{TEXT}; {GUIDED}",
        f"{TEXT} --pairs 300; {GUIDED} --settings {TRIED}",
        needs_data=True,
    ),
    **{
        f"cifar10-seed-{seed}": Case(
            "CIFAR-10 with a further seed",
            330,
            classifier("cifar10", "cifar10", (seed,)),
            classifier("cifar10", "cifar10", (seed,), TRIED_IMAGES),
            needs_data=True,
        )
        for seed in (2, 3)
    },
    "plans": Case(
        "planned against measured memory and step time again: base, big, GPT-2 124M, 350M and 774M",
        200,
        "bench.planning --only gpt2-774m gpt2-350m base big gpt2-124m --steps 10 --seconds 180 --out OUT",
        "bench.planning --only gpt2-350m base --steps 1 --tiny --out OUT",
    ),
}


def run(words: list[str], seconds: float, log: Path) -> int | None:
    """Run a module in a process group of its own; return its exit status, None if it took too long."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that nothing is lost of a process that is ended
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: torchrun ends its workers, which are in groups of their own."""
    last = time.monotonic() + ENDING
    with contextlib.suppress(ProcessLookupError):  # there is none left
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < last:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(case: Case, seconds: float, given: argparse.Namespace) -> dict[str, Any]:
    """Run a case with a time limit in seconds; return its results, status and output."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        values = {"OUT": str(work / "result.json"), "DEVICE": given.device, "WORK": scratch, "DATA": str(given.data)}
        commands = (case.quick if given.quick else case.words).split("; ")
        status: int | None = 0
        for command in commands:
            words = [replaced(word, values) for word in command.split()]
            if status == 0:
                status = run(words, seconds - (time.monotonic() - began), work / "log")
        file = Path(values["OUT"])
        return {
            "what": case.what,
            "command": "; ".join(f"python -m {command.strip()}" for command in commands),
            "status": "time limit" if status is None else status,
            "seconds": round(time.monotonic() - began, 1),
            "printed": (work / "log").read_text(errors="replace")[-KEPT:],
            "result": json.loads(file.read_text()) if file.exists() else None,
        }


def replaced(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def write(file: Path, content: dict[str, Any]) -> None:
    draft = file.with_name(file.name + ".tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500.0, help="of all cases together")
    parser.add_argument("--data", type=Path, help="the folder of data; without it, word alignment is left out")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    given = parser.parse_args()
    if given.device == "cuda" and machine.accelerator() is None:
        sys.exit("PyTorch finds no GPU: --device cpu --quick tries the script without one")
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for benchmarks that choose their device
    began = time.monotonic()
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"cases": {}}
    found["about"] = machine.about()
    for name in given.only or CASES:
        case, left = CASES[name], given.seconds - (time.monotonic() - began)
        lacking = [package for package in case.packages if find_spec(package) is None]
        lacking += ["--data"] * (case.needs_data and given.data is None)
        if lacking:
            print(f"{name}: left out, without {', '.join(lacking)}", flush=True)
        elif given.only is None and found["cases"].get(name, {}).get("status") == 0:
            print(f"{name}: measured before", flush=True)
        elif left < LEAST:
            print(f"{name}: no time left", flush=True)
        else:
            limit = case.seconds * (4 if given.quick else 1)  # other work may share a CPU
            entry = found["cases"][name] = measure(case, min(limit, left), given)
            write(given.out, found)
            last = entry["printed"].strip().splitlines()[-1:]
            print(f"{name}: status {entry['status']}, {entry['seconds']} s; {' '.join(last)[:200]}", flush=True)
    print(f"{given.out}: {sum(entry['status'] == 0 for entry in found['cases'].values())} of {len(CASES)} cases")


if __name__ == "__main__":
    main()
