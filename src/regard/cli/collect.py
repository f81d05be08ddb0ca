"""regard collect"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from regard.cli import options
from regard.cli.output import note
from regard.cli.progress import progress_bar
from regard.data.environments import Policy, make_environment, make_policy
from regard.data.trajectories import Trajectories
from regard.data.trajectories import collect as collect_episodes
from regard.errors import UserError

CHUNK = 50  # episodes between updates of the progress bar


def collect(
    env: Annotated[
        str, typer.Argument(metavar="ENV", help="key-door, or an environment of gymnasium: CartPole-v1, ...")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The .npz file to write.")],
    policy: Annotated[
        str,
        typer.Option(
            metavar="random|expert|mixed",
            help="How to act; mixed: as the expert, with 0, 25, 50, 75 and 100 % of random actions in turn.",
        ),
    ] = "mixed",
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="The number of episodes.")] = 500,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The random seed.")] = 0,
    quiet: options.Quiet = False,
) -> None:
    """Play episodes in an environment and write them as trajectories, to train on.

    There are experts for key-door (which tries a lock at random), CartPole-v1, Acrobot-v1, LunarLander-v3, and
    environments whose transitions are a table, such as FrozenLake-v1 and Taxi-v4. Environments of gymnasium need the
    extra rl.

    Example:

        regard collect CartPole-v1 --policy mixed --episodes 500 --out cartpole.npz

        regard train decisions --set data.trajectories=cartpole.npz --out runs/cartpole
    """
    if out.suffix != ".npz":
        raise UserError(f"{out}: the name of the file must end in .npz")
    made = make_environment(env)
    if policy not in ("random", "expert", "mixed"):
        raise UserError(f"--policy {policy[:60]}: must be random, expert or mixed")
    policies: list[Policy] = [make_policy("random" if policy == "random" else "expert", env, made)]
    epsilons = [0.0, 0.25, 0.5, 0.75, 1.0] if policy == "mixed" else [0.0]
    parts = []
    with progress_bar("playing", episodes, quiet) as progress:
        for begin in range(0, episodes, CHUNK):
            count = min(CHUNK, episodes - begin)
            parts.append(collect_episodes(made, policies, epsilons, count, seed * 1_000_003 + begin))
            progress(count)
    trajectories = Trajectories(
        tuple(e for part in parts for e in part.episodes), parts[0].features, parts[0].actions, parts[0].is_discrete
    )
    try:
        trajectories.save(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    totals = [episode.total for episode in trajectories.episodes]
    note(
        f"{out}: {len(totals):,} episodes, returns from {min(totals):g} to {max(totals):g}, mean {np.mean(totals):.4g}"
    )
