"""Generation settings of imported models: generation_config.json."""

from __future__ import annotations

from typing import Any

from regard.interop.hf_folder import HFFolder, short_repr

TOP_K = 50  # of transformers, if sampling is on and top_k is not set


def sampling(folder: HFFolder) -> dict[str, Any]:
    """Our decoding settings of a decoder: those of sampling if it is on, else greedy search or the beams."""
    given = folder.json("generation_config.json")
    settings: dict[str, Any] = {"method": "beam", "beam": given.integer("num_beams") or 1, "length_penalty": 0.0}
    if given.boolean("do_sample", False):
        top_k = given.integer("top_k")
        settings = {"method": "sample", "top_k": TOP_K if top_k is None else top_k}
        settings |= {
            name: given.content[name] for name in ("temperature", "top_p") if given.content.get(name) is not None
        }
    penalty = given.content.get("repetition_penalty")
    if isinstance(penalty, int | float) and penalty >= 1:
        settings["repetition_penalty"] = penalty
    elif penalty is not None:
        raise given.error("repetition_penalty", f"must be at least 1, not {short_repr(penalty)}")
    return settings
