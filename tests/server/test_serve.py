"""A listening server: concurrent clients, clients that disconnect, start and shutdown."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from regard import cancel
from regard.api import Model
from regard.errors import UserError
from regard.run_dir import RunDir
from regard.server import connections, explain, middleware
from regard.server.page_server import open_server
from regard.server.process import Server
from regard.server.schemas import ExplainBody

LONG = " ".join(["this cat is very large and"] * 3)  # too many words to enumerate all masks


def connect(server: Server) -> http.client.HTTPConnection:
    address = urlsplit(server.address)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)


def as_json(server: Server) -> dict[str, str]:
    return {"content-type": "application/json", "authorization": f"Bearer {server.token}"}


def post(server: Server, path: str, body_json: dict[str, Any]) -> tuple[int, Any]:
    connection = connect(server)
    connection.request("POST", path, json.dumps(body_json), as_json(server))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def until(holds: Callable[[], bool], seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_fifty_concurrent_requests_are_all_answered(server: Server) -> None:
    texts = [f"this cat is very large {'very ' * (number % 7)}" for number in range(50)]
    body_json = [
        {"run": ["tiny-transformer", "tiny-additive", "tiny-gpt"][n % 3], "text": text} for n, text in enumerate(texts)
    ]
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda one: post(server, "/api/trace", one), body_json))
    assert [status for status, _ in answers] == [200] * 50
    assert [found["text"]["source"] for _, found in answers] == texts
    again = [post(server, "/api/trace", one)[1] for one in body_json[:3]]
    assert [found["output"] for found in again] == [found["output"] for _, found in answers[:3]]


def test_a_client_that_disconnects_during_a_request_does_no_harm(server: Server) -> None:
    address = urlsplit(server.address)
    for data in (b"", b"GET", b"POST /api/trace HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{"):
        with socket.create_connection((address.hostname, address.port or 0)) as clients:
            clients.sendall(data)
    assert post(server, "/api/trace", {"run": "tiny-gpt", "text": "Once"})[0] == 200


HALF = b"GET /api/runs HTTP/1.1\r\nhost: 127.0.0.1\r\n"


def half_open(server: Server, data: bytes = HALF) -> socket.socket:
    address = urlsplit(server.address)
    opened = socket.create_connection((address.hostname, address.port or 0), timeout=60)
    opened.sendall(data)
    return opened


def is_closed(opened: socket.socket) -> bool:
    """Return whether the server closes the connection before the socket times out."""
    try:
        return opened.recv(1) == b""
    except ConnectionError:
        return True


def test_half_open_requests_do_not_block_other_clients(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest are closed before the process runs out of file descriptors."""
    monkeypatch.setattr(connections.LimitedProtocol, "limit", 8)
    monkeypatch.setattr(connections, "HEADER_SECONDS", 100.0)  # so that no connection is closed for its age
    answering = connect(server)
    body_json = {"run": "tiny-transformer", "text": LONG, "masks": 20_000}
    answering.request("POST", "/api/explain", json.dumps(body_json), as_json(server))
    lines = answering.getresponse()
    assert lines.readline()
    clients = [half_open(server) for _ in range(40)]
    assert all(map(is_closed, clients[:30]))
    assert post(server, "/api/trace", {"run": "tiny-gpt", "text": "Once"})[0] == 200
    assert lines.readline(), "a request that is being answered is left alone"
    lines.close()
    answering.close()
    for one in clients:
        one.close()
    assert not caplog.records


def test_an_incomplete_request_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    slow_sockets = [half_open(server, data) for data in (b"", b"GET", HALF)]
    known = f"authorization: Bearer {server.token}\r\n".encode()
    complete = HALF + known + b"\r\n"
    slow_sockets.append(half_open(server, complete))
    assert slow_sockets[-1].recv(15) == b"HTTP/1.1 200 OK"
    slow_sockets[-1].sendall(HALF)  # a second request on the same connection
    while slow_sockets[-1].recv(2**16):
        pass
    assert all(map(is_closed, slow_sockets[:-1]))
    body = half_open(server, HALF.replace(b"GET", b"POST") + known + b"content-length: 100\r\n\r\n{")
    assert body.recv(2**16).startswith(b"HTTP/1.1 408")
    for one in (*slow_sockets, body):
        one.close()


