"""Convert Europarl into training text for gold word alignments, in their notation: the Hansards, or German.

    python -m bench.hansards DATA FOLDER                # --german: Biçici's 100 pairs of Europarl
    regard train hansards-en-fr --data FOLDER           # and hansards-fr-en
    regard align runs/hansards-en-fr FOLDER/test.e.xz FOLDER/test.f.xz --reverse runs/hansards-fr-en \\
        --gold FOLDER/test.wa.xz --dev FOLDER/dev.wa.xz FOLDER/dev.e.xz FOLDER/dev.f.xz

DATA contains europarl-en-fr and alignments/hansards-en-fr. The shared task (NAACL 2003) separates punctuation and
hyphens, and expands French contractions: `de le` for `du`, `le opposition` for `l'opposition`. A model trained on
raw Europarl would not have seen much of that. The training text includes the test sentences, without their links, which
the task allows. With --german, DATA contains europarl-en-de and alignments/europarl-de-en, and German takes the place
of French in the names of the files; hyphenated words stay whole there. europarl.e and europarl.f are the test set of
Europarl in the same notation: for BLEU.
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

WRITTEN_OUT = {
    "du": "de le",
    "des": "de les",
    "au": "à le",
    "aux": "à les",
    "auquel": "à lequel",
    "duquel": "de lequel",
}
ELIDED = re.compile(r"\b(l|d|j|n|s|m|t|c|qu|jusqu|lorsqu|puisqu|quoiqu)'(?=\w)", re.IGNORECASE)
ENGLISH_NOT = re.compile(r"(\w+)n't\b", re.IGNORECASE)
PUNCTUATION = re.compile(r"([^\w\s.,'])|(?<!\d)([.,])|([.,])(?!\d)")
NOT_HYPHENS = re.compile(PUNCTUATION.pattern.replace("[^", "[^-", 1))
ABBREVIATIONS = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|M|Mme|No|hon) \.(?= )", re.IGNORECASE)


def _apart(line: str, punctuation: re.Pattern[str] = PUNCTUATION) -> str:
    """Separate punctuation by spaces; keep numbers, and abbreviations with their full stop, whole."""
    parted = punctuation.sub(lambda found: f" {found[0]} ", line.replace("’", "'").replace("`", "'"))
    return ABBREVIATIONS.sub(r"\1.", " ".join(parted.split()))


def english(line: str, punctuation: re.Pattern[str] = PUNCTUATION) -> str:
    """Tokenise an English line.

    >>> english("Mr President, the Member's re-election isn't due (in 1,000 days).")
    "Mr President , the Member 's re - election is not due ( in 1,000 days ) ."
    """
    whole = ENGLISH_NOT.sub(
        lambda found: {"wo": "will", "ca": "can"}.get(found[1].lower(), found[1]) + " not", _apart(line, punctuation)
    )
    return " ".join(re.sub(r"(?<=\w)('\w+)\b", r" \1", whole).split())


def french(line: str) -> str:
    """Tokenise a French line and expand its contractions.

    >>> french("Aujourd'hui, l'opposition n'est qu'au début du débat, peut-être.")
    "Aujourd' hui , le opposition ne est que à le début de le débat , peut - être ."
    """
    whole = ELIDED.sub(r"\1e ", _apart(line))
    words = [WRITTEN_OUT.get(word.lower(), word) for word in whole.split()]
    return " ".join(re.sub(r"(?<=\w)'(?=\w)", "' ", " ".join(words)).split())


def german(line: str) -> str:
    """Tokenise a German line; hyphenated words stay whole.

    >>> german("Der EU-Haushalt (1,5 %) wächst.")
    'Der EU-Haushalt ( 1,5 % ) wächst .'
    """
    return _apart(line, NOT_HYPHENS)


def read(path: Path) -> list[str]:
    if path.exists():
        return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    with lzma.open(path.with_name(path.name + ".xz"), "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]


def write(folder: Path, made: Mapping[str, Sequence[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in made.items():
        with lzma.open(folder / f"{name}.xz", "wt", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


def hansards(data: Path, pairs: int) -> dict[str, list[str]]:
    """The files for English and French."""
    gold, speeches = data / "alignments" / "hansards-en-fr", data / "europarl-en-fr"
    return {
        "train.e": [english(line) for line in read(speeches / "train.en")[:pairs]],
        "train.f": [french(line) for line in read(speeches / "train.fr")[:pairs]],
        "europarl.e": [english(line) for line in read(speeches / "test.en")],
        "europarl.f": [french(line) for line in read(speeches / "test.fr")],
        **{f"{part}.{side}": read(gold / f"{part}.{side}") for part in ("test", "dev") for side in "ef"},
        **{f"{part}.wa": read(gold / f"{part}.wa.nonullalign") for part in ("test", "dev")},
    }


def with_german(data: Path, pairs: int) -> dict[str, list[str]]:
    """The same for English and German; the development pairs have no links."""
    gold, speeches = data / "alignments" / "europarl-de-en", data / "europarl-en-de"

    def made(part: str, count: int | None = None) -> tuple[list[str], list[str]]:
        whole = (english(line, NOT_HYPHENS) for line in read(speeches / f"{part}.en")[:count])
        return list(whole), [german(line) for line in read(speeches / f"{part}.de")[:count]]

    sides = {"test.e": read(gold / "test.en"), "test.f": read(gold / "test.de")}
    for name, (left, right) in {
        "train": made("train", pairs),
        "europarl": made("test"),
        "dev": made("dev", 500),
    }.items():
        sides |= {f"{name}.e": left, f"{name}.f": right}
    tables = zip(read(gold / "de-en.wa"), sides["test.e"], sides["test.f"], strict=True)
    return sides | {"test.wa": [_swapped(links, left, right) for links, left, right in tables]}


def _swapped(links: str, english: str, german: str) -> str:
    """Links with the English word first; one of the published links is outside its sentence."""
    pairs = [(int(e), int(g)) for g, e in (link.split("-") for link in links.split())]
    return " ".join(f"{e}-{g}" for e, g in pairs if e < len(english.split()) and g < len(german.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--german", action="store_true", help="English and German instead of English and French")
    parser.add_argument("--pairs", type=int, default=100_000, help="of Europarl")
    given = parser.parse_args()
    write(given.folder, (with_german if given.german else hansards)(given.data, given.pairs))


if __name__ == "__main__":
    main()
