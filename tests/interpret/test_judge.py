"""Judges of all kinds, sorting by asking them, and what their answers hang on; and that docs/explain.md is right."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard import tensor_io
from regard.errors import UserError
from regard.interpret.explain import Function, Judge, Person, Scorer, Unreliable, explain_answer, sort_by
from regard.interpret.explain.judge import most_questions
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.text import train as learn

NUMBER_WORDS = {"three": 3, "twenty": 20, "a dozen": 12, "two hundred": 200}
MIXED = [42, "twenty", 7, "three", "two hundred", 100, "a dozen"]


def amount(thing: int | str) -> int:
    return NUMBER_WORDS[thing] if isinstance(thing, str) else thing


TRUE_JUDGE = Function(lambda a, b: amount(a) < amount(b))


def typing(*lines: str) -> tuple[Callable[[str], str], list[str]]:
    """Simulate a person who types these lines, and collect what is shown."""
    waiting, shown = list(lines), []

    def read(prompt: str) -> str:
        shown.append(prompt)
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return read, shown


# -- sorting ----------------------------------------------------------------------------------------------------------


def test_mixed_things_are_sorted_by_asking() -> None:
    found = sort_by(TRUE_JUDGE, MIXED)
    assert found.things == ("three", 7, "a dozen", "twenty", 42, 100, "two hundred")
    assert f"({found.questions} questions)" in str(found)


def test_questions_by_hand() -> None:
    # two and two: one question each; then merging 1 2 | 3 4 takes two, 1 3 | 2 4 three
    less = Function(lambda a, b: a < b)
    assert sort_by(less, []).questions == sort_by(less, [5]).questions == 0
    assert sort_by(less, [2, 1]).questions == 1
    assert sort_by(less, [1, 2, 3, 4]).questions == 4
    assert sort_by(less, [1, 3, 2, 4]).questions == most_questions(4) == 5
    assert str(sort_by(less, [2, 1])) == "1, 2 (1 question)"


def test_every_order_of_five_things_is_sorted_within_the_bound() -> None:
    asked = 0

    def less(a: int, b: int) -> bool:
        nonlocal asked
        asked += 1
        return a < b

    for order in itertools.permutations(range(5)):
        asked = 0
        found = sort_by(Function(less), order)
        assert found.things == (0, 1, 2, 3, 4)
        assert found.questions == asked <= most_questions(5) == 8


def test_equals_keep_their_order() -> None:
    assert sort_by(Function(lambda a, b: a[0] < b[0]), ["b1", "a1", "b2", "a2"]).things == ("a1", "a2", "b1", "b2")


def test_any_object_with_prefers_can_sort() -> None:
    class Whim:
        def prefers(self, a: int, b: int) -> bool:
            return a > b

    assert sort_by(Whim(), [1, 3, 2]).things == (3, 2, 1)


def test_sorting_ends_in_spite_of_contradictions() -> None:
    draw = random.Random(1)
    found = sort_by(Function(lambda a, b: draw.random() < 0.5), range(50))
    assert sorted(found.things) == list(range(50)) and found.questions <= most_questions(50)


# -- judges -----------------------------------------------------------------------------------------------------------


def test_a_question_is_repeated_until_the_answer_is_yes_or_no() -> None:
    read, shown = typing("maybe", "Y", " no ")
    said: list[str] = []
    person = Person("Is {} larger than {}?", read, said.append)
    assert person.prefers(42, "twenty") is True and person.prefers(1, 2) is False
    assert shown == ["Is 42 larger than 'twenty'? (y/n) "] * 2 + ["Is 1 larger than 2? (y/n) "]
    assert said == ["Please answer y or n."]
    read, shown = typing("yes")
    assert Person(read=read).answer("Is {} a bird?", "an owl") is True and shown == ["Is 'an owl' a bird? (y/n) "]


def test_the_end_of_input_is_a_user_error() -> None:
    read, _ = typing("y")
    with pytest.raises(UserError, match="no answer to: Does 1 come before"):
        sort_by(Person(read=read), [3, 2, 1])


def test_a_person_at_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hm\nn\n"))
    assert Person().prefers("a", "b") is False
    assert capsys.readouterr().out.count("Does 'a' come before 'b'? (y/n)") == 2


def test_an_unreliable_judge_errs_at_its_rate_and_reproducibly() -> None:
    truth = Function(lambda a, b: True)
    for rate in (0.0, 0.1, 0.5, 1.0):
        person = Unreliable(truth, error=rate, seed=3)
        answers = [person.prefers(1, 2) for _ in range(4000)]
        assert answers.count(False) / 4000 == pytest.approx(rate, abs=0.03)
        again = Unreliable(truth, error=rate, seed=3)
        assert [again.prefers(1, 2) for _ in range(100)] == answers[:100]
    assert sort_by(Unreliable(TRUE_JUDGE, 0.0), MIXED) == sort_by(TRUE_JUDGE, MIXED)
    with pytest.raises(UserError, match="rate"):
        Unreliable(truth, error=1.5)


def test_a_scorer_prefers_the_higher_score() -> None:
    judge = Scorer(lambda texts: [len(text) for text in texts])
    assert judge.prefers("long one", "short") and not judge.prefers("a", "b")
    assert judge.answer("Is it anything?", "word") and not judge.answer("Is it anything?", "")
    assert isinstance(judge, Judge)


def test_a_model_judges_by_log_probability(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c\n")
    gpt = {"family": "gpt", "width": 8, "heads": 1, "layers": 1, "ffn_width": 8, "max_positions": 20}
    recipe = Recipe.model_validate({"data": {"text": str(tmp_path / "text.txt")}, "model": gpt})
    run = RunDir.create(tmp_path / "run", recipe)
    tokenizer = learn(["a b c"], "char", 270)
    run.save_tokenizers(tokenizer, tokenizer)
    torch.manual_seed(1)
    tensor_io.save(run.best, tensor_io.model_tensors(run.fresh_model()), {})
    model = regard.load(tmp_path / "run", device="cpu")
    texts = ["abc", "b", "ccbba", "a a"]
    likely = {text: sum(logp) for text, logp in zip(texts, model.score([("", t) for t in texts]), strict=True)}
    assert list(sort_by(Scorer.of(model), texts).things) == sorted(texts, key=lambda text: -likely[text])


# -- reasons ----------------------------------------------------------------------------------------------------------


def test_the_explanation_of_an_answer_by_hand() -> None:
    # "large" in the first speaks for it wherever it stands; one "large" in each cancels
    judge = Function(lambda a, b: a.split().count("large") > b.split().count("large"))
    found = explain_answer(judge, "a large cat", "large dog")
    assert found.features == ("a", "large", "cat", "large", "dog")
    # f = [large in a and not in b]: E[f | in a] - E[f | not] = 1/2; for the other, -1/2
    assert found.importance.tolist() == [0.0, 0.5, 0.0, -0.5, 0.0]
    assert found.exact and found.calls == 32


def test_properties_and_single_things() -> None:
    cheap, dear = {"price": 3, "colour": "red"}, {"price": 9}
    judge = Function(lambda a, b: a.get("price", 5) < b.get("price", 5))
    found = explain_answer(judge, cheap, dear)
    assert found.features == ("price = 3", "colour = red", "price = 9")
    # 3 < 9, 3 < 5 and 5 < 9 hold, 5 < 5 does not: an OR of the two prices
    assert found.importance.tolist() == [0.5, 0.0, 0.5]
    seen: list[tuple[object, object]] = []
    numbers = explain_answer(Function(lambda a, b: seen.append((a, b)) or (a or 0) > (b or 0)), 42, 20)
    assert set(seen) == {(42, 20), (42, None), (None, 20), (None, None)} and numbers.features == ("42", "20")
    assert numbers.importance.tolist() == [1.0, 0.0]
    hidden = explain_answer(Function(lambda a, b: "_" in a), "x y", "z", hidden="_")
    assert hidden.importance.tolist() == [-0.5, -0.5, 0.0]


def test_the_reasons_of_an_unreliable_judge_are_found() -> None:
    judge = Unreliable(Function(lambda a, b: "large" in a), error=0.2, seed=5)
    found = explain_answer(judge, "the very large cat", "one dog", exact=False, masks=2000)
    # an answer is right with chance 0.8: 0.8 with the word, 0.2 without
    planted = np.array([0, 0, 0.6, 0, 0, 0])
    assert (np.abs(found.importance - planted) <= 4 * found.error).all() and found.order[0] == 2


# -- the guide --------------------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "explain.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_the_guide_prints_what_it_says() -> None:
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for code, printed in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(GUIDE), "exec"), names)
        assert [line.rstrip() for line in out.getvalue().splitlines()] == printed.splitlines(), code
