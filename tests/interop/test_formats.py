"""Exports to CTranslate2 and ONNX do what the run does; what cannot be exported is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_runs import make_run

from regard import tensor_io
from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import agreement
from regard.interop.exported import CTranslate2Model, HuggingFaceModel, OnnxModel, verify
from regard.interop.onnx import CausalStep, DecoderStep, SourceEncoder, TextEncoder
from regard.interop.portable import never_generated
from regard.models.bert import TextClassBatch
from regard.packed import PackedTokens, SeqBatch
from regard.registry import EXPORTERS
from regard.run_dir import RunDir
from regard.text import BOS, EOS

if os.environ.get("CI"):  # there they have to be installed
    import ctranslate2
    import onnxruntime
else:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="needs regard[ctranslate2]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs regard[onnx]")


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 12)


def spread(run: RunDir) -> RunDir:
    """Make the random weights of a run larger, so that few decisions are ties."""
    tensors, facts = tensor_io.load(run.best)
    random = torch.Generator().manual_seed(3)
    tensor_io.save(run.best, {n: t + 0.2 * torch.randn(t.shape, generator=random) for n, t in tensors.items()}, facts)
    return run


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms first": ("transformer", {}),
    "norms after, gated": ("transformer (norm after, gated)", {}),
    "untied, RMS norms, bias": ("transformer", {"tie_embeddings": False, "norm": "rms", "output_bias": True}),
    "learned positions, unscaled": ("transformer", {"positions": "learned", "scale_embeddings": False}),
    "gpt": ("gpt", {}),
    "gpt, rotary, untied": ("gpt", {"positions": "rotary", "tie_embeddings": False, "position_base": 500.0}),
    "bert": ("bert (fill)", {}),
    "bert, classes": ("bert (classify)", {}),
}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("bert")])
def test_ctranslate2_gives_the_results_of_the_run(variant: str, tmp_path: Path) -> None:
    run = spread(make_run(tmp_path / "run", VARIANTS[variant][0], **VARIANTS[variant][1]))
    found = verify(run, EXPORTERS["ctranslate2"](run, tmp_path / "out"), "ctranslate2")
    assert found is not None and [each.texts for each in found] == [12] * (1 if variant.startswith("gpt") else 2)
    assert all(each.equal >= 6 for each in found)  # the others are ties, as random weights have them


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_onnxruntime_gives_the_results_of_the_run(variant: str, tmp_path: Path) -> None:
    run = spread(make_run(tmp_path / "run", VARIANTS[variant][0], **VARIANTS[variant][1]))
    found = verify(run, EXPORTERS["onnx"](run, tmp_path / "out"), "onnx")
    assert found is not None and all(each.texts >= 12 and each.equal >= 6 for each in found)
    if (tmp_path / "out" / "translate.py").exists():
        lines = ["this cat is very large", "", "the dog sleeps"]
        command = [sys.executable, "translate.py", ".", "--beam", "1", *lines]
        script = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=True)
        opened = OnnxModel(run, tmp_path / "out")
        greedy = opened.translate([opened.encode(line) for line in lines[::2]], [], 1, 24)
        texts = [run.tokenizers[1].decode(tokens) for tokens in greedy]
        printed = script.stdout.split("\n")
        assert printed[1] == "" and len(printed) == 4 and printed[0].startswith(texts[0][:5])
        source = (tmp_path / "out" / "translate.py").read_text()
        assert "import regard" not in source and "import torch" not in source


@pytest.mark.parametrize("variant", ["norms first", "norms after, gated"])
def test_the_modules_that_are_traced_compute_the_logits_of_the_model(variant: str, tmp_path: Path) -> None:
    run = spread(make_run(tmp_path / "run", VARIANTS[variant][0], **VARIANTS[variant][1]))
    model: Any = run.model("cpu")
    sources, targets = [[9, 8, 7, EOS], [11, EOS]], [[20, 21, 22, EOS], [23, 24, 25, EOS]]
    batch = SeqBatch.from_lists(sources, targets, bos=BOS)
    banned = never_generated(run)
    with torch.no_grad():
        expected = torch.stack(batch.inputs.layout.split(model.logits(batch)), dim=1)  # [T, N, V]
        ids = torch.tensor([sources[0], [*sources[1], 0, 0]])
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        cross = SourceEncoder(model)(ids, mask)
        keys = values = torch.zeros(len(model.decoder), 2, 2, 0, 8)
        tokens = torch.stack(batch.inputs.layout.split(batch.inputs.ids), dim=1)
        for step in range(4):
            given = tokens[step], torch.tensor([step]), keys, values
            logits, keys, values = DecoderStep(model, banned)(*given, *cross, mask)
            assert logits[:, banned].max() < -1e8
            logits[:, banned] = expected[step][:, banned]
            torch.testing.assert_close(logits, expected[step], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_traced_step_of_gpt_continues_its_cache(positions: str, tmp_path: Path) -> None:
    run = spread(make_run(tmp_path / "run", "gpt", positions=positions))
    model: Any = run.model("cpu")
    tokens = [1, 20, 21, 22, 23, 24]
    with torch.no_grad():
        packed = PackedTokens.from_lists([tokens])
        expected = model.logits(SeqBatch(PackedTokens.from_lists([[]]), packed, packed.ids))
        step, cache = CausalStep(model, []), [torch.zeros(2, 1, 2, 0, 8)] * 2
        for begin, end in ((0, 4), (4, 5), (5, 6)):
            logits, *cache = step(torch.tensor([tokens[begin:end]]), torch.arange(begin, end), *cache)
            torch.testing.assert_close(logits[0], expected[end - 1], atol=1e-4, rtol=1e-4)


def test_traced_berts_read_padded_texts(tmp_path: Path) -> None:
    for family in ("bert (fill)", "bert (classify)"):
        run = spread(make_run(tmp_path / family, family))
        model: Any = run.model("cpu")
        texts = [[1, 20, 21, 22, 2], [1, 30, 2]]
        ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        packed = PackedTokens.from_lists(texts)
        fills = family == "bert (fill)"
        with torch.no_grad():
            batch = SeqBatch(packed, packed, packed.ids) if fills else TextClassBatch.from_lists(texts)
            expected = model.logits(batch)
            logits = TextEncoder(model)(ids, mask)
        flat = torch.cat([logits[row, : len(text)] for row, text in enumerate(texts)]) if fills else logits
        torch.testing.assert_close(flat, expected, atol=1e-4, rtol=1e-4)


def test_an_export_that_differs_is_refused_and_removed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run = spread(make_run(tmp_path / "run", "transformer"))
    real = CTranslate2Model.translate

    def wrong(self: Any, *given: Any) -> list[list[int]]:
        found = real(self, *given)
        return [[*found[0][:-1], 300], *found[1:]]

    command = ["export", str(run.path), "--to", "ctranslate2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(CTranslate2Model, "translate", wrong)
    assert run_command(command, debug=False) == 2
    assert "the export differs from" in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkeypatch.setattr(CTranslate2Model, "translate", real)
    assert run_command(command, debug=False) == 0
    said = capsys.readouterr().err
    assert "translations, greedy: 12 of 12 are the same" in said and "is ready" in said
    assert run_command(command, debug=False) == 2 and "exists and is not an empty folder" in capsys.readouterr().err


def test_transformers_gives_the_results_of_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 4)
    pytest.importorskip("transformers", reason="needs regard[formats]")
    for family, changes in (("transformer", {}), ("gpt", {"positions": "rotary"})):
        run = spread(make_run(tmp_path / family, family, **changes))
        folder = EXPORTERS["huggingface"](run, tmp_path / f"{family}-out")
        found = agreement.agreements(run, HuggingFaceModel(run, folder))
        assert all(each.texts == 4 and each.equal >= 3 for each in found)


MARIAN = {"norm_first": False, "positions": "sinusoidal-split"}


@pytest.mark.parametrize("family", ["transformer", "transformer as marian", "gpt", "gpt rotary"])
def test_ctranslate2_s_own_converter_takes_the_folder_for_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs regard[formats]")
    if family == "gpt rotary" and transformers.__version__ >= "5":
        pytest.skip("CTranslate2 4.8 reads rotary_pct, which the configuration of transformers 5 does not have")
    changes: dict[str, Any] = {"gpt rotary": {"positions": "rotary"}, "transformer as marian": MARIAN}.get(family, {})
    run = spread(make_run(tmp_path / "run", family.split()[0], **changes))
    folder = EXPORTERS["huggingface"](run, tmp_path / "hf")
    ctranslate2.converters.TransformersConverter(str(folder), copy_files=["tokenizer.json"]).convert(
        str(tmp_path / "out")
    )
    model, theirs = CTranslate2Model(run, tmp_path / "out"), HuggingFaceModel(run, folder)
    sources = [theirs.encode(text) for text in agreement.sample_texts(run)]
    if family.startswith("transformer"):
        assert model.translate(sources, [], 1, 20) == theirs.translate(sources, [], 1, 20)
    else:
        assert model.continue_(sources, 10) == theirs.continue_(sources, 10)


def test_what_has_no_counterpart_is_refused_in_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    recurrent = make_run(tmp_path / "recurrent", "recurrent (additive)")
    for to in ("ctranslate2", "onnx", "huggingface"):
        with pytest.raises(UserError, match="the recurrent family"):
            EXPORTERS[to](recurrent, tmp_path / "out")
    relative = make_run(tmp_path / "relative", "transformer", positions="relative", se_dim=4)
    for to in ("ctranslate2", "onnx"):
        with pytest.raises(UserError, match=r"model.se_dim = 4 .*model.positions = 'relative'"):
            EXPORTERS[to](relative, tmp_path / "out")
    pairs = make_run(tmp_path / "pairs", "gpt on pairs")
    with pytest.raises(UserError, match="trained on pairs"):
        EXPORTERS["ctranslate2"](pairs, tmp_path / "out")
    run = make_run(tmp_path / "run", "transformer")
    monkeypatch.setattr("regard.interop.portable.find_spec", lambda name: None)
    for to in ("ctranslate2", "onnx"):
        with pytest.raises(UserError, match=rf"pip install 'regard\[{to}\]'"):
            EXPORTERS[to](run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="could not be written: the disk is full"):
        EXPORTERS["ctranslate2"](make_run(tmp_path / "run", "transformer"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_random_texts_replace_missing_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "transformer")
    recipe = run.path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('corpus = "en-es"', 'source = "gone"\ntarget = "gone"'))
    texts = agreement.sample_texts(RunDir(run.path))
    assert len(texts) == 12 and len(np.unique(texts)) > 6
