"""Symmetrisation: the links of two directions made into one alignment (Och and Ney 2003; Koehn et al. 2003).

Both directions are sets of links (source word, target word). Their intersection is precise, their union complete;
growing starts with the intersection and adds links of the union that continue it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from regard.metrics.alignment import Link

NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))
Links = Iterable[Link]


class _Growing:
    """An alignment that grows: its links, and the words of both sides that have one."""

    def __init__(self, links: Links) -> None:
        self.links = set(links)
        self.sources, self.targets = {i for i, _ in self.links}, {j for _, j in self.links}

    def add(self, link: Link) -> None:
        self.links.add(link)
        self.sources.add(link[0])
        self.targets.add(link[1])

    def grow(self, union: set[Link], both: bool) -> None:
        """Add links of the union next to links, as long as there are any with a word (or `both`) that has none."""
        order, count = sorted(union), 0
        while count < len(self.links):
            count = len(self.links)
            for i, j in order:
                if (i, j) not in self.links:
                    continue
                for step_i, step_j in NEIGHBOURS:
                    link = (i + step_i, j + step_j)
                    free = (link[0] not in self.sources) + (link[1] not in self.targets)
                    if link in union and free > both:
                        self.add(link)

    def add_lone(self, links: Links) -> None:
        """Add links both of whose words have none, in order."""
        for link in sorted(links):
            if link[0] not in self.sources and link[1] not in self.targets:
                self.add(link)


def grow_diagonal(forward: set[Link], reverse: set[Link], both: bool = False) -> set[Link]:
    """Grow the intersection by neighbouring links of the union that have a word (or `both` words) without a link.

    >>> sorted(grow_diagonal({(0, 0), (1, 1), (3, 0)}, {(0, 0), (1, 2), (2, 1)}))
    [(0, 0), (1, 1), (1, 2), (2, 1), (3, 0)]
    """
    growing = _Growing(forward & reverse)
    growing.grow(forward | reverse, both)
    return growing.links


def grow_diagonal_final_and(forward: set[Link], reverse: set[Link]) -> set[Link]:
    """`grow_diagonal`, then the links of the forward and of the reverse direction both of whose words have none."""
    growing = _Growing(grow_diagonal(forward, reverse))
    growing.add_lone(forward)
    growing.add_lone(reverse)
    return growing.links


METHODS: dict[str, Callable[[set[Link], set[Link]], set[Link]]] = {
    "intersection": lambda forward, reverse: forward & reverse,
    "union": lambda forward, reverse: forward | reverse,
    "grow-diagonal": grow_diagonal,
    "grow-diagonal-and": lambda forward, reverse: grow_diagonal(forward, reverse, both=True),
    "grow-diagonal-final-and": grow_diagonal_final_and,
    "forward": lambda forward, reverse: forward,
    "reverse": lambda forward, reverse: reverse,
}


def pharaoh(links: Links) -> str:
    """Format links as a line of a Pharaoh file.

    >>> pharaoh({(1, 2), (0, 0)})
    '0-0 1-2'
    """
    return " ".join(f"{i}-{j}" for i, j in sorted(links))
