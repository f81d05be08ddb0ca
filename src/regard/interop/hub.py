"""Fetch models from the Hugging Face hub by name."""

from __future__ import annotations

import re
from pathlib import Path

from regard.errors import UserError, first_line

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja"]  # no pickles, and no code


def local_folder(given: Path) -> Path:
    """The folder itself or, for a name such as Helsinki-NLP/opus-mt-en-de, the folder that it is downloaded into."""
    if given.exists() or not NAME.fullmatch(given.as_posix()):
        return given
    name = given.as_posix()
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"{name} is not a folder; to fetch it from the hub: pip install 'regard[formats]'") from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the library raises many types, and those of its HTTP client
        reason = first_line(error).removeprefix("Got: ")[:200]
        raise UserError(f"{name} is not a folder, and could not be fetched from the hub: {reason}") from error
