"""From attention to links: tokens, words and rows, planted attention, and a slow reference for every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import UserError
from regard.interpret.alignments import explained_words, measure, measure_explanations
from regard.interpret.explain import Sampling
from regard.interpret.recorder import Recorder, intervene
from regard.metrics.alignment import Aligned, Gold, score_links
from regard.models import SequenceModel, build
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.tasks.aligner import (
    Aligner,
    AttentionView,
    TwoWayAligner,
    by_view,
    linked,
    most_agreeing,
    views,
    word_weights,
)
from regard.text import BOS, Tokenizer, encode_side, train
from regard.text.words import WordTokens, split_words
from regard.viz.maps import Map

TEXTS = ["The cats , the cats sat", "a Ünder-cat's é …", "sat", "", "the the the cats cats cats sat sat zebra"]
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer", "width": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 2},
    "additive": {"family": "recurrent", "attention": "bahdanau"},
    "dot": {"family": "recurrent", "attention": "luong"},
    "bilinear": {"family": "recurrent", "attention": "luong", "score": "bilinear"},
    "heads": {"family": "recurrent", "attention": "multihead", "heads": 2},
    "none": {"family": "recurrent", "attention": "none"},
    "gpt": {"family": "gpt", "width": 8, "heads": 2, "layers": 1},
}


def tokenizer(unit: str = "bpe", tags: tuple[str, ...] = ()) -> Tokenizer:
    return train(TEXTS * 3, unit, 300, tags)


def recipe(kind: str, **data: Any) -> Recipe:
    sizes = {"width": 8, "encoder_width": 8, "embedding": 6, "encoder_layers": 1, "decoder_layers": 1}
    given = SMALL[kind] if SMALL[kind]["family"] != "recurrent" else {**sizes, **SMALL[kind]}
    model = {"dropout": 0.0, "max_positions": 40, **given}
    return Recipe.model_validate({"data": {"corpus": "copy", **data}, "model": model})


def made(settings: Recipe, tokens: Tokenizer) -> SequenceModel:
    """A model with large random weights, so that its attention is uneven."""
    torch.manual_seed(3)
    model = build(settings.model, len(tokens), len(tokens), True).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model


def aligned(*texts: tuple[str, str]) -> list[Aligned]:
    """Pairs in which word n is surely linked with word n, and possibly with the next."""
    pairs = []
    for source, target in texts:
        i, j = len(source.split()), len(target.split())
        sure = [(n, n) for n in range(min(i, j))]
        pairs.append(Aligned(source, target, Gold.of(sure, [(n + 1, n) for n in range(min(i - 1, j))])))
    return pairs


# -- tokens and words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["bpe", "char", "word"])
@pytest.mark.parametrize("longest", [100, 6])
@pytest.mark.parametrize("lowercase", [False, True])
def test_tokens_equal_those_of_the_whole_text_and_belong_to_its_words(unit, longest, lowercase):
    tokens = tokenizer(unit, ("<2es>",))
    settings: dict[str, Any] = {"tag": "<2es>", "max_len": longest, "lowercase": lowercase}
    whole, cut = encode_side(tokens, TEXTS, tag="<2es>", max_len=longest, lowercase=lowercase)
    found = split_words(tokens, [f" {text}\u00a0 " for text in TEXTS], **settings)  # surrounding blanks have no effect
    assert [split.tokens for split in found] == whole
    assert [split.truncated for split in found] == cut
    for split, text in zip(found, TEXTS, strict=True):
        words = (text.lower() if lowercase else text).split()
        assert split.count == len(words) and split.words[0] == split.words[-1] == -1
        for number, word in enumerate(words if longest == 100 and unit != "word" else []):
            ids = [token for token, owner in zip(split.tokens, split.words, strict=True) if owner == number]
            assert tokens.decode(ids).strip() == word


def test_word_weights_are_sums_over_source_tokens_and_means_over_target_rows():
    # source: a tag, word 0 in two tokens, word 1, EOS; target: word 0, word 1 in two tokens, EOS
    source, target = (
        WordTokens([9, 1, 2, 3, 2], [-1, 0, 0, 1, -1], 2, False),
        WordTokens([4, 5, 6, 2], [0, 1, 1, -1], 2, False),
    )
    rows = np.array([[0.1, 0.2, 0.3, 0.4, 0], [0, 0, 0.5, 0.5, 0], [0.5, 0, 0, 0.1, 0.4], [0, 0.3, 0.3, 0, 0.4]])
    predicting, reading = word_weights(rows[None, None], source, target)[:, 0, 0]
    assert predicting == pytest.approx(np.array([[0.5, 0.4], [0.25, 0.3]]))
    assert reading == pytest.approx(np.array([[0.5, 0.5], [0.3, 0.05]]))


def test_words_beyond_a_truncation_are_not_linked():
    source, target = WordTokens([4, 5, 2], [0, 1, -1], 3, True), WordTokens([4, 2], [0, -1], 2, True)
    weights = word_weights(np.full((1, 1, 2, 3), 1 / 3), source, target)
    assert weights.shape == (2, 1, 1, 2, 3)
    assert linked(weights)[0, 0, 0].tolist() == [[True, False, False], [False, False, False]]


def test_a_link_is_the_greatest_weight_and_the_first_of_equals():
    weights = np.array([[0.2, 0.5, 0.3], [0.4, 0.1, 0.4], [0.0, 0.0, 0.0]])
    assert np.argwhere(linked(weights)).tolist() == [[0, 1], [1, 0]]


# -- planted attention -------------------------------------------------------------------------------------------------


def diagonal(weights: torch.Tensor) -> torch.Tensor:
    """Row t attends to source token t alone."""
    return torch.eye(*weights.shape[-2:]).expand_as(weights)


@pytest.mark.parametrize(
    ("kind", "taps"),
    [
        ("transformer", ["decoder.0.cross_attn.weights", "decoder.1.cross_attn.weights"]),
        ("additive", ["decoder.0.cross_attn.weights"]),
        ("dot", ["readout.cross_attn.weights"]),
        ("heads", ["readout.cross_attn.weights"]),
    ],
)
def test_attention_planted_on_the_diagonal_gives_the_links_of_the_diagonal(kind, taps):
    tokens, settings = tokenizer("word"), recipe(kind)
    corpus = aligned(("the cats sat", "the cats sat"), ("sat", "sat"), ("a the", "the a"))
    model = made(settings, tokens)
    with intervene(model, dict.fromkeys(taps, diagonal)):
        found = measure(Aligner(model, (tokens, tokens), settings), corpus)
    assert (found.sentences, found.truncated) == (3, 0)
    for view, score in found.scores.items():
        if view.rows == "predicting":
            assert (score.aer, score.links, score.recall) == (0.0, 6, 100.0)
        else:  # one row later: word j is linked with word j + 1, a possible link, and the last word with nothing
            assert (score.links, score.precision, score.recall) == (3, 100.0, 0.0)
            assert score.aer == pytest.approx(100 * (1 - 3 / (3 + 6)))
    assert found.best(found.scores) == AttentionView(0, 0, "predicting")


def test_the_one_head_that_aligns_is_found_among_others():
    tokens, settings = tokenizer("word"), recipe("transformer")
    model = made(settings, tokens)

    def last(weights: torch.Tensor) -> torch.Tensor:
        """All heads attend to the first token, except the second one, which attends to the diagonal one row later."""
        planted = torch.zeros_like(weights)
        planted[..., 0] = 1
        planted[:, 1] = torch.eye(*weights.shape[-2:]).roll(1, 0)
        return planted

    corpus = aligned(("the cats sat a", "the cats sat a"), ("sat cats the", "sat cats the"))
    with intervene(model, {"decoder.1.cross_attn.weights": last}):
        found = measure(Aligner(model, (tokens, tokens), settings), corpus)
    assert found.best(found.scores) == AttentionView(1, 1, "reading")
    assert found.scores[AttentionView(1, 1, "reading")].aer == 0


# -- every family ------------------------------------------------------------------------------------------------------

PAIRS = [
    ("the cats sat", "The cats , the cats sat"),
    ("a zebra under é", "sat"),
    ("cats", "the the sat cats"),
    ("", "the"),
    ("the cats sat sat", "a Ünder-cat's cats"),
]


def slow(
    model: SequenceModel, tokens: Tokenizer, view: AttentionView, source: str, target: str
) -> set[tuple[int, int]]:
    """One pair at a time, tokens merged as in the pictures, links found in plain Python."""
    sides, _ = encode_side(tokens, [source, target], tag=None, max_len=40, lowercase=False)
    with torch.inference_mode(), Recorder(model) as seen:
        model.logits(SeqBatch.from_lists([sides[0]], [sides[1]], bos=BOS))
        layers = [attended.sentence(0) for name, attended in seen.attention.items() if name.endswith("cross_attn")]
    weights = torch.stack(layers)
    weights = weights if view.layer is None else weights[[view.layer]]
    weights = (weights if view.head is None else weights[:, [view.head]]).mean((0, 1))
    keys, queries = tokens.token_texts(sides[0]), tokens.token_texts(sides[1])
    if view.rows == "reading":
        queries = ["<s>", *queries[:-1]]
    words = Map(weights.numpy(), tuple(queries), tuple(keys)).to_words()
    rows = [row for row, word in zip(words.weights, words.queries, strict=True) if word not in ("<s>", "</s>")]
    return {(int(row[:-1].argmax()), j) for j, row in enumerate(rows)}


@pytest.mark.parametrize("kind", ["transformer", "additive", "dot", "bilinear", "heads"])
@pytest.mark.parametrize("unit", ["bpe", "char"])
def test_every_view_of_every_family_scores_as_one_pair_at_a_time(kind, unit):
    tokens, settings = tokenizer(unit), recipe(kind)
    model, corpus = made(settings, tokens), aligned(*PAIRS)
    found = measure(Aligner(model, (tokens, tokens), settings), corpus)
    assert list(found.scores) == views(found.layers, found.heads)
    assert len(found.scores) == 2 * (found.layers * found.heads + found.layers + 1)
    assert (found.layers, found.heads) == {"transformer": (2, 2), "heads": (1, 2)}.get(kind, (1, 1))
    for view, score in found.scores.items():
        links = [slow(model, tokens, view, s, t) if s and t else set() for s, t in PAIRS]
        assert score == score_links(links, [pair.gold for pair in corpus])


@pytest.mark.parametrize("kind", ["transformer", "additive"])
def test_weights_are_independent_of_the_rest_of_the_batch(kind):
    tokens, settings = tokenizer(), recipe(kind)
    model = made(settings, tokens)
    together = {n: weights for n, weights, _ in Aligner(model, (tokens, tokens), settings).all_views(PAIRS)}
    assert sorted(together) == [0, 1, 2, 4]  # a pair with nothing on one side has no weights
    for n, weights in together.items():
        ((_, alone, cut),) = Aligner(model, (tokens, tokens), settings).all_views([PAIRS[n]])
        assert not cut and alone == pytest.approx(weights, abs=1e-5)
        assert alone.shape[-2:] == tuple(len(PAIRS[n][side].split()) for side in (1, 0))


def test_truncated_sentences_are_counted_and_texts_are_lowercased():
    tokens, settings = tokenizer("word"), recipe("dot", lowercase=True)
    corpus = aligned(("the cats " * 30, "the"), ("THE CATS", "SAT"))
    found = measure(Aligner(made(settings, tokens), (tokens, tokens), settings), corpus)
    assert (found.truncated, found.sentences) == (1, 2)
    plain = measure(Aligner(made(settings, tokens), (tokens, tokens), settings), aligned(("the cats", "sat")))
    upper = measure(Aligner(made(settings, tokens), (tokens, tokens), settings), corpus[1:])
    assert upper.scores == plain.scores


@pytest.mark.parametrize("kind", ["none", "gpt"])
def test_a_model_without_cross_attention_is_refused(kind):
    tokens, settings = tokenizer(), recipe(kind)
    with pytest.raises(UserError, match="does not attend to its source"):
        measure(Aligner(made(settings, tokens), (tokens, tokens), settings), aligned(*PAIRS))
    with pytest.raises(UserError, match="words on both sides"):
        measure(Aligner(made(settings, tokens), (tokens, tokens), settings), aligned(("", "a")))


@pytest.mark.parametrize("kind", ["transformer", "additive"])
def test_the_aligner_s_batched_weights_are_those_of_each_pair_and_view(kind):
    tokens, settings = tokenizer(), recipe(kind)
    aligner = Aligner(made(settings, tokens), (tokens, tokens), settings)
    slow_weights = {n: by_view(weights) for n, weights, _ in aligner.all_views(PAIRS)}
    for v, view in enumerate(views(*next(w.shape[1:3] for _, w, _ in aligner.all_views(PAIRS)))):
        tables = aligner(PAIRS, view)
        assert [table.shape for table in tables] == [(len(t.split()), len(s.split())) for s, t in PAIRS]
        for n, weights in slow_weights.items():
            assert tables[n] == pytest.approx(weights[v], abs=1e-5)


# -- two directions ----------------------------------------------------------------------------------------------------


def test_the_views_that_agree_best_are_found_among_planted_ones():
    links = np.eye(4, dtype=np.float32)
    other = links[[1, 0, 3, 2]]
    forward = [np.stack([links, other, links[::-1]])]  # [V, J, I]
    assert most_agreeing(forward, [np.stack([links[:, [0, 2, 1, 3]], other])]) == (1, 1, 1.0)
    uneven = np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32)  # both target words attend to source word 0
    even = np.array([[0.6, 0.4], [0.4, 0.6]], dtype=np.float32)
    assert most_agreeing([np.stack([uneven, even])]) == (1, 1, 1.0)
    # Of `uneven`, the links are (0, 0), (0, 1) from the target and (0, 1), (1, 0) from the source: one in common.
    assert most_agreeing([uneven[None]]) == (0, 0, 0.5)


def test_two_models_of_both_directions_give_links_of_both():
    tokens, settings = tokenizer(), recipe("transformer")
    forward = Aligner(made(settings, tokens), (tokens, tokens), settings)
    view, other_view = AttentionView(0, 1, "reading"), AttentionView(1, None)
    both = TwoWayAligner(forward, view, forward, other_view)
    swapped = [(target, source) for source, target in PAIRS]
    ahead, back = forward(PAIRS, view), forward(swapped, other_view)
    for n, (one, other) in enumerate(both.directions(PAIRS)):
        assert one == {(int(row.argmax()), j) for j, row in enumerate(ahead[n]) if row.size}
        assert other == {(i, int(row.argmax())) for i, row in enumerate(back[n]) if row.size}
    assert list(both(PAIRS, "intersection")) == [one & other for one, other in both.directions(PAIRS)]
    alone = TwoWayAligner(forward, view)
    for n, (_, other) in enumerate(alone.directions(PAIRS)):
        assert other == {(i, int(column.argmax())) for i, column in enumerate(ahead[n].T) if column.size}


def test_guided_heads_are_not_chosen():
    tokens, settings = tokenizer(), recipe("transformer")
    training = settings.training.model_copy(update={"guided_alignment": "links.txt"})
    guided = Aligner(made(settings, tokens), (tokens, tokens), settings.model_copy(update={"training": training}))
    plain = Aligner(guided.model, guided.tokenizers, settings)
    assert TwoWayAligner.choose(guided, None, PAIRS).view == AttentionView(0, 0, "reading")  # the last layer but one
    both = TwoWayAligner.choose(guided, plain, PAIRS)
    assert both.view == AttentionView(0, 0, "reading") and both.reverse_view in views(2, 2)
    assert TwoWayAligner.choose(plain, None, [("", "")]).view == AttentionView()


# -- explanations ------------------------------------------------------------------------------------------------------


class Echo(SequenceModel):
    """Predicts the tokens of its source, in any order, with higher probability than all others."""

    def __init__(self, size: int, louder: float = 4.0) -> None:
        super().__init__()
        self.size, self.louder = size, torch.nn.Parameter(torch.tensor(louder))

    def logits(self, batch: SeqBatch) -> torch.Tensor:
        logits = torch.zeros(len(batch.inputs.ids), self.size)
        rows = batch.inputs.layout.split(torch.arange(len(logits)))
        for source, positions in zip(batch.source.layout.split(batch.source.ids), rows, strict=True):
            logits[positions[:, None], source] = self.louder
        return logits


SHUFFLED = [("sat the cats a", "cats a sat the"), ("the zebra sat", "sat the zebra"), ("", "a"), ("a", "a")]


@pytest.mark.parametrize("masks", [1000, 60])  # all of them, or some
def test_explanations_link_the_words_that_a_planted_model_depends_on(masks: int) -> None:
    tokens, settings = tokenizer("word"), recipe("none")
    gold = [
        Gold.of([(source.split().index(word), j) for j, word in enumerate(target.split()) if word in source.split()])
        for source, target in SHUFFLED
    ]
    corpus = [Aligned(*pair, right) for pair, right in zip(SHUFFLED, gold, strict=True)]
    aligner = Aligner(Echo(len(tokens)), (tokens, tokens), settings)
    found = measure_explanations(aligner, corpus, Sampling(masks=masks))
    assert (found.aer, found.precision, found.recall, found.links) == (0, 100, 100, 8)


def test_a_word_without_positive_importances_is_not_linked_and_shares_sum_to_one() -> None:
    tokens = tokenizer("word")
    settings: dict[str, Any] = {"tag": None, "max_len": 40, "lowercase": False}
    (source,), (target,) = (split_words(tokens, [text], **settings) for text in ("a the", "cats the a"))
    shares = explained_words(Echo(len(tokens)), source, target, Sampling())
    assert shares.shape == (3, 2)
    assert shares[0].tolist() == [0, 0] and not linked(shares)[0].any()  # each hidden word leaves it more likely
    assert shares[1:].sum(1) == pytest.approx(1) and linked(shares)[1:].tolist() == [[False, True], [True, False]]


def test_words_beyond_a_truncation_are_not_masked_and_have_no_importance() -> None:
    tokens = tokenizer("word")
    (source,) = split_words(tokens, ["the cats sat"], tag=None, max_len=3, lowercase=False)
    (target,) = split_words(tokens, ["sat the"], tag=None, max_len=40, lowercase=False)
    shares = explained_words(Echo(len(tokens)), source, target, Sampling())
    assert source.truncated and shares.shape == (2, 3)
    assert linked(shares).tolist() == [[False, False, False], [True, False, False]]
