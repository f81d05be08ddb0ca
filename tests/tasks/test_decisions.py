"""Decisions: the built-in environment, trajectories, the Decision Transformer, acting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.data.environments import COLOURS, LENGTH, KeyDoor, make_environment, make_policy
from regard.data.stream import StreamPosition
from regard.data.trajectories import (
    Episode,
    KeyDoorEpisodes,
    Scaling,
    Windows,
    collect,
    play,
    read_trajectories,
    window_batch,
)
from regard.errors import UserError
from regard.models.decision import DecisionSettings, DecisionTransformer
from regard.recipes import load
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.tasks.actor import Actor
from regard.training.setup import train

QUICK = ["training.steps=6", "training.validate_every=3", "training.save_every=3", "data.count=40", "model.width=16"]
SCALING = Scaling(np.zeros(3, np.float32), np.ones(3, np.float32), 2.0, 2.0)


def needs_gymnasium() -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("gymnasium", reason="environments need regard[rl]")


def episode(steps: int, seed: int = 0, continuous: bool = False) -> Episode:
    random = np.random.default_rng(seed)
    actions = random.normal(size=(steps, 2)).astype(np.float32) if continuous else random.integers(0, 4, steps)
    return Episode(
        random.normal(size=(steps, 3)).astype(np.float32), actions, random.normal(size=steps).astype(np.float32)
    )


def model(condition: str = "return", continuous: bool = False, **changes: Any) -> DecisionTransformer:
    torch.manual_seed(0)
    kind = "continuous" if continuous else "discrete"
    settings = DecisionSettings(condition=condition, actions=kind, width=16, heads=2, context=8, **changes)  # type: ignore[call-arg,arg-type]
    return DecisionTransformer(settings, 3, 2 if continuous else 4).eval()


# The environment


@pytest.mark.parametrize("seed", range(4))
def test_the_right_lock_is_worth_one_and_a_wrong_one_nothing(seed: int) -> None:
    for chosen in range(3):
        env = KeyDoor()
        state = env.reset(seed)
        colour = int(state[:3].argmax())
        assert (
            state.sum() == 1
            and COLOURS[colour][0].upper() == env.frame().replace("@", COLOURS[env.colour][0].upper())[0]
        )
        for _ in range(LENGTH):
            state, reward, done = env.step(0)
            assert state.tolist() == [0, 0, 0, 1, 0] and (reward, done) == (0.0, False)  # no key in sight
        state, _, done = env.step(0)
        assert state.tolist() == [0, 0, 0, 0, 1] and not done
        assert env.step(1 + chosen)[1:] == (float(chosen == colour), True)


def test_opening_in_the_corridor_only_takes_time() -> None:
    env = KeyDoor()
    env.reset(0)
    results = [env.step(1) for _ in range(60)]
    assert [done for _, _, done in results] == [False] * 59 + [True] and env.cell == 0


def test_a_third_of_the_built_in_episodes_succeed() -> None:
    found = KeyDoorEpisodes.trajectories(300)
    assert np.mean([e.total for e in found.episodes]) == pytest.approx(1 / 3, abs=0.1)
    again = KeyDoorEpisodes.trajectories(300)
    assert found.digest == again.digest


def test_environments_that_do_not_exist_get_one_line() -> None:
    needs_gymnasium()
    with pytest.raises(UserError, match="cannot make the environment 'Nowhere-v9'"):
        make_environment("Nowhere-v9")
    with pytest.raises(UserError, match="there is an expert for"):
        make_policy("expert", "MountainCar-v0", make_environment("MountainCar-v0"))


def test_the_expert_of_frozen_lake_has_the_highest_probability_of_reaching_the_goal() -> None:
    needs_gymnasium()
    env = make_environment("FrozenLake-v1")
    outcomes = env.env.unwrapped.P  # type: ignore[attr-defined]
    moves, rewards = np.zeros((16, 4, 16)), np.zeros((16, 4))
    for cell, actions in outcomes.items():
        for action, results in actions.items():
            for probability, after, reward, ended in results:
                rewards[cell, action] += probability * reward
                moves[cell, action, after] += 0 if ended else probability
    expert = make_policy("expert", "FrozenLake-v1", env)
    chosen = [expert(state, np.random.default_rng(0)) for state in np.eye(16, dtype=np.float32)]
    ours = np.zeros(16)
    for _ in range(5000):
        ours = (rewards + moves @ ours)[np.arange(16), chosen]
    best = np.zeros(16)  # value iteration
    for _ in range(5000):
        best = (rewards + moves @ best).max(1)
    assert best[0] == pytest.approx(14 / 17, abs=1e-6)
    assert ours == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("Acrobot-v1", -150),  # of at least -500, the length of an episode; random actions get about -500
        ("Taxi-v4", 3),  # 20 for the passenger, less one for each step; the longest way is 17 steps
    ],
)
def test_experts_solve_their_environments(name: str, least: float) -> None:
    needs_gymnasium()
    env = make_environment(name)
    totals = [episode.total for episode in collect(env, [make_policy("expert", name, env)], [0.0], 8, seed=1).episodes]
    assert min(totals) >= least, totals


def test_an_environment_of_another_version_gets_one_line_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    needs_gymnasium()
    with pytest.raises(UserError, match=r"Please use `Taxi-v\d` instead"):
        make_environment("Taxi-v3")
    assert not recwarn.list


def test_the_highest_return_of_the_data_is_requested_by_default() -> None:
    """Returns may be negative; the scale of the returns to go is their largest absolute value."""
    rewards = [np.full(n, -1, np.float32) for n in (3, 5)]
    made = [Episode(np.zeros((len(r), 1), np.float32), np.zeros(len(r), np.int64), r) for r in rewards]
    scaling = Scaling.of(Scaling.measure(made))
    assert (scaling.highest, scaling.scale) == (-3, 5)


def test_environments_of_gymnasium_are_played() -> None:
    needs_gymnasium()
    for name, features, actions, discrete in [
        ("CartPole-v1", 4, 2, True),
        ("FrozenLake-v1", 16, 4, True),
        ("Pendulum-v1", 3, 1, False),
    ]:
        env = make_environment(name)
        assert (len(env.features), len(env.actions), env.is_discrete) == (features, actions, discrete)
        found = collect(env, [make_policy("random", name, env)], [0.0], 2, seed=1)
        assert [e.states.shape[1] for e in found.episodes] == [features] * 2
        assert found.digest == collect(env, [make_policy("random", name, env)], [0.0], 2, seed=1).digest
    env = make_environment("CartPole-v1")
    totals = [play(env, lambda s: make_policy("expert", "CartPole-v1", env)(s, None), seed).total for seed in range(5)]  # type: ignore[arg-type]
    assert np.mean(totals) > 300


# Trajectories


def test_returns_to_go_are_sums_from_each_step_on() -> None:
    made = Episode(np.zeros((3, 1), np.float32), np.zeros(3, np.int64), np.array([1, 2, 4], np.float32))
    assert made.returns_to_go.tolist() == [7, 6, 4] and made.total == 7


def test_trajectories_are_written_and_read_again(tmp_path: Path) -> None:
    found = KeyDoorEpisodes.trajectories(5)
    found.save(tmp_path / "some.npz")
    assert read_trajectories(tmp_path / "some.npz").digest == found.digest


def test_parquet_files_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"episode": [0, 0, 1], "state": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "action": [0, 2, 1]}
    parquet.write_table(arrow.table({**columns, "reward": [1.0, 0.5, 2.0]}), tmp_path / "some.parquet")
    found = read_trajectories(tmp_path / "some.parquet")
    assert [e.rewards.tolist() for e in found.episodes] == [[1.0, 0.5], [2.0]]
    assert found.episodes[0].states.tolist() == [[1, 2], [3, 4]] and found.is_discrete and len(found.actions) == 3


MISTAKES = {
    "no rewards": ({"rewards": None}, "has no rewards"),
    "too few actions": ({"actions": np.zeros(2, int)}, "equally many steps"),
    "NaN states": ({"states": np.full((4, 2), np.nan)}, "not a finite number"),
    "infinite rewards": ({"rewards": np.full(4, np.inf)}, "not a finite number"),
    "negative actions": ({"actions": np.array([0, 1, -1, 0])}, "numbered from 0"),
    "no steps": (
        {"states": np.zeros((0, 2)), "actions": np.zeros(0, int), "rewards": np.zeros(0), "episodes": np.zeros(0, int)},
        "equally many steps",
    ),
    "text": ({"rewards": np.array(["a"] * 4)}, "must be numbers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_file_gets_one_line(name: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    arrays = {
        "states": np.zeros((4, 2)),
        "actions": np.zeros(4, int),
        "rewards": np.zeros(4),
        "episodes": np.zeros(4, int),
    }
    np.savez(tmp_path / "x.npz", **{k: v for k, v in {**arrays, **changes}.items() if v is not None})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as raised:
        read_trajectories(tmp_path / "x.npz")
    assert "\n" not in str(raised.value)


def test_an_epoch_visits_every_step_once() -> None:
    episodes = [episode(n, n) for n in (3, 20, 9, 1)]
    stream = Windows(episodes, SCALING, context=8, budget=16, seed=0)
    for epoch in range(2):
        seen: list[float] = []
        for batch, after in stream.batches(StreamPosition(epoch)):
            if after.epoch != epoch:
                break
            assert max(batch.layout.lengths) <= 8 and batch.num_targets <= 24
            seen += batch.states[:, 0].tolist()
        expected = np.concatenate([e.states[:, 0] for e in episodes]).tolist()
        assert sorted(seen) == pytest.approx(sorted(expected))


# The model


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("condition", ["return", "none"])
def test_a_decision_depends_on_the_past_and_not_on_its_own_action_or_the_future(
    condition: str, continuous: bool
) -> None:
    network, made = model(condition, continuous), episode(6, continuous=continuous)
    batch = window_batch([(made, 0, 6)], SCALING)
    inputs = {"returns": batch.returns, "states": batch.states}
    for tensor in inputs.values():
        tensor.requires_grad_()
    network.logits(batch)[3].square().sum().backward()
    assert batch.states.grad is not None
    assert (batch.states.grad.abs().sum(1) > 0).tolist() == [True] * 4 + [False] * 2
    if condition == "return":
        assert batch.returns.grad is not None and (batch.returns.grad.abs() > 0).tolist() == [True] * 4 + [False] * 2
    for changed, same in ((2, False), (3, True), (5, True)):  # the action of step 2 matters to step 3
        actions = made.actions.copy()
        actions[changed] = actions[changed] + 1.0 if continuous else (actions[changed] + 1) % 4
        other = window_batch([(Episode(made.states, actions, made.rewards), 0, 6)], SCALING)
        assert torch.allclose(network.logits(batch)[3], network.logits(other)[3], atol=1e-6) is same


def test_a_window_alone_and_among_others_gives_the_same() -> None:
    network = model()
    windows = [(episode(5, 1), 0, 5), (episode(9, 2), 3, 9), (episode(1, 3), 0, 1)]
    together = window_batch(windows, SCALING)
    parts = together.layout.split(network.logits(together))
    for window, part in zip(windows, parts, strict=True):
        torch.testing.assert_close(network.logits(window_batch([window], SCALING)), part)


# Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(load("key-door", QUICK), tmp_path_factory.mktemp("door") / "run", device="cpu", quiet=True)


def call(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    from regard.cli import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (left.value.code or 0) == status, printed.err
    return printed.out if status == 0 else printed.err


def test_acting_in_many_environments_at_once_is_acting_in_each(run: RunDir) -> None:
    loaded = LoadedRun.load(run.path, device="cpu")
    actor = Actor(loaded.run, loaded.module, loaded.device)
    together = actor.play([KeyDoor() for _ in range(3)], 1.0, [1, 2, 3])
    alone = [actor.play([KeyDoor()], 1.0, [seed])[0] for seed in (1, 2, 3)]
    for one, other in zip(together, alone, strict=True):
        assert np.array_equal(one.actions, other.actions) and one.total == other.total


def test_actions_are_sampled_in_proportion_to_their_probabilities(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedRun.load(run.path, device="cpu")
    actor = Actor(loaded.run, loaded.module, loaded.device)
    probabilities = torch.tensor([0.5, 0.2, 0.0, 0.3])
    monkeypatch.setattr(
        actor.model, "logits", lambda batch: probabilities.log().expand(len(batch.actions), -1), raising=False
    )
    draws = (np.arange(1000) + 0.5) / 1000  # a thousand equal shares of the interval from 0 to 1
    chosen = actor.decide([([KeyDoor().reset(1)], [], [])] * 1000, 1.0, draws.tolist())
    assert np.bincount(chosen, minlength=4).tolist() == [500, 200, 0, 300]
    assert set(actor.decide([([KeyDoor().reset(1)], [], [])], 1.0)) == {0}


def test_sampled_episodes_are_those_of_their_seeds(run: RunDir) -> None:
    loaded = LoadedRun.load(run.path, device="cpu")
    actor = Actor(loaded.run, loaded.module, loaded.device)
    together = actor.play([KeyDoor() for _ in range(3)], 1.0, [1, 2, 3], sample=True)
    alone = actor.play([KeyDoor()], 1.0, [2], sample=True)
    assert np.array_equal(together[1].actions, alone[0].actions)


def test_attention_of_decisions_sums_to_one_over_the_past(run: RunDir) -> None:
    loaded = LoadedRun.load(run.path, device="cpu")
    actor = Actor(loaded.run, loaded.module, loaded.device)
    made = KeyDoorEpisodes.trajectories(1).episodes[0]
    weights = actor.attention(made, 1.0)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)
    assert not np.triu(weights, 1).any()


def test_act_and_collect_on_the_command_line(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "act", run.path, "key-door", "--return", 1, "--episodes", 2, "--json", "--device", "cpu")
    entry = json.loads(out)
    assert entry["requested"] == 1 and 0 <= entry["mean"] <= 1 and entry["episodes"] == 2
    shown = call(capsys, "act", run.path, "key-door", "--episodes", 1, "--show", "--out", tmp_path / "map.svg")
    assert shown.splitlines()[0].startswith("@") and "attends to" in (tmp_path / "map.svg").read_text()
    call(
        capsys, "act", run.path, "key-door", "--return", 0, "--return", 1, "--episodes", 2, "--out", tmp_path / "r.svg"
    )
    assert "requested return" in (tmp_path / "r.svg").read_text()
    call(capsys, "collect", "key-door", "--policy", "random", "--episodes", 12, "--out", tmp_path / "some.npz")
    assert len(read_trajectories(tmp_path / "some.npz").episodes) == 12
    for words, message in [
        (["collect", "key-door", "--policy", "clever", "--out", tmp_path / "x.npz"], "must be random, expert or mixed"),
        (["collect", "key-door", "--out", tmp_path / "x.txt"], "must end in .npz"),
        (["predict", run.path, "x"], "was trained"),
    ]:
        assert message in call(capsys, *words, status=2)


def test_an_environment_that_does_not_fit_is_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    needs_gymnasium()
    message = call(capsys, "act", run.path, "CartPole-v1", status=2)
    assert "4 numbers of a state and 2 actions" in message and len(message.splitlines()) == 1


def test_kinds_of_actions_must_fit_the_recipe(tmp_path: Path) -> None:
    for changes, message in [
        (["model.actions=continuous"], "its actions are discrete: set model.actions = discrete"),
        (["data.count=5"], "5 episodes, and training needs at least 10"),
    ]:
        with pytest.raises(UserError, match=message):
            train(load("key-door", [*QUICK, *changes]), tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.slow
def test_the_key_is_remembered_over_20_steps_and_not_with_a_short_context(tmp_path: Path) -> None:
    """Long context: nearly always the right lock. Context of 5, or behaviour cloning: about one in three."""
    achieved = {}
    for name, changes in {"long": [], "short": ["model.context=5"], "cloning": ["model.condition=none"]}.items():
        run = train(load("key-door", changes), tmp_path / name, device="cpu", quiet=True)
        loaded = LoadedRun.load(run.path, device="cpu")
        actor = Actor(loaded.run, loaded.module, loaded.device)
        episodes = actor.play([KeyDoor() for _ in range(90)], 1.0, list(range(90)))
        achieved[name] = np.mean([e.total for e in episodes])
    assert achieved["long"] > 0.95 and achieved["short"] < 0.6 and achieved["cloning"] < 0.6, achieved
