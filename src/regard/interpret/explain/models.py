"""A trained run as a black box: parts of its input are hidden, and its output is scored again.

The output is fixed and teacher-forced, so that one call gives the log-probability of each of its tokens: a whole row of
the matrix of inputs by outputs. BOS, EOS and tags are never hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from regard.decoding import score
from regard.errors import UserError
from regard.interpret.cross_attention import answer_attention
from regard.interpret.explain.image_runs import image_request
from regard.interpret.explain.request import ExplainRequest, MaskingMode, MaskMethod, Unit, shown_classes
from regard.interpret.explain.rise import BlackBox, Numbers
from regard.interpret.recorder import Recorder
from regard.models.bert import TextClassBatch
from regard.packed import PackedTokens, SeqBatch
from regard.runs import LoadedRun
from regard.tasks.classification import ClassificationTask
from regard.text import BOS, EOS, UNK, Tokenizer, encode_stream
from regard.text.display import labels, space_at
from regard.text.encode import MASK
from regard.text.tokenizers import join_tokens

SCORE = "log-probability"
CONTINUATION_TOKENS = 12  # written after a prompt, if no continuation is given


@dataclass(frozen=True)
class MaskedInput:
    """The input tokens, and the positions of the tokens of each part."""

    tokens: list[int]
    groups: list[list[int]]
    names: tuple[str, ...]
    how: MaskMethod

    @classmethod
    def of(cls, tokens: list[int], tokenizer: Tokenizer, masking: MaskingMode) -> MaskedInput:
        groups = group(tokens, tokenizer, masking.unit)
        if masking.span > 1:
            spans = (groups[i : i + masking.span] for i in range(0, len(groups), masking.span))
            groups = [[position for positions in span for position in positions] for span in spans]
        return cls(tokens, groups, names(tokens, groups, tokenizer), masking.how)

    def masked(self, keep: Sequence[bool]) -> list[int]:
        """The tokens with only these parts."""
        hidden = {i for positions, kept in zip(self.groups, keep, strict=True) if not kept for i in positions}
        if self.how == "drop":
            return [token for i, token in enumerate(self.tokens) if i not in hidden]
        return [UNK if i in hidden else token for i, token in enumerate(self.tokens)]


@dataclass(frozen=True)
class ClassVocabulary:
    """The classes of a run where others have the tokens of an output: an id is that of a class."""

    names: Sequence[str]
    first = 0  # there are no special tokens

    def __len__(self) -> int:
        return len(self.names)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.names[number] for number in ids]


Vocabulary = Tokenizer | ClassVocabulary


def group(tokens: Sequence[int], tokenizer: Vocabulary, unit: Unit) -> list[list[int]]:
    """Group the positions of the tokens by word (or one by one), without special tokens.

    A token begins a word if it is the first, begins with white space, or is or follows a special token, as in
    `Map.to_words`; here a special token is recognised by its id, since ordinary text may look the same.
    """
    words: list[list[int]] = []
    at_start = True
    texts = tokenizer.token_texts(tokens)
    for position, token in enumerate(tokens):
        special = token < tokenizer.first
        if special and token != UNK:  # an unknown word is a word
            at_start = True
            continue
        if at_start or special or unit == "tokens" or space_at(texts, position):
            words.append([])
        words[-1].append(position)
        at_start = special
    return words


def names(tokens: Sequence[int], groups: Sequence[Sequence[int]], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The labels of the parts."""
    texts = tokenizer.token_texts(tokens)
    return labels([join_tokens([texts[i] for i in positions]) for positions in groups])


def explain_request(
    loaded: LoadedRun, given: Any, *, target: str | None = None, masking: MaskingMode | None = None
) -> ExplainRequest:
    """Make the black box of a run for one text or image, with the run's own output or a given `target`.

    `Task.explained` says which parts are hidden and which outputs scored. Translation: source words, target words.
    Language model: words of the prompt, words of the continuation. Classification: words of the text, classes
    (`target` names the class to explain). Masked language model: words of the text, the most probable token for each
    [MASK]. Images: pixels, classes.
    """
    masking = masking or MaskingMode()
    task = loaded.task
    if task.explained is None:
        raise UserError(f"{loaded.run.path}: a run for {task.name} cannot be explained")
    if isinstance(given, str) and not given.strip():
        raise UserError("there is nothing to explain: the text is blank")
    return REQUESTS[task.explained](loaded, given, target, masking)


