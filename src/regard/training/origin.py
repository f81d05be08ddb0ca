"""Starting a run with another run's weights and vocabulary (`--from`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import tasks, tensor_io
from regard.data.corpora import corpora, names_of
from regard.data.vocabulary import learn_target_tokenizer, tags_of
from regard.errors import UserError
from regard.models import SequenceModel
from regard.nn.lora import is_adapter
from regard.recipes import differences
from regard.recipes.schema import DataSettings, Recipe
from regard.recipes.to_toml import shown
from regard.run_dir import RunDir
from regard.text import Tokenizer
from regard.training.progress import Reporter

VOCABULARY_TENSORS = (  # one row per token of the source or of the target vocabulary
    "source_embedding.table",
    "target_embedding.table",
    "embedding.table",
    "output",
    "output_bias",
    "mlm_head.bias",
)
NO_EFFECT_ON_WEIGHTS = {"model.dropout", "model.zero_init", "model.mask_prob", "model.task"}  # names and shapes
NO_EFFECT_ON_RESULTS = NO_EFFECT_ON_WEIGHTS | {"model.size", "model.max_positions"}


def tokenizers(recipe: Recipe, origin: RunDir | None, reporter: Reporter) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of another run, with new tags added; without another run, newly trained ones.

    Where that run had one for both sides and this one has two, the target's is trained. Where that run's outputs are
    another kind of text (a transcript, not a translation), the vocabulary is trained too.
    """
    task = tasks.of(recipe)
    if origin is None or not task.same_outputs(origin.recipe):
        reporter.say("learning the vocabulary")
        return task.learn_tokenizers()
    if recipe.text.shared and not origin.recipe.text.shared:
        raise UserError(f"{origin.path} has a vocabulary for each side: set text.shared = false to begin with it")
    _report_vocabulary(recipe, origin, reporter)
    source_tags, target_tags = tags_of(recipe)
    source, theirs = origin.tokenizers
    if recipe.text.shared:
        both = _tagged(source, [*source_tags, *target_tags], recipe, reporter)
        return both, both.target_side()
    source = _tagged(source, source_tags, recipe, reporter)
    if not origin.recipe.text.shared:
        return source, _tagged(theirs, target_tags, recipe, reporter)
    reporter.say("learning the target's vocabulary")
    return source, learn_target_tokenizer(recipe)


def class_order(names: list[str], origin: RunDir | None) -> list[str]:
    """Class names in the order of another run, if it has the same classes, so that its head fits."""
    theirs = [] if origin is None else list(origin.classes)
    return theirs if sorted(theirs) == sorted(names) else names


def _report_vocabulary(recipe: Recipe, origin: RunDir, reporter: Reporter) -> None:
    """Report where the vocabulary comes from, and which settings have no effect for that reason."""
    changed = differences(origin.recipe, recipe)
    idle = [
        f"text.{key} = {shown(changed[f'text.{key}'][1])}"
        for key in ("unit", "vocabulary", "sample")
        if f"text.{key}" in changed
    ]
    unused = f"; {' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect" if idle else ""
    source, target = origin.tokenizers
    sizes = f"{len(source):,}" if origin.recipe.text.shared else f"{len(source):,} and {len(target):,}"
    reporter.say(f"vocabulary: that of {origin.path} ({sizes} tokens, {source.unit}){unused}")


def _tagged(tokenizer: Tokenizer, wanted: list[str], recipe: Recipe, reporter: Reporter) -> Tokenizer:
    """Add the tags that a tokenizer lacks."""
    new = [tag for tag in dict.fromkeys(wanted) if tag not in tokenizer.tags]
    if not new:
        return tokenizer
    if getattr(recipe.model, "unused", []):
        raise UserError(f"tags cannot be added to an imported GPT: leave out {', '.join(new)}")
    reporter.say(f"new tags: {', '.join(new)} (a new tag starts as the mean of the other tokens' vectors)")
    return tokenizer.with_tags(new)


