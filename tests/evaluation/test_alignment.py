"""Alignment error rate computed by hand and compared with published scores; reading gold links."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from regard.data.builtin import pairs
from regard.errors import UserError
from regard.metrics.alignment import Aligned, AlignmentScore, Gold, built_in, read_aligned, read_links, score_links

GOLD_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "alignments"
needs_real = pytest.mark.skipif(not GOLD_FOLDER.is_dir(), reason="the real gold alignments are not here")


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


# -- the figures ------------------------------------------------------------------------------------------------------


def test_scores_follow_the_definition():
    # S = {00}, P = {00, 11}, A = {00, 11, 22}: |A∩S| = 1, |A∩P| = 2, so 1 - (1 + 2) / (3 + 1)
    score = score_links([[(0, 0), (1, 1), (2, 2)]], [Gold.of([(0, 0)], [(1, 1)])])
    assert (score.links, score.sure) == (3, 1)
    assert (score.aer, score.precision, score.recall) == pytest.approx((25.0, 200 / 3, 100.0))
    # S = {00, 11, 12}, P = S, A = {00, 21}: 1 - (1 + 1) / (2 + 3)
    score = score_links([[(0, 0), (2, 1)]], [Gold.of([(0, 0), (1, 1), (1, 2)])])
    assert (score.aer, score.precision, score.recall) == pytest.approx((60.0, 50.0, 100 / 3))


def test_any_links_between_sure_and_possible_are_perfect():
    gold = Gold.of([(0, 0), (2, 1)], [(1, 1), (3, 1)])
    for found in (gold.sure, gold.possible, gold.sure | {(3, 1)}):
        assert score_links([found], [gold]).aer == 0
    assert score_links([gold.sure], [gold]) == AlignmentScore(0.0, 100.0, 100.0, 2, 2)
    assert score_links([{(5, 5)}], [gold]).aer == 100


def test_links_are_counted_over_the_corpus():
    gold = [Gold.of([(0, 0)]), Gold.of([(0, 0), (1, 1), (2, 2)])]
    score = score_links([[(0, 1)], [(0, 0), (1, 1), (2, 2)]], gold)
    assert score.aer == pytest.approx(25.0)  # the mean over sentences would be 50
    assert score_links([[(0, 0), (0, 0)], [(1, 1)]], gold).links == 2  # duplicates count once


def test_empty_links_count_as_correct():
    assert score_links([[]], [Gold()]) == AlignmentScore(0.0, 100.0, 100.0, 0, 0)
    empty = score_links([[]], [Gold.of([(0, 0)])])
    assert (empty.aer, empty.precision, empty.recall) == (100.0, 100.0, 0.0)
    with pytest.raises(UserError, match="links of 1 sentences for gold links of 2"):
        score_links([[]], [Gold(), Gold()])


# -- reading ----------------------------------------------------------------------------------------------------------


def test_pharaoh_links_count_from_0_and_possible_links_have_several_spellings(tmp_path):
    file = written(tmp_path, "gold.talp", "0-0 1?2 2p3 4-5? 6-7-P 7-8:P 8-9P 9-9-S \r\n\r\n3-1\n")
    first, second, third = read_links(file)
    assert first.sure == {(0, 0), (9, 9)}
    assert first.possible - first.sure == {(1, 2), (2, 3), (4, 5), (6, 7), (7, 8), (8, 9)}
    assert second == Gold() and third == Gold.of([(3, 1)])


def test_pharaoh_files_may_start_with_sentences_without_links(tmp_path):
    assert read_links(written(tmp_path, "gold", "\n\n0-1\n"), 3) == [Gold(), Gold(), Gold.of([(0, 1)])]


def test_naacl_links_count_from_1_and_word_0_is_unaligned(tmp_path):
    file = written(tmp_path, "gold.wa", "0001 1 1 S\n0001 2 1 P\n3 1 2\n3 2 2 s 0.9\n3 0 2 S\n")
    gold = [Gold.of([(0, 0)], [(1, 0)]), Gold(), Gold.of([(0, 1), (1, 1)])]
    assert read_links(file) == gold
    assert read_links(file, 4) == [*gold, Gold()]


def test_swapped_positions(tmp_path):
    assert read_links(written(tmp_path, "gold", "0-1 2?3\n"), swapped=True) == [Gold.of([(1, 0)], [(3, 2)])]


def test_a_byte_order_mark_is_dropped(tmp_path):
    gold = written(tmp_path, "gold", "\ufeff0-0\n")
    source, target = written(tmp_path, "source", "\ufeffein wort\n"), written(tmp_path, "target", "a word\n")
    assert read_aligned(gold, source, target) == [Aligned("ein wort", "a word", Gold.of([(0, 0)]))]


def test_links_are_read_from_compressed_files_too(tmp_path):
    file = tmp_path / "gold.xz"
    file.write_bytes(lzma.compress(b"1-1\n"))
    assert read_links(file) == [Gold.of([(1, 1)])]


def test_links_out_of_range_are_dropped_with_a_warning_but_many_are_an_error(tmp_path):
    source = written(tmp_path, "source", "a b c d\n" * 6)
    target = written(tmp_path, "target", "e f g h\n" * 6)
    gold = written(tmp_path, "gold", "0-0 1-1\n" * 5 + "0-0 3-3 2-4\n")
    warnings: list[str] = []
    pairs = read_aligned(gold, source, target, warn=warnings.append)
    assert pairs[5].gold == Gold.of([(0, 0), (3, 3)])
    (line,) = warnings
    assert "1 of 13 links out of range" in line and "sentence 6 links word 3 of 4 with word 5 of 4" in line
    shorter = written(tmp_path, "shorter", "e\n" * 6)
    with pytest.raises(UserError, match="source and target swapped"):
        read_aligned(gold, source, shorter)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no links"),
        ("0-0\n", "links of 1 sentences, but there are 2"),
        ("0-0\n1:1\n", "line 2: expected links such as 0-0 1-2, found '1:1'"),
        ("0-0\n1-x\n", "found '1-x'"),
        ("0-0\n٣-٣\n", "line 2"),
        ("1 1 1 S\n1 1-1\n", "line 2: expected sentence, two positions"),
        ("1 1 1 S\n3 1 1 S\n", "line 2: there is no sentence 3"),
        ("0 1 1 S\n", "there is no sentence 0"),
    ],
)
def test_invalid_links_are_an_error_with_the_line(tmp_path, text, complaint):
    with pytest.raises(UserError) as caught:
        read_links(written(tmp_path, "gold", text), 2)
    assert complaint in str(caught.value) and "gold" in str(caught.value)


def test_files_that_are_not_line_aligned_are_an_error(tmp_path):
    one, two = written(tmp_path, "one", "a\n"), written(tmp_path, "two", "a\nb\n")
    with pytest.raises(UserError, match="not line-aligned"):
        read_aligned(written(tmp_path, "gold", "0-0\n"), one, two)


# -- built-in and real gold -------------------------------------------------------------------------------------------


def test_built_in_gold_links_are_the_grammars():
    first, pair = built_in("en-es", "test")[0], next(pairs("en-es", "test"))
    assert (first.source, first.target) == (pair.source, pair.target)
    assert first.gold.sure == first.gold.possible == frozenset(pair.alignment)
    with pytest.raises(UserError, match="no alignments"):
        built_in("moods", "test")


@needs_real
@pytest.mark.parametrize(
    ("aligner", "aer"),
    [
        ("fastalign", 16.4),
        ("fastalign.grow-diagonal", 10.5),
        ("fastalign.grow-diagonal-final", 12.1),
        ("giza", 8.0),
        ("giza.grow-diagonal", 5.9),
        ("giza.grow-diagonal-final", 6.2),
    ],
)
def test_published_error_rates_of_two_classic_aligners_on_hansards(aligner, aer):
    folder, warnings = GOLD_FOLDER / "hansards-en-fr", []
    files = (folder / name for name in ("test.wa.nonullalign.xz", "test.e.xz", "test.f.xz"))
    gold = [pair.gold for pair in read_aligned(*files, warn=warnings.append)]
    assert warnings == []
    assert (sum(len(g.sure) for g in gold), sum(len(g.possible) for g in gold)) == (4038, 17438)
    found = [links.sure for links in read_links(folder / f"enfr.{aligner}.talp.xz", len(gold))]
    assert round(score_links(found, gold).aer, 1) == aer


@needs_real
def test_a_link_out_of_range_and_a_byte_order_mark_in_a_real_file():
    folder, warnings = GOLD_FOLDER / "europarl-de-en", []
    pairs = read_aligned(folder / "de-en.wa", folder / "test.de", folder / "test.en", warn=warnings.append)
    assert len(pairs) == 100 and pairs[0].source.startswith("herr ")
    assert sum(len(pair.gold.sure) for pair in pairs) == 1232
    assert len(warnings) == 1 and "1 of 1,233 links out of range" in warnings[0]
