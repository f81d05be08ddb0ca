"""regard align: links of given pairs, scores against built-in gold alignments and gold files, and errors."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest

from regard.api import load
from regard.interpret.alignments import measure
from regard.metrics.alignment import built_in, read_aligned, score_links
from regard.metrics.symmetrise import METHODS, pharaoh
from regard.run_dir import RunDir
from regard.tasks.aligner import Aligner, AttentionView, TwoWayAligner, linked

LINES = ["a b c", "d e", "", "f a b c d"]
SIZES = ("width", "encoder_width", "embedding")


@pytest.fixture
def files(tmp_path: Path) -> list[object]:
    """Files of pairs to copy, and the option that names their gold links."""
    text, gold = tmp_path / "lines.txt", tmp_path / "gold.talp"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    gold.write_text("0-0 1-1 2?2\n0-0 1-1\n\n0-0 1-1 2-2 3-3 4-4 5-5\n", encoding="utf-8")
    return [text, text, "--gold", gold]


def aligner(run: Path) -> Aligner:
    opened = RunDir(run)
    return Aligner(opened.model(), opened.tokenizers, opened.recipe)


PAIRS = [(line, line) for line in LINES]


def test_links_are_written_line_by_line_and_equal_the_library_s(regard, trained, files, tmp_path):
    chosen = TwoWayAligner.choose(aligner(trained), aligner(trained), PAIRS)
    for method in METHODS:
        result = regard("align", trained, *files[:2], "--reverse", trained, "--method", method)
        assert result.status == 0, result.err
        assert result.out.splitlines() == [pharaoh(links) for links in chosen(PAIRS, method)]
    assert result.out.splitlines()[2] == "" and "by which both directions agree best" in result.err
    packed = tmp_path / "lines.xz"
    packed.write_bytes(lzma.compress(files[0].read_bytes()))
    words = ["--layer", 1, "--head", 2, "--quiet", "--output", tmp_path / "links"]
    result = regard("align", trained, packed, files[0], *words)
    assert (result.status, result.out, result.err) == (0, "", "")
    alone = TwoWayAligner(aligner(trained), AttentionView(0, 1, "reading"))
    lines = (tmp_path / "links").read_text().splitlines()
    assert lines == [pharaoh(links) for links in alone(PAIRS, "grow-diagonal-and")]


def test_chunks_and_an_empty_file_have_as_many_lines_as_the_input(regard, trained, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("a b\n\nb c d\n" * 7)
    whole = regard("align", trained, text, text, "--layer", 1).out
    monkeypatch.setattr("regard.cli.inputs.CHUNK_LINES", 4)
    assert regard("align", trained, text, text, "--layer", 1).out == whole and whole.count("\n") == 21
    text.write_text("")
    assert regard("align", trained, text, text).out == ""


def test_the_table_of_a_built_in_corpus_is_that_of_the_views_chosen_on_dev(regard, trained):
    result = regard("align", trained)
    assert result.status == 0, result.err
    head, *lines = result.out.splitlines()
    assert head.split() == ["links", "attention", "rows", "AER", "precision", "recall", "dev", "AER"]
    assert [line.split()[0] for line in lines[:7]] == ["forward", "reverse", *list(METHODS)[:5]]
    assert "copy test: " in lines[7] and "by AER on copy valid" in lines[8]
    entry = json.loads(regard("align", trained, "--json").out)
    assert (entry["pairs"], entry["chosen_on"]) == ("copy test", "copy valid")
    forward = entry["lines"][0]
    scores = measure(aligner(trained), built_in("copy", "valid")).scores
    best = min(scores, key=lambda view: scores[view].aer)
    head = None if best.head is None else best.head + 1
    assert (forward["layer"], forward["head"], forward["rows"]) == (
        (best.layer and best.layer + 1) or 1,
        head,
        best.rows,
    )
    assert forward["dev_aer"] == pytest.approx(scores[best].aer)
    test = measure(aligner(trained), built_in("copy", "test")).scores[best]
    assert forward["score"]["aer"] == pytest.approx(test.aer)


def test_scores_of_gold_files_are_those_of_the_links_written(regard, trained, files, tmp_path):
    table = json.loads(regard("align", trained, *files, "--reverse", trained, "--json", "--quiet").out)
    gold = [pair.gold for pair in read_aligned(files[3], *files[:2])]
    for line in table["lines"]:
        written = regard("align", trained, *files[:2], "--reverse", trained, "--method", line["links"]).out
        links = [{tuple(map(int, word.split("-"))) for word in text.split()} for text in written.splitlines()]
        assert line["score"]["aer"] == pytest.approx(score_links(links, gold).aer)
    result = regard("align", trained, *files, "--dev", files[3], *files[:2])
    assert result.status == 0, result.err
    assert (
        "gold.talp: 4 sentences, 9 sure links, 10 sure or possible" in result.out and "AER on gold.talp" in result.out
    )
    assert "1 of 11 links out of range" in result.err
    assert "by the agreement of both directions" in regard("align", trained, *files, "--swapped", "--layer", 1).out


def test_explanations_have_their_own_row_and_equal_those_of_regard_explain(regard, trained, files):
    found = json.loads(regard("align", trained, *files, "--explanations", 40, "--quiet", "--json").out)["lines"][-1]
    assert found["links"] == "explanations"
    model, links = load(trained, device="cpu"), []
    for text in LINES:
        shares = model.explain(text, target=text, masks=40).shares()[:-1] if text else np.zeros((0, 0))  # without EOS
        links.append({(i, j) for j, i in np.argwhere(linked(shares)).tolist()})
    gold = [pair.gold for pair in read_aligned(files[3], *files[:2])]
    assert found["score"]["aer"] == pytest.approx(score_links(links, gold).aer)


def test_a_model_without_attention_has_only_explanations(regard, tiny, tmp_path):
    recurrent = ["family=recurrent", "size=tiny", "attention=none", *(f"{w}=8" for w in SIZES)]
    made = ["--out", tmp_path / "run", *(word for part in recurrent for word in ("--set", f"model.{part}"))]
    few = ["--set", "data.count=50", "--set", "training.steps=2", "--quiet"]
    kept = [word for word in tiny if not str(word).startswith("model.") and word != "--set"]
    settings = [word for setting in kept for word in ("--set", setting)]
    assert regard("train", "copy", *settings, *made, *few).status == 0
    text, gold = tmp_path / "lines", tmp_path / "gold"
    text.write_text("a b\n"), gold.write_text("0-0 1-1\n")
    assert "does not attend to its source" in regard("align", tmp_path / "run", text, text).error
    result = regard("align", tmp_path / "run", text, text, "--gold", gold, "--explanations", 40)
    assert result.status == 0, result.err
    assert result.out.splitlines()[1].startswith("explanations") and "forward" not in result.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--head", "1"], "--head needs --layer"),
        (["TEXT", "TEXT", "--layer", "2"], "--layer 2: this model has 1 decoder layer"),
        (["TEXT", "TEXT", "--layer", "1", "--head", "3"], "--head 3: this model has 2 heads"),
        (["--method", "best"], "--method best: must be one of intersection"),
        (["TEXT"], "TARGET is missing"),
        (["TEXT", "TEXT", "--dev", "a", "b", "c"], "--dev has no effect without --gold"),
        (["TEXT", "TEXT", "--json"], "--json has no effect without --gold"),
        (["--gold", "x"], "regard align RUN SOURCE TARGET --gold FILE"),
        (["--output", "x"], "--output has no effect with gold links"),
        (["none", "none"], "cannot read none"),
        (["TEXT", "TEXT", "--gold", "none"], "cannot read none"),
        (["TEXT", "SHORT"], "not line-aligned: "),
        (["TEXT", "TEXT", "--reverse", "none"], "none"),
    ],
)
def test_errors_are_one_line(regard, trained, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEXT").write_text("a b\nb\n"), (tmp_path / "SHORT").write_text("a b\n")
    assert expected in regard("align", trained, *words).error


def test_it_needs_a_run_on_pairs(regard, copied):
    recipe = copied / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace('corpus = "copy"', 'source = "a"\ntarget = "b"'), encoding="utf-8")
    assert "no built-in gold alignments" in regard("align", copied).error
    plain = 'data = {text = "x.txt"}\n[model]\nfamily = "gpt"\nsize = "nano"\n[text]\nunit = "char"\n'
    recipe.write_text(plain, encoding="utf-8")
    assert "trained for language-modelling" in regard("align", copied).error
    shutil.rmtree(copied)
    assert "does not exist" in regard("align", copied).error
