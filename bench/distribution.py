"""The cost of distribution on one device: DDP and FSDP with one process against the plain path, and what saving costs.

    python -m bench.distribution --out distribution.json [--only base-captured fsdp-774m saving] [--tiny]

A comparison builds all variants of a training step in one process, lets them take turns, and reports the median time
of a step and its ratio to the first variant. The plain variants run before a process group is initialised; the others
belong to a group of one process (NCCL on a GPU, gloo on a CPU). `saving` measures how long steps are delayed by the
snapshot and the state of a run that are written every 500 steps, the default of `training.save_every`; `profiles` are
milliseconds of a step by kind of kernel. "static" steps are those of captured ones without the CUDA graph. A variant's
peak is the memory that it allocates beyond what the variants before it hold; its loss is the sum over all steps, which
are equally many for all variants. `--functional` instead trains small runs under torchrun, stops, kills and resumes
them. `--processes` instead trains a small Transformer on a CPU in one process with two threads, and in two processes
with one each, which share the same two micro-batches a step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.planning import CASES, TINY, profiled, synchronize
from regard import accelerate, devices, distributed, sharding, tensor_io
from regard.planning.trace import Example
from regard.recipes import load
from regard.recipes.schema import Recipe, TrainingSettings
from regard.registry import OPTIMIZERS
from regard.training import checkpoint
from regard.training.captured_step import CapturedTrainingStep, make_step
from regard.training.outputs import RunOutputs
from regard.training.progress import Reporter
from regard.training.step import TrainingStep

BASE = ("wmt14-en-de-base", [])
GPT = CASES["gpt2-774m"][0], [s for s in CASES["gpt2-774m"][1] if "batch_tokens" not in s]


@dataclass(frozen=True)
class Kind:
    """How a variant of a step runs."""

    parallel: str  # how processes share the model; "" for one process without a group
    backend: str
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join([self.parallel or "one process", self.backend, *self.sets])


def gpt(tokens: int) -> tuple[str, list[str]]:
    """GPT-2 774M with batches of so many tokens."""
    return GPT[0], [*GPT[1], f"training.batch_tokens={tokens}"]


PLAIN = Kind("", "captured")
# the recipe, and the variants, of which the first is what the others are compared with
COMPARISONS: dict[str, tuple[tuple[str, list[str]], list[Kind]]] = {
    "base-captured": (BASE, [PLAIN, Kind("ddp", "captured")]),
    "base-compiled": (BASE, [Kind("", "compiled"), Kind("ddp", "compiled")]),
    "base-accumulated": ((BASE[0], ["training.accumulate=2"]), [PLAIN, Kind("ddp", "captured")]),
    "fsdp-774m": (gpt(16384), [PLAIN, Kind("fsdp", "captured"), Kind("fsdp", "static")]),
    "fsdp-774m-32k": (gpt(32768), [PLAIN, Kind("fsdp", "static")]),
    "fsdp-774m-64k": (gpt(65536), [Kind("", "static"), Kind("fsdp", "static")]),
    "fsdp-774m-options": (
        gpt(16384),
        [PLAIN, Kind("fsdp", "static", ("training.reshard=false",)), Kind("fsdp", "compiled")],
    ),
    "fsdp-base": (BASE, [PLAIN, Kind("fsdp", "captured"), Kind("fsdp", "static")]),
}


@dataclass
class Variant:
    """A training step and what it needs."""

    name: str
    recipe: Recipe
    example: Example
    step: TrainingStep
    peak: int = 0  # bytes

    def __post_init__(self) -> None:
        self._numbers = count(1)
        self._batches = dict.fromkeys(range(self.recipe.training.accumulate), self.example.batch)

    def __call__(self) -> None:
        self.step(self._batches, next(self._numbers), 1e-5)

    def seconds(self, steps: int) -> float:
        """The mean time of a step."""
        synchronize(self.step.device)
        start = time.perf_counter()
        for _ in range(steps):
            self()
        synchronize(self.step.device)
        return (time.perf_counter() - start) / steps


def prepare(base: tuple[str, list[str]], kind: Kind, tiny: bool, device: torch.device) -> Variant:
    """Build a training step as `regard train` does, and take its first steps."""
    gpu = device.type == "cuda"
    sets = [s for s in base[1] if not s.startswith("training.backend")] + (TINY if tiny else [])
    backend = ("captured" if kind.backend == "static" else kind.backend) if gpu else "plain"
    recipe = load(base[0], [*sets, *kind.sets, f"training.parallel={kind.parallel or 'ddp'}"])
    # Batches are static for every variant, so that all compute the same.
    like = recipe.model_copy(update={"training": recipe.training.model_copy(update={"backend": "captured"})})
    example = Example.of(like if gpu else recipe, gpu)
    settings = recipe.training.model_copy(update={"backend": backend})
    before = reset_peak(device)
    torch.manual_seed(1)
    with device:  # initialising a large model on the host takes longer than measuring it
        model, shape = example.model(recipe), example.shape
    static = None if shape is None else shape.unflatten(shape.flatten(example.batch).to(device))
    lines: list[str] = []
    how = accelerate.for_training(model, settings, device, backend, static, lines.append)
    shared = accelerate.data_parallel(model, settings, device, how)
    optimizer = OPTIMIZERS[settings.optimizer](model, settings)
    step = make_step(model, optimizer, None, settings, device, None if how == "plain" else shape, lines.append, shared)
    if kind.backend == "static" and isinstance(step, CapturedTrainingStep):
        step.steps_to_capture = -1
    name = kind.name + (f" (not: {how})" if how != backend else "")
    variant = Variant(name, recipe.model_copy(update={"training": settings}), example, step)
    for _ in range(6):
        variant()
    synchronize(device)
    variant.peak = peak(device) - before
    graphs = isinstance(step, CapturedTrainingStep) and step.graphs is not None
    lines.append(f"loss {step.loss.item():.3f}, {variant.peak / 1e9:.2f} GB, {'one graph' if graphs else 'no graph'}")
    print(f"  {name}: {'; '.join(lines)}", flush=True)
    return variant


def reset_peak(device: torch.device) -> int:
    """Forget the peak of the memory; return the bytes that are allocated."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def join(stack: ExitStack, device: torch.device) -> None:
    """Become the only process of a group, as under torchrun."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update(names)
    stack.enter_context(distributed.joined(distributed.local_device(device), 120))


def compare(variants: list[Variant], rounds: int, steps: int) -> dict[str, Any]:
    """Time the variants in turns."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(rounds):
        for variant in variants[number % len(variants) :] + variants[: number % len(variants)]:  # each first in turn
            variant()  # what the last one left behind, such as a hot device, is not counted
            times[variant.name].append(1000 * variant.seconds(steps))
    first = times[variants[0].name]
    result = {}
    for name, each in times.items():
        ratios = [a / b for a, b in zip(first, each, strict=True)]
        result[name] = {"ms": statistics.median(each), "of the first": statistics.median(ratios), "rounds": each}
        print(f"  {name}: {statistics.median(each):.2f} ms, {statistics.median(ratios):.1%} of the first", flush=True)
    return result


