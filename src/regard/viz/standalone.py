"""The page as one HTML file that opens from disk, with its scripts, styles and some traces.

Browsers do not load modules from disk, so all modules are bundled into one script, each in its own scope and after
those it imports. The content security policy of the file forbids all requests.
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

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
MAX_LOGIT_BYTES = 2**23  # in one file; the last rows are kept

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"([^"]+)";[^\n]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?function\*?|const|let|class)\s+(\w+)", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="page/([^"]+)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="page/([^"]+)"></script>\n?')


def files() -> dict[str, bytes]:
    """Return the page's files by path: index.html, style.css, js/app.js, ..."""
    return {path: entry.read_bytes() for path, entry in entries().items()}


@cache
def entries() -> dict[str, Traversable]:
    """Return the page's files by path, unread."""
    result: dict[str, Traversable] = {}
    folders: list[tuple[str, Traversable]] = [("", resources.files("regard.viz") / "page")]
    while folders:
        path, folder = folders.pop()
        for entry in folder.iterdir():
            name = f"{path}{entry.name}"
            if entry.is_dir():
                folders.append((f"{name}/", entry))
            elif media_type(name):
                result[name] = entry
    return result


def media_type(path: str) -> str:
    """Return the media type of one of the page's files; empty for any other file."""
    return MEDIA_TYPES.get(path[path.rfind(".") :], "")


def page(traces: Sequence[Trace], *, hash: str = "") -> str:
    """Return one HTML file that shows these traces; `hash` is its initial state, such as "#view=heads".

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
    data = as_json(embedded(traces, hash)).decode().replace("<", "\\u003c")
    tail = f'<script type="application/json" id="regard-data">{data}</script>\n<script>{script}</script>\n'
    bare = _SCRIPT.sub("", _STYLE.sub("", index))
    top, rest = bare.split("<title>", 1)
    body, end = rest.rsplit("</body>", 1)
    return f"{top}{head}<title>{body}{tail}</body>{end}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bundled(text: dict[str, str], start: str) -> str:
    """Bundle the modules that `start` needs, each as a function that returns its exports, dependencies first."""
    done: dict[str, str] = {}
    open_imports: list[str] = []

    def add(path: str) -> None:
        if path in done:
            return
        if path in open_imports:
            raise ValueError(f"circular import of modules: {' -> '.join([*open_imports, path])}")
        open_imports.append(path)
        for _, other in _IMPORT.findall(text[path]):
            add(_resolve(path, other))
        open_imports.pop()
        done[path] = _scope(path, text[path])

    add(start)
    script = '"use strict";\n' + "\n".join(done.values())
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _resolve(path: str, other: str) -> str:
    return normpath(join(dirname(path), other))


def _variable(path: str) -> str:
    return "module_" + re.sub(r"\W", "_", path.removesuffix(".js"))


def _scope(path: str, code: str) -> str:
    """Wrap a module's code in a function, so that names of different modules do not collide."""
    exports = [name for _, name in _EXPORT.findall(code)]
    code = _IMPORT.sub(lambda match: f"const {{{_renamed(match[1])}}} = {_variable(_resolve(path, match[2]))};", code)
    code = _EXPORT.sub(r"\1 \2", code)
    if re.search(r"^(import|export)\b", code, re.MULTILINE):
        raise ValueError(f"{path} has an import or export that cannot be bundled")
    return f"const {_variable(path)} = (() => {{\n{code}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _renamed(names: str) -> str:
    """Turn `a as b` of an import into `a: b` of a destructuring pattern."""
    return re.sub(r"(\w+)\s+as\s+(\w+)", r"\1: \2", names)


def embedded(traces: Sequence[Trace], hash: str = "") -> dict[str, Any]:
    """Return the data that the page reads instead of a server: runs, traces by request, arrays, logit lenses."""
    arrays = {f"{trace.key}/{name}": data for trace in traces for name, data in _arrays(trace).items()}
    arrays |= {f"{trace.key}/layers": _packed(as_json(trace.layers)) for trace in traces}
    by_run = {trace.header["model"]["run"]: trace for trace in traces}
    arrays |= {f"{run}/vocabulary": _packed(as_json(trace.vocabulary)) for run, trace in by_run.items()}
    return {
        "runs": runs_of(traces),
        "traces": {_request(trace): trace.header for trace in traces},
        "arrays": arrays,
        "hash": hash,
    }


def _request(trace: Trace) -> str:
    request = trace.header["request"]
    names = ("run", "step", "text", "target", "continue", "changes")
    return request_key(*(request[name] for name in names))


def _arrays(trace: Trace) -> dict[str, str]:
    """Return every array, compressed; of the logits only the last rows, each on its own."""
    logits = trace.header["output"]["logits"]
    rows, vocabulary = trace.header["arrays"][logits]["shape"]
    kept = range(max(0, rows - max(1, MAX_LOGIT_BYTES // (4 * vocabulary))), rows)
    names = [*(name for name in trace.names if name != logits), *(f"{logits}/{row}" for row in kept)]
    return {name: _packed(trace.display(name).tobytes()) for name in names}


def as_json(content: Any) -> bytes:
    """Encode JSON for the page; unpaired surrogates, which UTF-8 cannot encode, become JSON escapes."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _packed(data: bytes) -> str:
    deflate = zlib.compressobj(6, wbits=-zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(data) + deflate.flush()).decode("ascii")


def runs_of(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the answer of `/api/runs` for the runs and snapshots in the file."""
    runs: dict[str, dict[str, Any]] = {}
    for trace in traces:
        model, request = trace.header["model"], trace.header["request"]
        entry = runs.setdefault(model["run"], _entry(trace))
        if request["step"] is not None:
            entry["snapshots"] = sorted({*entry["snapshots"], request["step"]})
        entry["has_gold"] |= trace.header["gold"] is not None
    return {
        "version": 1,
        "text": traces[0].header["text"]["source"] if traces else "",
        "runs": list(runs.values()),
        "colours": colour_table(),
    }


def _entry(trace: Trace) -> dict[str, Any]:
    model = trace.header["model"]
    same = {name: model[name] for name in ("name", "family", "task", "layers", "heads", "positions")}
    text = trace.header["text"]["source"]
    return {"id": model["run"], **same, "path": model["name"], "about": "", "step": None, "snapshots": []} | {
        "example": text,
        "examples": [],
        "has_gold": False,
    }


@cache
def colour_table() -> dict[str, Any]:
    """Return the anchors of the colour scale for the page."""
    return {"anchors": [list(anchor) for anchor in ANCHORS]}
