"""DeepL's interface, version 2: translation, languages, usage and glossaries. Glossaries are kept in memory."""

from __future__ import annotations

import csv
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import field_validator

from regard.errors import UserError
from regard.server.access import ApiKey
from regard.server.gateway import Gateway, Payload
from regard.server.languages import detect, name_of
from regard.server.pool import Pair
from regard.server.registry import NotFound
from regard.server.translate_api import TranslatedText, TranslateOptions, body_schema, glossary_of, translations
from regard.tasks.glossary import Glossary

MAX_GLOSSARIES, MAX_CHARACTERS = 100, 5_000_000  # of all glossaries of a key


class DeepLBody(Payload):
    text: str | list[str]
    target_lang: str
    source_lang: str | None = None
    tag_handling: Literal["html", "xml"] | None = None
    glossary_id: str | None = None

    @field_validator("target_lang", "source_lang")
    @classmethod
    def _code(cls, code: str | None) -> str | None:
        """DeepL's codes are upper case, and some have a region: EN-US."""
        return None if code is None else code.lower().partition("-")[0]


class LanguagesBody(Payload):
    type: Literal["source", "target"] = "source"


class GlossaryBody(Payload):
    name: str
    source_lang: str
    target_lang: str
    entries: str
    entries_format: Literal["tsv", "csv"] = "tsv"


@dataclass(frozen=True)
class StoredGlossary:
    """A glossary that a client has created."""

    id: str
    name: str
    pair: Pair
    entries: dict[str, str]
    glossary: Glossary
    owner: str
    created: str
    size: int  # characters

    def describe(self) -> dict[str, Any]:
        return {
            "glossary_id": self.id,
            "name": self.name,
            "ready": True,
            "source_lang": self.pair[0],
            "target_lang": self.pair[1],
            "creation_time": self.created,
            "entry_count": len(self.entries),
        }


def parse_entries(text: str, format: str) -> dict[str, str]:
    """Read lines of a term and its translation; CSV may quote them, and name the languages in two more columns.

    >>> parse_entries('cat,gato\\n"cat, dog",perro,en,es', "csv")
    {'cat': 'gato', 'cat, dog': 'perro'}
    """
    entries: dict[str, str] = {}
    lines = text.splitlines()
    try:
        rows = list(csv.reader(lines, strict=True)) if format == "csv" else [line.split("\t", 1) for line in lines]
    except csv.Error as error:
        raise UserError(f"entries: not CSV: {error}") from None
    for number, row in enumerate(rows, 1):
        if not any(part.strip() for part in row):
            continue
        term, translation = (part.strip() for part in (*row, "", "")[:2])
        if not (term and translation):
            raise UserError(f"entries, line {number}: expected a term and its translation")
        entries[term] = translation
    if not entries:
        raise UserError("entries: there are none")
    return entries


class GlossaryStore:
    """The glossaries of all keys. A client sees those of its own key."""

    def __init__(self) -> None:
        self._glossaries: dict[str, StoredGlossary] = {}
        self._lock = Lock()

    def add(self, body: GlossaryBody, key: ApiKey) -> StoredGlossary:
        entries = parse_entries(body.entries, body.entries_format)
        glossary = glossary_of(entries)
        assert glossary is not None
        pair = body.source_lang.lower(), body.target_lang.lower()
        created = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        stored = StoredGlossary(
            secrets.token_hex(16), body.name, pair, entries, glossary, key.name, created, len(body.entries)
        )
        with self._lock:
            others = self.of(key)
            if len(others) >= MAX_GLOSSARIES or len(body.entries) + sum(one.size for one in others) > MAX_CHARACTERS:
                raise UserError(
                    f"at most {MAX_GLOSSARIES} glossaries of together {MAX_CHARACTERS:,} characters are allowed: "
                    "delete one"
                )
            self._glossaries[stored.id] = stored
        return stored

    def of(self, key: ApiKey) -> list[StoredGlossary]:
        return [terms for terms in list(self._glossaries.values()) if terms.owner == key.name]

    def find(self, id: str, key: ApiKey) -> StoredGlossary:
        glossary = self._glossaries.get(id)
        if glossary is None or glossary.owner != key.name:
            raise NotFound(f"there is no glossary {id[:64]!r}")
        return glossary

    def delete(self, id: str, key: ApiKey) -> None:
        with self._lock:
            del self._glossaries[self.find(id, key).id]


