"""Translation of many files: what workers write, and that no line is lost when one of them is killed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard import load, tensor_io
from regard.batch import (
    BLOCK_LINES,
    JOB_FILE,
    BatchTranslator,
    Shard,
    ShardWorker,
    claim_folder,
    find_shards,
    translate_folder,
    translate_shards,
    translation_settings,
)
from regard.data.lines import open_compressed, read_lines
from regard.errors import UserError
from tiny_runs import make_run

TEXTS = ["this cat is very large", "", "the dog sees the cat"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", "transformer").path


def backwards(texts: list[str]) -> list[str]:
    return [text[::-1] for text in texts]


def write(path: Path, lines: list[str]) -> Path:
    with open_compressed(path, "wb") as file:
        file.write("".join(line + "\n" for line in lines).encode())
    return path


def test_a_batch_translator_translates_lists_and_columns(run: Path) -> None:
    expected = [found.text for found in load(run, device="cpu").translate(TEXTS, beam=2)]
    translate = BatchTranslator(run, device="cpu", beam=2)
    assert translate(TEXTS) == expected and translate([]) == []
    columns = translate({"id": [1, 2, 3], "text": TEXTS})
    assert columns == {"id": [1, 2, 3], "text": TEXTS, "translation": expected}
    renamed = BatchTranslator(run, device="cpu", beam=2, column="en", output="es")({"en": TEXTS})
    assert renamed["es"] == expected
    with pytest.raises(UserError, match="without a column 'text': it has en"):
        translate({"en": TEXTS})


def test_a_pickled_translator_leaves_the_model_behind(run: Path) -> None:
    translate = BatchTranslator(run, device="cpu", beam=1)
    model = translate.model
    assert translate.model is model  # loaded once
    sent = pickle.dumps(translate)
    assert len(sent) < 1000
    assert pickle.loads(sent)(TEXTS) == translate(TEXTS)


def test_datasets_can_map_a_translator(run: Path) -> None:
    datasets = pytest.importorskip("datasets")
    translate = BatchTranslator(run, device="cpu", beam=1)
    found = datasets.Dataset.from_dict({"text": TEXTS}).map(translate, batched=True)
    assert found["translation"][:] == translate(TEXTS)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_shard_of_text_keeps_order_and_blank_lines(tmp_path: Path, suffix: str) -> None:
    lines = [f"line {n} ä" if n % 3 else "" for n in range(BLOCK_LINES + 5)]
    shard = Shard(write(tmp_path / f"a.txt{suffix}", lines), tmp_path / "out" / f"a.txt{suffix}")
    assert shard.translate(backwards, "text", "translation") == len(lines)
    assert list(read_lines(shard.target)) == backwards(lines)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"a.txt{suffix}"]


def test_a_shard_of_json_keeps_its_fields(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl.gz", ['{"id": 7, "text": "ab"}', "", '{"text": "cd", "id": 8}'])
    shard = Shard(source, tmp_path / "out" / "a.jsonl.gz")
    assert shard.translate(backwards, "text", "es") == 3
    first, blank, last = read_lines(shard.target)
    assert json.loads(first) == {"id": 7, "text": "ab", "es": "ba"} and blank == ""
    assert json.loads(last) == {"text": "cd", "id": 8, "es": "dc"}


def test_a_translation_with_more_lines_is_not_kept(tmp_path: Path) -> None:
    shard = Shard(write(tmp_path / "a.txt", ["a", "b"]), tmp_path / "out" / "a.txt")
    with pytest.raises(UserError, match="4 lines were written for 2 lines"):
        shard.translate(lambda texts: [f"{text}\n{text}" for text in texts], "text", "es")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: no text in a field 'text'"),
        ('{"text": 5}', "no text in"),
        (r'{"text": "a\ud83d"}', "line 2: half of a surrogate pair"),
        (r'{"text": "a", "more": [{"\udc00": 1}]}', "line 2: half of a surrogate pair"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    shard = Shard(write(tmp_path / "a.jsonl", ['{"text": "a"}', line]), tmp_path / "out" / "a.jsonl")
    with pytest.raises(UserError, match=message):
        shard.translate(backwards, "text", "es")
    assert not shard.target.exists()


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "other"])
def test_a_damaged_file_is_the_error_of_its_row(tmp_path: Path, suffix: str, damage: str) -> None:
    if suffix == "zst":
        pytest.importorskip("pyarrow")
    source = write(tmp_path / f"a.txt.{suffix}", [str(n * n) for n in range(2000)])
    content, middle = source.read_bytes(), source.stat().st_size // 2
    altered = content[:middle] + bytes(byte ^ 255 for byte in content[middle:])
    source.write_bytes({"truncated": content[:middle], "altered": altered, "other": b"no archive"}[damage])
    target = tmp_path / "out" / source.name
    row = ShardWorker(backwards, "text", "es")({"source": str(source), "target": str(target)})
    assert row["lines"] == 0 and str(source) in row["error"] and "\n" not in row["error"] and not target.exists()


@pytest.mark.parametrize("error", [EOFError("a"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "a")])
def test_an_error_of_a_translator_is_the_error_of_its_row(tmp_path: Path, error: Exception) -> None:
    def fail(texts: list[str]) -> list[str]:
        raise error

    source = write(tmp_path / "a.txt", ["a"])
    row = ShardWorker(fail, "text", "es")({"source": str(source), "target": str(tmp_path / "out" / "a.txt")})
    assert row["error"] == f"{source}: {error}"


def test_files_are_found_once_and_never_overwritten(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.txt", ["a"])
    assert len(find_shards(str(tmp_path / "one" / "*.txt"), tmp_path / "out")) == 1
    with pytest.raises(UserError, match="no file matches"):
        find_shards(str(tmp_path / "*.zst"), tmp_path / "out")
    with pytest.raises(UserError, match="have the same name"):
        find_shards(str(tmp_path / "*" / "a.txt"), tmp_path / "out")
    with pytest.raises(UserError, match="would be overwritten"):
        find_shards(str(tmp_path / "one" / "a.txt"), tmp_path / "one")
    with pytest.raises(UserError, match="is a file"):
        find_shards(str(tmp_path / "one" / "a.txt"), tmp_path / "two" / "a.txt")


def test_a_folder_belongs_to_one_kind_of_translation(tmp_path: Path) -> None:
    claim_folder(tmp_path, {"run": "a", "beam": 4})
    claim_folder(tmp_path, {"run": "a", "beam": 4})
    with pytest.raises(UserError, match="with another beam: choose another --output"):
        claim_folder(tmp_path, {"run": "a", "beam": 5})
    with pytest.raises(UserError, match="with another beam: choose another --output"):
        claim_folder(tmp_path, {"run": "a"})
    with pytest.raises(UserError, match="with another tag: choose another --output"):
        claim_folder(tmp_path, {"run": "a", "beam": 4, "tag": None})
    (tmp_path / JOB_FILE).write_text("[]")
    with pytest.raises(UserError, match="is not a JSON object"):
        claim_folder(tmp_path, {"run": "a", "beam": 4})


def test_a_folder_belongs_to_the_weights_of_one_model(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    translator = BatchTranslator(copy, device="cpu", beam=2)
    claim_folder(tmp_path / "out", translation_settings(translator))
    claim_folder(tmp_path / "out", translation_settings(BatchTranslator(copy, device="cuda", beam=2)))
    weights, facts = tensor_io.load(copy / "model.safetensors")
    tensor_io.save(copy / "model.safetensors", {n: t + 1 for n, t in weights.items()}, facts)  # trained further
    with pytest.raises(UserError, match="with another checksum of the weights: choose another --output"):
        claim_folder(tmp_path / "out", translation_settings(translator))


class DiesOnce:
    """Reverses lines; the first process that gets a certain line kills itself."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __call__(self, texts: list[str]) -> list[str]:
        if "line 5" in texts and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return backwards(texts)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    if not os.environ.get("CI"):
        pytest.importorskip("ray")
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_loses_no_line(tmp_path: Path) -> None:
    each, count = 1000, 6
    (tmp_path / "in").mkdir()
    for n in range(count):
        write(tmp_path / "in" / f"{n}.txt.gz", [f"line {n * each + k}" for k in range(each)])
    shards = find_shards(str(tmp_path / "in" / "*.gz"), tmp_path / "out")
    done: list[int] = []
    assert translate_shards(DiesOnce(tmp_path / "died"), shards, workers=2, progress=done.append) == each * count
    assert (tmp_path / "died").exists() and sum(done) == count
    found = [line for shard in shards for line in read_lines(shard.target)]
    assert found == [f"line {n}"[::-1] for n in range(each * count)]
    shards[2].target.unlink()
    times = [shard.target.stat().st_mtime_ns for shard in shards if shard.target.exists()]
    assert translate_shards(backwards, shards, workers=2) == each  # the missing one alone
    assert [s.target.stat().st_mtime_ns for s in shards if s is not shards[2]] == times


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_bad_file_does_not_stop_the_others(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["{"])
    write(tmp_path / "b.jsonl", ['{"text": "ab"}'])
    shards = find_shards(str(tmp_path / "*.jsonl"), tmp_path / "out")
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not valid JSON.*; the other files are done"):
        translate_shards(backwards, shards, workers=1)
    assert shards[1].target.exists() and not shards[0].target.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_ray_translates_as_this_process_does(run: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXTS)
    write(tmp_path / "b.txt", TEXTS[::-1])
    translate = BatchTranslator(run, device="cpu", beam=2)
    assert translate_folder(translate, str(tmp_path / "*.txt"), tmp_path / "out", workers=2) == (2, 6)
    assert list(read_lines(tmp_path / "out" / "a.txt")) == translate(TEXTS)
    assert translate_folder(translate, str(tmp_path / "*.txt"), tmp_path / "out", workers=2) == (2, 0)
    with pytest.raises(UserError, match="another beam"):
        translate_folder(BatchTranslator(run, device="cpu", beam=1), str(tmp_path / "*.txt"), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_cannot_start_is_an_error_of_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXTS)
    missing = BatchTranslator(tmp_path / "no-run", device="cpu")
    with pytest.raises(UserError, match="no-run"):
        translate_shards(missing, find_shards(str(tmp_path / "*.txt"), tmp_path / "out"))
