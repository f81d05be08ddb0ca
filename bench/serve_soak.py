"""Mixed load on `regard serve` for a long time: whether memory stays flat, nothing fails, and answers are right.

    python -m bench.serve_soak EN-ES-RUN STORIES-RUN [--minutes 30] [--rate 4] [--clients 6] [--threads 1]

The runs are those of the recipes en-es and stories. Each client sends random requests with random pauses: sentences,
paragraphs, HTML, glossaries, n-best lists, lists, greedy and sampled continuations, streams, requests that are
refused, and streams that the client leaves. Each answer is compared with that of the Python API, computed beforehand
without a server. Prints a table of kinds with counts, differences and errors, and the server's memory over time; exits
with 1 after an error or an unexplained difference. A difference of two translations whose scores are within 0.001 is a
tie: in float32 the order of additions depends on the batch.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import regard
from bench.machine import heading
from regard.data.builtin import pairs
from regard.tasks.documents import translate_documents

PORT = 8767
TIE = 1e-3
OF_EACH_KIND = 40  # different requests
TOKENS = 40  # of a continuation
PROMPTS = ("Once upon a time", "One day", "The little dog", "A girl", "In the morning", "There was a boy", "The sun")


@dataclass(frozen=True)
class Request:
    """A request, and what the Python API answers."""

    kind: str
    path: str
    body: dict[str, Any]
    expected: list[str] = field(default_factory=list)  # texts
    scores: list[float] = field(default_factory=list)  # of translations
    status: int = 200
    leaves: bool = False  # whether the client closes the connection after the first event


def translation_requests(run: str, draw: Random) -> list[Request]:
    model = regard.load(run, device="cpu")
    sentences = [pair.source for pair in pairs("en-es", "test")]
    found = []
    for _ in range(OF_EACH_KIND):
        one = draw.choice(sentences)
        path = "/v1/translate"
        answer = model.translate(one)
        found.append(Request("a sentence", path, {"q": one}, [answer.text], [answer.score]))
        ranked = model.translate(one, nbest=3)
        texts = [ranked.text, *(text for text, _ in ranked.alternatives)]
        scores = [ranked.score, *(score for _, score in ranked.alternatives)]
        found.append(Request("three best", path, {"q": one, "nbest": 3}, texts, scores))
        some = draw.sample(sentences, draw.randint(2, 24))
        answers = model.translate(some)
        texts, scores = [each.text for each in answers], [each.score for each in answers]
        found.append(Request("a list", path, {"q": some}, texts, scores))
        found.append(Request("DeepL", "/v2/translate", {"text": some, "target_lang": "ES"}, texts))
        form = {"q": one, "source": "en", "target": "es", "format": "text"}
        found.append(Request("LibreTranslate", "/translate", form, [answer.text]))
        term = draw.choice(one.split())
        glossary = {term: draw.choice(["palabra", "casa grande", "!la"])}
        answer = model.translate(one, glossary=glossary)
        body = {"q": one, "glossary": glossary, "confidence": True}
        found.append(Request("a glossary", path, body, [answer.text], [answer.score]))
        for kind, format in (("a paragraph", "text"), ("HTML", "html")):
            text = paragraph(draw, sentences, format == "html")
            (document,) = translate_documents(
                model.translator(), model.word_links, [text], format=format, language="en"
            )
            body = {"q": text, "format": format, "source": "en"}
            found.append(Request(kind, path, body, list(document.texts), [s for s in document.scores if s is not None]))
    return found


def paragraph(draw: Random, sentences: list[str], tags: bool) -> str:
    lines = []
    for sentence in draw.sample(sentences, draw.randint(2, 5)):
        words = sentence.split()
        if tags:
            first = draw.randrange(len(words))
            last = draw.randrange(first, len(words))
            words[first], words[last] = f"<b>{words[first]}", f"{words[last]}</b>"
        lines.append(" ".join(words))
    return "\n\n".join(lines)


def generation_requests(run: str, draw: Random) -> list[Request]:
    model = regard.load(run, device="cpu")
    found = []
    for _ in range(OF_EACH_KIND):
        prompt, seed, path = draw.choice(PROMPTS), draw.randrange(1000), "/v1/completions"
        common = {"model": "stories", "prompt": prompt, "max_tokens": TOKENS}
        greedy = [*model.generate(prompt, tokens=TOKENS, method="beam", beam=1).texts]
        found.append(Request("greedy", path, {**common, "temperature": 0}, greedy))
        sampling = {"method": "sample", "temperature": 0.8, "top_p": 0.9, "top_k": model.recipe.decoding.top_k}
        sampled = model.generate(prompt, tokens=TOKENS, samples=2, seed=seed, **sampling)
        settings = {"temperature": 0.8, "top_p": 0.9, "seed": seed}
        found.append(Request("sampled", path, {**common, **settings, "n": 2}, [*sampled.texts]))
        one = model.generate(prompt, tokens=TOKENS, seed=seed, **sampling)
        body = {**common, **settings, "stream": True}
        found.append(Request("a stream", path, body, [*one.texts]))
        found.append(Request("a stream that is left", path, body, leaves=True))
    return found


def refused_requests() -> list[Request]:
    return [
        Request("refused", "/v1/translate", {"q": "x" * 60_000}, status=413),
        Request("refused", "/v1/translate", {"q": "cat", "nbest": 99}, status=400),
        Request("refused", "/v1/translate", {"q": "cat", "target": "fr"}, status=404),
        Request("refused", "/v1/completions", {"model": "none", "prompt": "a"}, status=404),
        Request("refused", "/v1/completions", {"model": "stories", "prompt": "a", "max_tokens": 10**6}, status=400),
    ]


class Soak:
    """Counts of a server under load."""

    def __init__(self, requests: list[Request], seed: int) -> None:
        self.requests, self.seed = requests, seed
        self.sent: Counter[str] = Counter()
        self.ties: Counter[str] = Counter()
        self.failures: list[str] = []
        self.lock = threading.Lock()

    def client(self, number: int, end: float, pause: float) -> None:
        draw = Random(f"{self.seed} {number}")
        while time.monotonic() < end:
            time.sleep(draw.expovariate(1 / pause))
            request = draw.choice(self.requests)
            try:
                outcome = check(request)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                outcome = repr(error)
            with self.lock:
                self.sent[request.kind] += 1
                if outcome == "tie":
                    self.ties[request.kind] += 1
                elif outcome:
                    self.failures.append(f"{request.kind}: {outcome} for {json.dumps(request.body)[:300]}")


def check(request: Request) -> str:
    """Send a request; return what is wrong with the answer, "tie" or nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=3600)
    try:
        connection.request("POST", request.path, json.dumps(request.body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if request.leaves:
            response.readline()
            return "" if response.status == 200 else f"status {response.status}"
        content = response.read()
    finally:
        connection.close()
    if response.status != request.status:
        return f"status {response.status}: {content[:200]!r}"
    if response.status != 200:
        return ""
    texts, scores = read_stream(content) if request.body.get("stream") else READERS[request.path](json.loads(content))
    if texts == request.expected:
        return ""
    close = len(texts) == len(request.expected) and bool(scores) and len(scores) == len(request.scores)
    if close and max(abs(a - b) for a, b in zip(scores, request.scores, strict=True)) < TIE:
        return "tie"
    return f"{texts} instead of {request.expected}, scores {scores} instead of {request.scores}"


def read_stream(content: bytes) -> tuple[list[str], list[float]]:
    events = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    if events.pop() != "[DONE]":
        raise ValueError("the stream does not end with [DONE]")
    return ["".join(json.loads(event)["choices"][0]["text"] for event in events)], []


def read_own(answer: Any) -> tuple[list[str], list[float]]:
    ranked = [each for one in answer["translations"] for each in (one, *one.get("alternatives", ()))]
    return [each["text"] for each in ranked], [each["score"] for each in ranked]


READERS: dict[str, Callable[[Any], tuple[list[str], list[float]]]] = {
    "/v1/translate": read_own,
    "/translate": lambda answer: ([answer["translatedText"]], []),
    "/v2/translate": lambda answer: ([one["text"] for one in answer["translations"]], []),
    "/v1/completions": lambda answer: ([choice["text"] for choice in answer["choices"]], []),
}


def memory(pid: int) -> dict[str, int]:
    """Resident memory in MB, threads and open files of a process."""
    lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    status = {name: value.split() for name, value in lines}
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"MB": int(status["VmRSS"][0]) // 1024, "threads": int(status["Threads"][0]), "files": files}


def start(given: argparse.Namespace) -> subprocess.Popen[bytes]:
    runs = [f"en-es={given.translation}", f"stories={given.generation}"]
    command = [sys.executable, "-m", "regard", "serve", *runs, "--port", str(PORT), "--device", "cpu", "--no-log"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    server = subprocess.Popen([*command, "--timeout", "3600"], env=environment, stdout=subprocess.DEVNULL)
    while server.poll() is None:
        time.sleep(0.2)
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        try:
            connection.request("GET", "/readyz")
            if b"not loaded" not in connection.getresponse().read():
                return server
        except OSError:
            continue
        finally:
            connection.close()
    raise RuntimeError("the server did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("translation", help="a run of the recipe en-es")
    parser.add_argument("generation", help="a run of the recipe stories")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=4, help="requests a second of all clients, at most")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(heading(given.threads), flush=True)
    draw = Random(given.seed)
    requests = translation_requests(given.translation, draw) + generation_requests(given.generation, draw)
    soak = Soak(requests + refused_requests(), given.seed)
    server = start(given)
    begin = time.monotonic()
    end = begin + 60 * given.minutes
    arguments = [(number, end, given.clients / given.rate) for number in range(given.clients)]
    clients = [threading.Thread(target=soak.client, args=each) for each in arguments]
    samples = []
    try:
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            state = {"minute": round((time.monotonic() - begin) / 60, 1), **memory(server.pid)}
            samples.append({**state, "requests": soak.sent.total(), "failures": len(soak.failures)})
            print(json.dumps(samples[-1]), flush=True)
            time.sleep(min(60, max(1, end - time.monotonic())))
    finally:
        server.terminate()
        status = server.wait()
    print("| kind | requests | ties |\n|---|---|---|")
    for kind, sent in sorted(soak.sent.items()):
        print(f"| {kind} | {sent} | {soak.ties[kind]} |")
    for failure in soak.failures[:20]:
        print("FAILED", failure)
    print(f"{soak.sent.total()} requests, {len(soak.failures)} failures, exit status of the server {status}")
    return 1 if soak.failures or status not in (0, -signal.SIGTERM) else 0


if __name__ == "__main__":
    sys.exit(main())
