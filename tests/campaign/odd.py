"""Unexpected values and bytes."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

MAX_DEPTH = 20  # values deeper than this are not nested further: json.dumps and the recipe writer recurse
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 255, 2**31, 10**6, 10**9, 10**12, 2**53, 2**63, 10**30, -(10**9), 0.0, 0.5, -0.5,
    5e-324, 1e308, float("inf"), float("nan"), "", "a", " ", "\x1b[2J\x1b]0;owned\x07", "\x00", "\u202etxt.exe",
    "../../x", "/etc/passwd", "/dev/zero", "a" * 10_000, "[MASK]", "<2de>", [], {},
    [[]], [None], ["a"], [1, 2, 3], {"a": 1},
    {"": []}, [[1], ["a"]], "transformer", "gpt", "bert", "recurrent", "cuda:99", "1e9", "true", "ß" * 50,
]  # fmt: skip


def value(random: Random) -> Any:
    """Return a copy of one of `VALUES`: a later mutation must not change the list or put a value inside itself."""
    return copy.deepcopy(random.choice(VALUES))


def deep(kind: str = "[") -> str:
    """Return JSON or TOML that is nested more deeply than parsers support."""
    return (kind * 100_000) + "0"


def paths(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to every value inside JSON; of long lists, to the first entries."""
    found = [at] if at else []
    items = (
        content.items() if isinstance(content, dict) else enumerate(content[:20]) if isinstance(content, list) else []
    )
    for key, value in items:
        found += paths(value, (*at, key))
    return found


def mutated(content: Any, random: Random, times: int = 1) -> tuple[Any, str]:
    """Replace, remove or add some values of JSON; return it and a description of the changes."""
    content, done = copy.deepcopy(content), []
    for _ in range(times):
        at = random.choice(paths(content) or [()])
        if not at:
            return value(random), "replaced all of it"
        holder = content
        for key in at[:-1]:
            holder = holder[key]
        name = ".".join(map(str, at))
        action = random.choice(["replace"] * 6 + ["remove", "add", "nest", "swap"])
        if action == "remove":
            del holder[at[-1]]
        elif action == "add" and isinstance(holder, dict):
            holder[random.choice(["", "extra", "__class__", "\x1b[2J", "a" * 1000])] = value(random)
        elif action == "nest" and len(at) < MAX_DEPTH:
            for _ in range(random.choice([1, 5, 300])):
                holder[at[-1]] = [holder[at[-1]]]
        elif action == "swap" and isinstance(holder, dict) and len(holder) > 1:
            other = random.choice(list(holder))
            holder[at[-1]], holder[other] = holder[other], holder[at[-1]]
        else:
            holder[at[-1]] = value(random)
            name += f" = {holder[at[-1]]!r:.40}"
        done.append(f"{action} {name:.60}")
    return content, "; ".join(done)


def bytes_of(content: bytes, random: Random) -> tuple[bytes, str]:
    """Truncate, repeat, insert or flip bytes; return them and a description of the change."""
    action = random.choice(["cut", "flip", "noise", "twice", "empty", "zeros", "head", "bom", "latin"])
    at = random.randrange(len(content) + 1)
    if action == "cut":
        return content[:at], f"cut at {at}"
    if action == "flip" and content:
        changed = bytearray(content)
        for _ in range(random.choice([1, 1, 10, 100])):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed), "flipped bits"
    if action == "noise":
        return content[:at] + random.randbytes(random.choice([1, 10, 1000])) + content[at:], f"noise at {at}"
    if action == "twice":
        return content + content[at:], f"repeated from {at}"
    if action == "zeros":
        return content[:at] + bytes(1000) + content[at:], f"zeros at {at}"
    if action == "head":
        return random.randbytes(8) + content[8:], "another head"
    if action == "bom":
        return b"\xef\xbb\xbf" + content, "a byte-order mark"
    if action == "latin":
        return content[:at] + b"\xe9\xff" + content[at:], f"no UTF-8 at {at}"
    return b"", "empty"
