"""Trajectories: episodes of states, actions and rewards, from .npz and Parquet files, collected, or built in.

An .npz file holds, for all steps of all episodes one after the other, `states` [S, F], `actions` [S] (ids) or [S, A]
(numbers), `rewards` [S], and `episodes` [S], the number of the episode that a step belongs to. `feature_names` and
`action_names` are optional. A Parquet file holds the columns episode, state (a list), action (a number or a list) and
reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.data.environments import Environment, Policy, make_environment, make_policy
from regard.data.stream import PlannedBatches, generator
from regard.errors import UserError, first_line
from regard.models.decision import DecisionBatch
from regard.packed import PackedLayout
from regard.registry import CORPORA

SPLITS = ("train", "valid", "test")
HELD_OUT_EVERY = 10  # every tenth episode is for validation


@dataclass(frozen=True)
class Episode:
    """The S steps of an episode."""

    states: npt.NDArray[np.float32]  # [S, F]
    actions: npt.NDArray[Any]  # [S] ids, or [S, A]
    rewards: npt.NDArray[np.float32]  # [S]

    @property
    def total(self) -> float:
        """The return: the sum of the rewards."""
        return float(self.rewards.sum())

    @property
    def returns_to_go(self) -> npt.NDArray[np.float32]:
        """[S] the sum of the rewards from each step on."""
        return self.rewards[::-1].cumsum()[::-1].astype(np.float32)


@dataclass(frozen=True)
class Trajectories:
    """Episodes, and the names of the numbers of a state and of actions (or of the numbers of an action)."""

    episodes: tuple[Episode, ...]
    features: tuple[str, ...]
    actions: tuple[str, ...]
    is_discrete: bool

    @property
    def digest(self) -> str:
        hashed = hashlib.blake2b(repr((self.features, self.actions)).encode(), digest_size=16)
        for episode in self.episodes:
            for array in (episode.states, episode.actions, episode.rewards):
                hashed.update(array.tobytes())
        return hashed.hexdigest()

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        lengths = [len(episode.rewards) for episode in self.episodes]
        np.savez_compressed(
            path,
            states=np.concatenate([episode.states for episode in self.episodes]),
            actions=np.concatenate([episode.actions for episode in self.episodes]),
            rewards=np.concatenate([episode.rewards for episode in self.episodes]),
            episodes=np.repeat(np.arange(len(lengths)), lengths),
            feature_names=np.array(self.features),
            action_names=np.array(self.actions),
        )


def collect(
    env: Environment, policies: Sequence[Policy], epsilons: Sequence[float], count: int, seed: int
) -> Trajectories:
    """Play episodes. Each takes the next policy and the next share `epsilon` of random actions, in turn."""
    random_policy = make_policy("random", "", env)
    episodes = []
    for number in range(count):
        random = generator(seed, number)
        policy, epsilon = policies[number % len(policies)], epsilons[number % len(epsilons)]

        def act(
            state: Any, random: np.random.Generator = random, policy: Policy = policy, epsilon: float = epsilon
        ) -> Any:
            return (random_policy if random.random() < epsilon else policy)(state, random)

        episodes.append(play(env, act, int(random.integers(2**31))))
    return Trajectories(tuple(episodes), tuple(env.features), tuple(env.actions), env.is_discrete)


def play(env: Environment, act: Callable[[Any], Any], seed: int) -> Episode:
    """One episode."""
    state, done = env.reset(seed), False
    states, actions, rewards = [], [], []
    while not done:
        action = act(state)
        states.append(state)
        actions.append(action)
        state, reward, done = env.step(action)
        rewards.append(reward)
    kind = np.int64 if env.is_discrete else np.float32
    return Episode(np.stack(states), np.array(actions, kind), np.array(rewards, np.float32))


def read_trajectories(path: Path) -> Trajectories:
    """Read an .npz or a Parquet file."""
    try:
        if path.suffix == ".parquet":
            arrays = _parquet(path)
        else:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
    except Exception as error:  # zipfile, NumPy and Arrow raise many kinds for damaged files
        raise UserError(f"{path}: not a file of trajectories: {first_line(error)}") from error
    return _checked(path, arrays)


def _parquet(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: Parquet files need one more package: pip install 'regard[datasets]'") from None
    table = parquet.read_table(path).to_pydict()
    names = {"episodes": "episode", "states": "state", "actions": "action", "rewards": "reward"}
    if missing := [name for name in names.values() if name not in table]:
        raise UserError(f"{path} has no column {missing[0]}: it has {', '.join(table)}")
    return {key: np.array(table[name]) for key, name in names.items()}


def _checked(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> Trajectories:
    if missing := [name for name in ("states", "actions", "rewards", "episodes") if name not in arrays]:
        raise UserError(f"{path} has no {missing[0]}: it has {', '.join(arrays) or 'nothing'}")
    states, actions, rewards, owners = (arrays[name] for name in ("states", "actions", "rewards", "episodes"))
    steps = len(rewards)
    if states.ndim != 2 or not len(states) == len(actions) == len(owners) == steps or not steps:
        raise UserError(f"{path}: states [steps, numbers], actions, rewards and episodes must have equally many steps")
    if any(array.dtype.kind not in "biuf" for array in (states, actions, rewards, owners)):
        raise UserError(f"{path}: states, actions, rewards and episodes must be numbers")
    if not (np.isfinite(states).all() and np.isfinite(rewards).all() and np.isfinite(actions).all()):
        raise UserError(f"{path}: a state, an action or a reward is not a finite number")
    is_discrete = actions.ndim == 1 and actions.dtype.kind in "iu"
    if is_discrete and actions.min() < 0:
        raise UserError(f"{path}: actions are numbered from 0, and one is {actions.min()}")
    actions = actions.astype(np.int64) if is_discrete else actions.reshape(steps, -1).astype(np.float32)
    count = int(actions.max()) + 1 if is_discrete else actions.shape[1]
    features = _names(path, arrays, "feature_names", states.shape[1], "state")
    named = _names(path, arrays, "action_names", count, "action")
    cuts = np.flatnonzero(np.diff(owners)) + 1
    parts = (np.split(array, cuts) for array in (states.astype(np.float32), actions, rewards.astype(np.float32)))
    return Trajectories(tuple(Episode(*each) for each in zip(*parts, strict=True)), features, named, is_discrete)


def _names(path: Path, arrays: dict[str, npt.NDArray[Any]], key: str, count: int, what: str) -> tuple[str, ...]:
    names = tuple(map(str, arrays[key].tolist())) if key in arrays else tuple(f"{what} {n}" for n in range(count))
    if len(names) < count:
        raise UserError(f"{path}: {key} must be at least {count} names")
    return names


@CORPORA.register("key-door")
class KeyDoorEpisodes:
    """The built-in corpus `key-door`: episodes that try a lock at random, so that a third of them succeed."""

    kind = "trajectories"
    EPISODES = 2000

    @classmethod
    def trajectories(cls, count: int | None = None) -> Trajectories:
        env = make_environment("key-door")
        return collect(env, [make_policy("expert", "key-door", env)], [0.05], count or cls.EPISODES, seed=11)


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaling:
    """The scaling of states and returns to inputs: (state - means) / deviations, and return / scale."""

    means: npt.NDArray[np.float32]
    deviations: npt.NDArray[np.float32]
    scale: float
    highest: float  # return of the training data

    @classmethod
    def of(cls, scales: Sequence[tuple[float, float]]) -> Scaling:
        """Read the numbers in a run: mean and deviation of each number of a state; the highest return and the scale."""
        table = np.array(scales, np.float32)
        return cls(table[:-1, 0], table[:-1, 1], float(table[-1, 1]), float(table[-1, 0]))

    @staticmethod
    def measure(episodes: Sequence[Episode]) -> list[tuple[float, float]]:
        """The numbers to store in a run."""
        states = np.concatenate([episode.states for episode in episodes]).astype(np.float64)
        deviations = np.where(states.std(0) > 1e-6, states.std(0), 1.0)
        largest = max(max(abs(episode.returns_to_go).max() for episode in episodes), 1e-6)
        highest = max(episode.total for episode in episodes)
        return [*zip(states.mean(0).tolist(), deviations.tolist(), strict=True), (highest, float(largest))]


def window_batch(windows: Sequence[tuple[Episode, int, int]], scaling: Scaling) -> DecisionBatch:
    """A batch of the steps from `begin` to `end` of episodes."""
    parts = [(episode, slice(begin, end)) for episode, begin, end in windows]
    states = np.concatenate([episode.states[part] for episode, part in parts])
    returns = np.concatenate([episode.returns_to_go[part] for episode, part in parts])
    return DecisionBatch(
        PackedLayout([end - begin for _, begin, end in windows]),
        torch.from_numpy((returns / scaling.scale).astype(np.float32)),
        torch.from_numpy(((states - scaling.means) / scaling.deviations).astype(np.float32)),
        torch.from_numpy(np.concatenate([episode.actions[part] for episode, part in parts])),
        torch.from_numpy(np.concatenate([np.arange(begin, end) for _, begin, end in windows])),
    )


class Windows(PlannedBatches):
    """An endless stream of batches of about `budget` steps, in which an epoch visits every step once.

    Episodes are cut into windows of `context` steps, at other places in every epoch; shorter ones stay whole.
    """

    members = "steps"

    def __init__(self, episodes: Sequence[Episode], scaling: Scaling, context: int, budget: int, seed: int) -> None:
        self.episodes, self.scaling, self.context, self.budget, self.seed = episodes, scaling, context, budget, seed

    def _plan(self, random: np.random.Generator) -> Iterator[npt.NDArray[Any]]:
        windows = []
        for number, episode in enumerate(self.episodes):
            length = len(episode.rewards)
            first = int(random.integers(1, self.context + 1)) if length > self.context else length
            cuts = [0, *range(first, length, self.context), length]
            windows += [(number, begin, end) for begin, end in pairwise(cuts)]
        table = random.permutation(np.array(windows))
        groups = ((table[:, 2] - table[:, 1]).cumsum() - 1) // self.budget
        yield from np.split(table, np.flatnonzero(np.diff(groups)) + 1)

    def _cost(self, members: npt.NDArray[Any]) -> float:
        return int((members[:, 2] - members[:, 1]).sum())

    def _read(self, members: npt.NDArray[Any]) -> DecisionBatch:
        windows = [(self.episodes[number], begin, end) for number, begin, end in members.tolist()]
        return window_batch(windows, self.scaling)
