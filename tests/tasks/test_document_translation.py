"""Whole texts are translated sentence by sentence, and their tags follow the alignment."""

from __future__ import annotations

from pathlib import Path

import pytest
from lxml import etree

import regard
from regard.cli import run as run_command
from regard.tasks.documents import translate_documents
from tiny_runs import make_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> regard.Model:
    return regard.Model(make_run(tmp_path_factory.mktemp("runs") / "tiny", "transformer"), "cpu")


def test_a_text_is_the_translations_of_its_sentences(model: regard.Model) -> None:
    text = "this cat is large\n\n  the dog sees \tthe house  "
    (found,) = translate_documents(model.translator(), model.word_links, [text], aligned=True, nbest=2)
    lines = [t.text for t in model.translate(["this cat is large", "the dog sees \tthe house"], nbest=2)]
    assert found.texts[0] == f"{lines[0]}\n\n  {lines[1]}  " and len(found.texts) == 2
    words = found.words(model.translator(), None)
    assert [word for word, _ in words] == " ".join(lines).split() and len(found.source_words) == 9
    for i, j in found.alignment():
        assert (i < 4) == (j < len(lines[0].split()))  # links stay inside their sentences
    assert found.scores[0] == pytest.approx(sum(t.score for t in model.translate(lines_of(text), nbest=2)))


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def test_lines_of_html_stay_well_formed(model: regard.Model, capsys: pytest.CaptureFixture[str]) -> None:
    line = 'this <b n="1">cat <i>is</i></b> very <a href="?a&amp;b">large</a>'
    assert run_command(["translate", str(model.run.path), "--markup", "-q", line, ""], debug=False) == 0
    first, second = capsys.readouterr().out.splitlines()
    root = etree.fromstring(f"<r>{first}</r>")
    assert sorted(e.tag for e in root.iter()) == ["a", "b", "i", "r"] and second == ""
    assert "".join(root.itertext()).split() == model.translate("this cat is very large").text.split()
    assert run_command(["translate", str(model.run.path), "--markup", "--nbest", "2", line], debug=False) == 2


def test_a_glossary_and_a_prefix_apply_to_documents(model: regard.Model, tmp_path: Path) -> None:
    translator = model.translator(glossary={"cat": "gata"})
    (found,) = translate_documents(
        translator, model.word_links, ["<p>a cat</p><p>a cat</p>"], format="html", prefix="la"
    )
    assert found.texts[0].startswith("<p>la") and found.texts[0].count("gata") == 2
    assert translate_documents(translator, model.word_links, ["", "<br>"], format="html")[1].texts == ("<br>",)
