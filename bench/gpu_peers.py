"""Training steps of other libraries on a GPU: Hugging Face's Marian and GPT-2, PyTorch's nn.Transformer.

Each gets favourable conditions: pairs sorted by length into a few buckets, each padded to a fixed length, so that a
compiled step has one shape per bucket; bf16 autocast, fused AdamW, no synchronisation with the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, BEGIN = 0, 1
Loss = Callable[[nn.Module, Any], Tensor]
LONGEST = (16, 24, 32, 48, 72, 200)  # bucket lengths: a pair goes into the first that holds both its sides


@dataclass(frozen=True)
class Sizes:
    """Transformer base and GPT-2 by default; TINY is for tests."""

    width: int = 512
    heads: int = 8
    layers: int = 6
    inner: int = 2048
    vocabulary: int = 37_000
    context: int = 1024
    gpt_width: int = 768
    gpt_heads: int = 12
    gpt_layers: int = 12
    gpt_vocabulary: int = 50_304


TINY = Sizes(32, 2, 1, 64, 300, 32, 32, 2, 1, 300)


@dataclass(frozen=True)
class Padded:
    """Pairs of similar length, padded to one length: [N, L] each, and the number of target tokens without padding."""

    source: Tensor
    target: Tensor
    real: int


def bucketed(pairs: list[tuple[int, int]], budget: int, vocabulary: int, device: str) -> list[Padded]:
    """Return random pairs of these lengths in batches of about `budget` target tokens, one length per bucket."""
    random, found = torch.Generator().manual_seed(1), []
    shortest = 0
    for longest in LONGEST:
        inside = [pair for pair in pairs if shortest < max(pair) <= longest]
        shortest = longest
        if not inside:
            continue
        mean = sum(target for _, target in inside) / len(inside)
        rows = max(round(budget / mean), 1)
        for at in range(0, len(inside) - rows + 1, rows):
            some = inside[at : at + rows]
            sides = [_padded([pair[side] for pair in some], longest, vocabulary, random) for side in (0, 1)]
            found.append(Padded(sides[0].to(device), sides[1].to(device), sum(target for _, target in some)))
    return found


def _padded(lengths: list[int], longest: int, vocabulary: int, random: torch.Generator) -> Tensor:
    ids = torch.randint(5, vocabulary, (len(lengths), longest), generator=random)
    return ids.where(torch.arange(longest) < torch.tensor(lengths)[:, None], PAD)


class TorchTransformer(nn.Module):
    """nn.Transformer with embeddings, positions and a tied output projection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(LONGEST[-1], sizes.width)
        self.body = nn.Transformer(
            sizes.width, sizes.heads, sizes.layers, sizes.layers, sizes.inner, 0.1, batch_first=True, norm_first=True
        )

    def _embed(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.table(ids) * math.sqrt(self.table.embedding_dim) + self.positions(places)

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        padding = source == PAD
        out = self.body(
            self._embed(source),
            self._embed(inputs),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(out, self.table.weight)


class Marian(nn.Module):
    """Hugging Face's Marian, with fused attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=sizes.vocabulary,
            d_model=sizes.width,
            encoder_layers=sizes.layers,
            decoder_layers=sizes.layers,
            encoder_attention_heads=sizes.heads,
            decoder_attention_heads=sizes.heads,
            encoder_ffn_dim=sizes.inner,
            decoder_ffn_dim=sizes.inner,
            max_position_embeddings=LONGEST[-1],
            dropout=0.1,
            activation_function="relu",
            pad_token_id=PAD,
            eos_token_id=2,
            bos_token_id=None,
            decoder_start_token_id=BEGIN,
            forced_eos_token_id=None,
            attn_implementation="sdpa",
        )
        self.model = MarianMTModel(config)

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        mask = (source != PAD).long()
        out = self.model(input_ids=source, attention_mask=mask, decoder_input_ids=inputs, use_cache=False)
        return out.logits


def _translated(model: nn.Module, batch: Padded) -> Tensor:
    inputs = F.pad(batch.target[:, :-1], (1, 0), value=BEGIN)
    logits = model(batch.source, inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.target.flatten(), ignore_index=PAD, label_smoothing=0.1)


class Training:
    """Forward, backward, gradient clipping and AdamW, cycling through the batches; a call returns its target tokens."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: list[Any],
        compiled: bool,
        device: str,
    ) -> None:
        self.model, self.device = model.to(device).train(), device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
        self.loss = torch.compile(loss, dynamic=False) if compiled else loss
        if compiled:  # one shape per bucket
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 4 * len(LONGEST))
        self.turn = cycle(batches)

    def __call__(self) -> int:
        batch = next(self.turn)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.loss(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return batch.real


def translator(
    kind: type[nn.Module], pairs: list[tuple[int, int]], budget: int, *, compiled: bool, device: str, sizes: Sizes
) -> tuple[Training, int]:
    """Return the training step of nn.Transformer or Marian, and the number of batches that it cycles through."""
    torch.manual_seed(1)
    batches = bucketed(pairs, budget, sizes.vocabulary, device)
    return Training(kind(sizes), _translated, batches, compiled, device), len(batches)


@dataclass(frozen=True)
class Windows:
    """Windows of text: [N, context + 1] tokens."""

    ids: Tensor

    @property
    def real(self) -> int:
        return self.ids.shape[0] * (self.ids.shape[1] - 1)


class PlainLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.gpt_width
        self.heads = sizes.gpt_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.inner(self.norms[1](x))


class PlainGPT(nn.Module):
    """GPT-2 from standard PyTorch modules, compiled as a whole, as in nanoGPT."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.gpt_vocabulary, sizes.gpt_width)
        self.places = nn.Embedding(sizes.context, sizes.gpt_width)
        self.layers = nn.Sequential(*(PlainLayer(sizes) for _ in range(sizes.gpt_layers)))
        self.norm = nn.LayerNorm(sizes.gpt_width)
        for table in (self.table, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.layers(x)), self.table.weight)


def huggingface_gpt2(sizes: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.gpt_vocabulary,
        n_positions=sizes.context,
        n_embd=sizes.gpt_width,
        n_layer=sizes.gpt_layers,
        n_head=sizes.gpt_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )

    model: nn.Module = GPT2LMHeadModel(config)
    return model


def gpt2(windows: int, *, plain: bool, compiled: bool, device: str, sizes: Sizes) -> Training:
    """Return the training step of GPT-2: the plain one, or Hugging Face's."""
    torch.manual_seed(1)

    def loss(model: nn.Module, batch: Windows) -> Tensor:
        logits = model(batch.ids[:, :-1]) if plain else model(input_ids=batch.ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.ids[:, 1:].flatten())

    ids = [torch.randint(0, sizes.gpt_vocabulary, (windows, sizes.context + 1), device=device) for _ in range(4)]
    model = PlainGPT(sizes) if plain else huggingface_gpt2(sizes)
    return Training(model, loss, [Windows(some) for some in ids], compiled, device)
