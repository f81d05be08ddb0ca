"""The page as one file: it carries what it shows, fetches nothing, and takes no text for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.api import Model
from regard.interpret.trace import Trace, record, request_key
from regard.viz import standalone
from tiny_runs import make_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_run(tmp_path_factory.mktemp("run") / "tiny", "transformer"), "cpu")


def data_of(page: str) -> dict[str, Any]:
    text = re.search(
        r'^<script type="application/json" id="regard-data">(.*?)</script>', page, re.DOTALL | re.MULTILINE
    )
    assert text is not None
    found: dict[str, Any] = json.loads(text[1])
    return found


def inflated(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text), wbits=-zlib.MAX_WBITS)


def unpacked(text: str, about: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(inflated(text), np.dtype(about["dtype"]).newbyteorder("<")).reshape(about["shape"])


def test_the_file_contains_every_number_of_its_traces(model: Model) -> None:
    traces = [model.trace("this cat"), model.trace("this cat", "un gato")]
    data = data_of(standalone.page(traces, hash="#view=heads"))
    assert data["hash"] == "#view=heads" and len(data["traces"]) == 2
    for trace, target in zip(traces, (None, "un gato"), strict=True):
        assert data["traces"][request_key("tiny", None, "this cat", target, None, [])] == trace.header
        assert json.loads(inflated(data["arrays"][f"{trace.key}/layers"])) == trace.layers
        for name, about in trace.header["arrays"].items():
            if name == "output.logits":  # row by row
                rows = [unpacked(data["arrays"][f"{trace.key}/{name}/{n}"], about | {"shape": about["shape"][1:]})
                        for n in range(about["shape"][0])]  # fmt: skip
                np.testing.assert_array_equal(np.stack(rows), trace.array(name))
            else:
                np.testing.assert_array_equal(
                    unpacked(data["arrays"][f"{trace.key}/{name}"], about), trace.display(name)
                )
    (run,) = data["runs"]["runs"]
    assert (run["id"], run["task"], run["snapshots"]) == ("tiny", "translate", [])
    assert str(model.run.path) not in standalone.page(traces)  # the path is private


def test_snapshots_and_runs_are_those_in_the_file(model: Model, tmp_path: Path) -> None:
    early = Model(model.run, "cpu", model.run.snapshot(10))
    other = Model(make_run(tmp_path / "other", "recurrent (additive)"), "cpu")
    traces = [model.trace("this cat"), record(early, "this cat", step=10), other.trace("this cat")]
    runs = standalone.runs_of(traces)
    assert [(run["id"], run["snapshots"]) for run in runs["runs"]] == [("tiny", [10]), ("other", [])]


def test_a_saved_trace_makes_the_same_file(model: Model, tmp_path: Path) -> None:
    trace = model.trace("this cat")
    trace.save(tmp_path / "trace.safetensors")
    assert standalone.page([Trace.load(tmp_path / "trace.safetensors")]) == standalone.page([trace])


def test_of_many_logits_only_the_last_rows_are_saved(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = model.trace("this cat")
    rows, vocabulary = trace.header["arrays"]["output.logits"]["shape"]
    monkeypatch.setattr(standalone, "MAX_LOGIT_BYTES", 2 * 4 * vocabulary)
    carried = [name for name in standalone.embedded([trace])["arrays"] if "logits" in name]
    assert carried == [f"{trace.key}/output.logits/{row}" for row in (rows - 2, rows - 1)]


def test_no_text_becomes_markup(model: Model) -> None:
    text = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)>"
    page = standalone.page([model.trace(text)])
    assert "alert(1)</script>" not in page and "<img" not in page
    assert next(iter(data_of(page)["traces"].values()))["text"]["source"] == text


def test_the_file_fetches_nothing_and_says_so(model: Model) -> None:
    page = standalone.page([model.trace("this cat")])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(scripts) == len(styles) == 1
    for kind, content in (("script", scripts[0]), ("style", styles[0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy and "unsafe" not in policy
    assert 'type="module"' not in page and '<link rel="stylesheet"' not in page
    assert not re.search(r"^\s*(import|export)\b", scripts[0], re.MULTILINE)
    assert page.index("Content-Security-Policy") < page.index("<style>")  # before anything that it governs


def test_modules_are_ordered_by_their_imports() -> None:
    text = {
        "js/app.js": 'import { a as first } from "./a.js";\nimport { b } from "./deep/b.js";\nconst own = first + b();',
        "js/a.js": "const own = 1;\nexport const a = own;\n",
        "js/deep/b.js": 'import { a } from "../a.js";\nconst own = 2;\nexport function b() { return a + own; }\n',
    }
    made = standalone.bundled(text, "js/app.js")
    places = [made.index(f"const module_js_{name} =") for name in ("a", "deep_b", "app")]
    assert places == sorted(places)
    assert "const { a: first } = module_js_a;" in made and "return { b };" in made
    with pytest.raises(ValueError, match=r"circular import of modules: js/a.js -> js/app.js -> js/a.js"):
        standalone.bundled(
            text
            | {
                "js/app.js": 'import { a } from "./a.js";\nexport const c = a;',
                "js/a.js": 'import { c } from "./app.js";\n',
            },
            "js/a.js",
        )
    for wrong in ('import a from "./a.js";', "export default 3;", 'export * from "./a.js";'):
        with pytest.raises(ValueError, match="cannot be bundled"):
            standalone.bundled(text | {"js/a.js": wrong}, "js/a.js")


def test_the_page_s_own_files_are_small(model: Model) -> None:
    files = standalone.files()
    assert {"index.html", "style.css", "js/app.js"} <= files.keys()
    assert sum(map(len, files.values())) < 300_000
    outside = re.compile(rb"https?://(?!www\.w3\.org/)")  # names of XML languages are no addresses to fetch from
    assert not [name for name, content in files.items() if outside.search(content)]
