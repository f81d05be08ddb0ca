"""Compare training of a small Transformer on a CPU with nn.Transformer and Hugging Face's Marian.

    python -m bench.cpu_training [--repeats 5] [--threads 2] [--steps 3] [--held]

All systems train the same model (width 256, 3 + 3 layers, 4 heads, ffn_width 1,024, a shared and tied vocabulary of
8,000, pre-norm except for Marian, dropout 0.1 where the paper has it) on the same batches of sentence pairs: log-normal
lengths with a mean of about 27 tokens, sorted by length, about 4,000 target tokens per step. The other libraries get
padded batches, regard packed ones. A step is forward, backward, gradient clipping and fused AdamW. The result is in
target tokens per second, without padding. `regard train` makes its process keep the memory that it frees
(regard.devices.held_memory), which the other libraries do not do by default; --held does it for all of them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.machine import heading
from bench.tables import Comparison, Measured, table
from bench.turns import Worker, serve
from regard.data.packing import Packer, fill_ratio
from regard.data.token_store import CorpusReport, Ragged, TokenStore
from regard.devices import held_memory
from regard.models import build
from regard.models.transformer_settings import TransformerSettings
from regard.packed import SeqBatch
from regard.special_tokens import EOS

VOCABULARY, BUDGET, SMOOTHING, DROPOUT = 8000, 4096, 0.1, 0.1
SIZES = TransformerSettings.PRESETS["small"]
Step = Callable[[SeqBatch], Tensor]


def pairs(count: int, seed: int = 1) -> TokenStore:
    """Return random sentence pairs of log-normal length, mean about 27; a target is about as long as its source."""
    random = np.random.default_rng(seed)
    source = np.exp(random.normal(3.15, 0.55, count))
    target = source * np.exp(random.normal(0.0, 0.2, count))
    sides = []
    for lengths in (source, target):
        ends = np.clip(lengths.round(), 2, 200).astype(np.int64).cumsum()
        ids = random.integers(5, VOCABULARY, ends[-1]).astype(np.uint16)
        ids[ends - 1] = EOS
        sides.append(Ragged(ids, np.concatenate([[0], ends])))
    return TokenStore(*sides, CorpusReport(count, 0, 0, *(len(side.ids) for side in sides)))


def batches(count: int) -> list[SeqBatch]:
    """Return `count` batches for all systems, from short pairs to long ones.

    Pairs for 64 batches are sorted together, as in training, so that there is little padding.
    """
    packer = Packer([pairs(10_000)], [1.0], target_budget=BUDGET, seed=1)
    stream = packer.batches()
    every = sorted((next(stream)[0] for _ in range(60)), key=lambda batch: batch.inputs.layout.max_len)
    return [every[round((part + 0.5) * len(every) / count)] for part in range(count)]


def padded(batch: SeqBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pad a batch for the other libraries: source, inputs and labels [N, L], and the padding masks of the first two."""
    source, rows = batch.source.layout, batch.inputs.layout
    labels = rows.pad(batch.labels).masked_fill(~rows.padded_is_token, -100)
    return (
        source.pad(batch.source.ids),
        rows.pad(batch.inputs.ids),
        labels,
        source.padded_is_token,
        rows.padded_is_token,
    )


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=SMOOTHING)


