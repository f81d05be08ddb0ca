"""Episodes as axes of attention: the steps that a Decision Transformer sees, with rendered frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.data.environments import make_environment
from regard.data.trajectories import Episode
from regard.errors import UserError
from regard.tasks.actor import Actor
from regard.tasks.axes import Axis, Element, Inspection, element

EPISODE_PATTERN = re.compile(r"(?P<env>\S+)((?: +return (?P<requested>-?[0-9.]+))|(?: +seed (?P<seed>\d{1,9})))*")
MAX_FRAME_SIDE = 96  # pixels of a stored frame


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """An episode, the returns to go of its steps, and a frame [h, w, 3] of each state, where it can be rendered."""

    episode: Episode
    returns: npt.NDArray[np.float32]
    frames: npt.NDArray[np.uint8] | None = None


def play_episode(actor: Actor, text: str) -> PlayedEpisode:
    """Play one episode. The text names the environment, and optionally a return and a seed: `key-door return 1 seed 3`.

    Without a return the highest of the training data is requested.
    """
    named = EPISODE_PATTERN.fullmatch(text.strip())
    if named is None:
        raise UserError(f"{text[:60]!r} is no episode: write `ENV return R seed N`, as in `key-door return 1 seed 3`")
    name, seed = named["env"], int(named["seed"] or 0)
    try:
        requested = float(named["requested"] or actor.scaling.highest)
    except ValueError:
        raise UserError(f"return {named['requested']}: must be a number") from None
    env = make_environment(name)
    actor.check(env, name)
    (episode,) = actor.play([env], requested, [seed])
    received = np.concatenate([[0.0], np.cumsum(episode.rewards)[:-1]])
    return PlayedEpisode(episode, (requested - received).astype(np.float32), _frames(name, episode, seed))


def _frames(name: str, episode: Episode, seed: int) -> npt.NDArray[np.uint8] | None:
    """Replay an episode, and render its states."""
    env = make_environment(name)
    env.reset(seed)
    frames = []
    for action in episode.actions:
        image = env.image()
        if image is None:
            return None
        every = -(-max(image.shape[:2]) // MAX_FRAME_SIDE)
        frames.append(image[::every, ::every])
        env.step(action)
    return np.stack(frames)


def step_axis(played: PlayedEpisode, begin: int, names: Sequence[str] | None, with_returns: bool) -> Axis:
    """The tokens of the steps from `begin` on: the return to go, the state and the action of each.

    `names` are those of discrete actions. Decisions are made at the tokens of states.
    """
    episode, elements = played.episode, list[Element]()
    steps = []
    for group, t in enumerate(range(begin, len(episode.rewards))):
        action = _action_text(episode.actions[t], names)
        to_go = f"{played.returns[t]:.4g}"
        if with_returns:
            elements.append(_token(group, "return", f"{t + 1}: return {to_go}", ""))
        elements.append(_token(group, "state", f"{t + 1}: state", str(t + 1)))
        elements.append(_token(group, "action", f"{t + 1}: {action}", f" {action}"))
        state = " ".join(f"{x:.4g}" for x in episode.states[t].tolist())
        steps.append({"number": t + 1, "action": action, "return": to_go, "state": state})
    shown = {} if played.frames is None else {"frames": played.frames[begin:].astype(np.float32) / 255}
    return Axis("steps", elements, {"steps": steps}, shown)


def _token(group: int, role: str, label: str, text: str) -> Element:
    return element(label, group, predicts=role == "state", role=role) | {"text": text}


def _action_text(action: Any, names: Sequence[str] | None) -> str:
    return " ".join(f"{x:.2f}" for x in action) if names is None else names[int(action)]


def unseen_groups(inspection: Inspection, elements: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The tokens of the steps that these elements belong to."""
    axis = inspection.axis
    steps = sorted({axis.elements[n]["group"] for n in elements})
    return tuple(tuple(n for n, one in enumerate(axis.elements) if one["group"] == step) for step in steps)
