"""Word and character error rates."""

from __future__ import annotations

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.metrics.error_rates import Edits, ErrorRates, edits

texts = st.lists(st.sampled_from(["one", "two", "six", "a"]), max_size=6).map(" ".join)


@given(st.lists(st.tuples(texts.filter(bool), texts), min_size=1, max_size=4))
def test_rates_are_those_of_jiwer(pairs: list[tuple[str, str]]) -> None:
    references, outputs = map(list, zip(*pairs, strict=True))
    rates = ErrorRates.of(outputs, references)
    assert rates.wer == pytest.approx(100 * jiwer.wer(references, outputs))
    assert rates.cer == pytest.approx(100 * jiwer.cer(references, outputs))


@given(texts, texts)
def test_edits_turn_the_reference_into_the_output(reference: str, output: str) -> None:
    found = edits(reference.split(), output.split())
    assert len(reference.split()) - found.deletions + found.insertions == len(output.split())
    other = edits(output.split(), reference.split())  # the other way round, insertions are deletions
    assert (other.substitutions, other.deletions, other.insertions) == (
        found.substitutions,
        found.insertions,
        found.deletions,
    )


def test_edits_by_hand() -> None:
    assert edits("kitten", "sitting") == Edits(substitutions=2, deletions=0, insertions=1, length=6)
    assert edits("", "abc") == Edits(insertions=3) and edits("abc", "") == Edits(deletions=3, length=3)
    assert edits("abcd", "bcd") == Edits(deletions=1, length=4)
    assert ErrorRates.of([""], [""]).wer == 0 and ErrorRates.of(["a b c"], ["x"]).wer == 300
