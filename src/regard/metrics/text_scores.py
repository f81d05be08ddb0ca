"""BLEU and chrF by sacreBLEU, with the signatures that make two figures comparable, and exact matches.

Two BLEU figures of the same output differ by several points if the text was cut into words differently. So the usual
figure is taken on raw text with sacreBLEU's own tokenisation (`score_texts`), and a second one on Moses tokens
(`moses_tokenized_bleu`) exists only to stand beside papers that published theirs that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import UserError


@dataclass(frozen=True)
class TextScores:
    """Scores of one set of outputs, all but `perplexity` from 0 to 100; the signatures say how they were taken."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    exact: float  # percentage of outputs that are their reference, letter for letter
    lines: int
    perplexity: float | None = None  # per token, where a model was asked as well


def score_texts(
    outputs: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> TextScores:
    """Corpus BLEU and chrF of raw outputs against one raw reference each, and the share of exact matches.

    With `lowercase` all three ignore case. Blanks at either end of a line never count.

    >>> score_texts(["a cat sat on a mat"], ["a cat sat on a mat"]).exact
    100.0
    """
    from sacrebleu.metrics import BLEU, CHRF

    _check_lines(outputs, references)
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"no tokenisation called {tokenize!r}: sacreBLEU has {', '.join(sorted(BLEU.TOKENIZERS))}")
    bleu = BLEU(lowercase=lowercase, tokenize=tokenize)
    chrf = CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(outputs, [references]).score
    chrf_score = chrf.corpus_score(outputs, [references]).score
    return TextScores(
        bleu=bleu_score,
        bleu_signature=str(bleu.get_signature()),  # complete only after scoring: it counts the references
        chrf=chrf_score,
        chrf_signature=str(chrf.get_signature()),
        exact=_exact(outputs, references, lowercase),
        lines=len(outputs),
    )


def moses_tokenized_bleu(
    outputs: Sequence[str], references_tokenized: Sequence[str], *, language: str, lowercase: bool = True
) -> tuple[float, str]:
    """(BLEU, signature) of raw outputs against references that were published as Moses tokens.

    The outputs go through `moses_tokenize`, then both sides are compared token by token as they stand. Such a figure
    may stand beside one published on the same token files, and beside nothing else.
    """
    from sacrebleu.metrics import BLEU

    _check_lines(outputs, references_tokenized)
    tokenized = moses_tokenize(outputs, language=language, lowercase=lowercase)
    # `force` keeps sacreBLEU from warning that the text looks tokenised: here it is meant to be
    bleu = BLEU(lowercase=lowercase, tokenize="none", force=True)
    return bleu.corpus_score(tokenized, [references_tokenized]).score, str(bleu.get_signature())


def moses_tokenize(lines: Sequence[str], *, language: str, lowercase: bool = True) -> list[str]:
    """Moses' punctuation normalisation, lower-casing and tokenisation, in that order.

    Special characters are escaped (`'` becomes `&apos;`) and hyphens stay inside their words, as in the token files
    that come with Multi30k. Lower-casing comes before the tokeniser, which sees an abbreviation or the end of a
    sentence differently by case: German `Bart.` stays in one piece, `bart .` does not.
    """
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError:
        raise UserError("Moses tokenisation needs sacremoses: pip install regard[moses]") from None

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    normal = (normalizer.normalize(line) for line in lines)
    cased = (line.lower() if lowercase else line for line in normal)
    return [tokenizer.tokenize(line, return_str=True, escape=True, aggressive_dash_splits=False) for line in cased]


def _exact(outputs: Sequence[str], references: Sequence[str], lowercase: bool) -> float:
    """Percentage of outputs equal to their reference."""

    def plain(line: str) -> str:
        return line.strip().lower() if lowercase else line.strip()

    same = sum(plain(output) == plain(reference) for output, reference in zip(outputs, references, strict=True))
    return 100.0 * same / len(outputs)


def _check_lines(outputs: Sequence[str], references: Sequence[str]) -> None:
    """Scores mean something only line beside line."""
    if len(outputs) != len(references):
        raise UserError(f"{len(outputs)} outputs but {len(references)} references: there must be one for each")
    if not outputs:
        raise UserError("no lines to score")
