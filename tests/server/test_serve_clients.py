"""`regard serve` with the public clients of the interfaces that it has, unchanged."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if "CI" not in os.environ:  # CI must have them
    for package in ("fastapi", "prometheus_client", "libretranslatepy", "deepl", "openai", "py3langid"):
        pytest.importorskip(package, reason="the server needs regard[serve], and its tests the clients")

import deepl
import openai
from libretranslatepy import LibreTranslateAPI
from prometheus_client.parser import text_string_to_metric_families

from regard.decoding.running_batch import RunningBatch
from regard.runs import LoadedRun
from regard.server.process import Server
from server.service import KEY, make_runs, serving

TEXT = "this cat is very large"
TEXTS = [TEXT, "the dog sleeps", "", "a red house and a tree"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def service(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"tester {KEY}\n")
    with serving(runs, keys=keys) as server:
        yield server


@pytest.fixture(scope="module")
def offline(runs: dict[str, Path]) -> LoadedRun:
    return LoadedRun.load(runs["en-es"], device="cpu")


def call(service: Server, path: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    with urllib.request.urlopen(urllib.request.Request(service.address + path, data, headers), timeout=60) as response:
        content = response.read()
    return json.loads(content) if content[:1] in b"{[" else content.decode()


def test_v1_translate(service: Server, offline: LoadedRun) -> None:
    answers = offline.translator()(TEXTS, nbest=3)
    got = call(service, "v1/translate", {"q": TEXTS, "source": "en", "target": "es", "nbest": 3})
    assert got["model"] == "en-es"
    for answer, one in zip(answers, got["translations"], strict=True):
        assert [one["text"], *(other["text"] for other in one["alternatives"])] == list(answer.texts)
        scores = [one.get("score"), *(other["score"] for other in one["alternatives"])]
        expected = [h.score for h in answer.hypotheses]
        assert scores == (pytest.approx(expected, rel=1e-4) if expected else [None])
    forced = call(service, "v1/translate", {"q": TEXT, "prefix": "el"})["translations"][0]["text"]
    assert forced.startswith("el")
    lines = call(service, "v1/translate", {"q": f"{TEXT}\n\n the dog sleeps"})["translations"][0]["text"]
    assert lines.split("\n")[1] == "" and lines.count("\n") == 2


def test_libretranslate(service: Server, offline: LoadedRun) -> None:
    client = LibreTranslateAPI(service.address, api_key=KEY)
    (expected,) = offline.translator()([TEXT])
    assert client.translate(TEXT, "en", "es") == expected.texts[0]
    assert client.translate(TEXT, "auto", "es") == expected.texts[0]
    assert client.languages() == [
        {"code": "en", "name": "English", "targets": ["es"]},
        {"code": "es", "name": "Spanish", "targets": []},
    ]
    assert client.detect("Este es un texto en español, con varias palabras")[0]["language"] == "es"
    settings = call(service, "frontend/settings")
    assert settings["keyRequired"] and settings["language"]["target"]["code"] == "es"
    several = call(service, "translate", {"q": TEXTS, "source": "auto", "target": "es", "alternatives": 2})
    assert several["translatedText"][0] == expected.texts[0] or len(several["translatedText"]) == len(TEXTS)
    assert [len(others) for others in several["alternatives"]] == [2, 2, 0, 2]
    assert several["detectedLanguage"][0]["language"] == "en"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        LibreTranslateAPI(service.address).translate(TEXT, "en", "es")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        client.translate(TEXT, "es", "en")


def test_deepl(service: Server, offline: LoadedRun) -> None:
    client = deepl.Translator(KEY, server_url=service.address.rstrip("/"))
    (expected,) = offline.translator()([TEXT])
    result = client.translate_text(TEXT, source_lang="EN", target_lang="ES")
    assert (result.text, result.detected_source_lang) == (expected.texts[0], "EN")
    assert [one.text for one in client.translate_text([TEXT, TEXT], target_lang="ES")] == [expected.texts[0]] * 2
    tagged = client.translate_text(f"<p>{TEXT} <br/> <b>the dog</b></p>", target_lang="ES", tag_handling="html").text
    assert tagged.startswith("<p>") and tagged.endswith("</p>") and tagged.count("<b>") == tagged.count("</b>") == 1
    assert [(one.code, one.name) for one in client.get_target_languages()] == [("ES", "Spanish")]
    assert [one.code for one in client.get_source_languages()] == ["EN"]
    usage = client.get_usage()
    assert usage.character.valid and usage.character.count and usage.character.count >= 3 * len(TEXT)
    with pytest.raises(deepl.AuthorizationException):
        deepl.Translator("another-key-of-16", server_url=service.address.rstrip("/")).get_usage()
    with pytest.raises(deepl.DeepLException):
        client.translate_text(TEXT, target_lang="DE")


def test_deepl_glossaries(service: Server) -> None:
    client = deepl.Translator(KEY, server_url=service.address.rstrip("/"))
    made = client.create_glossary("animals", "EN", "ES", {"cat": "gato", "dog": "perro"})
    assert (made.name, made.entry_count, made.ready) == ("animals", 2, True)
    assert [one.glossary_id for one in client.list_glossaries()] == [made.glossary_id]
    assert client.get_glossary(made.glossary_id).source_lang.upper() == "EN"
    assert client.get_glossary_entries(made) == {"cat": "gato", "dog": "perro"}
    assert client.get_glossary_languages()[0].source_lang.upper() == "EN"
    table = client.create_glossary_from_csv("a table", "EN", "ES", 'cat,gata,en,es\n"cat, dog","gata, perra",en,es')
    assert client.get_glossary_entries(table) == {"cat": "gata", "cat, dog": "gata, perra"}
    worded = client.translate_text("the cat", source_lang="EN", target_lang="ES", glossary=table)
    assert "gata" in worded.text.split()
    client.delete_glossary(made)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.get_glossary(made.glossary_id)


def openai_client(service: Server, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(api_key=key, base_url=f"{service.address}v1", max_retries=0)


def test_openai_completions(service: Server, runs: dict[str, Path]) -> None:
    client = openai_client(service)
    assert [model.id for model in client.models.list()] == ["en-es", "stories"]
    assert client.models.retrieve("stories").owned_by == "regard"
    offline = LoadedRun.load(runs["stories"], device="cpu")
    (expected,) = offline.generator(seed=7, method="sample", temperature=0.9, top_p=1.0)(["Once upon a"], tokens=20)
    asked: dict[str, Any] = dict(model="stories", prompt="Once upon a", max_tokens=20, temperature=0.9, seed=7)
    got = client.completions.create(**asked, logprobs=1)
    assert got.choices[0].text == expected.text
    assert got.usage is not None and got.usage.completion_tokens == len(expected.hypotheses[0].tokens)
    assert got.choices[0].finish_reason == ("stop" if expected.hypotheses[0].finished else "length")
    logprobs = got.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens).strip() == expected.text.strip()
    assert logprobs.token_logprobs == pytest.approx(expected.hypotheses[0].logprobs[: len(logprobs.tokens)], abs=1e-4)
    pieces = [part.choices[0].text for part in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == expected.text and len(pieces) > 2
    several = client.completions.create(**{**asked, "prompt": ["Once", "The dog"], "n": 2, "temperature": 0.5})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    streamed = dict.fromkeys(range(4), "")
    asked |= {"prompt": ["Once", "The dog"], "n": 2}
    for part in client.completions.create(**asked, stream=True):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == {choice.index: choice.text for choice in client.completions.create(**asked).choices}
    assert streamed[0] != streamed[1]
    asked |= {"prompt": "Once upon a", "n": 1}
    stop = expected.text[4:6]
    stopped = client.completions.create(**asked, stop=[stop])
    assert stopped.choices[0].text == expected.text[: expected.text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_openai_chat(service: Server, offline: LoadedRun, runs: dict[str, Path]) -> None:
    client = openai_client(service)
    (expected,) = offline.translator()([TEXT])
    got = client.chat.completions.create(model="en-es", messages=[{"role": "user", "content": TEXT}])
    assert got.choices[0].message.content == expected.texts[0]
    greedy = LoadedRun.load(runs["stories"], device="cpu").generator(method="beam", beam=1)(["Once upon"], tokens=12)[0]
    asked: dict[str, Any] = dict(model="stories", messages=[{"role": "user", "content": "Once upon"}], temperature=0)
    whole = client.chat.completions.create(**asked, max_tokens=12, logprobs=True)
    assert whole.choices[0].message.content == greedy.text
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content
    with client.chat.completions.create(
        **asked, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == greedy.text
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == len(greedy.hypotheses[0].tokens)
    assert parts[0].choices[0].delta.role == "assistant"


def test_openai_alternatives_of_a_translation(service: Server, offline: LoadedRun) -> None:
    client = openai_client(service)
    expected = [answer.texts for answer in offline.translator()(TEXTS[:2], nbest=3)]
    asked: dict[str, Any] = dict(model="en-es", prompt=TEXTS[:2], n=3)
    got = {choice.index: choice.text for choice in client.completions.create(**asked).choices}
    assert got == {3 * line + rank: text for line, texts in enumerate(expected) for rank, text in enumerate(texts)}
    streamed: dict[int, str] = {}
    for part in client.completions.create(**asked, stream=True):
        for choice in part.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == got


def test_errors_in_a_stream_have_a_reason(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = dict(model="stories", prompt="Once upon a", max_tokens=3000, temperature=0, stream=True)
    limits = service._server.config.app.state.gateway.limits  # type: ignore[union-attr]
    monkeypatch.setattr(service._server.config.app.state.gateway, "limits", replace(limits, seconds=1.0))  # type: ignore[union-attr]
    with pytest.raises(openai.APIError, match="longer than 1 seconds"):
        list(openai_client(service).completions.create(**asked))


def test_a_search_that_fails_ends_its_stream_with_the_reason(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = RunningBatch.advance, iter(range(100))

    def failing(self: RunningBatch) -> int:
        if next(steps) == 5:
            raise RuntimeError("secret details")
        return real(self)

    monkeypatch.setattr(RunningBatch, "advance", failing)
    client, asked = openai_client(service), dict(model="stories", prompt="Once", temperature=0)
    stream = client.completions.create(**asked, max_tokens=50, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError, match="a bug in regard: RuntimeError") as failed:
        list(stream)
    assert "secret" not in str(failed.value)
    assert client.completions.create(**asked, max_tokens=2).choices[0].text  # type: ignore[call-overload]


def test_openai_errors(service: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client(service).completions.create(model="none", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai_client(service, "wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        openai_client(service).completions.create(model="stories", prompt="x", temperature=9)


def test_operation(service: Server) -> None:
    assert call(service, "healthz") == {"status": "ok"}
    assert call(service, "readyz")["status"] == "ready"
    call(service, "v1/translate", {"q": TEXT})
    families = {family.name: family for family in text_string_to_metric_families(call(service, "metrics"))}
    assert {"regard_requests", "regard_request_seconds", "regard_tokens", "regard_batch_sentences"} <= set(families)
    assert {"regard_queue_sentences", "regard_running_sentences", "regard_loaded_models"} <= set(families)
    tokens = {sample.labels["model"]: sample.value for sample in families["regard_tokens"].samples if sample.labels}
    assert tokens["en-es"] > 0
    document = call(service, "openapi.json")
    assert {"/v1/translate", "/translate", "/v2/translate", "/v1/chat/completions"} <= set(document["paths"])
    fields = document["paths"]["/v1/translate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"q", "nbest", "glossary"} <= set(fields["properties"])
