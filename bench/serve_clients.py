"""Load on a running translation server: closed-loop clients, each of which sends one sentence after the other.

    python -m bench.serve_clients http://127.0.0.1:8000/v1/translate sentences.txt --clients 64 --seconds 20

Prints requests and their latencies as JSON, and the CPU time that the clients themselves took.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit


def load(url: str, lines: list[str], clients: int, seconds: float) -> dict[str, float]:
    parts = urlsplit(url)
    waits: list[float] = []
    errors: list[str] = []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=120)
        turn = number
        while time.monotonic() < end:
            body = json.dumps({"q": lines[turn % len(lines)], "source": "en", "target": "es"})
            turn += clients
            began = time.perf_counter()
            try:
                connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    errors.append(str(response.status))
            except (OSError, http.client.HTTPException) as error:
                errors.append(repr(error))
                connection.close()
            waits.append(time.perf_counter() - began)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    began, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    waits.sort()
    return {
        "clients": clients,
        "requests": len(waits),
        "errors": len(errors),
        "requests/s": round(len(waits) / took, 1),
        "p50 ms": round(1000 * waits[len(waits) // 2], 1),
        "p99 ms": round(1000 * waits[int(len(waits) * 0.99)], 1),
        "CPU share of the clients": round((time.process_time() - cpu) / took, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("sentences")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    text = Path(arguments.sentences).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    for clients in arguments.clients:
        print(json.dumps(load(arguments.url, lines, clients, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
