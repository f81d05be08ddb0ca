"""Compare the decoding speed of this version with another checkout, with the same random weights, in turns.

    python -m bench.decoding_versions PATH [--device cuda|cpu] [--repeats 5] [--only WORDS] [--precision int8]

PATH is the root of the other checkout, whose modules must have the same names. Each version runs in its own process;
both get the same requests in turn, after one warm-up each. Decoding is in bf16 on a GPU, as in `regard translate`, and
in float32 or int8 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HOME = Path(__file__).parent.parent
TRANSLATE: dict[str, Any] = {"vocabulary": 37000, "batch": 64, "source": 25, "tokens": 40}
GENERATE: dict[str, Any] = {"vocabulary": 50257, "batch": 1, "source": 16, "tokens": 256}
TRANSFORMER = {"family": "transformer", "size": "base"}
RECURRENT = {"family": "recurrent", "cell": "lstm", "attention": "bahdanau"}
DRAWS = {"method": "sample", "temperature": 0.8, "top_p": 0.95}


def gpt(positions: str) -> dict[str, Any]:
    return {"family": "gpt", "size": "gpt2", "positions": positions, "max_positions": 1024}


CASES: dict[str, dict[str, Any]] = {
    "Transformer, greedy": {"model": TRANSFORMER, "how": {"beam": 1}, **TRANSLATE},
    "Transformer, beam 4": {"model": TRANSFORMER, "how": {"beam": 4}, **TRANSLATE},
    "Transformer, sampling": {"model": TRANSFORMER, "how": DRAWS, **TRANSLATE},
    "two Transformers, beam 4": {"model": TRANSFORMER, "members": 2, "how": {"beam": 4}, **TRANSLATE},
    "LSTM, greedy": {"model": RECURRENT, "how": {"beam": 1}, **TRANSLATE},
    "LSTM, beam 4": {"model": RECURRENT, "how": {"beam": 4}, **TRANSLATE},
    **{
        f"GPT, {positions}, {name}": {"model": gpt(positions), "how": how, **GENERATE}
        for positions in ("learned", "sinusoidal", "rotary", "relative")
        for name, how in (("greedy", {"beam": 1}), ("beam 4", {"beam": 4}), ("sampling", DRAWS))
    },
}
SMALL = {"vocabulary": 8000, "batch": 8, "source": 12, "tokens": 24}  # for a CPU
SMALLER = {"base": "small", "gpt2": "nano"}


def prepared(case: dict[str, Any], device: str, precision: str) -> Any:
    """Return a function without parameters that decodes the case with the imported version of regard."""
    import torch

    from regard import accelerate
    from regard.decoding import SearchRequest, search
    from regard.decoding.search import select_runner
    from regard.models import build
    from regard.models.ensemble import Ensemble
    from regard.packed import PackedTokens
    from regard.recipes.schema import DecodingSettings, Recipe

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        settings = Recipe.model_validate({"data": {"corpus": "copy"}, "model": case["model"]}).model
        model = build(settings, case["vocabulary"], case["vocabulary"], True).eval().to(device)
        accelerate.for_inference(model, precision)  # as for every loaded run: fused blocks on a GPU
        return model

    members = [made(seed) for seed in range(1, 1 + case.get("members", 1))]
    model = Ensemble(members).eval() if len(members) > 1 else members[0]
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(4, case["vocabulary"], (case["batch"], case["source"]), generator=draw).tolist()
    row = PackedTokens.from_lists([line[:-1] for line in words]).to(device)
    begin = [line[-1] for line in words]
    settings = DecodingSettings(**case["how"], max_ratio=1e-9, max_extra=case["tokens"], min_length=case["tokens"])
    request = SearchRequest(row, settings, begin=begin, banned=[0, 1])
    run = select_runner(model)

    def decode() -> list[tuple[int, ...]]:
        return [best.tokens for best, *_ in search(model, request, run=run)]

    return decode


def serve(device: str, precision: str) -> None:
    """Answer every case on standard input with the seconds it took, and the tokens."""
    import torch

    work: dict[str, Any] = {}
    for line in sys.stdin:
        if line not in work:
            work = {line: prepared(json.loads(line), device, precision)}
            for _ in range(3 if device == "cuda" else 1):  # steps and prefill are captured
                work[line]()
        began = time.perf_counter()
        tokens = work[line]()
        if device == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), flush=True)


class Version:
    """Decoding with one checkout, in its own process."""

    def __init__(self, root: Path, device: str, precision: str) -> None:
        words = ["-", "--serve", "--device", device, "--precision", precision]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])},
        )

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(case), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="the other checkout")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "int8"], help="on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="only cases with this in their names")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.device, given.precision)
    print(f"tokens/s on {given.device}: this version, the other, and the median ratio of {given.repeats} turns")
    roots = HOME, Path(given.old)
    versions = [Version(root, given.device, given.precision) for root in roots]
    for name, case in CASES.items():
        if given.only not in name:
            continue
        if given.device == "cpu":
            size = case["model"].get("size")
            case = {**case, **SMALL, "model": {**case["model"], **({"size": SMALLER[size]} if size else {})}}
        try:
            turns = [[version.ask(case) for version in versions] for _ in range(given.repeats)]
        except (ValueError, BrokenPipeError):
            print(f"  {name:<28} FAILED: see above", flush=True)
            versions = [Version(root, given.device, given.precision) for root in roots]
            continue
        rates = [case["batch"] * case["tokens"] / min(t[n]["seconds"] for t in turns) for n in (0, 1)]
        ratio = median(old["seconds"] / new["seconds"] for new, old in turns)
        same = sum(a == b for a, b in zip(*(answer["tokens"] for answer in turns[0]), strict=True))
        numbers = f"{rates[0]:>9,.0f} {rates[1]:>9,.0f}   {ratio:.2f}   {same} of {case['batch']} the same"
        print(f"  {name:<28} {numbers}", flush=True)
    for version in versions:
        version.end()
    return None


if __name__ == "__main__":
    main()
