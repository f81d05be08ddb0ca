"""The recipes of the browser tests' runs, and a live server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHORT = {"decoding": {"max_ratio": 1.0, "max_extra": 2}}  # untrained models never generate EOS
PAIRS = {"data": {"corpus": "en-es"}, "text": {"unit": "bpe", "vocabulary": 400, "shared": True}} | SHORT
TEXTS = {"data": {"corpus": "stories"}, "text": {"unit": "bpe", "vocabulary": 400, "shared": True}} | SHORT
SMALL = {"width": 16, "heads": 4, "ffn_width": 32, "dropout": 0.0}
TINY: dict[str, dict[str, Any]] = {
    "tiny-transformer": PAIRS | {"model": {"family": "transformer", "encoder_layers": 1, "decoder_layers": 2, **SMALL}},
    "tiny-additive": PAIRS | {"model": {"family": "recurrent", "attention": "bahdanau", "width": 16, "embedding": 16}},
    "tiny-gpt": TEXTS | {"model": {"family": "gpt", "layers": 2, **SMALL}},
    "tiny-bert": {key: TEXTS[key] for key in ("data", "text")} | {"model": {"family": "bert", "layers": 2, **SMALL}},
}

INPUTS = {  # recipes whose inputs are not texts
    "tiny-images": "shapes",
    "tiny-captions": "scenes",
    "tiny-sound": "tones",
    "tiny-episodes": "key-door",
    "tiny-graph": "citations",
}


@contextlib.contextmanager
def served(paths: list[Path], text: str = "") -> Iterator[str]:
    """Serve these runs; yields the address with the token."""
    from regard.server.page_server import open_server

    server = open_server(paths, text=text, device="cpu")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server.link
    server.stop()
    thread.join(timeout=10)
