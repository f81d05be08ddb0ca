"""Train Hugging Face's Marian from raw text within a time budget, and score it: the baseline of bench.quality.

    python -m bench.peers_marian --data DATA/europarl-en-de --seconds 300 [--compiled] [--out FILE.json]
    python -m bench.peers_marian --data DATA/multi30k --tiny --device cpu --seconds 90      # to try the script

The budget includes everything: imports, learning the vocabulary, tokenising, compilation, training, decoding the test
lines and scoring them. The script aims for the best result that Marian can reach: byte-level BPE as in regard; length
buckets kept on the device as padded tensors, so that a batch is one gather and the host never waits; bf16 autocast, the
sdpa kernel, fused AdamW, label smoothing 0.1; a learning rate that warms up by steps and decays to zero over the
remaining time. `--compiled` compiles the step for the static shapes of every bucket (`whole`: forward and loss as
one graph; `layers`: block by block, which compiles faster). The files are train, dev and test, xz-compressed or plain.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402  the time is taken before the imports
import json  # noqa: E402
import lzma  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from bisect import bisect_left  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from itertools import chain  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

PAD, END, UNKNOWN = 0, 1, 2
MARKS = ["<pad>", "</s>", "<unk>"]
SYNC_EVERY = 20  # steps between synchronisations, so that elapsed time includes queued work
TEST_NAMES = ("test", "test_2016_flickr")
VALID_NAMES = ("dev", "val")


def elapsed() -> float:
    return time.time() - BEGAN


def say(text: str) -> None:
    print(f"[{elapsed():6.1f} s] {text}", file=sys.stderr, flush=True)


# -- text --------------------------------------------------------------------------------------------------------------


def lines_of(folder: Path, names: tuple[str, ...], language: str) -> list[str]:
    for name in names:
        for file in (folder / f"{name}.{language}", folder / f"{name}.{language}.xz"):
            if file.exists():
                raw = file.read_bytes()
                text = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode("utf-8")
                return text.removesuffix("\n").split("\n")
    sys.exit(f"{folder} has no {' or '.join(names)}.{language}")


def learn(texts: list[str], size: int) -> Any:
    """Train byte-level BPE without a prefix space, as in regard."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Any, texts: list[str], longest: int) -> list[list[int]]:
    return [[*found.ids[: longest - 1], END] for found in tokenizer.encode_batch_fast(texts)]


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """All pairs of similar length, padded, on the device: source [n, S], target [n, T]."""

    source: Tensor
    target: Tensor
    rows: int  # per batch

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.source[chosen], self.target[chosen]


