"""The Python front door: load a run, translate, see."""

from __future__ import annotations

import operator
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from regard import accelerate, devices
from regard.data.corpora import corpora
from regard.decoding import Hypothesis
from regard.decoding import score as score_batch
from regard.decoding.fill_mask import Filled, MaskFiller
from regard.decoding.generate import Generation, Generator, generation
from regard.decoding.translate import Answer, Translator
from regard.errors import UserError
from regard.interpret.recorder import Recorder
from regard.models.ensemble import Ensemble
from regard.packed import SeqBatch
from regard.recipes import load as load_recipe
from regard.recipes.errors import changed, refuse_unknown
from regard.recipes.load import with_changes
from regard.recipes.schema import Recipe
from regard.recipes.to_toml import toml_value
from regard.run_dir import BEST, RunDir
from regard.text import BOS, EOS, UNK
from regard.text.encode import prefix_ids
from regard.viz.maps import Map

if TYPE_CHECKING:
    from regard.interpret.explain.models import MaskMethod, Unit
    from regard.interpret.explain.rise import Explanation
    from regard.interpret.interventions import Intervention
    from regard.interpret.trace import Trace


@dataclass(frozen=True)
class CrossAttention:
    """What each output token looked at in the source: `weights` [layers, heads, target tokens, source tokens]."""

    weights: np.ndarray
    source: tuple[str, ...]
    target: tuple[str, ...]

    def map(self, layer: int | None = None, head: int | None = None, words: bool = True) -> Map:
        """One matrix: a layer and a head (counted from 0), or the mean over those not given; pieces joined to words."""
        chosen = self.weights if layer is None else self.weights[[layer]]
        chosen = chosen if head is None else chosen[:, [head]]
        layers, heads = self.weights.shape[:2]
        which = f"mean of {layers} layers" if layer is None and layers > 1 else f"layer {(layer or 0) + 1} of {layers}"
        whose = f"mean of {heads} heads" if head is None and heads > 1 else f"head {(head or 0) + 1} of {heads}"
        map = Map(chosen.mean((0, 1)), self.target, self.source, f"Cross-attention, {which}, {whose}")
        return map.to_words() if words else map

    def _repr_html_(self) -> str:
        from regard.viz import svg

        return svg.draw(self.map())


@dataclass(frozen=True)
class _Origin:
    """The origin of a model, stored in its pickle."""

    runs: tuple[str, ...]
    device: str
    weights: str
    precision: str
    step: int | None  # of the weights: a run that trains on replaces its best ones

    def load(self) -> Model:
        return _reloaded(self)


@lru_cache(maxsize=1)  # a pool sends the model with every task: a worker loads it once
def _reloaded(origin: _Origin) -> Model:
    model = load(*origin.runs, device=origin.device, weights=origin.weights, precision=origin.precision)
    if model.step != origin.step:
        raise UserError(
            f"the {origin.weights} weights of {origin.runs[0]} are of step {model.step} now, and were of step "
            f"{origin.step} when this was pickled: load the model again"
        )
    return model


class _Link:
    """Where a translation finds its model: a copy shares the model, a pickle holds its origin and loads it if used."""

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

    def __copy__(self) -> _Link:
        return self

    def __deepcopy__(self, memo: Any) -> _Link:
        return self


@dataclass(frozen=True)
class Translation:
    """One sentence's translation. `attention` is worked out when first asked for.

    It can be pickled and copied. A pickle holds the attention if it was asked for before; if not, the model is loaded
    from its run directory when it is.
    """

    source: str
    text: str
    score: float
    tokens: tuple[str, ...]
    source_tokens: tuple[str, ...]
    alternatives: tuple[tuple[str, float], ...]
    truncated: bool  # the source had more tokens than the model reads; the rest was left out
    _link: _Link = field(repr=False, compare=False)
    _answer: Answer = field(repr=False)

    @cached_property
    def attention(self) -> CrossAttention:
        """Cross-attention of the winning hypothesis, run once more through the model, teacher-forced."""
        return self._link.model._attention(self)

    def as_dict(self) -> dict[str, Any]:
        """The translation in strings, numbers, lists and dicts, as `json.dumps` takes it."""
        return {
            "source": self.source,
            "text": self.text,
            "score": self.score,
            "truncated": self.truncated,
            "tokens": list(self.tokens),
            "source_tokens": list(self.source_tokens),
            "alternatives": [{"text": text, "score": score} for text, score in self.alternatives],
        }

    def __str__(self) -> str:
        return self.text


