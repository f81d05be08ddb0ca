"""Errors of the user: one line that says what is wrong, exit status 2, and no lost files."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main
from regard.errors import UserError

DAMAGES: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("newer format", lambda run: (run / "run.json").write_text('{"format": 99, "regard": "7.0"}'), ["99", "7.0"]),
    ("run.json cut", lambda run: (run / "run.json").write_text("{"), ["run.json", "damaged"]),
    ("no run.json", lambda run: (run / "run.json").unlink(), ["not a run directory"]),
    ("weights cut", lambda run: _cut(run / "model.safetensors"), ["model.safetensors", "damaged"]),
    ("weights empty", lambda run: (run / "model.safetensors").write_bytes(b""), ["model.safetensors", "damaged"]),
    ("a flipped bit", lambda run: _flip(run / "model.safetensors", -999), ["model.safetensors", "checksum"]),
    ("a flipped bit in the header", lambda run: _flip(run / "model.safetensors", 2), ["model.safetensors"]),
    ("no weights", lambda run: (run / "model.safetensors").unlink(), ["no model.safetensors"]),
    ("no tokenizer", lambda run: (run / "tokenizer.json").unlink(), ["tokenizer.json", "no such file"]),
    ("tokenizer cut", lambda run: _cut(run / "tokenizer.json"), ["tokenizer"]),
    ("recipe not TOML", lambda run: (run / "recipe.toml").write_text("[["), ["recipe.toml", "TOML"]),
    ("recipe empty", lambda run: (run / "recipe.toml").write_text(""), ["recipe.toml", "[data]"]),
    ("no recipe", lambda run: (run / "recipe.toml").unlink(), ["recipe.toml", "no such file"]),
    ("another width", lambda run: _change(run / "recipe.toml", "width = 16", "width = 32"), ["(24, 16)", "(24, 32)"]),
    ("misspelt key", lambda run: _change(run / "recipe.toml", "width = 16", "widht = 16"), ["line", "model.width?"]),
]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def _change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(("damage", "said"), [entry[1:] for entry in DAMAGES], ids=[entry[0] for entry in DAMAGES])
def test_a_damaged_run_is_named(regard, copied, damage, said):
    damage(copied)
    error = regard("translate", copied, "a").error
    assert all(part in error for part in said), error


@pytest.mark.parametrize(
    "name",
    ["run.json", "recipe.toml", "tokenizer.json"],
)
def test_a_file_of_a_run_that_is_not_text_is_named(regard, copied, name):
    (copied / name).write_bytes(b"\xff\xfe")
    assert name in regard("translate", copied, "a").error


@pytest.mark.parametrize("content", ["[]", '{"format": "x"}', "1"])
def test_run_json_with_unexpected_content_is_damaged(regard, copied, content):
    (copied / "run.json").write_text(content)
    assert "run.json" in regard("translate", copied, "a").error


def test_a_damaged_tokenizer_is_named_with_its_path(regard, copied):
    (copied / "tokenizer.json").write_text("{}")
    assert str(copied / "tokenizer.json") in regard("draw", copied, "a").error


USAGE = [
    (["nosuch"], ["nosuch", "--help"]),
    (["train", "copy", "--nosuch"], ["--nosuch", "regard train --help"]),
    (["train"], ["RECIPE", "regard train --help"]),
    (["translate"], ["RUN", "regard translate --help"]),
    (["draw", "run"], ["run does not exist"]),
    (["evaluate"], ["RUN", "--outputs", "--reference"]),
    (["translate", "nowhere", "a"], ["nowhere", "does not exist", "regard train"]),
    (["translate", "", "a"], ["run directory"]),
    (["train", "multi30k-en-de"], ["train.en", "--data FOLDER", "`regard fetch multi30k`", "--data data/multi30k"]),
    (["train", "images"], ["no such file: images", "--set data.images=FOLDER"]),
    (["train", "copyy"], ["'copyy'", "did you mean copy?"]),
    (["train", "nofile.toml"], ["nofile.toml", "no such file"]),
    (["train", "copy", "--set", "training.step=4"], ["--set training.step=4", "did you mean training.steps?"]),
    (["train", "copy", "--set", "training.steps=many"], ["training.steps=many", "whole number"]),
    (["train", "copy", "--set", "training.steps=0"], ["training.steps=0", "at least 1"]),
    (["train", "copy", "--set", "nonsense"], ["nonsense", "section.key=value"]),
    (["train", "copy", "--seed", "-1"], ["--seed"]),
    (["train", "copy", "--data", "nofolder"], ["--data", "nofolder"]),
    (["recipes", "copyy"], ["did you mean copy?"]),
    (["recipes", "--set", "training.steps=1"], ["--set"]),
    (["fetch", "nosuch"], ["nosuch", "multi30k"]),
]


@pytest.mark.parametrize(("words", "said"), USAGE, ids=[" ".join(words) for words, _ in USAGE])
def test_misuse(regard, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    error = regard(*words).error
    assert all(part in error for part in said), error
    assert list(tmp_path.iterdir()) == []  # nothing was begun


OPTIONS = [
    (["--beam", "0"], ["--beam", "1"]),
    (["--beam", "x"], ["--beam", "must be a whole number (see"]),
    (["--top-p", "x"], ["--top-p", "must be a number (see"]),
    (["--beam", "100000"], ["--beam", "1000"]),
    (["--nbest", "100000"], ["--nbest", "1000"]),
    (["--format", "xml"], ["--format", "jsonl"]),
    (["--top-p", "0", "--sample"], ["--top-p", "greater than 0"]),
    (["--temperature", "inf", "--sample"], ["--temperature", "finite"]),
    (["--temperature", "nan", "--sample"], ["--temperature"]),
    (["--temperature", "0.5"], ["--temperature", "--sample"]),
    (["--source-tag", "<2de>"], ["<2de>"]),
    (["--device", "gpu"], ["'gpu'", "cpu", "cuda"]),
    (["--input", "file"], ["--input"]),
    (["--prefix", "a zzz"], ["--prefix", "'a zzz'"]),
    (["--prefix", "\udcff"], ["--prefix", "UTF-8"]),
    (["\udcff"], ["TEXT", "UTF-8", r"\udcff"]),
]


@pytest.mark.parametrize(("words", "said"), OPTIONS, ids=[ascii(" ".join(words)) for words, _ in OPTIONS])
def test_wrong_options_of_translate(regard, trained, words, said):
    error = regard("translate", trained, "a b", *words).error
    assert all(part in error for part in said), error


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99"])
def test_a_device_that_cannot_be_used(regard, trained, device):
    assert device in regard("translate", trained, "a", "--device", device).error


def test_cuda_without_a_gpu(regard, trained, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no GPU" in regard("translate", trained, "a", "--device", "cuda").error


# -- files that are read -----------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(regard, trained, tmp_path, monkeypatch):
    missing, folder, secret = tmp_path / "missing", tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("a\n")
    real = builtins.open

    def refuse(file, *more, **named):  # chmod 000 would not stop root
        if str(file) == str(secret):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return real(file, *more, **named)

    monkeypatch.setattr(builtins, "open", refuse)
    for file, why in ((missing, "no such file"), (folder, "folder"), (folder, "director"), (secret, "permission")):
        for words in (["translate", trained, "--input", file], ["evaluate", "--outputs", file, "--reference", file]):
            error = regard(*words).error
            assert str(file) in error
            assert why in error.lower() or file == folder
    assert str(trained.parent) in regard("translate", trained.parent, "a").error  # a folder, but no run


def test_a_misspelt_run_is_told_the_names_like_it(regard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/en-es", "runs/stories", "other/en-es-2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
    assert regard("translate", "runs/enes", "a").error == "runs/enes does not exist; did you mean runs/en-es?"
    assert regard("translate", "storys", "a").error == "storys does not exist; did you mean runs/stories?"
    assert regard("translate", "other/en-es-1", "a").error.endswith("did you mean other/en-es-2 or runs/en-es?")
    assert "did you mean" not in regard("translate", "runs/xyz", "a").error


def test_a_text_that_is_the_name_of_a_file_gets_a_warning(regard, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a b\n")
    result = regard("translate", trained, "in.txt")
    assert result.status == 0 and len(result.out.splitlines()) == 1
    expected = "'in.txt' is read as a text, although it is the name of a file: for its lines, give < in.txt"
    assert result.err == f"regard: warning: {expected}\n"
    assert regard("translate", trained, "in.txt", "--quiet").err == regard("translate", trained, "a b").err == ""


def test_utf_16_is_named(regard, typed, trained, tmp_path):
    """PowerShell's `>` writes UTF-16."""
    content = "a b\nc d\n".encode("utf-16")
    (tmp_path / "in.txt").write_bytes(content)
    said = "line 1: this is UTF-16, not UTF-8; iconv -f UTF-16 -t UTF-8 converts it"
    assert said in regard("translate", trained, "--input", tmp_path / "in.txt").error
    assert said in typed(content, "translate", trained).err
    (tmp_path / "recipe.toml").write_text(
        '[data]\nsource = "in.txt"\ntarget = "in.txt"\nvalid = ["in.txt", "in.txt"]\n'
    )
    assert said in regard("train", tmp_path / "recipe.toml", "--out", tmp_path / "run").error
    (tmp_path / "in.txt").write_bytes(b"a\n\xff\xfe b\n")  # a byte-order mark begins a file, not a later line
    assert "line 2: not valid UTF-8 (byte 1" in regard("translate", trained, "--input", tmp_path / "in.txt").error


