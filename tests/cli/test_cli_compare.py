"""regard compare, with two runs on the same few pairs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from regard.evaluation import score_texts
from regard.run_dir import RunDir
from regard.text import Tokenizer

SOURCES = ["a b", "b a c", "c c", "d e f a b c", "a b c d e", "f"]


@pytest.fixture(scope="module")
def other(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run `trained` with another name."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("compare") / "other"))


@pytest.fixture
def pairs(tmp_path: Path) -> list[object]:
    """The options that name a few pairs to copy."""
    file = tmp_path / "lines.txt"
    file.write_text("".join(line + "\n" for line in SOURCES), encoding="utf-8")
    return ["--source", file, "--reference", file]


def test_one_table_and_one_plot_for_all_runs(regard, trained, other, pairs):
    result = regard("compare", trained, other, *pairs, "--buckets", "2,4")
    assert result.status == 0, result.err
    first, *lines = result.out.splitlines()
    assert first.split()[:2] == ["run", "model"]
    assert [line.split()[0] for line in lines[:2]] == ["run", "other"]
    assert "Transformer" in lines[0]
    assert "● run   ■ other" in result.out and "source length (words)" in result.out
    assert "nrefs:1" in result.out and "*" not in result.out  # one vocabulary: perplexities compare
    assert "\x1b" not in result.out  # no terminal, no colours


def test_json_has_the_scores_and_save_writes_the_translations(regard, trained, other, pairs, tmp_path):
    picture, folder = tmp_path / "plot.svg", tmp_path / "outputs"
    words = [*pairs, "--buckets", "2,4", "--metric", "chrf", "--out", picture, "--save", folder, "--json", "--beam", 1]
    result = regard("compare", trained, other, *words)
    assert result.status == 0, result.err
    entry = json.loads(result.out)
    assert entry["lines"] == 6 and entry["metric"] == "chrf" and entry["same_vocabulary"] is True
    one, two = entry["runs"]
    assert {**one, "run": ""} == {**two, "run": ""}  # equal models, equal numbers
    assert one["steps"] == 20 and one["seconds"] > 0 and one["tokens_per_second"] > 0
    outputs = (folder / "other.txt").read_text(encoding="utf-8").splitlines()
    assert (folder / "references.txt").read_text(encoding="utf-8").splitlines() == SOURCES
    scores = score_texts(outputs, SOURCES)
    assert (two["bleu"], two["chrf"], two["exact"]) == pytest.approx((scores.bleu, scores.chrf, scores.exact))
    assert [(b["from"], b["to"], b["sentences"]) for b in two["by_length"]] == [(1, 2, 3), (3, 3, 1), (5, 6, 2)]
    long = [3, 4]
    assert two["by_length"][2]["score"] == pytest.approx(
        score_texts([outputs[i] for i in long], [SOURCES[i] for i in long]).chrf
    )
    root = ElementTree.parse(picture).getroot()
    assert {"other", "chrF", "5–6"} <= {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}


def test_a_single_run_and_a_column_for_moses_bleu(regard, trained, pairs):
    pytest.importorskip("sacremoses")
    result = regard("compare", trained, *pairs, "--moses", "en")
    assert result.status == 0, result.err
    assert "Moses BLEU" in result.out and "case:lc" in result.out


def test_perplexities_of_other_vocabularies_are_marked(regard, trained, other, pairs, tmp_path):
    renamed = Path(shutil.copytree(other, tmp_path / "renamed"))
    run = RunDir(renamed)
    text = run.tokenizers[0].to_json()
    changed = re.sub(r'"b"', '"ß"', text)
    assert changed != text
    run.save_tokenizers(Tokenizer.from_json(changed), Tokenizer.from_json(changed))
    result = regard("compare", trained, renamed, *pairs)
    assert result.status == 0, result.err
    assert "perplexity*" in result.out and "the vocabularies differ" in result.out


def test_runs_trained_on_other_data_are_named(regard, trained, copied, pairs):
    recipe = copied / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("count = 500", "count = 400"), encoding="utf-8")
    assert "copied was trained on other data than run\n" in regard("compare", trained, copied, *pairs).out
    assert "other data" not in regard("compare", trained, *pairs).out


def test_runs_that_cannot_be_compared_are_refused_before_translating(regard, trained, copied, pairs):
    recipe = copied / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("lowercase = false", "lowercase = true"), encoding="utf-8")
    line = regard("compare", trained, copied, *pairs).error
    assert "lower-cased" in line and str(copied) in line
    recipe.write_text(text, encoding="utf-8")
    (copied / "model.safetensors").unlink()
    assert "first validation" in regard("compare", trained, copied).error


def test_a_run_of_plain_text_is_refused(regard, trained, copied):
    recipe = copied / "recipe.toml"
    recipe.write_text(
        'data = {text = "x.txt"}\n[model]\nfamily = "gpt"\nsize = "nano"\n[text]\nunit = "char"\n', encoding="utf-8"
    )
    assert "use `regard evaluate`" in regard("compare", trained, copied).error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--metric", "ter"], "bleu, chrf, exact"),
        (["--buckets", "five"], "--buckets five"),
        (["--out", "plot.png"], "only be written as .svg"),
        (["--source", "x.txt"], "must be given together"),
        (["--moses-reference", "x.txt"], "needs --moses"),
        (["--split", "spilt"], "no split 'spilt'"),
        (["--data", "nowhere"], "no such folder"),
    ],
)
def test_errors_are_one_line(regard, trained, words, expected):
    assert expected in regard("compare", trained, *words).error


def test_a_run_given_twice_and_a_path_that_is_not_a_folder(regard, trained, pairs, tmp_path):
    assert "given twice" in regard("compare", trained, trained, *pairs).error
    assert "does not exist" in regard("compare", trained, tmp_path / "nowhere", *pairs).error
    (tmp_path / "file").touch()
    assert "--save" in regard("compare", trained, *pairs, "--save", tmp_path / "file").error
