"""Short stories from a grammar, and the classification of their main character's mood: happy, sad, scared or angry.

A story has a main character, a wish, a place, often an obstacle, a friend, an event, and mostly the feeling and the
ending that follow from the event. Names, pronouns, the thing and the place stay the same throughout. `moods`
are stories that stop after the event, with the feeling as their class.

The split of a story is determined by a hash of its text up to the event, so that the splits are disjoint, and `moods`
has no text of the stories.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from random import Random
from zlib import crc32

from regard.data.builtin import story_words as words

MOODS = tuple(words.EVENTS)
STORY_COUNTS = {"train": 60_000, "valid": 500, "test": 1_000}
MOOD_COUNTS = {"train": 400, "valid": 400, "test": 1_000}
SHARES = {  # splits of the stories, by their hash modulo 10
    "stories": {"train": range(5), "valid": range(5, 6), "test": range(6, 7)},
    "moods": {"train": range(7, 8), "valid": range(8, 9), "test": range(9, 10)},
}
_list = cache(str.split)  # words are split once, not at every draw
PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}


@dataclass(frozen=True, slots=True)
class Story:
    """Its sentences up to the event, those that tell the feeling, and the feeling itself."""

    events: str
    ending: str
    mood: str

    @property
    def text(self) -> str:
        return f"{self.events} {self.ending}"


def stories(corpus: str, split: str, seed: int = 0) -> Iterator[Story]:
    """Endless stream of the stories of a split, each mood in turn; only `train` may have duplicates."""
    rng, seen = Random(f"{corpus} {split} {seed}"), set()
    for mood in cycle(MOODS):
        while True:
            story = _story(rng, mood)
            if crc32(story.events.encode()) % 10 in SHARES[corpus][split] and story.events not in seen:
                break
        if split != "train":
            seen.add(story.events)
        yield story


def _story(rng: Random, mood: str) -> Story:
    slots, pick = _cast(rng), rng.choice
    events = [pick(words.OPENINGS), pick(words.WISHES), pick(words.JOURNEYS)]
    kind = rng.random()
    if kind < 0.5:
        obstacle, does = pick(words.OBSTACLES)
        slots["does"] = does.format_map(slots)
        events += [obstacle, pick(words.HELPS)]
    elif kind < 0.9:
        events.append(pick(words.MEETINGS))
    alone = kind >= 0.9  # the story has no friend
    slots["mood"] = pick(_list(words.FEELINGS[mood]))
    events.append(_fitting(rng, words.EVENTS[mood], alone))
    ending = [pick(words.FEELING)]
    if rng.random() < 0.7:
        ending.append(_fitting(rng, words.ENDINGS[mood], alone))
    before, after = (" ".join(_sentence(s, slots) for s in part) for part in (events, ending))
    return Story(before, after, mood)


def _fitting(rng: Random, sentences: tuple[str, ...], alone: bool) -> str:
    return rng.choice([s for s in sentences if "{F}" not in s] if alone else sentences)


def _cast(rng: Random) -> dict[str, str]:
    """Draw the characters, things and places of a story, as values of the slots in sentences."""
    pick = rng.choice
    gender, other = pick(("she", "he")), pick(("she", "he"))
    name, friend = pick(_list(words.NAMES[gender])), pick(_list(words.NAMES[other]))
    while friend == name:
        friend = pick(_list(words.NAMES[other]))
    kinds = words.PEOPLE[gender] if rng.random() < 0.4 else words.ANIMALS
    thing = pick(_list(words.THINGS))
    (at, home), (_, place) = rng.sample(words.PLACES, 2)
    return {
        **PRONOUNS[gender],
        "N": name,
        "F": friend,
        "A": f"a {pick(_list(words.ADJECTIVES))} {pick(_list(kinds))}",
        "B": f"a {pick(_list(words.ADJECTIVES))} {pick(_list(words.ANIMALS))}",
        "T": f"the {thing}",
        "a T": f"a {thing}",
        "At": f"{at} the {home}",
        "P": f"the {place}",
        "Time": pick(words.TIMES),
    }


def _sentence(pattern: str, slots: dict[str, str]) -> str:
    """Fill the slots of a sentence and capitalise it."""
    filled = pattern.replace("{He}", "{he}").replace("{His}", "{his}").format_map(slots)
    return filled[0].upper() + filled[1:] if filled[0] != '"' else filled
