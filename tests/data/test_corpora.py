"""Reading pairs from files; errors name the file and the line."""

import gzip
import lzma
import os
import time

import pytest

from regard.data import lines as lines_module
from regard.data.corpora import held_out, locate, read_pairs
from regard.data.lines import read_lines, split_lines
from regard.errors import UserError
from regard.recipes.schema import DataSettings


def pairs(folder, **settings):
    data = DataSettings(folder=str(folder), **settings)
    return list(read_pairs(data, data))


def write(folder, **contents):
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_bytes(content.encode() if isinstance(content, str) else content)


def test_two_line_aligned_files(tmp_path):
    write(tmp_path, a_en="one\ntwo\n", a_de="eins\nzwei")  # the last line may end without a line feed
    assert pairs(tmp_path, source="a.en", target="a.de") == [("one", "eins"), ("two", "zwei")]
    assert pairs(tmp_path, source="a.en", target="a.de", count=1) == [("one", "eins")]


def test_compressed_files_are_found_without_their_suffix(tmp_path):
    write(tmp_path, a_en_gz=gzip.compress(b"one\ntwo\n"), a_de_xz=lzma.compress("größer\nzwei\n".encode()))
    assert pairs(tmp_path, source="a.en", target="a.de") == [("one", "größer"), ("two", "zwei")]
    assert pairs(tmp_path, source="a.en.gz", target="a.de.xz") == [("one", "größer"), ("two", "zwei")]


def test_absolute_names_ignore_the_folder(tmp_path):
    write(tmp_path, a_tsv="one\teins\n")
    assert pairs("/elsewhere", pairs=str(tmp_path / "a.tsv")) == [("one", "eins")]


def test_only_a_line_feed_ends_a_line(tmp_path):
    write(tmp_path, a_txt="\ufeffone\x0b\x0c\x1c\u2028\x85two\rthree\r\n\r\nfour\r\r\n")
    assert list(read_lines(tmp_path / "a.txt")) == ["one\x0b\x0c\x1c\u2028\x85two\rthree", "", "four\r"]


def test_tab_separated_pairs(tmp_path):
    write(tmp_path, a_tsv="one\teins\r\n two \tzwei\n", b_tsv_gz=gzip.compress(b"a\tb\n"))
    assert pairs(tmp_path, pairs="a.tsv") == [("one", "eins"), (" two ", "zwei")]
    assert pairs(tmp_path, pairs="b.tsv") == [("a", "b")]


@pytest.mark.parametrize(("line", "columns"), [("one", 1), ("one\ttwo\tthree", 3), ("", 1)])
def test_wrong_number_of_columns(tmp_path, line, columns):
    write(tmp_path, a_tsv=f"a\tb\n{line}\n")
    with pytest.raises(UserError, match=rf"a\.tsv, line 2: .*not {columns}"):
        pairs(tmp_path, pairs="a.tsv")


