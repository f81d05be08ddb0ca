"""Does an exported model do what the run does? Both process the same held-out texts, and the results are compared.

Translations are searched greedily and with a beam of 4, without length penalty, which other libraries define otherwise;
continuations greedily; of BERT the best token or class is compared. Two results of a text may differ if a decision was
closer than `TIE` (`decoding.Report`), where rounding decides, or if the run gives the other result no lower a
log-probability: then the other library's search ended differently, at the longest output or with equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch

from regard import tasks
from regard.data.corpora import corpora
from regard.decoding import Report, SearchRequest, score, search
from regard.errors import UserError
from regard.models import SequenceModel
from regard.packed import PackedTokens, SeqBatch
from regard.run_dir import RunDir
from regard.tasks.generator import Generator
from regard.tasks.translator import Translator
from regard.text import BOS, EOS
from regard.text.encode import prefix_ids

TEXTS = 200
BEAMS = (1, 4)
LIMIT = 40  # tokens of an output
PROMPT_WORDS = 6
TIE = 1e-2  # of the log-probability of an output: other libraries round differently at every step


class Exported(Protocol):
    """An exported model, run by the library that it is for. Token ids are ours."""

    def translate(self, texts: list[str], beam: int, limit: int) -> list[list[int]]:
        """The best translations, without EOS."""
        ...

    def continue_(self, texts: list[str], limit: int) -> list[list[int]]:
        """The most likely tokens after each text, without EOS."""
        ...

    def predict(self, texts: list[str]) -> list[list[int]]:
        """For each token of each text the best token to fill in (special tokens included), or the class."""
        ...


@dataclass(frozen=True)
class Agreement:
    """How many texts have the same result in both; `ties` are those that differ without being worse."""

    what: str
    texts: int
    equal: int
    ties: int

    def __str__(self) -> str:
        ties = f" ({self.ties} ties)" if self.ties else ""
        return f"{self.what}: {self.equal} of {self.texts} are the same{ties}"


def sample_texts(run: RunDir) -> list[str]:
    """Held-out inputs of a run: of its test split, else of its validation split, else random ones."""
    task = tasks.of(run.recipe)
    for split in ("test", "valid"):
        try:
            pairs = task.held_out(split)
        except UserError:
            continue
        lines = (line for pair in pairs for line in (pair[0] or pair[1]).splitlines())
        texts = [line.lower() if run.recipe.data.lowercase else line for line in islice(lines, 20 * TEXTS)]
        return _that_fit(run, texts)
    source, random = run.tokenizers[0], torch.Generator().manual_seed(1)
    tokens = torch.randint(source.first, len(source), (TEXTS, 8), generator=random).tolist()
    return _that_fit(run, [source.decode(ids) for ids in tokens])


def _that_fit(run: RunDir, texts: list[str]) -> list[str]:
    """The first texts that are not blank, and short enough for the model; of language models their first words."""
    is_decoder = not run.recipe.model.encoder_decoder_layers[0]
    longest = max(run.recipe.model.max_positions - 2 - (LIMIT // 2 if is_decoder else 0), 1)
    cut = [" ".join(text.split()[: PROMPT_WORDS if is_decoder else None]) for text in texts]
    return [text for text in cut if text and len(run.tokenizers[0].encode(text)) <= longest][:TEXTS]


def agreements(run: RunDir, exported: Exported) -> list[Agreement]:
    """Compare a run with its export; raise a UserError if they differ beyond ties."""
    if any(corpus.source_tag or corpus.target_tag for corpus in corpora(run.recipe.data)):
        return []  # tags are given by whoever translates
    texts, model = sample_texts(run), run.model("cpu")
    task = tasks.of(run.recipe)
    if task.output == "sequence" and task.has_source:
        translator = Translator.for_recipe(model, run.tokenizers, run.recipe)
        sources = translator.encode(texts)[0]
        found = []
        for beam in BEAMS:
            ours, margins = _search(model, run, sources, translator.forbidden, beam)
            theirs = exported.translate(texts, beam, LIMIT)
            margins = [
                0.0 if list(one) != list(other) and _no_worse(model, source, one, other) else margin
                for source, one, other, margin in zip(sources, ours, theirs, margins, strict=True)
            ]
            how = "greedy" if beam == 1 else f"beam {beam}"
            found.append(_compare(f"translations, {how}", ours, margins, theirs))
    elif task.output == "sequence":
        found = [_compare("continuations", *_continue(run, model, texts), exported.continue_(texts, LIMIT // 2))]
    else:
        found = [_compare("predictions", *_predict(run, model, texts), exported.predict(texts))]
    for agreement in found:
        if agreement.equal + agreement.ties < agreement.texts:
            raise UserError(f"the export differs from {run.path}: {agreement}")
    return found


def _compare(
    what: str, ours: Sequence[Sequence[int]], margins: Sequence[float], theirs: Sequence[Sequence[int]]
) -> Agreement:
    same = [list(one) == list(other) for one, other in zip(ours, theirs, strict=True)]
    ties = sum(margin < TIE for equal, margin in zip(same, margins, strict=True) if not equal)
    return Agreement(what, len(same), sum(same), ties)


def _no_worse(model: SequenceModel, source: list[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the model gives the other output at least nearly the log-probability of the one; EOS unless cut off."""
    targets = [[*tokens, *([EOS] if len(tokens) < LIMIT else [])] for tokens in (one, other)]
    if not all(targets):
        return False
    batch = SeqBatch.from_lists([source, source], targets, bos=BOS)
    with torch.inference_mode():
        ours, theirs = (sum(logprobs) for logprobs in score(model.logits, batch))
    return theirs >= ours - TIE


