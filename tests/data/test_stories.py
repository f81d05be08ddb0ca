"""The built-in stories: the same everywhere, consistent within themselves; and moods, which one has to read to tell."""

import re
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from regard.data.builtin import pairs, splits
from regard.data.builtin import story_words as words
from regard.data.builtin.stories import MOODS, stories

PRONOUNS = {"she": {"she", "her", "herself"}, "he": {"he", "him", "his", "himself"}}
GENDER = {name: gender for gender, names in words.NAMES.items() for name in names.split()}


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def texts(split: str, count: int | None = None) -> list[str]:
    return [pair.target for pair in pairs("stories", split, count)]


@pytest.fixture(scope="module")
def some() -> list[str]:
    return texts("train", 2000)


@pytest.fixture(scope="module")
def found() -> list[tuple[set[str], str]]:
    """The words of each story, and its mood."""
    return [(set(words_of(pair.source.lower())), pair.target) for pair in pairs("moods", "train", 2000)]


def test_the_same_seed_gives_the_same_stories_in_every_process() -> None:
    program = "from regard.data.builtin import pairs; print([p.target for p in pairs('stories', 'train', 50)])"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert other.stdout == f"{texts('train', 50)}\n"
    assert [p.target for p in pairs("stories", "train", 50, seed=1)] != texts("train", 50)


def test_a_document_is_a_pair_without_a_source_on_one_line() -> None:
    assert splits("stories") == splits("moods") == ("train", "valid", "test")
    for pair in pairs("stories", "valid", 100):
        assert pair.source == "" and pair.alignment == () and "\n" not in pair.target


def test_no_story_is_in_two_splits_nor_among_the_moods() -> None:
    """Told apart by all but the feeling: a test story never differs from a training story in its ending alone."""
    events = {
        (corpus, split): {story.events for story in islice(stories(corpus, split), count)}
        for corpus in ("stories", "moods")
        for split, count in (("train", 1000), ("valid", 200), ("test", 200))
    }
    everything = Counter(text for part in events.values() for text in part)
    assert max(everything.values()) == 1


def test_stories_hardly_ever_come_twice(some: list[str]) -> None:
    assert len(set(some)) == len(some)


def test_there_are_more_than_300_words(some: list[str]) -> None:
    assert len({word.lower() for text in some for word in words_of(text)}) > 300


def test_stories_have_five_to_eight_sentences(some: list[str]) -> None:
    counts = Counter(len(re.findall(r"[.!](?= [A-Z\"]|$)", text)) for text in some)
    assert set(counts) == {5, 6, 7, 8}


def test_a_third_begins_with_once_upon_a_time(some: list[str]) -> None:
    assert 0.3 < sum(text.startswith("Once upon a time") for text in some) / len(some) < 0.55


def test_pronouns_names_and_things_stay_the_same_through_a_story(some: list[str]) -> None:
    things = re.compile(rf"\b(?:{words.THINGS.replace(' ', '|')})\b")
    for text in some:
        named = list(dict.fromkeys(word for word in words_of(text) if word in GENDER))
        gender = GENDER[named[0]]
        wrong = PRONOUNS["he" if gender == "she" else "she"]
        assert not wrong & {word.lower() for word in words_of(text)}, text
        assert len(named) <= 2, text
        assert len(set(things.findall(text))) == 1, text
        assert "{" not in text and " a a" not in text and ".." not in text


def test_the_feeling_that_is_told_is_that_of_the_event() -> None:
    for story in islice(stories("stories", "valid"), 400):
        named = [mood for mood in MOODS if set(words.FEELINGS[mood].split()) & set(words_of(story.ending))]
        assert named == [story.mood]


def test_moods_are_balanced_and_do_not_name_the_feeling() -> None:
    feelings = {word for mood in MOODS for word in words.FEELINGS[mood].split()}
    for split in ("train", "valid", "test"):
        some = list(pairs("moods", split, 200))
        assert Counter(pair.target for pair in some) == dict.fromkeys(MOODS, 50)
        assert not any(feelings & set(words_of(pair.source)) for pair in some)


def test_no_single_word_tells_the_mood(found: list[tuple[set[str], str]]) -> None:
    """The best rule of the kind "this class if the word is there, else that one" is far from right."""
    best = 0.0
    for word in set().union(*(present for present, _ in found)):
        inside = Counter(mood for present, mood in found if word in present)
        outside = Counter(mood for present, mood in found if word not in present)
        best = max(best, (max(inside.values()) + max(outside.values(), default=0)) / len(found))
    assert 0.25 < best < 0.4


def test_events_of_different_moods_share_their_words(found: list[tuple[set[str], str]]) -> None:
    """No word that comes in at least one of thirty stories belongs to a single mood."""
    counts = {mood: Counter(word for present, own in found if own == mood for word in present) for mood in MOODS}
    for word in set().union(*counts.values()):
        seen = [counts[mood][word] for mood in MOODS]
        assert sum(seen) < len(found) / 30 or max(seen) < 0.9 * sum(seen), word
