"""Convert Europarl into training text for the Hansards word alignments, in the notation of the shared task.

    python -m bench.hansards DATA FOLDER
    regard train hansards-en-fr --data FOLDER           # and hansards-fr-en
    regard align runs/hansards-en-fr FOLDER/test.e.xz FOLDER/test.f.xz --reverse runs/hansards-fr-en \\
        --gold FOLDER/test.wa.xz --dev FOLDER/dev.wa.xz FOLDER/dev.e.xz FOLDER/dev.f.xz

DATA contains europarl-en-fr and alignments/hansards-en-fr. The shared task (NAACL 2003) separates punctuation and
hyphens, and expands French contractions: `de le` for `du`, `le opposition` for `l'opposition`. A model trained on
raw Europarl would not have seen much of that. The training text includes the test sentences, without their links, which
the task allows.
"""

from __future__ import annotations

import argparse
import lzma
import re
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
ABBREVIATIONS = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|M|Mme|No|hon) \.(?= )", re.IGNORECASE)


def _apart(line: str) -> str:
    """Separate punctuation by spaces; keep numbers, and abbreviations with their full stop, whole."""
    parted = PUNCTUATION.sub(lambda found: f" {found[0]} ", line.replace("’", "'").replace("`", "'"))
    return ABBREVIATIONS.sub(r"\1.", " ".join(parted.split()))


def english(line: str) -> str:
    """Tokenise an English line.

    >>> english("Mr President, the Member's re-election isn't due (in 1,000 days).")
    "Mr President , the Member 's re - election is not due ( in 1,000 days ) ."
    """
    whole = ENGLISH_NOT.sub(
        lambda found: {"wo": "will", "ca": "can"}.get(found[1].lower(), found[1]) + " not", _apart(line)
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


def read(path: Path) -> list[str]:
    with lzma.open(path.with_name(path.name + ".xz"), "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    gold, speeches = given.data / "alignments" / "hansards-en-fr", given.data / "europarl-en-fr"
    made = {
        "train.e": [english(line) for line in read(speeches / "train.en")],
        "train.f": [french(line) for line in read(speeches / "train.fr")],
        **{f"{part}.{side}": read(gold / f"{part}.{side}") for part in ("test", "dev") for side in "ef"},
        **{f"{part}.wa": read(gold / f"{part}.wa.nonullalign") for part in ("test", "dev")},
    }
    for name, lines in made.items():
        with lzma.open(given.folder / f"{name}.xz", "wt", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