class Model:
    """A trained run, ready to use; or several that decide together, as the first one's recipe says.

    A pickle holds the path of the run directory, and the model is loaded from there again: changes made to `module`
    are not in it.
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
        self.device = devices.pick(device)
        self.precision = devices.decoding_precision(precision, run.recipe.training.precision, self.device)
        members = [run.model(self.device, weights), *(other.model(self.device) for other in others)]
        for other in others:
            _check_ensemble_compatible(run, other)
        for member in members:
            accelerate.for_inference(member, self.precision)
        self.module = Ensemble(members).eval() if others else members[0]
        self.weights = weights
        paths = tuple(str(each.path.absolute()) for each in (run, *others))
        which = str(Path(weights).absolute() if Path(weights).suffix else weights)  # a file, or a name such as "best"
        self._origin = _Origin(paths, device, which, precision, self.step)

    def __reduce__(self) -> tuple[Callable[[], Model], tuple[()]]:
        return self._origin.load, ()

    def __deepcopy__(self, memo: Any) -> Model:
        return _reloaded.__wrapped__(self._origin)

    def __repr__(self) -> str:
        runs = " + ".join(self._origin.runs)
        parameters = sum(p.numel() for p in self.module.parameters())
        step = "" if self.step is None else f", step {self.step:,}"
        what = f"{self.run.recipe.model.family}, {parameters:,} parameters, {Path(self.weights).name} weights{step}"
        return f"<regard.Model {runs}: {what}, {self.precision} on {self.device}>"

    @cached_property
    def step(self) -> int | None:
        """The training step that the weights are of, where they say so."""
        return self.run.checkpoint(self.weights).step

    def translator(
        self, *, seed: int | None = 0, source_tag: str | None = None, target_tag: str | None = None, **settings: Any
    ) -> Translator:
        """A translator with the recipe's decoding settings, some of them changed: `beam=1`, `method="sample"`, ..."""
        self._require_verb("translate")
        also = ("nbest", "seed", "prefix", "source_tag", "target_tag")
        chosen = changed(self.run.recipe.decoding, settings, "translate", also)
        made = Translator.for_recipe(self.module, self.run.tokenizers, self.run.recipe, chosen)
        return replace(
            made,
            seed=_seed(seed),
            source_tag=made.source_tag if source_tag is None else source_tag,
            target_tag=made.target_tag if target_tag is None else target_tag,
            precision=self.precision,
        )

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
        **settings: Any,
    ) -> Translation | list[Translation]:
        """Translate a sentence, or several at once; the result does not depend on which are together.

        `nbest` translations are searched for with at least as many beams; all but the best are `alternatives`. `prefix`
        is what every translation begins with, or a list with one for each. The tags are the recipe's unless given.
        `settings` are those of the recipe's [decoding]: `beam=1`, `length_penalty=1.0`, or `method="sample"` with
        `temperature`, `top_k` and `top_p`; sampling gives the same for the same `seed`, and with None never twice.
        """
        lines = _texts("translate", text)
        nbest = _count("nbest", nbest)
        if "beam" not in settings:
            settings["beam"] = max(self.run.recipe.decoding.beam, nbest)
        translator = self.translator(seed=seed, source_tag=source_tag, target_tag=target_tag, **settings)
        prefixes = None if prefix is None else self._prefixes(prefix, len(lines))
        answers = translator(lines, nbest=nbest, prefixes=prefixes)
        _warn_truncated([answer.truncated for answer in answers], text, translator.room.source)
        found = [self._translation(line, answer) for line, answer in zip(lines, answers, strict=True)]
        return found[0] if isinstance(text, str) else found

    def _prefixes(self, prefix: str | Iterable[str], lines: int) -> list[str]:
        """A prefix for each line."""
        given = _texts("prefix", prefix)
        prefixes = given * lines if isinstance(prefix, str) else given
        if len(prefixes) != lines:
            raise UserError(f"{len(prefixes)} prefixes for {lines} texts: give one for each, or one string for all")
        for one in dict.fromkeys(prefixes):
            if UNK in self.run.tokenizers[1].encode(one):
                raise UserError(f"prefix {one!r} has something in it that this model cannot write")
        return prefixes

    def generator(self, *, seed: int | None = 0, **settings: Any) -> Generator:
        """Continues texts, sampling as its recipe says (or usually), with some settings changed: `temperature=0.5`."""
        self._require_verb("generate")
        chosen = generation(self.run.recipe.decoding, **settings)
        made = Generator.for_recipe(self.module, self.run.tokenizers, self.run.recipe, chosen)
        return replace(made, seed=_seed(seed), precision=self.precision)

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

        `settings` are those of the recipe's [decoding], such as `temperature`. The same `seed` gives the same text, and
        None never the same twice.
        """
        prompts, stops = _texts("generate", prompt), _texts("stop", stop)
        continuer = self.generator(seed=seed, **settings)
        found = continuer(prompts, samples=_count("samples", samples), tokens=_count("tokens", tokens), stop=stops)
        _warn_truncated([one.truncated for one in found], prompt, continuer.longest)
        return found[0] if isinstance(prompt, str) else found

    def _require_verb(self, verb: str) -> None:
        """A model does what it was trained to do; another verb is a mistake that names the right one."""
        text, bert = self.run.recipe.data.is_text, self.run.recipe.model.family == "bert"
        right = ("fill" if bert else "generate") if text else "translate"
        if verb != right:
            what = "plain text" if text else "pairs"
            raise UserError(f"{self.run.path} was trained on {what}: use `regard {right}`, not `regard {verb}`")

    def filler(self) -> MaskFiller:
        """Fills in the gaps of many texts: `model.filler()(texts, top=3)`."""
        return MaskFiller.for_recipe(self.module, self.run.tokenizers[0], self.run.recipe)

    @overload
    def fill(self, text: str, *, top: int = 5) -> Filled: ...  # type: ignore[overload-overlap]

    @overload
    def fill(self, text: Iterable[str], *, top: int = 5) -> list[Filled]: ...

    def fill(self, text: str | Iterable[str], *, top: int = 5) -> Filled | list[Filled]:
        """Guess what stands at each [MASK] of a text, or of several: `model.fill("the [MASK] sat").guesses[0]`.

        A text that is longer than the model reads is an error.
        """
        found = self.filler()(_texts("fill", text), top=_count("top", top))
        return found[0] if isinstance(text, str) else found

    def forced(self, source: str, target: str) -> Translation:
        """A given translation as if the model had made it, so that its score and attention can be seen."""
        found = self._forced(source, target)
        _warn_truncated([found.truncated], source, self.run.recipe.model.max_positions)
        return found

    def _forced(self, source: str, target: str) -> Translation:
        from regard.training.validation import encode_pairs, token_batches

        sources, targets, (truncated,) = encode_pairs(_pairs([(source, target)]), self.run.tokenizers, self.run.recipe)
        ((_, batch),) = token_batches(sources, targets, self.run.recipe)
        with torch.inference_mode():
            (logprobs,) = score_batch(self.module, batch.to(self.device))
        tokens = batch.labels.tolist()[:-1]  # without EOS
        hypothesis = Hypothesis.of(tokens, logprobs, self.run.recipe.decoding.length_penalty, finished=True)
        answer = Answer((target,), (hypothesis,), tuple(batch.source.ids.tolist()), truncated)
        return self._translation(source, answer)

    def explain(
        self,
        text: str,
        *,
        target: str | None = None,
        how: MaskMethod = "unknown",
        unit: Unit = "words",
        span: int = 1,
        progress: Callable[[int], None] | None = None,
        **sampling: Any,
    ) -> Explanation:
        """Which words the output, or a given `target`, depends on, the model being a black box (RISE).

        Words (`span` at a time), or `unit="pieces"`, are replaced by the unknown token or, `how="drop"`, left out. The
        rest is as in `regard.interpret.explain.Sampling`: `model.explain("a cat", masks=500, seed=1).importance`.
        """
        from regard.interpret.explain import Sampling
        from regard.interpret.explain.models import MaskingMode, ask

        known = [name.name for name in fields(Sampling)]
        refuse_unknown(sampling, ["target", "how", "unit", "span", "progress", *known], "explain")
        _one_text("explain", text)
        asked = ask(self, text, target=target, hiding=MaskingMode(how, unit, span))
        _warn_truncated([asked.cut], text, self.run.recipe.model.max_positions)
        return asked.explain(progress, **sampling)

    def trace(
        self,
        text: str,
        target: str | None = None,
        changes: Sequence[Mapping[str, Any] | Intervention] = (),
        *,
        after: Sequence[int] | None = None,
    ) -> Trace:
        """Everything that can be seen of one run: tokens, attention, gates, the residual stream, probabilities.

        The output is the model's own, or `target`; or `after`, the ids of the output so far, and one token more.
        `changes` switch heads off, hide words or replace attention rows; see `regard.interpret.interventions`.

            trace = model.trace("this cat is very large")
            trace.header["text"]["target"], trace.array("decoder.0.cross_attn.weights")
        """
        from regard.interpret.trace import record

        self._one()
        _one_text("trace", text)
        return record(self, text, target=target, after=after, changes=changes)

    def _translation(self, line: str, answer: Answer) -> Translation:
        source, target = self.run.tokenizers
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
            _link=_Link(self),
            _answer=answer,
        )

    def _one(self) -> None:
        """What is inside a model can be seen of one at a time."""
        if isinstance(self.module, Ensemble):
            raise UserError("several models that decide together do not have one attention: load one of them to see it")

    def _attention(self, translation: Translation) -> CrossAttention:
        self._one()
        answer = translation._answer
        if not answer.hypotheses:
            return CrossAttention(np.zeros((0, 0, 0, 0), np.float32), (), ())
        best = answer.hypotheses[0]
        tokens = [*best.tokens, EOS] if best.finished else list(best.tokens)
        batch = SeqBatch.from_lists([list(answer.source)], [tokens], bos=BOS).to(self.device)
        with torch.inference_mode(), Recorder(self.module) as seen:
            self.module(batch)
            layers = [a.sentence(0) for name, a in seen.attention.items() if name.endswith("cross_attn")]
        if not layers:
            raise UserError("this model does not look at its source by attention: there is nothing to show")
        weights = torch.stack(layers).float().cpu().numpy()
        return CrossAttention(weights, translation.source_tokens, translation.tokens)

    def score(self, pairs: Iterable[tuple[str, str]]) -> list[list[float]]:
        """Log-probability of each target token (the end mark last), given its source and what came before."""
        logprobs, truncated = self._scored(pairs)
        _warn_truncated(truncated, pairs, self.run.recipe.model.max_positions)
        return logprobs

    def _scored(self, pairs: Iterable[tuple[str, str]]) -> tuple[list[list[float]], list[bool]]:
        """The log-probabilities, and which pairs were truncated; without a warning, for the command line."""
        from regard.training.validation import encode_pairs, token_batches

        if self.run.recipe.fills:
            raise UserError(f"{self.run.path} fills in gaps: it has no probabilities for pairs")
        chosen = _pairs(pairs)
        sources, targets, truncated = encode_pairs(chosen, self.run.tokenizers, self.run.recipe)
        found: list[list[float]] = [[] for _ in chosen]
        with torch.inference_mode():
            for group, batch in token_batches(sources, targets, self.run.recipe):
                for i, logprobs in zip(group, score_batch(self.module, batch.to(self.device)), strict=True):
                    found[i] = logprobs
        return found, truncated


def _after_fork() -> None:
    """Compute with one thread in a forked process: the parent's threads are not there, and waiting for them hangs."""
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else _count("seed", seed, 0)


