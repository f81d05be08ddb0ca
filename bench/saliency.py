"""Compare saliency maps of images, where the pixels that matter are known: the built-in corpus clutter.

    regard train clutter && python -m bench.saliency runs/clutter [--images N] [--masks N]

Prints how often the greatest pixel of each map is in the coloured shape (the pointing game), and the areas under
deletion and insertion curves, for RISE, attention rollout, gradients, and random orders.
"""

from __future__ import annotations

import argparse

import numpy as np

from regard.data.shapes import Clutter
from regard.interpret.explain import curves
from regard.interpret.explain.models import explain_request
from regard.runs import LoadedRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--masks", type=int, default=400)
    options = parser.parse_args()
    loaded = LoadedRun.load(options.run, device="cpu")
    hits: dict[str, list[bool]] = {}
    areas: dict[str, list[tuple[float, float]]] = {}
    right, chance = [], []
    for image, label, region in Clutter.examples("test", options.images):
        request = explain_request(loaded, image)
        right.append(request.output == label)
        chance.append(region.mean())
        orders = request.orders(request.explain(masks=options.masks).overall, "RISE")
        for name, values in orders.items():
            hits.setdefault(name, []).append(bool(region.ravel()[np.argmax(values)]))
        for curve in curves(request.box, orders, insertion=request.insertion, shuffles=4):
            areas.setdefault(curve.name, []).append((curve.deletion_area, curve.insertion_area))
    print(f"{np.mean(right):.1%} of {options.images} images right; the shape has {np.mean(chance):.1%} of the pixels")
    for name, found in areas.items():
        deletion, insertion = np.mean(found, 0)
        pointed = f"{np.mean(hits[name]):.1%}" if name in hits else "-"
        print(f"{name:<14} pointing {pointed:>6}   deletion {deletion:.3f}   insertion {insertion:.3f}")


if __name__ == "__main__":
    main()
