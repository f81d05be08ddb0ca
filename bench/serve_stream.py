"""What streaming a text costs: tokens per second of a language model offline, served whole, and served as a stream.

    python -m bench.serve_stream [RUN] [--size small] [--tokens 200] [--clients 1 8] [--repeats 5] [--threads 2]

RUN, or a GPT with random weights, continues prompts greedily by up to --tokens tokens. Offline: one prompt at a time in
a process of its own. Served: clients of `/v1/completions` that send one request after another, for whole answers and
for server-sent events. They take turns, and the medians are printed with the least and greatest values.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.machine import heading

PORT, REQUESTS = 8766, 4  # of each client
WORDS = 8000
RANDOM_PROMPTS = [f"w{n} w6" for n in range(5, 200)]
NAMES = ("Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max", "Sue", "Tim", "Amy", "Jack", "Lucy", "Leo", "Ella", "Bob")
STORY_PROMPTS = [f"{start} {name}" for start in ("Once upon a time", "One day", "The dog saw") for name in NAMES]


def write(folder: Path, size: str, tokens: int) -> None:
    """Write a run with random weights."""
    import torch

    from regard import tensor_io
    from regard.recipes.schema import Recipe
    from regard.run_dir import RunDir
    from regard.text.tokenizers import WordTokenizer

    recipe = {
        "data": {"imported": "text"},
        "text": {"unit": "word", "vocabulary": WORDS},
        "model": {"family": "gpt", "size": size, "max_positions": tokens + 16},
    }
    run = RunDir.create(folder, Recipe.model_validate(recipe))
    tokenizer = WordTokenizer([], [f"w{n}" for n in range(4, WORDS)])
    run.save_tokenizers(tokenizer, tokenizer)
    torch.manual_seed(1)
    tensor_io.save(run.best, tensor_io.model_tensors(run.fresh_model()), {"step": 0, "weights": "random"})


def offline(folder: Path, prompts: list[str], tokens: int, threads: int) -> float:
    """Tokens per second of one prompt after the other, in a process of its own."""
    code = (
        "import sys, time, regard; model = regard.load(sys.argv[1], device='cpu'); tokens = int(sys.argv[2]);"
        "generate = model.generator(method='beam', beam=1); generate(sys.argv[3:4], tokens=tokens);"
        "begin = time.perf_counter(); found = [generate([one], tokens=tokens)[0] for one in sys.argv[4:]];"
        "count = sum(len(each.hypotheses[0].tokens) for each in found); print(count / (time.perf_counter() - begin))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", code, str(folder), str(tokens), *prompts[: 1 + REQUESTS]]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def ask(prompt: str, tokens: int, stream: bool) -> int:
    """Send a request; return the number of tokens of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
    body: dict[str, Any] = {"model": "gpt", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    if stream:
        events = [line for line in answer if line.startswith(b"data: {")]
        return int(json.loads(events[-1].removeprefix(b"data: "))["usage"]["completion_tokens"])
    return int(json.load(answer)["usage"]["completion_tokens"])


def served(prompts: list[str], clients: int, tokens: int, stream: bool) -> float:
    """Tokens per second of all clients together."""

    counts: list[int] = []

    def client(number: int) -> None:
        own = [prompts[(1 + REQUESTS * number + turn) % len(prompts)] for turn in range(REQUESTS)]
        counts.extend(ask(prompt, tokens, stream) for prompt in own)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def start(folder: Path, threads: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "regard", "serve", f"gpt={folder}", "--port", str(PORT), "--device", "cpu"]
    server = subprocess.Popen([*command, "--no-log"], env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    while server.poll() is None:
        time.sleep(0.2)
        try:
            ask(RANDOM_PROMPTS[0], 2, False)
            return server
        except OSError:
            continue
    raise RuntimeError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a run of the recipe stories")
    parser.add_argument("--size", default="small", help="of the GPT with random weights")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print(heading(given.threads), flush=True)
    found: dict[str, list[float]] = {}

    def measure(name: str, speed: float) -> None:
        found.setdefault(name, []).append(speed)

    with tempfile.TemporaryDirectory() as scratch:
        folder, prompts = given.run or Path(scratch) / "run", STORY_PROMPTS if given.run else RANDOM_PROMPTS
        if given.run is None:
            write(folder, given.size, given.tokens)
        for _ in range(given.repeats):
            measure("offline, one prompt at a time", offline(folder, prompts, given.tokens, given.threads))
            server: Any = start(folder, given.threads)
            try:
                for clients in given.clients:
                    for stream in (False, True):
                        form = "a stream" if stream else "whole answers"
                        measure(f"served, {clients} clients, {form}", served(prompts, clients, given.tokens, stream))
            finally:
                server.terminate()
                server.wait()
    print("| | tokens/s | ms per token |\n|---|---|---|")
    for name, speeds in found.items():
        speed = statistics.median(speeds)
        print(f"| {name} | {speed:.0f} ({min(speeds):.0f} to {max(speeds):.0f}) | {1000 / speed:.2f} |")


if __name__ == "__main__":
    main()
