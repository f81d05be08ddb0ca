"""Make the pictures of docs/draw.md: `python docs/pictures/draw.py [FOLDER OF RUNS [NAME ...]]` writes draw/*.svg.

The runs come from `regard train ladder-transformer`, `ladder-additive` and `ladder-gru`. NAMEs are those of the
pictures to make; by default all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import regard
from regard.interpret import position_study
from regard.interpret.trace import Trace
from regard.run_dir import RunDir
from regard.viz import views
from regard.viz.views import MapChoice, Picture

HERE = Path(__file__).parent / "draw"
SENTENCE = "this cat is very large"


def pictures(runs: Path) -> dict[str, Callable[[], Picture]]:
    """Return functions that make the pictures, by name."""
    paths = [runs / f"ladder-{name}" for name in ("transformer", "additive", "gru")]

    def trace(path: Path) -> Trace:
        return regard.load(path, device="cpu").trace(SENTENCE)

    return {
        "align": lambda: views.draw(trace(paths[1]), "align"),
        "maps": lambda: views.draw(trace(paths[0]), "maps", MapChoice("encoder", layer=1, head=4)),
        "heads": lambda: views.draw(trace(paths[0]), "heads"),
        "walk": lambda: views.draw(trace(paths[0]), "walk"),
        "gates": lambda: views.draw(trace(paths[1]), "gates"),
        "positions": lambda: views.positions(position_study.study("sinusoidal", 48, 48)),
        "curves": lambda: views.curves([RunDir(path) for path in paths]),
    }


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    made = pictures(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
    for name in sys.argv[2:] or made:
        file = HERE / f"{name}.svg"
        made[name]().save(file)
        print(f"{file.relative_to(Path(__file__).parents[2])}: {file.stat().st_size / 1000:.0f} KB")