def test_calibrating_another_run_names_the_verb_that_was_typed(regard, tmp_path):
    from tests.tiny_runs import make_run

    run = make_run(tmp_path / "gpt", "gpt").path
    assert regard("calibrate", run).error == (
        f"`regard calibrate` does not apply to {run}, which was trained for language-modelling: "
        "use bench, draw, evaluate, explain, export, generate or look"
    )


@pytest.mark.parametrize("name", ["bad.gz", "bad.xz"])
def test_a_file_whose_content_does_not_match_its_suffix(regard, trained, tmp_path, name):
    (tmp_path / name).write_bytes(b"this is plain text\n")
    assert name in regard("translate", trained, "--input", tmp_path / name).error


def test_the_error_for_invalid_utf8_names_file_line_and_option(regard, trained, tmp_path, monkeypatch):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"a\nb\nc\xe9\nd\n")
    result = regard("translate", trained, "--input", file, "--output", tmp_path / "out.txt")
    bad = "line 3: not valid UTF-8 (byte 2 of the line); --errors replace or --errors skip continues"
    assert result.error == f"{file}, {bad}"
    assert not (tmp_path / "out.txt").exists()
    with open(file, "rb") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        result = regard("translate", trained, "--errors", "stop", "--output", tmp_path / "out.txt")
        assert result.error == f"standard input, {bad}"


