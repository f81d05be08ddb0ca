"""Corpora of many files: lists, globs, Parquet files and datasets on disk."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regard.data.corpora import held_out, read_pairs
from regard.data.lines import open_compressed, read_lines
from regard.data.token_cache import build
from regard.data.vocabulary import learn_tokenizers
from regard.errors import UserError
from regard.recipes import load
from regard.recipes.schema import DataSettings, Recipe

PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei")]


def pairs(folder: Path, **settings: Any) -> list[tuple[str, str]]:
    data = DataSettings(folder=str(folder), **settings)
    return list(read_pairs(data, data))


def write_parts(folder: Path) -> None:
    """Write the pairs in two parts for each language."""
    for side, name in enumerate(("en", "de")):
        lines = [pair[side] for pair in PAIRS]
        (folder / f"part-1.{name}").write_text("".join(f"{line}\n" for line in lines[:2]))
        (folder / f"part-2.{name}.gz").write_bytes(gzip.compress(f"{lines[2]}\n".encode()))


def table(rows: Iterable[tuple[str | None, ...]], *names: str) -> pa.Table:
    return pa.table({name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})


def test_a_glob_stands_for_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_parts(tmp_path)
    assert pairs(tmp_path, source="part-*.en*", target="part-*.de*") == PAIRS
    assert pairs(tmp_path, source="part-*.en*", target="part-*.de*", count=1) == PAIRS[:1]


def test_a_list_of_files_is_read_in_its_order(tmp_path: Path) -> None:
    write_parts(tmp_path)
    source, target = (["part-2." + side, "part-1." + side] for side in ("en", "de"))
    assert pairs(tmp_path, source=source, target=target) == [PAIRS[2], *PAIRS[:2]]


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path: Path) -> None:
    (tmp_path / "a[1].tsv").write_text("x\ty\n")
    (tmp_path / "a1.tsv").write_text("not\tthis\n")
    assert pairs(tmp_path, pairs="a[1].tsv") == [("x", "y")]


def test_several_files_of_pairs_may_have_different_formats(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("one\teins\n")
    (tmp_path / "b.jsonl").write_text('{"source": "two", "target": "zwei"}\n')
    assert pairs(tmp_path, pairs=["a.tsv", "b.jsonl"]) == PAIRS[:2]


def test_held_out_files_may_be_globs(tmp_path: Path) -> None:
    write_parts(tmp_path)
    data = DataSettings(folder=str(tmp_path), corpus="reverse", valid=["part-*.en*", "part-*.de*"])
    assert held_out(data, "valid") == PAIRS
    text = DataSettings(folder=str(tmp_path), text="part-1.en", documents="line", valid=["part-*.de*"])
    assert [document for _, document in held_out(text, "valid")] == [target for _, target in PAIRS]


def test_errors_of_many_files_name_what_is_missing(tmp_path: Path) -> None:
    write_parts(tmp_path)
    with pytest.raises(UserError, match=r"no file matches .*train-\*\.en; set the folder with --data"):
        pairs(tmp_path, source="train-*.en", target="part-*.de*")
    with pytest.raises(UserError, match=r"every source file .* data\.source has 2 and data\.target has 1"):
        pairs(tmp_path, source="part-*.en*", target="part-1.de")
    (tmp_path / "part-1.de").write_text("eins\n")
    with pytest.raises(UserError, match=r"not line-aligned: .*part-1\.en has 2 lines, .*part-1\.de has 1"):
        pairs(tmp_path, source="part-*.en*", target="part-*.de*")
    with pytest.raises(UserError, match="a list of files must not be empty"):
        load("copy", ["data.text=[]"])


def test_file_names_on_the_command_line_may_be_lists() -> None:
    data = load("copy", ["data.source=[a.en, b.en]", "data.target=*.de"]).data
    assert (data.source, data.target) == (["a.en", "b.en"], "*.de")


def test_zst_files_are_read_like_gz_files(tmp_path: Path) -> None:
    with open_compressed(tmp_path / "a.tsv.zst", "wb") as file:
        file.write(b"one\teins\ntwo\tzwei\n")
    assert pairs(tmp_path, pairs="a.tsv") == PAIRS[:2]
    whole = (tmp_path / "a.tsv.zst").read_bytes()
    for content in (whole[:-3], b"no zst\n"):
        (tmp_path / "a.tsv.zst").write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*a\.tsv\.zst"):
            list(read_lines(tmp_path / "a.tsv.zst"))


def test_parquet_columns_by_name_number_or_as_the_only_two(tmp_path: Path) -> None:
    rows = [(str(number), *pair) for number, pair in enumerate(PAIRS)]
    pq.write_table(table(rows, "id", "en", "de"), tmp_path / "a.parquet", row_group_size=2)
    assert pairs(tmp_path, pairs="a.parquet", columns=["en", "de"]) == PAIRS
    assert pairs(tmp_path, pairs="a.parquet", columns=[3, 2]) == [(b, a) for a, b in PAIRS]
    pq.write_table(table(PAIRS, "en", "de"), tmp_path / "b.parquet")
    assert pairs(tmp_path, pairs="b.parquet") == PAIRS
    pq.write_table(table([pair[::-1] for pair in PAIRS], "target", "source"), tmp_path / "c.parquet")
    assert pairs(tmp_path, pairs=["b.parquet", "c.parquet"]) == PAIRS * 2


def test_a_parquet_column_of_translations_has_a_field_for_each_language(tmp_path: Path) -> None:
    column = pa.array([{"de": target, "en": source} for source, target in PAIRS])
    pq.write_table(pa.table({"translation": column}), tmp_path / "a.parquet")
    assert pairs(tmp_path, pairs="a.parquet", columns=["en", "de"]) == PAIRS
    with pytest.raises(UserError, match=r"no column 'source': it has translation, translation\.de, translation\.en"):
        pairs(tmp_path, pairs="a.parquet")


def test_plain_text_from_parquet(tmp_path: Path) -> None:
    pq.write_table(table([("a b",), ("",), ("c",)], "text"), tmp_path / "a.parquet")
    assert pairs(tmp_path, text="a.parquet") == [("", "a b"), ("", "c")]


def test_parquet_errors_name_the_column_and_the_row(tmp_path: Path) -> None:
    pq.write_table(table([*PAIRS, ("four", None)], "en", "de"), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(UserError, match=r"a\.parquet has no column 'fr': it has en, de; set data\.columns"):
        pairs(tmp_path, pairs="a.parquet", columns=["en", "fr"])
    with pytest.raises(UserError, match=r"a\.parquet has no column 3: there are 2"):
        pairs(tmp_path, pairs="a.parquet", columns=[1, 3])
    with pytest.raises(UserError, match=r"a\.parquet, row 4: the column 'de' is null"):
        pairs(tmp_path, pairs="a.parquet")
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: the column 'label' holds int64, not text"):
        pairs(tmp_path, pairs="b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match=r"cannot read .*c\.parquet"):
        pairs(tmp_path, pairs="c.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: source and target are files of lines"):
        pairs(tmp_path, source="a.parquet", target="b.parquet")


def test_a_dataset_on_disk_is_a_folder(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "mood": datasets.ClassLabel(names=["bad", "good"])})
    whole = datasets.Dataset.from_dict({"text": ["fine", "awful"], "mood": [1, 0]}, features=features)
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "moods")
    assert pairs(tmp_path, pairs="moods/train", columns=["text", "mood"]) == [("fine", "good"), ("awful", "bad")]
    with pytest.raises(UserError, match=r"moods holds the splits train: name one of them, such as .*moods/train"):
        pairs(tmp_path, pairs="moods")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r'cannot read .*empty: a folder, but .* a glob such as "empty/\*\.parquet"'):
        pairs(tmp_path, pairs="empty")


def test_tokens_are_built_again_when_one_file_of_many_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    write_parts(tmp_path)
    data = {"folder": str(tmp_path), "source": "part-*.en*", "target": "part-*.de*"}
    plan = Recipe.model_validate({"data": data, "text": {"unit": "word"}})
    tokenizers = learn_tokenizers(plan)
    read: list[int] = []

    def digest() -> str:
        return build(plan, *tokenizers, progress=lambda name, count: read.append(count))[0].digest

    before = digest()
    assert digest() == before and read == [3]
    (tmp_path / "part-2.de.gz").write_bytes(gzip.compress(b"zwei\n"))
    os.utime(tmp_path / "part-2.de.gz", (1, 1))
    assert digest() != before and read == [3, 3]
