"""Gates over time: how much of what recurrent and gated layers let through, token by token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.errors import UserError
from regard.interpret.trace import Trace
from regard.viz.colours import WEIGHTS, Ramp
from regard.viz.grid import Grid
from regard.viz.views.picture import Picture, rounded
from regard.viz.views.walk import written

SIDES = {"source": "what is read", "inputs": "what is written"}
WAYS = {"forward_cell": "forwards", "cell": "forwards", "backward_cell": "backwards"}


def gates(trace: Trace, part: str | None = None, layer: int | None = None) -> Picture:
    """The mean of every gate over its units, a row a gate; of one layer (counted from 0) every unit of each gate."""
    some = [gate for gate in trace.header["gates"] if part is None or gate["name"].startswith(part)]
    if not some:
        there = sorted({gate["name"].split(".")[0] for gate in trace.header["gates"]})
        raise UserError(f"--part {part}: this model's gates are in its {' and '.join(there)}")
    entries = [gate for gate in some if layer is None or _layer(gate) == layer]
    if not entries:
        most = 1 + max(_layer(gate) for gate in some)
        raise UserError(f"--layer {(layer or 0) + 1}: this model has {most} layer{'s' if most > 1 else ''} with gates")
    found = {gate["name"]: trace.array(gate["array"]) for gate in entries}  # [T, units]
    means = {name: value.mean(1) for name, value in found.items()}

    def numbers() -> dict[str, Any]:
        rows = [gate | {"mean": rounded(means[gate["name"]].tolist())} for gate in entries]
        if layer is not None:
            rows = [row | {"units": rounded(found[row["name"]].tolist())} for row in rows]
        return {"gates": rows}

    panels = (
        _overview(trace, entries, means) if layer is None else [_units(trace, g, found[g["name"]]) for g in entries]
    )
    return Picture("gates", tuple(panels), numbers)


def _layer(gate: Mapping[str, Any]) -> int:
    number = re.search(r"\.(\d+)\.", gate["name"])
    return int(number[1]) if number else 0


def label(gate: Mapping[str, Any]) -> str:
    """What to call a gate: `encoder 1 forwards, forget`."""
    part, *path = str(gate["name"]).split(".")
    way = next((f" {WAYS[step]}" for step in path if step in WAYS and part == "encoder"), "")
    return f"{part} {_layer(gate) + 1}{way}, {gate['kind']}"


def _overview(trace: Trace, entries: Sequence[Mapping[str, Any]], means: Mapping[str, np.ndarray]) -> list[Grid]:
    """A grid for each side's tokens; gates that are no share of 1 have a scale of their own."""
    panels = []
    for side, what in SIDES.items():
        for shares in (True, False):
            some = [g for g in entries if g["side"] == side and _is_share(trace, g) == shares]
            if not some:
                continue
            values = np.stack([means[gate["name"]] for gate in some]).astype(np.float64)
            panels.append(
                Grid(values, tuple(label(gate) for gate in some), written(trace.header["tokens"][side]),
                     f"Gates over {what}, mean of their units", "", "how open" if shares else "gate",
                     WEIGHTS if shares else Ramp.between(values), about=_about(some, values), shown=0.0, longest=40)
            )  # fmt: skip
    return panels


def _is_share(trace: Trace, gate: Mapping[str, Any]) -> bool:
    """Whether a gate lies between 0 and 1, as those do that are carried in steps of 1/255."""
    return bool(trace.header["arrays"][gate["array"]]["dtype"] == "uint8")


def _units(trace: Trace, gate: Mapping[str, Any], values: np.ndarray) -> Grid:
    """Every unit of one gate, those that are most open on top."""
    order = np.argsort(-values.mean(0), kind="stable")
    shown = values.T[order].astype(np.float64)
    return Grid(
        shown, tuple(str(unit + 1) for unit in order), written(trace.header["tokens"][gate["side"]]),
        f"{label(gate).capitalize()}: all {len(order)} units", "unit", "how open",
        WEIGHTS if _is_share(trace, gate) else Ramp.between(shown),
        about=f"Every unit of the gate {label(gate)}, for each token.",
    )  # fmt: skip


def _about(entries: Sequence[Mapping[str, Any]], values: np.ndarray) -> str:
    said = (f"{label(gate)}: mean {row.mean():.2f}." for gate, row in zip(entries, values, strict=True))
    return "Mean openness of each gate for each token. " + " ".join(said)