BAD_DATA = {
    "lengths": ("a\n" * 7, "a\n" * 5, ["source.txt has 7 lines", "target.txt has 5"]),
    "empty": ("", "", ["no sentence pairs"]),
    "blank": ("\n" * 7, "a\n" * 7, ["no usable sentence pairs", "7 blank"]),
    "utf-8": ("a\n" * 3, b"a\na\n\xff\n", ["target.txt, line 3", "UTF-8"]),
    "missing": ("a\n" * 3, None, ["target.txt", "no such file"]),
}


def _texts(folder: Path, **texts: str | bytes | None) -> None:
    for name, text in texts.items():
        if text is not None:
            (folder / f"{name}.txt").write_bytes(text.encode() if isinstance(text, str) else text)


FILES = ["--set", "data.source=source.txt", "--set", "data.target=target.txt", "--set", "data.valid=[ok.txt,ok.txt]"]


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_training_data(regard, tiny, tmp_path, case):
    source, target, said = BAD_DATA[case]
    _texts(tmp_path, source=source, target=target, ok="a b\n" * 9)
    words = ["train", "copy", *tiny, *FILES, "--data", tmp_path, "--out", tmp_path / "run"]
    error = regard(*words).error
    assert all(part in error for part in said), error


def test_the_same_command_succeeds_after_the_data_are_corrected(regard, tiny, tmp_path):
    _texts(tmp_path, source="a b\n" * 50, target="a b\n" * 49, ok="a b\n" * 9)
    words = ["train", "copy", *tiny, *FILES, "--data", tmp_path, "--out", tmp_path / "run"]
    assert "not line-aligned" in regard(*words).error
    _texts(tmp_path, target="a b\n" * 50)
    assert regard(*words).status == 0


