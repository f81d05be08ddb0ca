"""Environments to act in: the built-in one, and those of gymnasium (`regard[rl]`).

In the built-in environment `key-door`, a key of one of three colours lies in the first cell of a corridor of 20 more.
The corridor ends at a door with three locks. The key is seen in the first cell only, so that opening the right lock
takes a memory of 20 steps or more. The right lock is worth 1, a wrong one 0; either ends the episode.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from regard.errors import UserError, first_line

COLOURS = ("red", "green", "blue")
PAINTS = ((209, 52, 42), (30, 140, 60), (50, 90, 220))
LENGTH, LIMIT = 20, 60  # cells between key and door; steps of an episode at most
State = npt.NDArray[np.float32]
Frame = npt.NDArray[np.uint8]  # [height, width, 3]
Policy = Callable[[State, np.random.Generator], Any]
DISCOUNT = 0.9999  # for the experts of environments with a table of transitions: sooner is a little better


class Environment(Protocol):
    """An environment. States are vectors of numbers; actions are ids, or vectors of numbers."""

    features: tuple[str, ...]  # names of the numbers of a state
    actions: tuple[str, ...]  # names of actions, or of the numbers of an action
    is_discrete: bool

    def reset(self, seed: int) -> State:
        """Start an episode."""
        ...

    def step(self, action: Any) -> tuple[State, float, bool]:
        """Act: the next state, the reward, and whether the episode is over."""
        ...

    def frame(self) -> str:
        """The present state as a line of text."""
        ...

    def image(self) -> Frame | None:
        """The present state as a picture; None where it cannot be rendered."""
        ...


class KeyDoor:
    """The built-in environment."""

    features = (*(f"{colour} key" for colour in COLOURS), "corridor", "door")
    actions = ("forward", *(f"open {colour}" for colour in COLOURS))
    is_discrete = True

    def reset(self, seed: int) -> State:
        self.colour = int(np.random.default_rng(seed).integers(len(COLOURS)))
        self.cell, self.steps = 0, 0
        return self._state()

    def _state(self) -> State:
        state = np.zeros(len(self.features), np.float32)
        state[self.colour if self.cell == 0 else 3 if self.cell <= LENGTH else 4] = 1
        return state

    def step(self, action: Any) -> tuple[State, float, bool]:
        self.steps += 1
        if self.cell > LENGTH and action > 0:
            return self._state(), float(action - 1 == self.colour), True
        self.cell += action == 0 and self.cell <= LENGTH
        return self._state(), 0.0, self.steps >= LIMIT

    def frame(self) -> str:
        cells = [COLOURS[self.colour][0].upper(), *"." * LENGTH, "D"]
        cells[self.cell] = "@"
        return "".join(cells)

    def image(self) -> Frame:
        """A picture of the present cell and, below it, of its place in the corridor."""
        width = 2 * (LENGTH + 2)
        image = np.full((30, width, 3), 235, np.uint8)
        image[20:22] = 120  # the floor
        if self.cell == 0:
            _draw_key(image[4:18, 10:34], PAINTS[self.colour])
        elif self.cell > LENGTH:
            image[2:20, 8:36] = (150, 110, 70)
            for lock, paint in enumerate(PAINTS):
                image[8:14, 11 + 8 * lock : 17 + 8 * lock] = paint
        image[25:29] = 190
        image[25:29, 2 * self.cell : 2 * self.cell + 2] = 20
        return image


def _draw_key(image: Frame, paint: tuple[int, int, int]) -> None:
    """A ring, a shaft and two teeth, in a view [14, 24, 3]."""
    y, x = np.mgrid[:14, :24]
    radius = np.hypot(y - 6.5, x - 6.5)
    image[(radius <= 6) & (radius >= 3)] = paint
    image[6:8, 12:24] = paint
    image[8:11, 17:19] = paint
    image[8:11, 21:23] = paint


class GymEnvironment:
    """An environment of gymnasium; a discrete observation becomes one number for each of its values."""

    def __init__(self, name: str) -> None:
        try:
            import gymnasium
        except ImportError:
            raise UserError(f"{name} needs one more package: pip install 'regard[rl]'; key-door is built in") from None
        try:
            with warnings.catch_warnings(action="ignore"):  # gymnasium's warnings about itself
                self.env = gymnasium.make(name, render_mode="rgb_array")
        except Exception as error:  # gymnasium raises many kinds: unknown names, missing packages
            raise UserError(
                f"cannot make the environment {name[:60]!r} (key-door is built in): {first_line(error)}"
            ) from error
        observed: Any = self.env.observation_space
        acted: Any = self.env.action_space
        spaces = gymnasium.spaces
        self.values = int(observed.n) if isinstance(observed, spaces.Discrete) else None
        if self.values is None and not (isinstance(observed, spaces.Box) and len(observed.shape) == 1):
            raise UserError(f"{name}: states must be one number or a vector of numbers, not {observed}")
        self.is_discrete = isinstance(acted, spaces.Discrete)
        if not self.is_discrete and not (isinstance(acted, spaces.Box) and len(acted.shape) == 1):
            raise UserError(f"{name}: actions must be one number or a vector of numbers, not {acted}")
        width = observed.shape[0] if self.values is None else self.values
        self.features = tuple(f"state {n}" for n in range(width))
        self.actions = tuple(f"action {n}" for n in range(acted.n if self.is_discrete else acted.shape[0]))
        self.low: Any = None if self.is_discrete else acted.low
        self.high: Any = None if self.is_discrete else acted.high

    def _state(self, observation: Any) -> State:
        if self.values is None:
            return np.asarray(observation, np.float32)
        return np.eye(self.values, dtype=np.float32)[int(observation)]

    def reset(self, seed: int) -> State:
        self.last = self._state(self.env.reset(seed=seed)[0])
        return self.last

    def step(self, action: Any) -> tuple[State, float, bool]:
        given = int(action) if self.is_discrete else np.clip(action, self.low, self.high)
        observation, reward, terminated, truncated, _ = self.env.step(given)
        self.last = self._state(observation)
        return self.last, float(reward), bool(terminated or truncated)

    def frame(self) -> str:
        return " ".join(f"{number:.2f}" for number in self.last)

    def image(self) -> Frame | None:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no window
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            return np.asarray(self.env.render(), np.uint8)
        except Exception:  # pygame is not installed, or the environment cannot render
            return None


def make_environment(name: str) -> Environment:
    """The environment of this name."""
    return KeyDoor() if name == "key-door" else GymEnvironment(name)


# -- policies ---------------------------------------------------------------------------------------------------------


def make_policy(name: str, env_name: str, env: Environment) -> Policy:
    """A policy by name: `random`, or `expert` where one is built in."""
    if name == "random":
        return lambda state, random: _random_action(env, random)
    if env_name in EXPERTS:
        return EXPERTS[env_name]
    if isinstance(env, GymEnvironment) and env_name == "LunarLander-v3":
        from gymnasium.envs.box2d.lunar_lander import heuristic

        return lambda state, random: int(heuristic(env.env, state))
    table = getattr(env.env.unwrapped, "P", None) if isinstance(env, GymEnvironment) else None
    if table is None:
        named = f"{', '.join(EXPERTS)}, LunarLander-v3, and environments with a table of transitions, such as Taxi-v4"
        raise UserError(f"--policy {name}: there is an expert for {named}; use random")
    best = best_actions(table)
    return lambda state, random: int(best[int(state.argmax())])


def best_actions(table: dict[int, dict[int, list[tuple[float, int, float, bool]]]]) -> npt.NDArray[np.int64]:
    """[S] the action with the highest expected return in each state, by value iteration.

    `table[state][action]` lists outcomes: probability, next state, reward, and whether the episode is over.
    """
    moves = np.zeros((len(table), len(table[0]), len(table)))
    rewards = np.zeros(moves.shape[:2])
    for state, actions in table.items():
        for action, outcomes in actions.items():
            for probability, after, reward, done in outcomes:
                rewards[state, action] += probability * reward
                moves[state, action, after] += 0.0 if done else probability * DISCOUNT
    values, change = np.zeros(len(table)), 1.0
    while change > 1e-9:
        better = (rewards + moves @ values).max(1)
        values, change = better, float(abs(better - values).max())
    return np.asarray((rewards + moves @ values).argmax(1))


def _random_action(env: Environment, random: np.random.Generator) -> Any:
    if env.is_discrete:
        return int(random.integers(len(env.actions)))
    assert isinstance(env, GymEnvironment)
    return np.asarray(random.uniform(env.low, env.high), np.float32)


def _balance(state: State, random: np.random.Generator) -> int:
    """CartPole: push towards where the pole falls."""
    return int(state[2] + 0.5 * state[3] + 0.05 * state[1] + 0.02 * state[0] > 0)


def _swing(state: State, random: np.random.Generator) -> int:
    """Acrobot: push in the direction in which the lower link turns."""
    return 2 if state[5] > 0 else 0


def _guess(state: State, random: np.random.Generator) -> int:
    """key-door: walk to the door, and try a lock at random."""
    return int(random.integers(1, 4)) if state[4] else 0


EXPERTS: dict[str, Policy] = {
    "CartPole-v1": _balance,
    "Acrobot-v1": _swing,
    "key-door": _guess,
}
