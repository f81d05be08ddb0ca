"""The Python API: load a run, train a recipe, translate, generate, fill, predict, score, trace and explain."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from regard import planning, tasks
from regard.arguments import pair_list, require_text, text_list, whole_number
from regard.data.in_memory import file_of
from regard.errors import UserError
from regard.interpret.cross_attention import answer_attention
from regard.interpret.explain import Sampling
from regard.interpret.explain.models import explain_request
from regard.interpret.explain.request import MaskingMode
from regard.interpret.explain.rise import Explanation
from regard.interpret.interventions import Intervention
from regard.interpret.trace import Trace, record
from regard.recipes import load as load_recipe
from regard.recipes.errors import refuse_unknown
from regard.recipes.load import with_changes
from regard.recipes.schema import Recipe
from regard.recipes.to_toml import toml_value
from regard.run_dir import BEST, RunDir
from regard.runs import LoadedRun
from regard.tasks.confidence import Confidence, confidence
from regard.tasks.generator import Generation
from regard.tasks.glossary import Glossary, Requirement
from regard.tasks.mask_filler import Filled
from regard.tasks.translator import Answer
from regard.text import EOS, UNK
from regard.training.setup import train as train_recipe
from regard.viz import explanations, grid
from regard.viz.maps import Map
from regard.viz.views import notebook

GlossaryTerms = Mapping[str, str | Iterable[str]] | Glossary | str | Path

Explanation.draw_html = explanations.draw
Trace.draw_html = notebook.html


@dataclass(frozen=True)
class CrossAttention:
    """Attention of each output token over the source: `weights` [layers, heads, target tokens, source tokens]."""

    weights: np.ndarray
    source: tuple[str, ...]
    target: tuple[str, ...]

    def map(self, layer: int | None = None, head: int | None = None, words: bool = True) -> Map:
        """Make one matrix from a layer and a head (counted from 0; None: their mean), with subwords merged to words."""
        weights = self.weights if layer is None else self.weights[[layer]]
        weights = weights if head is None else weights[:, [head]]
        layers, heads = self.weights.shape[:2]
        which = f"{_chosen('layer', layer, layers)}, {_chosen('head', head, heads)}"
        map = Map(weights.mean((0, 1)), self.target, self.source, f"Cross-attention, {which}")
        return map.to_words() if words else map

    def _repr_html_(self) -> str:
        return grid.draw(self.map())


def _chosen(name: str, index: int | None, count: int) -> str:
    """Describe a choice of layer or head, for a title."""
    return f"mean of {count} {name}s" if index is None and count > 1 else f"{name} {(index or 0) + 1} of {count}"


@dataclass(frozen=True)
class _Origin:
    """The arguments of `load` that give a model again, stored in its pickle."""

    runs: tuple[str, ...]
    device: str
    weights: str
    precision: str
    step: int | None  # step of the weights: further training replaces a run's best weights

    def load(self) -> Model:
        return _reload(self)


@lru_cache(maxsize=1)  # a pool sends the model with every task: a worker loads it once
def _reload(origin: _Origin) -> Model:
    model = load(*origin.runs, device=origin.device, weights=origin.weights, precision=origin.precision)
    if model.step != origin.step:
        raise UserError(
            f"the {origin.weights} weights of {origin.runs[0]} are of step {model.step} now, and were of step "
            f"{origin.step} when this was pickled: load the model again"
        )
    return model


class _ModelLink:
    """A translation's reference to its model: copies share the model, and a pickle holds the origin to reload it."""

    def __init__(self, model: Model) -> None:
        self._model: Model | None = model
        self._origin = model._origin

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self._origin.load()
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": None, "_origin": self._origin}

    def __copy__(self) -> _ModelLink:
        return self

    def __deepcopy__(self, memo: Any) -> _ModelLink:
        return self


