"""Translation of whole texts: their sentences are translated together, and tags follow the alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.metrics.alignment import Link
from regard.tasks.confidence import Calibration, confidence
from regard.tasks.translator import Answer, Translator
from regard.text.documents import Document, Format, prepare

Align = Callable[[Sequence[tuple[str, str]]], list[set[Link]]]  # of (source, target) pairs


@dataclass(frozen=True)
class TranslatedDocument:
    """The translations of a text, best first, and the answers of its sentences."""

    texts: tuple[str, ...]
    document: Document
    answers: tuple[Answer, ...]
    links: tuple[frozenset[Link], ...] = ()  # of each sentence and its best translation, if they were wanted

    @property
    def scores(self) -> list[float | None]:
        """The sum of the scores of the sentences, for each of `texts`."""
        found = [a.hypotheses for a in self.answers if a.hypotheses]
        return [
            sum(hypotheses[min(n, len(hypotheses) - 1)].score for hypotheses in found) if found else None
            for n in range(len(self.texts))
        ]

    @property
    def truncated(self) -> bool:
        return any(answer.truncated for answer in self.answers)

    @property
    def source_words(self) -> list[str]:
        """The words of all sentences, without tags."""
        return [word for sentence in self.document.sentences for word in sentence.split()]

    def words(self, translator: Translator, calibration: Calibration | None) -> list[tuple[str, float]]:
        """The words of the best translation, without tags, and their confidence."""
        found: list[tuple[str, float]] = []
        for answer in self.answers:
            judged = confidence(answer, translator.tokenizers[1], calibration)
            words = answer.texts[0].split()
            if [word.text for word in judged.words] == words:
                found += [(word.text, word.confidence) for word in judged.words]
            else:  # a vocabulary whose tokens begin words elsewhere than at spaces
                found += [(word, judged.sentence) for word in words]
        return found

    def alignment(self) -> list[Link]:
        """The links between `source_words` and `words`."""
        found: list[Link] = []
        i = j = 0
        for sentence, answer, links in zip(self.document.sentences, self.answers, self.links, strict=True):
            found += sorted((i + a, j + b) for a, b in links)
            i, j = i + len(sentence.split()), j + len(answer.texts[0].split())
        return found


def translate_documents(
    translator: Translator,
    align: Align,
    texts: Sequence[str],
    *,
    format: Format = "text",
    language: str | None = None,
    nbest: int = 1,
    prefix: str | None = None,
    aligned: bool = False,
) -> list[TranslatedDocument]:
    """Translate texts of one or more sentences; `language` is that of the texts, and selects the sentence splitter.

    `align` is called for sentences with tags and, if `aligned`, for all. A prefix begins the first sentence.
    """
    documents = [prepare(text, format, language) for text in texts]
    sentences = [sentence for document in documents for sentence in document.sentences]
    prefixes = None
    if prefix is not None:
        firsts = [[prefix] + [""] * (len(document.sentences) - 1) for document in documents if document.sentences]
        prefixes = [begin for own in firsts for begin in own]
    answers = translator(sentences, nbest=nbest, prefixes=prefixes)
    needed = [needs for document in documents for needs in document.needs_links]
    ranks = [[0] if aligned and not needs else range(len(a.texts)) for needs, a in zip(needed, answers, strict=True)]
    wanted = [
        (n, rank) for n, (needs, own) in enumerate(zip(needed, ranks, strict=True)) for rank in own if needs or aligned
    ]
    pairs = [(sentences[n], answers[n].texts[rank]) for n, rank in wanted]
    links = dict(zip(wanted, align(pairs) if pairs else [], strict=True))
    found, begin = [], 0
    for document in documents:
        numbers = range(begin, begin + len(document.sentences))
        begin = numbers.stop
        own = tuple(answers[n] for n in numbers)
        count = max((len(answer.texts) for answer in own), default=1)
        assembled = []
        for rank in range(count):
            chosen = [(n, min(rank, len(answers[n].texts) - 1)) for n in numbers]
            parts = [answers[n].texts[k] for n, k in chosen]
            assembled.append(document.assemble(parts, [links.get(key, set()) for key in chosen]))
        best = tuple(frozenset(links.get((n, 0), ())) for n in numbers)
        found.append(TranslatedDocument(tuple(assembled), document, own, best))
    return found