Found = tuple[list[tuple[int, ...]], list[float]]


def _search(
    model: SequenceModel, run: RunDir, sources: list[list[int]], banned: list[int], beam: int, limit: int = LIMIT
) -> Found:
    changes = {"method": "beam", "beam": beam, "length_penalty": 0.0, "max_ratio": 1e-9, "max_extra": limit}
    plain = {"min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0}
    settings, report = run.recipe.decoding.model_copy(update=changes | plain), Report()
    most = min(limit, run.recipe.model.max_positions - 1)
    request = SearchRequest(PackedTokens.from_lists(sources), settings, banned=banned, max_length=most)
    found = search(model, request, report=report)
    return [best.tokens for best, *_ in found], report.margins


def _continue(run: RunDir, model: SequenceModel, texts: list[str]) -> Found:
    """Continue each text by itself: the prompt but its last token is the source."""
    generator = Generator.for_recipe(model, run.tokenizers, run.recipe)
    changes = {"method": "beam", "beam": 1, "max_ratio": 1e-9, "max_extra": LIMIT // 2, "length_penalty": 0.0}
    settings, report, outputs = run.recipe.decoding.model_copy(update=changes), Report(), []
    for text in texts:
        context, _ = generator.read(text)
        source = PackedTokens.from_lists([context[:-1]])
        request = SearchRequest(
            source, settings, begin=[context[-1]], banned=generator.forbidden, max_length=LIMIT // 2
        )
        ((best, *_),) = search(model, request, report=report)
        outputs.append(best.tokens)
    return outputs, report.margins


def _predict(run: RunDir, model: SequenceModel, texts: list[str]) -> Found:
    source, target = run.tokenizers
    outputs: list[tuple[int, ...]] = []
    margins = []
    for text in texts:
        ids = [*prefix_ids(run.recipe), *source.encode(text), EOS]
        packed = PackedTokens.from_lists([ids])
        fills = getattr(run.recipe.model, "task", "fill") == "fill"
        inputs = packed if fills else PackedTokens.from_lists([[BOS]])
        with torch.inference_mode():
            logits = model.logits(SeqBatch(packed, inputs, inputs.ids))
        if not fills:
            logits = logits[:, target.first :]
        best = logits.topk(2, dim=-1)
        margins.append(float((best.values[:, 0] - best.values[:, 1]).min()))
        outputs.append(tuple(best.indices[:, 0].tolist()))
    return outputs, margins