@dataclass(frozen=True)
class Translation:
    """The translation of one sentence. It can be pickled and copied.

    `attention` is computed on first access. A pickle contains it if it was accessed before; if not, the first access
    loads the model from its run directory.
    """

    source: str
    text: str
    score: float
    tokens: tuple[str, ...]
    source_tokens: tuple[str, ...]
    alternatives: tuple[tuple[str, float], ...]
    truncated: bool  # whether the source was longer than the model reads
    unmet: tuple[Requirement, ...]  # requirements of the glossary that the text does not satisfy
    _link: _ModelLink = field(repr=False, compare=False)
    _answer: Answer = field(repr=False)

    @cached_property
    def confidence(self) -> Confidence:
        """The probability that the text, and each of its words, is right: `translation.confidence.words[0].confidence`.

        Calibrated if `regard calibrate` was run; else the probabilities of the model, which are often too high.
        """
        model = self._link.model
        return confidence(self._answer, model.tokenizers[1], model.calibration)

    @cached_property
    def attention(self) -> CrossAttention:
        """Cross-attention of the best hypothesis, from one teacher-forced forward pass."""
        return self._link.model._attention(self)

    def as_dict(self) -> dict[str, Any]:
        """Convert to strings, numbers, lists and dicts, as `json.dumps` takes them."""
        return {
            "source": self.source,
            "text": self.text,
            "score": self.score,
            "truncated": self.truncated,
            "unmet": [str(requirement) for requirement in self.unmet],
            "tokens": list(self.tokens),
            "source_tokens": list(self.source_tokens),
            "alternatives": [{"text": text, "score": score} for text, score in self.alternatives],
        }

    def __str__(self) -> str:
        return self.text


