"""Spanish inflection: plurals, the four forms of an adjective, and conjugation with its changes of stem and spelling.

A tense is a row of five forms: yo, tú, él, nosotros, ellos. (English `you` is always the familiar singular here.)
"""

from typing import NamedTuple

Row = tuple[str, str, str, str, str]


class Conjugation(NamedTuple):
    """The tenses the grammar uses."""

    present: Row
    preterite: Row
    imperfect: Row
    future: Row


ENDINGS: dict[str, dict[str, str]] = {
    "ar": {"present": "o as a amos an", "preterite": "é aste ó amos aron", "imperfect": "aba abas aba ábamos aban"},
    "er": {"present": "o es e emos en", "preterite": "í iste ió imos ieron", "imperfect": "ía ías ía íamos ían"},
    "ir": {"present": "o es e imos en", "preterite": "í iste ió imos ieron", "imperfect": "ía ías ía íamos ían"},
}
AFTER_A_VOWEL = "í íste yó ímos yeron"  # the preterite of caer, creer, oír
STRONG_PRETERITE = "e iste o imos ieron"  # unaccented, on a stem of its own: tuve, hice
FUTURE = "é ás á emos án"
STRESSED_IN_THE_STEM = (0, 1, 2, 4)  # every person of the present but nosotros

IRREGULAR_PRESENT = {
    "ser": "soy eres es somos son",
    "estar": "estoy estás está estamos están",
    "ir": "voy vas va vamos van",
    "tener": "tengo tienes tiene tenemos tienen",
    "venir": "vengo vienes viene venimos vienen",
    "decir": "digo dices dice decimos dicen",
    "hacer": "hago haces hace hacemos hacen",
    "traer": "traigo traes trae traemos traen",
    "caer": "caigo caes cae caemos caen",
    "oír": "oigo oyes oye oímos oyen",
    "ver": "veo ves ve vemos ven",
    "dar": "doy das da damos dan",
    "saber": "sé sabes sabe sabemos saben",
    "sonreír": "sonrío sonríes sonríe sonreímos sonríen",
}
IRREGULAR_PRETERITE = {
    "ser": "fui fuiste fue fuimos fueron",
    "ir": "fui fuiste fue fuimos fueron",
    "ver": "vi viste vio vimos vieron",
    "dar": "di diste dio dimos dieron",
    "hacer": "hice hiciste hizo hicimos hicieron",
    "decir": "dije dijiste dijo dijimos dijeron",
    "traer": "traje trajiste trajo trajimos trajeron",
    "conducir": "conduje condujiste condujo condujimos condujeron",
    "traducir": "traduje tradujiste tradujo tradujimos tradujeron",
    "sonreír": "sonreí sonreíste sonrió sonreímos sonrieron",
}
STRONG_STEMS = {
    "estar": "estuv", "tener": "tuv", "venir": "vin", "saber": "sup", "poder": "pud", "querer": "quis",
}  # fmt: skip
IRREGULAR_IMPERFECT = {
    "ser": "era eras era éramos eran",
    "ir": "iba ibas iba íbamos iban",
    "ver": "veía veías veía veíamos veían",
}
FUTURE_STEMS = {
    "tener": "tendr", "venir": "vendr", "decir": "dir", "hacer": "har", "saber": "sabr", "poder": "podr",
    "querer": "querr", "oír": "oir", "sonreír": "sonreir",
}  # fmt: skip
STEM_VOWEL = {"ie": "e", "ue": "o", "i": "e", "í": "i"}  # the vowel that each change replaces
WEAK_VOWEL = {"ie": "i", "ue": "u", "i": "i"}  # what it becomes in the preterite of an -ir verb: durmió, pidió


def plural(word: str) -> str:
    """`gato` -> `gatos`, `juez` -> `jueces`, `flor` -> `flores`, `ratón` -> `ratones`, `autobús` -> `autobuses`."""
    if word[-1] in "aeiouáéó":
        return word + "s"
    if word[-1] == "z":
        return word[:-1] + "ces"
    if word[-1] in "ns" and word[-2] in "áéíóú":  # the stress stays where it was, and no longer needs the accent
        return word[:-2] + word[-2].translate(str.maketrans("áéíóú", "aeiou")) + word[-1] + "es"
    return word + "es"


