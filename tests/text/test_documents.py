"""Texts are put together again as they were, and what is well-formed stays well-formed."""

from __future__ import annotations

import os
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from regard import cancel
from regard.text import documents
from regard.text.documents import prepare, sentence_spans
from regard.text.markup import MarkedText, Span, transfer

needs_splitter = pytest.mark.skipif(
    documents.segment is None and os.environ.get("CI") != "true", reason="needs the extra serve (sentencex)"
)


def diagonal(text: str) -> list[tuple[int, int]]:
    return [(n, n) for n in range(len(text.split()))]


def identity(text: str, format: str = "text", language: str | None = "en") -> str:
    document = prepare(text, format, language)  # type: ignore[arg-type]
    return document.assemble(document.sentences, [diagonal(sentence) for sentence in document.sentences])


# --- plain text -----------------------------------------------------------------------------------------------------


@needs_splitter
def test_sentences_are_found_and_the_space_between_them_stays() -> None:
    text = "  Good morning, Mr. Smith.  How are you?\n\n\tFine.\r\n"
    document = prepare(text, language="en")
    assert document.sentences == ["Good morning, Mr. Smith.", "How are you?", "Fine."]
    assert document.assemble(["A.", "B?", "C."]) == "  A.  B?\n\n\tC.\r\n"
    assert prepare("Eins. Zwei.").sentences == ["Eins. Zwei."]  # without a language, a line
    assert sentence_spans("", "en") == [] and prepare("", language="en").assemble([]) == ""


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("aB .?!\n\r\t。 é{}%s\u2028\x0b'\"1"), max_size=60),
    st.sampled_from(["en", "ja", "xx", None]),
)
def test_identity_translation_gives_the_identical_text(text: str, language: str | None) -> None:
    without = re.sub(r"[{}%]", "", text)  # placeholders move with the words beside them
    assert identity(without, language=language) == without
    document = prepare(text, language=language)
    again = document.assemble(document.sentences, [diagonal(s) for s in document.sentences])
    assert sorted(again.replace(" ", "")) == sorted(text.replace(" ", ""))


def test_placeholders_are_not_translated_and_go_with_their_neighbours() -> None:
    document = prepare("Hello {name}, you have %d new messages.")
    assert document.sentences == ["Hello , you have new messages."]
    for text in ("You have %d files.", "Hello {name}, bye", "%d files", "files: %d", "a {x} {y} b", "{}"):
        assert identity(text) == text
    (sentence,) = prepare("{name} has %d cats").marked
    assert transfer(sentence, "gatos tiene", [(0, 1), (1, 0)], escape=False) == "%d gatos {name} tiene"


def test_a_wrong_number_of_translations_is_refused() -> None:
    with pytest.raises((ValueError, StopIteration)):
        prepare("a\nb").assemble(["x", "y", "z"])


# --- tags -----------------------------------------------------------------------------------------------------------


def test_an_element_goes_to_the_words_aligned_with_its_own() -> None:
    source = prepare("the <b>black cat</b> sees <i>Ann</i>", "html").marked[0]
    assert source.text == "the black cat sees Ann"
    links = [(0, 0), (1, 2), (2, 1), (3, 3), (4, 5)]
    assert transfer(source, "el gato negro ve a Ana", links) == "el <b>gato negro</b> ve a <i>Ana</i>"
    # an outlier does not stretch the element: "ve" is aligned with another word
    assert transfer(source, "negro ve el gato", [(1, 0), (3, 1), (0, 2), (2, 3)]).count("<b>") == 1


def test_nested_elements_stay_nested_and_punctuation_outside() -> None:
    source = prepare('see <a href="x">the <b>red</b> car</a>, please', "html").marked[0]
    links = [(0, 0), (1, 1), (2, 3), (3, 2), (4, 4)]
    assert transfer(source, "mira el coche rojo, anda", links) == 'mira <a href="x">el coche <b>rojo</b></a>, anda'


def test_blocks_scripts_comments_and_entities() -> None:
    text = "<p>One &amp; two<br>three</p><script>if (a < b) c('&amp;')</script><!-- x --><p>&lt;four&gt;</p>"
    document = prepare(text, "html")
    assert document.sentences == ["One & two", "three", "<four>"]
    assert identity(text, "html") == text
    assert identity("<P CLASS=x>a <B>b</B></P>", "html") == "<P CLASS=x>a <B>b</B></P>"
    assert identity("<a id=1></a>word<b> </b>", "html").startswith("<a id=1></a>word")


