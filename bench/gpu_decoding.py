"""Compare decoding on a GPU with Hugging Face, with models of the same sizes and random weights, in one run.

    python -m bench.gpu_decoding [--quick] [--out FILE.txt]
    python -m bench.gpu_decoding --device cpu --tiny          # to try the script without a GPU

Translation: Transformer base, 37,000 subwords, beam 4, batch 64, 25 source tokens, exactly 40 output tokens.
Generation: GPT-2 124M, batch 1, a prompt of 16 tokens, 256 new tokens. First the captured search is compared with the
eager search (`bench.decoding_checks`): both must find the same outputs. Then the variants are timed (medians of
repeats after one warm-up), and the GPU time of one search is listed by kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.decoding_checks import check_all
from bench.machine import heading
from regard import accelerate
from regard.decoding import Hypothesis, SearchRequest, search
from regard.decoding.cuda_graphs import CapturedRunner
from regard.decoding.search import Runner
from regard.decoding.static_search import StaticRunner
from regard.models import SequenceModel, build
from regard.models.gpt import GPTSettings
from regard.models.transformer_settings import TransformerSettings
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings
from regard.text import BOS, EOS, PAD


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and inputs."""

    vocabulary: int = 37000
    translator: str = "base"
    batch: int = 64
    beam: int = 4
    source: int = 25
    target: int = 40
    texts: int = 50257
    generator: str = "gpt2"
    prompt: int = 16
    tokens: int = 256


TINY = Sizes(vocabulary=1000, translator="tiny", batch=4, target=12, texts=1000, generator="nano", prompt=4, tokens=24)
Work = Callable[[Runner | None], list[list[Hypothesis]]]


class Page:
    """Prints text and appends it to a file."""

    def __init__(self, out: Path | None) -> None:
        self.out = out
        if out is not None:
            out.write_text("")

    def __call__(self, text: str = "") -> None:
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                print(text, file=file)


def settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    work()
    found = []
    for _ in range(repeats):
        settled(device)
        began = time.perf_counter()
        work()
        settled(device)
        found.append(time.perf_counter() - began)
    return found


# -- ours --------------------------------------------------------------------------------------------------------------


def prepared(model: SequenceModel, device: torch.device) -> SequenceModel:
    model = model.eval().to(device)
    accelerate.for_inference(model)
    return model


def translator(sizes: Sizes, device: torch.device) -> SequenceModel:
    torch.manual_seed(1)
    settings = TransformerSettings.model_validate({"size": sizes.translator})
    return prepared(build(settings, sizes.vocabulary, sizes.vocabulary, True), device)


def generator(sizes: Sizes, device: torch.device) -> SequenceModel:
    torch.manual_seed(2)
    settings = GPTSettings.model_validate({"size": sizes.generator, "max_positions": 1024})
    return prepared(build(settings, sizes.texts, sizes.texts, True), device)


def sentences(sizes: Sizes, count: int, length: int, uneven: bool = False) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, length + 1, (count,), generator=draw).tolist() if uneven else [length] * count
    words = torch.randint(4, sizes.vocabulary, (count, length), generator=draw).tolist()
    return [[*row[: n - 1], EOS] for row, n in zip(words, lengths, strict=True)]


def translation(model: SequenceModel, sizes: Sizes, device: torch.device, beam: int) -> Work:
    row = PackedTokens.from_lists(sentences(sizes, sizes.batch, sizes.source)).to(device)
    settings = DecodingSettings(beam=beam, max_ratio=1e-9, max_extra=sizes.target, min_length=sizes.target)
    return lambda run: search(model, SearchRequest(row, settings, banned=[PAD, BOS]), run=run)


def generation(model: SequenceModel, sizes: Sizes, device: torch.device, **how: Any) -> Work:
    prompt = torch.randint(4, sizes.texts, (sizes.prompt,), generator=torch.Generator().manual_seed(4)).tolist()
    row = PackedTokens.from_lists([prompt[:-1]]).to(device)
    settings = DecodingSettings(**how, max_ratio=1e-9, max_extra=sizes.tokens, min_length=sizes.tokens)
    return lambda run: search(model, SearchRequest(row, settings, begin=[prompt[-1]], banned=[PAD, BOS]), run=run)


def variants(device: torch.device) -> dict[str, Runner | None]:
    """Return the ways to run a search, the eager one first."""
    if device.type != "cuda":
        return {"eager, fp32": None, "fixed shapes, fp32": StaticRunner(round_sizes=True)}
    return {
        "eager, fp32": None,
        "fixed shapes, fp32, not captured": StaticRunner(round_sizes=True),
        "captured, fp32": CapturedRunner(bf16=False),
        "captured, bf16": CapturedRunner(bf16=True),
    }


# -- Hugging Face's ----------------------------------------------------------------------------------------------------


def marian(sizes: Sizes, device: torch.device, beam: int, dtype: torch.dtype) -> Callable[[], object]:
    from transformers import MarianConfig, MarianMTModel

    of: Any = TransformerSettings.model_validate({"size": sizes.translator})
    config = MarianConfig(
        vocab_size=sizes.vocabulary,
        d_model=of.width,
        encoder_layers=of.encoder_layers,
        decoder_layers=of.decoder_layers,
        encoder_attention_heads=of.heads,
        decoder_attention_heads=of.heads,
        encoder_ffn_dim=of.ffn_width,
        decoder_ffn_dim=of.ffn_width,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        bos_token_id=None,
    )
    model: Any = MarianMTModel(config).eval().to(device, dtype)
    ids = torch.tensor(sentences(sizes, sizes.batch, sizes.source), device=device)
    how = dict(num_beams=beam, do_sample=False, max_new_tokens=sizes.target, min_new_tokens=sizes.target)
    return lambda: _generate(model, ids, **how)


