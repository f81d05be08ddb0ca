"""Generation settings of imported models: generation_config.json."""

from __future__ import annotations

import math
from typing import Any

from regard.arguments import MAX_BEAM
from regard.interop.hf_folder import Fields, HFFolder, short_repr
from regard.recipes.schema import DecodingSettings

# transformers divides the log-probability of n tokens by n^p, we by ((5 + n) / 6)^a. Both grow equally fast where
# p = a n / (n + 5), which is this share of a for sentences of 15 tokens.
POWER = 0.75
TOP_K = 50  # default of transformers, if sampling is on and top_k is not set


def sampling(folder: HFFolder) -> dict[str, Any]:
    """Our decoding settings of a decoder: those of sampling if it is on, else greedy search or the beams."""
    given = folder.json("generation_config.json")
    settings: dict[str, Any] = {"method": "beam", "beam": _beam(given) or 1, "length_penalty": 0.0}
    if given.boolean("do_sample", False):
        top_k = given.integer("top_k")
        settings = {"method": "sample", "top_k": TOP_K if top_k is None else top_k}
        settings |= {
            name: given.content[name] for name in ("temperature", "top_p") if given.content.get(name) is not None
        }
    penalty = given.content.get("repetition_penalty")
    if isinstance(penalty, int | float) and 1 <= penalty < math.inf:
        settings["repetition_penalty"] = penalty
    elif penalty is not None:
        raise given.error("repetition_penalty", f"must be a number from 1, not {short_repr(penalty)}")
    return settings


def generation_settings(decoding: DecodingSettings, bos: int, ends: list[int]) -> dict[str, Any]:
    """The content of generation_config.json for a decoder; `ends` are their ids of the tokens that end a text."""
    found: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    if decoding.method == "sample":
        names = ("temperature", "top_k", "top_p")
        found |= {"do_sample": True, **{name: getattr(decoding, name) for name in names}}
    elif decoding.beam > 1:
        found |= {"num_beams": decoding.beam, "length_penalty": POWER * decoding.length_penalty}
    if decoding.repetition_penalty != 1:
        found["repetition_penalty"] = decoding.repetition_penalty
    return found


def beams(folder: HFFolder, default: int) -> int:
    """The beams of generation_config.json or config.json."""
    return _beam(folder.json("generation_config.json")) or _beam(folder.config) or default


def length_penalty(folder: HFFolder) -> float:
    """Our length penalty for that of generation_config.json or config.json."""
    for fields in (folder.json("generation_config.json"), folder.config):
        given = fields.content.get("length_penalty")
        if given is not None:
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 100:
                raise fields.error("length_penalty", f"must be a number from 0, not {short_repr(given)}")
            return given / POWER
    return 1 / POWER


def _beam(fields: Fields) -> int | None:
    beam = fields.integer("num_beams")
    if beam is not None and not 0 <= beam <= MAX_BEAM:
        raise fields.error("num_beams", f"= {short_repr(beam)} is not from 1 to {MAX_BEAM}")
    return beam
