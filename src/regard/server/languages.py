"""Names of languages, and detection of the language of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from regard.errors import UserError

# ISO 639-1 codes with English names: those that public translation corpora have.
NAMES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque",
    "fa": "Persian", "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "he": "Hebrew", "hi": "Hindi",
    "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese",
    "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "mk": "Macedonian", "ms": "Malay", "mt": "Maltese",
    "nb": "Norwegian", "nl": "Dutch", "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian",
    "ru": "Russian", "sk": "Slovak", "sl": "Slovenian", "sq": "Albanian", "sr": "Serbian", "sv": "Swedish",
    "th": "Thai", "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese",
    "zh": "Chinese",
}  # fmt: skip


def name_of(code: str) -> str:
    """
    >>> name_of("es"), name_of("xx")
    ('Spanish', 'xx')
    """
    return NAMES.get(code, code)


def detect(text: str, among: Sequence[str] = ()) -> tuple[str, float]:
    """The language of a text and its probability, among these languages (none: all that are known)."""
    try:
        from py3langid import rank
    except ImportError:
        raise UserError("language detection needs py3langid: pip install 'regard[serve]'") from None
    scores = {language: float(score) for language, score in rank(text) if not among or language in among}
    if not scores:  # languages that it does not know
        return among[0], 0.0
    best = max(scores, key=lambda language: scores[language])
    return best, 1 / sum(math.exp(score - scores[best]) for score in scores.values())
