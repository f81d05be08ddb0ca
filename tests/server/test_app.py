"""The application returns the same numbers as the Python API, and refuses invalid requests."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from regard import tensor_io
from regard.api import Model
from regard.interpret.explain import curves
from regard.interpret.explain.models import explain_request
from regard.interpret.position_study import study
from regard.run_dir import RunDir
from regard.server import registry as serving_runs
from regard.server import schemas
from regard.server.middleware import MAX_BODY_BYTES, is_local
from regard.server.page_app import application
from regard.server.registry import LRUCache, RunRegistry
from regard.viz import standalone
from regard.viz.colours import ANCHORS
from tiny_runs import make_input_run, make_run

TEXT = "this cat is very large"


def trace(client: TestClient, run: str = "tiny-transformer", text: str = TEXT, **more: Any) -> dict[str, Any]:
    answer = client.post("/api/trace", json={"run": run, "text": text, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def replace_weights(run: RunDir, **about: Any) -> None:
    """Replace the weights on disk, as training does when it finds better ones."""
    tensors, old = tensor_io.load(run.best)
    tensor_io.save(run.best, {name: 1.1 * one for name, one in tensors.items()}, old | about)


def refused(answer: Any, status: int, why: str) -> None:
    assert answer.status_code == status, answer.text
    (line,) = answer.json().values()
    assert list(answer.json()) == ["error"] and why in line and "\n" not in line, line


# -- answers -----------------------------------------------------------------------------------------------------------


def test_the_runs_are_listed(client: TestClient, runs: list[Path]) -> None:
    found = client.get("/api/runs").json()
    assert found["version"] == 1 and found["text"] == "this cat"
    assert [run["id"] for run in found["runs"]] == [path.name for path in runs]
    first, _, gpt, bert = found["runs"]
    assert first["snapshots"] == [10, 20] and first["has_gold"] and first["heads"] == 2
    assert first["layers"] == {"encoder": 2, "decoder": 2} and first["example"] == TEXT
    assert (gpt["task"], gpt["has_gold"], gpt["layers"]) == ("generate", False, {"encoder": 0, "decoder": 2})
    assert bert["task"] == "fill" and "[MASK]" in bert["example"]
    assert found["colours"]["anchors"] == [list(anchor) for anchor in ANCHORS]
    for run in found["runs"]:  # its example can be traced
        assert run["examples"] == []
        trace(client, run["id"], run["example"])


def test_runs_whose_inputs_are_not_texts_have_examples(tmp_path: Path) -> None:
    names = ["key-door", "citations", "tones"]
    paths = [make_input_run(tmp_path / name, name).path for name in names]
    client = TestClient(application(paths, device="cpu"), base_url="http://127.0.0.1")
    found = client.get("/api/runs").json()
    assert [run["id"] for run in found["runs"]] == names and found["text"] == ""
    for run in found["runs"]:
        assert len(run["examples"]) == 12 and run["example"] == run["examples"][0]
        assert trace(client, run["id"], run["example"])["text"]["source"] == run["example"]


@pytest.mark.filterwarnings("ignore:.*was edited since training")
def test_a_run_whose_data_are_gone_has_no_examples(tmp_path: Path) -> None:
    graph = tmp_path / "graph.npz"
    run = make_input_run(tmp_path / "run", "citations")
    recipe = (tmp_path / "run" / "recipe.toml").read_text()
    (tmp_path / "run" / "recipe.toml").write_text(recipe.replace('corpus = "citations"', f'graph = "{graph}"'))
    client = TestClient(application([run.path], device="cpu"), base_url="http://127.0.0.1")
    (listed,) = client.get("/api/runs").json()["runs"]
    assert listed["examples"] == [] and listed["example"] == ""


def test_a_trace_over_http_equals_the_library_s(client: TestClient, runs: list[Path]) -> None:
    header = trace(client)
    expected = Model(RunDir(runs[0]), "cpu").trace(TEXT)
    added = {"key": f"{expected.key}-{header['weights']}", "weights": header["weights"]}  # by the server
    assert header == expected.header | added
    for name, about in header["arrays"].items():
        answer = client.get(f"/api/trace/{header['key']}/{name}")
        assert answer.headers["content-type"] == "application/octet-stream"
        found = np.frombuffer(answer.content, np.dtype(about["dtype"]).newbyteorder("<")).reshape(about["shape"])
        np.testing.assert_array_equal(found, expected.display(name))
    assert client.get(f"/api/trace/{header['key']}/layers").json() == expected.layers
    row = np.frombuffer(client.get(f"/api/trace/{header['key']}/output.logits/1").content, "<f4")
    np.testing.assert_array_equal(row, expected.array("output.logits")[1])


def test_targets_snapshots_changes_and_continuations(client: TestClient, runs: list[Path]) -> None:
    model, early = Model(RunDir(runs[0]), "cpu"), Model(RunDir(runs[0]), "cpu", RunDir(runs[0]).snapshot(10))
    changes = [{"kind": "head", "attention": "decoder.0.cross_attn", "head": 1}]
    assert trace(client, target="un gato")["output"] == model.trace(TEXT, "un gato").header["output"]
    assert trace(client, step=10)["output"] == early.trace(TEXT).header["output"]
    assert trace(client, step=10)["model"]["step"] == 10
    assert trace(client, changes=changes)["held"] == model.trace(TEXT, changes=changes).header["held"]
    assert trace(client, **{"continue": [30]})["output"] == model.trace(TEXT, after=[30]).header["output"]
    keys = {trace(client, **more)["key"] for more in ({}, {"step": 10}, {"changes": changes}, {"continue": []})}
    assert len(keys) == 4


def test_an_expired_trace_must_be_requested_again(client: TestClient) -> None:
    refused(client.get("/api/trace/0123/output.logits"), 404, "request it again")
    refused(client.get(f"/api/trace/{trace(client)['key']}/nothing"), 404, "no array 'nothing'")
    refused(client.get(f"/api/trace/{trace(client)['key']}/output.logits/{'9' * 5000}"), 404, "no array")


def test_a_trace_keeps_no_model_alive_and_is_recomputed_for_new_weights(tmp_path: Path) -> None:
    """Only the most recent models stay in memory, also if traces of others are cached."""
    run = make_run(tmp_path / "run", "transformer")
    runs, body = RunRegistry([run.path], device="cpu"), schemas.TraceBody(run="run", text=TEXT)
    (first, _), module = runs.trace(body), weakref.ref(runs.model("run").module)
    layers = Model(run, "cpu").trace(TEXT).layers
    runs._models = LRUCache(1)
    gc.collect()
    assert module() is None and runs.trace(body)[0] is first
    assert first.layers == layers
    replace_weights(run, step=30)
    assert runs.trace(body)[0].header["model"]["step"] == 30


def test_requests_for_replaced_weights_are_refused(tmp_path: Path) -> None:
    """A page never mixes results of the old weights and of the new ones."""
    run = make_run(tmp_path / "run", "gpt")
    client = TestClient(application([run.path], device="cpu"), base_url="http://127.0.0.1")
    old = trace(client, "run", "Once upon")
    body = {"run": "run", "text": "Once upon", "weights": old["weights"]}
    table = {"kind": "learned", "run": "run", "weights": old["weights"]}
    before, logits = Model(run, "cpu"), client.get(f"/api/trace/{old['key']}/output.logits").content
    assert trace(client, **body) == old and client.post("/api/positions", json=table).status_code == 200
    replace_weights(run)  # with the same step, which does not identify the file
    for path, request_body in (
        ("trace", body | {"changes": [{"kind": "head", "attention": "decoder.0.self", "head": 1}]}),
        ("explain", body),
        ("positions", table),
        ("standalone", {"requests": [body]}),
    ):
        refused(client.post(f"/api/{path}", json=request_body), 409, "the weights of run have changed")
    refused(client.get(f"/api/trace/{old['key']}/layers"), 409, "the weights of run have changed")
    new = trace(client, "run", "Once upon")
    assert new["output"] == Model(run, "cpu").trace("Once upon").header["output"] != old["output"]
    assert explained(client, **body | {"weights": new["weights"]})[-1]["final"]
    assert client.get(f"/api/trace/{old['key']}/output.logits").content == logits  # still cached
    np.testing.assert_array_equal(
        np.frombuffer(logits, "<f4"), before.trace("Once upon").array("output.logits").ravel()
    )


def test_weights_replaced_while_they_are_loaded_are_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = make_run(tmp_path / "run", "gpt"), [30, 40]

    def load_and_replace(*given: Any) -> Model:
        model = Model(*given)
        if steps:
            replace_weights(run, step=steps.pop(0))
        return model

    monkeypatch.setattr(serving_runs, "LoadedRun", load_and_replace)
    model, on_disk = RunRegistry([run.path], device="cpu").model("run"), tensor_io.load(run.best)[0]
    assert model.step == 40 and not steps
    assert all(torch.equal(mine, on_disk[name]) for name, mine in tensor_io.model_tensors(model.module).items())


def test_runs_with_the_same_name_are_numbered(tmp_path: Path) -> None:
    names = ("a-3", "x/a", "y/a", "z/a")
    paths = [make_run(tmp_path / name, "transformer").path for name in names]
    assert list(RunRegistry(paths, device="cpu").runs) == ["a-3", "a", "a-2", "a-4"]


def test_positions_equal_the_library_s(client: TestClient, runs: list[Path]) -> None:
    body = {"kind": "sinusoidal", "length": 12, "width": 8, "base": 100}
    assert client.post("/api/positions", json=body).json() == study("sinusoidal", 12, 8, 100.0).to_json()
    learned = client.post("/api/positions", json={"kind": "learned", "run": "tiny-gpt", "length": 10}).json()
    table = Model(RunDir(runs[2]), "cpu").module.embedding.positions.table  # type: ignore[union-attr]
    np.testing.assert_allclose(learned["array"], table[:10].detach().numpy(), rtol=1e-6)
    refused(
        client.post("/api/positions", json={"kind": "learned", "run": "tiny-transformer"}),
        400,
        "has no learned positions",
    )
    for wrong in ({"kind": "rotary"}, {"kind": "index", "length": 10**6}, {"kind": "index", "width": 1}):
        assert client.post("/api/positions", json=wrong).status_code == 400


def explained(client: TestClient, **more: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/api/explain", json={"run": "tiny-transformer", "text": TEXT, **more}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def test_an_explanation_equals_the_library_s_for_the_same_seed(client: TestClient, runs: list[Path]) -> None:
    lines = explained(client, masks=20, seed=3, unit="tokens")
    model = Model(RunDir(runs[0]), "cpu")
    expected = model.explain(TEXT, masks=20, seed=3, unit="tokens")
    first, last = lines[0], lines[-1]
    assert first["done"] == 0 and first["of"] == 20 and first["inputs"] == list(expected.features) == last["inputs"]
    assert last["final"] and not last["exact"] and last["calls"] == expected.calls
    np.testing.assert_allclose(last["importance"], expected.importance, atol=1e-4)
    np.testing.assert_allclose(last["error"], expected.error, atol=1e-4)
    from regard.interpret.explain.models import MaskingMode

    request = explain_request(model, TEXT, masking=MaskingMode(unit="tokens"))
    attention = request.attention()
    assert attention is not None
    expected_curves = curves(request.box, {"explanation": expected.overall, "attention": attention}, seed=3)
    assert (
        last["curves"]["deletion"].keys()
        == last["curves"]["insertion"].keys()
        == {"explanation", "attention", "random"}
    )
    for name, curve in zip(("explanation", "attention", "random"), expected_curves, strict=True):
        np.testing.assert_allclose(last["curves"]["deletion"][name], curve.deletion, atol=1e-4)
        assert last["curves"]["areas"]["insertion"][name] == pytest.approx(curve.insertion_area, abs=1e-4)


def test_few_words_are_explained_exactly(client: TestClient) -> None:
    last = explained(client, text="this cat")[-1]
    assert last["exact"] and np.shape(last["importance"]) == (2, len(last["outputs"]))
    gpt = explained(client, run="tiny-gpt", text="Once upon")[-1]
    assert gpt["exact"] and "attention" in gpt["curves"]["deletion"]


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_have_content_types(client: TestClient) -> None:
    index = client.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    links = re.findall(r'(?:href|src)="(page/[^"]+)"', index.text)
    assert links
    for link in links:
        kind = client.get(f"/{link}").headers["content-type"]
        assert kind == {"js": "text/javascript", "css": "text/css"}[link.rsplit(".")[-1]] + "; charset=utf-8"


@pytest.mark.parametrize(
    "path", ["/page/../trace.py", "/page/%2e%2e/recorder.py", "/page//etc/passwd", "/page/js/nothing.js", "/page/js"]
)
def test_nothing_but_the_page_s_own_files_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and list(answer.json()) == ["error"]


def test_every_response_has_security_headers(client: TestClient) -> None:
    for answer in (
        client.get("/"),
        client.get("/api/runs"),
        client.get("/nowhere"),
        client.get("/", headers={"host": "x"}),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
        assert "access-control-allow-origin" not in answer.headers


# -- refused requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "["]
)
def test_a_foreign_host_name_is_refused(client: TestClient, host: str) -> None:
    refused(client.get("/api/runs", headers={"host": host}), 403, "on this machine only")
    assert not is_local("")


@pytest.mark.parametrize("host", ["127.0.0.1:81", "localhost", "[::1]:8000"])
def test_local_host_names_are_accepted(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_requests_of_other_sites_are_refused(client: TestClient) -> None:
    for origin in ("https://evil.example", "null", "", "http://[", "http://127.0.0.1:9", "http://localhost"):
        refused(client.get("/api/runs", headers={"origin": origin}), 403, "from other sites are refused")
    for host in ("127.0.0.1", "localhost:8000", "[::1]:8000"):
        assert client.get("/api/runs", headers={"origin": f"http://{host}", "host": host}).status_code == 200


def test_all_requests_need_the_token(runs: list[Path]) -> None:
    app = application(runs[:1], device="cpu", token="secret")
    for port in ("", ":8000"):
        client = TestClient(app, base_url=f"http://127.0.0.1{port}")
        paths = ("/", "/?token=wrong", "/?token=", "/api/runs", "/api/runs?token=secret", "/page/js/app.js", "/nothing")
        for path in paths:
            refused(client.get(path), 401, "open the address that `regard look` printed")
        refused(client.post("/api/trace", content=b"x" * (MAX_BODY_BYTES + 1)), 401, "token")
        for name, value in (
            ("authorization", "Bearer wrong"),
            ("authorization", "secret"),
            ("cookie", "regard-80=x; [="),
        ):
            refused(client.get("/api/runs", headers={name: value}), 401, "token")
        bearer = {"authorization": "Bearer secret"}
        assert client.get("/api/runs", headers=bearer).status_code == 200
        assert not client.cookies
        opened = client.get("/?token=secret")  # without a redirect, after which browsers withhold strict cookies
        assert opened.status_code == 200 and "<title>regard" in opened.text
        cookie = f"regard-{port[1:] or 80}=secret; Path=/; HttpOnly; SameSite=Strict"
        assert opened.headers["set-cookie"] == cookie
        for path in ("/", "/api/runs", "/page/js/app.js"):
            found = client.get(path)
            assert found.status_code == 200 and "set-cookie" not in found.headers
        refused(client.get("/api/runs", headers={"origin": "http://evil.example"}), 403, "from other sites are refused")


def test_too_large_requests_are_refused(client: TestClient) -> None:
    body = {"run": "tiny-transformer", "text": "a" * (schemas.MAX_CHARACTERS + 1)}
    refused(client.post("/api/trace", json=body), 413, "20,001 characters")
    refused(client.post("/api/explain", json=body), 413, "20,001 characters")
    refused(client.post("/api/trace", content=b"x" * (MAX_BODY_BYTES + 1)), 413, "larger than 1024 KB")

    def parts() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**16 + 1):
            yield b"x" * 2**16

    refused(client.post("/api/trace", content=parts()), 413, "larger than")  # no length was announced
    masks = {"run": "tiny-transformer", "text": TEXT, "masks": schemas.MAX_MASKS + 1}
    refused(client.post("/api/explain", json=masks), 422, "20001 masks are too many")


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"text": TEXT}, 400, "run: Field required"),
        ({"run": "tiny-transformer", "text": 3}, 400, "text: "),
        ({"run": "tiny-transformer", "text": TEXT, "beam": 3}, 400, "beam: Extra"),
        ({"run": "tiny-transformer", "text": "  "}, 400, "blank"),
        ({"run": "tiny-transformer", "text": "\ud800"}, 400, "not valid Unicode"),
        ({"run": "nowhere", "text": TEXT}, 404, "no run 'nowhere'"),
        ({"run": "tiny-transformer", "step": 11, "text": TEXT}, 404, "no snapshot of step 11; there are 10, 20"),
        ({"run": "tiny-transformer", "text": TEXT, "changes": [{"kind": "x"}]}, 400, "a change is one of"),
        ({"run": "tiny-transformer", "text": TEXT, "changes": [{"kind": []}]}, 400, "a change is one of"),
        ({"run": "tiny-transformer", "text": TEXT, "changes": [{"kind": "head"}] * 600}, 400, "changes: "),
        ({"run": "tiny-transformer", "text": TEXT, "continue": [10**9]}, 400, "no token 1000000000"),
        ({"run": "tiny-bert", "text": "no gap"}, 400, "no [MASK]"),
    ],
)
def test_an_invalid_request_gets_the_reason(client: TestClient, body: dict[str, Any], status: int, why: str) -> None:
    refused(
        client.post("/api/trace", content=json.dumps(body), headers={"content-type": "application/json"}), status, why
    )


def test_a_malformed_request_gets_the_reason(client: TestClient) -> None:
    as_json = {"content-type": "application/json"}
    for body in (b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe"):
        answer = client.post("/api/trace", content=body, headers=as_json)
        assert answer.status_code == 400 and list(answer.json()) == ["error"], answer.text
    assert client.get("/api/trace").status_code == 405
    wrong_keep = ({"keep": 2.0}, {"keep": 5e-324}, {"keep": 1 - 2**-53}, {"keep": -0.0}, {"keep": 1})
    for wrong in (*wrong_keep, {"masks": 1}, {"span": 0}, {"how": "burn"}, {"text": " "}):
        answer = client.post("/api/explain", json={"run": "tiny-transformer", "text": TEXT, **wrong})
        assert answer.status_code == 400 and list(answer.json()) == ["error"], answer.text


def test_the_current_view_is_exported_as_a_file(
    client: TestClient, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = [{"run": "tiny-transformer", "text": TEXT}, {"run": "tiny-gpt", "text": "Once", "continue": []}]
    answer = client.post("/api/standalone", json={"requests": body, "hash": "#view=walk"})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    traces = [Model(RunDir(runs[0]), "cpu").trace(TEXT), Model(RunDir(runs[2]), "cpu").trace("Once", after=[])]
    assert answer.text == standalone.page(traces, hash="#view=walk")
    assert client.post("/api/standalone", json={"requests": []}).status_code == 400
    assert client.post("/api/standalone", json={"requests": body * 20}).status_code == 400
    monkeypatch.setattr(schemas, "MAX_FILE_BYTES", 1000)
    refused(client.post("/api/standalone", json={"requests": body}), 413, "the file would exceed")
