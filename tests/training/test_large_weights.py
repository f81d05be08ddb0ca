"""Weights that are too large for one file: standard shards with an index, which every reader of weights finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import equal, small, tensors, train_run

from regard import tensor_io
from regard.api import Model
from regard.errors import UserError
from regard.interop import hf_folder
from regard.run_dir import RunDir
from regard.verify import verify

LIMIT = 3000  # bytes, in place of 5 GB
STEPS = {"steps": 6, "save_every": 2, "validate_every": 2, "average": 2, "validate_lines": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunDir, RunDir]]:
    """The same training with weights in one file and in shards."""
    folder = tmp_path_factory.mktemp("large")
    whole = train_run(small(folder, **STEPS), folder / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_io, "MAX_FILE_BYTES", LIMIT)
        yield whole, train_run(small(folder, **STEPS), folder / "large")


def shards(file: Path) -> list[Path]:
    return [file.parent / name for name in tensor_io.read_metadata(file)[tensor_io.SHARDS]]


def test_weights_are_in_shards_that_other_libraries_read(runs: tuple[RunDir, RunDir]) -> None:
    whole, large = runs
    *files, index = sorted(shards(large.best))
    assert len(files) > 2 and not load_file(large.best)
    names = json.loads(index.read_text())["weight_map"]
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert names.keys() == found.keys() and index.name == "model.safetensors.index.json"
    assert all(name in load_file(index.parent / file) for name, file in names.items())
    assert equal(found, load_file(whole.best))
    assert json.loads(index.read_text())["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for file in files:
        one = load_file(file)
        assert len(one) == 1 or sum(tensor.nbytes for tensor in one.values()) <= LIMIT


def test_every_reader_finds_the_weights(runs: tuple[RunDir, RunDir]) -> None:
    whole, large = runs
    for which in ("best", "last", "average", "step-6"):
        one, two = (run.model("cpu", which) for run in runs)
        assert equal(tensor_io.model_tensors(one), tensor_io.model_tensors(two)), which
    assert Model(large, "cpu").translate("x y").text == Model(whole, "cpu").translate("x y").text
    assert all(finding.status == "ok" for finding in verify(large.path))
    assert tensor_io.elements(large.best) == tensor_io.elements(whole.best)


def test_folders_of_shards_are_those_that_files_name(runs: tuple[RunDir, RunDir]) -> None:
    """Those of replaced weights and of removed snapshots are gone."""
    _, large = runs
    for place, files in ((large.path, [large.best, large.resume]), (large.path / "snapshots", large.snapshots())):
        named = {
            path.parent for file in files for path in shards(file if isinstance(file, Path) else large.snapshot(file))
        }
        assert {path for path in place.iterdir() if path.is_dir() and path.name != "snapshots"} == named


def test_a_changed_shard_is_refused(runs: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensor_io.save(file, {"a": torch.zeros(1000), "b": torch.ones(1000)}, {"step": 3})
    first, *_ = shards(file)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    with pytest.raises(UserError, match="its checksum does not match"):
        tensor_io.load(file)
    tensor_io.save(file, {"a": torch.zeros(3)}, {})  # small again
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"] and equal(
        tensors(file), {"a": torch.zeros(3)}
    )


def test_exported_folders_have_shards_too(runs: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    """In the layout that `regard import` and transformers read."""
    weights = {"a": torch.arange(1000.0), "b": torch.ones(1000)}
    hf_folder.write(tmp_path / "out", weights, {"architectures": ["GPT2LMHeadModel"]}, {})
    folder = hf_folder.HFFolder(tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    with folder.opened(folder.header) as found:
        assert equal(dict(found), weights)
