"""regard fill, with a tiny model that was trained on four sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard import load, tensor_io
from regard.data.masking import MaskingPolicy
from regard.data.stream import generator
from regard.models import build
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.text import BOS, EOS, Tokenizer
from regard.text import train as learn

TEXTS = ["the cat sat on the mat", "the dog ran in the park", "a bird sang in the tree", "Once upon a time"]


def recipe(unit: str = "bpe", **data: object) -> Recipe:
    sizes = {"width": 32, "heads": 2, "layers": 2, "ffn_width": 64, "dropout": 0.0, "max_positions": 24}
    model = {"family": "bert", "task": "fill", "mask_prob": 0.3, **sizes}
    text = {"unit": unit, "vocabulary": 320}
    return Recipe.model_validate({"data": {"text": "texts.txt", **data}, "text": text, "model": model})


def made(path: Path, chosen: Recipe, tokenizer: Tokenizer, steps: int) -> Path:
    """A run directory with a model that was trained here, not by `regard train`."""
    torch.manual_seed(1)
    model = build(chosen.model, len(tokenizer), len(tokenizer), True)
    texts = [[BOS, *tokenizer.encode(text), EOS] for text in TEXTS] * 8
    clean = SeqBatch.from_lists([[] for _ in texts], texts, bos=BOS)
    policy = MaskingPolicy(0.3, mask_id=tokenizer.tag("<mask>"), first_id=tokenizer.first, vocabulary=len(tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        batch = policy.mask(clean, generator(1, step + 1))
        optimizer.zero_grad()
        (model(batch) / batch.num_targets).backward()
        optimizer.step()
    run = RunDir.create(path, chosen)
    run.save_tokenizers(tokenizer, tokenizer)
    tensor_io.save(run.best, tensor_io.model_tensors(model), {})
    return path


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has memorised the four sentences; each of their words is one token."""
    tokenizer = learn(TEXTS * 3, "bpe", 320, ["<mask>"])
    assert [len(tokenizer.encode(" " + word)) for word in ("cat", "dog", "mat", "time")] == [1, 1, 1, 1]
    return made(tmp_path_factory.mktemp("fill") / "run", recipe(), tokenizer, 150)


def test_the_best_guess_is_filled_in_and_all_guesses_are_listed(regard: Callable, filler: Path) -> None:
    result = regard("fill", filler, "the [MASK] sat on the mat")
    assert result.status == 0 and result.err == ""
    text, heading, *guesses = result.out.splitlines()
    assert text == "the cat sat on the mat" and heading.strip() == "mask"
    assert len(guesses) == 5
    assert guesses[0].endswith("%   cat")  # with the blank that belongs to the piece
    shares = [float(line.split("%")[0]) for line in guesses]
    assert shares == sorted(shares, reverse=True) and shares[0] > 50 and sum(shares) <= 100.5


def test_any_number_of_masks_in_both_spellings(regard: Callable, filler: Path) -> None:
    lines = regard("fill", filler, "--top", 2, "the [MASK] ran in the <mask>").out.splitlines()
    assert lines[0] == "the dog ran in the park"
    assert [line.strip() for line in lines if "mask" in line] == ["mask 1", "mask 2"]
    assert len(lines) == 1 + 2 * (1 + 2)


def test_one_line_of_json_for_each_text(regard: Callable, filler: Path) -> None:
    texts = ["a bird [MASK] in the tree", "Once upon a [MASK]"]
    out = regard("fill", filler, "--format", "jsonl", "--top", 3, *texts).out
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["source"] for one in found] == texts
    assert [one["text"] for one in found] == ["a bird sang in the tree", "Once upon a time"]
    for one in found:
        ((best, *others),) = one["guesses"]
        assert len(others) == 2 and 0.5 < best["probability"] <= 1 and best["text"].startswith(" ")


def test_standard_input_line_by_line(start: Callable, filler: Path) -> None:
    process = start("fill", filler, "--format", "jsonl")
    out, err = process.communicate("the [MASK] sat on the mat\nOnce upon a [MASK]\n", timeout=120)
    assert process.returncode == 0 and err == ""
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["the cat sat on the mat", "Once upon a time"]


def test_one_space_before_a_mask_belongs_to_it(filler: Path) -> None:
    model = load(filler, device="cpu")
    tokenizer = model.run.tokenizers[0]
    the, cat, sat = (tokenizer.encode(text) for text in ("the", " cat", " sat"))
    mask = tokenizer.tag("<mask>")
    encode = model.filler().encode
    assert encode("the [MASK] sat") == [BOS, *the, mask, *sat, EOS]
    assert encode("[MASK] cat") == [BOS, mask, *cat, EOS]
    assert encode("the[MASK]") == [BOS, *the, mask, EOS]
    assert encode("the  [MASK]") == [BOS, *tokenizer.encode("the "), mask, EOS]
    assert encode("[MASK] [MASK]") == [BOS, mask, mask, EOS]
    assert mask not in tokenizer.encode("the <mask> [MASK]")  # to the tokenizer both are text


