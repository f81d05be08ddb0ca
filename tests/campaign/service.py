"""Requests to `regard serve` that no client of its interfaces sends: it must refuse or answer, without an error."""

from __future__ import annotations

import http.client
import json
import threading
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

from tests.campaign import odd
from tests.campaign.requests import METHODS, raw
from tests.campaign.sandbox import Clock, Tally, call

TEXT = "this cat is very large"
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["x"], "seed": 1, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/translate": {
        "q": [TEXT, ""], "source": "en", "target": "es", "format": "text", "nbest": 2, "alternatives": 1,
        "glossary": {"cat": ["gato", "gata"]}, "alignment": False, "confidence": False, "prefix": "el", "model": None,
    },
    "/translate": {"q": TEXT, "source": "auto", "target": "es", "format": "html", "alternatives": 1, "api_key": "x"},
    "/detect": {"q": TEXT},
    "/v2/translate": {"text": [f"<b>{TEXT}</b>"], "target_lang": "ES", "source_lang": "EN", "tag_handling": "html"},
    "/v2/glossaries": {"name": "a", "source_lang": "en", "target_lang": "es", "entries": "cat\tgato"},
    "/v1/completions": {"model": "stories", "prompt": "Once", "logprobs": 1, "echo": True, **SAMPLING},
    "/v1/chat/completions": {"model": "stories", "messages": [{"role": "user", "content": "Once"}], **SAMPLING},
}  # fmt: skip
PATHS = [
    "/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/languages", "/frontend/settings", "/v1/models",
    "/v1/models/%ff", "/v1/models/stories", "/v2/languages?type=target", "/v2/languages?type=x", "/v2/usage",
    "/v2/glossaries/../x", "/v2/glossaries/%00/entries", "//", "/%00", "/v1/" + "a" * 5000, "*",
    "/v2/translate?text=%ff",
]  # fmt: skip
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
JSON = {"Content-Type": "application/json"}


def run(count: int | None, seed: int, seconds: float | None, scratch: Path) -> Tally:
    made = call(partial(_make, scratch), scratch, seconds=600)
    assert made.status == 0, made.err
    from regard.server.service_server import Options, open_service

    server = open_service(
        [f"{name}={scratch / name}" for name in ("en-es", "stories")], Options(device="cpu", logs=False)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    tally, random = Tally("service"), Random(seed)
    port = int(server.address.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for number in Clock(count, seconds).numbers():
        kind, method, path, body, headers = _request(random)
        if kind == "raw bytes":
            tally.add(kind, raw(port, body))
            continue
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            alive = raw(port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            tally.add(kind, alive and f"seed {seed}, {number}: {error!r}: {alive}")
            continue
        failure = ""
        if response.status >= 500:
            failure = f"seed {seed}, {number}: {response.status} {content[:200]!r} for {method} {path} {body[:300]!r}"
        elif b"server_error" in content[:4000]:
            failure = f"seed {seed}, {number}: {content[:300]!r} for {method} {path} {body[:300]!r}"
        tally.add(kind, failure)
    tally.add("answers at the end", raw(port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
    server.stop()
    return tally


def _make(scratch: Path) -> int:
    from tiny_runs import make_run

    make_run(scratch / "en-es", "transformer")
    make_run(scratch / "stories", "gpt")
    return 0


def _request(random: Random) -> tuple[str, str, str, bytes, dict[str, str]]:
    """Return kind, method, path, body and headers of a request."""
    draw = random.random()
    path, body = random.choice(list(BODIES.items()))
    if draw < 0.1:
        return "a plain request", "POST", path, json.dumps(body).encode(), JSON
    if draw < 0.55:
        changed = odd.mutated(body, random, random.choice([1, 1, 2]))[0]
        return "a changed body", "POST", path, json.dumps(changed).encode(), JSON
    if draw < 0.65:
        changed = odd.mutated(body, random, 1)[0]
        fields = {str(name): str(value) for name, value in changed.items()} if isinstance(changed, dict) else {}
        return "a form", "POST", path, urlencode(fields, errors="replace").encode(), FORM
    if draw < 0.75:
        headers = random.choice([JSON, FORM, {}])
        return "broken JSON", "POST", path, odd.bytes_of(json.dumps(body).encode(), random)[0], headers
    if draw < 0.78:
        return "deep JSON", "POST", path, odd.deep(random.choice(["[", '{"a":'])).encode(), JSON
    if draw < 0.93:
        return "a path or method", random.choice(METHODS), random.choice(PATHS), b"", {}
    if draw < 0.96:
        odd_headers = [
            {"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Content-Type": "text/plain"},
            {"Authorization": "Bearer x"}, {"Authorization": "DeepL-Auth-Key"}, {"X-A": "b" * 5000},
            {"Content-Length": "5"},
        ]  # fmt: skip
        return "odd headers", "POST", path, json.dumps(body).encode(), JSON | random.choice(odd_headers)
    junk = [random.randbytes(300), b"GET /\r\n\r\n", b"\r\n" * 100, b"POST /v1/translate HTTP/1.1\r\nHost: a"]
    return "raw bytes", "", "", random.choice(junk), {}
