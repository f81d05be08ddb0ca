"""regard act"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from regard.cli import options
from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.data.environments import make_environment
from regard.data.trajectories import Episode
from regard.runs import LoadedRun
from regard.tasks.actor import Actor
from regard.viz.views import decisions, returns_chart

SHOWN = 64  # steps of an episode in a picture


def act(
    run: options.RunPath,
    env: Annotated[str, typer.Argument(metavar="ENV", help="key-door, or an environment of gymnasium.")],
    requested: Annotated[
        list[float] | None,
        typer.Option(
            "--return", metavar="R", help="The return to ask for. Repeatable. [default: the highest of the data]"
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Episodes for each return.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The random seed of the environment.")] = 0,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample discrete actions, instead of taking the most probable ones.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the achieved over the requested returns; of one requested return, which past steps each "
            "decision of the first episode attends to (.svg, .png, .pdf, .html, .json).",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the states and actions of the first episode.")] = False,
    as_json: options.Json = False,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Act in an environment, and print the returns that are achieved.

    A Decision Transformer is asked for a return, and chooses actions that have led to such returns in its data. A model
    without returns (behaviour cloning) imitates its data whatever is asked for. With --sample, actions are as varied as
    those of the data with that return; without it, a low return may be exceeded.

    Examples:

        regard act runs/key-door key-door --return 1 --episodes 100

        regard act runs/cartpole CartPole-v1 --return 50 --return 200 --return 500 --sample --out returns.svg
    """
    loaded = LoadedRun.load(run, weights=weights, device=device)
    loaded.require_verb("act")
    actor = Actor(loaded.run, loaded.module, loaded.device)
    actor.check(make_environment(env), env)
    asked = requested or [actor.scaling.highest]
    envs = [make_environment(env) for _ in range(episodes)]
    rows = []
    first = None
    with progress_bar("playing", episodes * len(asked), quiet) as progress:
        for value in asked:
            played = actor.play(envs, value, [1_000_000 * (seed + 1) + n for n in range(episodes)], progress, sample)
            first = first or played[0]
            totals = np.array([episode.total for episode in played])
            rows.append({"requested": value, "mean": float(totals.mean()), "deviation": float(totals.std())})
    assert first is not None
    if show:
        _show(actor, env, first, 1_000_000 * (seed + 1))
    for row in rows:
        line = f"return {row['requested']:g} requested: {row['mean']:.4g} ± {row['deviation']:.3g} achieved"
        typer.echo(json.dumps({**row, "episodes": episodes}) if as_json else f"{line} ({episodes} episodes)")
    if out is not None:
        if len(asked) > 1:
            picture = returns_chart(rows, env)
        else:
            count = min(len(first.rewards), SHOWN)
            names = [actor.run.classes[a] for a in first.actions] if first.actions.ndim == 1 else None
            picture = decisions(actor.attention(first, asked[0])[-count:, -count:], names, len(first.rewards), env)
        picture.save(out)
        note(str(out))


def _show(actor: Actor, name: str, episode: Episode, seed: int) -> None:
    env = make_environment(name)
    env.reset(seed)
    for action in episode.actions:
        label = actor.run.classes[action] if env.is_discrete else " ".join(f"{x:.2f}" for x in action)
        typer.echo(f"{env.frame()}  {label}")
        env.step(action)
