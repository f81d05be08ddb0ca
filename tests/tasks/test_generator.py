"""What follows a prompt: the same alone and in a batch, within the context, up to a stop string."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from causal import Causal
from regard.decoding.sampling import fold
from regard.errors import UserError
from regard.recipes.schema import DecodingSettings, Recipe
from regard.tasks.generator import Generation, Generator, generation_settings, stable_part, until_stop
from regard.text import BOS, EOS, Tokenizer, encode_stream, train

TEXT = ["the cat sat on the mat and the rat sat on the cat", "é è ü"]
LETTERS = train(TEXT, "char", 270)
WORDS = train(TEXT, "word", 260)
PROMPTS = ["the cat", "", "the rat sat on the mat and the cat sat on", "on", "a\nb", "the cat"]
SAMPLED = DecodingSettings(method="sample", temperature=1.2)
GREEDY = DecodingSettings(method="beam", beam=1)


def continuer(tokenizer: Tokenizer = LETTERS, longest: int = 16, stream: bool = False, **more: object) -> Generator:
    model = Causal(len(tokenizer), longest, sharpness=3.0)
    usual = {"model": model, "tokenizer": tokenizer, "settings": SAMPLED, "longest": longest, "stream": stream}
    return Generator(**{**usual, **more})  # type: ignore[arg-type]


KINDS = [(LETTERS, False), (LETTERS, True), (WORDS, False), (WORDS, True)]
kinds = pytest.mark.parametrize(("tokenizer", "stream"), KINDS, ids=["letters", "stream", "words", "stream of words"])


def outcome(found: Generation) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(text, h.tokens, h.finished) for text, h in zip(found.texts, found.hypotheses, strict=True)]


# --- which tokens ---------------------------------------------------------------------------------------------------


def one_by_one(continue_: Generator, prompt: str, tokens: int) -> list[int]:
    """Greedy tokens, each from a forward pass over the whole context: the slow twin of caching and continuing.

    A view is the begin mark (in documents) and all tokens; once those do not fit, the last half of the context's worth,
    which then grows again until it does not fit.
    """
    tokenizer, stream, model = continue_.tokenizer, continue_.stream, continue_.model
    assert isinstance(model, Causal)
    words = stream and tokenizer.unit == "word"
    mark = [] if stream else [BOS]
    view = mark + (encode_stream(tokenizer, prompt) if stream else tokenizer.encode(prompt))
    view = view or ([EOS] if words else tokenizer.encode("\n"))
    banned = {*range(tokenizer.first), EOS} - (set() if stream and not words else {EOS})
    written: list[int] = []
    for _ in range(tokens):
        if len(view) > continue_.longest:
            view = mark + view[-(continue_.longest // 2) :]
        logits = model.after(view)
        best = max((float(logits[t]), -t) for t in range(len(tokenizer)) if t not in banned)
        token = -best[1]
        if token == EOS and not words:
            break
        written.append(token)
        view.append(token)
    return written


@kinds
@pytest.mark.parametrize("longest", [4, 7, 16, 100])
def test_greedy_equals_one_token_at_a_time(tokenizer: Tokenizer, stream: bool, longest: int) -> None:
    for seed in range(3):
        model = Causal(len(tokenizer), longest, seed, sharpness=3.0)
        continue_ = continuer(tokenizer, longest, stream, settings=GREEDY, model=model)
        for prompt, found in zip(PROMPTS, continue_(PROMPTS, tokens=25), strict=True):
            assert list(found.hypotheses[0].tokens) == one_by_one(continue_, prompt, 25)


@kinds
@pytest.mark.parametrize(
    "settings", [SAMPLED, DecodingSettings(method="sample", repetition_penalty=1.5, top_k=9), GREEDY]
)
def test_a_prompt_has_the_same_continuation_in_a_batch_and_alone(
    tokenizer: Tokenizer, stream: bool, settings: DecodingSettings
) -> None:
    samples = 3 if settings.method == "sample" else 1
    continue_ = continuer(tokenizer, 9, stream, settings=settings, seed=5)
    together = continue_(PROMPTS, samples=samples, tokens=20)
    small = replace(continue_, settings=settings.model_copy(update={"batch_tokens": 20}))
    assert list(map(outcome, small(PROMPTS, samples=samples, tokens=20))) == list(map(outcome, together))
    for line, prompt in enumerate(PROMPTS):
        (alone,) = continue_([prompt], samples=samples, tokens=20, first=line)
        assert outcome(alone) == outcome(together[line])


def test_draws_differ_by_seed_line_sample_and_turn() -> None:
    found = continuer(longest=6)(["a", "a"], samples=2, tokens=60)
    texts = [text for one in found for text in one.texts]
    assert len(set(texts)) == 4
    assert outcome(replace(continuer(longest=6), seed=1)(["a"], tokens=60)[0]) != outcome(found[0])[:1]
    assert len({fold(line, sample, turn) for line in range(9) for sample in range(9) for turn in range(9)}) == 729


@kinds
def test_more_tokens_or_samples_do_not_change_the_first_ones(tokenizer: Tokenizer, stream: bool) -> None:
    continue_ = continuer(tokenizer, 8, stream)
    few, many = continue_(PROMPTS, tokens=7), continue_(PROMPTS, tokens=30, samples=3)
    for short, long in zip(few, many, strict=True):
        assert long.hypotheses[0].tokens[:7] == short.hypotheses[0].tokens
        assert len(long.hypotheses[0].tokens) <= 30 and len(long.texts) == 3


def test_a_prompt_longer_than_the_context_loses_its_beginning() -> None:
    continue_ = continuer(longest=8, settings=GREEDY)  # a begin mark and 7 letters
    fits, long, half = continue_(["atandat", "the rat sat", " sat"], tokens=5)
    assert [one.truncated for one in (fits, long, half)] == [False, True, False]
    assert long.text == half.text  # the last 4 of 8
    assert long.prompt == "the rat sat"
    assert [one.truncated for one in continuer(longest=8, stream=True)(["12345678", "123456789"], tokens=1)] == [
        False,
        True,
    ]


def test_special_tokens_are_never_generated_but_newlines_are() -> None:
    tagged = train(TEXT, "char", 270, tags=["<2de>"])
    for stream in (False, True):
        found = continuer(tagged, stream=stream, settings=DecodingSettings(method="sample", temperature=50))(
            PROMPTS * 20, tokens=40
        )
        written = {token for one in found for h in one.hypotheses for token in h.tokens}
        assert min(written) == tagged.first  # the first piece is the byte 0, and every piece is drawn some time
        assert tagged.encode("\n")[0] in written
    assert not any(h.finished for one in found for h in one.hypotheses)  # a stream does not end


def test_log_probabilities_are_those_of_the_tokens() -> None:
    continue_ = continuer(longest=100)
    for one in continue_(PROMPTS, tokens=12):
        (h,) = one.hypotheses
        view, total = [BOS, *LETTERS.encode(one.prompt)], 0.0
        for token, logprob in zip([*h.tokens, EOS], h.logprobs, strict=False):
            assert float(continue_.model.after(view).log_softmax(-1)[token]) == pytest.approx(logprob, abs=1e-5)
            view, total = [*view, token], total + logprob
        assert len(h.logprobs) == len(h.tokens) + h.finished
        assert h.score == pytest.approx(total / ((5 + len(h.logprobs)) / 6) ** 0.6, abs=1e-5)


# --- which text -----------------------------------------------------------------------------------------------------


def test_words_are_separated_from_the_prompt_and_eos_is_a_newline() -> None:
    found = continuer(WORDS, stream=True)(["the cat", "the cat ", "the cat\n", ""], tokens=40, samples=8)
    assert any("\n" in text for one in found for text in one.texts)
    for one in found:
        for text, h in zip(one.texts, one.hypotheses, strict=True):
            assert len(h.tokens) == 40
            assert text.count("\n") == h.tokens.count(EOS)
            assert text.split() == WORDS.decode(h.tokens).split()
            assert text[:1] == " " if one.prompt == "the cat" and h.tokens[0] != EOS else text[:1] != " "


@pytest.mark.parametrize("longest", [6, 100])
@kinds
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, stream: bool, longest: int) -> None:
    continue_ = continuer(tokenizer, longest, stream)
    (whole,) = continue_(["the cat"], tokens=24, samples=3)
    for sample, text in enumerate(whole.texts):
        for begin in range(0, len(text) - 3, 5):
            stop = text[begin : begin + 3]  # spans tokens
            (ended,) = continue_(["the cat"], tokens=24, samples=3, stop=["no such text", stop])
            assert ended.texts[sample] == text[: text.index(stop)]
            tokens = ended.hypotheses[sample].tokens
            assert tokens == whole.hypotheses[sample].tokens[: len(tokens)]


def test_generation_stops_at_a_stop_string() -> None:
    continue_ = continuer(longest=100, stream=True)
    (whole,) = continue_(["a"], tokens=60)
    (ended,) = continue_(["a"], tokens=60, stop=[whole.text[10:14]])
    assert len(ended.hypotheses[0].tokens) < 20 < len(whole.hypotheses[0].tokens) == 60


def test_stop_strings_in_the_prompt_do_not_count() -> None:
    (found,) = continuer(stream=True, settings=GREEDY)(["stop"], tokens=5, stop=["stop"])
    assert len(found.hypotheses[0].tokens) == 5


@kinds
def test_watched_texts_grow_into_the_final_one(tokenizer: Tokenizer, stream: bool) -> None:
    seen: dict[tuple[int, int], list[str]] = {}

    def watch(prompt: int, sample: int, text: str) -> None:
        seen.setdefault((prompt, sample), [""]).append(text)

    continue_ = continuer(tokenizer, 9, stream)
    found = continue_(PROMPTS, tokens=20, samples=2, watch=watch, stop=["the\n", "zz", "t t"])
    assert [one.texts for one in found] == [
        one.texts for one in continue_(PROMPTS, tokens=20, samples=2, stop=["the\n", "zz", "t t"])
    ]
    for (prompt, sample), texts in seen.items():
        grown = [*texts, found[prompt].texts[sample]]
        assert all(later.startswith(earlier) for earlier, later in pairwise(grown))


@given(some.text("ab\ufffdé", max_size=12), some.lists(some.text("ab", min_size=1, max_size=3), max_size=3))
@example("aba", ["b", "aba"])  # what begins first is not what is complete first
def test_settled_text_is_a_prefix_of_every_continuation(text: str, stop: list[str]) -> None:
    shown = ""
    for size in range(len(text) + 1):
        sofar, ended = until_stop(text[:size], stop)
        now = sofar if ended else stable_part(sofar, stop)
        assert now.startswith(shown)
        shown = now
        if ended:
            break
    assert until_stop(text, stop)[0].startswith(shown)


def test_an_incomplete_character_is_held_back() -> None:
    begun = LETTERS.decode(LETTERS.encode("a€")[:-1])
    assert begun == "a\ufffd" and stable_part(begun) == "a"
    assert stable_part("one\n", ["\n\n", "xx"]) == "one"
    assert stable_part("one\nt", ["\n\n"]) == "one\nt"
    assert until_stop("a--b-c", ["-c", "--"]) == ("a", True) and until_stop("abc", ["d"]) == ("abc", False)


# --- settings and mistakes ------------------------------------------------------------------------------------------


def test_generation_samples_by_default() -> None:
    usual = generation_settings(DecodingSettings())
    assert (usual.method, usual.temperature, usual.top_p) == ("sample", 0.8, 0.95)
    own = generation_settings(DecodingSettings(method="sample", temperature=0.5))
    assert (own.temperature, own.top_p) == (0.5, 1.0)  # a recipe that samples says how
    assert generation_settings(DecodingSettings(), method="beam", beam=1).method == "beam"


def test_the_document_format_comes_from_the_recipe() -> None:
    model = {"family": "gpt", "size": "nano", "max_positions": 33}
    recipe = Recipe.model_validate(
        {"data": {"text": "a.txt", "documents": "stream", "lowercase": True}, "model": model}
    )
    made = Generator.for_recipe(Causal(len(LETTERS), 33), (LETTERS, LETTERS), recipe)
    assert (made.longest, made.stream, made.lowercase) == (33, True, True)
    assert made(["THE CAT"], tokens=9)[0].texts == made(["the cat"], tokens=9)[0].texts


def test_invalid_options_are_refused() -> None:
    with pytest.raises(UserError, match="a stop string cannot be empty"):
        continuer()(["a"], stop=[""])
    with pytest.raises(UserError, match="2 samples: only sampling"):
        continuer(settings=GREEDY)(["a"], samples=2)
    with pytest.raises(UserError, match="at least one of each"):
        continuer()(["a"], tokens=0)
    assert continuer()([]) == []


def test_progress_counts_the_samples() -> None:
    seen: list[int] = []
    continuer(longest=7)(PROMPTS, samples=3, tokens=20, progress=seen.append)
    assert sum(seen) == 3 * len(PROMPTS)