def _translation(loaded: LoadedRun, text: str, target: str | None, masking: MaskingMode) -> ExplainRequest:
    source_tokenizer, target_tokenizer = loaded.tokenizers
    translator = loaded.translator()
    (source,), (truncated,) = translator.encode([text])
    limit = translator.budget.target(len(source))
    if target is not None and (count := len(target_tokenizer.encode(target))) >= limit:
        raise UserError(f"the target has {count} tokens, more than the {limit - 1} that this model can write here")
    answer = translator([text])[0] if target is None else loaded.force(text, target)
    best = answer.hypotheses[0]
    output = [*best.tokens, EOS] if best.finished else list(best.tokens)
    masked = MaskedInput.of(list(answer.source), source_tokenizer, masking)
    words = _with_eos(output, group(output, target_tokenizer, masking.unit))
    to_words = _indicator(words, len(output))

    def word_scores(sources: list[list[int]]) -> Numbers:
        batch = SeqBatch.from_lists(sources, [output] * len(sources), bos=BOS).to(loaded.device)
        with torch.inference_mode():
            return np.array(score(loaded.module.logits, batch)) @ to_words

    def attention() -> Numbers | None:
        try:
            weights = answer_attention(loaded, answer)
        except UserError:  # an ensemble, or a model without cross-attention
            return None
        received = weights.mean((0, 1)).sum(0)  # [source tokens]: mean of layers and heads, sum of target tokens
        return np.array([received[positions].sum() for positions in masked.groups], np.float64)

    box = BlackBox(word_scores, masked.names, masked.masked, names(output, words, target_tokenizer), score=SCORE)
    about = "log-probability of the translation"
    return ExplainRequest(box, answer.texts[0], about, attention, truncated, masking)


def _continuation(loaded: LoadedRun, text: str, target: str | None, masking: MaskingMode) -> ExplainRequest:
    greedy = loaded.generator(method="beam", beam=1)
    tokenizer, (prompt, truncated) = greedy.tokenizer, greedy.read(text)
    limit = greedy.longest - len(prompt) + 1  # the last token is written and never read
    if target is None:
        generation = greedy([text], tokens=min(CONTINUATION_TOKENS, limit))[0]
        output_text, output = generation.text, list(generation.hypotheses[0].tokens)
    else:
        lower = target.lower() if greedy.lowercase else target
        output_text, output = target, encode_stream(tokenizer, lower) if greedy.stream else tokenizer.encode(lower)
        if len(output) > limit:
            raise UserError(f"the target has {len(output)} tokens; after this text the model can write {limit}")
    if not output:
        raise UserError("there is nothing to explain: the continuation is empty")
    masked = MaskedInput.of(prompt, tokenizer, masking)
    words = _with_eos(output, group(output, tokenizer, masking.unit))
    to_words, empty = _indicator(words, len(output)), greedy.read("")[0]  # the tokens of an empty prompt

    def word_scores(prompts: list[list[int]]) -> Numbers:
        before = [masked_prompt or empty for masked_prompt in prompts]
        inputs = PackedTokens.from_lists([[*tokens, *output[:-1]] for tokens in before])
        targets = PackedTokens.from_lists([[*tokens[1:], *output] for tokens in before]).ids
        batch = SeqBatch(PackedTokens.from_lists([[] for _ in before]), inputs, targets).to(loaded.device)
        with torch.inference_mode():
            return np.array([logprobs[-len(output) :] for logprobs in score(loaded.module.logits, batch)]) @ to_words

    def attention() -> Numbers | None:
        packed = PackedTokens.from_lists([[*prompt, *output[:-1]]])
        batch = SeqBatch(PackedTokens.from_lists([[]]), packed, packed.ids).to(loaded.device)
        return _self_attention(loaded, batch, slice(len(prompt) - 1, None), masked)

    after_prompt = [[len(prompt) + i for i in positions] for positions in words]
    box = BlackBox(
        word_scores, masked.names, masked.masked, names([*prompt, *output], after_prompt, tokenizer), score=SCORE
    )
    about = "log-probability of the continuation"
    return ExplainRequest(box, output_text, about, attention, truncated, masking)


