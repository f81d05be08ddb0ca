"""The extensions in CONTRIBUTING.md work as shown: each block runs where its first line says it belongs."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from regard import registry, tensor_io
from regard.models import build
from regard.packed import SeqBatch
from regard.recipes.schema import TrainingSettings
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.text import BOS, EOS
from tiny_runs import make_run

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```python\n# src/regard/([\w/]+)\.py[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {path.replace("/", "."): dedent(code) for path, code in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", "transformer")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for each in (registry.SCORES, registry.OPTIMIZERS, registry.MODELS, registry.EXPORTERS):
        monkeypatch.setattr(each, "_entries", dict(each))


def execute(name: str, **more: Any) -> None:
    """Run a block as if at the end of its module, or as a new module."""
    given = {} if name in ("models.conv", "interop.npz") else vars(import_module(f"regard.{name}"))
    module = ModuleType(f"shown.{name}")
    vars(module).update(given | more, __name__=module.__name__)
    sys.modules[module.__name__] = module  # where pydantic looks up the names in annotations
    exec(compile(BLOCKS[name], f"CONTRIBUTING.md: {name}", "exec", dont_inherit=True), vars(module))


def trained(optimizer: str, **settings: Any) -> tuple[float, float]:
    """The loss of one batch before and after ten steps."""
    torch.manual_seed(1)
    model = build(registry.MODELS[settings["family"]].Settings.model_validate(settings), 12, 12, True)
    update = registry.OPTIMIZERS[optimizer](model, TrainingSettings())
    update.param_groups[0]["lr"] = 0.01
    batch, losses = SeqBatch.from_lists([[5, 6, EOS], [7, EOS]], [[6, 5, EOS], [7, EOS]], bos=BOS), []
    for _ in range(10):
        losses.append(model(batch))
        update.zero_grad()
        losses[-1].backward()
        update.step()
    return losses[0].item(), losses[-1].item()


def test_every_extension_is_shown() -> None:
    shown = {"attention.scores", "training.optimizers", "models.conv", "server.page_app", "interop.npz"}
    assert set(BLOCKS) == shown


def test_the_score_the_optimizer_and_the_family_learn() -> None:
    for name in ("attention.scores", "training.optimizers", "models.conv"):
        execute(name)
    for family in ("transformer", "conv"):
        before, after = trained("sgd", family=family, size="tiny", width=16, heads=2, score="scaled-cosine", dropout=0)
        assert after < 0.9 * before


def test_the_endpoint_answers(run: RunDir) -> None:
    pytest.importorskip("fastapi", reason="the page needs regard[serve]")
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from regard.server.page_app import ConcurrencyLimit
    from regard.server.registry import RunRegistry

    app = FastAPI()
    execute("server.page_app", app=app, runs=RunRegistry([run.path], device="cpu"), limit=ConcurrencyLimit())
    answer = TestClient(app).post("/api/translate", json={"run": "tiny", "text": "the cat"})
    assert answer.json() == {"text": LoadedRun(run, "cpu").translator()(["the cat"])[0].texts[0]}


def test_the_export_holds_the_weights(run: RunDir, tmp_path: Path) -> None:
    execute("interop.npz")
    arrays, tensors = np.load(registry.EXPORTERS["npz"](run, tmp_path / "w.npz")), tensor_io.load(run.best)[0]
    assert set(arrays.files) == set(tensors)
    assert all(np.array_equal(arrays[name], tensor) for name, tensor in tensors.items())
