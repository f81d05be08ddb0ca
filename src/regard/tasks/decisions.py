"""Decisions: learning to act from trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from regard.data.corpora import locate
from regard.data.stream import BatchStream
from regard.data.trajectories import (
    HELD_OUT_EVERY,
    Episode,
    Scaling,
    Trajectories,
    Windows,
    read_trajectories,
    window_batch,
)
from regard.errors import UserError
from regard.models import SequenceModel
from regard.models.decision import DecisionBatch, DecisionSettings
from regard.packed import Batch
from regard.registry import CORPORA, TASKS
from regard.run_dir import RunDir
from regard.tasks.actor import Actor
from regard.tasks.axes import EXAMPLES, Hidden, Inspection, refuse_edges
from regard.tasks.base import Dataset, Output, Task, TraceSpec
from regard.tasks.decision_axes import play_episode, step_axis, unseen_groups
from regard.tasks.validator import SAMPLES, Validation, Validator


@dataclass(frozen=True)
class TrajectoryDataset(Dataset):
    """Episodes in memory."""

    trajectories: Trajectories
    episodes: list[Episode]

    @property
    def digest(self) -> str:
        return self.trajectories.digest


@TASKS.register("decisions")
class DecisionTask(Task):
    """Trains on windows of episodes; `training.batch_tokens` counts steps. Every tenth episode is held out."""

    name = "decisions"
    about = "choose actions in an environment"
    data = "trajectories"
    measures: tuple[str, ...] = ("loss",)
    verb = "act"
    sections = ()
    usage = "ENV"
    targets = "steps"
    verbs = frozenset({"act", "look", "draw", "explain"})
    has_source = False
    output: Output = "class"
    scores_pairs = False
    trace = TraceSpec("decide", input_sides=("inputs",))

    @property
    def example_usage(self) -> str:
        return self.recipe.data.corpus or self.usage

    @property
    def settings(self) -> DecisionSettings:
        assert isinstance(self.recipe.model, DecisionSettings)
        return self.recipe.model

    @cached_property
    def trajectories(self) -> Trajectories:
        data = self.recipe.data
        if data.trajectories is not None:
            path = locate(data.trajectories, data.folder)
            trajectories, where = read_trajectories(path), str(path)
        else:
            trajectories, where = CORPORA[data.corpus or ""].trajectories(data.count), str(data.corpus)
        if trajectories.is_discrete != (self.settings.actions == "discrete"):
            kind = "discrete" if trajectories.is_discrete else "continuous"
            raise UserError(f"{where}: its actions are {kind}: set model.actions = {kind}")
        if len(trajectories.episodes) < HELD_OUT_EVERY:
            raise UserError(
                f"{where}: {len(trajectories.episodes)} episodes, and training needs at least {HELD_OUT_EVERY}"
            )
        return trajectories

    @property
    def members(self) -> str:
        return "episodes"

    def check_files(self, resumed: bool) -> list[str]:
        _ = self.trajectories
        return []

    def held_out(self, split: str) -> list[Episode]:
        if split not in ("train", "valid"):
            raise UserError(f"trajectories have no split {split!r}: `regard act` measures what a model achieves")
        episodes = self.trajectories.episodes
        return [e for number, e in enumerate(episodes, 1) if (number % HELD_OUT_EVERY == 0) == (split == "valid")]

    def digest(self, examples: Sequence[Any]) -> str:
        return self.trajectories.digest

    def class_names(self) -> list[str]:
        return list(self.trajectories.actions)

    def feature_names(self) -> list[str]:
        return list(self.trajectories.features)

    def scales(self) -> list[tuple[float, float]]:
        return Scaling.measure(self.held_out("train"))

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> TrajectoryDataset:
        return TrajectoryDataset(self.trajectories, self.held_out("train"))

    def stream(self, run: RunDir, dataset: Dataset, static: bool) -> BatchStream:
        assert isinstance(dataset, TrajectoryDataset)
        training = self.recipe.training
        scaling = Scaling.of(run.scales)
        return Windows(dataset.episodes, scaling, self.settings.context, training.batch_tokens, training.seed)

    def describe(self, run: RunDir, dataset: Dataset, static: bool) -> list[str]:
        assert isinstance(dataset, TrajectoryDataset)
        totals = [episode.total for episode in dataset.episodes]
        steps = sum(len(episode.rewards) for episode in dataset.episodes)
        spread = f"returns from {min(totals):g} to {max(totals):g}, mean {np.mean(totals):.3g}"
        return [f"data: {len(totals):,} episodes, {steps:,} steps; {spread}"]

    def describe_batch(self, run: RunDir, batch: Batch) -> list[dict[str, Any]]:
        assert isinstance(batch, DecisionBatch)
        columns = (batch.layout.split(x) for x in (batch.returns, batch.states, batch.actions))
        names = ("returns", "states", "actions")
        return [{n: x.tolist() for n, x in zip(names, row, strict=True)} for row in zip(*columns, strict=True)]

    def inspect(self, actor: Actor, text: str) -> Inspection:
        """The last steps of an episode that the model plays, as many as it sees at once."""
        played = play_episode(actor, text)
        episode, settings = played.episode, self.settings
        begin = max(len(episode.rewards) - settings.context, 0)
        batch = window_batch([(episode, begin, len(episode.rewards))], actor.scaling)
        batch = replace(batch, returns=torch.from_numpy(played.returns[begin:] / actor.scaling.scale))
        names = actor.run.classes if settings.actions == "discrete" else None
        return Inspection(batch, step_axis(played, begin, names, settings.condition == "return"))

    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """Let no other step attend to some steps: the same as a sequence without them."""
        refuse_edges(hidden, "steps")
        return replace(inspection, unseen=unseen_groups(inspection, hidden.elements))

    def examples(self) -> list[str]:
        """Episodes to begin with, for the page."""
        corpus = self.recipe.data.corpus
        return [] if corpus is None else [f"{corpus} return 1 seed {n}" for n in range(EXAMPLES)]

    def validator(self, run: RunDir, examples: Sequence[Any], device: torch.device) -> DecisionValidator:
        return DecisionValidator(self, run, examples, device)

    def workload(self, run: RunDir, model: SequenceModel, inputs: list[Any]) -> tuple[str, Callable[[], int]]:
        raise UserError(f"`regard bench` is not for {self.name}")


class DecisionValidator(Validator):
    """The loss on the actions of held-out episodes, and the share that is predicted (of discrete actions)."""

    def __init__(self, task: DecisionTask, run: RunDir, examples: Sequence[Episode], device: torch.device) -> None:
        super().__init__(task.recipe, device)
        self.task, self.run, self.episodes = task, run, list(examples)

    @cached_property
    def _batches(self) -> list[DecisionBatch]:
        context = self.task.settings.context
        windows = [
            (episode, begin, min(begin + context, len(episode.rewards)))
            for episode in self.episodes
            for begin in range(0, len(episode.rewards), context)
        ]
        size = max(4096 // context, 1)
        scaling = Scaling.of(self.run.scales)
        groups = (windows[n : n + size] for n in range(0, len(windows), size))
        return [window_batch(group, scaling).to(self.device) for group in groups]

    def _measure(self, model: SequenceModel) -> Validation:
        loss, right, steps = 0.0, 0, 0
        for batch in self._batches:
            loss += model(batch).item()
            steps += batch.num_targets
            if not batch.actions.is_floating_point():
                right += int((model.logits(batch).argmax(-1) == batch.actions).sum())
        discrete = self.task.settings.actions == "discrete"
        return Validation(loss / steps, exact=100 * right / steps if discrete else None, samples=self._samples(model))

    def _samples(self, model: SequenceModel) -> list[dict[str, str]]:
        """The last action of the first windows, beside what the model would do."""
        batch = self._batches[0]
        count = min(SAMPLES, self.recipe.training.validate_lines, len(batch.layout))
        last = (batch.layout.offsets[1:] - 1)[:count]
        chosen, taken = model.logits(batch)[last], batch.actions[last]
        pairs = zip(taken.tolist(), (chosen.argmax(-1) if taken.dim() == 1 else chosen).tolist(), strict=True)
        return [
            {"source": f"held-out episode {n}", "reference": self._name(right), "output": self._name(ours)}
            for n, (right, ours) in enumerate(pairs, 1)
        ]

    def _name(self, action: Any) -> str:
        return " ".join(f"{x:.3f}" for x in action) if isinstance(action, list) else self.run.classes[action]