def _count(name: str, given: Any, least: int = 1) -> int:
    """A whole number of at least so many."""
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {_kind(given)}") from None
    if number < least:
        raise UserError(f"{name} = {number}: must be at least {least}")
    return number


def _texts(name: str, given: str | Iterable[str]) -> list[str]:
    """The texts of one string or of several; anything else is a TypeError that says what was given where."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name} takes a string, or several in a list, not {_kind(given)}")
    texts = list(given)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}: input {place} must be a string, not {_kind(text)}")
    for place, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name}: input {place}: not valid Unicode (half of a surrogate pair)") from None
    return [str(text) for text in texts]


def _one_text(name: str, given: Any) -> None:
    if not isinstance(given, str):
        raise TypeError(f"{name} takes one string, not {_kind(given)}")


def _pairs(given: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of strings; anything else is a TypeError that says which."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"pairs are (source, target) tuples in a list, not {_kind(given)}")
    pairs = list(given)
    for place, pair in enumerate(pairs):
        whole = not isinstance(pair, str | bytes | Mapping) and isinstance(pair, Sequence) and len(pair) == 2
        if not whole or not all(isinstance(side, str) for side in pair):
            raise TypeError(f"pair {place} must be two strings, not {_kind(pair)}")
    return [(str(source), str(target)) for source, target in pairs]


def _kind(given: Any) -> str:
    shown = repr(given)
    return "None" if given is None else f"{type(given).__name__} ({shown if len(shown) <= 40 else shown[:37] + '...'})"


def _warn_truncated(truncated: Sequence[bool], given: Any, most: int) -> None:
    """Warn of the inputs that were longer than the model reads, in the name of who called the model's method."""
    which = [str(place) for place, cut in enumerate(truncated) if cut]
    if not which:
        return
    more = f" and {len(which) - 10} more" if len(which) > 10 else ""
    named = f"input{'s' * (len(which) > 1)} {', '.join(which[:10])}{more}"
    are, were = ("are", "were") if len(which) > 1 else ("is", "was")
    subject = "the text" if isinstance(given, str) else named
    what = f"{subject} {are} longer than the {most:,} tokens that this model reads, and {were} truncated"
    warnings.warn(what, UserWarning, stacklevel=3)


