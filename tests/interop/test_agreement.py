"""The comparison of an export with its run refuses exports with a mistake, also one that changes few outputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_runs import make_run

from regard import tensor_io
from regard.errors import UserError
from regard.interop import agreement
from regard.interop.exported import CTranslate2Model, HuggingFaceModel, verify
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.text import EOS

if not os.environ.get("CI"):  # there they have to be installed
    pytest.importorskip("ctranslate2", reason="needs regard[ctranslate2]")
    pytest.importorskip("transformers", reason="needs regard[formats]")

Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.* was edited since training")


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 4)
    monkeypatch.setattr(agreement, "MAX_TOKENS", 8)


def changed(run: RunDir, path: Path, change: Callable[[Tensors], None], **settings: tuple[str, str]) -> RunDir:
    """A copy of a run with changed weights, and with other lines in its recipe (before, after)."""
    copy = RunDir(shutil.copytree(run.path, path))
    tensors, facts = tensor_io.load(copy.best)
    change(tensors)
    tensor_io.save(copy.best, tensors, facts)
    recipe = path / "recipe.toml"
    for before, after in settings.values():
        assert before in recipe.read_text()
        recipe.write_text(recipe.read_text().replace(before, after))
    return RunDir(path)


def zero(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].zero_()

    return change


def swap(name: str, one: slice, other: slice) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        rows = tensors[name].clone()
        tensors[name][one], tensors[name][other] = rows[other], rows[one]

    return change


def same(tensors: Tensors) -> None:
    pass


HEAD = slice(0, 8), slice(8, 16)  # rows of the two heads of queries
TRANSLATOR: dict[str, tuple[Callable[[Tensors], None], tuple[str, str] | None]] = {
    "norm epsilon": (same, ("norm_eps = 1e-05", "norm_eps = 0.001")),
    "dropped bias": (zero("decoder.1.feed_forward.w_out.bias"), None),
    "dropped bias of a norm": (zero("encoder.norm.bias"), None),
    "swapped heads": (swap("encoder.0.self_attn.qkv_proj.weight", *HEAD), None),
    "swapped heads of cross-attention": (swap("decoder.1.cross_attn.q_proj.weight", *HEAD), None),
    "swapped tokens": (swap("source_embedding.table", slice(60, 80), slice(80, 100)), None),
    "order of sinusoids": (same, ('positions = "sinusoidal"', 'positions = "sinusoidal-split"')),
    "factor of embeddings": (same, ("scale_embeddings = true", "scale_embeddings = false")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDir]:
    known: dict[str, RunDir] = {}

    def get(family: str, **settings: Any) -> RunDir:
        if family not in known:
            known[family] = make_run(tmp_path_factory.mktemp("agreement") / "run", family, **settings)
        return known[family]

    return get


@pytest.mark.parametrize("mistake", TRANSLATOR)
def test_an_export_with_a_mistake_is_refused(runs: Callable[..., RunDir], mistake: str, tmp_path: Path) -> None:
    run, (change, setting) = runs("transformer"), TRANSLATOR[mistake]
    wrong = changed(run, tmp_path / "wrong", change, **({"one": setting} if setting else {}))
    folder = EXPORTERS["ctranslate2"](wrong, tmp_path / "out")
    with pytest.raises(UserError, match=r"the export differs .*log-probabilities differ by at most"):
        verify(run, folder, "ctranslate2")


def test_a_continuation_with_other_numbers_is_refused(runs: Callable[..., RunDir], tmp_path: Path) -> None:
    run = runs("gpt", positions="rotary")
    wrong = changed(run, tmp_path / "wrong", same, base=("position_base = 10000.0", "position_base = 9000.0"))
    folder = EXPORTERS["ctranslate2"](wrong, tmp_path / "out")
    ours, theirs = (CTranslate2Model(each, folder) for each in (run, wrong))
    assert ours.continue_([[1, 20, 21]], 3) == theirs.continue_([[1, 20, 21]], 3)
    with pytest.raises(UserError, match=r"the export differs .*log-probabilities differ"):
        verify(run, folder, "ctranslate2")


@pytest.mark.parametrize("family", ["bert (fill)", "bert (classify)"])
def test_predictions_with_other_numbers_are_refused(runs: Callable[..., RunDir], family: str, tmp_path: Path) -> None:
    run = runs(family, norm_first=False, **({"pooling": "first"} if "classify" in family else {}))
    wrong = changed(run, tmp_path / "wrong", zero("encoder.1.self_attn.out_proj.bias"))
    folder = EXPORTERS["huggingface"](wrong, tmp_path / "out")
    (found,) = agreement.agreements(wrong, HuggingFaceModel(wrong, folder))
    assert (found.equal, found.ties) == (found.texts, 0) and found.texts > 4
    with pytest.raises(UserError, match=r"the export differs .*log-probabilities differ"):
        agreement.agreements(run, HuggingFaceModel(run, folder))


class Altered:
    """An export whose results are changed after the fact."""

    def __init__(self, model: Any, **changes: Callable[..., Any]) -> None:
        self.model, self.changes = model, changes

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.model, name)
        return (lambda *given: self.changes[name](real(*given))) if name in self.changes else real


def test_other_tokens_other_results_and_nan_are_refused(runs: Callable[..., RunDir], tmp_path: Path) -> None:
    run = runs("transformer")
    model = CTranslate2Model(run, EXPORTERS["ctranslate2"](run, tmp_path / "out"))
    assert all(each.equal + each.ties == 4 for each in agreement.agreements(run, model))
    for changes, complaint in (
        ({"encode": lambda tokens: [*tokens, EOS]}, "its tokenizer splits"),
        ({"translate": lambda found: [found[0][:-1], *found[1:]]}, "3 of 4 are the same"),
        ({"translate": lambda found: [[*found[0][:2], 300], *found[1:]]}, "3 of 4 are the same"),
        ({"score": lambda found: [[number + 2e-4 for number in each] for each in found]}, "at most 2.0e-04"),
        ({"score": lambda found: [[np.nan] * len(each) for each in found]}, "at most nan"),
        ({"score": lambda found: [each[:-1] for each in found]}, "at most inf"),
    ):
        with pytest.raises(UserError, match=complaint):
            agreement.agreements(run, Altered(model, **changes))


def test_less_probable_outputs_of_beam_search_are_refused(runs: Callable[..., RunDir], tmp_path: Path) -> None:
    run = runs("transformer")
    model = CTranslate2Model(run, EXPORTERS["ctranslate2"](run, tmp_path / "out"))

    def translate(found: list[list[int]]) -> list[list[int]]:
        return [[token % 300 + 50 for token in each] for each in found]

    class OnlyBeams(Altered):
        def translate(self, sources: Any, prefix: Any, beam: int, limit: int) -> list[list[int]]:
            found: list[list[int]] = self.model.translate(sources, prefix, beam, limit)
            return found if beam == 1 else translate(found)

    with pytest.raises(UserError, match="translations, beam 4: 0 of 4 are the same; log-prob"):
        agreement.agreements(run, OnlyBeams(model))