def test_the_data_folder_can_be_given_when_resuming(regard, tiny, tmp_path, monkeypatch):
    """`regard train multi30k-en-de`, which fails, then the same with --data, which must succeed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _texts(tmp_path / "data", source="a b\n" * 50, target="a b\n" * 50, ok="a b\n" * 9)
    words = ["train", "copy", *tiny, *FILES, "--out", tmp_path / "run"]
    assert "source.txt" in regard(*words).error
    assert regard(*words, "--data", tmp_path / "data").status == 0


def test_held_out_data_are_checked_before_the_run_is_made(regard, tiny, tmp_path):
    _texts(tmp_path, source="a b\n" * 50, target="a b\n" * 50)
    result = regard("train", "copy", *tiny, *FILES, "--data", tmp_path, "--out", tmp_path / "run")
    assert "ok.txt" in result.error
    assert "learning the vocabulary" not in result.err


# -- files that are written --------------------------------------------------------------------------------------------


def test_train_refuses_a_folder_that_is_not_a_run(regard, train_copy, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert str(tmp_path) in regard(*train_copy, "--out", tmp_path).error
    assert "thesis.tex" in regard(*train_copy, "--out", tmp_path / "thesis.tex").error
    assert "thesis.tex" in regard(*train_copy, "--out", tmp_path / "thesis.tex" / "run").error
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_train_does_not_resume_with_another_recipe(regard, train_copy, copied):
    before = _contents(copied)
    error = regard(*train_copy, "--out", copied, "--set", "model.ffn_width=64").error
    assert all(part in error for part in ("another recipe", "model.ffn_width", "32", "64", "--out"))
    error = regard("train", "reverse", *train_copy[2:], "--out", copied).error
    assert all(part in error for part in ("data.corpus", "copy", "reverse"))
    assert _contents(copied) == before


def test_from_a_missing_run_makes_no_run(regard, train_copy, tmp_path):
    assert "nowhere" in regard(*train_copy, "--out", tmp_path / "new", "--from", tmp_path / "nowhere").error
    assert not (tmp_path / "new").exists()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


@pytest.mark.parametrize(("number", "why"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "no permission")])
def test_a_failed_write_keeps_the_old_file(regard, trained, copied, train_copy, tmp_path, monkeypatch, number, why):
    old = tmp_path / "old.svg"
    old.write_text("old")
    weights = (copied / "model.safetensors").read_bytes()

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fail)
    for words in (
        ["translate", trained, "a", "--output", old],
        ["draw", trained, "a", "--out", old],
        ["evaluate", "--outputs", trained / "run.json", "--reference", trained / "run.json", "--save", old],
    ):
        error = regard(*words).error
        assert why in error and "old.svg" in error
    error = regard(*train_copy, "--out", copied, "--set", "training.steps=25").error
    assert why in error and str(copied) in error
    monkeypatch.undo()
    assert old.read_text() == "old"
    assert (copied / "model.safetensors").read_bytes() == weights
    assert not [file for file in tmp_path.rglob("*") if file.name.endswith(".tmp")]
    assert regard("translate", copied, "a").status == 0


def test_a_disk_that_fills_up_in_the_middle_of_a_file(regard, trained, tmp_path, monkeypatch):
    out = tmp_path / "out.txt"
    out.write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "disk is full" in regard("translate", trained, "a", "--output", out).error
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]
    assert out.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_standard_output_on_a_full_disk(start, trained):
    with open("/dev/full", "w") as full:
        process = start("translate", trained, "a", stdout=full)
        _, err = process.communicate()
    assert (process.returncode, err) == (2, "regard: standard output: the disk is full\n")


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_closed_standard_stream_is_no_bug(descriptor: int, trained: Path, tmp_path: Path) -> None:
    command = f"exec {descriptor}>&-; exec {sys.executable} -m regard translate {trained} 'a b'"
    result = subprocess.run(["sh", "-c", command], capture_output=True, encoding="utf-8")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") == (0 if descriptor == 1 else 1)


def test_output_to_a_folder_is_refused_before_the_work(regard, trained, tmp_path):
    assert "folder" in regard("translate", trained, "a", "--output", tmp_path).error
    assert "folder" in regard("evaluate", trained, "--save", tmp_path).error


def test_a_pipe_is_not_replaced_by_a_file(regard, trained, tmp_path):
    """As root, replacing /dev/null by a file would break the system."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert regard("translate", trained, "--beam", 1, "", "--output", pipe).status == 0
        assert os.read(reader, 100) == b"\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_symbolic_link_is_kept(regard, trained, tmp_path):
    (tmp_path / "link.txt").symlink_to("real.txt")
    assert regard("translate", trained, "", "--output", tmp_path / "link.txt").status == 0
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real.txt").read_text() == "\n"


