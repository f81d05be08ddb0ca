"""Tables of repeated measurements: medians, their spread, and the ratio to the best other library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Measured:
    """The results of one system, one per repeat."""

    name: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> float:
        """Half the difference between the highest and the lowest value, relative to the median."""
        return (max(self.values) - min(self.values)) / 2 / self.median


@dataclass(frozen=True)
class Comparison:
    """One row of a table: what was measured, our result and the others'. A ratio above 1 means that ours is better."""

    what: str
    unit: str
    ours: Measured
    peers: Sequence[Measured]
    less_is_better: bool = False

    @property
    def best(self) -> Measured:
        pick = min if self.less_is_better else max
        return pick(self.peers, key=lambda peer: peer.median)

    @property
    def ratio(self) -> Measured:
        """Our result relative to the best other one, per repeat, since a disturbance of the machine affects both."""
        pairs = zip(self.ours.values, self.best.values, strict=True)
        return Measured("ratio", [b / a if self.less_is_better else a / b for a, b in pairs])


def shown(value: float) -> str:
    """Format a figure.

    >>> shown(12345.6), shown(97.25), shown(1.2345)
    ('12,346', '97', '1.23')
    """
    return f"{value:,.0f}" if value >= 20 else f"{value:.2f}"


def table(lines: Sequence[Comparison]) -> str:
    """Format the comparisons as a Markdown table: medians, and after each ratio half its spread."""
    head = ["measured", "unit", "regard", "peers", "ratio to the best"]
    rows = [[line.what, line.unit, shown(line.ours.median), _peers(line), _ratio(line)] for line in lines]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    ruled = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in ruled
    )


def _peers(line: Comparison) -> str:
    return ", ".join(f"{peer.name} {shown(peer.median)}" for peer in line.peers) or "-"


def _ratio(line: Comparison) -> str:
    return f"{line.ratio.median:.2f} ± {line.ratio.spread * line.ratio.median:.2f}" if line.peers else "-"