class Torch(nn.Module):
    """nn.Transformer with a tied embedding and output projection, as in the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZES["width"]
        self.table = nn.Embedding(VOCABULARY, width)
        self.table.weight.data.normal_(std=width**-0.5)
        self.register_buffer("waves", _waves(256, width))
        self.body = nn.Transformer(
            width,
            SIZES["heads"],
            SIZES["encoder_layers"],
            SIZES["decoder_layers"],
            SIZES["ffn_width"],
            DROPOUT,
            batch_first=True,
            norm_first=True,
        )
        for module in self.body.modules():  # the same dropout as the others; also enables fused attention
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0  # between the two linear layers

    def embed(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * math.sqrt(SIZES["width"]) + self.waves[: ids.shape[1]]
        return F.dropout(x, DROPOUT, self.training)

    def forward(self, batch: SeqBatch) -> Tensor:
        source, inputs, labels, here, _ = padded(batch)
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        x = self.body(
            self.embed(source),
            self.embed(inputs),
            tgt_mask=causal,
            src_key_padding_mask=~here,
            memory_key_padding_mask=~here,
            tgt_is_causal=True,
        )
        return smoothed(F.linear(x, self.table.weight), labels)


def _waves(longest: int, width: int) -> Tensor:
    angle = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


class Marian(nn.Module):
    """Hugging Face's MarianMTModel of the same size, with its fastest attention."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        layers = {f"{side}_layers": SIZES[f"{side}_layers"] for side in ("encoder", "decoder")}
        heads = {f"{side}_attention_heads": SIZES["heads"] for side in ("encoder", "decoder")}
        inner = {f"{side}_ffn_dim": SIZES["ffn_width"] for side in ("encoder", "decoder")}
        config = MarianConfig(
            vocab_size=VOCABULARY,
            d_model=SIZES["width"],
            **layers,
            **heads,
            **inner,
            dropout=DROPOUT,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=256,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=0,
            attn_implementation="sdpa",
        )
        self.body = MarianMTModel(config)

    def forward(self, batch: SeqBatch) -> Tensor:
        source, inputs, labels, here, _ = padded(batch)
        out = self.body(input_ids=source, attention_mask=here.long(), decoder_input_ids=inputs, use_cache=False)
        return smoothed(out.logits, labels)


class Ours(nn.Module):
    """regard's Transformer, on packed batches."""

    def __init__(self) -> None:
        super().__init__()
        settings = TransformerSettings.model_validate({"size": "small", "dropout": DROPOUT})
        self.body = build(settings, VOCABULARY, VOCABULARY, shared=True)

    def forward(self, batch: SeqBatch) -> Tensor:
        return self.body(batch, SMOOTHING) / batch.num_targets


SYSTEMS: dict[str, Callable[[], nn.Module]] = {"regard": Ours, "nn.Transformer": Torch, "Hugging Face Marian": Marian}


def trainer(model: nn.Module) -> Step:
    """Return the optimiser step, the same for all systems."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    model.train()

    def step(batch: SeqBatch) -> Tensor:
        loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def work(name: str, threads: int, steps: int, held: bool) -> None:
    """Run one system, which answers every request with its target tokens per second over all batches."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    some, step = batches(steps), trainer(SYSTEMS[name]())

    def answer(question: object) -> float:
        begin = time.perf_counter()
        for batch in some:
            step(batch)
        return sum(batch.num_targets for batch in some) / (time.perf_counter() - begin)

    # `regard train` keeps freed memory in its process; training scripts of other libraries do not.
    with held_memory(torch.device("cpu")) if held or name == "regard" else nullcontext():
        step(some[0])  # the first step allocates memory
        serve(answer)


def measure(repeats: int = 5, threads: int = 2, steps: int = 3, held: bool = False) -> list[Comparison]:
    """Measure all systems in turn, on the same batches; the first round is discarded."""
    words = ["--steps", str(steps), "--threads", str(threads), *(["--held"] if held else [])]
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker("bench.cpu_training", "--work", name, *words, threads=threads))
            for name in SYSTEMS
        }
        rounds = [{name: worker.ask(None) for name, worker in workers.items()} for _ in range(repeats + 1)]
    ours, *peers = [Measured(name, [turn[name] for turn in rounds[1:]]) for name in SYSTEMS]
    return [Comparison("training, small Transformer", "target tokens/s", ours, peers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps per repeat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held", action="store_true", help="let all processes keep freed memory")
    parser.add_argument("--work", choices=SYSTEMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.threads, given.steps, given.held)
        return
    some = batches(given.steps)
    full = np.mean([fill_ratio(batch)["padded"] for batch in some])
    print(heading(given.threads))
    each = sum(batch.num_targets for batch in some) / len(some)
    print(f"\n{each:,.0f} target tokens per step; padded batches are {full:.0%} full\n")
    print(table(measure(given.repeats, given.threads, given.steps, given.held)))


if __name__ == "__main__":
    main()
