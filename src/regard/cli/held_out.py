"""Held-out examples that verbs score a run on: files of the command line, or a split of the run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard import tasks
from regard.cli import options
from regard.cli.groups import PairFileOptions
from regard.data.corpora import held_out
from regard.data.lines import read_lines
from regard.errors import UserError
from regard.recipes.schema import DataSettings
from regard.run_dir import RunDir


def aligned_lines(first: Path, second: Path) -> tuple[list[str], list[str]]:
    """Read two files that must have the same number of lines."""
    lines = list(read_lines(first)), list(read_lines(second))
    if len(lines[0]) != len(lines[1]):
        raise UserError(f"not line-aligned: {first} has {len(lines[0])} lines, {second} has {len(lines[1])}")
    if not lines[0]:
        raise UserError(f"no lines to score: {first} is empty")
    return lines


def data_settings(run: Path, folder: Path | None) -> DataSettings:
    """The data settings of a run, with the folder of --data."""
    settings = RunDir(run).recipe.data
    given = options.folder(folder)
    return settings if given is None else settings.model_copy(update={"folder": str(given)})


def held_out_pairs(run: Path, split: str, files: PairFileOptions) -> list[tuple[str, str]]:
    """The pairs of two files, or of a split of the run's data."""
    if (files.source is None) != (files.reference is None):
        raise UserError("--source and --reference must be given together")
    if files.source is not None and files.reference is not None:
        return list(zip(*aligned_lines(files.source, files.reference), strict=True))
    return held_out(data_settings(run, files.data), split)


def held_out_examples(run: Path, task: tasks.Task, split: str, files: PairFileOptions) -> list[Any]:
    """The inputs and labels of two files of lines, or of a split of the run's data."""
    if files.source is not None or files.reference is not None:
        if not task.has_source:
            raise UserError(f"--source and --reference are files of text, and this run was trained for {task.name}")
        return held_out_pairs(run, split, files)
    return tasks.of(task.recipe.model_copy(update={"data": data_settings(run, files.data)})).held_out(split)