def gpt2(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    from transformers import GPT2Config, GPT2LMHeadModel

    of: Any = GPTSettings.model_validate({"size": sizes.generator})
    config = GPT2Config(
        vocab_size=sizes.texts, n_embd=of.width, n_layer=of.layers, n_head=of.heads, bos_token_id=0, eos_token_id=0
    )
    model: Any = GPT2LMHeadModel(config).eval().to(device, dtype)
    ids = torch.randint(4, sizes.texts, (1, sizes.prompt), device=device)
    return lambda: _generate(model, ids, do_sample=False, max_new_tokens=sizes.tokens, min_new_tokens=sizes.tokens)


def _generate(model: Any, ids: torch.Tensor, **how: Any) -> object:
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)
    assert out.shape[-1] >= how["max_new_tokens"], out.shape
    return out


# -- the measurements --------------------------------------------------------------------------------------------------


def timed(
    page: Page, name: str, work: Callable[[], object], device: torch.device, repeats: int, amount: float, unit: str
) -> None:
    """Print one line: the rate, its spread, and the time of the first call."""
    try:
        settled(device)
        began = time.perf_counter()
        work()
        settled(device)
        first = time.perf_counter() - began
        found = seconds(work, device, repeats)
    except Exception:
        page(f"  {name:<34} FAILED\n{traceback.format_exc()}")
        return
    spread = (max(found) - min(found)) / 2 / median(found)
    rate, took = amount / median(found), 1e3 * median(found)
    page(f"  {name:<34} {rate:>10,.0f} {unit}  ± {spread:.0%}   {took:>8.1f} ms; the first time {first:.2f} s")


def profiled(page: Page, title: str, work: Callable[[], object], device: torch.device, steps: int) -> None:
    """Print the GPU time of one search by kernel, and how much of the search it is busy."""
    if device.type != "cuda":
        return
    from torch.profiler import ProfilerActivity, profile

    try:
        whole = median(seconds(work, device, 3))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            settled(device)
        events = profiler.key_averages()
        busy = sum(event.self_device_time_total for event in events) / 1e6
        kernels = sum(event.count for event in events)
        page(f"\n{title}: {1e3 * whole:.1f} ms, for {1e3 * busy:.1f} ms of which the GPU is busy.")
        page(f"A step: {1e6 * busy / steps:.0f} us in {kernels / steps:.0f} kernels. The longest, in us per step:")
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:28]:
            each = event.self_device_time_total / steps
            page(f"  {each:>8.1f}  x{event.count / steps:<6.1f} {event.key[:130]}")
    except Exception:
        page(f"\n{title}: FAILED\n{traceback.format_exc()}")


def phases(page: Page, model: SequenceModel, sizes: Sizes, device: torch.device, repeats: int) -> None:
    """Print the time of encoding the sources."""
    row = PackedTokens.from_lists(sentences(sizes, sizes.batch, sizes.source)).to(device)
    with torch.inference_mode():
        fp32 = median(seconds(lambda: model.start(row), device, repeats))
        page(f"  of which encoding the sources: {1e3 * fp32:.1f} ms in fp32, not captured")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--out", type=Path, help="also write everything to this file")
    options.add_argument("--quick", action="store_true", help="fewer repeats, and nothing of Hugging Face's")
    options.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    options.add_argument("--repeats", type=int, default=0, help="0: as many as is usual")
    given = options.parse_args()
    device, sizes = torch.device(given.device), TINY if given.tiny else Sizes()
    repeats = given.repeats or (3 if given.quick else 7)
    page = Page(given.out)
    page(heading())
    model, writer = translator(sizes, device), generator(sizes, device)

    page("\nThe same as the eager search?")
    failures = check_all(page, device)

    for beam in (sizes.beam, 1):
        page(f"\nTranslation, beam {beam}, batch {sizes.batch}, {sizes.source} -> {sizes.target} tokens, sentences/s")
        work = translation(model, sizes, device, beam)
        for name, run in variants(device).items():
            timed(page, name, partial(work, run), device, repeats, sizes.batch, "sentences/s")
        if beam == sizes.beam:
            phases(page, model, sizes, device, repeats)
        for dtype in () if given.quick else (torch.float32, torch.bfloat16):
            name = f"Hugging Face Marian, {str(dtype).removeprefix('torch.')}"
            timed(page, name, marian(sizes, device, beam, dtype), device, repeats, sizes.batch, "sentences/s")

    draws = dict(method="sample", temperature=0.8, top_p=0.95)
    for title, how in (("greedy", dict(beam=1)), ("sampling", draws), ("sampling of 50", {**draws, "top_k": 50})):
        page(f"\nGeneration, {title}, batch 1, {sizes.prompt} + {sizes.tokens} tokens, tokens/s")
        write = generation(writer, sizes, device, **how)
        for name, run in variants(device).items():
            timed(page, name, partial(write, run), device, max(2, repeats // 2), sizes.tokens, "tokens/s")
        for dtype in () if given.quick or title != "greedy" else (torch.float32, torch.bfloat16):
            name = f"Hugging Face GPT-2, {str(dtype).removeprefix('torch.')}"
            timed(page, name, gpt2(sizes, device, dtype), device, max(2, repeats // 2), sizes.tokens, "tokens/s")

    if device.type == "cuda":
        work, write = translation(model, sizes, device, sizes.beam), generation(writer, sizes, device, **draws)
        profiled(page, f"Beam {sizes.beam}", partial(work, CapturedRunner(bf16=True)), device, sizes.target)
        profiled(page, "GPT-2, sampling", partial(write, CapturedRunner(bf16=True)), device, sizes.tokens)
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
