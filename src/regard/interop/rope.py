"""Rotary positions and sliding windows in config.json, in the layouts of transformers 4 and 5."""

from __future__ import annotations

import math
from typing import Any

from regard.interop.hf_folder import Fields, HFFolder, short_repr

FULL, SLIDING = "full_attention", "sliding_attention"


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """A positive number of a JSON object."""
    value = fields.content.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise fields.error(name, f"must be a positive number, not {short_repr(value)}")
    return float(value)


def rotary(folder: HFFolder, theta: float, local: float | None = None) -> dict[str, Any]:
    """Our settings for the rotary positions; `theta` and `local` are the default bases.

    If `local` is given, layers with a window have positions of their own, which are never scaled.
    """
    given = folder.config.object("rope_parameters")
    if FULL in given.content or SLIDING in given.content:
        full, sliding = given.object(FULL), given.object(SLIDING)
        if sliding.content.get("rope_type", "default") != "default":
            raise sliding.error("rope_type", f"= {short_repr(sliding.content['rope_type'])} has no counterpart here")
    else:
        full = given if given.content else folder.config.object("rope_scaling")
        sliding = folder.config
    if full.content.get("partial_rotary_factor", folder.setting("partial_rotary_factor", 1)) not in (1, None):
        raise folder.config.error("partial_rotary_factor", "must be 1 to have a counterpart here")
    base = number(full, "rope_theta", number(folder.config, "rope_theta", theta))
    settings: dict[str, Any] = {"positions": "rotary", "position_base": base, **_scaling(folder, full)}
    if local is not None:
        name = "rope_theta" if sliding is not folder.config else "rope_local_base_freq"
        default = base if local == theta else local  # a type with one default, OLMo 3, had one setting in version 4
        settings["local_base"] = number(sliding, name, default)
    return settings


def _scaling(folder: HFFolder, fields: Fields) -> dict[str, Any]:
    kind = fields.text("rope_type") or fields.text("type") or "default"
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond max_position_embeddings, where our context ends
        return {}
    if kind not in ("linear", "llama3", "yarn"):
        raise fields.error("rope_type", f"= {short_repr(kind)} has no counterpart here (linear, llama3, yarn have)")
    factor = None if fields.content.get("factor") is None and kind == "yarn" else number(fields, "factor")
    longest = number(folder.config, "max_position_embeddings", 2048)
    original = number(fields, "original_max_position_embeddings", longest)
    scale = longest / original if factor is None else factor
    settings: dict[str, Any] = {"rope_scaling": kind, "rope_factor": scale, "rope_original": int(original)}
    if kind == "llama3":
        settings["rope_turns"] = number(fields, "low_freq_factor"), number(fields, "high_freq_factor")
    if kind == "yarn":
        if not fields.boolean("truncate", True):
            raise fields.error("truncate", "= False has no counterpart here")
        settings["rope_turns"] = number(fields, "beta_slow", 1), number(fields, "beta_fast", 32)
        settings["rope_attention"] = _yarn_attention(fields, scale)
    return settings


def _yarn_attention(fields: Fields, factor: float) -> float:
    """The factor on queries and keys that YaRN implies, unless it is given."""
    if fields.content.get("attention_factor") is not None:
        return number(fields, "attention_factor")

    def amplitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.content.get("mscale") and fields.content.get("mscale_all_dim"):
        return amplitude(number(fields, "mscale")) / amplitude(number(fields, "mscale_all_dim"))
    return amplitude(1.0)


def windows(folder: HFFolder, layers: int, is_local: Any, keep: bool = False) -> dict[str, Any]:
    """Our settings for sliding windows; `is_local(layer)` is the default of a layer without `layer_types`.

    A window that the whole context fits into is left out, unless `keep`.
    """
    given, size = folder.config.items("layer_types"), folder.config.integer("sliding_window")
    if given and (len(given) != layers or any(kind not in (FULL, SLIDING) for kind in given)):
        raise folder.config.error("layer_types", f"must name {FULL} or {SLIDING} for each of {layers} layers")
    local = [(given[i] == SLIDING) if given else bool(is_local(i)) for i in range(layers)]
    if size is None or not any(local):
        return {}
    if size < 1:
        raise folder.config.error("sliding_window", f"= {size} is not a number of tokens")
    if not keep and size >= number(folder.config, "max_position_embeddings", 2048):
        return {}
    return {"mask": "window", "mask_size": size, "global_layers": [i for i in range(layers) if not local[i]]}
