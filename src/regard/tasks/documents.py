"""Translation of texts of several sentences, with or without HTML tags, which follow the word alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.metrics.alignment import Link
from regard.tasks.confidence import Calibration, confidence
from regard.tasks.translator import Answer, Translator
from regard.text.documents import Document, Format, prepare

Align = Callable[[Sequence[tuple[str, str]]], list[set[Link]]]  # aligns the words of (source, target) pairs


@dataclass(frozen=True)
class TranslatedDocument:
    """The translations of a text, best first, and the answers of its sentences."""

    texts: tuple[str, ...]
    document: Document
    answers: tuple[Answer, ...]
    links: tuple[frozenset[Link], ...] = ()  # links of each sentence with its best translation, if requested

    @property
    def scores(self) -> list[float | None]:
        """The sum of the scores of the sentences, for each of `texts`."""
        ranked = [answer.hypotheses for answer in self.answers if answer.hypotheses]
        return [
            sum(hypotheses[min(n, len(hypotheses) - 1)].score for hypotheses in ranked) if ranked else None
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
        rated: list[tuple[str, float]] = []
        for answer in self.answers:
            judged = confidence(answer, translator.tokenizers[1], calibration)
            words = answer.texts[0].split()
            if [word.text for word in judged.words] == words:
                rated += [(word.text, word.confidence) for word in judged.words]
            else:  # a vocabulary whose tokens begin words elsewhere than at spaces
                rated += [(word, judged.sentence) for word in words]
        return rated

    def alignment(self) -> list[Link]:
        """The links between `source_words` and `words`."""
        alignment: list[Link] = []
        i = j = 0
        for sentence, answer, links in zip(self.document.sentences, self.answers, self.links, strict=True):
            alignment += sorted((i + a, j + b) for a, b in links)
            i, j = i + len(sentence.split()), j + len(answer.texts[0].split())
        return alignment


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
    answers = translator(sentences, nbest=nbest, prefixes=_prefixes(documents, prefix))
    has_tags = [needs for document in documents for needs in document.needs_links]
    links = _links(sentences, answers, has_tags, align, aligned)
    translated, begin = [], 0
    for document in documents:
        end = begin + len(document.sentences)
        translated.append(_assembled(document, answers[begin:end], links[begin:end]))
        begin = end
    return translated


def _prefixes(documents: Sequence[Document], prefix: str | None) -> list[str] | None:
    """The prefix of each sentence: that of its text for the first one."""
    if prefix is None:
        return None
    return [prefix if n == 0 else "" for document in documents for n in range(len(document.sentences))]


def _links(
    sentences: Sequence[str], answers: Sequence[Answer], has_tags: Sequence[bool], align: Align, aligned: bool
) -> list[dict[int, set[Link]]]:
    """The links of the translations of each sentence, by rank: of all if it has tags, of the best if `aligned`."""
    wanted: list[tuple[int, int]] = []
    for n, (answer, needs_all) in enumerate(zip(answers, has_tags, strict=True)):
        wanted += [(n, rank) for rank in range(len(answer.texts) if needs_all else int(aligned))]
    pairs = [(sentences[n], answers[n].texts[rank]) for n, rank in wanted]
    links: list[dict[int, set[Link]]] = [{} for _ in sentences]
    for (n, rank), pair_links in zip(wanted, align(pairs) if pairs else [], strict=True):
        links[n][rank] = pair_links
    return links


def _assembled(
    document: Document, answers: Sequence[Answer], links: Sequence[dict[int, set[Link]]]
) -> TranslatedDocument:
    """Join the translations of sentences to those of their text; a sentence with fewer repeats its last one."""
    texts = []
    for rank in range(max((len(answer.texts) for answer in answers), default=1)):
        ranks = [min(rank, len(answer.texts) - 1) for answer in answers]
        parts = [answer.texts[k] for answer, k in zip(answers, ranks, strict=True)]
        texts.append(document.assemble(parts, [by_rank.get(k, set()) for by_rank, k in zip(links, ranks, strict=True)]))
    best = tuple(frozenset(by_rank.get(0, ())) for by_rank in links)
    return TranslatedDocument(tuple(texts), document, tuple(answers), best)
