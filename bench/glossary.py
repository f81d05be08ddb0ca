"""Glossary on real data: how many terms appear, and BLEU, with and without a glossary.

    python -m bench.glossary RUN --train TRAIN.en TRAIN.es --test TEST.en TEST.es

The glossary is made from the training pairs: a source word and the target words that occur with it far more often than
by chance (Dice coefficient). Of these, the test uses words that the references translate so; their forms are those of
the references. This is how such systems are usually measured: the terms are known to be right. Merged from all
sentences, the glossary also demands terms in sentences whose references have other words; the third row leaves these
demands out, and the last one has only them.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import regard
from regard.data.lines import read_lines
from regard.metrics.text_scores import score_texts
from regard.tasks.glossary import Glossary, Requirement

MIN_DICE = 0.2
MIN_COUNT, MAX_COUNT = 3, 300  # of a term in training: neither unknown nor a function word
WORD = re.compile(r"\w{4,}")


def words(text: str) -> set[str]:
    return set(WORD.findall(text.lower()))


def dictionary(pairs: list[tuple[str, str]]) -> dict[str, set[str]]:
    """Source words and the target words whose Dice coefficient 2 n(s, t) / (n(s) + n(t)) with them is high."""
    sides = [(words(source), words(target)) for source, target in pairs]
    sources = Counter(word for source, _ in sides for word in source)
    targets = Counter(word for _, target in sides for word in target)
    rare = {word for word, count in sources.items() if MIN_COUNT <= count <= MAX_COUNT}
    both = Counter((s, t) for source, target in sides for s in source & rare for t in target)
    found: dict[str, set[str]] = {}
    for (s, t), count in both.items():
        if count >= 2 and 2 * count / (sources[s] + targets[t]) >= MIN_DICE:
            found.setdefault(s, set()).add(t)
    return found


def glossary_of(known: dict[str, set[str]], pairs: list[tuple[str, str]]) -> list[dict[str, list[str]]]:
    """For each pair the terms that its reference translates as the dictionary says."""
    terms = []
    for source, target in pairs:
        spellings = {word.lower(): word for word in WORD.findall(target)}
        own = {s: [spellings[t] for t in known.get(s, ()) if t in spellings] for s in words(source)}
        terms.append({s: forms for s, forms in own.items() if forms})
    return terms


@dataclass(frozen=True)
class ByReference(Glossary):
    """The demands of a glossary that the reference of a sentence meets; or, with `wrong`, those that it does not."""

    references: Mapping[str, str]  # of each source sentence
    wrong: bool = False

    def requirements(self, sentence: str) -> list[Requirement]:
        reference = self.references[sentence]
        return [r for r in super().requirements(sentence) if r.is_met(reference) != self.wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--train", nargs=2, type=Path, required=True)
    parser.add_argument("--test", nargs=2, type=Path, required=True)
    parser.add_argument("--beam", type=int, nargs="+", default=[5, 1])
    parser.add_argument("--lines", type=int)
    given = parser.parse_args()
    train, test = (list(zip(*map(read_lines, files), strict=True)) for files in (given.train, given.test))
    per_sentence = glossary_of(dictionary(train), test)
    chosen = [n for n, terms in enumerate(per_sentence) if terms][: given.lines]
    merged: dict[str, list[str]] = {}
    for n in chosen:
        for source, forms in per_sentence[n].items():
            merged[source] = sorted({*merged.get(source, []), *forms})
    sources, references = [test[n][0] for n in chosen], [test[n][1] for n in chosen]
    required = [[*Glossary.of(per_sentence[n]).requirements(source)] for n, source in zip(chosen, sources, strict=True)]
    glossary, pairs = Glossary.of(merged), dict(zip(sources, references, strict=True))
    glossaries = {"without": None, "with": glossary}
    for name, wrong in (("what the references meet", False), ("what they do not meet", True)):
        glossaries[name] = ByReference(glossary.entries, pairs, wrong)
    print(f"{len(chosen)} of {len(test)} sentences, {sum(map(len, required))} terms, {len(merged)} entries", flush=True)
    model = regard.load(given.run)
    for beam in given.beam:
        for name, used in glossaries.items():
            begin = time.process_time()
            found = model.translate(sources, beam=beam, glossary=used)
            seconds = time.process_time() - begin
            texts = [translation.text for translation in found]
            met = [r.is_met(text) for rs, text in zip(required, texts, strict=True) for r in rs]
            demanded = 0 if used is None else sum(len(used.requirements(source)) for source in sources)
            result = {
                "beam": beam,
                "glossary": name,
                "demands": demanded,
                "terms_of_the_reference_percent": round(100 * sum(met) / len(met), 2),
                "unmet": sum(len(translation.unmet) for translation in found),
                "bleu": round(score_texts(texts, references).bleu, 2),
                "cpu_seconds": round(seconds, 1),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
