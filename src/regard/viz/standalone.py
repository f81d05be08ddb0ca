"""The page as one HTML file that opens from disk: its scripts, its style and some traces, and nothing fetched.

A browser does not load modules from disk, so they are laid into one script here: each in a scope of its own, those it
imports before it. The file says of itself that it may fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath
from typing import Any

from regard.interpret.trace import Trace, request_key
from regard.viz.colours import ANCHORS

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
LOGITS = 2**23  # bytes of logits that a file carries, the last rows first

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";[^\n]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?function\*?|const|let|class)\s+(\w+)", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="page/([^"]+)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="page/([^"]+)"></script>\n?')


def files() -> dict[str, bytes]:
    """The page's own files by their path: index.html, style.css, js/app.js, ..."""
    return {path: place.read_bytes() for path, place in places().items()}


@cache
def places() -> dict[str, Traversable]:
    """Where they are."""
    found: dict[str, Traversable] = {}
    folders: list[tuple[str, Traversable]] = [("", resources.files("regard.viz") / "page")]
    while folders:
        path, folder = folders.pop()
        for entry in folder.iterdir():
            name = f"{path}{entry.name}"
            if entry.is_dir():
                folders.append((f"{name}/", entry))
            elif kind(name):
                found[name] = entry
    return found


def kind(path: str) -> str:
    """The media type of one of the page's files; empty for what is none of them."""
    return KINDS.get(path[path.rfind(".") :], "")


def page(traces: Sequence[Trace], *, hash: str = "") -> str:
    """One HTML file that shows these traces; `hash` is the state it opens with, such as "#view=heads".

    >>> page([model.trace("this cat is very large")])              # doctest: +SKIP
    '<!doctype html>...
    """
    text = {name: content.decode("utf-8") for name, content in files().items()}
    index = text["index.html"]
    style = "\n".join(text[name] for name in _STYLE.findall(index))
    script = bundled(text, *_SCRIPT.findall(index))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    data = as_json(carried(traces, hash)).decode().replace("<", "\\u003c")
    tail = f'<script type="application/json" id="regard-data">{data}</script>\n<script>{script}</script>\n'
    bare = _SCRIPT.sub("", _STYLE.sub("", index))
    top, rest = bare.split("<title>", 1)
    body, end = rest.rsplit("</body>", 1)
    return f"{top}{head}<title>{body}{tail}</body>{end}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bundled(text: dict[str, str], start: str) -> str:
    """The modules that `start` needs, each as a function that returns what it exports, in an order that works."""
    placed: dict[str, str] = {}
    under_way: list[str] = []

    def place(path: str) -> None:
        if path in placed:
            return
        if path in under_way:
            raise ValueError(f"modules import each other in a circle: {' -> '.join([*under_way, path])}")
        under_way.append(path)
        for _, other in _IMPORT.findall(text[path]):
            place(_beside(path, other))
        under_way.pop()
        placed[path] = _scope(path, text[path])

    place(start)
    whole = '"use strict";\n' + "\n".join(placed.values())
    return whole.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _beside(path: str, other: str) -> str:
    return normpath(join(dirname(path), other))


def _variable(path: str) -> str:
    return "module_" + re.sub(r"\W", "_", path.removesuffix(".js"))


def _scope(path: str, code: str) -> str:
    """A module's code as a function of its own, so that no two modules' names meet."""
    exports = [name for _, name in _EXPORT.findall(code)]
    code = _IMPORT.sub(lambda found: f"const {{{_renamed(found[1])}}} = {_variable(_beside(path, found[2]))};", code)
    code = _EXPORT.sub(r"\1 \2", code)
    if re.search(r"^(import|export)\b", code, re.MULTILINE):
        raise ValueError(f"{path} imports or exports in a way that cannot be laid into one file")
    return f"const {_variable(path)} = (() => {{\n{code}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _renamed(names: str) -> str:
    """`a as b` of an import is `a: b` of a pattern."""
    return re.sub(r"(\w+)\s+as\s+(\w+)", r"\1: \2", names)


def carried(traces: Sequence[Trace], hash: str = "") -> dict[str, Any]:
    """What the page reads instead of asking a server: runs, traces by their request, their arrays and layers."""
    arrays = {f"{trace.key}/{name}": data for trace in traces for name, data in _arrays(trace).items()}
    arrays |= {f"{trace.key}/layers": _packed(as_json(trace.layers)) for trace in traces}
    spelled = {trace.header["model"]["run"]: trace for trace in traces}
    arrays |= {f"{run}/vocabulary": _packed(as_json(trace.vocabulary)) for run, trace in spelled.items()}
    return {
        "runs": runs_of(traces),
        "traces": {_request(trace): trace.header for trace in traces},
        "arrays": arrays,
        "hash": hash,
    }


def _request(trace: Trace) -> str:
    wanted = trace.header["request"]
    names = ("run", "step", "text", "target", "continue", "changes")
    return request_key(*(wanted[name] for name in names))


def _arrays(trace: Trace) -> dict[str, str]:
    """Every array, deflated; of logits single rows, the last first, as many as there is room for."""
    logits = trace.header["output"]["logits"]
    rows, vocabulary = trace.header["arrays"][logits]["shape"]
    kept = range(max(0, rows - max(1, LOGITS // (4 * vocabulary))), rows)
    names = [*(name for name in trace.names if name != logits), *(f"{logits}/{row}" for row in kept)]
    return {name: _packed(trace.display(name).tobytes()) for name in names}


def as_json(content: Any) -> bytes:
    """JSON as the page is sent it; half a surrogate pair, which UTF-8 cannot write, as JSON's own escape."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _packed(data: bytes) -> str:
    deflate = zlib.compressobj(6, wbits=-zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(data) + deflate.flush()).decode("ascii")


def runs_of(traces: Sequence[Trace]) -> dict[str, Any]:
    """What `/api/runs` would say, of the runs and snapshots that are in the file."""
    entries: dict[str, dict[str, Any]] = {}
    for trace in traces:
        about, asked = trace.header["model"], trace.header["request"]
        entry = entries.setdefault(about["run"], _entry(trace))
        if asked["step"] is not None:
            entry["snapshots"] = sorted({*entry["snapshots"], asked["step"]})
        entry["has_gold"] |= trace.header["gold"] is not None
    return {
        "version": 1,
        "text": traces[0].header["text"]["source"] if traces else "",
        "runs": list(entries.values()),
        "colours": colour_table(),
    }


def _entry(trace: Trace) -> dict[str, Any]:
    about = trace.header["model"]
    same = {name: about[name] for name in ("name", "family", "task", "layers", "heads", "positions")}
    text = trace.header["text"]["source"]
    return {"id": about["run"], **same, "path": about["name"], "about": "", "step": None, "snapshots": []} | {
        "example": text,
        "has_gold": False,
    }


@cache
def colour_table() -> dict[str, Any]:
    """The anchors of the colour scale, for whoever draws with them."""
    return {"anchors": [list(anchor) for anchor in ANCHORS]}