def adjective_forms(spelled: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """((masculine, plural), (feminine, plural)) of `masculine[/feminine[/plural/feminine plural]]`."""
    forms = spelled.split("/")
    masculine = forms[0]
    if len(forms) > 1:
        feminine = forms[1]
    else:
        feminine = masculine[:-1] + "a" if masculine.endswith("o") else masculine
    if len(forms) == 4:
        return (masculine, forms[2]), (feminine, forms[3])
    return (masculine, plural(masculine)), (feminine, plural(feminine))


def conjugate(infinitive: str, change: str = "") -> Conjugation:
    """All the tenses of a verb; `change` is what its stem vowel does under stress: `ie`, `ue`, `i` or `í`.

    >>> conjugate("dormir", "ue").preterite[4]
    'durmieron'
    """
    return Conjugation(
        _present(infinitive, change), _preterite(infinitive, change), _imperfect(infinitive), _future(infinitive)
    )


def _parts(infinitive: str) -> tuple[str, str]:
    """Stem and class: `oír` and `sonreír` belong to the -ir verbs."""
    return infinitive[:-2], infinitive[-2:].replace("í", "i")


def _row(forms: str) -> Row:
    yo, tu, el, nosotros, ellos = forms.split()
    return yo, tu, el, nosotros, ellos


def _change_vowel(stem: str, old: str, new: str) -> str:
    at = stem.rindex(old)
    return stem[:at] + new + stem[at + 1 :]


def _present(infinitive: str, change: str) -> Row:
    if infinitive in IRREGULAR_PRESENT:
        return _row(IRREGULAR_PRESENT[infinitive])
    stem, group = _parts(infinitive)
    stressed = _change_vowel(stem, STEM_VOWEL[change], change) if change else stem
    if infinitive.endswith("uir") and not infinitive.endswith("guir"):  # construyo
        stressed += "y"
    endings = ENDINGS[group]["present"].split()
    forms = [(stressed if p in STRESSED_IN_THE_STEM else stem) + ending for p, ending in enumerate(endings)]
    if group != "ar":
        forms[0] = _before_o(stressed) + "o"
    return _row(" ".join(forms))


def _before_o(stem: str) -> str:
    """The stem of an -er or -ir verb, respelled before -o: protejo, sigo, conozco."""
    if stem.endswith("gu"):
        return stem[:-1]
    if stem.endswith("g"):
        return stem[:-1] + "j"
    if stem.endswith("c") and stem[-2] in "aeiou":
        return stem[:-1] + "zc"
    return stem


def _preterite(infinitive: str, change: str) -> Row:
    if infinitive in IRREGULAR_PRETERITE:
        return _row(IRREGULAR_PRETERITE[infinitive])
    if infinitive in STRONG_STEMS:
        return _row(" ".join(STRONG_STEMS[infinitive] + ending for ending in STRONG_PRETERITE.split()))
    stem, group = _parts(infinitive)
    if group != "ar" and stem[-1] in "aeo":
        return _row(" ".join(stem + ending for ending in AFTER_A_VOWEL.split()))
    forms = [stem + ending for ending in ENDINGS[group]["preterite"].split()]
    if group == "ar":
        forms[0] = _before_e(stem) + "é"
    elif infinitive.endswith("uir") and not infinitive.endswith("guir"):  # construyó
        forms[2], forms[4] = stem + "yó", stem + "yeron"
    elif group == "ir" and change:
        weak = _change_vowel(stem, STEM_VOWEL[change], WEAK_VOWEL[change])
        forms[2], forms[4] = weak + "ió", weak + "ieron"
    return _row(" ".join(forms))


def _before_e(stem: str) -> str:
    """The stem of an -ar verb, respelled before -é: busqué, llegué, cacé."""
    for old, new in (("c", "qu"), ("g", "gu"), ("z", "c")):
        if stem.endswith(old):
            return stem[:-1] + new
    return stem


def _imperfect(infinitive: str) -> Row:
    if infinitive in IRREGULAR_IMPERFECT:
        return _row(IRREGULAR_IMPERFECT[infinitive])
    stem, group = _parts(infinitive)
    return _row(" ".join(stem + ending for ending in ENDINGS[group]["imperfect"].split()))


def _future(infinitive: str) -> Row:
    stem = FUTURE_STEMS.get(infinitive, infinitive)
    return _row(" ".join(stem + ending for ending in FUTURE.split()))