def _check_ensemble_compatible(run: RunDir, other: RunDir) -> None:
    """Complain of a run that cannot decide together with another."""
    mine, theirs = run.recipe, other.recipe
    for each in (run, other):
        if each.recipe.data.is_text:
            raise UserError(
                f"{each.path} was trained on plain text: only models that were trained on pairs go together"
            )
    if any(a.to_json() != b.to_json() for a, b in zip(run.tokenizers, other.tokenizers, strict=True)):
        raise UserError(
            f"{other.path} has another vocabulary than {run.path}, and models that decide together need the same one: "
            "train them on the same data, with the same [data] and [text] settings, and change training.seed"
        )
    first = corpora(mine.data)[0]
    known = [(corpus.source_tag, corpus.target_tag) for corpus in corpora(theirs.data)]
    if (first.source_tag, first.target_tag) not in known:
        raise UserError(f"{other.path} was not trained with the tags that {run.path} reads and writes")
    if (prefix_ids(mine), mine.data.lowercase) != (prefix_ids(theirs), theirs.data.lowercase):
        why = "data.lowercase is another, or only one of them is a BERT"
        raise UserError(f"{other.path} reads its sources otherwise than {run.path} does: {why}")
    longest, places = mine.model.max_positions, theirs.model.max_positions
    needed = longest if mine.model.shares_context or not theirs.model.shares_context else 2 * longest
    if places < needed:
        raise UserError(f"{other.path} has fewer places ({places}) than {run.path} needs ({needed}): name it first")


