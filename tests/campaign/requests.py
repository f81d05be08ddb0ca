"""Requests to the server of `regard look` that its page never sends: it must refuse or answer, without an error."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign import odd
from tests.campaign.sandbox import Clock, Tally, call

TEXT = "this cat is very large"
HEAD = {"kind": "head", "attention": "decoder.0.self", "head": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/api/trace": {"run": "transformer", "text": TEXT, "changes": [HEAD, {"kind": "hide", "word": 1}], "step": None},
    "/api/explain": {"run": "gpt", "text": "Once upon a", "masks": 20, "keep": 0.5, "seed": 1, "span": 1},
    "/api/positions": {"kind": "sinusoidal", "length": 16, "width": 16, "base": 100.0},
    "/api/standalone": {"requests": [{"run": "bert", "text": "a [MASK] day"}], "hash": ""},
}
PATHS = [
    "/", "/api/runs", "/page/js/app.js", "/page/../../etc/passwd", "/page/%2e%2e/%2e%2e/etc/passwd",
    "/api/trace/x/layers", "/api/trace/x/y/z", "/api/nothing",
    "//", "/%00", "/api/trace/%ff", "/?token=x", "/page/" + "a" * 5000, "*",
]  # fmt: skip
FAMILIES = {"transformer": "transformer", "recurrent": "recurrent (additive)", "gpt": "gpt", "bert": "bert (fill)"}
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT"]


def run(count: int | None, seed: int, seconds: float | None, scratch: Path) -> Tally:
    made = call(partial(_make, scratch), scratch, seconds=600)
    assert made.status == 0, made.err
    from regard.server.page_server import open_server

    server = open_server([scratch / name for name in FAMILIES], device="cpu")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    tally, random = Tally("requests"), Random(seed)
    port = int(server.address.rstrip("/").rpartition(":")[2])
    headers = {} if server.token is None else {"Authorization": f"Bearer {server.token}"}
    keys: list[str] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for number in Clock(count, seconds).numbers():
        kind, method, path, body, more = _request(random, keys)
        if kind == "raw bytes":
            tally.add(kind, raw(port, body))
            continue
        try:
            connection.request(method, path, body, {**headers, **more})
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            alive = raw(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            tally.add(kind, alive and f"seed {seed}, {number}: {error!r}: {alive}")
            continue
        failure = ""
        if response.status >= 500 and response.status != 503:
            failure = f"seed {seed}, {number}: {response.status} {content[:200]!r} for {method} {path} {body[:200]!r}"
        elif b"NaN" in content[:2000] and response.headers.get_content_type() == "application/json":
            failure = f"seed {seed}, {number}: NaN for {body[:200]!r}"
        elif path == "/api/trace" and response.status == 200:
            key = json.loads(content).get("key")
            keys = [key, *keys[:5]]
            failure = "" if key else f"seed {seed}, {number}: no key in the answer to {body[:200]!r}"
        tally.add(kind, failure)
    tally.add("answers at the end", raw(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
    server.stop()
    return tally


def _make(scratch: Path) -> int:
    from tiny_runs import make_run

    for name, family in FAMILIES.items():
        make_run(scratch / name, family)
    return 0


def _request(random: Random, keys: list[str]) -> tuple[str, str, str, bytes, dict[str, str]]:
    """Return kind, method, path, body and headers of a request."""
    json_type = {"Content-Type": "application/json"}
    draw = random.random()
    if draw < 0.1:
        name = random.choice(list(FAMILIES))
        wanted: dict[str, Any] = {"run": name, "text": "a [MASK] day" if name == "bert" else TEXT}
        more: list[dict[str, Any]] = [{}, {"step": 10}, {"step": 11}, {"changes": [HEAD]}, {"continue": [300]}]
        return "a trace", "POST", "/api/trace", json.dumps({**wanted, **random.choice(more)}).encode(), json_type
    if draw < 0.55:
        path, body = random.choice(list(BODIES.items()))
        body = {**body, **({"run": random.choice(list(FAMILIES))} if "run" in body and random.random() < 0.5 else {})}
        changed = odd.mutated(body, random, random.choice([1, 1, 2]))[0]
        return "a changed body", "POST", path, json.dumps(changed).encode(), json_type
    if draw < 0.65:
        path, body = random.choice(list(BODIES.items()))
        return "broken JSON", "POST", path, odd.bytes_of(json.dumps(body).encode(), random)[0], json_type
    if draw < 0.68:
        path, text = random.choice(list(BODIES)), odd.deep(random.choice(["[", '{"a":']))
        return "deep JSON", "POST", path, text.encode(), json_type
    if draw < 0.78 and keys:
        parts = ["layers", "output.logits/1", "decoder.0.self", "x", "../..", "%00", "output.logits/-1", "stream/0"]
        return "part of a trace", "GET", f"/api/trace/{random.choice(keys)}/{random.choice(parts)}", b"", {}
    if draw < 0.9:
        return "a path or method", random.choice(METHODS), random.choice(PATHS), b"", {}
    if draw < 0.95:
        odd_headers = [
            {"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Content-Type": "text/plain"},
            {"Authorization": "Bearer x"}, {"Cookie": "a=b; " * 100}, {"X-A": "b" * 5000}, {"Content-Length": "5"},
        ]  # fmt: skip
        headers = json_type | random.choice(odd_headers)
        return "odd headers", "POST", "/api/positions", b'{"kind": "index"}', headers
    return (
        "raw bytes",
        "",
        "",
        random.choice([random.randbytes(300), b"GET /\r\n\r\n", b"\r\n" * 100, b"POST / HTTP/1.1\r\nHost: a"]),
        {},
    )


def raw(port: int, content: bytes) -> str:
    """Send bytes and close the connection; return what is wrong if the server does not answer, or with an error."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            with contextlib.suppress(OSError):  # the server may have refused and closed already
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
    except ConnectionResetError:
        return ""
    except OSError as error:
        return f"no answer: {error}"
    return f"{answer[:200]!r}" if answer[9:12] == b"500" else ""
