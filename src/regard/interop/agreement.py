"""Whether an exported model computes the same as its run. Both process the same held-out texts.

Tokens: the exported tokenizer must split every text as the run does. Log-probabilities: those of all tokens of the
run's greedy outputs must be equal up to `BOUND` (of BERT, those of all tokens or classes); likewise those of random
texts, which cover the vocabulary up to `MAX_RANDOM_TOKENS`. Outputs: translations by greedy search and with a beam of
4, without length penalty, which libraries define differently; greedy continuations.

Two greedy outputs may differ only after a tie: the first tokens in which they differ have the same log-probability by
the run, up to `TIE`. Beam searches differ between libraries (in when a search ends, and in whether finished
outputs keep their beam), so another output is accepted if both give its tokens the same log-probabilities, as long as
the total log-probability of all outputs is not worse than the run's by more than `MAX_TOTAL_LOSS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from regard import tasks
from regard.data.corpora import corpora
from regard.decoding import SearchRequest, search
from regard.errors import UserError
from regard.models import SequenceModel
from regard.models.bert import TextClassBatch
from regard.packed import PackedTokens, SeqBatch
from regard.run_dir import RunDir
from regard.tasks.generator import Generator
from regard.tasks.translator import Translator
from regard.text import BOS, EOS, Tokenizer
from regard.text.encode import prefix_ids

MAX_TEXTS = 200
BEAMS = (1, 4)
MAX_TOKENS = 40  # maximum length of an output
PROMPT_WORDS = 6
MAX_RANDOM_TOKENS = 12_000  # in texts of `RANDOM_LENGTH`
RANDOM_LENGTH = 60
BOUND = 1e-4  # larger differences of a token's log-probability are not rounding errors
TIE = 2 * BOUND  # two log-probabilities closer than this are a tie
MAX_TOTAL_LOSS = 0.05  # share of the total log-probability


class Exported(Protocol):
    """An exported model, run by the library that it is for. Token ids are ours."""

    def encode(self, text: str) -> list[int] | None:
        """The tokens of a text by the exported tokenizer, special tokens included; None: there is none to compare."""
        ...

    def translate(self, sources: list[list[int]], prefix: list[int], beam: int, limit: int) -> list[list[int]]:
        """The best translations, each of which begins with the prefix, without it and without EOS."""
        ...

    def continue_(self, contexts: list[list[int]], limit: int) -> list[list[int]]:
        """The most likely tokens after each context, without EOS."""
        ...

    def score(self, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        """The log-probability of every token of the targets, among the tokens that can be generated."""
        ...

    def logits(self, source: list[int]) -> np.ndarray:
        """The logits of the tokens to fill in for each token, [T, V], or of the classes, [1, C]."""
        ...

    def columns(self) -> Sequence[int] | None:
        """Our id for each column of `logits`; None: they have our order."""
        ...


@dataclass(frozen=True)
class Agreement:
    """The number of texts with the same result in both; `ties` are those that differ without being worse."""

    what: str
    texts: int
    equal: int
    ties: int
    difference: float | None = None  # the largest, of log-probabilities

    def __str__(self) -> str:
        ties = f" ({self.ties} others are as probable)" if self.ties else ""
        numbers = "" if self.difference is None else f"; log-probabilities differ by at most {self.difference:.1e}"
        return f"{self.what}: {self.equal} of {self.texts} are the same{ties}{numbers}"


def sample_texts(run: RunDir) -> list[str]:
    """Held-out inputs of a run: of its test split, else of its validation split, else random ones."""
    task = tasks.of(run.recipe)
    for split in ("test", "valid"):
        try:
            pairs = task.held_out(split)
        except UserError:
            continue
        lines = (line for pair in pairs for line in (pair[0] or pair[1]).splitlines())
        texts = [line.lower() if run.recipe.data.lowercase else line for line in islice(lines, 20 * MAX_TEXTS)]
        return _shortened(run, texts)
    source, random = run.tokenizers[0], torch.Generator().manual_seed(1)
    tokens = torch.randint(source.first, len(source), (MAX_TEXTS, 8), generator=random).tolist()
    return _shortened(run, [source.decode(ids) for ids in tokens])


def _shortened(run: RunDir, texts: list[str]) -> list[str]:
    """The first texts that are not blank, shortened to what the model can read; for decoders, to a few words."""
    is_decoder = not run.recipe.model.encoder_decoder_layers[0]
    longest = max(run.recipe.model.max_positions - 3 - (MAX_TOKENS // 2 if is_decoder else 0), 1)
    shortened = []
    for text in texts:
        words = text.split()[: PROMPT_WORDS if is_decoder else None]
        while words and len(run.tokenizers[0].encode(" ".join(words))) > longest:
            words = words[: len(words) // 2]
        shortened += [" ".join(words)] if words else []
    return shortened[:MAX_TEXTS]


def random_texts(tokenizer: Tokenizer, longest: int, banned: Collection[int] = ()) -> list[list[int]]:
    """All ordinary tokens that are not banned, or `MAX_RANDOM_TOKENS` of them, in random order, as texts."""
    tokens = [token for token in range(tokenizer.first, len(tokenizer)) if token not in banned]
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(2))[:MAX_RANDOM_TOKENS].tolist()
    size = min(RANDOM_LENGTH, longest)
    return [[tokens[n] for n in order[begin : begin + size]] for begin in range(0, len(order), size)]


def agreements(run: RunDir, exported: Exported) -> list[Agreement]:
    """Compare a run with its export; raise a UserError if they differ beyond ties."""
    texts, model, task = sample_texts(run), run.model("cpu"), tasks.of(run.recipe)
    if not texts:
        raise UserError(f"no text is short enough for {run.path} to compare it with its export: use --unverified")
    if task.output == "sequence" and task.has_source:
        found = _Translations(run, model, exported).compare(texts)
    elif task.output == "sequence":
        found = [_compare_continuations(run, model, exported, texts)]
    else:
        found = [_compare_predictions(run, model, exported, texts)]
    for agreement in found:
        require_agreement(run, agreement)
    return found


def require_agreement(run: RunDir, agreement: Agreement) -> None:
    """Raise a UserError if a run and its export differ beyond ties."""
    close = agreement.difference is None or agreement.difference <= BOUND  # false for NaN
    if agreement.equal + agreement.ties < agreement.texts or not close:
        raise UserError(f"the export differs from {run.path}: {agreement}")


def _check_tokens(run: RunDir, exported: Exported, texts: list[str], sources: list[list[int]]) -> None:
    if any(corpus.source_tag for corpus in corpora(run.recipe.data)):
        return  # tags are given as tokens
    for text, source in zip(texts, sources, strict=True):
        if (tokens := exported.encode(text)) is not None and tokens != source:
            raise UserError(f"the export differs from {run.path}: its tokenizer splits {text!r} into other tokens")


@dataclass(frozen=True)
class _Reference:
    """The run's model, and log-probabilities among the tokens that it may generate."""

    model: SequenceModel
    banned: list[int]

    def logprobs(self, source: list[int], target: Sequence[int], bos: int = BOS) -> list[float]:
        batch = SeqBatch.from_lists([source], [list(target)], bos=bos)
        with torch.inference_mode():
            logits = self.model.logits(batch)[: len(target)].float()
            allowed = logits.index_fill(-1, torch.tensor(self.banned, dtype=torch.long), -torch.inf)
            chosen = logits.gather(1, batch.labels[: len(target), None])  # also of tokens that must come first
            found: list[float] = (chosen[:, 0] - allowed.logsumexp(-1)).tolist()
        return found

    def is_tie(self, source: list[int], one: Sequence[int], other: Sequence[int], bos: int = BOS) -> bool:
        """Whether the first tokens in which two outputs differ have the same log-probability."""
        same = next(n for n, pair in enumerate(zip([*one, -1], [*other, -1], strict=False)) if pair[0] != pair[1])
        last = [self.logprobs(source, each[: same + 1], bos)[-1] for each in (one, other) if len(each) > same]
        return len(last) == 2 and abs(last[0] - last[1]) <= TIE


