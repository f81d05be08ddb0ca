"""Compare training speed of Vision Transformers on one GPU with torchvision's, compiled, in turn in one run.

    python -m bench.gpu_vision [--only cifar base ...] [--modes default ...] [--laps N] [--profile] [--out FILE]
    python -m bench.gpu_vision --device cpu --tiny            # to try the script; torchvision is not compiled then

A step is forward, backward, gradient clipping and fused AdamW, in bf16 with fp32 weights, on uint8 images that come
from the host. `cifar` is the size of the recipe cifar10 without its convolutions: 32 x 32 pixels in 64 patches, width
384, 8 layers, 512 images a step. `base` is ViT-B/16: 224 x 224 pixels in 196 patches, width 768, 12 layers, 256 images.
Both have a class token and no dropout. `augmented` is the recipe cifar10 itself, with its augmentation and no peer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_training import profile
from regard import accelerate
from regard.models.vit import ImageBatch, ViT, ViTSettings
from regard.nn.augment import Augmentation
from regard.recipes import load
from regard.recipes.schema import TrainingSettings
from regard.training.captured_step import make_step
from regard.training.static_batch import StaticBatchShape

CLASSES, WARM, STEPS = 10, 6, 30
MODES = ["default", "reduce-overhead"]
Step = Callable[[], int]  # takes a step, and returns its number of images


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its batches."""

    image: int
    patch: int
    width: int
    heads: int
    layers: int
    batch: int


SIZES = {"cifar": Size(32, 4, 384, 6, 8, 512), "base": Size(224, 16, 768, 12, 12, 256)}
TINY = {"cifar": Size(32, 8, 32, 2, 1, 4), "base": Size(32, 8, 32, 2, 2, 4)}


def images(size: Size, batches: int = 4) -> list[ImageBatch]:
    """Return batches of random images and labels, in pinned memory if there is a GPU."""
    random = torch.Generator().manual_seed(1)
    shape = (size.batch, size.image, size.image, 3)
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for _ in range(batches)]
    labels = [torch.randint(0, CLASSES, (size.batch,), generator=random) for _ in range(batches)]
    return [ImageBatch(x, y) for x, y in zip(pixels, labels, strict=True)]


def regard_step(model: ViT, batches: list[ImageBatch], device: torch.device) -> Step:
    """Return regard's step: captured and compiled on a GPU."""
    settings = TrainingSettings(precision="auto", label_smoothing=0.1, max_grad_norm=1.0)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = None
    if device.type == "cuda":
        accelerate.fuse(model)
        accelerate.compile_parts(model)
        shape = StaticBatchShape(batches[0])
    update = make_step(model, optimizer, None, settings, device, shape)
    turn, numbers = cycle(batches), count(1)
    return lambda: update({0: next(turn)}, next(numbers), 1e-4)


def ours(size: Size, device: torch.device) -> Step:
    torch.manual_seed(1)
    settings = ViTSettings(
        image=size.image, patch=size.patch, width=size.width, heads=size.heads, layers=size.layers,
        ffn_width=4 * size.width, dropout=0.0, pooling="class-token",
    )  # fmt: skip
    return regard_step(ViT(settings, 0, CLASSES), images(size), device)


def augmented(size: Size, device: torch.device) -> Step:
    """Return the step of the recipe cifar10 with all that it does to its images."""
    recipe = load("cifar10", [f"training.batch_tokens={max(size.batch, 16)}"])
    augmentation = Augmentation(**recipe.augment.model_dump())
    batches = []
    for number, batch in enumerate(images(size)):
        draws = torch.from_numpy(augmentation.draw(len(batch.labels), np.random.default_rng(number)))
        batches.append(ImageBatch(batch.images, batch.labels, draws, augmentation))
    torch.manual_seed(1)
    assert isinstance(recipe.model, ViTSettings)
    return regard_step(ViT(recipe.model, 0, CLASSES), batches, device)


def torchvision(size: Size, device: torch.device, mode: str) -> Step:
    """Return the step of torchvision's model, compiled."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(1)
    model = VisionTransformer(
        size.image, size.patch, size.layers, size.heads, size.width, 4 * size.width, num_classes=CLASSES
    )
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    on_gpu = device.type == "cuda"

    def loss(pixels: Tensor, labels: Tensor) -> Tensor:
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            logits = model(x)
        return F.cross_entropy(logits.float(), labels, label_smoothing=0.1)

    compiled = torch.compile(loss, mode=mode) if on_gpu else loss
    given = [(b.images.pin_memory(), b.labels.pin_memory()) if on_gpu else (b.images, b.labels) for b in images(size)]
    turn = cycle(given)

    def step() -> int:
        pixels, labels = (x.to(device, non_blocking=True) for x in next(turn))
        compiled(pixels, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return len(labels)

    return step


def lap(step: Step, device: torch.device, steps: int) -> float:
    """Return the images per second of some steps."""
    start, done = time.perf_counter(), 0
    for _ in range(steps):
        done += step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["cifar", "base", "augmented"])
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES, help="torch.compile's, for torchvision")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on a CPU")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of each case")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, sizes = torch.device(options.device), TINY if options.tiny else SIZES
    found: dict[str, list[float]] = {}
    if find_spec("torchvision") is None:
        print("torchvision is not installed: nothing to compare with", flush=True)
    for name in options.only:
        if name == "augmented":
            cases = {"recipe cifar10, augmented": augmented(sizes["cifar"], device)}
        else:
            cases = {f"{name}: regard": ours(sizes[name], device)}
            for mode in options.modes if find_spec("torchvision") else ():
                cases[f"{name}: torchvision, {mode}"] = torchvision(sizes[name], device, mode)
        for step in cases.values():
            lap(step, device, WARM)
        for _ in range(options.laps):  # in turn
            for case, step in cases.items():
                found.setdefault(case, []).append(lap(step, device, STEPS if device.type == "cuda" else 1))
        for case in cases:
            rates = found[case]
            middle = statistics.median(rates)
            print(f"{case:<40}{middle:>10,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f})", flush=True)
        if options.profile:
            for case, step in cases.items():
                print(case, profile(step), sep="\n")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