# -- evaluate and draw -------------------------------------------------------------------------------------------------


def test_wrong_evaluations(regard, trained, tmp_path):
    two, three, none = (tmp_path / name for name in ("two.txt", "three.txt", "none.txt"))
    two.write_text("a\nb\n"), three.write_text("a\nb\nc\n"), none.write_text("")
    cases = [
        (["--outputs", two, "--reference", three], ["two.txt has 2 lines", "three.txt has 3"]),
        ([trained, "--source", two, "--reference", three], ["two.txt has 2 lines", "three.txt has 3"]),
        ([trained, "--source", two], ["--source", "--reference"]),
        ([trained, "--outputs", two, "--reference", two], ["RUN", "--outputs"]),
        (["--outputs", two], ["--reference"]),
        (["--outputs", two, "--reference", two, "--source", two], ["--source"]),
        (["--outputs", none, "--reference", none], ["no lines"]),
        ([trained, "--split", "tset"], ["'tset'", "train, valid, test"]),
        ([trained, "--data", tmp_path / "nowhere"], ["--data", "nowhere"]),
    ]
    for words, said in cases:
        error = regard("evaluate", *words, "--save", tmp_path / "saved.txt").error
        assert all(part in error for part in said), error
    assert not (tmp_path / "saved.txt").exists()


def test_wrong_drawings(regard, trained, tmp_path):
    cases = [
        (["  "], ["blank"]),
        (["a b", "--layer", 99], ["--layer 99", "1 decoder layer"]),
        (["a b", "--head", 3], ["--head 3", "2 heads"]),
        (["a b", "--layer", 0], ["--layer", "1"]),
        (["a b", "--out", tmp_path / "cat.jpg"], ["cat.jpg", ".svg, .png, .pdf, .html, .json, .safetensors"]),
        (["a b", "--out", tmp_path], ["folder"]),
        (["\udcff"], ["UTF-8"]),
        (["a b", "--target", "a " * 50], ["target", "39 tokens"]),
    ]
    for words, said in cases:
        error = regard("draw", trained, *words).error
        assert all(part in error for part in said), error
    assert list(tmp_path.iterdir()) == []


# -- what the last line of defence does --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--debug", "translate", "nowhere"], ["translate", "nowhere", "a", "--debug"]])
def test_debug_anywhere_shows_the_traceback(words):
    with pytest.raises(UserError, match="nowhere does not exist"):  # Python prints what nobody catches
        main(words)


def test_a_bug_is_reported_as_one(regard, trained, monkeypatch):
    def fault(*_, **__):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("regard.cli.translate.load", fault)
    result = regard("translate", trained, "a")
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert "ZeroDivisionError: two lines" in result.err and "--debug" in result.err
    with pytest.raises(ZeroDivisionError):
        regard("translate", trained, "a", debug=True)