def routes(gateway: Gateway) -> APIRouter:
    router, pool, store = APIRouter(tags=["DeepL"]), gateway.pool, GlossaryStore()

    @router.post("/v2/translate", openapi_extra=body_schema(DeepLBody))
    async def translate(request: Request) -> dict[str, Any]:
        body = await gateway.read(request, DeepLBody)
        texts = [body.text] if isinstance(body.text, str) else body.text
        gateway.check_texts(request, texts)
        terms = None if body.glossary_id is None else store.find(body.glossary_id, request.state.key)
        if terms is not None and terms.pair != (body.source_lang, body.target_lang):
            raise UserError(f"the glossary is for {terms.pair[0]} to {terms.pair[1]}: set source_lang and target_lang")
        options = TranslateOptions(
            html=body.tag_handling is not None, glossary=None if terms is None else terms.glossary
        )

        def work() -> tuple[list[TranslatedText], str]:
            source = body.source_lang
            if source is None:
                source, _ = detect(" ".join(texts), [s for s, t in pool.pairs if t == body.target_lang])
            served = pool.find_translator(source, body.target_lang)
            request.state.model = served.name
            with pool.using(served) as active:
                return translations(active, texts, options, source), source

        found, source = await gateway.run(request, work)
        pairs = zip(texts, found, strict=True)
        about = {"detected_source_language": source.upper()}
        return {"translations": [{**about, "text": one.text, "billed_characters": len(text)} for text, one in pairs]}

    @router.get("/v2/languages")
    async def languages(request: Request) -> list[dict[str, Any]]:
        side = 1 if (await gateway.read(request, LanguagesBody)).type == "target" else 0
        codes = sorted({pair[side] for pair in pool.pairs})
        more = {"supports_formality": False} if side else {}
        return [{"language": code.upper(), "name": name_of(code), **more} for code in codes]

    @router.get("/v2/usage")
    async def usage(request: Request) -> dict[str, Any]:
        await gateway.read(request, Payload)
        return {"character_count": request.state.key.characters, "character_limit": 1_000_000_000_000}

    @router.get("/v2/glossary-language-pairs")
    async def glossary_pairs(request: Request) -> dict[str, Any]:
        await gateway.read(request, Payload)
        return {"supported_languages": [{"source_lang": s, "target_lang": t} for s, t in pool.pairs]}

    @router.post("/v2/glossaries", status_code=201, openapi_extra=body_schema(GlossaryBody))
    async def make_glossary(request: Request) -> dict[str, Any]:
        body = await gateway.read(request, GlossaryBody)
        return store.add(body, request.state.key).describe()

    @router.get("/v2/glossaries")
    async def glossaries(request: Request) -> dict[str, Any]:
        await gateway.read(request, Payload)
        return {"glossaries": [terms.describe() for terms in store.of(request.state.key)]}

    @router.get("/v2/glossaries/{id}")
    async def glossary(id: str, request: Request) -> dict[str, Any]:
        await gateway.read(request, Payload)
        return store.find(id, request.state.key).describe()

    @router.get("/v2/glossaries/{id}/entries")
    async def entries(id: str, request: Request) -> Response:
        await gateway.read(request, Payload)
        pairs = store.find(id, request.state.key).entries.items()
        return Response("\n".join(f"{a}\t{b}" for a, b in pairs), media_type="text/tab-separated-values")

    @router.delete("/v2/glossaries/{id}", status_code=204)
    async def delete_glossary(id: str, request: Request) -> Response:
        await gateway.read(request, Payload)
        store.delete(id, request.state.key)
        return Response(status_code=204)

    return router
