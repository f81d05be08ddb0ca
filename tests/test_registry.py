"""Registries: names that recipes may use, and that help and error messages list."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError

from regard import registry
from regard.errors import UserError
from regard.recipes import describe, load
from regard.registry import NameIn, Registry

SETTINGS = {
    "model.norm": registry.NORMS,
    "model.activation": registry.ACTIVATIONS,
    "training.optimizer": registry.OPTIMIZERS,
    "training.schedule": registry.SCHEDULES,
}


def test_an_entry_is_found_under_its_name_and_a_name_is_registered_once() -> None:
    animals: Registry[object] = Registry()
    cat, dog = animals.register("cat")(object()), animals.register("dog")(object())
    assert list(animals) == ["cat", "dog"] and animals["cat"] is cat and animals["dog"] is dog
    with pytest.raises(ValueError, match="'cat' is registered twice"):
        animals.register("cat")(dog)


def test_a_registry_imports_the_modules_that_fill_it_when_a_name_is_looked_up() -> None:
    for each in (registry.MASKS, *SETTINGS.values()):
        assert len(each) > 1


def test_a_setting_takes_the_names_for_which_the_condition_holds() -> None:
    animals: Registry[int] = Registry()
    for name, legs in {"cat": 4, "bird": 2, "dog": 4}.items():
        animals.register(name)(legs)

    class Settings(BaseModel):
        pet: Annotated[str, NameIn(animals, where=lambda legs: legs == 4)] = "cat"

    assert Settings(pet="dog").pet == "dog"
    for wrong in ("bird", "fish", 4, ["cat"]):
        with pytest.raises(ValidationError, match="Input should be 'cat' or 'dog'"):
            Settings.model_validate({"pet": wrong})


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_name_that_is_registered_is_valid_and_listed_in_the_help_and_in_errors(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = SETTINGS[setting]
    names = [*entries, "new"]
    with pytest.raises(UserError, match=f"{setting}=new: must be {', '.join(names[:-2])} or {names[-2]}$"):
        load("copy", [f"{setting}=new"])
    monkeypatch.setitem(entries._entries, "new", entries[names[0]])
    recipe = load("copy", [f"{setting}=new"])
    assert f"[{', '.join(names)}]" in describe(recipe)