def make_buckets(
    sources: list[list[int]], targets: list[list[int]], count: int, batch_tokens: int, device: torch.device
) -> list[Bucket]:
    """Split the pairs by their longer side into `count` buckets with about equally many tokens, of lengths 8 n."""
    lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    total, done, edges = sum(lengths), 0, []
    for n in order:
        done += lengths[n]
        if done >= total * (len(edges) + 1) / count:
            edges.append(math.ceil(lengths[n] / 8) * 8)
    edges = sorted({*edges, math.ceil(lengths[order[-1]] / 8) * 8})
    members: list[list[int]] = [[] for _ in edges]
    for n, length in enumerate(lengths):
        members[bisect_left(edges, length)].append(n)
    buckets = []
    for edge, mine in zip(edges, members, strict=True):
        if mine:
            tables = [_padded([side[n] for n in mine], device) for side in (sources, targets)]
            buckets.append(Bucket(*tables, rows=min(max(batch_tokens // edge, 1), len(mine))))
    return buckets


def _padded(sentences: list[list[int]], device: torch.device) -> Tensor:
    """Pad to [n, L], L a multiple of 8."""
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    table = np.full((len(sentences), math.ceil(lengths.max() / 8) * 8), PAD, np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(sentences), np.int64)
    return torch.from_numpy(table).to(device)


def batches(buckets: list[Bucket], seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (bucket, row indices) endlessly: every epoch visits all full batches in a new random order."""
    mixed = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    while True:
        plan = []
        for number, bucket in enumerate(buckets):
            order = torch.randperm(len(bucket.source), generator=generator).to(bucket.source.device)
            plan += [(number, part) for part in order.split(bucket.rows) if len(part) == bucket.rows]
        mixed.shuffle(plan)
        yield from plan


# -- the model ---------------------------------------------------------------------------------------------------------


def make_model(given: argparse.Namespace, vocabulary: int, longest: int) -> Any:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=given.width,
        encoder_layers=given.encoder_layers,
        decoder_layers=given.decoder_layers,
        encoder_attention_heads=given.heads,
        decoder_attention_heads=given.heads,
        encoder_ffn_dim=given.inner,
        decoder_ffn_dim=given.inner,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        dropout=given.dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        max_position_embeddings=longest,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        use_cache=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=END,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        num_beams=1,
    )
    config._attn_implementation = "sdpa"
    return MarianMTModel(config)


def loss_of(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """Return the label-smoothed cross-entropy per target token; Marian's decoder starts with the padding token."""
    inputs = F.pad(target[:, :-1], (1, 0), value=PAD)
    hidden = model(
        input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=inputs, use_cache=False
    ).logits
    return F.cross_entropy(hidden.flatten(0, 1).float(), target.flatten(), ignore_index=PAD, label_smoothing=0.1)


def compiled(model: Any, how: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss as a function of a batch: eager, or compiled for static shapes, one graph per bucket."""
    torch._dynamo.config.cache_size_limit = 64  # one entry per bucket
    if how == "layers":
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.compile(dynamic=False)
    if how == "whole":
        return torch.compile(lambda source, target: loss_of(model, source, target), dynamic=False)
    return lambda source, target: loss_of(model, source, target)


def groups(model: Any, decay: float) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def rate(given: argparse.Namespace, step: int, share: float) -> float:
    """Warm up by steps, stay constant, then decay linearly to zero over the last `--cooldown` of the time."""
    falling = min((1 - share) / given.cooldown, 1.0) if given.cooldown else 1.0
    return given.learning_rate * min(step / given.warmup, 1.0) * max(falling, 0.0)


# -- the run -----------------------------------------------------------------------------------------------------------


def fit(given: argparse.Namespace, model: Any, buckets: list[Bucket], device: torch.device) -> dict[str, Any]:
    """Train until the budget, minus the reserve for decoding, is used up."""
    step_loss = compiled(model, given.compiled or "")
    optimizer = torch.optim.AdamW(groups(model, given.weight_decay), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def update(bucket: Bucket, chosen: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_loss(*bucket.batch(chosen))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    model.train()
    if given.compiled:
        for bucket in buckets:  # learning rate 0: the weights do not change, and Adam's state is cleared below
            update(bucket, torch.arange(bucket.rows, device=device))
            wait(device)
            say(f"compiled for {tuple(bucket.source.shape)} in batches of {bucket.rows}")
        optimizer.state.clear()
    ready = elapsed()
    until, tokens = given.seconds - given.reserve, torch.zeros((), dtype=torch.int64, device=device)
    steps, loss = 0, torch.zeros(())
    say(f"training from here to {until:.0f} s")
    for number, chosen in batches(buckets, given.seed):
        if steps % SYNC_EVERY == 0:
            wait(device)
        share = (elapsed() - ready) / max(until - ready, 1e-9)
        if share >= 1 or (given.steps and steps >= given.steps):
            break
        steps += 1
        for group in optimizer.param_groups:
            group["lr"] = rate(given, steps, share)
        loss = update(buckets[number], chosen)
        tokens += (buckets[number].target[chosen] != PAD).sum()
        if steps % 200 == 0:
            say(f"step {steps}: loss {loss.item():.3f}")
    wait(device)
    seconds = elapsed() - ready
    real = int(tokens.item())
    say(f"{steps} steps, {real:,} target tokens, {real / seconds:,.0f} a second")
    return {
        "set_up_seconds": round(ready, 1),
        "training_seconds": round(seconds, 1),
        "steps": steps,
        "target_tokens": real,
        "target_tokens_per_second": round(real / seconds),
        "last_loss": round(float(loss), 4),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def translate(given: argparse.Namespace, model: Any, tokenizer: Any, lines: list[str], longest: int) -> list[str]:
    """Translate by beam search in batches of similar length, in bf16 on a GPU."""
    device = next(model.parameters()).device
    model.eval()
    if device.type == "cuda":
        model.to(torch.bfloat16)
    sources = encode(tokenizer, lines, longest)
    order = sorted(range(len(lines)), key=lambda n: -len(sources[n]))
    found = [""] * len(lines)
    for at in range(0, len(order), given.decode_batch):
        chosen = order[at : at + given.decode_batch]
        width = len(sources[chosen[0]])
        table = torch.tensor([sources[n] + [PAD] * (width - len(sources[n])) for n in chosen], device=device)
        written = model.generate(
            input_ids=table,
            attention_mask=(table != PAD).long(),
            num_beams=given.beam,
            do_sample=False,
            max_new_tokens=min(2 * width + 20, longest - 1),
            length_penalty=given.length_penalty,
            early_stopping=True,
            bad_words_ids=[[PAD]],
        )
        for n, ids in zip(chosen, written.tolist(), strict=True):
            found[n] = tokenizer.decode([i for i in ids if i >= len(MARKS)])
    return found


def score(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(), CHRF()
    found = bleu.corpus_score(hypotheses, [references])
    return {
        "bleu": round(found.score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": round(chrf.corpus_score(hypotheses, [references]).score, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--languages", nargs=2, default=["en", "de"], metavar=("SOURCE", "TARGET"))
    parser.add_argument("--split", choices=["test", "valid"], default="test", help="the split to translate and score")
    parser.add_argument("--seconds", type=float, default=300, help="the whole budget")
    parser.add_argument("--reserve", type=float, default=20, help="seconds of the budget for decoding and scoring")
    parser.add_argument("--steps", type=int, default=0, help="maximum number of steps [default: no limit]")
    parser.add_argument("--compiled", nargs="?", const="whole", choices=["whole", "layers"])
    parser.add_argument("--buckets", type=int, help="[default: 4 compiled, 16 eager]")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--batch-tokens", type=int, default=32768, help="padded target tokens per step")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--encoder-layers", type=int, default=6)
    parser.add_argument("--decoder-layers", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--cooldown", type=float, default=0.5, help="share of the time with a decaying rate")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--decode-batch", type=int, default=256)
    parser.add_argument("--longest", type=int, default=256, help="longer pairs are dropped")
    parser.add_argument("--count", type=int, help="use only this many pairs and test lines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few pairs, to try the script")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--save", type=Path, help="write the translations")
    given = parser.parse_args()
    if given.tiny:
        small = {
            "width": 64,
            "ffn_width": 128,
            "heads": 4,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "batch_tokens": 2048,
        }
        vars(given).update(small, count=given.count or 2000, vocabulary=2000, beam=2, decode_batch=64)
    vars(given)["buckets"] = given.buckets or (4 if given.compiled else 16)
    device = torch.device(given.device)
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")

    pair = [lines_of(given.data, ("train",), language)[: given.count] for language in given.languages]
    tokenizer = learn([*pair[0], *pair[1]], given.vocabulary)
    say(f"learnt {tokenizer.get_vocab_size()} pieces from {len(pair[0]):,} pairs")
    sources, targets = (encode(tokenizer, side, given.longest + 1) for side in pair)
    fits = [n for n in range(len(sources)) if max(len(sources[n]), len(targets[n])) <= given.longest]
    sources, targets = [sources[n] for n in fits], [targets[n] for n in fits]
    buckets = make_buckets(sources, targets, given.buckets, given.batch_tokens, device)
    real = sum(map(len, targets)) / sum(bucket.target.numel() for bucket in buckets)
    say(f"tokenised: {sum(map(len, targets)):,} target tokens, {len(buckets)} buckets, {real:.0%} of them real")
    model = make_model(given, tokenizer.get_vocab_size(), given.longest + 32).to(device)
    count = sum(p.numel() for p in model.parameters())
    say(f"model: {count:,} parameters")

    numbers = {"parameters": count, "real_share": round(real, 3), **fit(given, model, buckets, device)}
    names = TEST_NAMES if given.split == "test" else VALID_NAMES
    tests = [lines_of(given.data, names, language)[: given.count] for language in given.languages]
    started = elapsed()
    hypotheses = translate(given, model, tokenizer, tests[0], given.longest)
    numbers["decoding_seconds"] = round(elapsed() - started, 1)
    numbers |= score(hypotheses, tests[1])
    numbers |= {"seconds": round(elapsed(), 1), "within_budget": elapsed() <= given.seconds}
    if given.save:
        given.save.write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    import transformers

    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "settings": settings}
    print(json.dumps({**numbers, **about}))
    if given.out:
        given.out.write_text(json.dumps({**numbers, **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
