"""The Python front door: load a run, translate, see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from regard import devices, products
from regard.data.sources import corpora
from regard.decoding import Hypothesis
from regard.decoding import score as score_batch
from regard.decoding.continuing import Continuation, Continuer, generation
from regard.decoding.filling import Filled, GapFiller
from regard.decoding.lines import Answer, LineTranslator
from regard.errors import UserError
from regard.inside.maps import Map
from regard.inside.recorder import Recorder
from regard.models.ensemble import Ensemble
from regard.recipes import load as load_recipe
from regard.recipes.schema import Recipe
from regard.rows import PairBatch
from regard.runs import BEST, Run
from regard.text import BEGIN, END
from regard.text.sides import front_of

if TYPE_CHECKING:
    from regard.inside.changes import Change
    from regard.inside.explain.models import How, Unit
    from regard.inside.explain.rise import Explanation
    from regard.inside.trace import Trace


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
        from regard.inside import svg

        return svg.draw(self.map())


@dataclass(frozen=True)
class Translation:
    """One sentence's translation. `attention` is worked out when first asked for."""

    source: str
    text: str
    score: float
    tokens: tuple[str, ...]
    source_tokens: tuple[str, ...]
    alternatives: tuple[tuple[str, float], ...]
    _model: Model
    _answer: Answer

    @cached_property
    def attention(self) -> CrossAttention:
        """Cross-attention of the winning hypothesis, run once more through the model, teacher-forced."""
        return self._model._attention(self)

    def __str__(self) -> str:
        return self.text


