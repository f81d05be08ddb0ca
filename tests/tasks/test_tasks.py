"""Tasks: named in the recipe or inferred from it, and consistent with the other settings."""

from __future__ import annotations

from typing import Any

import pytest

from regard import tasks
from regard.cli.app import command
from regard.errors import UserError
from regard.recipes import describe, load, names, parse
from regard.recipes.schema import Recipe
from regard.registry import TASKS


@pytest.mark.parametrize("name", [name for name, _ in names()])
def test_every_built_in_recipe_names_a_task_that_suits_it(name: str) -> None:
    recipe = load(name)
    assert f'task = "{recipe.task}"' in describe(recipe)
    assert tasks.of(recipe).data == recipe.data.kind
    assert parse(describe(recipe)) == recipe


@pytest.mark.parametrize(
    ("corpus", "model", "task"),
    [
        ("copy", {}, "translation"),
        ("copy", {"family": "recurrent"}, "translation"),
        ("copy", {"family": "gpt"}, "translation"),
        ("stories", {"family": "gpt"}, "language-modelling"),
        ("stories", {"family": "bert"}, "masked-lm"),
    ],
)
def test_a_task_that_is_not_named_follows_from_family_and_data(corpus: str, model: dict[str, Any], task: str) -> None:
    recipe = Recipe.model_validate({"data": {"corpus": corpus}, "model": model})
    assert recipe.task == task
    assert Recipe.model_validate(recipe.model_dump()) == recipe


CLASSIFIER = ["model.family=bert", "model.task=classify", "text.shared=false"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (["task=poetry"], "must be .*translation"),
        (["task=masked-lm"], "not for this transformer model, which is for translation"),
        (["task=classification"], "not for this transformer model, which is for translation"),
        ([*CLASSIFIER, "task=translation"], "not for this bert model, which is for classification"),
        ([*CLASSIFIER, "task=masked-lm"], "not for this bert model, which is for classification"),
        ([*CLASSIFIER, "data.corpus=stories"], "needs pairs, but the data are plain text"),
        ([*CLASSIFIER, "data.corpus=shapes"], "needs pairs, but the data are images"),
        (["model.family=bert", "task=masked-lm"], "needs plain text, but the data are pairs"),
        (["model.family=vit"], "needs images, but the data are pairs"),
        (["model.family=gpt", "data.corpus=copy", "task=language-modelling"], "needs plain text, but .* are pairs"),
        (
            ["model.family=gpt", "data.corpus=stories", "training.best=bleu"],
            'for language-modelling: it must be "loss"',
        ),
    ],
)
def test_settings_that_contradict_the_task_are_refused(changes: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load("copy", changes)


def test_other_data_or_another_family_drop_the_inherited_task() -> None:
    assert load("stories", ["data.corpus=copy"]).task == "translation"
    assert load("stories", ["model.family=bert"]).task == "masked-lm"
    assert load("stories", ["model.family=transformer", "data.corpus=copy"]).task == "translation"


def test_every_verb_of_a_task_is_a_command() -> None:
    commands = set(command().list_commands(None))
    for name, task in TASKS.items():
        assert task.name == name
        assert task.verb in task.verbs <= commands
