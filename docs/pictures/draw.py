"""Make the pictures of docs/draw.md: `python docs/pictures/draw.py [FOLDER OF RUNS]` writes docs/pictures/draw/*.svg.

The runs come from `regard train ladder-transformer`, `ladder-additive` and `ladder-gru`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import regard
from regard.interpret import position_study
from regard.run_dir import RunDir
from regard.viz import views
from regard.viz.views import MapChoice, Picture

HERE = Path(__file__).parent / "draw"
SENTENCE = "this cat is very large"


def pictures(runs: Path) -> dict[str, Picture]:
    """Return all pictures by name."""
    transformer, additive, gru = (runs / f"ladder-{name}" for name in ("transformer", "additive", "gru"))
    trace = regard.load(transformer, device="cpu").trace(SENTENCE)
    recurrent = regard.load(additive, device="cpu").trace(SENTENCE)
    return {
        "align": views.draw(recurrent, "align"),
        "maps": views.draw(trace, "maps", MapChoice("encoder", layer=1, head=4)),
        "heads": views.draw(trace, "heads"),
        "walk": views.draw(trace, "walk"),
        "gates": views.draw(recurrent, "gates"),
        "positions": views.positions(position_study.study("sinusoidal", 48, 48)),
        "curves": views.curves([RunDir(path) for path in (transformer, additive, gru)]),
    }


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, picture in pictures(Path(sys.argv[1] if len(sys.argv) > 1 else "runs")).items():
        file = HERE / f"{name}.svg"
        picture.save(file)
        print(f"{file.relative_to(Path(__file__).parents[2])}: {file.stat().st_size / 1000:.0f} KB")
