"""A glossary's terms are found in the source, and their translations appear as whole words in the output."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.cli import run as run_command
from regard.data.builtin import pairs
from regard.decoding.terms import INNER, LEFT, RIGHT
from regard.errors import UserError
from regard.tasks.glossary import Glossary, GlossaryEntry, Requirement, TermIndex, term, token_classes
from regard.text import train
from tiny_runs import make_run


def required(glossary: dict, sentence: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(r.source, r.forms) for r in Glossary.of(glossary).requirements(sentence)]


# --- where terms occur ----------------------------------------------------------------------------------------------


def test_terms_are_whole_words_in_any_case_unless_they_have_capitals() -> None:
    assert required({"cat": "gato"}, "a cat, cats and a concat") == [("cat", ("gato",))]
    assert required({"cat": "gato"}, "the CAT sat") == [("CAT", ("gato", "Gato"))]
    assert required({"US": "EE. UU."}, "give us the US dollar") == [("US", ("EE. UU.",))]
    assert required({"cat": "gato"}, "Cat food") == [("Cat", ("gato", "Gato"))]
    assert required({"credit  card": "tarjeta"}, "a credit \t card") == [("credit \t card", ("tarjeta",))]
    assert required({"c++": "C++"}, "in c++, not c") == [("c++", ("C++",))]


def test_the_longest_of_overlapping_terms_counts() -> None:
    terms = {"card": "carta", "credit card": "tarjeta"}
    assert required(terms, "a credit card") == [("credit card", ("tarjeta",))]
    assert required(terms, "a card and a credit card") == [("card", ("carta",)), ("credit card", ("tarjeta",))]


def test_finding_terms_takes_hardly_longer_with_thousands_of_them() -> None:
    sentence = " ".join(f"word{n}" for n in range(0, 60, 3))

    def seconds(count: int) -> float:
        glossary = Glossary.of({f"word{n} word{n + 3}": "x" for n in range(count)})
        assert len(glossary.requirements(sentence)) == 10
        begin = time.thread_time()  # which other processes do not lengthen
        for _ in range(20):
            glossary.requirements(sentence)
        return time.thread_time() - begin

    few = min(seconds(100) for _ in range(3))
    assert min(seconds(10_000) for _ in range(3)) < 5 * few


def test_positions_are_those_of_the_sentence_whatever_its_white_space_and_case() -> None:
    sentence = " \u3000The\tİSTANBUL  straße, STRASSE ẞ"
    found = [(term, sentence[a:b]) for term, a, b in TermIndex(["the", "straße", "ß", "Straße"]).find(sentence)]
    assert found == [("the", "The"), ("straße", "straße"), ("ß", "ẞ")]
    assert [sentence[a:b] for _, a, b in TermIndex(["The İSTANBUL"]).find(sentence)] == ["The\tİSTANBUL"]


def test_scripts_without_spaces_need_no_word_boundaries() -> None:
    assert required({"猫": "cat"}, "那只猫很大") == [("猫", ("cat",))]
    assert Requirement("cat", ("猫",)).is_met("那只猫很大")
    assert not Requirement("gato", ("cat",)).is_met("concat") and Requirement("x", ("cat",)).is_met("a猫cat猫")


def test_forms_with_an_exclamation_mark_are_avoided() -> None:
    glossary = Glossary.of({"bank": ["banco", "!orilla"], "": "!usted"})
    everywhere, bank, shore = glossary.requirements("the bank")
    assert (everywhere.avoid, everywhere.forms) == (True, ("usted", "Usted"))
    assert (bank.avoid, bank.forms) == (False, ("banco",)) and (shore.avoid, shore.source) == (True, "bank")
    assert shore.is_met("el banco") and not shore.is_met("la orilla") and shore.is_met("las orillas")
    assert [r.forms for r in glossary.requirements("nothing")] == [("usted", "Usted")]


def test_a_file_has_an_entry_per_line_and_names_the_line_of_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_text("# animals\n\ncat\tgato\tgata\nbank\tbanco\t!orilla\n", encoding="utf-8")
    assert Glossary.read(path).entries == (
        GlossaryEntry("cat", ("gato", "gata")),
        GlossaryEntry("bank", ("banco",), ("orilla",)),
    )
    for line, why in (("cat", "no translation"), ("cat\t ", "no translation"), ("\tgato", "translation of no term")):
        path.write_text("dog\tperro\n" + line + "\n", encoding="utf-8")
        with pytest.raises(UserError, match=f"line 2: .*{why}"):
            Glossary.read(path)
    with pytest.raises(UserError, match="No such file"):
        Glossary.read(tmp_path / "nowhere")
    for wrong in ([("cat", "gato")], 3, {"cat": 3}, {"cat": [3]}, {"cat": []}):
        with pytest.raises((UserError, TypeError)):
            Glossary.of(wrong)  # type: ignore[arg-type]


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_a_form_has_a_pattern_for_the_beginning_and_one_after_a_space() -> None:
    tokenizer = train(["el gato negro"] * 3, "char", 300)
    found = term(Requirement("cat", ("sí",)), tokenizer)
    assert found is not None
    s, i, space = (tokenizer.encode(c) for c in ("s", "í", " "))
    assert found.alternatives == ((LEFT, *s, *i, RIGHT), (INNER, *space, *s, *i, RIGHT))
    words = train(["el gato"], "word", 300)
    found = term(Requirement("cat", ("gato", "unknown")), words)
    assert found is not None and found.alternatives == ((*words.encode("gato"), RIGHT),)
    assert term(Requirement("cat", ("unknown",)), words) is None


def test_token_classes_tell_where_words_begin_and_end() -> None:
    tokenizer = train(["the cat's é 猫"], "char", 300, ["<2de>"])
    classes = token_classes(tokenizer)
    left, inner, right = ({i for i, member in enumerate(c.tolist()) if member} for c in classes)
    ids = {c: tokenizer.encode(c)[0] for c in "a' .é猫"}
    assert {ids["a"], ids["é"]} & (left | right) == set() and {ids[" "], ids["."], ids["'"], ids["猫"]} <= left & right
    assert set(range(tokenizer.first)) <= left & right and not set(range(tokenizer.first)) & inner
    assert tokenizer.first + 0xE7 not in left | right  # part of a character


# --- translations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> regard.Model:
    return regard.Model(make_run(tmp_path_factory.mktemp("runs") / "tiny", "transformer"), "cpu")


SPANISH = sorted({word for pair in pairs("en-es", "valid", 200) for word in pair.target.split() if word.isalpha()})
TARGETS = st.lists(st.sampled_from(SPANISH), min_size=1, max_size=2).map(" ".join)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.lists(TARGETS, min_size=1, max_size=2), min_size=1, max_size=2), st.sampled_from([1, 3]))
def test_terms_appear_as_whole_words_even_with_random_weights(model: regard.Model, forms: list, beam: int) -> None:
    glossary = dict(zip(["cat", "large"], forms, strict=False))
    translation = model.translate("this cat is very large", glossary=glossary, beam=beam)
    assert translation.unmet == ()
    for options in glossary.values():
        assert any(form in " ".join(translation.text.split()) for form in options)


def test_sentences_without_terms_are_translated_as_ever(model: regard.Model) -> None:
    texts = ["this cat is very large", "the dog sees the house", "", "a cat"]
    plain = model.translate(texts)
    with_terms = model.translate(texts, glossary={"cat": "gata"})
    assert [t.text for t in with_terms[1:3]] == [t.text for t in plain[1:3]]
    assert with_terms[0].text == model.translate(texts[0], glossary={"cat": "gata"}).text != plain[0].text
    assert with_terms[0].as_dict()["unmet"] == []


def test_what_cannot_be_met_is_said(model: regard.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    glossary = tmp_path / "terms.tsv"
    glossary.write_text("cat\t" + " ".join(["gato"] * 60) + "\n", encoding="utf-8")  # longer than the model writes
    command = ["translate", str(model.run.path), "--glossary", str(glossary), "--format", "jsonl", "a cat"]
    assert run_command(command, debug=False) == 0
    printed = capsys.readouterr()
    assert "is not translated as" in json.loads(printed.out)["unmet"][0]
    assert "warning: line 1: 'cat' is not translated as" in printed.err
    (unmet,) = model.translate("a cat", glossary=glossary).unmet
    assert unmet.source == "cat"
    assert run_command([*command, "--sample"], debug=False) == 2
    assert "--glossary has no effect with --sample" in capsys.readouterr().err


def test_avoided_words_do_not_appear(model: regard.Model) -> None:
    text = "this cat is very large"
    word = next(word for word in model.translate(text).text.split() if word.isalpha())
    translation = model.translate(text, glossary={"": f"!{word}"})
    assert word not in translation.text.split() and translation.unmet == ()