def test_a_trace_stops_when_its_client_disconnects(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops between two steps of the search; queued traces never start."""
    checked, ended = [], []
    plain = cancel.check

    def slow_check() -> None:
        checked.append(1)
        time.sleep(0.02)
        try:
            plain()
        except cancel.Cancelled:
            ended.append(1)
            raise

    monkeypatch.setattr(cancel, "check", slow_check)
    opened = []
    for number in range(6):
        connection = connect(server)
        body_json = {"run": "tiny-transformer", "text": f"{LONG} {number}"}
        connection.request("POST", "/api/trace", json.dumps(body_json), as_json(server))
        opened.append(connection)
    assert until(lambda: len(checked) > 1)
    for connection in opened:
        connection.close()
    assert until(lambda: bool(ended))
    monkeypatch.undo()
    assert post(server, "/api/trace", {"run": "tiny-gpt", "text": "Once"})[0] == 200
    assert len(ended) <= 2, "queued traces did not start"


def test_an_explanation_stops_when_its_client_disconnects(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_sizes: list[int] = []
    plain = explain.explain_request

    def slow_request(*given: Any, **more: Any) -> Any:
        found = plain(*given, **more)
        function = found.box.function
        delayed = lambda inputs: (batch_sizes.append(len(inputs)), time.sleep(0.05), function(inputs))[-1]  # noqa: E731
        from dataclasses import replace

        return replace(found, box=replace(found.box, function=delayed))

    monkeypatch.setattr(explain, "explain_request", slow_request)
    connection = connect(server)
    body_json = {"run": "tiny-transformer", "text": LONG, "masks": 20_000}
    connection.request("POST", "/api/explain", json.dumps(body_json), as_json(server))
    answer = connection.getresponse()
    assert json.loads(answer.readline())["of"] == 20_000
    assert until(lambda: len(batch_sizes) > 2)
    answer.close()
    connection.close()

    def is_idle() -> bool:
        before = len(batch_sizes)
        time.sleep(0.4)
        return len(batch_sizes) == before

    assert until(is_idle) and sum(batch_sizes) < 20_000


def test_too_many_explanations_are_refused_with_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_MASKS", 10**9)
    body_json = {"run": "tiny-transformer", "text": LONG, "masks": 10**8}
    running = []

    def opened() -> bool:
        """Start another explanation; false while one of an earlier test is still running."""
        connection = connect(server)
        connection.request("POST", "/api/explain", json.dumps(body_json), as_json(server))
        answer = connection.getresponse()
        if answer.status != 200:
            connection.close()
            return False
        running.append((connection, answer))
        return bool(answer.readline())

    while len(running) < explain.MAX_RUNNING:
        assert until(opened)
    status, found = post(server, "/api/explain", body_json)
    assert status == 503 and "try again" in found["error"]
    for connection, answer in running:
        answer.close()
        connection.close()
    small = {"run": "tiny-gpt", "text": "Once upon"}

    def has_capacity() -> bool:
        connection = connect(server)
        connection.request("POST", "/api/explain", json.dumps(small), as_json(server))
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200

    assert until(has_capacity)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", "::"])
def test_it_listens_on_local_addresses_only(runs: list[Path], host: str) -> None:
    with pytest.raises(UserError, match="on this machine only"):
        open_server(runs, host=host)


def test_a_port_in_use_is_named(runs: list[Path], server: Server) -> None:
    taken = urlsplit(server.address).port or 0
    with pytest.raises(UserError, match=f"port {taken} cannot be opened"):
        open_server(runs, port=taken)


def test_a_missing_package_is_named(runs: list[Path]) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from regard.cli import main; main(['look', sys.argv[1], '--no-browser'])"
    )
    found = subprocess.run([sys.executable, "-c", code, str(runs[0])], capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr == "regard: regard look needs uvicorn: pip install 'regard[serve]'\n"


def test_look_prints_its_address_and_ends_quietly(runs: list[Path]) -> None:
    words = [sys.executable, "-m", "regard", "look", *map(str, runs[:2]), "this cat", "--no-browser", "--device", "cpu"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("regard: http://127.0.0.1:") and "Ctrl-C" in line, line
        address = urlsplit(line.split()[1])
        token = address.query.removeprefix("token=")
        assert len(token) >= 32, line

        def answers() -> bool:
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
            try:
                connection.request("GET", "/api/runs", headers={"authorization": f"Bearer {token}"})
                return bool(json.loads(connection.getresponse().read())["text"] == "this cat")
            except ConnectionError:
                return False
            finally:
                connection.close()

        assert until(answers)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=300)
        assert (process.returncode, rest) == (0, "")
    finally:
        process.kill()


def test_an_explanation_that_is_never_read_frees_its_slot(runs: list[Path]) -> None:
    explainer, loop = explain.Explainer(), asyncio.new_event_loop()
    model, body_json = Model(RunDir(runs[0]), "cpu"), ExplainBody(run="tiny", text=LONG, masks=20_000)
    unread = [explainer.start(model, body_json, loop) for _ in range(explain.MAX_RUNNING)]
    with pytest.raises(explain.Busy):
        explainer.start(model, body_json, loop)
    unread.clear()

    def has_capacity() -> bool:
        try:
            return explainer.start(model, body_json, loop) is not None
        except explain.Busy:
            return False

    assert until(has_capacity)
    loop.close()