def test_text_areas_and_titles_have_no_tags_inside() -> None:
    text = "<p>One</p><textarea rows=2>a <b>x</b> {y} &amp; <i>c</textarea><p>two</p>"
    assert prepare(text, "html").sentences == ["One", "two"]
    assert identity(text, "html") == text
    document = prepare("<title>Cats &amp; <b>dogs</title><p>a <b>c</b></p>", "html")
    assert document.sentences == ["Cats & <b>dogs", "a c"]
    assert identity("<title>Cats &amp; &lt;b></title>", "html") == "<title>Cats &amp; &lt;b&gt;</title>"


def test_tags_without_a_partner_stay_where_they_are() -> None:
    for text in ("a <b>b c", "a</b> b", "<a>x<div>y</div>z</a>", "<b>a <i>b</b> c</i>", "<b><i>x<p>y</p></i></b>"):
        assert identity(text, "html") == text


INLINE_TAGS = ["b", "i", "em", "span", "a"]


def random_markup(draw: random.Random, words: list[str], depth: int = 0) -> str:
    """Words with random well-formed inline tags, void tags, comments and placeholders."""
    parts, n = [], 0
    while n < len(words):
        size = draw.randint(1, 3)
        chunk = words[n : n + size]
        n += size
        if depth < 3 and draw.random() < 0.4:
            tag = draw.choice(INLINE_TAGS)
            inner = random_markup(draw, chunk, depth + 1)
            parts.append(f'<{tag} n="{draw.randint(0, 99)}">{inner}</{tag}>')
        else:
            parts.append(" ".join(chunk))
        if draw.random() < 0.15:
            parts.append(draw.choice(["<br/>", "<img src='x'/>", "<!-- c -->", "{name}", "<i></i>", "<b> <u/></b>"]))
    return draw.choice(["", " "]).join(parts) if draw.random() < 0.2 else " ".join(parts)


def tags_of(root: etree._Element) -> list[str]:
    return sorted(f"{e.tag} {sorted(e.attrib.items())}" for e in root.iter() if isinstance(e.tag, str))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_well_formed_in_well_formed_out_whatever_the_alignment(seed: int) -> None:
    draw = random.Random(seed)
    words = [draw.choice(["cat", "a,", "(b", "&amp;", "dog.", "X?", "...", "é"]) for _ in range(draw.randint(0, 12))]
    source = "<p>" + random_markup(draw, words) + "</p>"
    before = etree.fromstring(f"<r>{source}</r>")
    document = prepare(source, "html", draw.choice(["en", None]))
    choices = [draw.choice(["x", "<y", "z&", "«w»,"]) for _ in range(8)]
    targets = [" ".join(choices[: draw.randint(0, 8)]) for _ in document.sentences]
    links = [
        [(draw.randint(-1, 12), draw.randint(-1, 9)) for _ in range(draw.randint(0, 14))] for _ in document.sentences
    ]
    after = etree.fromstring(f"<r>{document.assemble(targets, links)}</r>")
    assert tags_of(after) == tags_of(before)  # every element once
    texts = "".join("".join(after.itertext()).split())
    assert sorted(texts.replace("{name}", "")) == sorted("".join("".join(targets).split()))


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("<>/abip &;!-'\"= {}[]?\ud800"), max_size=40))
def test_any_text_is_taken_apart_and_put_together(text: str) -> None:
    identity(text, "html")


def test_tags_nested_deeply_stay_where_they_are() -> None:
    for inside in ("a", "One cat. <i>Two</i> dogs."):
        text = "<b>" * 1500 + inside + "</b>" * 1500
        assert identity(text, "html") == text
    document = prepare("x <b>" * 250 + "y" + " z</b>" * 250, "html", "en")
    etree.fromstring(f"<p>{document.assemble(document.sentences)}</p>")


def test_many_sentences_with_tags_take_little_time_and_can_be_cancelled() -> None:
    text = "A cat sat. <b>Dog</b> ran. " * 300
    begun = time.thread_time()  # which other processes do not lengthen
    assert identity(text, "html") == text
    assert time.thread_time() - begun < 3
    with cancel.cancellable(lambda: True), pytest.raises(cancel.Cancelled):
        prepare(text, "html", "en")


def test_doctest_of_transfer() -> None:
    bold = MarkedText("a black cat", (Span("<b>", "</b>", 2, 7),))
    assert transfer(bold, "un gato negro", [(0, 0), (1, 2), (2, 1)]) == "un gato <b>negro</b>"
    assert transfer(bold, "", []) == "<b></b>"
