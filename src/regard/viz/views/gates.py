"""The gates of recurrent and gated layers, token by token."""

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
from regard.viz.views.walk import axis_labels

SIDES = {"source": "the source", "inputs": "the output"}
DIRECTIONS = {"forward_cell": "forward", "cell": "forward", "backward_cell": "backward"}


def gates(trace: Trace, part: str | None = None, layer: int | None = None) -> Picture:
    """Draw the mean of every gate over its units, one row per gate; with `layer` (from 0) every unit of its gates."""
    selected = [gate for gate in trace.header["gates"] if part is None or gate["name"].startswith(part)]
    if not selected:
        present = sorted({gate["name"].split(".")[0] for gate in trace.header["gates"]})
        raise UserError(f"--part {part}: this model has gates in its {' and '.join(present)}")
    entries = [gate for gate in selected if layer is None or _layer(gate) == layer]
    if not entries:
        most = 1 + max(_layer(gate) for gate in selected)
        raise UserError(f"--layer {(layer or 0) + 1}: this model has {most} layer{'s' if most > 1 else ''} with gates")
    arrays = {gate["name"]: trace.array(gate["array"]) for gate in entries}  # [T, units]
    means = {name: value.mean(1) for name, value in arrays.items()}

    def numbers() -> dict[str, Any]:
        rows = [gate | {"mean": rounded(means[gate["name"]].tolist())} for gate in entries]
        if layer is not None:
            rows = [row | {"units": rounded(arrays[row["name"]].tolist())} for row in rows]
        return {"gates": rows}

    panels = (
        _overview(trace, entries, means) if layer is None else [_units(trace, g, arrays[g["name"]]) for g in entries]
    )
    return Picture("gates", tuple(panels), numbers)


def _layer(gate: Mapping[str, Any]) -> int:
    number = re.search(r"\.(\d+)\.", gate["name"])
    return int(number[1]) if number else 0


def label(gate: Mapping[str, Any]) -> str:
    """Return the name of a gate: `encoder 1 forward, forget`."""
    part, *path = str(gate["name"]).split(".")
    direction = next((f" {DIRECTIONS[step]}" for step in path if step in DIRECTIONS and part == "encoder"), "")
    return f"{part} {_layer(gate) + 1}{direction}, {gate['kind']}"


def _overview(trace: Trace, entries: Sequence[Mapping[str, Any]], means: Mapping[str, np.ndarray]) -> list[Grid]:
    """Return a grid per side; gates outside 0..1 have a scale of their own."""
    panels = []
    for side, what in SIDES.items():
        for shares in (True, False):
            selected = [g for g in entries if g["side"] == side and _is_share(trace, g) == shares]
            if not selected:
                continue
            values = np.stack([means[gate["name"]] for gate in selected]).astype(np.float64)
            panels.append(
                Grid(values, tuple(label(gate) for gate in selected), axis_labels(trace.elements(side)),
                     f"Gates over {what}, mean of their units", "", "openness" if shares else "gate",
                     WEIGHTS if shares else Ramp.between(values), about=_about(selected, values), shown=0.0, longest=40)
            )  # fmt: skip
    return panels


def _is_share(trace: Trace, gate: Mapping[str, Any]) -> bool:
    """Whether a gate is between 0 and 1; such gates are stored in steps of 1/255."""
    return bool(trace.header["arrays"][gate["array"]]["dtype"] == "uint8")


def _units(trace: Trace, gate: Mapping[str, Any], values: np.ndarray) -> Grid:
    """Return every unit of one gate, the most open first."""
    order = np.argsort(-values.mean(0), kind="stable")
    shown = values.T[order].astype(np.float64)
    return Grid(
        shown, tuple(str(unit + 1) for unit in order), axis_labels(trace.elements(gate["side"])),
        f"{label(gate).capitalize()}: all {len(order)} units", "unit", "openness",
        WEIGHTS if _is_share(trace, gate) else Ramp.between(shown),
        about=f"Every unit of the gate {label(gate)}, for each token.",
    )  # fmt: skip


def _about(entries: Sequence[Mapping[str, Any]], values: np.ndarray) -> str:
    means = (f"{label(gate)}: mean {row.mean():.2f}." for gate, row in zip(entries, values, strict=True))
    return "Mean openness of each gate for each token. " + " ".join(means)
