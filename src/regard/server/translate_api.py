"""The server's own interface: `/v1/translate`, with n-best lists and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from regard.runs import LoadedRun
from regard.server.gateway import Gateway, Payload, RequestTooLarge
from regard.server.pool import ActiveModel
from regard.tasks.documents import TranslatedDocument, translate_documents
from regard.tasks.glossary import Glossary
from regard.tasks.translator import Translator

MAX_NBEST = 16
MAX_TERMS, MAX_FORMS, MAX_TERM_CHARACTERS = 10_000, 16, 500_000  # of a glossary, of a term, and of all terms

Terms = dict[str, str | list[str]]


class TranslateBody(Payload):
    """A request of `/v1/translate`."""

    q: str | list[str] = Field(description="a text, or several")
    model: str | None = Field(None, description="the name of a model; not set: one for the languages")
    source: str | None = Field(None, description="the language of the texts; not set: that of the model")
    target: str | None = Field(None, description="the language to translate to; not set: that of the model")
    format: Literal["text", "html"] = "text"
    nbest: Annotated[int, Field(ge=1, le=MAX_NBEST, description="translations of each text, the best first")] = 1
    alternatives: Annotated[int, Field(ge=0, lt=MAX_NBEST, description="translations beside the best")] = 0
    glossary: Terms = Field({}, description="terms, and their translation or a list of allowed ones")
    alignment: bool = Field(False, description="which source words each word of the translation comes from")
    confidence: bool = Field(False, description="how likely each word of the translation is right")
    prefix: str | None = Field(None, description="what the translation must begin with")


class TranslatedText(BaseModel):
    """The translation of a text."""

    text: str
    score: float | None = Field(None, description="log-probability, divided by the length penalty")
    alternatives: list[dict[str, Any]] = []
    alignment: list[list[int]] | None = None
    words: list[dict[str, Any]] | None = None
    source_words: list[str] | None = None
    sentences: list[dict[str, str]] | None = Field(None, description="with the alignment: each sentence and its best")
    unmet: list[str] | None = Field(None, description="requirements of the glossary that could not be met")
    truncated: bool = Field(False, description="whether the text was longer than the model reads")


class TranslateAnswer(BaseModel):
    """The answer of `/v1/translate`."""

    model: str
    translations: list[TranslatedText]


@dataclass(frozen=True)
class TranslateOptions:
    """Options of a request, for each of its translations."""

    nbest: int = 1
    html: bool = False
    glossary: Glossary | None = None  # beside that of the run
    alignment: bool = False
    confidence: bool = False
    prefix: str | None = None


def glossary_of(terms: Mapping[str, str | list[str]]) -> Glossary | None:
    """The glossary of a request; None without terms. One that would take long to prepare is refused."""
    check_glossary(terms)
    return Glossary.of(terms) if terms else None


def check_glossary(glossary: Mapping[str, str | list[str]]) -> None:
    """Refuse a glossary that would take long to prepare."""
    forms = {term: [given] if isinstance(given, str) else given for term, given in glossary.items()}
    size = sum(len(term) + sum(map(len, each)) for term, each in forms.items())
    if len(forms) > MAX_TERMS:
        raise RequestTooLarge(f"a glossary of {len(forms):,} terms: at most {MAX_TERMS:,} are allowed")
    if any(len(each) > MAX_FORMS for each in forms.values()):
        raise RequestTooLarge(f"a term of the glossary has more than {MAX_FORMS} translations")
    if size > MAX_TERM_CHARACTERS:
        raise RequestTooLarge(f"a glossary of {size:,} characters: at most {MAX_TERM_CHARACTERS:,} are allowed")


def translations(
    active: ActiveModel, texts: list[str], options: TranslateOptions, language: str | None = None
) -> list[TranslatedText]:
    """Translate texts in the batches of the engine; `language`, that of the texts, selects the sentence splitter.

    White space between sentences, and in HTML the tags, stay as they are.
    """
    model = active.model
    glossary = active.glossary if options.glossary is None else options.glossary.with_defaults(active.glossary)
    translator = active.translator(beam=max(model.recipe.decoding.beam, options.nbest), glossary=glossary)
    documents = translate_documents(
        translator,
        model.word_links,
        texts,
        format="html" if options.html else "text",
        language=language,
        nbest=options.nbest,
        prefix=options.prefix,
        aligned=options.alignment,
    )
    return [_translated(document, translator, model, options) for document in documents]


def _translated(
    document: TranslatedDocument, translator: Translator, model: LoadedRun, options: TranslateOptions
) -> TranslatedText:
    ranked: list[dict[str, Any]] = [
        {"text": text, "score": score} for text, score in zip(document.texts, document.scores, strict=True)
    ]
    answer = TranslatedText(**ranked[0], alternatives=ranked[1:], truncated=document.truncated)
    if translator.glossary is not None:
        answer.unmet = [str(requirement) for sentence in document.answers for requirement in sentence.unmet]
    if options.alignment:
        answer.alignment = [list(link) for link in document.alignment()]
        answer.source_words = document.source_words
        sentences = zip(document.document.sentences, document.answers, strict=True)
        answer.sentences = [{"source": sentence, "text": best.texts[0]} for sentence, best in sentences]
    if options.alignment or options.confidence:
        words = document.words(translator, model.calibration)
        answer.words = [
            {"text": text} | ({"confidence": round(c, 4)} if options.confidence else {}) for text, c in words
        ]
    return answer


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["regard"])

    @router.post("/v1/translate", response_model=TranslateAnswer, openapi_extra=body_schema(TranslateBody))
    async def translate(request: Request) -> Response:
        """Translate a text or several."""
        body = await gateway.read(request, TranslateBody)
        texts = [body.q] if isinstance(body.q, str) else body.q
        glossary = glossary_of(body.glossary)
        gateway.check_texts(request, texts)
        served = gateway.pool.find_translator(body.source, body.target, body.model)
        request.state.model = served.name
        options = TranslateOptions(
            max(body.nbest, body.alternatives + 1),
            body.format == "html",
            glossary,
            body.alignment,
            body.confidence,
            body.prefix,
        )

        def work() -> list[TranslatedText]:
            with gateway.pool.using(served) as active:
                return translations(active, texts, options, served.pair[0] if served.pair else body.source)

        found = await gateway.run(request, work)
        answer = TranslateAnswer(model=served.name, translations=found)
        return JSONResponse(answer.model_dump(exclude_none=True))

    return router


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that `Gateway.read` reads."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    kinds = ("application/json", "application/x-www-form-urlencoded")
    return {"requestBody": {"content": {kind: {"schema": schema} for kind in kinds}, "required": True}}
