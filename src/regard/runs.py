"""A run loaded into memory: recipe, task, tokenizers, model and device.

`LoadedRun` is what the interpretability tools, the server, the pictures and the Python API take.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from regard import accelerate, devices, tasks
from regard.arguments import whole_number
from regard.data.corpora import corpora
from regard.decoding import Hypothesis
from regard.decoding import score as score_batch
from regard.errors import UserError
from regard.metrics.alignment import Link
from regard.models import SequenceModel
from regard.models.ensemble import Ensemble
from regard.precision import decoding_precision
from regard.recipes.errors import changed
from regard.recipes.schema import Recipe
from regard.run_dir import BEST, RunDir
from regard.tasks.aligner import Aligner, TwoWayAligner
from regard.tasks.classes import PredictionTask
from regard.tasks.confidence import Calibration
from regard.tasks.feature_text import FeatureTextTask
from regard.tasks.generator import Generator, generation_settings
from regard.tasks.glossary import Glossary
from regard.tasks.mask_filler import MaskFiller
from regard.tasks.text import encode_pairs, token_batches
from regard.tasks.text_writer import TextWriter
from regard.tasks.translator import Answer, Translator
from regard.text import Tokenizer
from regard.text.encode import prefix_ids

LINK_METHOD = "reverse"  # each source word with its target word: puts most tags right (bench/tags.py)


class LoadedRun:
    """A trained run in memory, or an ensemble of several that decodes as the recipe of the first one says.

    `module` is the model, prepared for inference on `device` in `precision`. `weights` name those of the first run, as
    `RunDir.checkpoint` does; the other members of an ensemble have their best weights.
    """

    def __init__(
        self,
        run: RunDir,
        device: str = "auto",
        weights: str | Path = BEST,
        precision: str = "auto",
        others: Sequence[RunDir] = (),
    ) -> None:
        self.run = run
        self.task = tasks.of(run.recipe)
        self.device = devices.pick(device)
        self.precision = decoding_precision(precision, run.recipe.training.precision, self.device)
        members = [run.model(self.device, weights), *(other.model(self.device) for other in others)]
        for other in others:
            _check_ensemble_compatible(run, other)
        for member in members:
            accelerate.for_inference(member, self.precision)
        self.module: SequenceModel = Ensemble(members).eval() if others else members[0]
        self.weights = weights

    @classmethod
    def load(
        cls,
        path: str | Path,
        *others: str | Path,
        device: str = "auto",
        weights: str | Path = BEST,
        precision: str = "auto",
    ) -> Self:
        """Load a run directory; `others` are the further members of an ensemble."""
        return cls(RunDir(path), device, weights, precision, [RunDir(other) for other in others])

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizers of the source and of the target."""
        return self.run.tokenizers

    @cached_property
    def step(self) -> int | None:
        """The training step of the weights, where their file records it."""
        return self.run.checkpoint(self.weights).step

    def require_single(self) -> None:
        """Refuse an ensemble, whose members have no attention or hidden states in common."""
        if isinstance(self.module, Ensemble):
            raise UserError("an ensemble has no attention of its own: load one of its runs to see it")

    def require_verb(self, verb: str) -> None:
        """Refuse a verb that does not fit what the run was trained on, and name the one that does."""
        if verb != self.task.verb:
            use = f"use `regard {self.task.verb}`, not `regard {verb}`"
            raise UserError(f"{self.run.path} was trained on {self.task.trained_on}: {use}")

    # -- decoding -----------------------------------------------------------------------------------------------------

    def translator(
        self,
        *,
        seed: int | None = 0,
        source_tag: str | None = None,
        target_tag: str | None = None,
        glossary: Any = None,
        **settings: Any,
    ) -> Translator:
        """Make a translator with the recipe's decoding settings and these changes: `beam=1`, `method="sample"`, ...

        `glossary` is what `Glossary.of` takes: a dict of terms and translations, or a file.
        """
        self.require_verb("translate")
        others = ("nbest", "seed", "prefix", "source_tag", "target_tag", "glossary")
        decoding = changed(self.recipe.decoding, settings, "translate", others)
        translator = Translator.for_recipe(self.module, self.tokenizers, self.recipe, decoding)
        return replace(
            translator,
            seed=_seed(seed),
            source_tag=translator.source_tag if source_tag is None else source_tag,
            target_tag=translator.target_tag if target_tag is None else target_tag,
            precision=self.precision,
            glossary=None if glossary is None else Glossary.of(glossary),
        )

    def generator(self, *, seed: int | None = 0, **settings: Any) -> Generator:
        """Make a generator that continues texts, with these changes to its settings: `temperature=0.5`, ..."""
        self.require_verb("generate")
        decoding = generation_settings(self.recipe.decoding, **settings)
        generator = Generator.for_recipe(self.module, self.tokenizers, self.recipe, decoding)
        return replace(generator, seed=_seed(seed), precision=self.precision)

    def writer(self, *, seed: int | None = 0, **settings: Any) -> TextWriter:
        """Make a writer of texts for images and the like, with these changes to its settings: `beam=1`, ...

        For speech models with a prompt, also `language` and `task`.
        """
        task = self.feature_task()
        prompt = {name: settings.pop(name, None) for name in task.prompt_settings}
        prompt = {name: value for name, value in prompt.items() if value is not None}
        decoding = changed(self.recipe.decoding, settings, task.verb, ("nbest", "seed", *task.prompt_settings))
        writer = task.writer_class.for_recipe(self.module, self.tokenizers[1], self.recipe, decoding)
        writer = writer.with_prompt(**prompt) if prompt else writer
        return replace(writer, seed=_seed(seed), precision=self.precision)

    def written(self, verb: str, inputs: Any, *, nbest: int = 1, **settings: Any) -> Answer | list[Answer]:
        """Write the text of an input that is not a text, or of several, for a verb of `Model`."""
        self.require_verb(verb)
        task, nbest = self.feature_task(), whole_number("nbest", nbest)
        given, single = task.input_list(inputs)
        wide = {"beam": max(nbest, self.recipe.decoding.beam)} if nbest > 1 else {}
        answers = task.write(self.writer(**{**wide, **settings}), given, nbest=nbest)
        return answers[0] if single else answers

    def feature_task(self) -> FeatureTextTask:
        """The task of a run that writes texts for inputs that are not texts."""
        if not isinstance(self.task, FeatureTextTask):
            raise UserError(f"{self.run.path} was trained on {self.task.trained_on}: use `regard {self.task.verb}`")
        return self.task

    def filler(self) -> MaskFiller:
        """Make a mask filler for many texts: `filler()(texts, top=3)`."""
        self.require_verb("fill")
        return MaskFiller.for_recipe(self.module, self.tokenizers[0], self.recipe)

    # -- predictions --------------------------------------------------------------------------------------------------

    def predictions(self, inputs: Sequence[Any], progress: Callable[[int], None] | None = None) -> list[Any]:
        """Predict the label of each input: a text or an image, as the run was trained on."""
        return self.prediction_task().predict(self.run, self.module, inputs, self.device, progress)

    def prediction_task(self) -> PredictionTask:
        """The task of a run whose verb is `predict`."""
        self.require_verb("predict")
        assert isinstance(self.task, PredictionTask)
        return self.task

    # -- words --------------------------------------------------------------------------------------------------------

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration that `regard calibrate` wrote into the run directory, if any."""
        return Calibration.read(self.run)

    def word_links(self, pairs: Sequence[tuple[str, str]]) -> list[set[Link]]:
        """Align the words of sentences and their translations by the model's attention.

        Layer and head are those of the calibration or of guided alignment; else those by which both directions agree
        best on these pairs.
        """
        self.require_single()
        aligner = Aligner(self.module, self.tokenizers, self.recipe)
        view = None if self.calibration is None else self.calibration.attention
        chosen = TwoWayAligner.choose(aligner, None, pairs) if view is None else TwoWayAligner(aligner, view)
        return list(chosen(pairs, LINK_METHOD))

    # -- teacher forcing ----------------------------------------------------------------------------------------------

    def force(self, source: str, target: str) -> Answer:
        """Decode a source into a given target, with the log-probabilities that the model gives it."""
        sources, targets, (truncated,) = encode_pairs([(source, target)], self.tokenizers, self.recipe)
        ((_, batch),) = token_batches(sources, targets, self.recipe)
        with torch.inference_mode():
            (logprobs,) = score_batch(self.module.logits, batch.to(self.device))
        tokens = batch.labels.tolist()[:-1]  # without EOS
        hypothesis = Hypothesis.of(tokens, logprobs, self.recipe.decoding.length_penalty, finished=True)
        return Answer((target,), (hypothesis,), tuple(batch.source.ids.tolist()), truncated)

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[float]], list[bool]]:
        """Compute the log-probability of each target token (EOS last), and which pairs were truncated."""
        if not self.task.scores_pairs:
            raise UserError(f"{self.run.path}: a run for {self.task.name} gives pairs no log-probabilities")
        sources, targets, truncated = encode_pairs(pairs, self.tokenizers, self.recipe)
        scores: list[list[float]] = [[] for _ in pairs]
        with torch.inference_mode():
            for group, batch in token_batches(sources, targets, self.recipe):
                for i, logprobs in zip(group, score_batch(self.module.logits, batch.to(self.device)), strict=True):
                    scores[i] = logprobs
        return scores, truncated


def _seed(seed: int | None) -> int:
    """The seed itself, or a random one for None."""
    return secrets.randbits(32) if seed is None else whole_number("seed", seed, 0)


def _check_ensemble_compatible(run: RunDir, other: RunDir) -> None:
    """Refuse a run that cannot form an ensemble with the first one."""
    ours, theirs = run.recipe, other.recipe
    for member in (run, other):
        task = tasks.of(member.recipe)
        if not task.has_source and not task.has_labels:
            raise UserError(f"{member.path} was trained on {task.trained_on}: only models on pairs form an ensemble")
    if tasks.of(ours).name != tasks.of(theirs).name or run.classes != other.classes:
        raise UserError(f"{other.path} was trained for another task than {run.path}, or has other classes")
    if tasks.of(ours).output == "numbers":
        raise UserError("runs that predict numbers form no ensemble: predict with each, and take the mean")
    if not ours.data.has_tokens:
        return
    if any(a.to_json() != b.to_json() for a, b in zip(run.tokenizers, other.tokenizers, strict=True)):
        raise UserError(
            f"{other.path} has another vocabulary than {run.path}, and the members of an ensemble need the same one: "
            "train them on the same data, with the same [data] and [text] settings, and change training.seed"
        )
    first = corpora(ours.data)[0]
    known = [(corpus.source_tag, corpus.target_tag) for corpus in corpora(theirs.data)]
    if (first.source_tag, first.target_tag) not in known:
        raise UserError(f"{other.path} was not trained with the tags of {run.path}")
    if (prefix_ids(ours), ours.data.lowercase) != (prefix_ids(theirs), theirs.data.lowercase):
        why = "data.lowercase differs, or one model reads a BOS token first and the other does not"
        raise UserError(f"{other.path} encodes its sources in another way than {run.path}: {why}")
    positions = ours.model.max_positions
    needed = positions if ours.model.shares_context or not theirs.model.shares_context else 2 * positions
    if theirs.model.max_positions < needed:
        has = theirs.model.max_positions
        raise UserError(f"{other.path} has fewer positions ({has}) than {run.path} needs ({needed}): name it first")
