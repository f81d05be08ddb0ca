"""OpenAI's interface: models, completions and chat completions. A translation model translates the prompt."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from regard.cancel import Cancellation, Cancelled
from regard.errors import UserError
from regard.server.gateway import TIMED_OUT, Gateway, Payload, RequestTooLarge, error_answer
from regard.server.pool import ActiveModel, ServedRun
from regard.server.translate_api import TranslateOptions, body_schema, translations
from regard.tasks.generator import Generation, Generator, until_stop
from regard.text.chat import Messages

MAX_SAMPLES, MAX_STOPS = 16, 16
MIN_TEMPERATURE = 0.01  # below it, the most likely token is taken; dividing by less may overflow


class SamplingBody(Payload):
    """The fields that completions and chat completions have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_logprobs(self) -> bool:
        return False


class CompletionBody(SamplingBody):
    prompt: str | list[str] = ""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class ChatMessage(Payload):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class ChatBody(SamplingBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def conversation(self) -> Messages:
        """The messages as chat templates know them: the role "developer" is a newer name of "system"."""
        roles = {"developer": "system"}
        return [{"role": roles.get(one.role, one.role), "content": one.text} for one in self.messages]


@dataclass(frozen=True)
class Continuation:
    """One continuation of one prompt."""

    index: int  # of the choice: those of the first prompt first
    text: str
    finish_reason: str  # stop or length
    tokens: int
    token_texts: Sequence[str] = ()
    logprobs: Sequence[float] = ()


def _generator(active: ActiveModel, body: SamplingBody) -> Generator:
    changes: dict[str, Any] = {"method": "sample", "temperature": 1.0 if body.temperature is None else body.temperature}
    changes["top_p"] = 1.0 if body.top_p is None else body.top_p
    if changes["temperature"] < MIN_TEMPERATURE:
        changes = {"method": "beam", "beam": 1}
    seed = secrets.randbits(32) if body.seed is None else body.seed & 0x7FFFFFFF
    return active.generator(seed=seed, **changes)


Watcher = Callable[[int, int, str], None]  # called with the numbers of a prompt and of a sample, and its text so far


def complete(
    active: ActiveModel, prompts: list[str], body: SamplingBody, tokens: int, watch: Watcher | None
) -> tuple[list[Continuation], int]:
    """Continue prompts; return the choices of all of them, and how many prompt tokens there were."""
    if active.model.task.verb == "translate":
        return _translate(active, prompts, body.samples)
    generator = _generator(active, body)
    if active.chat is not None and isinstance(body, ChatBody):
        conversation = active.chat.encode(body.conversation)
        generator = replace(generator, chat=lambda _: conversation)
    made = generator(prompts, samples=body.samples, tokens=tokens, stop=body.stops, watch=watch)
    read = sum(len(generator.read(prompt)[0]) for prompt in prompts)
    numbered = zip(count(0, body.samples), made, strict=False)
    return [choice for first, one in numbered for choice in _choices(generator, one, body, first)], read


def _translate(active: ActiveModel, prompts: list[str], nbest: int) -> tuple[list[Continuation], int]:
    """The best translations of each prompt, which may be fewer than wanted."""
    source, target = active.model.tokenizers
    choices = []
    for line, one in enumerate(translations(active, prompts, TranslateOptions(nbest))):
        texts = [one.text, *(other["text"] for other in one.alternatives)]
        for rank, (text, ids) in enumerate(zip(texts, target.encode_batch(texts), strict=True)):
            choices.append(Continuation(line * nbest + rank, text, "stop", len(ids)))
    return choices, sum(map(len, source.encode_batch(prompts)))


def _choices(generator: Generator, generation: Generation, body: SamplingBody, first: int) -> list[Continuation]:
    choices = []
    for number, (text, hypothesis) in enumerate(zip(generation.texts, generation.hypotheses, strict=True), first):
        tokens = hypothesis.tokens
        stopped = hypothesis.finished or until_stop(generator.spell(tokens), body.stops)[1]
        choice = Continuation(number, text, "stop" if stopped else "length", len(tokens))
        if body.wants_logprobs:  # the text of a token is known from those of the prefixes before and after it
            spelled = [generator.spell(tokens[:n]) for n in range(len(tokens) + 1)]
            token_texts = [after[len(before) :] for before, after in pairwise(spelled)]
            choice = replace(choice, token_texts=token_texts, logprobs=hypothesis.logprobs[: len(token_texts)])
        choices.append(choice)
    return choices


class CompletionFormat:
    """The format of answers to `/v1/completions`; `ChatFormat` is that of chat completions."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, choice: Continuation, wants_logprobs: bool, prefix: str = "") -> dict[str, Any]:
        logprobs = None
        if wants_logprobs and choice.token_texts:
            offsets = [len("".join(choice.token_texts[:n])) + len(prefix) for n in range(len(choice.token_texts))]
            logprobs = {
                "tokens": list(choice.token_texts),
                "token_logprobs": list(choice.logprobs),
                "top_logprobs": None,
                "text_offset": offsets,
            }
        text = prefix + choice.text
        return {"index": choice.index, "text": text, "finish_reason": choice.finish_reason, "logprobs": logprobs}

    def delta(self, index: int, text: str | None, reason: str | None, first: bool) -> dict[str, Any]:
        return {"index": index, "text": text or "", "finish_reason": reason, "logprobs": None}


class ChatFormat(CompletionFormat):
    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Continuation, wants_logprobs: bool, prefix: str = "") -> dict[str, Any]:
        logprobs = None
        if wants_logprobs:
            pairs = zip(choice.token_texts, choice.logprobs, strict=True)
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in pairs
            ]
            logprobs = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.index, "message": message, "finish_reason": choice.finish_reason, "logprobs": logprobs}

    def delta(self, index: int, text: str | None, reason: str | None, first: bool) -> dict[str, Any]:
        content = {} if text is None else {"content": text}
        delta = {"role": "assistant", **content} if first else content
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}


@dataclass(frozen=True)
class Completion:
    """A request for completions or chat completions."""

    gateway: Gateway
    served: ServedRun
    body: SamplingBody
    format: CompletionFormat
    prompts: list[str]
    tokens: int
    echo: bool = False

    @property
    def _envelope(self) -> dict[str, Any]:
        id = f"{self.format.id_prefix}-{secrets.token_hex(12)}"
        return {"id": id, "created": int(time.time()), "model": self.served.name}

    def _work(self, watch: Watcher | None = None) -> tuple[list[Continuation], dict[str, int]]:
        with self.gateway.pool.using(self.served) as active:
            choices, read = complete(active, self.prompts, self.body, self.tokens, watch)
        written = sum(choice.tokens for choice in choices)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return choices, usage

    async def answer(self, request: Request) -> Response:
        if self.body.stream:
            return await self._streamed(request)
        choices, usage = await self.gateway.run(request, self._work)
        shown = [
            self.format.choice(
                choice, self.body.wants_logprobs, self.prompts[choice.index // self.body.samples] if self.echo else ""
            )
            for choice in choices
        ]
        return JSONResponse({**self._envelope, "object": self.format.object, "choices": shown, "usage": usage})

    async def _streamed(self, request: Request) -> Response:
        """Send new text as server-sent events. An error before the first event is answered with its status."""
        loop, events, cancellation = asyncio.get_running_loop(), asyncio.Queue[Any](), Cancellation()
        sent: dict[int, int] = {}

        def emit(event: Any) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def watch(line: int, sample: int, text: str) -> None:
            number = line * self.body.samples + sample
            if len(text) > sent.get(number, 0):
                emit((number, text[sent.get(number, 0) :], None))
                sent[number] = len(text)

        def work() -> None:
            try:
                choices, usage = self._work(watch)
                for choice in choices:
                    emit((choice.index, choice.text[sent.get(choice.index, 0) :], choice.finish_reason))
                emit(usage)
            except Exception as error:
                emit(error)

        deadline = self.gateway.new_deadline()
        with self.gateway.cancelling(request, cancellation, deadline):
            self.gateway.submit(work, cancellation)
            first = await events.get()
            if isinstance(first, Exception):
                raise first
        return StreamingResponse(self._events(first, events, cancellation, deadline), media_type="text/event-stream")

    async def _events(
        self, event: Any, events: asyncio.Queue[Any], cancellation: Cancellation, deadline: float
    ) -> AsyncIterator[str]:
        envelope = {**self._envelope, "object": self.format.chunk_object}
        begun: set[int] = set()
        try:
            with self.gateway.cancel_at(deadline, cancellation):
                while not isinstance(event, dict | Exception):
                    number, text, reason = event
                    if text or number not in begun:
                        yield _event(
                            {**envelope, "choices": [self.format.delta(number, text, None, number not in begun)]}
                        )
                        begun.add(number)
                    if reason is not None:
                        yield _event({**envelope, "choices": [self.format.delta(number, None, reason, False)]})
                    event = await events.get()
            if isinstance(event, Exception):
                yield _event({"error": self._error(event, cancellation)})
            elif (self.body.stream_options or {}).get("include_usage"):
                yield _event({**envelope, "choices": [], "usage": event})
            yield "data: [DONE]\n\n"
        finally:
            cancellation.cancel()  # the client disconnected, or the end was reached

    def _error(self, error: Exception, cancellation: Cancellation) -> dict[str, Any]:
        """An error after the beginning of a stream, as OpenAI describes it."""
        late = isinstance(error, Cancelled) and cancellation.reason == TIMED_OUT
        status, why = error_answer(self.gateway.timeout_error() if late else error)
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"message": why, "type": kind, "param": None, "code": None}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def routes(gateway: Gateway) -> APIRouter:
    router, pool = APIRouter(tags=["OpenAI"]), gateway.pool

    def describe(served: ServedRun) -> dict[str, Any]:
        about = {"id": served.name, "object": "model", "created": served.created, "owned_by": "regard"}
        source, target = served.pair or (None, None)
        return {**about, "task": served.verb, "source": source, "target": target, "loaded": bool(served.active)}

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        await gateway.read(request, Payload)
        return {"object": "list", "data": [describe(served) for served in pool.runs.values()]}

    @router.get("/v1/models/{name}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        await gateway.read(request, Payload)
        return describe(pool.find(name))

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await gateway.read(request, CompletionBody)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        tokens = _tokens(gateway, request, prompts, body, body.max_tokens or 16)
        served = pool.find(body.model)
        request.state.model = served.name
        completion = Completion(gateway, served, body, CompletionFormat(), prompts, tokens, bool(body.echo))
        return await completion.answer(request)

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat(request: Request) -> Response:
        body = await gateway.read(request, ChatBody)
        served = pool.find(body.model)
        request.state.model = served.name
        if served.verb == "translate":
            prompt = next((message.text for message in reversed(body.messages) if message.role == "user"), "")
        else:  # the prompt where the run has no chat template: the messages are one text
            prompt = "\n".join(message.text for message in body.messages)
        tokens = _tokens(gateway, request, [prompt], body, body.max_completion_tokens or body.max_tokens or 256)
        completion = Completion(gateway, served, body, ChatFormat(), [prompt], tokens)
        return await completion.answer(request)

    return router


def _tokens(gateway: Gateway, request: Request, prompts: list[str], body: SamplingBody, tokens: int) -> int:
    """Check the limits of the whole request; return how many tokens to generate for each sample at most."""
    if not prompts:
        raise UserError("prompt: there is none")
    gateway.check_texts(request, prompts)
    if len(body.stops) > MAX_STOPS:  # each is searched for after every token
        raise UserError(f"stop: {len(body.stops)} texts: at most {MAX_STOPS} are allowed")
    samples, limit = len(prompts) * body.samples, gateway.limits.tokens
    if samples > gateway.limits.texts:
        raise RequestTooLarge(f"{samples} samples: at most {gateway.limits.texts} are allowed in a request")
    if tokens * samples > limit:
        raise UserError(f"max_tokens: {samples} samples of {tokens} tokens are above the {limit} of a request")
    return tokens
