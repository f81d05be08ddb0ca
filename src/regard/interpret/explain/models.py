"""A trained run as a black box: the words of what it reads are hidden, and what it said is scored again.

The output stays as it was, teacher-forced, so one call with some words hidden gives the log-probability of every token
of it: all columns of the matrix of inputs by outputs at once. Begin and end marks and tags are never hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.nn import functional

from regard.decoding import score
from regard.decoding.fill_mask import MaskFiller
from regard.errors import UserError
from regard.interpret.cross_attention import answer_attention
from regard.interpret.explain.rise import BlackBox, Explanation, Numbers, Progress, explain
from regard.interpret.recorder import Recorder
from regard.packed import PackedTokens, SeqBatch
from regard.runs import LoadedRun
from regard.text import BOS, EOS, UNK, Tokenizer, encode_stream
from regard.text.display import labels, space_at
from regard.text.encode import MASK
from regard.text.tokenizers import join_tokens

MaskMethod = Literal["unknown", "drop"]
Unit = Literal["words", "pieces"]

SCORE = "log-probability"
CONTINUED = 12  # tokens that a text is continued by, if what follows is not given
CLASSES = 8  # the likeliest ones are shown


@dataclass(frozen=True)
class MaskingMode:
    """What is hidden together: `unit`s, `span` neighbours at a time; and how: by the unknown token, or left out.

    Characters and byte pairs spell everything, so such a model has never met the unknown token: "drop" may then be the
    fairer question, though it moves what follows to other places.
    """

    how: MaskMethod = "unknown"
    unit: Unit = "words"
    span: int = 1

    def __post_init__(self) -> None:
        for name, given, known in (("how", self.how, get_args(MaskMethod)), ("unit", self.unit, get_args(Unit))):
            if given not in known:
                raise UserError(f"{name} = {given!r}: choose from {', '.join(known)}")
        if self.span < 1:
            raise UserError(f"span = {self.span}: at least one word is hidden at a time")


@dataclass(frozen=True)
class MaskedInput:
    """The tokens a model reads, and which of them make each part."""

    tokens: list[int]
    groups: list[list[int]]
    names: tuple[str, ...]
    how: MaskMethod

    @classmethod
    def of(cls, tokens: list[int], tokenizer: Tokenizer, hiding: MaskingMode) -> MaskedInput:
        groups = group(tokens, tokenizer, hiding.unit)
        if hiding.span > 1:
            runs = (groups[i : i + hiding.span] for i in range(0, len(groups), hiding.span))
            groups = [[place for places in run for place in places] for run in runs]
        return cls(tokens, groups, names(tokens, groups, tokenizer), hiding.how)

    def masked(self, keep: Sequence[bool]) -> list[int]:
        """The tokens with only these parts."""
        gone = {place for places, kept in zip(self.groups, keep, strict=True) if not kept for place in places}
        if self.how == "drop":
            return [token for place, token in enumerate(self.tokens) if place not in gone]
        return [UNK if place in gone else token for place, token in enumerate(self.tokens)]


def group(tokens: Sequence[int], tokenizer: Tokenizer, unit: Unit) -> list[list[int]]:
    """The places of each word's tokens (or of each token), marks and tags left out.

    A piece begins a word if it is the first, begins with white space, or is or follows a special token, as in
    `Map.to_words`; but a mark is known by its id here, so that text which looks like one is text.
    """
    words: list[list[int]] = []
    fresh = True
    pieces = tokenizer.token_texts(tokens)
    for place, token in enumerate(tokens):
        special = token < tokenizer.first
        if special and token != UNK:  # an unknown word is a word
            fresh = True
            continue
        if fresh or special or unit == "pieces" or space_at(pieces, place):
            words.append([])
        words[-1].append(place)
        fresh = special
    return words


def names(tokens: Sequence[int], groups: Sequence[Sequence[int]], tokenizer: Tokenizer) -> tuple[str, ...]:
    """How the parts are written."""
    pieces = tokenizer.token_texts(tokens)
    return labels([join_tokens([pieces[place] for place in places]) for places in groups])


@dataclass(frozen=True)
class ExplainRequest:
    """A run asked about one text: the black box, what it said, and how much its attention dwelt on each part."""

    box: BlackBox
    said: str
    score: str  # what the score of the whole is
    attention: Callable[[], Numbers | None]
    cut: bool = False  # the text was longer than the model reads
    hiding: MaskingMode = MaskingMode()

    def explain(self, progress: Progress | None = None, **sampling: Any) -> Explanation:
        """Which parts the output depended on; the settings are those of `Sampling`."""
        return replace(
            explain(self.box, progress=progress, **sampling), title=f"What “{self.said.strip()}” depended on"
        )


def ask(
    loaded: LoadedRun, text: str, *, target: str | None = None, hiding: MaskingMode | None = None
) -> ExplainRequest:
    """A run as a black box for one text, and for its own output or a `target` that is given instead.

    Translation: source by target words. Text: prompt by continuation. Classes: text by class (`target` names the class
    asked about). Gaps ([MASK]): text by the likeliest piece for each gap.
    """
    if not text.strip():
        raise UserError("there is nothing to explain: the text is blank")
    recipe, hiding = loaded.recipe, hiding or MaskingMode()
    if recipe.fills:
        return _gaps(loaded, text, target, hiding)
    if recipe.classifies:
        return _classes(loaded, text, target, hiding)
    if recipe.data.is_text:
        return _continuation(loaded, text, target, hiding)
    return _translation(loaded, text, target, hiding)


def _translation(loaded: LoadedRun, text: str, target: str | None, hiding: MaskingMode) -> ExplainRequest:
    source_side, target_side = loaded.tokenizers
    translator = loaded.translator()
    (source,), (cut,) = translator.encode([text])
    room = translator.room.target(len(source))
    if target is not None and (count := len(target_side.encode(target))) >= room:
        raise UserError(f"the target has {count} tokens, more than the {room - 1} that this model can write here")
    answer = translator([text])[0] if target is None else loaded.force(text, target)
    best = answer.hypotheses[0]
    said = [*best.tokens, EOS] if best.finished else list(best.tokens)
    reading = MaskedInput.of(list(answer.source), source_side, hiding)
    outputs = _with_end(said, group(said, target_side, hiding.unit))
    into = _into(outputs, len(said))

    def asked(sources: list[list[int]]) -> Numbers:
        batch = SeqBatch.from_lists(sources, [said] * len(sources), bos=BOS).to(loaded.device)
        with torch.inference_mode():
            return np.array(score(loaded.module.logits, batch)) @ into

    def attention() -> Numbers | None:
        try:
            weights = answer_attention(loaded, answer)
        except UserError:  # an ensemble, or a model without cross-attention
            return None
        each = weights.mean((0, 1)).sum(0)  # [source tokens]: what all target tokens gave it, mean of layers and heads
        return np.array([each[places].sum() for places in reading.groups], np.float64)

    box = BlackBox(asked, reading.names, reading.masked, names(said, outputs, target_side), score=SCORE)
    return ExplainRequest(box, answer.texts[0], "log-probability of the translation", attention, cut, hiding)


def _continuation(loaded: LoadedRun, text: str, target: str | None, hiding: MaskingMode) -> ExplainRequest:
    greedy = loaded.generator(method="beam", beam=1)
    tokenizer, (view, cut) = greedy.tokenizer, greedy.read(text)
    room = greedy.longest - len(view) + 1  # the last token is written and never read
    if target is None:
        found = greedy([text], tokens=min(CONTINUED, room))[0]
        told, said = found.text, list(found.hypotheses[0].tokens)
    else:
        lower = target.lower() if greedy.lowercase else target
        told, said = target, encode_stream(tokenizer, lower) if greedy.stream else tokenizer.encode(lower)
        if len(said) > room:
            raise UserError(f"the target has {len(said)} tokens; after this text the model has room for {room}")
    if not said:
        raise UserError("there is nothing to explain: nothing follows the text")
    reading = MaskedInput.of(view, tokenizer, hiding)
    outputs = _with_end(said, group(said, tokenizer, hiding.unit))
    into, empty = _into(outputs, len(said)), greedy.read("")[0]  # what a text of nothing begins with

    def asked(prompts: list[list[int]]) -> Numbers:
        before = [prompt or empty for prompt in prompts]
        inputs = PackedTokens.from_lists([[*prompt, *said[:-1]] for prompt in before])
        following = PackedTokens.from_lists([[*prompt[1:], *said] for prompt in before]).ids
        batch = SeqBatch(PackedTokens.from_lists([[] for _ in before]), inputs, following).to(loaded.device)
        with torch.inference_mode():
            return np.array([logprobs[-len(said) :] for logprobs in score(loaded.module.logits, batch)]) @ into

    def attention() -> Numbers | None:
        row = PackedTokens.from_lists([[*view, *said[:-1]]])
        batch = SeqBatch(PackedTokens.from_lists([[]]), row, row.ids).to(loaded.device)
        return _attention_given(loaded, batch, slice(len(view) - 1, None), reading)

    written = names([*view, *said], [[len(view) + place for place in places] for places in outputs], tokenizer)
    box = BlackBox(asked, reading.names, reading.masked, written, score=SCORE)
    return ExplainRequest(box, told, "log-probability of the continuation", attention, cut, hiding)


def _classes(loaded: LoadedRun, text: str, target: str | None, hiding: MaskingMode) -> ExplainRequest:
    classes = loaded.tokenizers[1]
    sources, cut = loaded.translator().encode([text])
    reading = MaskedInput.of(sources[0], loaded.tokenizers[0], hiding)

    def all_classes(sources: list[list[int]]) -> Numbers:
        """[B, classes] log-probabilities among the classes."""
        batch = SeqBatch.from_lists(sources, [[classes.first, EOS]] * len(sources), bos=BOS).to(loaded.device)
        with torch.inference_mode():
            logits = loaded.module.logits(batch)[batch.inputs.layout.offsets[:-1], classes.first :]
            return functional.log_softmax(logits.float(), -1).double().cpu().numpy()

    likeliest = np.argsort(-all_classes(sources)[0], kind="stable")[:CLASSES].tolist()
    chosen = likeliest[0]
    if target is not None:
        named = classes.encode(target)
        if len(named) != 1 or named[0] < classes.first:
            known = ", ".join(classes.decode([classes.first + i]) for i in sorted(likeliest))
            raise UserError(f"there is no class {target!r}: among them are {known}")
        chosen = named[0] - classes.first
        likeliest = likeliest if chosen in likeliest else [chosen, *likeliest[:-1]]
    shown = tuple(classes.decode([classes.first + i]) for i in likeliest)
    weights = tuple(float(i == chosen) for i in likeliest)
    box = BlackBox(lambda rows: all_classes(rows)[:, likeliest], reading.names, reading.masked, shown, weights, SCORE)
    name = classes.decode([classes.first + chosen])
    return ExplainRequest(box, name, f"log-probability of {name}", lambda: None, cut[0], hiding)


def _gaps(loaded: LoadedRun, text: str, target: str | None, hiding: MaskingMode) -> ExplainRequest:
    if target is not None:
        raise UserError("a model that fills in gaps explains its own guesses, and no other target")
    tokenizer = loaded.tokenizers[0]
    filler: MaskFiller = loaded.filler()
    filled, mask = filler([text], top=1)[0], tokenizer.tag(MASK)
    reading = MaskedInput.of(filler.encode(text), tokenizer, hiding)

    def all_pieces(rows: list[list[int]]) -> torch.Tensor:
        """[B, gaps, V] log-probabilities."""
        row = PackedTokens.from_lists(rows).to(loaded.device)
        with torch.inference_mode():
            logits = loaded.module.logits(SeqBatch(row, row, row.ids))[row.ids == mask]
            return functional.log_softmax(logits.float(), -1).unflatten(0, (len(rows), -1))

    silent = sorted({*tokenizer.forbidden(), EOS})
    best = all_pieces([reading.tokens])[0].index_fill(-1, torch.tensor(silent, device=loaded.device), -1e9).argmax(-1)

    def asked(rows: list[list[int]]) -> Numbers:
        found = all_pieces(rows)
        return found.gather(-1, best[None, :, None].expand(len(rows), -1, 1)).squeeze(-1).double().cpu().numpy()

    pieces = tuple(guesses[0].text.strip() or "␣" for guesses in filled.guesses)
    box = BlackBox(asked, reading.names, reading.masked, pieces, score=SCORE)

    def attention() -> Numbers | None:
        row = PackedTokens.from_lists([reading.tokens]).to(loaded.device)
        return _attention_given(loaded, SeqBatch(row, row, row.ids), (row.ids == mask).nonzero()[:, 0], reading)

    return ExplainRequest(box, filled.text, "log-probability of what fills the gaps", attention, False, hiding)


def _attention_given(
    loaded: LoadedRun, batch: SeqBatch, rows: slice | torch.Tensor, reading: MaskedInput
) -> Numbers | None:
    """[parts] the self-attention that the output's positions `rows` gave to each part, mean of layers and heads."""
    with torch.inference_mode(), Recorder(loaded.module) as seen:
        loaded.module.logits(batch)
        layers = [attended.sentence(0).float().mean(0)[rows].sum(0) for attended in seen.attention.values()]  # [K]
    if not layers:
        return None
    each = torch.stack(layers).mean(0).double().cpu().numpy()
    return np.array([each[places].sum() for places in reading.groups], np.float64)


def _with_end(said: Sequence[int], words: list[list[int]]) -> list[list[int]]:
    """The words of an output, and its end mark, which a model also has to choose; tags were not its choice."""
    return sorted([*words, *([place] for place, token in enumerate(said) if token == EOS)])


def _into(groups: Sequence[Sequence[int]], count: int) -> Numbers:
    """[tokens, groups] with ones where a token belongs to a group: log-probabilities of words are sums."""
    into = np.zeros((count, len(groups)))
    for column, places in enumerate(groups):
        into[list(places), column] = 1.0
    return into
