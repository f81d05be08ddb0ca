"""Settings that may change when a run is resumed: for the check, `regard train --help` and the guide. No imports."""

from __future__ import annotations

# A name stands for a setting, or for all settings of a section. Any other change would make it another run.
MAY_CHANGE = (
    "training.steps",
    "training.validate_every",
    "training.validate_lines",
    "training.save_every",
    "training.save_minutes",
    "training.patience",
    "training.precision",
    "training.backend",
    "training.checkpoint_activations",
    "training.parallel",
    "training.reshard",
    "training.timeout",
    "training.tensorboard",
    "data.folder",  # the files in it have to be the same
    "decoding",
    "about",
)


def may_change(key: str) -> bool:
    """
    >>> may_change("training.steps"), may_change("decoding.beam"), may_change("training.seed")
    (True, True, False)
    """
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
