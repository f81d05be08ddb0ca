"""Speed of an imported decoder against transformers, eager and compiled with a static cache, in one run.

    python -m bench.imported                             # 1.1 billion parameters, batches of 1 and 32, 96 tokens
    python -m bench.imported --device cpu --tiny         # to try the script; on a CPU transformers compiles nothing
    python -m bench.imported --device cpu --width 768 --layers 12 --batches 1 8      # float32

A model of Llama's architecture with random weights is made by transformers, saved, and imported with its tokenizer, as
`regard import` does. All systems continue the same random prompts greedily by exactly so many tokens: bf16 on a GPU,
float32 on a CPU. Each runs in a process of its own (CUDA graphs of two libraries in one process disturb each other),
and they take turns; every figure is printed as soon as it is known, and the medians at the end. Beside them is printed
how many of the tokens are those of eager transformers: in bf16, rounding decides between near equals.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from bench.machine import heading
from bench.turns import Worker, serve
from regard import accelerate
from regard.decoding import SearchRequest, search
from regard.decoding.search import select_runner
from regard.interop import import_folder
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings
from regard.run_dir import RunDir

PROMPT = 16
SYSTEMS = ("regard", "eager", "compiled")
Work = Callable[[list[list[int]], int], list[list[int]]]  # prompts and the number of tokens -> tokens


def write_folder(path: Path, given: argparse.Namespace) -> None:
    """Make a random model of Llama's architecture and a tokenizer of as many tokens, and save both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.width,
        intermediate_size=given.width * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64,
        num_key_value_heads=max(given.width // 512, 1),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    with torch.device(given.device):
        model: Any = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    model.to(dtype_on(given.device)).save_pretrained(path)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), given.vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def ours(path: Path, device: str) -> Work:
    """Our greedy search, with the ids of the folder."""
    run = RunDir(path)
    model = run.model(torch.device(device))
    accelerate.for_inference(model)
    foreign = run.tokenizers[0].foreign
    assert foreign is not None
    ids, runner = foreign.ids, select_runner(model)
    number = {their: our for our, their in enumerate(ids) if their >= 0}

    def work(prompts: list[list[int]], count: int) -> list[list[int]]:
        tokens = [[number[token] for token in prompt] for prompt in prompts]
        source = PackedTokens.from_lists([prompt[:-1] for prompt in tokens]).to(torch.device(device))
        settings = DecodingSettings(beam=1, max_ratio=1e-9, max_extra=count, min_length=count)
        request = SearchRequest(source, settings, begin=[prompt[-1] for prompt in tokens], banned=[0])
        return [[ids[token] for token in best.tokens] for best, *_ in search(model, request, run=runner)]

    return work


def theirs(path: Path, device: str, static: bool) -> Work:
    """Greedy `generate` of transformers, which compiles the decoding step if the cache is static."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(path, torch_dtype=dtype_on(device)).to(device).eval()

    def work(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        how: dict[str, Any] = dict(do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=2)
        if static:
            how["cache_implementation"] = "static"
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        found: list[list[int]] = out[:, PROMPT:].tolist()
        return found

    return work


def answer_as(system: str, scratch: Path, device: str) -> None:
    """Answer requests for a number of tokens after prompts: seconds and tokens."""
    loaded = ours(scratch / "run", device) if system == "regard" else None
    work = loaded or theirs(scratch / "llama", device, static=system == "compiled")

    def answer(question: Any) -> Any:
        began = time.perf_counter()
        tokens = work(question["prompts"], question["tokens"])
        if device == "cuda":
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    serve(answer)


def compare(workers: dict[str, Worker], prompts: list[list[int]], given: argparse.Namespace) -> None:
    """Print tokens per second of all systems, which take turns, and how many tokens are those of `eager`."""
    question, count = {"prompts": prompts, "tokens": given.tokens}, len(prompts) * given.tokens
    outputs: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {system: [] for system in workers}
    for worker in workers.values():
        worker.send(question)  # all compile, capture and warm up at once
    for system, worker in workers.items():
        found = worker.receive()
        outputs[system] = found["tokens"]
        assert {len(row) for row in found["tokens"]} == {given.tokens}
        print(f"  batch {len(prompts)}, {system}: ready after {found['seconds']:.1f} s", flush=True)
        if system == "compiled":
            worker.ask(question)  # the second call captures CUDA graphs
    for _ in range(given.repeats):
        for system, worker in workers.items():
            seconds[system].append(worker.ask(question)["seconds"])
            print(f"  batch {len(prompts)}, {system}: {count / seconds[system][-1]:,.1f} tokens/s", flush=True)
    for system, times in seconds.items():
        line = f"batch {len(prompts)}, {system}: {count / median(times):,.1f} tokens/s"
        if "eager" in outputs:
            rows = zip(outputs[system], outputs["eager"], strict=True)
            same = [a == b for row, reference in rows for a, b in zip(row, reference, strict=True)]
            line += f"; {sum(same) / len(same):.1%} of the tokens are those of eager"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--answer", nargs=2, metavar=("SYSTEM", "FOLDER"), help="be one of the processes")
    given = parser.parse_args()
    if given.answer:
        return answer_as(given.answer[0], Path(given.answer[1]), given.device)
    if given.tiny:
        given.width, given.layers, given.vocabulary, given.tokens, given.repeats = 128, 2, 500, 12, 1
    print(heading(), flush=True)
    draw = torch.Generator().manual_seed(2)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        write_folder(Path(scratch) / "llama", given)
        began = time.perf_counter()
        import_folder(Path(scratch) / "llama", Path(scratch) / "run")
        print(f"imported in {time.perf_counter() - began:.1f} s", flush=True)
        words = {system: ("--device", given.device, "--answer", system, scratch) for system in given.systems}
        made = {system: Worker("bench.imported", *each, threads=given.threads) for system, each in words.items()}
        workers = {system: stack.enter_context(worker) for system, worker in made.items()}
        for batch in given.batches:
            compare(workers, torch.randint(3, given.vocabulary, (batch, PROMPT), generator=draw).tolist(), given)
    return None


if __name__ == "__main__":
    main()