def test_json_lines(tmp_path):
    write(tmp_path, a_jsonl='{"source": "a\\tb", "target": "c\\n", "more": 1}\n{"target": "d", "source": ""}')
    assert pairs(tmp_path, pairs="a.jsonl") == [("a\tb", "c\n"), ("", "d")]


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "3", '"ab"', "null", '{"source": "a"}', '{"source": "a", "target": 3}',
             '{"source": ["a"], "target": ["b"]}', '{"source": "\\ud800", "target": "b"}']
)  # fmt: skip
def test_json_that_is_not_a_pair(tmp_path, line):
    write(tmp_path, a_jsonl='{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: expected"):
        pairs(tmp_path, pairs="a.jsonl")


def test_a_file_of_pairs_needs_a_known_suffix(tmp_path):
    write(tmp_path, a_txt="one\teins\n")
    with pytest.raises(UserError, match=r"a\.txt.*\.tsv or \.jsonl"):
        pairs(tmp_path, pairs="a.txt")


@pytest.mark.parametrize(("left", "right"), [(5, 2), (2, 5), (1, 0)])
def test_files_of_different_length(tmp_path, left, right):
    write(tmp_path, a_en="x\n" * left, a_de="y\n" * right)
    with pytest.raises(UserError, match=rf"a\.en has {left} lines, .*a\.de has {right}"):
        pairs(tmp_path, source="a.en", target="a.de")


def test_bytes_that_are_not_utf8(tmp_path):
    write(tmp_path, a_tsv=b"a\tb\nc\td\xff\n")
    with pytest.raises(UserError, match=r"a\.tsv, line 2: not valid UTF-8 \(byte 4"):
        pairs(tmp_path, pairs="a.tsv")


def test_files_that_cannot_be_read(tmp_path):
    whole = gzip.compress(b"a\tb\n" * 1000)
    write(
        tmp_path, cut_tsv_gz=whole[:-9], broken_tsv_gz=whole[:15] + b"\xff" * 20, no_tsv_gz="a\tb\n", no_tsv_xz="a\tb\n"
    )
    (tmp_path / "folder.tsv").mkdir()
    for name in ("cut.tsv.gz", "broken.tsv.gz", "no.tsv.gz", "no.tsv.xz", "folder.tsv"):
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            pairs(tmp_path, pairs=name)
    with pytest.raises(UserError, match=r"no such file: .*absent\.tsv"):
        pairs(tmp_path, pairs="absent.tsv")
    with pytest.raises(UserError, match="no such file"):
        locate("absent")


def test_an_empty_corpus(tmp_path):
    write(tmp_path, a_tsv="")
    with pytest.raises(UserError, match=r"a\.tsv: no sentence pairs"):
        pairs(tmp_path, pairs="a.tsv")


def test_lower_case_applies_to_both_sides(tmp_path):
    write(tmp_path, a_tsv="One\tÄpfel\n")
    assert pairs(tmp_path, pairs="a.tsv", lowercase=True) == [("one", "äpfel")]


def test_held_out_files(tmp_path):
    write(tmp_path, a_tsv="a\tb\n", v_en="One\n", v_de="Eins\n", t_jsonl='{"source": "X", "target": "Y"}\n')
    data = DataSettings(folder=str(tmp_path), pairs="a.tsv", valid=["v.en", "v.de"], test=["t.jsonl"], lowercase=True)
    assert held_out(data, "valid") == [("one", "eins")]
    assert held_out(data, "test") == [("x", "y")]


def test_no_held_out_pairs(tmp_path):
    data = DataSettings(folder=str(tmp_path), pairs="a.tsv")
    with pytest.raises(UserError, match=r"no valid pairs: set data\.valid"):
        held_out(data, "valid")
    with pytest.raises(UserError, match="no shapes pairs: only built-in"):
        held_out(data, "shapes")


def test_a_built_in_corpus_has_its_own_splits():
    data = DataSettings(corpus="reverse", count=20)
    trained, held = list(read_pairs(data, data)), held_out(data, "test")
    assert len(trained) == 20 and held
    assert all(target.split() == source.split()[::-1] for source, target in trained + held)


def test_validation_files_take_precedence_over_a_built_in_split(tmp_path):
    write(tmp_path, v_tsv="a\tb\n")
    assert held_out(DataSettings(corpus="reverse", valid=["v.tsv"], folder=str(tmp_path)), "valid") == [("a", "b")]


@pytest.mark.parametrize("name", ["bomb", "bomb.gz", "bomb.xz"])
def test_a_line_above_the_limit_is_refused_before_it_is_read_into_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1 << 20)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get((tmp_path / name).suffix, open)
    with opener(tmp_path / name, "wb") as file:
        file.write(b"fine\n" + bytes(8 << 20))
    lines = read_lines(tmp_path / name)
    assert next(lines) == "fine"
    with pytest.raises(UserError, match=f"{name}, line 2: longer than 1 MiB; split it into lines"):
        next(lines)


def test_lines_do_not_depend_on_the_size_of_the_blocks():
    text = b"one\n\ntwo\rthree\r\n four"
    for size in range(1, len(text) + 1):
        blocks = [text[at : at + size] for at in range(0, len(text), size)]
        assert list(split_lines(blocks)) == [b"one\n", b"\n", b"two\rthree\r\n", b" four"], size


def test_a_long_line_from_a_pipe_takes_linear_time():
    """Concatenating each block with the previous ones took minutes for 60 MB."""
    began = time.process_time()
    assert [len(line) for line in split_lines([b"x" * 4096] * 15_000)] == [4096 * 15_000]
    assert time.process_time() - began < 2


def test_a_pipe_is_refused_as_training_data(tmp_path):
    os.mkfifo(tmp_path / "train.de")
    with pytest.raises(UserError, match=r"train\.de is a pipe or a device, and data are read more than once"):
        locate("train.de", str(tmp_path))


def test_json_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"deep\.jsonl, line 1: expected"):
        list(read_pairs(*[DataSettings(pairs=str(tmp_path / "deep.jsonl"))] * 2))
