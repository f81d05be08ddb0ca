"""regard evaluate --alignment with built-in gold alignments and gold files, for one head or all, and its errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from regard.api import load
from regard.interpret.alignments import attended_words, linked
from regard.metrics.alignment import read_aligned, score_links
from regard.run_dir import RunDir

LINES = ["a b c", "d e", "f a b c d"]
SIZES = ("width", "encoder_width", "embedding")


@pytest.fixture
def files(tmp_path: Path) -> list[object]:
    """The options that name three pairs to copy and their gold links."""
    text, gold = tmp_path / "lines.txt", tmp_path / "gold.talp"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    gold.write_text("0-0 1-1 2?2\n0-0 1-1\n0-0 1-1 2-2 3-3 4-4 5-5\n", encoding="utf-8")
    return ["--gold", gold, "--source", text, "--reference", text]


def test_the_table_of_a_built_in_corpus_says_what_was_chosen_on_which_set(regard, trained):
    result = regard("evaluate", trained, "--alignment")
    assert result.status == 0, result.err
    head, *lines = result.out.splitlines()
    assert head.split() == ["attention", "rows", "AER", "precision", "recall", "dev", "AER"]
    assert lines[0].startswith("best head") and "layer 1, head " in lines[0]
    assert lines[1].startswith("mean of a layer") and "layer 1, mean of 2 heads" in lines[1]
    assert lines[2].startswith("copy test: ") and "sure links" in lines[2]  # one layer: no mean of all
    assert "Chosen by AER on copy valid" in lines[-1] and "the best head and the rows" in lines[-1]
    assert any(line.startswith(("predicting: ", "reading: ")) for line in lines)


def test_json_has_the_figures_of_the_table_and_the_best_head_is_best_on_dev(regard, trained):
    entry = json.loads(regard("evaluate", trained, "--alignment", "--json").out)
    assert (entry["pairs"], entry["chosen_on"]) == ("copy test", "copy valid")
    assert (entry["layers"], entry["heads"], entry["threshold"]) == (1, 2, None)
    best, mean = entry["lines"]
    assert (best["attention"], mean["attention"], mean["head"]) == ("best head", "mean of a layer", None)
    scored = []
    for head in (1, 2):
        for rows in ("predicting", "reading"):
            words = ["--layer", 1, "--head", head, "--rows", rows, "--json"]
            (line,) = json.loads(regard("evaluate", trained, "--alignment", *words).out)["lines"]
            assert (line["layer"], line["head"], line["rows"]) == (1, head, rows)
            scored.append(line)
    chosen = min(scored, key=lambda line: line["dev_aer"])
    assert {**chosen, "attention": ""} == {**best, "attention": ""}
    right = (best["precision"] * best["links"] + best["recall"] * best["sure"]) / (best["links"] + best["sure"])
    assert best["aer"] == pytest.approx(100 - right)


def test_the_minimum_weight_of_a_link_is_given_or_chosen_on_dev(regard, trained, files):
    scored = []
    for weight in ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7"):
        words = ["--layer", 1, "--rows", "predicting", "--min-weight", weight]
        (line,) = json.loads(regard("evaluate", trained, "--alignment", *words, "--json").out)["lines"]
        assert line["min_weight"] == float(weight)
        scored.append(line)
    links = [line["links"] for line in scored]
    assert links == sorted(links, reverse=True) and links[0] > links[-1]
    words = ["--layer", 1, "--rows", "predicting", "--min-weight", "auto"]
    (chosen,) = json.loads(regard("evaluate", trained, "--alignment", *words, "--json").out)["lines"]
    assert chosen == min(scored, key=lambda line: line["dev_aer"])
    said = regard("evaluate", trained, "--alignment", "--layer", 1, "--min-weight", 0.6).out
    assert "weight >= 0.6" in said and "or with none if that is below the minimum" in said
    assert "Chosen by AER" in regard("evaluate", trained, "--alignment", *words).out.splitlines()[-1]
    assert "give --dev" in regard("evaluate", trained, "--alignment", *files, "--min-weight", "auto").error


def test_gold_files_without_development_files_choose_nothing(regard, trained, files):
    result = regard("evaluate", trained, "--alignment", *files)
    assert result.status == 0, result.err
    assert "best head" not in result.out.split("Without --dev")[0] and "Without --dev nothing is chosen" in result.out
    assert "predicting: a word is aligned by the attention of the position that predicts it" in result.out
    assert "gold.talp: 3 sentences, 9 sure links, 10 sure or possible" in result.out
    assert result.err.count("warning") == 1 and "1 of 11 links out of range" in result.err
    assert regard("evaluate", trained, "--alignment", *files, "--quiet").err == ""


def test_the_best_head_is_chosen_on_the_development_files(regard, trained, files):
    gold, text = files[1], files[3]
    result = regard("evaluate", trained, "--alignment", *files, "--dev", gold, text, text, "--threshold", 0.2)
    assert result.status == 0, result.err
    assert "Chosen by AER on gold.talp (3 sentences): the best head and the rows." in result.out
    assert "at least 0.2 of its attention" in result.out
    scored = ["--dev", gold, text, text, "--rows", "reading", "--layer", 1, "--swapped"]
    result = regard("evaluate", trained, "--alignment", *files, *scored)
    assert result.status == 0, result.err
    assert result.out.splitlines()[1].startswith("chosen ") and "Nothing was chosen" in result.out


def test_the_best_head_on_dev_is_used_even_if_another_is_better_on_test(regard, trained, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    one, other = (tmp_path / f"head-{head + 1}.talp" for head in (0, 1))
    found = dict(_links(trained))
    for head, file in enumerate((one, other)):  # each head's own links as gold
        file.write_text("".join(f"{found[n][head]}\n" for n in range(len(LINES))), encoding="utf-8")
    assert one.read_text() != other.read_text()
    words = ["--source", text, "--reference", text, "--rows", "predicting", "--json"]
    for dev, test, head in ((one, other, 1), (other, one, 2)):
        result = regard("evaluate", trained, "--alignment", "--gold", test, "--dev", dev, text, text, *words)
        best = json.loads(result.out)["lines"][0]
        assert (best["attention"], best["head"], best["dev_aer"]) == ("best head", head, 0)
        assert best["aer"] > 0


def _links(run: Path) -> Iterator[tuple[int, list[str]]]:
    """The links of both heads for each copied line, by the predicting rows, in Pharaoh format."""
    opened = RunDir(run)
    pairs = [(line, line) for line in LINES]
    for n, weights, _ in attended_words(opened.model(), opened.tokenizers, opened.recipe, pairs):
        yield n, [" ".join(f"{i}-{j}" for j, i in np.argwhere(linked(weights[0, 0, head]))) for head in (0, 1)]


def test_explanations_have_their_own_row_and_equal_those_of_regard_explain(regard, trained, files):
    words = [*files, "--explanations", "--masks", 40, "--quiet"]
    table = regard("evaluate", trained, "--alignment", *words)
    assert table.status == 0, table.err
    (line,) = [line for line in table.out.splitlines() if line.startswith("explanations  ")]
    assert "RISE, at most 40 masks" in line and "replaced by the unknown token" in table.out
    found = json.loads(regard("evaluate", trained, "--alignment", *words, "--json").out)["explanations"]
    assert (found["masks"], found["how"]) == (40, "unknown")
    assert [f"{found[name]:.2f}" for name in ("aer", "precision", "recall")] == line.split()[-3:]
    model, links = load(trained, device="cpu"), []
    for text in LINES:
        shares = model.explain(text, target=text, masks=40).shares()[:-1]  # without EOS
        links.append({(i, j) for j, i in np.argwhere(linked(shares)).tolist()})
    gold = read_aligned(*[files[k] for k in (1, 3, 5)])
    assert asdict(score_links(links, [pair.gold for pair in gold])) == pytest.approx(
        {name: found[name] for name in ("aer", "precision", "recall", "links", "sure")}
    )


def test_a_model_without_attention_has_only_explanations(regard, tiny, tmp_path):
    recurrent = ["family=recurrent", "size=tiny", "attention=none", *(f"{w}=8" for w in SIZES)]
    made = ["--out", tmp_path / "run", *(word for part in recurrent for word in ("--set", f"model.{part}"))]
    few = ["--set", "data.count=50", "--set", "training.steps=2", "--quiet"]
    kept = [word for word in tiny if not str(word).startswith("model.") and word != "--set"]
    settings = [word for setting in kept for word in ("--set", setting)]
    assert regard("train", "copy", *settings, *made, *few).status == 0
    assert "does not attend to its source" in regard("evaluate", tmp_path / "run", "--alignment").error
    text, gold = tmp_path / "lines", tmp_path / "gold"
    text.write_text("a b\n"), gold.write_text("0-0 1-1\n")
    files = ["--gold", gold, "--source", text, "--reference", text, "--explanations", "--how", "drop"]
    result = regard("evaluate", tmp_path / "run", "--alignment", *files)
    assert result.status == 0, result.err
    _, line, *rest = result.out.splitlines()
    assert line.startswith("explanations") and "are dropped" in rest[-1] and "heads" not in result.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--alignment", "--rows", "both"], "--rows both: must be one of predicting, reading"),
        (["--alignment", "--head", "1"], "--head needs --layer"),
        (["--alignment", "--layer", "2"], "--layer 2: this model has 1 decoder layer"),
        (["--alignment", "--layer", "1", "--head", "3"], "--head 3: this model has 2 heads"),
        (["--alignment", "--threshold", "0"], "--threshold 0.0: must be above 0"),
        (["--alignment", "--threshold", "nan"], "--threshold nan"),
        (["--alignment", "--min-weight", "some"], "--min-weight some: must be auto, or from 0 to 1"),
        (["--alignment", "--min-weight", "1.5"], "--min-weight 1.5: must be auto"),
        (["--alignment", "--min-weight", "0.2", "--threshold", "0.1"], "either --threshold or --min-weight, not both"),
        (["--min-weight", "auto"], "--min-weight has no effect without --alignment"),
        (["--alignment", "--source", "x"], "--gold and --reference is missing"),
        (["--alignment", "--swapped"], "--dev and --swapped need --gold"),
        (["--alignment", "--split", "valid"], "the head is chosen on these pairs"),
        (["--alignment", "--split", "spilt"], "no split 'spilt'"),
        (["--alignment", "--beam", "2"], "--beam has no effect with --alignment"),
        (["--alignment", "--gold", "x", "--source", "y", "--reference", "z"], "cannot read y"),
        (["--alignment", "--masks", "9"], "--masks has no effect without --explanations"),
        (["--alignment", "--how", "drop"], "--how has no effect without --explanations"),
        (["--explanations"], "--explanations has no effect without --alignment"),
        (["--layer", "1"], "--layer has no effect without --alignment"),
        (["--gold", "x"], "--gold has no effect without --alignment"),
    ],
)
def test_errors_are_one_line(regard, trained, words, expected):
    assert expected in regard("evaluate", trained, *words).error


def test_alignment_needs_a_run_on_pairs_with_gold_alignments(regard, trained, copied):
    assert "needs a RUN" in regard("evaluate", "--alignment").error
    recipe = copied / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace('corpus = "copy"', 'source = "a"\ntarget = "b"'), encoding="utf-8")
    assert "no built-in gold alignments" in regard("evaluate", copied, "--alignment").error
    plain = 'data = {text = "x.txt"}\n[model]\nfamily = "gpt"\nsize = "nano"\n[text]\nunit = "char"\n'
    recipe.write_text(plain, encoding="utf-8")
    assert "trained for language-modelling" in regard("evaluate", copied, "--alignment").error
    shutil.rmtree(copied)
    assert "does not exist" in regard("evaluate", copied, "--alignment").error