def _largest(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The largest difference of two lists of numbers; infinite if their lengths differ, NaN if one is not a number."""
    if [len(one) for one in ours] != [len(other) for other in theirs]:
        return float("inf")
    flat = [np.array([number for numbers in each for number in numbers]) for each in (ours, theirs)]
    return float(np.abs(flat[0] - flat[1]).max(initial=0.0))


# -- translations ------------------------------------------------------------------------------------------------------


class _Translations:
    """Translations of a run and of its export."""

    def __init__(self, run: RunDir, model: SequenceModel, exported: Exported) -> None:
        self.run, self.model, self.exported = run, model, exported
        self.translator = Translator.for_recipe(model, run.tokenizers, run.recipe)
        tag = self.translator.target_tag
        self.prefix = [run.tokenizers[1].tag(tag)] if tag else []
        self.reference = _Reference(model, self.translator.forbidden)
        longest = run.recipe.model.max_positions - 3
        sources, targets = (random_texts(each, longest, self.reference.banned) for each in run.tokenizers)
        count = max(len(sources), len(targets))
        repeated = [list(islice(cycle(each), count)) for each in (sources, targets)]
        prefix = self.translator.encode(["a"])[0][0][: -1 - len(run.tokenizers[0].encode("a"))]  # prefix and tag
        self.random = [[*prefix, *source, EOS] for source in repeated[0]], repeated[1]

    def compare(self, texts: list[str]) -> list[Agreement]:
        sources = self.translator.encode(texts)[0]
        _check_tokens(self.run, self.exported, texts, sources)
        return [self._compare(sources, beam) for beam in BEAMS]

    def _compare(self, sources: list[list[int]], beam: int) -> Agreement:
        ours, theirs = self._search(sources, beam), self.exported.translate(sources, self.prefix, beam, MAX_TOKENS)
        both = [[self._with_prefix_and_eos(output) for output in outputs] for outputs in (ours, theirs)]
        other = [n for n, (one, another) in enumerate(zip(*both, strict=True)) if one != another]
        equal = len(sources) - len(other)
        if beam == 1:
            ties = sum(self.reference.is_tie(sources[n], both[0][n], both[1][n]) for n in other)
            difference = self._difference([*sources, *self.random[0]], [*ours, *self.random[1]])
            return Agreement("translations, greedy", len(sources), equal, ties, difference)
        totals = [sum(sum(self._logprobs(*pair)) for pair in zip(sources, outputs, strict=True)) for outputs in both]
        ties = len(other) if totals[1] >= totals[0] - MAX_TOTAL_LOSS * abs(totals[0]) else 0
        difference = self._difference([sources[n] for n in other], [theirs[n] for n in other])
        return Agreement(f"translations, beam {beam}", len(sources), equal, ties, difference if other else None)

    def _with_prefix_and_eos(self, output: list[int]) -> list[int]:
        """The prefix, the output, and EOS unless the output was cut off."""
        return [*self.prefix, *output, *([EOS] if len(output) < MAX_TOKENS else [])]

    def _logprobs(self, source: list[int], target: list[int]) -> list[float]:
        """The log-probabilities of the tokens after the prefix."""
        return self.reference.logprobs(source, target)[len(self.prefix) :]

    def _difference(self, sources: list[list[int]], outputs: list[list[int]]) -> float:
        """The largest difference between the log-probabilities of tokens and of EOS after them."""
        longest = self.run.recipe.model.max_positions - 1
        targets = [[*self.prefix, *output, EOS][:longest] for output in outputs]
        ours = [self._logprobs(source, target) for source, target in zip(sources, targets, strict=True)]
        theirs = [numbers[len(self.prefix) :] for numbers in self.exported.score(sources, targets)]
        return _largest(ours, theirs)

    def _search(self, sources: list[list[int]], beam: int) -> list[list[int]]:
        changes = {"method": "beam", "beam": beam, "length_penalty": 0.0, "max_ratio": 1e-9}
        plain = {"min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0}
        limit = min(MAX_TOKENS + len(self.prefix), self.run.recipe.model.max_positions - 1)
        settings = self.run.recipe.decoding.model_copy(update=changes | plain | {"max_extra": limit})
        request = SearchRequest(
            PackedTokens.from_lists(sources),
            settings,
            prefixes=[self.prefix] * len(sources) if self.prefix else None,
            banned=self.translator.forbidden,
            max_length=limit,
        )
        return [list(best.tokens[len(self.prefix) :]) for best, *_ in search(self.model, request)]


# -- continuations and predictions -------------------------------------------------------------------------------------


def _compare_continuations(run: RunDir, model: SequenceModel, exported: Exported, texts: list[str]) -> Agreement:
    """Continue each text by itself: the prompt but its last token is the source."""
    generator = Generator.for_recipe(model, run.tokenizers, run.recipe)
    contexts, limit = [generator.read(text)[0] for text in texts], MAX_TOKENS // 2
    _check_tokens(run, exported, texts, contexts)
    changes = {"method": "beam", "beam": 1, "max_ratio": 1e-9, "max_extra": limit, "length_penalty": 0.0}
    settings, outputs = run.recipe.decoding.model_copy(update=changes), []
    for context in contexts:
        source, begin = PackedTokens.from_lists([context[:-1]]), [context[-1]]
        request = SearchRequest(source, settings, begin=begin, banned=generator.forbidden, max_length=limit)
        ((best, *_),) = search(model, request)
        outputs.append(list(best.tokens))
    theirs = exported.continue_(contexts, limit)
    reference = _Reference(model, generator.forbidden)
    pairs = list(zip(contexts, outputs, theirs, strict=True))
    equal = sum(one == other for _, one, other in pairs)
    ties = 0
    for context, *both in pairs:
        one, other = ([*each, *([EOS] if len(each) < limit else [])] for each in both)
        ties += one != other and reference.is_tie(context[:-1], one, other, bos=context[-1])
    unused = getattr(run.recipe.model, "unused", ())
    random = random_texts(run.tokenizers[1], run.recipe.model.max_positions - 1, [*generator.forbidden, *unused])
    scored = [(context, one) for context, one, _ in pairs if one] + [(t[:1], t[1:]) for t in random if t[1:]]
    ours = [reference.logprobs(context[:-1], target, context[-1]) for context, target in scored]
    difference = _largest(ours, exported.score([context for context, _ in scored], [target for _, target in scored]))
    return Agreement("continuations", len(pairs), equal, ties, difference)


def _compare_predictions(run: RunDir, model: SequenceModel, exported: Exported, texts: list[str]) -> Agreement:
    """Compare the log-probabilities of all tokens to fill in, or of all classes."""
    sources = [[*prefix_ids(run.recipe), *run.tokenizers[0].encode(text), EOS] for text in texts]
    _check_tokens(run, exported, texts, sources)
    fills = getattr(run.recipe.model, "task", "fill") == "fill"
    columns = exported.columns()
    random = random_texts(run.tokenizers[0], run.recipe.model.max_positions - 2)

    def pair(source: list[int]) -> tuple[Tensor, Tensor]:
        packed = PackedTokens.from_lists([source])
        with torch.inference_mode():
            batch = SeqBatch(packed, packed, packed.ids) if fills else TextClassBatch.from_lists([source])
            logits = model.logits(batch)  # [T, V] or [1, C]
        return torch.from_numpy(exported.logits(source)), logits if columns is None else logits[:, columns]

    return compare_logits(run, map(pair, [*sources, *([*prefix_ids(run.recipe), *text, EOS] for text in random)]))


def compare_logits(run: RunDir, pairs: Iterable[tuple[Tensor, Tensor]]) -> Agreement:
    """Compare the export's logits [T, V] of each input with the run's."""
    count = equal = ties = 0
    differences = []
    for theirs, logits in pairs:
        if theirs.shape != logits.shape:
            raise UserError(f"the export differs from {run.path}: its logits have shape {tuple(theirs.shape)}")
        ours, other = (each.float().log_softmax(-1) for each in (logits, theirs))
        count += 1
        differences.append(float((ours - other).abs().max()))  # NaN if one is
        best, chosen = ours.argmax(-1, keepdim=True), other.argmax(-1, keepdim=True)
        same = torch.equal(best, chosen)
        equal += same
        ties += not same and bool((ours.gather(-1, best) - ours.gather(-1, chosen) <= TIE).all())
    return Agreement("predictions", count, equal, ties, float(np.max(differences, initial=0.0)))