class Model(LoadedRun):
    """A trained run ready for use, or an ensemble of several that decodes as the recipe of the first one says.

    A pickle holds the path of the run directory, from which the model is loaded again: changes made to `module` are
    not part of it.
    """

    def __init__(
        self,
        run: RunDir,
        device: str = "auto",
        weights: str | Path = BEST,
        precision: str = "auto",
        others: Sequence[RunDir] = (),
    ) -> None:
        super().__init__(run, device, weights, precision, others)
        paths = tuple(str(member.path.absolute()) for member in (run, *others))
        name = str(Path(weights).absolute() if Path(weights).suffix else weights)  # a file, or a name such as "best"
        self._origin = _Origin(paths, device, name, precision, self.step)

    def __reduce__(self) -> tuple[Callable[[], Model], tuple[()]]:
        return self._origin.load, ()

    def __deepcopy__(self, memo: Any) -> Model:
        return _reload.__wrapped__(self._origin)

    def __repr__(self) -> str:
        runs = " + ".join(self._origin.runs)
        parameters = sum(p.numel() for p in self.module.parameters())
        step = "" if self.step is None else f", step {self.step:,}"
        about = f"{self.recipe.model.family}, {parameters:,} parameters, {Path(self.weights).name} weights{step}"
        return f"<regard.Model {runs}: {about}, {self.precision} on {self.device}>"

    @overload
    def translate(
        self,
        text: str,
        *,
        nbest: int = 1,
        seed: int | None = 0,
        prefix: str | Iterable[str] | None = None,
        source_tag: str | None = None,
        target_tag: str | None = None,
        glossary: GlossaryTerms | None = None,
        **settings: Any,
    ) -> Translation: ...

    @overload
    def translate(
        self,
        text: Iterable[str],
        *,
        nbest: int = 1,
        seed: int | None = 0,
        prefix: str | Iterable[str] | None = None,
        source_tag: str | None = None,
        target_tag: str | None = None,
        glossary: GlossaryTerms | None = None,
        **settings: Any,
    ) -> list[Translation]: ...

    def translate(
        self,
        text: str | Iterable[str],
        *,
        nbest: int = 1,
        seed: int | None = 0,
        prefix: str | Iterable[str] | None = None,
        source_tag: str | None = None,
        target_tag: str | None = None,
        glossary: GlossaryTerms | None = None,
        **settings: Any,
    ) -> Translation | list[Translation]:
        """Translate a sentence, or several at once; each result is independent of the other sentences.

        `nbest` translations are searched for, with at least as many beams; all but the best are `alternatives`.
        `prefix` is the beginning of every translation, or a list with one prefix for each. The tags are the recipe's
        unless given. `settings` are those of the recipe's [decoding]: `beam=1`, `length_penalty=1.0`, or
        `method="sample"` with `temperature`, `top_k` and `top_p`. Sampling is a function of `seed`; None draws a new
        seed each time.

        `glossary` gives terms and what they are translated as, `{"cat": "gato", "bank": ["banco", "!orilla"]}` (one of
        several forms; not a form with "!"), or is a file of them: see `regard.tasks.glossary`. `unmet` lists the terms
        that could not be met.
        """
        lines = text_list("translate", text)
        nbest = whole_number("nbest", nbest)
        if "beam" not in settings:
            settings["beam"] = max(self.recipe.decoding.beam, nbest)
        tags = {"source_tag": source_tag, "target_tag": target_tag}
        translator = self.translator(seed=seed, glossary=glossary, **tags, **settings)
        prefixes = None if prefix is None else self._prefixes(prefix, len(lines))
        answers = translator(lines, nbest=nbest, prefixes=prefixes)
        _warn_truncated([answer.truncated for answer in answers], text, translator.budget.source)
        translations = [self._translation(line, answer) for line, answer in zip(lines, answers, strict=True)]
        return translations[0] if isinstance(text, str) else translations

    def _prefixes(self, prefix: str | Iterable[str], count: int) -> list[str]:
        """Make a list of one prefix for each of `count` texts."""
        texts = text_list("prefix", prefix)
        prefixes = texts * count if isinstance(prefix, str) else texts
        if len(prefixes) != count:
            raise UserError(f"{len(prefixes)} prefixes for {count} texts: give one for each, or one string for all")
        for text in dict.fromkeys(prefixes):
            if UNK in self.tokenizers[1].encode(text):
                raise UserError(f"prefix {text!r} contains something that is not in this model's vocabulary")
        return prefixes

    @overload
    def generate(
        self,
        prompt: str,
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: str | Iterable[str] = (),
        seed: int | None = 0,
        **settings: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Iterable[str],
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: str | Iterable[str] = (),
        seed: int | None = 0,
        **settings: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Iterable[str],
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: str | Iterable[str] = (),
        seed: int | None = 0,
        **settings: Any,
    ) -> Generation | list[Generation]:
        """Continue a text, or several at once: `model.generate("Once upon a time", samples=3).texts`.

        `settings` are those of the recipe's [decoding], such as `temperature`. The result is a function of `seed`; None
        draws a new seed each time.
        """
        prompts, stops = text_list("generate", prompt), text_list("stop", stop)
        generator = self.generator(seed=seed, **settings)
        samples, tokens = whole_number("samples", samples), whole_number("tokens", tokens)
        generations = generator(prompts, samples=samples, tokens=tokens, stop=stops)
        _warn_truncated([generation.truncated for generation in generations], prompt, generator.longest)
        return generations[0] if isinstance(prompt, str) else generations

    @overload
    def fill(self, text: str, *, top: int = 5) -> Filled: ...  # type: ignore[overload-overlap]

    @overload
    def fill(self, text: Iterable[str], *, top: int = 5) -> list[Filled]: ...

    def fill(self, text: str | Iterable[str], *, top: int = 5) -> Filled | list[Filled]:
        """Predict the token at each [MASK] of a text, or of several: `model.fill("the [MASK] sat").guesses[0]`.

        A text that is longer than the model reads is an error.
        """
        results = self.filler()(text_list("fill", text), top=whole_number("top", top))
        return results[0] if isinstance(text, str) else results

    def caption(self, images: Any, *, nbest: int = 1, seed: int | None = 0, **settings: Any) -> Any:
        """Describe an image, or several: `model.caption("image.png").text`.

        Images are files or arrays [height, width, 3]. `settings` are those of the recipe's [decoding], such as `beam`;
        the `nbest` best captions are `texts`.
        """
        return self.written("caption", images, nbest=nbest, seed=seed, **settings)

    def transcribe(self, recordings: Any, *, nbest: int = 1, **settings: Any) -> Any:
        """Write what is said in a recording, or in several: `model.transcribe("seven.wav").text`.

        Recordings are files, or arrays [samples] of numbers from -1 to 1 with the sample rate of the model
        (`recipe.model.sample_rate`). `settings` are those of the recipe's [decoding], and `language="de"` and
        `task="translate"` for imported Whisper models; `texts` are the `nbest` best.
        """
        return self.written("transcribe", recordings, nbest=nbest, **settings)

    def predict(self, inputs: Any) -> Any:
        """Predict the class of a text, or of several: `model.predict("what a day").label`; `probabilities` has all.

        A run that was trained on images takes files and arrays [height, width, 3].
        """
        values, single = self.prediction_task().input_list(inputs)
        predictions = self.predictions(values)
        if truncated := [prediction.truncated for prediction in predictions if self.recipe.data.has_tokens]:
            _warn_truncated(truncated, inputs, self.recipe.model.max_positions)
        return predictions[0] if single else predictions

    def forced(self, source: str, target: str) -> Translation:
        """Score a given translation as if the model had made it; its attention is available too."""
        pair_list([(source, target)])
        translation = self._translation(source, self.force(source, target))
        _warn_truncated([translation.truncated], source, self.recipe.model.max_positions)
        return translation

    def explain(
        self,
        given: Any,
        *,
        target: str | None = None,
        progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> Explanation:
        """Estimate how much the output, or a given `target`, depends on each word or pixel of the input (RISE).

        The model is a black box: words (`span` at a time), or tokens with `unit="tokens"`, are replaced by the unknown
        token or, with `how="drop"`, left out. An image is a file or an array; `cells` x `cells` parts of it at random
        places become grey, or `fill`. Other settings are those of `regard.interpret.explain.Sampling`:
        `model.explain("a cat", masks=500, seed=1).importance`.
        """
        hiding, sampling = ([setting.name for setting in fields(kind)] for kind in (MaskingMode, Sampling))
        refuse_unknown(settings, ["target", "progress", *hiding, *sampling], "explain")
        if self.recipe.data.has_tokens:
            require_text("explain", given)
        masking = MaskingMode(**{name: value for name, value in settings.items() if name in hiding})
        request = explain_request(self, given, target=target, masking=masking)
        if request.truncated:
            _warn_truncated([True], given, self.recipe.model.max_positions)
        chosen = {name: value for name, value in settings.items() if name in sampling}
        return request.explain(progress, **{"masks": request.usual_masks, **chosen})

    def trace(
        self,
        text: str,
        target: str | None = None,
        changes: Sequence[Mapping[str, Any] | Intervention] = (),
        *,
        after: Sequence[int] | None = None,
    ) -> Trace:
        """Record one forward pass: tokens, attention, gates, the residual stream, probabilities.

        The output is the model's own, or `target`, or the ids `after` and one more token. `changes` are interventions:
        they ablate heads, mask words or replace attention rows; see `regard.interpret.interventions`.

            trace = model.trace("this cat is very large")
            trace.header["text"]["target"], trace.array("decoder.0.cross_attn.weights")
        """
        self.require_single()
        require_text("trace", text)
        return record(self, text, target=target, after=after, changes=changes)

    def score(self, pairs: Iterable[tuple[str, str]]) -> list[list[float]]:
        """Compute the log-probability of each target token (EOS last), given the source and the tokens before it."""
        logprobs, truncated = self.score_pairs(pair_list(pairs))
        _warn_truncated(truncated, pairs, self.recipe.model.max_positions)
        return logprobs

    def _translation(self, line: str, answer: Answer) -> Translation:
        source, target = self.tokenizers
        best = answer.hypotheses[0] if answer.hypotheses else None
        tokens = (*best.tokens, EOS) if best is not None and best.finished else best.tokens if best is not None else ()
        return Translation(
            source=line,
            text=answer.texts[0],
            score=best.score if best is not None else 0.0,
            tokens=tuple(target.token_texts(tokens)),
            source_tokens=tuple(source.token_texts(answer.source)),
            alternatives=tuple(
                (text, h.score) for text, h in zip(answer.texts[1:], answer.hypotheses[1:], strict=True)
            ),
            truncated=answer.truncated,
            unmet=answer.unmet,
            _link=_ModelLink(self),
            _answer=answer,
        )

    def _attention(self, translation: Translation) -> CrossAttention:
        answer = translation._answer
        if not answer.hypotheses:
            return CrossAttention(np.zeros((0, 0, 0, 0), np.float32), (), ())
        weights = answer_attention(self, answer)
        return CrossAttention(weights, translation.source_tokens, translation.tokens)


def _after_fork() -> None:
    """Use one thread in a forked process: it has none of its parent's threads, and waiting for them would hang."""
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _warn_truncated(truncated: Sequence[bool], inputs: Any, limit: int) -> None:
    """Warn of inputs that were longer than the model reads; the warning points at the caller of the public method."""
    indices = [str(i) for i, was_truncated in enumerate(truncated) if was_truncated]
    if not indices:
        return
    more = f" and {len(indices) - 10} more" if len(indices) > 10 else ""
    listed = f"input{'s' * (len(indices) > 1)} {', '.join(indices[:10])}{more}"
    are, were = ("are", "were") if len(indices) > 1 else ("is", "was")
    subject = "the text" if isinstance(inputs, str) else listed
    message = f"{subject} {are} longer than the {limit:,} tokens that this model reads, and {were} truncated"
    warnings.warn(message, UserWarning, stacklevel=3)


def load(
    path: str | Path,
    *others: str | Path,
    device: str = "auto",
    weights: str | Path = BEST,
    precision: str = "auto",
) -> Model:
    """Load a trained model from its run directory: `regard.load("runs/en-es").translate("...")`.

    `weights` are "best", "last", "average" (of the last snapshots), "step-500" (a snapshot), or a file.
    `others` are runs with the same vocabulary that form an ensemble with it: token probabilities are averaged. They
    use their best weights (`weights` are those of the first run).
    `precision` defaults to fp32 on a CPU and, unless the run was trained in fp32, bf16 on a GPU; "int8" is faster on a
    CPU and slightly less exact.
    """
    return Model.load(path, *others, device=device, weights=weights, precision=precision)


def train(
    recipe: str | Path | Recipe,
    out: str | Path,
    *,
    pairs: Any = None,
    texts: Any = None,
    valid: Any = None,
    test: Any = None,
    columns: Sequence[str] | None = None,
    settings: str | Iterable[str] | Mapping[str, Any] = (),
    device: str = "auto",
    start_from: str | Path | None = None,
    quiet: bool = False,
) -> Model:
    """Train a recipe (a name, a TOML file, or a `Recipe`) into a run directory, or resume it.

    `settings` are changes: `{"training.steps": 100}`, or ["training.steps=100"].

    The data are the recipe's, unless given: `pairs` to translate, or `texts` for a language model; `valid` to validate
    on, and optionally `test`. Each is a file, an iterable of (source, target) tuples, dicts or strings, a dict of
    columns, a pandas DataFrame, or a `datasets.Dataset`; `columns=("de", "en")` names the columns of source and target,
    or the column of the text. A run that is resumed needs the same data.

        regard.train("mine.toml", "runs/mine", pairs=frame, valid=[("ja", "yes")], columns=("de", "en"))
    """
    if isinstance(settings, Mapping):
        settings = [f"{key}={toml_value(value)}" for key, value in settings.items()]
    changes = [settings] if isinstance(settings, str) else list(settings)
    resolved = with_changes(recipe, changes) if isinstance(recipe, Recipe) else load_recipe(str(recipe), changes)
    data = {"pairs": pairs, "texts": texts, "valid": valid, "test": test}
    if any(rows is not None for rows in data.values()):
        keep_count = any(key.startswith("data.count") for key in changes)
        resolved = _with_data(resolved, data, columns, keep_count=keep_count)
    run = train_recipe(resolved, out, device=device, start_from=start_from, quiet=quiet, fits=planning.fits)
    return Model(run, device)


def _with_data(recipe: Recipe, data: Mapping[str, Any], columns: Sequence[str] | None, keep_count: bool) -> Recipe:
    """Write data given in Python to files, and name these in the recipe."""
    if data["pairs"] is not None and data["texts"] is not None:
        raise UserError("give pairs or texts, not both")
    training = data["pairs"] is not None or data["texts"] is not None
    plain = data["texts"] is not None or (data["pairs"] is None and not tasks.of(recipe).has_source)
    if training and data["valid"] is None and recipe.data.valid is None and not (plain and recipe.data.held_out):
        raise UserError("train() needs data to validate on: give valid= as well")
    default = ["text"] if plain else ["source", "target"]
    file_columns = recipe.data.columns or []  # the names that the recipe's other files have
    has_names = bool(file_columns) and all(isinstance(name, str) for name in file_columns)
    names = [str(name) for name in file_columns] if has_names else default
    wanted = columns if columns is not None else None if names == default else names
    changes: dict[str, Any] = {}
    for key, rows in data.items():
        if rows is None:
            continue
        file = file_of(rows, names, wanted, key)
        changes |= {"text": file} if key == "texts" else {"pairs": file} if key == "pairs" else {key: [file]}
    if training and not keep_count:
        changes["count"] = None
    return with_changes(recipe, data=changes)
