"""Compare decoding on a CPU with CTranslate2 and Hugging Face's Marian, with the same weights.

    python -m bench.cpu_decoding [--repeats 5] [--threads 2] [--sizes small base] [--quick]

Random weights in Marian's shape (post-norm, SiLU, a bias on the logits, a shared and tied vocabulary of 37,000) are
written as a run, exported as a Hugging Face directory, and converted from there by CTranslate2's own converter. All
systems translate the same 32 sentences of 15 to 35 tokens into exactly 30 tokens each, in one batch: from source tokens
to output tokens, including the encoder. Each system runs in its own process; they take turns, and while one works the
others sleep. The result is in output tokens per second, of the best hypothesis.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import heading
from bench.tables import Comparison, Measured, table

VOCABULARY, SENTENCES, LENGTH = 37_000, 32, 30
FIRST_WORD = 4  # the id of the first token that is not a special one
SIZES, BEAMS, PRECISIONS = ("small", "base"), (1, 4), ("fp32", "int8")
Tokens = list[list[int]]
System = Callable[[Tokens, int], Tokens]  # source tokens and a beam -> output tokens
DEVICE = {"fp32": "cpu", "int8": "cpu", "bf16": "cuda"}


def sentences(seed: int = 1) -> Tokens:
    """Return random source tokens, including EOS."""
    from regard.special_tokens import EOS

    draw = random.Random(seed)
    return [
        [*(draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(draw.randint(14, 34))), EOS] for _ in range(SENTENCES)
    ]


# -- one model in three formats ----------------------------------------------------------------------------------------


def write(size: str, folder: Path, decoding: dict[str, Any] | None = None) -> None:
    """Write the model as a run, as a Hugging Face directory, and for CTranslate2, if it is installed."""
    import torch

    from regard import tensor_io
    from regard.interop.huggingface import export_run
    from regard.recipes.schema import Recipe
    from regard.run_dir import RunDir
    from regard.text.tokenizers import WordTokenizer

    shape = {"norm_first": False, "positions": "sinusoidal-split", "activation": "silu", "output_bias": True}
    recipe = Recipe.model_validate(
        {
            "data": {"imported": "pairs"},
            "text": {"unit": "word", "vocabulary": VOCABULARY},
            "model": {"family": "transformer", "size": size, **shape},
            "decoding": decoding or {},
        }
    )
    run = RunDir.create(folder / "regard", recipe)
    tokenizer = WordTokenizer([], [f"w{n}" for n in range(FIRST_WORD, VOCABULARY)])
    run.save_tokenizers(tokenizer, tokenizer)
    torch.manual_seed(1)
    tensor_io.save(run.best, tensor_io.model_tensors(run.fresh_model()), {"step": 0, "weights": "random"})

    theirs = export_run(run, folder / "hf")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((theirs / name).read_text())
        (theirs / name).write_text(json.dumps(settings | {"forced_eos_token_id": None}))
    if importlib.util.find_spec("ctranslate2") is None:
        return
    from ctranslate2.converters import TransformersConverter

    for precision, theirs_is in (("fp32", "float32"), ("int8", "int8")):
        TransformersConverter(str(theirs)).convert(str(folder / f"ct2-{precision}"), quantization=theirs_is)


# -- the systems -------------------------------------------------------------------------------------------------------


def ours(folder: Path, precision: str, threads: int) -> System:
    import torch

    import regard
    from regard.decoding import SearchRequest, search
    from regard.decoding.search import select_runner
    from regard.packed import PackedTokens
    from regard.recipes.schema import DecodingSettings
    from regard.special_tokens import BOS, PAD

    torch.set_num_threads(threads)
    device = DEVICE[precision]
    model = regard.load(folder / "regard", device=device, precision=precision).module
    run = select_runner(model, precision)

    def translate(sources: Tokens, beam: int) -> Tokens:
        settings = DecodingSettings(beam=beam, min_length=LENGTH, max_ratio=1e-9, max_extra=LENGTH)
        with torch.inference_mode():
            rows = PackedTokens.from_lists(sources).to(device)
            found = search(model, SearchRequest(rows, settings, banned=[PAD, BOS]), run=run)
        return [list(best.tokens) for best, *_ in found]

    return translate


def ctranslate2(folder: Path, precision: str, threads: int) -> System:
    import ctranslate2 as library

    spellings = [str(word) for word in json.loads((folder / f"ct2-{precision}" / "shared_vocabulary.json").read_text())]
    ids = {word: number for number, word in enumerate(spellings)}
    translator = library.Translator(
        str(folder / f"ct2-{precision}"),
        device="cpu",
        compute_type={"fp32": "float32", "int8": "int8"}[precision],
        inter_threads=1,
        intra_threads=threads,
    )

    def translate(sources: Tokens, beam: int) -> Tokens:
        found = translator.translate_batch(
            [[spellings[token] for token in source] for source in sources],
            beam_size=beam,
            min_decoding_length=LENGTH,
            max_decoding_length=LENGTH,
            suppress_sequences=[["<unused>"], ["<s>"]],
        )
        return [[ids[word] for word in result.hypotheses[0]] for result in found]

    return translate


def hugging_face(folder: Path, precision: str, threads: int) -> System:
    import torch
    from transformers import MarianMTModel

    torch.set_num_threads(threads)
    device, dtype = DEVICE[precision], torch.bfloat16 if precision == "bf16" else torch.float32
    model = MarianMTModel.from_pretrained(folder / "hf").to(device, dtype).eval()

    def translate(sources: Tokens, beam: int) -> Tokens:
        longest = max(map(len, sources))
        pad = model.config.pad_token_id
        ids = torch.tensor([source + [pad] * (longest - len(source)) for source in sources], device=device)
        lengths = {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH, "max_length": None}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=(ids != pad).long(), num_beams=beam, do_sample=False, **lengths)
        return out[:, 1:].tolist()

    return translate


SYSTEMS = {"regard": ours, "CTranslate2": ctranslate2, "Hugging Face": hugging_face}


# -- processes that take turns -----------------------------------------------------------------------------------------


def serve(system: str, folder: Path, precision: str, threads: int) -> None:
    """Answer every beam size on standard input with one line of seconds and tokens."""
    translate, sources = SYSTEMS[system](folder, precision, threads), sentences()
    for line in sys.stdin:
        begin = time.perf_counter()
        tokens = translate(sources, int(line))
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": tokens}), flush=True)


class Worker:
    """One system in its own process, which sleeps until it receives a request."""

    def __init__(self, system: str, folder: Path, precision: str, threads: int) -> None:
        words = ["--serve", system, "--folder", str(folder), "--precision", precision, "--threads", str(threads)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.cpu_decoding", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            cwd=Path(__file__).parent.parent,
        )

    def ask(self, beam: int) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(beam, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended: see above")  # type: ignore[arg-type]
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(
    repeats: int = 5,
    threads: int = 2,
    sizes: Sequence[str] = SIZES,
    precisions: Sequence[str] = PRECISIONS,
    systems: Sequence[str] = tuple(SYSTEMS),
) -> list[Comparison]:
    """Return output tokens per second of all systems, for every size, precision and beam size."""
    found = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="regard-bench-") as folder:
            subprocess.run(
                [sys.executable, "-m", "bench.cpu_decoding", "--write", size, "--folder", folder],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parent.parent,
            )
            for precision in precisions:
                names = [name for name in systems if precision == "fp32" or name != "Hugging Face"]  # no int8 there
                found += compare(size, precision, names, Path(folder), repeats, threads)
    return found


def compare(size: str, precision: str, names: list[str], folder: Path, repeats: int, threads: int) -> list[Comparison]:
    """Compare the systems, one row per beam size; the first round (allocation, warm-up) is discarded."""
    workers = {name: Worker(name, folder, precision, threads) for name in names}
    lines = []
    try:
        for beam in BEAMS:
            rounds = [{name: worker.ask(beam) for name, worker in workers.items()} for _ in range(repeats + 1)]
            for name, answer in rounds[0].items():
                assert all(len(tokens) == LENGTH for tokens in answer["tokens"]), f"{name}: not {LENGTH} tokens"
            equal = {name: _equal(rounds[0][name]["tokens"], rounds[0]["regard"]["tokens"]) for name in names}
            speeds = [
                Measured(name, [SENTENCES * LENGTH / turn[name]["seconds"] for turn in rounds[1:]]) for name in names
            ]
            what = "greedy" if beam == 1 else f"beam {beam}"
            lines.append(Comparison(f"decoding, {size}, {precision}, {what}", "tokens/s", speeds[0], speeds[1:]))
            same = ", ".join(f"{name} {share:.0%}" for name, share in equal.items() if name != "regard")
            print(f"{lines[-1].what}: the same tokens as regard: {same}", file=sys.stderr, flush=True)
    finally:
        for worker in workers.values():
            worker.end()
    return lines


def _equal(one: Tokens, other: Tokens) -> float:
    """Return the share of sentences with identical output."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="regard first")
    parser.add_argument("--quick", action="store_true", help="only the small model, two repeats")
    for internal in ("--write", "--serve", "--folder", "--precision"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        return write(given.write, Path(given.folder))
    if given.serve:
        return serve(given.serve, Path(given.folder), given.precision, given.threads)
    if given.quick:
        given.repeats, given.sizes = 2, SIZES[:1]
    print(heading(given.threads) + "\n", flush=True)
    print(table(measure(given.repeats, given.threads, given.sizes, given.precisions, given.systems)))
    return None


if __name__ == "__main__":
    main()
