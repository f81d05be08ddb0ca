"""Servers under load: `regard serve`, CTranslate2 and Hugging Face's `generate`, with the same weights.

    python -m bench.serve_load [--size small] [--clients 1 8 64 256] [--seconds 30] [--repeats 5] [--threads 2]
    python -m bench.serve_load --device cuda --size base --seconds 6 --repeats 1         # without CTranslate2

The model is that of `bench.cpu_decoding`: random weights in Marian's shape, beam 4, outputs of exactly 30 tokens, in
float32 on a CPU and bf16 on a GPU. The other two are behind FastAPI with dynamic batching: sentences that arrive within
5 ms, at most 64, are one batch. The load generator is locust: each client sends one sentence of 14 to 34 tokens, waits
for the answer, and sends the next. The servers take turns, one at a time; each is warmed up with 64 clients. With every
figure stands the CPU share of the load generator, and the throughput of offline decoding in batches of 64 in the same
turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import cpu_decoding
from bench.machine import heading

BEAM, LENGTH = 4, cpu_decoding.LENGTH
MAX_BATCH, WAIT_SECONDS = 64, 0.005
PORT = 8765
PRECISION = {"cpu": "fp32", "cuda": "bf16"}
SYSTEMS = ("regard", "CTranslate2", "Hugging Face")


def peer(system: str, folder: Path, device: str, threads: int) -> None:
    """Serve a system behind FastAPI, with dynamic batching."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    translate = cpu_decoding.SYSTEMS[system](folder, PRECISION[device], threads)
    app, waiting = FastAPI(), asyncio.Queue[Any]()

    async def batches() -> None:
        while True:
            batch = [await waiting.get()]
            await asyncio.sleep(WAIT_SECONDS)
            while len(batch) < MAX_BATCH and not waiting.empty():
                batch.append(waiting.get_nowait())
            found = await asyncio.to_thread(translate, [source for source, _ in batch], BEAM)
            for (_, answer), tokens in zip(batch, found, strict=True):
                answer.set_result(tokens)

    tasks: list[Any] = []

    async def answer(request: Any) -> JSONResponse:
        if not tasks:
            tasks.append(asyncio.create_task(batches()))
        text = (await request.json())["q"]
        future = asyncio.get_running_loop().create_future()
        waiting.put_nowait(([*(int(word[1:]) for word in text.split()), 2], future))
        return JSONResponse({"translations": [{"text": " ".join(f"w{token}" for token in await future)}]})

    app.add_route("/v1/translate", answer, methods=["POST"])
    uvicorn.run(app, port=PORT, log_level="error")


def start(system: str, folder: Path, device: str, threads: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if system == "regard":
        command = ["-m", "regard", "serve", f"xx-yy={folder / 'regard'}", "--port", str(PORT), "--device", device]
        command += ["--no-log", "--timeout", "600"]
    else:
        command = ["-m", "bench.serve_load", "--peer", system, "--folder", str(folder), "--threads", str(threads)]
        command += ["--device", device]
    server = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL)
    for _ in range(600):
        time.sleep(0.2)
        try:
            ask("w5 w6 w7")
            return server
        except OSError:
            if server.poll() is not None:
                break
    server.kill()
    raise RuntimeError(f"{system} did not start")


def ask(text: str) -> Any:
    body = json.dumps({"q": text}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/translate", body, {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=300))


def sentence(draw: random.Random) -> str:
    return " ".join(
        f"w{draw.randrange(cpu_decoding.FIRST_WORD, cpu_decoding.VOCABULARY)}" for _ in range(draw.randint(14, 34))
    )


def load(clients: int, seconds: float) -> dict[str, float]:
    """Run locust; return requests a second, latencies in ms, failures, and the CPU share of locust itself."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "locust", "-f", __file__, "--headless", "--host", f"http://127.0.0.1:{PORT}"]
        command += ["--users", str(clients), "--spawn-rate", str(clients), "--run-time", f"{round(seconds)}s"]
        command += ["--csv", f"{folder}/load", "--only-summary", "--stop-timeout", "0", "--reset-stats"]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        after, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
        stats = Path(folder) / "load_stats.csv"
        if not stats.exists():
            raise RuntimeError(f"locust failed:\n{done.stderr[-2000:]}")
        header, *rows = stats.read_text().splitlines()
    cells = (value.replace("N/A", "nan") for value in rows[-1].split(","))
    total = dict(zip(header.split(","), cells, strict=True))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "rps": float(total["Requests/s"]),
        "p50": float(total["50%"]),
        "p99": float(total["99%"]),
        "failures": float(total["Failure Count"]),
        "cpu": cpu / took,
    }


if "locust" in sys.modules:  # this file is also the locustfile
    from locust import FastHttpUser, task

    class Client(FastHttpUser):
        """Sends one sentence after the other."""

        def on_start(self) -> None:
            self.draw = random.Random(id(self))

        @task
        def translate(self) -> None:
            with self.client.post("/v1/translate", json={"q": sentence(self.draw)}, catch_response=True) as answer:
                if answer.status_code != 200:
                    answer.failure(str(answer.status_code))


def offline(folder: Path, device: str, threads: int) -> float:
    """Sentences a second of offline decoding with regard, in batches of 64, in a process of its own."""
    code = (
        "import random, sys, time; from pathlib import Path; from bench import cpu_decoding as c;"
        "t = c.SYSTEMS['regard'](Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])); r = random.Random(1);"
        "s = [[*(r.randrange(4, c.VOCABULARY) for _ in range(r.randint(14, 34))), 2] for _ in range(64)];"
        "n = 2 if sys.argv[2] == 'fp32' else 20; [t(s, 4) for _ in range(n // 2)]; b = time.perf_counter();"
        "[t(s, 4) for _ in range(n)]; print(n * 64 / (time.perf_counter() - b))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), PRECISION[device], str(threads)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--device", default="cpu", choices=list(PRECISION))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="+", help="by default all that run on the device")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer(given.peer, given.folder, given.device, given.threads)
        return
    systems = given.systems or [name for name in SYSTEMS if given.device == "cpu" or name != "CTranslate2"]
    print(heading(given.threads), flush=True)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        decoding = {"beam": BEAM, "min_length": LENGTH, "max_ratio": 1e-9, "max_extra": LENGTH}
        cpu_decoding.write(given.size, folder, decoding)
        for turn in range(given.repeats):
            for system in systems:
                server = start(system, folder, given.device, given.threads)
                try:
                    load(64, min(given.seconds, 5))
                    for clients in given.clients:
                        entry = load(clients, given.seconds)
                        found.setdefault((system, clients), []).append(entry)
                        print(json.dumps({"turn": turn, "system": system, "clients": clients, **entry}), flush=True)
                finally:
                    server.terminate()
                    server.wait()
            rate = offline(folder, given.device, given.threads)
            print(json.dumps({"turn": turn, "offline sentences/s": rate}), flush=True)
    print(table(found, systems, given.clients))


def table(found: dict[tuple[str, int], list[dict[str, float]]], systems: list[str], clients: list[int]) -> str:
    lines = ["| clients | system | sentences/s | p50 ms | p99 ms | failures | CPU share of locust |", "|" + "---|" * 7]
    for count in clients:
        for system in systems:
            entries = found[system, count]

            def middle(name: str, entries: list[dict[str, float]] = entries) -> str:
                values = [entry[name] for entry in entries]
                return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

            cells = [middle(name) for name in ("rps", "p50", "p99")]
            failures, cpu = sum(entry["failures"] for entry in entries), middle("cpu")
            lines.append(f"| {count} | {system} | {' | '.join(cells)} | {failures:g} | {cpu} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