def load(
    path: str | Path,
    *others: str | Path,
    device: str = "auto",
    weights: str | Path = BEST,
    precision: str = "auto",
) -> Model:
    """A trained model from its run directory: `regard.load("runs/en-es").translate("...")`.

    `weights` are "best", "last", "average" (of the last snapshots), "step-500" (a snapshot), or a file.
    `others` are runs of the same vocabulary that decide together with it, with their best weights (`weights` are of the
    first): a token's probability is the mean of those that they give it.
    `precision` is fp32 on a CPU and, unless it trained in fp32, bf16 on a GPU; "int8" is quicker on a CPU, and a little
    less exact.
    """
    return Model(RunDir(path), device, weights, precision, [RunDir(other) for other in others])


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
    """Train a recipe (a name, a TOML file, or a `Recipe`) into a run directory, or take up where it stopped.

    `settings` are changes: `{"training.steps": 100}`, or ["training.steps=100"].

    The data are the recipe's, unless given: `pairs` to translate, or `texts` for a language model; `valid` to validate
    on, and perhaps `test`. Each is a file, an iterable of (source, target) tuples, dicts or strings, a dict of columns,
    a pandas DataFrame, or a `datasets.Dataset`; `columns=("de", "en")` says which of their columns are source and
    target, or which is the text. A run that is resumed has to be given the same data.

        regard.train("mine.toml", "runs/mine", pairs=frame, valid=[("ja", "yes")], columns=("de", "en"))
    """
    from regard.training import train as train_recipe

    if isinstance(settings, Mapping):
        settings = [f"{key}={toml_value(value)}" for key, value in settings.items()]
    changes = [settings] if isinstance(settings, str) else list(settings)
    chosen = with_changes(recipe, changes) if isinstance(recipe, Recipe) else load_recipe(str(recipe), changes)
    given = {"pairs": pairs, "texts": texts, "valid": valid, "test": test}
    if any(data is not None for data in given.values()):
        chosen = _with_given(chosen, given, columns, keep_count=any(key.startswith("data.count") for key in changes))
    run = train_recipe(chosen, out, device=device, start_from=start_from, quiet=quiet)
    return Model(run, device)


def _with_given(recipe: Recipe, given: Mapping[str, Any], columns: Sequence[str] | None, keep_count: bool) -> Recipe:
    """The recipe with data given in Python, which become files."""
    from regard.data.in_memory import file_of

    if given["pairs"] is not None and given["texts"] is not None:
        raise UserError("give pairs or texts, not both")
    training = given["pairs"] is not None or given["texts"] is not None
    plain = given["texts"] is not None or (given["pairs"] is None and recipe.data.is_text)
    if training and given["valid"] is None and recipe.data.valid is None and not (plain and recipe.data.held_out):
        raise UserError("train() needs data to validate on: give valid= as well")
    usual = ["text"] if plain else ["source", "target"]
    own = recipe.data.columns or []  # how the recipe's own files name them: those written have the same names
    names = [str(name) for name in own] if own and all(isinstance(name, str) for name in own) else usual
    data: dict[str, Any] = {}
    for key, what in given.items():
        if what is None:
            continue
        wanted = columns if columns is not None else None if names == usual else names
        file = file_of(what, names, wanted, key)
        data |= {"text": file} if key == "texts" else {"pairs": file} if key == "pairs" else {key: [file]}
    if training and not keep_count:
        data["count"] = None
    return with_changes(recipe, data=data)
