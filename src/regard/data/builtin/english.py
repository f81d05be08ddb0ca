"""English inflection: the regular rules. Irregular forms are in the lexicon."""

SIBILANTS = ("s", "x", "z", "ch", "sh")
VOWELS = "aeiou"
CONSONANT_SOUND = ("useful", "uniform", "university")  # spelt with a vowel, pronounced with "y"
VOWEL_SOUND = ("honest",)  # spelt with a consonant, pronounced with a vowel


def plural(noun: str) -> str:
    """The regular plural, which is also how a verb makes its third person: `box` -> `boxes`, `carry` -> `carries`."""
    if noun.endswith(SIBILANTS):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + "s"


def third_person(verb: str) -> str:
    """`eat` -> `eats`, `watch` -> `watches`, `go` -> `goes`."""
    return verb + "es" if verb.endswith("o") else plural(verb)


def past(verb: str) -> str:
    """The regular past: `walk` -> `walked`, `use` -> `used`, `carry` -> `carried`."""
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in VOWELS:
        return verb[:-1] + "ied"
    return verb + "ed"


def takes_an(word: str) -> bool:
    """Whether the indefinite article before `word` is `an`."""
    return word in VOWEL_SOUND or (word[0] in VOWELS and word not in CONSONANT_SOUND)
