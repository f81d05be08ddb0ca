"""RISE: the exact values by hand, the estimate against them, and trained runs as black boxes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch.nn import functional

import regard
from regard import tensor_io
from regard.api import Model
from regard.errors import UserError
from regard.interpret.explain import BlackBox, Curve, Explanation, Sampling, curves, explain, stream
from regard.interpret.explain.curve import area
from regard.interpret.explain.models import MaskedInput, MaskingMode, explain_request
from regard.interpret.explain.rise import BLOCK, IndependentMasks
from regard.packed import PackedTokens, SeqBatch
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.text import BOS, EOS, UNK
from regard.text import train as learn
from regard.viz import explanation_text, explanations
from regard.viz.charts import scene as chart_scene
from regard.viz.colours import NEUTRAL, signed_rgb
from regard.viz.grid import scene
from regard.viz.scene import Group, Line, stacked
from regard.viz.terminal import Colour

Game = Callable[[frozenset[int]], float]


def played(game: Game, players: int, **settings: Any) -> Explanation:
    """The explanation of a game on sets of players."""
    return explain(lambda sets: [game(frozenset(one)) for one in sets], range(players), **settings)


def by_definition(game: Game, players: int, keep: float = 0.5) -> list[float]:
    """E[f | i in] - E[f | i out], written out over all sets of the others."""
    found = []
    for i in range(players):
        others, value = [j for j in range(players) if j != i], 0.0
        for size in range(players):
            for chosen in itertools.combinations(others, size):
                chance = keep**size * (1 - keep) ** (len(others) - size)
                value += chance * (game(frozenset({*chosen, i})) - game(frozenset(chosen)))
        found.append(value)
    return found


def random_game(players: int, seed: int) -> Game:
    """A random value for each set: interactions of every order."""
    table = np.random.default_rng(seed).normal(size=2**players)
    return lambda chosen: float(table[sum(1 << i for i in chosen)])


def rugged(players: int) -> Game:
    """Single effects and interactions of pairs and triples."""

    def game(chosen: frozenset[int]) -> float:
        alone = sum((i % 4) - 1.2 for i in chosen)
        pairs = sum(((i * j) % 5 - 2) / 3 for i, j in itertools.combinations(sorted(chosen), 2))
        return alone + pairs + 0.8 * ({0, 2, 5} <= chosen)

    assert players > 5
    return game


# -- exact -------------------------------------------------------------------------------------------------------------


def test_and_and_or_of_two_by_hand() -> None:
    # AND: with the other one in (1/2) it changes everything, else nothing. OR: just the other way round.
    assert played(lambda s: s >= {0, 1}, 2).importance.tolist() == [0.5, 0.5]
    assert played(lambda s: bool(s & {0, 1}), 2).importance.tolist() == [0.5, 0.5]
    # with other chances: AND needs the other one in (p), OR needs it out (1 - p)
    assert played(lambda s: s >= {0, 1}, 2, keep=0.8).importance == pytest.approx([0.8, 0.8])
    assert played(lambda s: bool(s & {0, 1}), 2, keep=0.8).importance == pytest.approx([0.2, 0.2])


def test_banzhaf_values_of_a_weighted_vote_by_hand() -> None:
    # 2, 1 and 1 votes, 3 needed: the big one decides unless both others are out; a small one only with big and alone
    votes = [2, 1, 1]
    found = played(lambda s: float(sum(votes[i] for i in s) >= 3), 3)
    assert found.importance.tolist() == [0.75, 0.25, 0.25]
    assert found.exact and found.calls == 8 and found.error.tolist() == [0.0, 0.0, 0.0]
    assert (found.whole, found.nothing) == (1.0, 0.0)


@pytest.mark.parametrize("keep", [0.5, 0.2, 0.9])
@pytest.mark.parametrize("players", [1, 2, 5])
def test_enumeration_is_the_definition(players: int, keep: float) -> None:
    game = random_game(players, seed=players)
    assert played(game, players, keep=keep).importance == pytest.approx(by_definition(game, players, keep), abs=1e-12)


def test_masks_are_enumerated_if_that_takes_no_more_calls() -> None:
    assert played(len, 4, masks=16).exact and not played(len, 4, masks=14).exact
    assert played(len, 4, masks=4, exact=True).exact and not played(len, 4, exact=False).exact
    with pytest.raises(UserError, match="13 parts"):
        played(len, 13, exact=True)


# -- estimated ---------------------------------------------------------------------------------------------------------


def test_a_mask_depends_on_its_seed_and_number_alone() -> None:
    sampling = Sampling(seed=7)
    together = IndependentMasks(9).draw(range(200), sampling)
    apart = np.concatenate([IndependentMasks(9).draw([number], sampling) for number in range(200)])
    assert (together == apart).all()
    assert (together != IndependentMasks(9).draw(range(200), Sampling(seed=8))).any()


def test_parts_are_kept_independently_and_with_the_given_probability() -> None:
    for keep, antithetic in itertools.product([0.5, 0.3], [True, False]):
        masks = IndependentMasks(6).draw(range(20000), Sampling(keep=keep, antithetic=antithetic))
        assert masks.mean(0) == pytest.approx([keep] * 6, abs=0.02)
        spread = np.cov(masks.T.astype(float))
        assert spread == pytest.approx(np.eye(6) * keep * (1 - keep), abs=0.015)


def test_the_masks_of_a_pair_are_complements() -> None:
    masks = IndependentMasks(20).draw(range(64), Sampling())
    assert (masks[0::2] == ~masks[1::2]).all()
    rare = IndependentMasks(20).draw(range(64), Sampling(keep=0.2))
    assert not (rare[0::2] & rare[1::2]).any()  # one number and what it lacks to 1 are never both below 0.2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("keep", "antithetic"), [(0.5, True), (0.5, False), (0.7, True), (0.3, False)])
def test_the_estimate_agrees_with_the_enumeration_within_its_error_bars(
    keep: float, antithetic: bool, seed: int
) -> None:
    game = rugged(9)
    truth = played(game, 9, keep=keep, exact=True)
    found = played(game, 9, keep=keep, exact=False, masks=600, antithetic=antithetic, seed=seed)
    assert not found.exact and found.calls == 602 and (found.error > 0).all()
    assert (np.abs(found.importance - truth.importance) <= 4 * found.error).all()


@pytest.mark.parametrize(("keep", "antithetic"), [(0.5, True), (0.5, False), (0.3, True)])
def test_standard_errors_match_the_errors(keep: float, antithetic: bool) -> None:
    """Over many seeds, error / standard error has mean square 1."""
    game = rugged(7)
    truth = played(game, 7, keep=keep, exact=True).importance
    runs = [played(game, 7, keep=keep, exact=False, masks=400, antithetic=antithetic, seed=s) for s in range(60)]
    ratios = np.array([(run.importance - truth) / run.error for run in runs])
    assert 0.8 < (ratios**2).mean() < 1.25
    assert abs(ratios.mean()) < 0.25


def test_pairs_are_no_worse_than_as_many_single_masks() -> None:
    for game in (rugged(8), lambda s: 100.0 + len(s) ** 2):
        spread = {
            antithetic: np.var(
                [played(game, 8, exact=False, masks=200, antithetic=antithetic, seed=s).importance for s in range(30)],
                axis=0,
            ).mean()
            for antithetic in (True, False)
        }
        assert spread[True] <= spread[False]


def test_an_additive_function_is_explained_without_error() -> None:
    found = played(lambda s: 3.0 + sum(i - 4 for i in s), 20, masks=300)
    assert found.importance == pytest.approx(np.arange(20) - 4.0, abs=1e-9)
    assert found.error.max() < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_the_words_that_a_planted_model_depends_on_rank_first(seed: int) -> None:
    sentence = "the film was not at all good but the music by my friends made me happy anyway"

    def mood(texts: list[str]) -> list[float]:
        words = [text.split() for text in texts]
        return [("good" in w) * (-2.0 if "not" in w else 2.0) + 3.0 * ("happy" in w) for w in words]

    found = explain(mood, sentence, seed=seed)
    names = found.features
    # happy: 3 always; not: -4 when good is there (1/2); good: +2 and -2 in turn, which cancel
    planted = {"happy": 3.0, "not": -2.0}
    strongest = sorted(range(len(names)), key=lambda i: -abs(found.importance[i]))
    assert {names[i] for i in strongest[:2]} == set(planted)
    assert names[found.order[0]] == "happy" and names[found.order[-1]] == "not"
    for name, value, error in zip(names, found.importance, found.error, strict=True):
        assert abs(value - planted.get(name, 0.0)) <= 4 * error + 1e-9, name


def test_batch_size_changes_nothing() -> None:
    games = (rugged(14), rugged(8))
    for game, players in zip(games, (14, 8), strict=True):
        for settings in ({"exact": False}, {"tolerance": 0.2, "exact": False}, {"keep": 0.4, "exact": False}, {}):
            if players > 12 and not settings:
                continue
            found = [played(game, players, masks=300, batch=batch, **settings) for batch in (1, 7, 64, 1000)]
            for other in found[1:]:
                assert (other.importance == found[0].importance).all() and (other.error == found[0].error).all()
                assert other.calls == found[0].calls


def test_inputs_are_made_batch_by_batch() -> None:
    sizes: list[int] = []

    def asked(inputs: list[Any]) -> list[float]:
        sizes.append(len(inputs))
        return [float(len(one)) for one in inputs]

    explain(asked, range(30), masks=1000, batch=50)
    assert max(sizes) == 50 and sum(sizes) == 1002


def test_sampling_stops_when_the_standard_errors_reach_the_tolerance() -> None:
    game = rugged(14)
    box = BlackBox.of(lambda sets: [game(frozenset(one)) for one in sets], range(14))
    running = list(stream(box, Sampling(masks=2000)))
    assert [one.calls for one in running] == [min(BLOCK * (k + 1), 2000) + 2 for k in range(len(running))]
    longest = [one.error.max() for one in running]
    assert longest[-1] < longest[0] / 3
    limit = longest[4]
    stopped = explain(box, masks=2000, tolerance=limit)
    assert stopped.calls == running[4].calls and (stopped.importance == running[4].importance).all()
    assert explain(box, masks=400, tolerance=1e-9).calls == 402


def test_several_outputs_are_explained_at_once() -> None:
    def two(sets: list[list[int]]) -> np.ndarray:
        return np.array([[len(one), 3.0 * (0 in one)] for one in sets])

    for settings in ({"exact": True}, {"exact": False, "masks": 500}):
        found = explain(two, range(3), outputs=("size", "zero"), **settings)
        assert found.outputs == ("size", "zero") and found.importance.shape == (3, 2)
        assert found.importance == pytest.approx(np.array([[1, 3], [1, 0], [1, 0]]), abs=1e-9)
        assert found.overall == pytest.approx([4, 1, 1], abs=1e-9)
        assert (found.whole, found.nothing) == (6.0, 0.0)
    box = BlackBox.of(two, range(3), outputs=("size", "zero"), weights=(0.0, 1.0))
    assert explain(box).overall.tolist() == [3.0, 0.0, 0.0]


def test_hidden_words_are_left_out_or_replaced() -> None:
    seen: set[str] = set()
    explain(lambda texts: seen.update(texts) or [0.0] * len(texts), "a b")
    assert seen == {"", "a", "b", "a b"}
    seen.clear()
    explain(lambda texts: seen.update(texts) or [0.0] * len(texts), "a b", hidden="_")
    assert seen == {"_ _", "a _", "_ b", "a b"}
    lists: list[list[int]] = []
    explain(lambda inputs: lists.extend(inputs) or [0.0] * len(inputs), [4, 5])
    assert sorted(lists) == [[], [4], [4, 5], [5]]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda inputs: [0.0], r"shape \(1,\)"),
        (lambda inputs: [float("nan")] * len(inputs), "not a finite number"),
        (lambda inputs: 1.0, "shape"),
    ],
)
def test_invalid_scores_are_refused(answer: Callable, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        explain(answer, "a b c")


def test_invalid_settings_are_refused() -> None:
    for settings in ({"keep": 0.0}, {"keep": 1.0}, {"masks": 3}, {"batch": 0}, {"tolerance": 0.0}):
        with pytest.raises(UserError):
            Sampling(**settings)
    with pytest.raises(UserError, match="nothing to explain"):
        explain(lambda inputs: [0.0] * len(inputs), "")
    with pytest.raises(TypeError, match="features"):
        explain(lambda inputs: [0.0])


# -- curves ------------------------------------------------------------------------------------------------------------


def test_areas_by_hand() -> None:
    assert area([0, 1], [1.0, 1.0]) == 1.0 and area([0, 1], [0.0, 1.0]) == 0.5
    assert area([0, 1, 2, 3], [4.0, 2.0, 1.0, 0.0]) == pytest.approx((3 + 1.5 + 0.5) / 3)
    assert area([0, 1, 3], [4.0, 2.0, 0.0]) == pytest.approx((3 + 2 * 1) / 3)  # the second step is twice as long


def test_the_area_of_a_line_is_half_its_height_where_steps_differ() -> None:
    """A score that is the number of parts shown falls on a straight line, of 100 parts in 64 steps of 1 or 2 parts."""
    box = BlackBox(lambda masks: [float(sum(shown)) for shown in masks], tuple(map(str, range(100))), tuple)
    (curve,) = curves(box, {"order": np.arange(100.0)}, shuffles=0)
    assert set(np.diff(curve.counts)) == {1, 2} and len(curve.counts) == 65
    np.testing.assert_array_equal(curve.deletion, 100.0 - curve.counts)
    np.testing.assert_array_equal(curve.insertion, curve.counts)
    assert curve.deletion_area == curve.insertion_area == pytest.approx(50)


def test_curves_of_a_sum_by_hand() -> None:
    worth = np.array([1.0, 4.0, 2.0])
    box = BlackBox.of(lambda sets: [worth[one].sum() for one in sets], [0, 1, 2])
    best, worst, chance = curves(box, {"best": worth, "worst": -worth}, shuffles=400)
    assert (best.name, worst.name, chance.name) == ("best", "worst", "random order")
    assert best.deletion.tolist() == [7, 3, 1, 0] and best.insertion.tolist() == [0, 4, 6, 7]
    assert worst.deletion.tolist() == [7, 6, 4, 0] and worst.insertion.tolist() == [0, 1, 3, 7]
    assert best.deletion_area == pytest.approx(7.5 / 3) and best.insertion_area == pytest.approx(13.5 / 3)
    # at random every part is equally likely to come next: a straight line
    assert chance.deletion == pytest.approx([7, 14 / 3, 7 / 3, 0], abs=0.2)
    assert chance.insertion == pytest.approx(7 - chance.deletion)
    deletion, insertion = explanations.curve_charts([best, worst, chance], "score")
    assert [point.y for point in deletion.series[0].points] == [7, 3, 1, 0] and len(insertion.series) == 3


# -- runs as black boxes -----------------------------------------------------------------------------------------------

LINES = ["the cat sat on the mat", "a small bird sang", "the dog ran", "cats and dogs sang loudly"]


def made(path: Path, model: dict[str, Any], unit: str = "bpe", tags: Sequence[str] = (), **data: Any) -> Model:
    """A run with large random weights, so that words have different effects."""
    sections = {"data": {"corpus": "copy", **data} if "text" not in data else data, "model": model}
    recipe = Recipe.model_validate({**sections, "text": {"unit": unit}})
    run = RunDir.create(path, recipe)
    tokenizer = learn(LINES * 3, unit, 330 if unit != "word" else 40, tags)
    run.save_tokenizers(tokenizer, tokenizer)
    if model.get("task") == "classify":
        run.save_classes(["bad", "dull", "good"])
    torch.manual_seed(3)
    fresh = run.fresh_model()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    tensor_io.save(run.best, tensor_io.model_tensors(fresh), {})
    return regard.load(path, device="cpu")


SIZES = {"width": 16, "heads": 2, "ffn_width": 24, "dropout": 0.0, "max_positions": 40}
TRANSFORMER = {**SIZES, "family": "transformer", "encoder_layers": 1, "decoder_layers": 1}
GPT = {**SIZES, "family": "gpt", "layers": 1}
BERT = {**SIZES, "family": "bert", "layers": 1}


@pytest.fixture(scope="module")
def translating(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("explain") / "run"
    tags = ["<from>", "<to>"]
    return made(path, TRANSFORMER, tags=tags, source_tag="<from>", target_tag="<to>")


@pytest.mark.parametrize("how", ["unknown", "drop"])
def test_a_word_is_hidden_with_all_its_tokens_and_special_tokens_never_are(translating: Model, how: str) -> None:
    tokenizer = translating.run.tokenizers[0]
    sentence = "the zebra ran <from> </s>"  # text that looks like a special token stays text
    tokens = translating.translator().encode([sentence])[0][0]
    reading = MaskedInput.of(tokens, tokenizer, MaskingMode(how))
    assert reading.names == ("the", "zebra", "ran", "<from>", "</s>")
    assert len(reading.groups[1]) > 1  # several tokens
    assert reading.masked([True] * 5) == tokens
    tag, *inside, end = tokens
    assert (tag, end) == (tokenizer.tag("<from>"), EOS)
    nothing = reading.masked([False] * 5)
    assert nothing == ([tag, end] if how == "drop" else [tag, *[UNK] * len(inside), end])
    without = reading.masked([True, False, True, True, True])
    pieces = len(tokenizer.encode(" zebra"))
    before, after = tokenizer.encode("the"), tokenizer.encode(" ran <from> </s>")
    assert without == [tag, *before, *([] if how == "drop" else [UNK] * pieces), *after, end]


def test_words_whose_tokens_share_a_character_are_labelled_whole(translating: Model) -> None:
    tokenizer = translating.run.tokenizers[0]
    tokens = tokenizer.encode("naïve café 😀 мир\u3000世界 ⟨c3⟩⟨af⟩")
    words = MaskedInput.of(tokens, tokenizer, MaskingMode())
    assert words.names == ("naïve", "café", "😀", "мир", "世界", "⟨c3⟩⟨af⟩")
    pieces = MaskedInput.of(tokens, tokenizer, MaskingMode(unit="tokens"))
    assert pieces.names[tokenizer.decode(tokens[:3]).index("\ufffd") :][:2] == ("⟨c3⟩", "⟨af⟩")


def test_tokens_and_spans_instead_of_words(translating: Model) -> None:
    tokenizer = translating.run.tokenizers[0]
    tokens = translating.translator().encode(["the cat sat on zebras"])[0][0]
    pieces = MaskedInput.of(tokens, tokenizer, MaskingMode(unit="tokens"))
    assert pieces.groups == [[index] for index in range(1, len(tokens) - 1)]
    spans = MaskedInput.of(tokens, tokenizer, MaskingMode(span=2))
    assert [name.strip("␣").replace("␣", " ") for name in spans.names] == ["the cat", "sat on", "zebras"]
    assert [index for group in spans.groups for index in group] == list(range(1, len(tokens) - 1))


def test_unknown_words_are_words(tmp_path: Path) -> None:
    model = made(tmp_path / "run", TRANSFORMER, unit="word")
    tokens = model.translator().encode(["the xyzzy cat"])[0][0]
    assert tokens[1] == UNK
    reading = MaskedInput.of(tokens, model.run.tokenizers[0], MaskingMode("drop"))
    assert len(reading.groups) == 3 and reading.masked([True, False, True]) == [tokens[0], *tokens[2:]]


@pytest.mark.parametrize("how", ["unknown", "drop"])
@pytest.mark.parametrize("exact", [True, False])
def test_the_matrix_of_a_translation_equals_a_slow_loop(translating: Model, how: str, exact: bool) -> None:
    source, target = "the cat sat", "a small zebra"
    source_side, target_side = translating.run.tokenizers
    tag, to = source_side.tag("<from>"), target_side.tag("<to>")
    words = [source_side.encode(word) for word in ("the", " cat", " sat")]
    said = [[to], *(target_side.encode(word) for word in ("a", " small", " zebra")), [EOS]]

    def slow(keep: Sequence[bool]) -> list[float]:
        """Return log-probabilities of the target words, token by token, in a batch of one."""
        hidden = [
            word if kept else [UNK] * len(word) * (how == "unknown") for word, kept in zip(words, keep, strict=True)
        ]
        ids = [tag, *(token for word in hidden for token in word), EOS]
        history, found = [BOS], []
        for word in said:
            total = 0.0
            for token in word:
                batch = SeqBatch.from_lists([ids], [[*history[1:], EOS]], bos=BOS)
                with torch.no_grad():
                    total += float(functional.log_softmax(translating.module.logits(batch)[-1], -1)[token])
                history.append(token)
            found.append(total)
        return found[1:]  # the tag is given, not chosen

    masks = list(itertools.product([True, False], repeat=3))
    scores = {mask: np.array(slow(mask)) for mask in masks}
    expected = [
        np.mean([scores[m] for m in masks if m[i]], 0) - np.mean([scores[m] for m in masks if not m[i]], 0)
        for i in range(3)
    ]
    found = translating.explain(source, target=target, how=how, exact=exact, masks=400)  # type: ignore[arg-type]
    assert found.features == ("the", "cat", "sat") and found.outputs == ("a", "small", "zebra", "</s>")
    if exact:
        assert found.importance == pytest.approx(np.array(expected), abs=2e-5)
        assert found.overall == pytest.approx(np.array(expected).sum(1), abs=1e-4)
    else:
        assert (np.abs(found.importance - np.array(expected)) <= 4 * found.error + 2e-5).all()
    assert found.whole == pytest.approx(scores[True, True, True].sum(), abs=1e-4)
    assert found.nothing == pytest.approx(scores[False, False, False].sum(), abs=1e-4)


def test_batch_size_changes_explanations_only_by_rounding(translating: Model) -> None:
    found = [translating.explain("the cat sat on the mat", exact=False, masks=60, batch=b) for b in (1, 5, 60)]
    for other in found[1:]:
        assert other.importance == pytest.approx(found[0].importance, abs=1e-4)
        assert other.error == pytest.approx(found[0].error, abs=1e-4)


def test_the_models_own_output_is_explained_unless_a_target_is_given(translating: Model) -> None:
    asked = explain_request(translating, "the cat sat")
    translation = translating.translate("the cat sat")
    assert asked.output == translation.text
    found = asked.explain()
    assert found.whole == pytest.approx(sum(translation._answer.hypotheses[0].logprobs[1:]), abs=1e-3)
    assert asked.output in found.title
    attention = asked.attention()
    assert attention is not None and attention.shape == (3,) and (attention >= 0).all()
    assert attention.sum() <= len(translation.tokens) + 1e-5


@pytest.mark.parametrize("documents", ["line", "stream"])
@pytest.mark.parametrize("how", ["unknown", "drop"])
def test_prompt_by_continuation(tmp_path: Path, documents: str, how: str) -> None:
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    model = made(tmp_path / "run", GPT, text=str(tmp_path / "text.txt"), documents=documents)
    tokenizer = model.run.tokenizers[0]
    found = model.explain("the cat", target=" sat on", how=how)  # type: ignore[arg-type]
    assert found.features == ("the", "cat") and found.outputs == ("sat", "on") and found.exact
    front = [BOS] if documents == "line" else []
    the, cat, sat, on = (tokenizer.encode(word) for word in ("the", " cat", " sat", " on"))

    def logp(prompt: list[int]) -> np.ndarray:
        """Of the two words after a prompt."""
        prompt = prompt or tokenizer.encode("\n")  # a stream's text begins after a line
        ids = [*prompt, *sat, *on]
        row = PackedTokens.from_lists([ids])
        with torch.no_grad():
            logits = model.module.logits(SeqBatch(PackedTokens.from_lists([[]]), row, row.ids))
        each = [float(functional.log_softmax(logits[k - 1], -1)[ids[k]]) for k in range(len(prompt), len(ids))]
        return np.array([sum(each[: len(sat)]), sum(each[len(sat) :])])

    def blank(word: list[int]) -> list[int]:
        return [UNK] * len(word) if how == "unknown" else []

    both, first = logp([*front, *the, *cat]), logp([*front, *the, *blank(cat)])
    second, none = logp([*front, *blank(the), *cat]), logp([*front, *blank(the), *blank(cat)])
    expected = np.array([(both + first - second - none) / 2, (both + second - first - none) / 2])
    assert found.importance == pytest.approx(expected, abs=2e-5)
    assert found.whole == pytest.approx(both.sum(), abs=1e-4)
    own = explain_request(model, "the cat")
    assert own.output == model.generate("the cat", tokens=12, method="beam", beam=1).text
    attention = (
        own.attention()
    )  # of every written token to the prompt: at most one each, the BOS token's share left out
    assert attention is not None and attention.shape == (2,) and (attention > 0).all() and attention.sum() < 12
    with pytest.raises(UserError, match="the model can write"):
        explain_request(model, "the cat", target=" sat" * 40)


def test_text_by_class(tmp_path: Path) -> None:
    model = made(tmp_path / "run", {**BERT, "task": "classify"})
    found = model.explain("the dog ran")
    assert sorted(found.outputs) == ["bad", "dull", "good"] and found.importance.shape == (3, 3)
    assert model.predict("the dog ran").label == found.outputs[0]
    assert (found.overall == found.importance[:, 0]).all()
    bad = model.explain("the dog ran", target="bad")
    assert (bad.overall == bad.importance[:, bad.outputs.index("bad")]).all()
    # the classes' probabilities sum to one, whatever is hidden
    asked = explain_request(model, "the dog ran")
    scores = np.asarray(asked.box.function([asked.box.masked([True, False, True])]))
    assert np.exp(scores).sum() == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(UserError, match="'bleak' is not a class"):
        model.explain("the dog ran", target="bleak")


def test_text_by_mask(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    model = made(tmp_path / "run", {**BERT, "task": "fill"}, tags=["<mask>"], text=str(tmp_path / "text.txt"))
    sentence = "the [MASK] ran and [MASK]"
    best = model.fill(sentence)
    found = model.explain(sentence, how="drop")
    assert found.features == ("the", "ran", "and") and found.importance.shape == (3, 2)
    assert found.whole == pytest.approx(sum(np.log(gap[0].probability) for gap in best.guesses), abs=1e-4)
    with pytest.raises(UserError, match=r"no \[MASK\]"):
        model.explain("the cat")


def test_inputs_that_cannot_be_explained_are_refused(translating: Model) -> None:
    with pytest.raises(UserError, match="blank"):
        translating.explain("  ")
    with pytest.raises(UserError, match="how = 'erase'"):
        translating.explain("the cat", how="erase")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="span = 0"):
        translating.explain("the cat", span=0)


# -- pictures ----------------------------------------------------------------------------------------------------------


def small(exact: bool = True) -> Explanation:
    importance = np.array([[2.0, -1.0], [0.0, 0.5], [-0.25, 1.0]])
    error = np.zeros((3, 2)) if exact else np.full((3, 2), 0.2)
    return Explanation(
        ("the", "<b>&", "sat"), importance, error, importance.sum(1), error.sum(1), 1.0, 0.0, 8, exact, ("el", "gato"),
        title="What “x” depended on",
    )  # fmt: skip


def test_shares_are_normalised_positive_importances() -> None:
    assert small().shares() == pytest.approx(np.array([[1, 0, 0], [0, 1 / 3, 2 / 3]]))


def test_signed_colours_and_numbers() -> None:
    assert signed_rgb(1.0) == (0x00, 0x72, 0xB2) and signed_rgb(-1.0) == (0xD5, 0x5E, 0x00)
    assert signed_rgb(0.0) == NEUTRAL and signed_rgb(-7.0) == signed_rgb(-1.0)
    assert (explanations.number(1.239), explanations.number(-0.5), explanations.number(-0.001)) == (
        "+1.24",
        "−0.50",
        "0.00",
    )
    assert (explanations.number(-15.93), explanations.number(9.996), explanations.number(123.4)) == (
        "−15.9",
        "+10.0",
        "+123",
    )


def test_the_matrix_has_a_coloured_cell_for_each_number() -> None:
    root = ElementTree.fromstring(explanations.draw(small()))
    cells = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r)]
    assert len(cells) == 6
    assert cells[0].get("fill") == "#0072b2" and cells[0][0].text == "el depends on the: +2.00"
    half = "#{:02x}{:02x}{:02x}".format(*signed_rgb(-0.5))
    assert cells[3].get("fill") == half and cells[3][0].text == "gato depends on the: −1.00"
    assert "<b>&" in {t.text for t in root.iter("{http://www.w3.org/2000/svg}text")}


def test_a_long_title_is_shortened_to_the_card() -> None:
    for drawing in (lambda found: scene(explanations.matrix(found)), explanations.bars):
        root = ElementTree.fromstring(drawing(replace(small(), title="a very long story " * 30)).svg())
        title = next(t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text"))
        assert title.startswith("a very long") and title.endswith("…") and float(root.get("width", "")) < 900


def test_bars_have_error_bars_and_pictures_can_be_stacked() -> None:
    drawn = explanations.bars(small(exact=False))
    whiskers = [item for item in drawn.items if isinstance(item, Line) and item.stroke == "card"]
    assert len(whiskers) == 3 and "two standard errors" in drawn.svg()
    curve = Curve("importance", np.arange(3), np.array([2.0, 1.0, 0.0]), np.array([0.0, 1.0, 2.0]))
    below = stacked([drawn, *map(chart_scene, explanations.curve_charts([curve], "score"))])
    assert all(isinstance(item, Group) for item in below.items) and len(below.items) == 3
    offsets = [item.y for item in below.items if isinstance(item, Group)]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[1] > 100
    ElementTree.fromstring(below.svg())


@pytest.mark.parametrize("colour", ["none", "256", "truecolor"])
@pytest.mark.parametrize("width", [10, 20, 30, 80])
def test_the_matrix_in_a_terminal_keeps_to_its_width(colour: Colour, width: int) -> None:
    drawn = explanation_text.matrix(small(), width=width, colour=colour)
    plain = re.sub("\x1b\\[[0-9;]*m", "", drawn)
    assert (plain == drawn) == (colour == "none")
    assert max(map(len, plain.splitlines())) <= max(width, 12)
    rows = [line for line in plain.splitlines() if line.lstrip().startswith(("el ", "gato "))]
    assert [row.count("−") for row in rows] == [1, 1]
    if width >= 30:
        assert [row.split()[1:] for row in rows] == [["+2.00", "−0.25"], ["−1.00", "+0.50", "+1.00"]]


@pytest.mark.parametrize("exact", [True, False])
def test_bars_in_a_terminal_keep_to_its_width(exact: bool) -> None:
    for width in (40, 60, 120):
        lines = explanation_text.bars(small(exact), width=width, colour="none").splitlines()
        assert [line.split()[:2] for line in lines] == [["the", "+1.00"], ["<b>&", "+0.50"], ["sat", "+0.75"]]
        assert max(map(len, lines)) <= width
        assert all(("± 0.40" in line) == ("░" in line) == (not exact) for line in lines)


def test_a_bar_points_in_the_direction_of_its_sign() -> None:
    found = Explanation(("up", "down"), *(np.array([2.0, -1.0]), np.zeros(2)) * 2, 1.0, 0.0, 4, True)
    up, down = explanation_text.bars(found, width=60, colour="none").splitlines()
    assert up.index("│") < up.index("█") and down.index("│") > down.index("█")
    assert up.count("█") == pytest.approx(2 * down.count("█"), abs=1)
