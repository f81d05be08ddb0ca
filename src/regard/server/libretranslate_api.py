"""LibreTranslate's interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from regard.server.gateway import Gateway, Payload
from regard.server.languages import detect, name_of
from regard.server.translate_api import MAX_NBEST, TranslatedText, TranslateOptions, body_schema, translations


class LibreBody(Payload):
    q: str | list[str]
    source: str = "auto"
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, lt=MAX_NBEST)] = 0


class DetectBody(Payload):
    q: str


def routes(gateway: Gateway) -> APIRouter:
    router, pool = APIRouter(tags=["LibreTranslate"]), gateway.pool

    def sources() -> list[str]:
        return sorted({source for source, _ in pool.pairs})

    @router.post("/translate", openapi_extra=body_schema(LibreBody))
    async def translate(request: Request) -> dict[str, Any]:
        body = await gateway.read(request, LibreBody)
        texts = [body.q] if isinstance(body.q, str) else body.q
        gateway.check_texts(request, texts)
        options = TranslateOptions(body.alternatives + 1, body.format == "html")

        def work() -> tuple[list[TranslatedText], str, float]:
            source, confidence = body.source, 1.0
            if source == "auto":
                candidates = [s for s, t in pool.pairs if t == body.target] or sources()
                source, confidence = detect(" ".join(texts), candidates)
            served = pool.find_translator(source, body.target)
            request.state.model = served.name
            with pool.using(served) as active:
                return translations(active, texts, options, source), source, confidence

        found, source, confidence = await gateway.run(request, work)
        answer: dict[str, Any] = {"translatedText": [one.text for one in found]}
        if body.source == "auto":
            detected = {"language": source, "confidence": round(100 * confidence)}
            answer["detectedLanguage"] = [detected] * len(found)
        if body.alternatives:
            answer["alternatives"] = [[other["text"] for other in one.alternatives] for one in found]
        return answer if isinstance(body.q, list) else {name: values[0] for name, values in answer.items()}

    @router.post("/detect", openapi_extra=body_schema(DetectBody))
    async def detect_language(request: Request) -> list[dict[str, Any]]:
        body = await gateway.read(request, DetectBody)
        gateway.check_texts(request, [body.q])
        language, confidence = await gateway.run(request, lambda: detect(body.q))
        return [{"language": language, "confidence": round(100 * confidence)}]

    @router.get("/languages")
    async def languages() -> list[dict[str, Any]]:
        codes = sorted({code for pair in pool.pairs for code in pair})
        return [
            {"code": code, "name": name_of(code), "targets": sorted({t for s, t in pool.pairs if s == code})}
            for code in codes
        ]

    @router.get("/frontend/settings")
    async def settings() -> dict[str, Any]:
        sides = dict(zip(("source", "target"), pool.pairs[0] if pool.pairs else ("en", "en"), strict=True))
        return {
            "apiKeys": not gateway.access.is_open,
            "charLimit": gateway.limits.characters,
            "filesTranslation": False,
            "frontendTimeout": 500,
            "keyRequired": not gateway.access.is_open,
            "language": {side: {"code": code, "name": name_of(code)} for side, code in sides.items()},
            "suggestions": False,
            "supportedFilesFormat": [],
        }

    return router