def comparison(name: str, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    base, kinds = COMPARISONS[name]
    print(f"{name}:", flush=True)
    with ExitStack() as stack:
        variants: list[Variant] = []
        for kind in kinds:
            if kind.parallel and not distributed.is_initialised():
                join(stack, device)
            try:
                variants.append(prepare(base, kind, given.tiny, device))
            except Exception:  # the other variants are still compared
                traceback.print_exc()
        found = compare(variants, given.rounds, max(1, round(given.steps * (0.25 if "774m" in name else 1))))
        for variant in variants:
            found[variant.name] |= {"peak": variant.peak, "loss": variant.step.loss.item()}
            print(f"  {variant.name}: loss {variant.step.loss.item():.3f} in all", flush=True)
        found["profiles"] = {variant.name: profiled(variant, device) for variant in variants}
        for which, kinds_of_kernels in found["profiles"].items():
            print(f"  profile of {which}: {kinds_of_kernels}", flush=True)
        variants.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


# -- saving ------------------------------------------------------------------------------------------------------------


def stall(variant: Variant, folder: Path, steps: int) -> dict[str, float]:
    """The time that a snapshot and a state cost, over the time between two of them at the default interval."""
    step, interval = variant.step, TrainingSettings().save_every
    run = SimpleNamespace(path=folder, recipe=variant.recipe, resume=folder / "resume.safetensors")
    outputs = RunOutputs(run, Reporter(), step.device.type == "cuda", None)  # type: ignore[arg-type]
    result: dict[str, float] = {}
    with outputs:
        for number in range(3):  # the first one also allocates pinned memory
            outputs.wait()
            free = variant.seconds(steps)
            synchronize(step.device)
            start = time.perf_counter()
            variant()
            step.loss.item()
            saved = time.perf_counter()
            weights = {n: sharding.whole(t) for n, t in tensor_io.model_tensors(step.model).items()}
            outputs.save(folder / "snapshot.safetensors", weights, {"step": number})
            progress = checkpoint.TrainingProgress(step=number)
            checkpoint.save(outputs, run.resume, progress, step.model, step.optimizer, None)
            called = time.perf_counter()
            for _ in range(steps - 1):
                variant()
            synchronize(step.device)
            in_background = step.device.type == "cuda"  # else the call is all, and other times only add noise
            lost = time.perf_counter() - start - steps * free if in_background else called - saved
            outputs.wait()
            kind = "first" if number == 0 else "later"
            share = lost / (interval * free)
            often = lost / (60 * TrainingSettings().save_minutes)
            result |= {f"{kind} ms": 1000 * lost, f"{kind} share": share, f"{kind} call ms": 1000 * (called - saved)}
            written = time.perf_counter() - start
            print(
                f"  {variant.name}, save {number + 1}: {1000 * lost:.0f} ms lost in {steps} steps of {1000 * free:.1f} "
                f"ms, of which the call {1000 * (called - saved):.0f}; on disk after {written:.1f} s; {share:.2%} of "
                f"{interval} steps, {often:.2%} of training.save_minutes",
                flush=True,
            )
    return result


def saving(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Saving during captured steps of one process, and in shards under FSDP."""
    result = {}
    for kind in (PLAIN, Kind("fsdp", "captured")):
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            if kind.parallel:
                join(stack, device)
            print("saving:", flush=True)
            small = [] if device.type == "cuda" else ["training.batch_tokens=1024"]  # which files do not depend on
            variant = prepare((BASE[0], [*BASE[1], *small]), kind, given.tiny, device)
            result[variant.name] = stall(variant, Path(folder), 3 if given.tiny else given.saving_steps)
            del variant
    return result


# -- two processes on a CPU --------------------------------------------------------------------------------------------

SMALL = ["model.size=small", "training.batch_tokens=1024", "training.accumulate=2", "training.validate_lines=20"]
PROCESSES = {
    "one process, 2 threads": ["--threads", "2"],
    "two processes, ddp": ["--devices", "2", "--set", "training.parallel=ddp"],
    "two processes, fsdp": ["--devices", "2", "--set", "training.parallel=fsdp"],
}


def processes(steps: int) -> dict[str, Any]:
    """Target tokens per second by the log of each run, from its 50th step to its last, and the mean loss there."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words in PROCESSES.items():
            run = Path(folder) / str(len(result))
            command = [sys.executable, "-m", "regard", "train", "en-es", "--device", "cpu", "--out", str(run), *words]
            for change in [*SMALL, f"training.steps={steps}"]:
                command += ["--set", change]
            subprocess.run(command, env=environment, check=True, capture_output=True)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            first, last = ([m for m in lines if m["kind"] == "train"][n] for n in (0, -1))
            rate = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
            result[name] = {"tokens per second": rate, "loss": last["loss"]}
            share = rate / next(iter(result.values()))["tokens per second"]
            print(f"  {name}: {rate:,.0f} tokens/s, {share:.1%} of the first; loss {last['loss']}", flush=True)
    return result


# -- a functional check ------------------------------------------------------------------------------------------------

RECIPE = ["copy", "--set", "training.validate_every=1000"]


def job(folder: Path, name: str, parallel: str, steps: int, *options: str) -> subprocess.Popen[str]:
    """Start a run under torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "127.0.0.1:0", *options, "-m", "regard", "train", *RECIPE]
    words += ["--set", f"training.steps={steps}", "--set", f"training.save_every={steps // 20}"]
    words += ["--set", f"training.parallel={parallel}", "--out", str(folder / name)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def worker(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def saved_step(run: Path) -> int:
    """The step of the last state of a run, 0 without one."""
    file = run / "resume.safetensors"
    return int(tensor_io.read_metadata(file).get("step", 0)) if file.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"the job ended or was too slow:\n{(process.communicate()[0] or '')[-3000:]}")
        time.sleep(0.05)


def functional(tiny: bool) -> dict[str, Any]:
    """Under torchrun: train; SIGTERM saves, the same command resumes; SIGKILL to a worker, torchrun restarts it."""
    plans = [(parallel, how) for parallel in ("ddp", "fsdp") for how in ("whole", "stopped", "killed")]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(plans)) as pool:
        steps = {"ddp": 60 if tiny else 1500, "fsdp": 60 if tiny else 400}  # captured steps are shorter
        jobs = {f"{p}, {how}": pool.submit(lifetime, Path(name), p, how, steps[p]) for p, how in plans}
        for plan, found in jobs.items():
            print(f"  {plan}: {found.exception() or found.result()}", flush=True)
        return {plan: str(found.exception()) if found.exception() else found.result() for plan, found in jobs.items()}


def lifetime(folder: Path, parallel: str, how: str, steps: int) -> dict[str, Any]:
    """Train to the end, "whole" or after an interruption: the step before it, and the last validation loss."""
    run, found = folder / f"{parallel}-{how}", {}
    process = job(folder, run.name, parallel, steps, "--max-restarts", "1")
    if how != "whole":
        wait_for(lambda: saved_step(run) > 0, process)
        os.kill(worker(process.pid), signal.SIGTERM if how == "stopped" else signal.SIGKILL)
        found["interrupted after"] = saved_step(run)
    if how == "stopped":
        process.communicate(timeout=120)
        process = job(folder, run.name, parallel, steps)
    text = process.communicate(timeout=180)[0]
    if process.returncode != 0 or saved_step(run) != steps:
        raise RuntimeError(f"rc {process.returncode}, step {saved_step(run)}: {text[-3000:]}")
    step = [line for line in text.splitlines() if line.startswith("training step:")][-1:]
    return {**found, "loss": valid_loss(run), "step": step}


def valid_loss(run: Path) -> float:
    """The loss of the last validation of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([line for line in lines if line["kind"] == "valid"][-1]["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*COMPARISONS, "saving"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="steps in a turn; a quarter of them for 774M")
    parser.add_argument("--saving-steps", type=int, default=40, help="steps during which a state is written")
    parser.add_argument("--seconds", type=float, default=200.0, help="start no part after this time")
    parser.add_argument("--functional", action="store_true", help="check torchrun, stopping, killing and resuming")
    parser.add_argument("--processes", type=int, metavar="STEPS", help="train for so many steps on a CPU, 51 at least")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try this script on a CPU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begin, device = time.perf_counter(), devices.pick("auto")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    failed = []
    if given.functional:
        result["functional"] = functional(given.tiny)
        failed = [plan for plan, found in result["functional"].items() if isinstance(found, str)]
    if given.processes:
        result["processes"] = processes(given.processes)
    for name in () if given.functional or given.processes else given.only:
        if time.perf_counter() - begin > given.seconds:
            print(f"{name}: no time left", flush=True)
            failed.append(name)
            continue
        try:
            result[name] = saving(given, device) if name == "saving" else comparison(name, given, device)
        except Exception:  # the other parts still run
            traceback.print_exc()
            failed.append(name)
        print(f"  after {time.perf_counter() - begin:.0f} s", flush=True)
        write(given.out, result)
    write(given.out, result)
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def write(file: Path | None, result: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