def test_out_of_memory_says_what_to_lower(regard, trained, monkeypatch):
    def fault(*_, **__):
        raise MemoryError

    monkeypatch.setattr("regard.cli.translate.load", fault)
    assert "batch_tokens" in regard("translate", trained, "a").error


def test_json_lines_of_metrics_survive_a_bad_byte(regard, copied, train_copy):
    with open(copied / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2\xff')
    assert regard(*train_copy, "--out", copied, "--set", "training.steps=21").status == 0
    for line in (copied / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)


@pytest.mark.parametrize("words", [["translate", "RUN", "a b"], ["evaluate", "RUN"], ["draw", "RUN", "a b"]])
def test_the_error_for_missing_weights_lists_the_existing_ones(regard, trained, words):
    command = [trained if word == "RUN" else word for word in words]
    answer = regard(*command, "--weights", "step-7").error
    assert f"{trained} has no weights step-7; {trained} has best, last; an average needs" in answer
    assert regard(*command, "--weights", "last").status == 0


def test_the_error_for_a_path_that_is_not_a_run_says_what_to_do(regard, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "runs").symlink_to(trained.parent)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    expected = {
        "mine.toml": "mine.toml is a recipe, not a run directory; `regard train mine.toml --out RUN` makes",
        "other.toml": "other.toml does not exist; `regard train other.toml --out RUN` makes a run directory",
        "a.txt": "a.txt is a file, not a run directory",
        "hf": "`regard import hf --out RUN` reads it",
        "run": "run does not exist; did you mean runs/run?",
        "runs": "runs is not a run directory (it has no run.json); did you mean runs/",
    }
    for path, words in expected.items():
        assert words in regard("translate", path, "a").error


@pytest.mark.parametrize(
    ("option", "setting"),
    [("--lr", "training.learning_rate"), ("--batch-size", "training.batch_tokens"), ("--steps", "training.steps")],
)
def test_the_error_for_a_setting_given_as_an_option_suggests_set(regard, option, setting):
    error = regard("train", "copy", option, "5").error
    assert f"No such option: {option}; settings are given as --set {setting}=VALUE" in error


ESCAPE = "\x1b]0;title\x07\x9b2J\u202e"


@pytest.mark.parametrize("words", [("recipes", f"no{ESCAPE}"), ("translate", f"no{ESCAPE}", "a"), (f"verb{ESCAPE}",)])
def test_escape_sequences_in_a_message_are_escaped(regard: Callable, words: tuple[str, ...]) -> None:
    said = regard(*words).error
    assert not set(ESCAPE) & set(said) - set("]0;title2J"), ascii(said)
    assert "\\x1b" in said


def test_escape_sequences_in_a_recipe_are_escaped(regard: Callable, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "copy"\nabout = "\\u001b[2J\u009b2J"\n[training]\nsteps = "\u009b"\n')
    assert "\x9b" not in regard("recipes", tmp_path / "a.toml").error
    result = regard("recipes", tmp_path / "a.toml", "--set", "training.steps=1")
    assert result.status == 0 and "\x1b" not in result.out and "\x9b" not in result.out


def test_translations_are_escaped_in_a_terminal_but_not_in_a_pipe(monkeypatch: Any) -> None:
    from regard.cli.output import text_output

    for terminal, wanted in ((True, r"a\x1b[2J" + "\n"), (False, "a\x1b[2J\n")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.stdout", stream)
        text_output().write("a\x1b[2J\n")
        stream.flush()
        assert stream.buffer.getvalue().decode() == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you ..."),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("std::bad_alloc"),
    ],
)
@pytest.mark.parametrize(("verb", "advice"), [("train", "batch_tokens"), ("translate", "--beam"), ("draw", "shorter")])
def test_out_of_memory_gives_advice_for_the_verb(
    capsys: pytest.CaptureFixture[str], error: Exception, verb: str, advice: str
) -> None:
    from regard.cli import _failed

    assert _failed(error, debug=False, verb=verb) == 2
    said = capsys.readouterr().err
    assert said.startswith("regard: out of memory: ") and advice in said
