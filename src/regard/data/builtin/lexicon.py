"""The words of the en-es corpus with all their forms, read once from `lexicon.tsv`."""

from dataclasses import dataclass
from functools import cache
from importlib import resources

from regard.data.builtin import english, spanish

PRESENT, PAST, FUTURE = 0, 1, 2
I, YOU, IT, WE, THEY = range(5)  # the persons, in the order of a Spanish conjugation row  # noqa: E741


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    """`english` and `spanish` are (singular, plural); `kinds` is what sort of thing it is; `mass`: never counted."""

    name: str
    english: tuple[str, str]
    spanish: tuple[str, str]
    feminine: bool
    kinds: frozenset[str]
    mass: bool


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """`spanish[feminine][plural]`; `copula` is the verb that links it to a subject: ser or estar, fixed per word."""

    name: str
    spanish: tuple[tuple[str, str], tuple[str, str]]
    copula: str
    kinds: frozenset[str]
    graded: bool


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """`english[tense][person]` and `spanish[tense][person]`; the past of a state is the imperfect, else the preterite.

    `frame` is what follows: transitive, giving, intransitive, motion, reporting (that), controlling (to), modal.
    """

    name: str
    english: tuple[tuple[str, ...], ...]
    infinitive: str
    spanish: tuple[spanish.Row, ...]
    frame: str
    before_infinitive: tuple[str, ...]
    subjects: frozenset[str]
    objects: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Adverb:
    """One English word, one or more Spanish ones; `kind` decides its place and the tenses it goes with."""

    name: str
    spanish: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Lexicon:
    """All content words, by part of speech."""

    nouns: tuple[Noun, ...]
    adjectives: tuple[Adjective, ...]
    verbs: tuple[Verb, ...]
    adverbs: tuple[Adverb, ...]


@cache
def lexicon() -> Lexicon:
    """The lexicon, parsed and inflected on first use."""
    text = resources.files("regard.data.builtin").joinpath("lexicon.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return Lexicon(
        nouns=tuple(_noun(*row) for part, *row in rows if part == "noun"),
        adjectives=tuple(_adjective(*row) for part, *row in rows if part == "adjective"),
        verbs=tuple(_verb(*row) for part, *row in rows if part == "verb"),
        adverbs=tuple(Adverb(row[0], tuple(row[1].split()), row[2]) for part, *row in rows if part == "adverb"),
    )


def _kinds(cell: str) -> frozenset[str]:
    return frozenset(cell.split("+")) - {"-"}


def _noun(en: str, es: str, gender: str, kinds: str, counting: str) -> Noun:
    one, _, many = en.partition("/")
    uno, _, varios = es.partition("/")
    return Noun(
        name=one,
        english=(one, many or english.plural(one)),
        spanish=(uno, varios or spanish.plural(uno)),
        feminine=gender == "f",
        kinds=_kinds(kinds),
        mass=counting == "mass",
    )


def _adjective(en: str, es: str, copula: str, kinds: str, degree: str) -> Adjective:
    return Adjective(en, spanish.adjective_forms(es), copula, _kinds(kinds), degree == "graded")


def _verb(en: str, es: str, change: str, frame: str, subjects: str, objects: str, aspect: str) -> Verb:
    forms = en.split("/")
    base = forms[0]
    third = forms[1] if len(forms) == 3 else english.third_person(base)
    past = forms[-1] if len(forms) > 1 else english.past(base)
    rows = spanish.conjugate(es, "" if change == "-" else change)
    frame, _, preposition = frame.partition("+")
    return Verb(
        name=base,
        english=((base, base, third, base, base), (past,) * 5, (base,) * 5),
        infinitive=es,
        spanish=(rows.present, rows.imperfect if aspect == "state" else rows.preterite, rows.future),
        frame=frame,
        before_infinitive=(preposition,) if preposition else (),
        subjects=_kinds(subjects),
        objects=_kinds(objects),
    )
