"""Acting in an environment with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regard import taps
from regard.data.environments import Environment
from regard.data.trajectories import Episode, Scaling, window_batch
from regard.errors import UserError
from regard.models import SequenceModel
from regard.models.decision import DecisionBatch, DecisionSettings
from regard.run_dir import RunDir


@dataclass
class Actor:
    """Plays episodes that should have a return of `requested`. It reads the last `context` steps, as in training."""

    run: RunDir
    model: SequenceModel
    device: torch.device

    def __post_init__(self) -> None:
        assert isinstance(self.run.recipe.model, DecisionSettings)
        self.settings: DecisionSettings = self.run.recipe.model
        self.scaling = Scaling.of(self.run.scales)

    def check(self, env: Environment, name: str) -> None:
        """Refuse an environment with other states or actions than the model knows."""
        ours = (len(self.run.features), len(self.run.classes), self.settings.actions == "discrete")
        theirs = (len(env.features), len(env.actions), env.is_discrete)
        if ours != theirs:
            kinds = [
                f"{f} numbers of a state and {a} {'actions' if d else 'numbers of an action'}"
                for f, a, d in (theirs, ours)
            ]
            raise UserError(f"{name} has {kinds[0]}, and {self.run.path} was trained with {kinds[1]}")

    def play(
        self,
        envs: Sequence[Environment],
        requested: float,
        seeds: Sequence[int],
        progress: Callable[[int], None] | None = None,
        sample: bool = False,
    ) -> list[Episode]:
        """Play one episode in each environment, all in step; the seed of each is that of its sampled actions too."""
        draws = [np.random.default_rng(seed) for seed in seeds] if sample else None
        states = [[env.reset(seed)] for env, seed in zip(envs, seeds, strict=True)]
        actions: list[list[Any]] = [[] for _ in envs]
        rewards: list[list[float]] = [[] for _ in envs]
        live = list(range(len(envs)))
        while live:
            histories = [(states[i], actions[i], rewards[i]) for i in live]
            chosen = self.decide(histories, requested, None if draws is None else [draws[i].random() for i in live])
            ended = []
            for i, action in zip(live, chosen, strict=True):
                state, reward, done = envs[i].step(action)
                actions[i].append(action)
                rewards[i].append(reward)
                if done:
                    ended.append(i)
                else:
                    states[i].append(state)
            if progress is not None:
                progress(len(ended))
            live = [i for i in live if i not in ended]
        kind = np.int64 if self.settings.actions == "discrete" else np.float32
        return [
            Episode(np.stack(s), np.array(a, kind), np.array(r, np.float32))
            for s, a, r in zip(states, actions, rewards, strict=True)
        ]

    def decide(
        self,
        histories: Sequence[tuple[list[Any], list[Any], list[float]]],
        requested: float,
        draws: Sequence[float] | None = None,
    ) -> list[Any]:
        """Return the next action of each history of states (one more than the rest), actions and rewards.

        It is the most probable action or, given numbers from 0 to 1, the one whose interval of the cumulative
        distribution holds the number: a sample, if the numbers are random. Numbers are predicted, not sampled.
        """
        batch = window_batch([self._window(*history, requested) for history in histories], self.scaling)
        batch = _with_returns(batch, histories, requested, self.settings.context, self.scaling).to(self.device)
        with torch.inference_mode():
            last = self.model.logits(batch)[batch.layout.offsets[1:] - 1].float().cpu()
        if self.settings.actions != "discrete":
            return list(last.numpy())
        if draws is None:
            return last.argmax(-1).tolist()
        cumulative = last.double().softmax(-1).cumsum(-1)[:, :-1]  # without the last, so that rounding cannot pass it
        return (cumulative <= torch.tensor(draws, dtype=torch.float64)[:, None]).sum(-1).tolist()

    def _window(
        self, states: list[Any], actions: list[Any], rewards: list[float], requested: float
    ) -> tuple[Episode, int, int]:
        """The last steps of a history; the action of the last step is not known yet, and is not read."""
        discrete = self.settings.actions == "discrete"
        unknown = 0 if discrete else np.zeros(len(self.run.classes), np.float32)
        kind = np.int64 if discrete else np.float32
        episode = Episode(np.stack(states), np.array([*actions, unknown], kind), np.array([*rewards, 0], np.float32))
        return episode, max(len(states) - self.settings.context, 0), len(states)

    def attention(self, episode: Episode, requested: float) -> np.ndarray:
        """[S, S] how much the decision at each step attends to each step so far: mean of layers and heads."""
        count, context, tokens = len(episode.rewards), self.settings.context, self.settings.tokens_per_step
        histories = [
            (list(episode.states[: t + 1]), list(episode.actions[:t]), episode.rewards[:t].tolist())
            for t in range(count)
        ]
        weights = np.zeros((count, count))
        for t, history in enumerate(histories):
            batch = window_batch([self._window(*history, requested)], self.scaling)
            batch = _with_returns(batch, [history], requested, context, self.scaling).to(self.device)
            layers: list[torch.Tensor] = []

            def listen(module: Any, kind: str, value: Any, layers: list[Any] = layers) -> None:
                if kind == "weights":
                    layers.append(value()[0].mean(0))  # [Q, K]

            with torch.inference_mode(), taps.listen(listen):
                self.model.logits(batch)
            asked = torch.stack(layers).mean(0)[-2].float().cpu()  # the token of the last state
            steps = asked.unflatten(0, (-1, tokens)).sum(-1).numpy()
            weights[t, t + 1 - len(steps) : t + 1] = steps
        return weights


def _with_returns(
    batch: DecisionBatch,
    histories: Sequence[tuple[Any, Any, list[float]]],
    requested: float,
    context: int,
    scaling: Scaling,
) -> DecisionBatch:
    """Replace the returns to go by what is left of the requested return."""
    rows = []
    for states, _, rewards in histories:
        left = requested - np.concatenate([[0.0], np.cumsum(rewards)])
        rows.append(left[max(len(states) - context, 0) :])
    returns = torch.from_numpy((np.concatenate(rows) / scaling.scale).astype(np.float32))
    return replace(batch, returns=returns)