def test_guesses_from_python(filler: Path) -> None:
    model = load(filler, device="cpu")
    found = model.fill("the [MASK] sat on the mat", top=3)
    assert str(found) == found.text == "the cat sat on the mat" and found.source == "the [MASK] sat on the mat"
    assert len(found.guesses) == 1 and len(found.guesses[0]) == 3
    assert found.guesses[0][0].text == " cat"
    everything = model.fill("the [MASK] sat on the mat", top=10**6).guesses[0]
    tokenizer = model.run.tokenizers[0]
    assert len(everything) == len(tokenizer) - len(tokenizer.forbidden()) - 1  # all but special tokens and line breaks
    assert 0.99 < sum(guess.probability for guess in everything) <= 1 + 1e-5


def test_guesses_do_not_depend_on_other_texts_of_the_batch(filler: Path) -> None:
    model = load(filler, device="cpu")
    texts = ["the [MASK] sat on the mat", "a [MASK]", "Once [MASK] a time [MASK] the dog"]
    together = model.filler()(texts)
    for text, found in zip(texts, together, strict=True):
        alone = model.fill(text)
        assert found.text == alone.text
        for one, other in zip(found.guesses, alone.guesses, strict=True):
            assert [g.probability for g in one] == pytest.approx([g.probability for g in other], abs=1e-5)


def test_the_rest_of_the_text_is_unchanged(tmp_path: Path) -> None:
    """A word vocabulary knows neither these words nor their spacing, and the recipe reads lower case."""
    tokenizer = learn([text.lower() for text in TEXTS], "word", 300, ["<mask>"])
    run = made(tmp_path / "run", recipe("word", lowercase=True), tokenizer, 2)
    found = load(run, device="cpu").fill("The  Zebra [MASK] ,  ON the mat")
    best = found.guesses[0][0].text
    assert best in tokenizer.words and found.text == f"The  Zebra {best} ,  ON the mat"  # type: ignore[attr-defined]


def test_errors_are_one_line(regard: Callable, filler: Path, trained: Path) -> None:
    assert "no [MASK] to fill in: 'the cat sat'" in regard("fill", filler, "the cat sat").error
    long = regard("fill", filler, "the [MASK] sat on" + " the mat" * 20).error
    assert "the text has 44 tokens, more than the 22 of the model" in long
    assert regard("fill", trained, "the [MASK] sat").error.endswith("use `regard translate`, not `regard fill`")
    assert "use `regard fill`" in regard("translate", filler, "the cat").error
    assert "does not exist" in regard("fill", filler / "nowhere", "a [MASK]").error


def test_a_line_that_cannot_be_filled_does_not_affect_the_others(
    regard: Callable, filler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line too long for the model, one without a mask and a blank one: one output for each line, with warnings."""
    long = "the [MASK] sat on" + " the mat" * 20 + " [MASK] <mask>"
    lines = ["the [MASK] sat on the mat", long, "", "no mask", "Once upon a [MASK]"]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    with open(tmp_path / "in.txt") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        result = regard("fill", filler, "--format", "jsonl", "--top", 1)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert result.status == 0 and [entry["source"] for entry in found] == lines
    assert [entry["truncated"] for entry in found] == [False, True, False, False, False]
    assert found[0]["text"] == "the cat sat on the mat" and found[4]["text"] == "Once upon a time"
    assert found[1]["text"].endswith(" the mat [MASK] <mask>") and found[1]["text"].startswith("the cat sat")
    assert [len(guesses) for guesses in found[1]["guesses"]] == [1, 0, 0]
    assert found[3]["text"] == "no mask" and found[3]["guesses"] == []
    assert result.err.splitlines() == [
        "regard: warning: line 2 has more than 22 tokens and was truncated",
        "regard: warning: line 4 has no [MASK]",
    ]


def test_invalid_bytes_in_a_text_are_replaced_skipped_or_refused(
    typed: Callable, regard: Callable, filler: Path
) -> None:
    texts = ["the [MASK] sat on the mat", "\ufffdthe [MASK] ran", "Once upon a [MASK]"]
    content = "\n".join(texts).encode().replace("\ufffd".encode(), b"\xff")
    words = ["fill", filler, "--format", "jsonl"]
    expected = [json.loads(line) for line in regard(*words, *texts).out.splitlines()]
    error = "not valid UTF-8 (byte 1 of the line)"
    for how in ([], ["--errors", "replace"]):
        result = typed(content, *words, *how)
        entries = [json.loads(line) for line in result.out.splitlines()]
        assert entries == [expected[0], expected[1] | {"error": error}, expected[2]]
        assert result.err == f"regard: warning: line 2: {error}; the bytes were replaced by U+FFFD\n"
    result = typed(content, *words, "--errors", "skip")
    first, skipped, last = [json.loads(line) for line in result.out.splitlines()]
    assert (first, last) == (expected[0], expected[2])
    assert (skipped["text"], skipped["guesses"], skipped["error"]) == ("", [], error)
    assert result.err == f"regard: warning: line 2: {error}; the line was skipped\n"
    assert "standard input, line 2" in typed(content, *words, "--errors", "stop").error
