"""regard generate, and regard evaluate for runs on plain text: output and errors."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as package
from regard import tensor_io
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.text import train

Command = Callable[..., Any]

TEXT = "the cat sat on the mat\nthe rat ate the cat\n\nonce upon a time\nthere was a café\n"


def make(path: Path, model: dict[str, Any], data: dict[str, Any], unit: str = "char") -> Path:
    """A run with random weights, as if it had been trained on a text."""
    text = path.with_suffix(".txt")
    text.write_text(TEXT, encoding="utf-8")
    recipe = Recipe.model_validate(
        {"data": {"text": str(text), "test": [str(text)], **data}, "text": {"unit": unit}, "model": model}
    )
    run = RunDir.create(path, recipe)
    tags = ["<mask>"] if model["family"] == "bert" else []
    tokenizer = train([TEXT], unit, 300, tags)
    run.save_tokenizers(tokenizer, tokenizer)
    torch.manual_seed(1)
    fresh = run.fresh_model()
    with torch.no_grad():  # far from even, so that texts differ
        for parameter in fresh.parameters():
            parameter.mul_(4)
    tensor_io.save(run.best, tensor_io.model_tensors(fresh), {})
    return path


NANO = {"family": "gpt", "size": "nano", "width": 16, "heads": 2, "layers": 1, "ffn_width": 16, "max_positions": 24}


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("generate") / "run", NANO, {"documents": "stream"})


@pytest.fixture(scope="module")
def document_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("generate") / "run", NANO, {"documents": "paragraph"})


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bert = {
        "family": "bert",
        "size": "tiny",
        "width": 16,
        "heads": 2,
        "layers": 1,
        "ffn_width": 16,
        "max_positions": 24,
    }
    return make(tmp_path_factory.mktemp("generate") / "run", bert, {"documents": "line"})


# --- generate -------------------------------------------------------------------------------------------------------


def test_the_output_is_the_prompt_and_its_continuation(regard: Command, text_run: Path) -> None:
    found = regard("generate", text_run, "the cat", "--tokens", 30)
    assert found.status == 0 and found.err == ""
    expected = package.load(text_run).generate("the cat", tokens=30)
    assert found.out == f"the cat{expected.text}\n" == f"{expected}\n"
    assert len(expected.hypotheses[0].tokens) == 30
    assert regard("generate", text_run, "the cat", "--tokens", 30, "--seed", 1).out != found.out


def test_streaming_does_not_change_the_text(regard: Command, text_run: Path) -> None:
    for seed in range(5):  # random bytes have half characters in them
        words = ["generate", text_run, "the cat", "a", "--tokens", 60, "--seed", seed, "--stop", "a", "--stop", "e\\n"]
        whole = regard(*words, "--no-stream")
        assert regard(*words, "--stream") == whole and whole.status == 0


def test_several_texts_are_separated_by_a_line(regard: Command, text_run: Path) -> None:
    found = regard("generate", text_run, "the cat", "a", "--samples", 2, "--tokens", 5)
    both = package.load(text_run).generate(["the cat", "a"], samples=2, tokens=5)
    assert found.out == "---\n".join(f"{one.prompt}{text}\n" for one in both for text in one.texts)


def test_json_has_all_samples_of_a_prompt(regard: Command, text_run: Path) -> None:
    words = ["generate", text_run, "the cat", "a", "--samples", 3, "--tokens", 5, "--format", "jsonl"]
    lines = [json.loads(line) for line in regard(*words).out.splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "a"]
    both = package.load(text_run).generate(["the cat", "a"], samples=3, tokens=5)
    assert [[s["text"] for s in line["samples"]] for line in lines] == [list(one.texts) for one in both]
    assert all(s["tokens"] == 5 and not s["finished"] for line in lines for s in line["samples"])
    assert not any(line["truncated"] for line in lines)


def test_prompts_come_from_standard_input_line_by_line(
    start: Callable[..., subprocess.Popen[str]], regard: Command, text_run: Path
) -> None:
    process = start("generate", text_run, "--tokens", 4, "--format", "jsonl", "--device", "cpu")
    out, err = process.communicate("the cat\n\na\n", timeout=120)
    assert process.returncode == 0, err
    given = regard("generate", text_run, "the cat", "", "a", "--tokens", 4, "--format", "jsonl")
    assert out == given.out


def test_greedy_does_not_depend_on_the_seed(regard: Command, text_run: Path) -> None:
    words = ["generate", text_run, "the cat", "--greedy", "--tokens", 8]
    assert regard(*words).out == regard(*words, "--seed", 5).out
    by_hand = package.load(text_run).generate("the cat", tokens=8, method="beam", beam=1)
    assert regard(*words).out == f"{by_hand}\n"


def test_a_long_prompt_is_truncated_at_the_start_with_a_warning(regard: Command, text_run: Path) -> None:
    prompt = "the cat sat on the mat and ate"
    found = regard("generate", text_run, prompt, "--greedy", "--tokens", 5)
    assert found.status == 0 and found.out.startswith(prompt)
    assert found.err == ("regard: warning: prompt 1 has more than 24 tokens: its beginning was dropped\n")
    assert found.out[len(prompt) :] == regard("generate", text_run, prompt[-12:], "--greedy", "--tokens", 5).out[12:]
    assert regard("generate", text_run, prompt, "--quiet").err == ""


def test_generation_in_a_batch_equals_generation_alone(document_run: Path) -> None:
    model, prompts = package.load(document_run), ["", "the cat", "once upon a time", "a"]
    together = model.generate(prompts, samples=2, tokens=40, repetition_penalty=1.3, top_k=20)
    for line, prompt in enumerate(prompts):
        generator = model.generator(repetition_penalty=1.3, top_k=20)
        (alone,) = generator([prompt], samples=2, tokens=40, first=line)
        assert alone.texts == together[line].texts


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--greedy", "--top-k", 3], "--top-k has no effect with --greedy, which does not sample"),
        (["--greedy", "--samples", 2], "--samples has no effect with --greedy, which does not sample"),
        (["--samples", 10_001], "Invalid value for '--samples': must be less than or equal to 10000"),
        (["--stop", ""], "a stop string cannot be empty"),
        (["--top-p", 0], "--top-p 0.0: must be greater than 0"),
        (["--temperature", "inf"], "--temperature inf: must be a finite number"),
        (["--stream", "--samples", 2], "--stream shows one plain text after another: use it without"),
        (["--repetition-penalty", 0.5], "Invalid value for '--repetition-penalty': must be greater than or equal to 1"),
    ],
)
def test_error_messages(regard: Command, text_run: Path, words: list[object], error: str) -> None:
    assert regard("generate", text_run, "the cat", *words).error.startswith(error)


def test_each_verb_names_the_right_one(regard: Command, trained: Path, text_run: Path, masked_run: Path) -> None:
    assert regard("generate", trained, "a b").error == (
        f"{trained} was trained on pairs: use `regard translate`, not `regard generate`"
    )
    assert regard("translate", text_run, "a b").error == (
        f"{text_run} was trained on plain text: use `regard generate`, not `regard translate`"
    )
    assert regard("generate", masked_run, "a b").error == (
        f"{masked_run} was trained on plain text: use `regard fill`, not `regard generate`"
    )


# --- evaluate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text_run", "document_run"])
def test_perplexity_of_a_run_on_text(regard: Command, kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    entry = json.loads(regard("evaluate", run, "--json", "--stride", 7).out)
    stream = kind == "text_run"
    # characters, the é is one; a stream leaves the first unscored, documents have EOS and drop the line ends
    assert entry["tokens"] == (len(TEXT) - 1 if stream else len(TEXT.rstrip()) - 2 + 2)
    assert entry["bytes"] == (len(TEXT.encode()) - 1 if stream else len(TEXT.rstrip().encode()) - 2)
    assert (entry["context"], entry["stride"]) == (24, 7)
    assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
    assert entry["bits_per_byte"] == pytest.approx(entry["loss"] * entry["tokens"] / math.log(2) / entry["bytes"])


def test_perplexity_is_printed_with_context_and_stride(regard: Command, text_run: Path) -> None:
    entry = json.loads(regard("evaluate", text_run, "--json").out)
    assert entry["stride"] == 12
    shown = regard("evaluate", text_run).out
    assert f"perplexity     {entry['perplexity']:8.3f}" in shown and f"{entry['bits_per_byte']:8.4f}" in shown
    assert f"{entry['tokens']:,} tokens, each scored once, in windows of 24 tokens with a stride of 12" in shown


def test_another_text_can_be_scored(regard: Command, text_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("abc\n")
    assert json.loads(regard("evaluate", text_run, "--text", other, "--json").out)["tokens"] == 3


def test_accuracy_of_a_masked_language_model(regard: Command, masked_run: Path) -> None:
    entry = json.loads(regard("evaluate", masked_run, "--json").out)
    assert 0 <= entry["accuracy"] <= 100 and entry["loss"] > 0 and 1 <= entry["masks"] < len(TEXT)
    assert regard("evaluate", masked_run, "--json").out == regard("evaluate", masked_run, "--json").out
    assert f"of {entry['masks']:,} masked tokens" in regard("evaluate", masked_run).out


def test_options_without_effect_are_errors(regard: Command, text_run: Path, trained: Path, masked_run: Path) -> None:
    assert regard("evaluate", text_run, "--beam", 3).error == (
        "--beam has no effect for a run that was trained on plain text"
    )
    assert regard("evaluate", text_run, "--length-penalty", 1).error.startswith("--length-penalty has no effect")
    assert regard("evaluate", trained, "--stride", 3).error == (
        "--stride has no effect except for a run that was trained on plain text"
    )
    assert regard("evaluate", text_run, "--stride", 25).error == (
        "a stride of 25 for a context of 24 tokens: it must be from 1 to the context"
    )
    assert regard("evaluate", masked_run, "--stride", 3).error.startswith(
        "--stride has no effect for a masked language model"
    )


BAD = b"the cat\n\xffrat\nonce\n"  # the second line is not UTF-8


def test_invalid_bytes_in_a_prompt_are_replaced_skipped_or_refused(
    typed: Command, regard: Command, text_run: Path
) -> None:
    words = ["generate", text_run, "--greedy", "--tokens", 5, "--format", "jsonl"]
    expected = [json.loads(regard(*words, prompt).out)["samples"] for prompt in ("the cat", "\ufffdrat", "once")]
    error = "not valid UTF-8 (byte 1 of the line)"
    for how in ([], ["--errors", "replace"]):
        result = typed(BAD, *words, *how)
        entries = [json.loads(line) for line in result.out.splitlines()]
        assert [entry["samples"] for entry in entries] == expected
        assert [entry.get("error") for entry in entries] == [None, error, None]
        assert result.err == f"regard: warning: line 2: {error}; the bytes were replaced by U+FFFD\n"
    result = typed(BAD, *words, "--errors", "skip")
    assert [json.loads(line)["samples"] for line in result.out.splitlines()] == [expected[0], [], expected[2]]
    assert result.err == f"regard: warning: line 2: {error}; the line was skipped\n"
    plain = typed(BAD, *words[:-2], "--errors", "skip", "--quiet")
    assert plain.out.split("---\n")[1] == "\n" and plain.out.count("---\n") == 2 and plain.err == ""
    assert "standard input, line 2" in typed(BAD, *words, "--errors", "stop").error
