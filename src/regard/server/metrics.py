"""Metrics of `regard serve` for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from regard.decoding.continuous import Turn
from regard.server.pool import ModelPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "regard_requests", "Requests that were answered", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "regard_request_seconds", "Time to answer a request", ["path"], buckets=SECONDS, registry=self.registry
        )
        self.tokens = Counter("regard_tokens", "Tokens that were generated", ["model"], registry=self.registry)
        self.characters = Counter("regard_characters", "Characters that were received", registry=self.registry)
        self.batch = Histogram(
            "regard_batch_sentences", "Sentences in a decoding step", ["model"], buckets=SENTENCES,
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter("regard_refused", "Requests that were refused", ["reason"], registry=self.registry)
        self.cancelled = Counter(
            "regard_cancelled", "Requests whose client disconnected before the answer", registry=self.registry
        )

    def watch(self, pool: ModelPool) -> None:
        """Read the present state of the pool whenever the metrics are read."""
        for name, text, value in (
            ("regard_queue_sentences", "Sentences that wait to join a batch", lambda: pool.waiting),
            ("regard_running_sentences", "Sentences in the batches", lambda: pool.running),
            ("regard_loaded_models", "Models in memory", lambda: sum(bool(r.active) for r in pool.runs.values())),
            ("regard_failed_models", "Models that could not be loaded", lambda: len(pool.failures)),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)

    def observe(self, model: str, turn: Turn) -> None:
        """Count a turn of an engine."""
        if turn.rows:
            self.batch.labels(model).observe(turn.rows)
            self.tokens.labels(model).inc(turn.tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)
