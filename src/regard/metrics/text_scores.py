"""BLEU and chrF by sacreBLEU, with their signatures, and exact matches.

BLEU scores of the same output differ by several points if the text is tokenized differently. The standard score is
computed on raw text with sacreBLEU's tokenization (`score_texts`); `moses_tokenized_bleu` is computed on Moses tokens,
only for comparison with papers that published such scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import UserError


@dataclass(frozen=True)
class TextScores:
    """Scores of one set of outputs, from 0 to 100 except `perplexity`; the signatures say how they were computed."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    exact: float  # percentage of outputs equal to their reference
    lines: int
    perplexity: float | None = None  # per token of the references, if a model was evaluated


def score_texts(
    outputs: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> TextScores:
    """Corpus BLEU and chrF of raw outputs against one raw reference each, and the percentage of exact matches.

    With `lowercase` all three ignore case. White space at either end of a line is ignored.

    >>> score_texts(["a cat sat on a mat"], ["a cat sat on a mat"]).exact
    100.0
    """
    from sacrebleu.metrics import BLEU, CHRF

    _check_lines(outputs, references)
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"no tokenization called {tokenize!r}: sacreBLEU has {', '.join(sorted(BLEU.TOKENIZERS))}")
    bleu = BLEU(lowercase=lowercase, tokenize=tokenize)
    chrf = CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(outputs, [references]).score
    chrf_score = chrf.corpus_score(outputs, [references]).score
    return TextScores(
        bleu=bleu_score,
        bleu_signature=str(bleu.get_signature()),  # complete only after scoring, when the references are counted
        chrf=chrf_score,
        chrf_signature=str(chrf.get_signature()),
        exact=_exact(outputs, references, lowercase),
        lines=len(outputs),
    )


def moses_tokenized_bleu(
    outputs: Sequence[str], references_tokenized: Sequence[str], *, language: str, lowercase: bool = True
) -> tuple[float, str]:
    """(BLEU, signature) of raw outputs against references that were published as Moses tokens.

    The outputs are tokenized by `moses_tokenize`; the references are used as they are. The score is only comparable
    with scores published for the same token files.
    """
    from sacrebleu.metrics import BLEU

    _check_lines(outputs, references_tokenized)
    tokenized = moses_tokenize(outputs, language=language, lowercase=lowercase)
    # `force` suppresses sacreBLEU's warning about tokenized text, which is intended here
    bleu = BLEU(lowercase=lowercase, tokenize="none", force=True)
    return bleu.corpus_score(tokenized, [references_tokenized]).score, str(bleu.get_signature())


def moses_tokenize(lines: Sequence[str], *, language: str, lowercase: bool = True) -> list[str]:
    """Apply Moses' punctuation normalization, lower-casing and tokenization, in that order.

    Special characters are escaped (`'` becomes `&apos;`) and hyphens stay inside their words, as in the token files of
    Multi30k. Lower-casing precedes tokenization, because the tokenizer recognises abbreviations and sentence ends by
    case: German `Bart.` stays one token, `bart .` does not.
    """
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError:
        raise UserError("Moses tokenization needs sacremoses: pip install regard[moses]") from None

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
    """Check that there is one reference for each output."""
    if len(outputs) != len(references):
        raise UserError(f"{len(outputs)} outputs but {len(references)} references: there must be one for each")
    if not outputs:
        raise UserError("no lines to score")