class Model:
    """A trained run, ready to use; or several that decide together, as the first one's recipe says."""

    def __init__(
        self,
        run: Run,
        device: str = "auto",
        weights: str | Path = BEST,
        precision: str = "auto",
        others: Sequence[Run] = (),
    ) -> None:
        self.run = run
        self.device = devices.pick(device)
        self.precision = devices.decoding_precision(precision, run.recipe.training.precision, self.device)
        members = [run.model(self.device, weights), *(other.model(self.device) for other in others)]
        for other in others:
            _refuse_stranger(run, other)
        for member in members:
            products.prepare(member, self.precision)
        self.module = Ensemble(members).eval() if others else members[0]
        self.weights = weights

    @cached_property
    def step(self) -> int | None:
        """The training step that the weights are of, where they say so."""
        return self.run.checkpoint(self.weights).step

    def translator(self, **settings: Any) -> LineTranslator:
        """A translator with the recipe's decoding settings, some of them changed: `beam=1`, `method="sample"`, ..."""
        self._made_for("translate")
        chosen = type(self.run.recipe.decoding).model_validate({**self.run.recipe.decoding.model_dump(), **settings})
        made = LineTranslator.for_recipe(self.module, self.run.tokenizers, self.run.recipe, chosen)
        return replace(made, precision=self.precision)

    @overload
    def translate(self, text: str, *, nbest: int = 1, **settings: Any) -> Translation: ...

    @overload
    def translate(self, text: Sequence[str], *, nbest: int = 1, **settings: Any) -> list[Translation]: ...

    def translate(
        self, text: str | Sequence[str], *, nbest: int = 1, **settings: Any
    ) -> Translation | list[Translation]:
        """Translate a sentence, or several at once; the result does not depend on which are together."""
        lines = [text] if isinstance(text, str) else list(text)
        answers = self.translator(**settings)(lines, nbest=nbest)
        found = [self._translation(line, answer) for line, answer in zip(lines, answers, strict=True)]
        return found[0] if isinstance(text, str) else found

    def generator(self, *, seed: int = 0, **settings: Any) -> Continuer:
        """Continues texts, sampling as its recipe says (or usually), with some settings changed: `temperature=0.5`."""
        self._made_for("generate")
        chosen = generation(self.run.recipe.decoding, **settings)
        made = Continuer.for_recipe(self.module, self.run.tokenizers, self.run.recipe, chosen)
        return replace(made, seed=seed, precision=self.precision)

    @overload
    def generate(
        self,
        prompt: str,
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        **settings: Any,
    ) -> Continuation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str],
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        **settings: Any,
    ) -> list[Continuation]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        samples: int = 1,
        tokens: int = 100,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        **settings: Any,
    ) -> Continuation | list[Continuation]:
        """Continue a text, or several at once: `model.generate("Once upon a time", samples=3).texts`."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        stops = [stop] if isinstance(stop, str) else list(stop)
        found = self.generator(seed=seed, **settings)(prompts, samples=samples, tokens=tokens, stop=stops)
        return found[0] if isinstance(prompt, str) else found

    def _made_for(self, verb: str) -> None:
        """A model does what it was trained to do; another verb is a mistake that names the right one."""
        text, bert = self.run.recipe.data.is_text, self.run.recipe.model.family == "bert"
        right = ("fill" if bert else "generate") if text else "translate"
        if verb != right:
            what = "plain text" if text else "pairs"
            raise UserError(f"{self.run.path} was trained on {what}: use `regard {right}`, not `regard {verb}`")

    def filler(self) -> GapFiller:
        """Fills in the gaps of many texts: `model.filler()(texts, top=3)`."""
        return GapFiller.for_recipe(self.module, self.run.tokenizers[0], self.run.recipe)

    def fill(self, text: str, *, top: int = 5) -> Filled:
        """Guess what stands at each [MASK] of a text: `model.fill("the [MASK] sat").guesses[0]`."""
        return self.filler()([text], top=top)[0]

    def forced(self, source: str, target: str) -> Translation:
        """A given translation as if the model had made it, so that its score and attention can be seen."""
        from regard.training.validation import pair_batches

        ((_, batch),) = pair_batches([(source, target)], self.run.tokenizers, self.run.recipe)
        with torch.inference_mode():
            (logprobs,) = score_batch(self.module, batch.to(self.device))
        penalty = ((5 + len(logprobs)) / 6) ** self.run.recipe.decoding.length_penalty
        tokens = tuple(batch.labels.tolist()[:-1])  # without the end mark
        hypothesis = Hypothesis(tokens, tuple(logprobs), sum(logprobs) / penalty, True)
        return self._translation(source, Answer((target,), (hypothesis,), tuple(batch.source.ids.tolist())))

    def explain(
        self,
        text: str,
        *,
        target: str | None = None,
        how: How = "unknown",
        unit: Unit = "words",
        span: int = 1,
        progress: Callable[[int], None] | None = None,
        **sampling: Any,
    ) -> Explanation:
        """Which words the output, or a given `target`, depends on, the model being a black box (RISE).

        Words (`span` at a time), or `unit="pieces"`, are replaced by the unknown token or, `how="drop"`, left out. The
        rest is as in `regard.inside.explain.Sampling`: `model.explain("a cat", masks=500, seed=1).importance`.
        """
        from regard.inside.explain.models import Hiding, ask

        return ask(self, text, target=target, hiding=Hiding(how, unit, span)).explain(progress, **sampling)

    def trace(
        self,
        text: str,
        target: str | None = None,
        changes: Sequence[Mapping[str, Any] | Change] = (),
        *,
        after: Sequence[int] | None = None,
    ) -> Trace:
        """Everything that can be seen of one run: tokens, attention, gates, the residual stream, probabilities.

        The output is the model's own, or `target`; or `after`, the ids of the output so far, and one token more.
        `changes` switch heads off, hide words or replace attention rows; see `regard.inside.changes`.

            trace = model.trace("this cat is very large")
            trace.header["text"]["target"], trace.array("decoder.0.cross.weights")
        """
        from regard.inside.trace import record

        self._one()
        return record(self, text, target=target, after=after, changes=changes)

    def _translation(self, line: str, answer: Answer) -> Translation:
        source, target = self.run.tokenizers
        best = answer.hypotheses[0] if answer.hypotheses else None
        tokens = (*best.tokens, END) if best is not None and best.finished else best.tokens if best is not None else ()
        return Translation(
            source=line,
            text=answer.texts[0],
            score=best.score if best is not None else 0.0,
            tokens=tuple(target.pieces(tokens)),
            source_tokens=tuple(source.pieces(answer.source)),
            alternatives=tuple(
                (text, h.score) for text, h in zip(answer.texts[1:], answer.hypotheses[1:], strict=True)
            ),
            _model=self,
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
        tokens = [*best.tokens, END] if best.finished else list(best.tokens)
        batch = PairBatch.of([list(answer.source)], [tokens], begin=BEGIN).to(self.device)
        with torch.inference_mode(), Recorder(self.module) as seen:
            self.module(batch)
            layers = [a.sentence(0) for name, a in seen.attention.items() if name.endswith("cross")]
        if not layers:
            raise UserError("this model does not look at its source by attention: there is nothing to show")
        weights = torch.stack(layers).float().cpu().numpy()
        return CrossAttention(weights, translation.source_tokens, translation.tokens)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        """Log-probability of each target token (the end mark last), given its source and what came before."""
        from regard.training.validation import pair_batches

        if self.run.recipe.fills:
            raise UserError(f"{self.run.path} fills in gaps: it has no probabilities for pairs")
        found: list[list[float]] = [[] for _ in pairs]
        with torch.inference_mode():
            for group, batch in pair_batches(pairs, self.run.tokenizers, self.run.recipe):
                for i, logprobs in zip(group, score_batch(self.module, batch.to(self.device)), strict=True):
                    found[i] = logprobs
        return found


def _refuse_stranger(run: Run, other: Run) -> None:
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
    if (front_of(mine), mine.data.lowercase) != (front_of(theirs), theirs.data.lowercase):
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
    return Model(Run(path), device, weights, precision, [Run(other) for other in others])


def train(
    recipe: str | Recipe,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    device: str = "auto",
    start_from: str | Path | None = None,
    quiet: bool = False,
) -> Model:
    """Train a recipe (a name, a TOML file, or a `Recipe`) into a run directory, or take up where it stopped.

    `settings` are changes such as "training.steps=100".
    """
    from regard.training import train as train_recipe

    chosen = load_recipe(recipe, settings) if isinstance(recipe, str) else recipe
    run = train_recipe(chosen, out, device=device, start_from=start_from, quiet=quiet)
    return Model(run, device)