def load_origin(origin: RunDir, run: RunDir, model: SequenceModel, reporter: Reporter) -> bool:
    """Load another run's weights, for other classes without its head; return whether all of them were loaded."""
    theirs, ours = origin.recipe, run.recipe
    changed = {key: pair for key, pair in differences(theirs, ours).items() if key.startswith("model.")}
    if "model.family" in changed:
        family = _listed({"model.family": changed["model.family"]}).replace('"', "")
        raise UserError(f"the weights of {origin.path} do not fit this model: {family}")
    classes, their_classes = _predicts_classes(ours), _predicts_classes(theirs)
    tensors: Mapping[str, Tensor] = tensor_io.load(origin.best)[0]
    same_outputs = tasks.of(ours).same_outputs(theirs)
    if not same_outputs:
        reporter.say(f"the outputs are not those of {origin.path}: only the encoder is loaded")
        tensors = model.body(tensors)
    if classes and their_classes and run.classes != origin.classes:
        reporter.say(f"the classes are not those of {origin.path}: the classifier head is initialised anew")
        tensors = model.body(tensors)
    if ours.training.adapter != "none":  # new adapters, unless the other run has them
        initial = tensor_io.model_tensors(model)
        tensors = {name: t for name, t in initial.items() if is_adapter(name) and name not in tensors} | dict(tensors)
    try:
        model.init_from(_with_tags(tensors, origin, run), origin.best)
    except UserError as error:
        obstacles = _listed({key: pair for key, pair in changed.items() if key not in NO_EFFECT_ON_WEIGHTS})
        if not obstacles:
            raise
        raise UserError(
            f"the weights of {origin.path} do not fit this model: {obstacles}; "
            "set them as there, or train without --from"
        ) from error
    others = {key: pair for key, pair in changed.items() if key not in NO_EFFECT_ON_RESULTS}
    if others:
        reporter.say(f"warning: the weights of {origin.path} were trained with other settings: {_listed(others)}")
    return same_outputs and (not classes or (their_classes and len(model.body(tensors)) < len(tensors)))


def _predicts_classes(recipe: Recipe) -> bool:
    return tasks.of(recipe).output == "class"


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} is {shown(there)} there and {shown(here)} here" for key, (there, here) in changed.items())


def _with_tags(tensors: Mapping[str, Tensor], origin: RunDir, run: RunDir) -> dict[str, Tensor]:
    """Add a row for every new tag to the tensors whose rows are tokens: the mean of the other rows.

    A new tag then carries no information at first, and the model computes what it did before.
    """
    grown = dict(tensors)
    for name in grown.keys() & set(VOCABULARY_TENSORS):
        side = 0 if name.startswith("source_") else 1
        before, now = origin.tokenizers[side], run.tokenizers[side]
        new, rows = len(now.tags) - len(before.tags), grown[name]
        if new > 0 and now.tags[: len(before.tags)] == before.tags and len(rows) == len(before):
            mean = rows.mean(0, keepdim=True)
            grown[name] = torch.cat([rows[: before.first], *[mean] * new, rows[before.first :]])
    return grown


def warn_of_old_held_out(recipe: Recipe, origin: RunDir, reporter: Reporter) -> None:
    """Warn if the training data are new but the held-out files are still the other run's."""
    data, theirs = recipe.data, origin.recipe.data
    if _training_data(data) == _training_data(theirs):
        return
    old = {
        f"data.{split}": names
        for split, names, before in (("valid", data.valid, theirs.valid), ("test", data.test, theirs.test))
        if names is not None and before is not None and _paths(names, data) == _paths(before, theirs)
    }
    if old:
        files = " and ".join(f"{key} ({', '.join(names)})" for key, names in old.items())
        still = "still is" if len(old) == 1 else "still are"
        effect = "the best weights are chosen" if "data.valid" in old else "`regard evaluate` scores"
        reporter.say(
            f"warning: the training data are not those of {origin.path}, but {files} {still}: "
            f"{effect} on the old data; set {' and '.join(old)} as well"
        )


def _training_data(data: DataSettings) -> list[list[str | None]]:
    return [[corpus.corpus, *_paths(names_of(corpus), data)] for corpus in corpora(data)]


def _paths(names: list[str], data: DataSettings) -> list[str]:
    """Absolute paths; the files of the other run need not exist any more."""
    return [os.path.abspath(Path(data.folder or ".") / Path(name).expanduser()) for name in names]
