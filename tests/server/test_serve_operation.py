"""Operation of `regard serve`: keys, limits, several runs, faults, shutdown."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if "CI" not in os.environ:  # CI must have them
    for package in ("fastapi", "prometheus_client", "py3langid"):
        pytest.importorskip(package, reason="the server needs regard[serve]")

from regard.errors import UserError
from regard.runs import LoadedRun
from regard.server import pool as pools
from regard.server.access import Access, RateLimitExceeded, Unauthorized, read_keys
from regard.server.pool import ModelPool, Unavailable, language_pair, split_name
from regard.server.process import Server
from regard.server.service_server import Options, open_service
from server.service import KEY, make_runs, serving
from tiny_runs import make_run

TEXT = "this cat is very large"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("served"))


def send(server: Server | int, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Send a request; return status, headers and content."""
    port = server if isinstance(server, int) else int(server.address.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    parsed = json.loads(content) if response.headers.get_content_type() == "application/json" else content
    return response.status, response.headers, parsed


# -- keys and limits ---------------------------------------------------------------------------------------------------


def test_a_key_allows_its_rate_and_then_waits() -> None:
    access = Access({KEY: ("tester", 2.0)})
    now = 1000.0  # of a clock whose differences are exact
    key = access.keys[0]
    key.count_request(now)
    key.count_request(now)
    with pytest.raises(RateLimitExceeded) as refused:
        key.count_request(now)
    assert refused.value.retry == pytest.approx(30)
    key.count_request(now + 30)
    with pytest.raises(Unauthorized):
        access.admit("another")
    assert Access({KEY: ("tester", 2.0)}).admit(KEY).name == "tester"


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\nalice {KEY} 5\n\nbob {KEY}2\n")
    monkeypatch.setenv("REGARD_API_KEY", KEY + "3")
    assert read_keys(file, 9.0) == {KEY + "3": ("environment", 9.0), KEY: ("alice", 5.0), KEY + "2": ("bob", 9.0)}
    for text, why in ((f"alice {KEY} x", "not a number"), ("alice", "NAME SECRET"), ("alice short", "16 characters")):
        file.write_text(text)
        with pytest.raises(UserError, match=why):
            read_keys(file)
    for rate in ("nan", "inf", "-1"):
        file.write_text(f"alice {KEY} {rate}")
        with pytest.raises(UserError, match="not a number"):
            read_keys(file)
    monkeypatch.delenv("REGARD_API_KEY")
    file.write_text("")
    with pytest.raises(UserError, match="no keys"):
        read_keys(file)
    with pytest.raises(UserError, match="could not be read"):
        read_keys(tmp_path / "none")


def test_other_addresses_need_a_key_or_no_auth(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="--no-auth"):
        open_service([str(runs["en-es"])], Options(host="0.0.0.0"))
    open_service([str(runs["en-es"])], Options(host="0.0.0.0", auth=False, logs=False))._socket.close()
    with pytest.raises(UserError, match="both"):
        open_service([str(runs["en-es"])], Options(certificate=Path("x")))


def test_files_that_are_no_certificate_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("not a certificate")
    with pytest.raises(UserError, match=r"--tls-cert .*cert\.pem, --tls-key .*: not a PEM certificate"):
        open_service([str(runs["en-es"])], Options(certificate=wrong, private_key=wrong, logs=False))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_server_whose_stderr_is_full_answers(runs: dict[str, Path]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "regard", "serve", f"en-es={runs['en-es']}", "--port", str(port)]
    with open("/dev/full", "w") as full, subprocess.Popen(command, stderr=full) as process:
        try:
            deadline, status = time.monotonic() + 120, 0
            while status != 200 and process.poll() is None and time.monotonic() < deadline:
                with suppress(OSError):
                    status = send(port, "/v1/translate", {"q": TEXT})[0]
                time.sleep(0.1)
            assert status == 200
        finally:
            process.terminate()


def test_limits_are_answered_with_a_status(runs: dict[str, Path]) -> None:
    with serving(runs, characters=100, rate=6.0) as server:
        assert send(server, "/v1/translate", {"q": "x" * 101})[0] == 413
        assert send(server, "/v1/translate", b"x" * (2**20 + 1))[0] == 413
        assert send(server, "/v1/translate", b"not json")[0] == 400
        assert send(server, "/v1/translate", {"q": TEXT, "nbest": 0})[0] == 400
        assert send(server, "/v1/translate", {"q": "\ud800"})[0] == 400
        assert send(server, "/v1/translate", {"q": 5})[2]["error"].startswith("q: ")
        assert send(server, "/v1/translate", {"q": [5]})[2]["error"].startswith("q")
        assert send(server, "/v1/translate", {"q": TEXT}, Host="example.org")[0] == 403
        assert send(server, "/v1/translate", {"q": TEXT}, Origin="http://example.org")[0] == 403
        assert send(server, "/v1/translate", {"q": TEXT, "target": "xx"})[0] == 404
        status, headers, _ = send(server, "/v1/translate", {"q": TEXT})
        for _ in range(3):
            status, headers, _ = send(server, "/v1/translate", {"q": TEXT})
        assert status == 429 and 1 <= int(headers["Retry-After"]) <= 10
        assert send(server, "/healthz")[0] == 200


def test_counts_of_a_pool_are_right_while_models_are_unloaded(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ModelPool([str(runs["en-es"])], device="cpu")
    (served,) = pool.runs.values()
    with pool.using(served) as active:
        reads = [active, None] * 2
        monkeypatch.setattr(type(served), "active", property(lambda _: reads.pop(0)), raising=False)
        assert pool.waiting == 0
        reads = [active, None]
        assert pool.running == 0
        monkeypatch.undo()
    pool.close()


def test_large_glossaries_are_refused(runs: dict[str, Path]) -> None:
    many = {f"term{n}": "x" for n in range(10_001)}
    with serving(runs) as server:
        for glossary in (many, {"cat": ["gato"] * 17}, {"cat": "x" * 500_000}):
            assert send(server, "/v1/translate", {"q": TEXT, "glossary": glossary})[0] == 413
        assert send(server, "/v1/translate", {"q": TEXT, "glossary": {"cat": ["gato"]}})[0] == 200
        made = {"name": "many", "source_lang": "en", "target_lang": "es"}
        for entries, status in ((many, 413), ({"cat": "x" * 500_000}, 413), ({"cat": "gato"}, 201)):
            text = "\n".join(f"{a}\t{b}" for a, b in entries.items())
            assert send(server, "/v2/glossaries", {**made, "entries": text})[0] == status


def test_glossaries_of_requests_override_that_of_the_run(runs: dict[str, Path], tmp_path: Path) -> None:
    for name, content in (("all.tsv", "cat\tgatito\ndog\tperrito\n"), ("own.tsv", "cat\tgata\n")):
        (tmp_path / name).write_text(content)
    with serving(runs, glossaries=[str(tmp_path / "all.tsv"), f"en-es={tmp_path / 'own.tsv'}"]) as server:

        def words(text: str, **more: Any) -> list[str]:
            return send(server, "/v1/translate", {"q": text, **more})[2]["translations"][0]["text"].split()

        assert "gata" in words("the cat") and "perrito" in words("the dog")
        assert "gato" in words("the cat and the dog", glossary={"cat": "gato"})
        assert "perrito" in words("the cat and the dog", glossary={"cat": "gato"})
        spoken = send(server, "/translate", {"q": "the cat", "source": "en", "target": "es"})[2]["translatedText"]
        assert "gata" in spoken.split()
    with pytest.raises(UserError, match="no translation model is called 'stories'"):
        ModelPool([f"{name}={path}" for name, path in runs.items()], glossaries=[f"stories={tmp_path / 'own.tsv'}"])


def test_a_full_queue_and_a_slow_request_are_refused(runs: dict[str, Path]) -> None:
    with serving(runs, seconds=0.8, rows=1, queue=1) as server:
        send(server, "/v1/completions", {"model": "stories", "prompt": "Once", "max_tokens": 1})  # loads the model
        send(server, "/v1/translate", {"q": TEXT})  # and the other
        slow = {"model": "stories", "prompt": "Once", "max_tokens": 4000, "temperature": 0}
        with ThreadPoolExecutor(8) as threads:
            sent = []
            for _ in range(8):
                sent.append(threads.submit(send, server, "/v1/completions", slow))
                time.sleep(0.04)
            answers = [one.result(60) for one in sent]
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {503, 504}
        assert all(headers["Retry-After"] == "1" for status, headers, _ in answers if status == 503)
        assert send(server, "/v1/translate", {"q": TEXT})[0] == 200


def test_limits_count_whole_requests(runs: dict[str, Path]) -> None:
    with serving(runs) as server:
        asked = {"model": "stories", "prompt": ["Once"] * 4, "max_tokens": 1}
        assert send(server, "/v1/completions", asked)[0] == 200
        status, _, why = send(server, "/v1/completions", {**asked, "n": 4, "max_tokens": 600})
        assert status == 400 and "16 samples of 600 tokens" in why["error"]["message"]
        assert send(server, "/v1/completions", {**asked, "prompt": ["Once"] * 100, "n": 3})[0] == 413
        status, _, why = send(server, "/v1/completions", {**asked, "stop": ["x"] * 17})
        assert status == 400 and "17 texts" in why["error"]["message"]


def test_without_memory_a_request_is_refused(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with serving(runs) as server:
        send(server, "/v1/translate", {"q": TEXT})
        asked = {"model": "stories", "prompt": "Once", "max_tokens": 2}
        with monkeypatch.context() as patch:
            patch.setattr("regard.decoding.running_batch.RunningBatch._open", scarce)
            for path, body in (("/v1/translate", {"q": TEXT}), ("/v1/completions", {**asked, "stream": True})):
                status, headers, why = send(server, path, body)
                assert status == 503 and headers["Retry-After"] == "1" and "not enough memory" in json.dumps(why)
        assert send(server, "/v1/translate", {"q": TEXT})[0] == 200


def test_a_connection_whose_answer_is_not_read_is_closed(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.server.connections.READ_SECONDS", 0.3)
    with serving(runs) as server:
        port = int(server.address.rstrip("/").rpartition(":")[2])
        head = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.settimeout(30)
            with pytest.raises(ConnectionError):  # until the server closes the connection, not a time limit
                while True:
                    connection.sendall(head)
        assert send(server, "/healthz")[0] == 200


def test_a_client_that_disconnects_frees_its_place(runs: dict[str, Path]) -> None:
    with serving(runs, rows=1) as server:
        port = int(server.address.rstrip("/").rpartition(":")[2])
        body = json.dumps({"model": "stories", "prompt": "Once", "max_tokens": 4000, "temperature": 0}).encode()
        for stream in (b"", b""):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body + stream)
                time.sleep(0.3)
        began = time.monotonic()
        assert send(server, "/v1/translate", {"q": TEXT})[0] == 200
        assert time.monotonic() - began < 20
        metrics = send(server, "/metrics")[2].decode()
        assert "regard_cancelled_total 2.0" in metrics


def test_logs_contain_no_texts(runs: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "regard.serve"), serving(runs) as server:
        send(server, "/v1/translate", {"q": "a secret sentence"})
    logged = [json.loads(record.message) for record in caplog.records if record.name == "regard.serve"]
    (entry,) = [entry for entry in logged if entry["path"] == "/v1/translate"]
    assert (entry["status"], entry["model"], entry["characters"], entry["method"]) == (200, "en-es", 17, "POST")
    assert "secret" not in caplog.text


# -- several runs ------------------------------------------------------------------------------------------------------


def test_names_and_languages_of_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    assert split_name("a=b/c") == ("a", Path("b/c")) and split_name("x/a=b") == (None, Path("x/a=b"))
    run = LoadedRun.load(runs["en-es"], device="cpu").run
    assert language_pair("de_fr", run) == ("de", "fr") and language_pair("something", run) == ("en", "es")
    with pytest.raises(UserError, match="two runs"):
        ModelPool([f"a={runs['en-es']}", f"a={runs['en-es']}"])
    with pytest.raises(UserError, match="neither translates nor generates"):
        ModelPool([str(make_run(tmp_path / "bert", "bert (fill)").path)])


def test_models_are_unloaded_above_the_memory_budget(runs: dict[str, Path]) -> None:
    pool = ModelPool([f"{name}={path}" for name, path in runs.items()], device="cpu", memory=1)
    for name in ("en-es", "stories", "en-es"):
        with pool.using(pool.find(name)):
            pass
        assert [run.name for run in pool.runs.values() if run.active] == [name]
    with pool.using(pool.find("en-es")), pool.using(pool.find("stories")):  # those in use stay
        active = [run.active for run in pool.runs.values() if run.active]
        assert len(active) == len(runs)
        assert len({model.engine.thread for model in active}) == 1  # one pool of threads for all (see `EngineThread`)
    pool.close()


def test_a_changed_run_is_loaded_again_and_a_broken_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "CHECK_SECONDS", 0.0)
    path = make_run(tmp_path / "run", "transformer", seed=1).path
    other = make_run(tmp_path / "other", "transformer", seed=2).path
    pool = ModelPool([f"en-es={path}"], device="cpu")

    def translation() -> str:
        with pool.using(pool.find("en-es")) as active:
            return active.translator()([TEXT])[0].texts[0]

    first = translation()
    assert translation() == first
    with pool.using(pool.find("en-es")) as before:
        shutil.rmtree(path)
        shutil.copytree(other, path)
        second = translation()
        assert before.retired and before.translator()([TEXT])[0].texts[0] == first  # it finishes with the old one
    assert second == LoadedRun.load(other, device="cpu").translator()([TEXT])[0].texts[0] != first
    (path / "model.safetensors").write_bytes(b"broken")
    assert translation() == second and "en-es" in pool.failures
    pool.close()


def test_a_model_that_fails_to_load_takes_nothing_else_down(runs: dict[str, Path], tmp_path: Path) -> None:
    broken = make_run(tmp_path / "de-en", "transformer").path
    (broken / "model.safetensors").write_bytes(b"broken")
    with serving({**runs, "de-en": broken}) as server:
        deadline = time.monotonic() + 60
        while (answer := send(server, "/readyz"))[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answer[0] == 503 and "de-en" in answer[2]["models"] and answer[2]["status"] == "failed"
        assert send(server, "/v1/translate", {"q": TEXT, "model": "de-en"})[0] == 503
        assert send(server, "/v1/translate", {"q": TEXT, "model": "en-es"})[0] == 200
        assert send(server, "/healthz")[0] == 200
    with pytest.raises(Unavailable):
        pool = ModelPool([f"x={broken}"], device="cpu")
        with pool.using(pool.find("x")):
            pass


def test_a_run_that_fails_is_not_loaded_again_by_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "run", "transformer").path
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(b"broken")
    attempts: list[Path] = []
    real = LoadedRun.load

    clock, seconds = [time.monotonic()], [0.0]  # `seconds` is how long loading takes

    def counted(run: Path, **options: Any) -> LoadedRun:
        attempts.append(run)
        clock[0] += seconds[0]
        return real(run, **options)

    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pools.LoadedRun, "load", counted)
    pool = ModelPool([f"en-es={path}"], device="cpu")
    for _ in range(5):
        with pytest.raises(Unavailable), pool.using(pool.find("en-es")):
            pass
    assert len(attempts) == 1
    clock[0] += pools.RETRY_SECONDS + 1  # after a while it is tried again
    seconds[0] = pools.RETRY_SECONDS + 10  # and fails after a longer one, during which other requests wait for it
    for _ in range(3):
        with pytest.raises(Unavailable), pool.using(pool.find("en-es")):
            pass
    assert len(attempts) == 2
    clock[0] += pools.RETRY_SECONDS + 1
    with pytest.raises(Unavailable), pool.using(pool.find("en-es")):
        pass
    assert len(attempts) == 3
    (path / "model.safetensors").write_bytes(whole)  # and when the files change
    with pool.using(pool.find("en-es")):
        assert len(attempts) == 4 and not pool.failures
    pool.close()


def test_a_model_that_is_unloaded_while_a_request_takes_it_is_loaded_again(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ModelPool([f"{name}={path}" for name, path in runs.items()], device="cpu", memory=1)
    with pool.using(pool.find("en-es")):
        pass
    real, before = pool._add_user, pool.find("en-es").active

    def interrupted(active: pools.ActiveModel) -> bool:
        monkeypatch.setattr(pool, "_add_user", real)
        with pool.using(pool.find("stories")):  # another request unloads it before this one counts as its user
            pass
        return real(active)

    monkeypatch.setattr(pool, "_add_user", interrupted)
    with pool.using(pool.find("en-es")) as active:
        assert active is not before and active.translator()([TEXT])[0].texts
    pool.close()


# -- the process -------------------------------------------------------------------------------------------------------


def start(*arguments: object) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "regard", "serve", *map(str, arguments), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "serves" in line, line
    return process, int(line.split("/ serves")[0].rpartition(":")[2])


def test_sigterm_loses_no_accepted_request(runs: dict[str, Path]) -> None:
    process, port = start(f"en-es={runs['en-es']}", "--no-log")
    expected = LoadedRun.load(runs["en-es"], device="cpu").translator()([TEXT])[0].texts[0]
    statuses: list[int] = []
    failures: list[str] = []

    def client() -> None:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.connect()
            except OSError:
                return  # no longer accepted
            try:
                connection.request("POST", "/v1/translate", json.dumps({"q": [TEXT] * 3}))
                response = connection.getresponse()
                content = json.loads(response.read())
            except (ConnectionError, http.client.HTTPException):
                return  # it was not read before the end: not accepted
            statuses.append(response.status)
            if [one["text"] for one in content["translations"]] != [expected] * 3:
                failures.append(str(content))

    with ThreadPoolExecutor(6) as threads:
        clients = [threads.submit(client) for _ in range(6)]
        deadline = time.monotonic() + 60
        while len(statuses) < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for one in clients:
            one.result(60)
    assert process.wait(60) in (0, -signal.SIGTERM)
    assert set(statuses) == {200} and not failures


@pytest.mark.skipif("CI" not in os.environ and shutil.which("prometheus") is None, reason="needs Prometheus")
def test_prometheus_reads_the_metrics(runs: dict[str, Path], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(runs) as server:
        send(server, "/v1/translate", {"q": TEXT})
        target = server.address.split("//")[1].rstrip("/")
        config = tmp_path / "prometheus.yml"
        jobs = f"[{{job_name: regard, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}]"
        config.write_text(f"scrape_configs: {jobs}\n")
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        prometheus = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found: list[Any] = []
            deadline = time.monotonic() + 60
            while not found and time.monotonic() < deadline:
                time.sleep(0.3)
                try:
                    found = send(port, "/api/v1/query?query=regard_tokens_total")[2]["data"]["result"]
                except OSError:
                    continue  # it has not started
            assert [entry["metric"]["model"] for entry in found] == ["en-es"]
            assert float(found[0]["value"][1]) > 0
        finally:
            prometheus.terminate()
            prometheus.wait(30)