def _classification(loaded: LoadedRun, text: str, target: str | None, masking: MaskingMode) -> ExplainRequest:
    task, classes = loaded.prediction_task(), loaded.run.classes
    assert isinstance(task, ClassificationTask)
    tokens, (truncated,) = task.encode(loaded.run, [text])
    masked = MaskedInput.of(tokens[0], loaded.tokenizers[0], masking)

    def all_scores(texts: list[list[int]]) -> Numbers:
        """Log-probabilities [B, classes]."""
        with torch.inference_mode():
            logits = loaded.module.logits(TextClassBatch.from_lists(texts).to(loaded.device))
            return functional.log_softmax(logits.float(), -1).double().cpu().numpy()

    explained, shown = shown_classes(task, loaded.run, all_scores(tokens)[0], target)
    outputs = tuple(classes[i] for i in shown)
    weights = tuple(float(i == explained) for i in shown)
    box = BlackBox(lambda inputs: all_scores(inputs)[:, shown], masked.names, masked.masked, outputs, weights, SCORE)
    name = classes[explained]
    return ExplainRequest(box, name, f"log-probability of {name}", truncated=truncated, masking=masking)


def _fills(loaded: LoadedRun, text: str, target: str | None, masking: MaskingMode) -> ExplainRequest:
    if target is not None:
        raise UserError("a masked language model explains its own predictions: it takes no target")
    tokenizer, filler = loaded.tokenizers[0], loaded.filler()
    filled, mask = filler([text], top=1)[0], tokenizer.tag(MASK)
    masked = MaskedInput.of(filler.encode(text), tokenizer, masking)

    def all_scores(inputs: list[list[int]]) -> torch.Tensor:
        """Log-probabilities [B, masks, V]."""
        packed = PackedTokens.from_lists(inputs).to(loaded.device)
        with torch.inference_mode():
            logits = loaded.module.logits(SeqBatch(packed, packed, packed.ids))[packed.ids == mask]
            return functional.log_softmax(logits.float(), -1).unflatten(0, (len(inputs), -1))

    forbidden = torch.tensor(sorted({*tokenizer.forbidden(), EOS}), device=loaded.device)
    best = all_scores([masked.tokens])[0].index_fill(-1, forbidden, -1e9).argmax(-1)  # [masks]

    def mask_scores(inputs: list[list[int]]) -> Numbers:
        index = best[None, :, None].expand(len(inputs), -1, 1)
        return all_scores(inputs).gather(-1, index).squeeze(-1).double().cpu().numpy()

    def attention() -> Numbers | None:
        packed = PackedTokens.from_lists([masked.tokens]).to(loaded.device)
        positions = (packed.ids == mask).nonzero()[:, 0]
        return _self_attention(loaded, SeqBatch(packed, packed, packed.ids), positions, masked)

    outputs = tuple(guesses[0].text.strip() or "␣" for guesses in filled.guesses)
    box = BlackBox(mask_scores, masked.names, masked.masked, outputs, score=SCORE)
    about = "log-probability of the predictions for the masks"
    return ExplainRequest(box, filled.text, about, attention, False, masking)


REQUESTS: dict[str, Callable[[LoadedRun, Any, str | None, MaskingMode], ExplainRequest]] = {  # by `Task.explained`
    "translation": _translation,
    "continuation": _continuation,
    "class": _classification,
    "masks": _fills,
    "image class": image_request,
}


def _self_attention(
    loaded: LoadedRun, batch: SeqBatch, queries: slice | torch.Tensor, masked: MaskedInput
) -> Numbers | None:
    """The self-attention [parts] that each part received from these query positions, mean of layers and heads."""
    with torch.inference_mode(), Recorder(loaded.module) as recorder:
        loaded.module.logits(batch)
        layers = [attention.sentence(0).float().mean(0)[queries].sum(0) for attention in recorder.attention.values()]
    if not layers:
        return None
    received = torch.stack(layers).mean(0).double().cpu().numpy()  # [K]
    return np.array([received[positions].sum() for positions in masked.groups], np.float64)


def _with_eos(output: Sequence[int], words: list[list[int]]) -> list[list[int]]:
    """The words of an output and EOS, which the model predicts too; tags are not predicted."""
    return sorted([*words, *([position] for position, token in enumerate(output) if token == EOS)])


def _indicator(groups: Sequence[Sequence[int]], count: int) -> Numbers:
    """[tokens, groups] with ones where a token belongs to a group: sums log-probabilities of tokens to words."""
    indicator = np.zeros((count, len(groups)))
    for column, positions in enumerate(groups):
        indicator[list(positions), column] = 1.0
    return indicator
