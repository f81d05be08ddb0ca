"""The closed classes of the en-es grammar: determiners, numerals, pronouns, prepositions, conjunctions, auxiliaries."""

from typing import NamedTuple

from regard.data.builtin.lexicon import IT, THEY, YOU, I


class Determiner(NamedTuple):
    """`spanish` is (masculine, feminine); `feature` is the listed grammar feature it shows, if any."""

    english: str
    spanish: tuple[str, str]
    feature: str = "determiner"


class Pronoun(NamedTuple):
    """A subject pronoun. Spanish leaves it out where the verb's ending says it (`spanish` is empty), else keeps it."""

    english: str
    spanish: str
    person: int
    feminine: bool = False


THE = (Determiner("the", ("el", "la"), ""), Determiner("the", ("los", "las"), ""))  # singular, plural
A = Determiner("a", ("un", "una"))
THIS = Determiner("this", ("este", "esta"))
_OWNED = (
    Determiner("my", ("mi", "mi")),
    Determiner("your", ("tu", "tu")),
    Determiner("his", ("su", "su")),
    Determiner("her", ("su", "su")),
    Determiner("our", ("nuestro", "nuestra")),
    Determiner("their", ("su", "su")),
)
_OWNED_PLURAL = tuple(Determiner(d.english, (d.spanish[0] + "s", d.spanish[1] + "s")) for d in _OWNED)
_POINTING = (THIS, Determiner("that", ("ese", "esa")))
_POINTING_PLURAL = (Determiner("these", ("estos", "estas")), Determiner("those", ("esos", "esas")))
_NUMBERS = {
    "two": "dos", "three": "tres", "four": "cuatro", "five": "cinco", "six": "seis", "seven": "siete",
    "eight": "ocho", "nine": "nueve", "ten": "diez", "eleven": "once", "twelve": "doce", "thirteen": "trece",
    "fourteen": "catorce", "fifteen": "quince", "twenty": "veinte", "thirty": "treinta",
}  # fmt: skip
NUMERALS = tuple(Determiner(en, (es, es), "number") for en, es in _NUMBERS.items())

# A word's share of its tuple is how often it is drawn.
MASS = (THE[0],) * 5 + _POINTING + _OWNED
SINGULAR = MASS + (A,) * 4 + (Determiner("every", ("cada", "cada")), Determiner("one", ("un", "una"), "number"))
PLURAL = (
    *(THE[1],) * 5,
    *_OWNED_PLURAL,
    *_POINTING_PLURAL,
    Determiner("many", ("muchos", "muchas")),
    Determiner("some", ("algunos", "algunas")),
)

PRONOUNS = (
    Pronoun("i", "", I),
    Pronoun("you", "", YOU),
    Pronoun("he", "él", IT),
    Pronoun("she", "ella", IT, feminine=True),
    Pronoun("they", "ellos", THEY),
)
HE = PRONOUNS[2]
# Persons that nouns never have are drawn more often, because their verb forms would be rare otherwise. `we` is omitted:
# its three hundred rare forms would take longer to learn than the rest of the grammar.
DRAWN_PRONOUNS = PRONOUNS + 2 * tuple(p for p in PRONOUNS if not p.spanish)

PREPOSITIONS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {  # by the kind of noun they take
    "place": (
        ("in", ("en",)), ("in", ("en",)), ("in", ("en",)), ("near", ("cerca", "de")), ("behind", ("detrás", "de")),
        ("opposite", ("frente", "a")),
    ),
    "landmark": (("near", ("cerca", "de")), ("behind", ("detrás", "de")), ("opposite", ("frente", "a"))),
    "person": (("with", ("con",)), ("without", ("sin",)), ("beside", ("junto", "a"))),
    "object": (("under", ("debajo", "de")), ("on", ("sobre",)), ("behind", ("detrás", "de"))),
}  # fmt: skip

DO = ("do", "do", "does", "do", "do")
BE = (("am", "are", "is", "are", "are"), ("was", "were", "was", "were", "were"), ("be",) * 5)
WHEN_CLAUSES = (("because", "porque"), ("although", "aunque"), ("if", "si"), ("when", "cuando"))
CIRCUMSTANCES = (("why", ("por", "qué")), ("when", ("cuándo",)), ("where", ("dónde",)), ("how", ("cómo",)))
