"""The code blocks of a page of the docs: what they are, what they print, and what the page says they print.

A python block that prints is followed by a text block with what it printed; one that is not followed by any prints
nothing.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Some python, the line of the page where it stands, and what it should print."""

    code: str
    line: int
    printed: str


def chapters(text: str) -> dict[str, list[Block]]:
    """The blocks of each chapter, in order."""
    found: dict[str, list[Block]] = {}
    fences = [(match.start(), match[1], match[2]) for match in FENCE.finditer(text)]
    inside = [range(match.start(), match.end()) for match in FENCE.finditer(text)]
    heads = [h for h in re.finditer(r"^## (.+)$", text, re.MULTILINE) if not any(h.start() in span for span in inside)]
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=True):
        own = [fence for fence in fences if head.start() <= fence[0] < end]
        after = [*own, (end, "", "")][1:]
        found[head[1]] = [
            Block(code, text[:start].count("\n") + 2, following[2] if following[1] == "text" else "")
            for (start, kind, code), following in zip(own, after, strict=True)
            if kind == "python"
        ]
    return {name: blocks for name, blocks in found.items() if blocks}


def run(blocks: list[Block], page: Path) -> list[str]:
    """What each block prints, all of them in one namespace."""
    names: dict[str, Any] = {"__name__": page.stem}
    printed = []
    for block in blocks:
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")  # tracebacks name the page's lines
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed.append(out.getvalue())
    return printed


def settled(text: str) -> list[str]:
    """Lines without trailing space, and zeros without a sign: -0.00 and 0.00 are the same number."""
    return [re.sub(r"-(0\.?0*)(?![\d.])", r" \1", line).rstrip() for line in text.strip("\n").splitlines()]
