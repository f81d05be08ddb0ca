"""The Python API: load, train, translate, score, attention."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import tensor_io
from regard.api import Model
from regard.errors import UserError
from regard.recipes.schema import Recipe

LINES = ["a b c", "t s r q p o n", "k", "e e e e", "b a"]
LAYERS, HEADS = 2, 4


def make(folder: Path, unit: str = "word", **data: str | bool) -> Model:
    """Train a model a little, so that its outputs differ."""
    recipe = Recipe.model_validate(
        {
            "data": {"corpus": "copy", "count": 500, **data},
            "text": {"unit": unit, "vocabulary": 270},
            "model": {"width": 16, "heads": HEADS, "ffn_width": 32, "encoder_layers": 1, "decoder_layers": LAYERS},
            "training": {
                "steps": 60,
                "batch_tokens": 256,
                "learning_rate": 0.01,
                "warmup": 10,
                "validate_every": 60,
                "validate_lines": 0,
                "save_every": 60,
                "average": 0,
            },
        }
    )
    return regard.train(recipe, folder / "run", device="cpu", quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("tagged"), source_tag="<from>", target_tag="<to>")


def test_importing_regard_imports_nothing_heavy() -> None:
    code = "import sys, regard; print(regard.__version__, *sys.modules)"
    version, *modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert version == regard.__version__ and "regard" in modules
    assert not {"torch", "numpy", "pydantic", "tokenizers", "typer", "rich"} & set(modules)


def test_the_package_exports_only_the_public_names() -> None:
    assert set(regard.__all__) == {"Model", "Translation", "__version__", "load", "train"}
    assert all(hasattr(regard, name) for name in regard.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        regard.trian  # noqa: B018


def test_a_recipe_may_be_a_name_with_changes(tmp_path: Path) -> None:
    tiny = ["model.width=8", "model.heads=1", "training.steps=2", "data.count=30", "training.validate_lines=0"]
    found = regard.train("reverse", tmp_path / "run", settings=tiny, device="cpu", quiet=True)
    assert (found.run.recipe.data.corpus, found.run.recipe.training.steps) == ("reverse", 2)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_a_loaded_model_equals_the_trained_one(model: Model) -> None:
    loaded = regard.load(model.run.path, device="cpu")
    assert [found.text for found in loaded.translate(LINES)] == [found.text for found in model.translate(LINES)]
    snapshot = regard.load(str(model.run.path), device="cpu", weights=str(model.run.snapshot(60)))
    assert snapshot.score([("a b", "a b")]) == loaded.score([("a b", "a b")])  # the best step was the only one


def test_a_missing_run_and_missing_weights_are_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        regard.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no none\.safetensors"):
        regard.load(model.run.path, weights=tmp_path / "none.safetensors")


def test_one_sentence_or_many(model: Model) -> None:
    many = model.translate(LINES)
    assert isinstance(many, list) and [found.source for found in many] == LINES
    assert len({found.text for found in many}) > 1
    for line, found in zip(LINES, many, strict=True):
        alone = model.translate(line)
        assert (alone.text, alone.tokens, str(alone)) == (found.text, found.tokens, found.text)
        assert alone.score == pytest.approx(found.score, abs=1e-5)
    assert model.translate([]) == []


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_score_is_the_sum_of_logprobs_over_the_penalty(model: Model, alpha: float) -> None:
    """Wu et al. 2016, equation 14: ((5 + n) / 6) ^ alpha for n tokens, EOS counted."""
    for found in model.translate(LINES, nbest=3, beam=4, length_penalty=alpha):
        hypotheses = found._answer.hypotheses
        scores = [sum(h.logprobs) / ((5 + len(h.logprobs)) / 6) ** alpha for h in hypotheses]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3
        assert [found.score, *(score for _, score in found.alternatives)] == pytest.approx(scores, abs=1e-5)
        assert [found.text, *(text for text, _ in found.alternatives)] == list(found._answer.texts)


@pytest.mark.parametrize("unit", ["word", "char", "bpe"])
def test_the_tokens_join_to_the_text(unit: str, tmp_path: Path) -> None:
    for found in make(tmp_path, unit).translate(["a b c", "t s r q p o n", "k"]):
        assert found._answer.hypotheses[0].finished and found.tokens[-1] == "</s>"
        assert "".join(found.tokens[:-1]) == found.text
        assert found.source_tokens[-1] == "</s>" and "".join(found.source_tokens[:-1]) == found.source


def test_attention_is_a_distribution_over_the_source_for_each_output_token(model: Model) -> None:
    for found in model.translate(LINES):
        attention = found.attention
        assert attention.weights.shape == (LAYERS, HEADS, len(found.tokens), len(found.source_tokens))
        assert (attention.source, attention.target) == (found.source_tokens, found.tokens)
        np.testing.assert_allclose(attention.weights.sum(-1), 1.0, atol=1e-5)
        assert attention.weights.min() >= 0
        assert attention.weights.std() > 1e-3
        whole = attention.map(words=False)
        np.testing.assert_allclose(whole.weights, attention.weights.mean((0, 1)), atol=1e-6)
        one = attention.map(layer=1, head=2, words=False)
        np.testing.assert_allclose(one.weights, attention.weights[1, 2], atol=1e-6)


def test_results_are_pictures_in_a_notebook(model: Model) -> None:
    assert model.translate("a b c").attention._repr_html_().startswith("<svg")
    assert (model.explain("a b c", masks=8)._repr_html_() or "").startswith("<svg")
    assert "<iframe" in (model.trace("a b c")._repr_html_() or "")


def test_computing_attention_does_not_change_later_results(model: Model) -> None:
    before = model.score([("a b c", "c b a")])
    _ = model.translate("a b c").attention
    assert model.score([("a b c", "c b a")]) == before


def test_scoring_a_translation_gives_the_logprobs_it_was_made_with(model: Model) -> None:
    found = model.translate(LINES)
    scored = model.score([(line.source, line.text) for line in found])
    for line, logprobs in zip(found, scored, strict=True):
        assert len(logprobs) == len(line.tokens)
        assert logprobs == pytest.approx(line._answer.hypotheses[0].logprobs, abs=1e-4)


def test_scores_are_in_the_order_of_the_pairs(model: Model) -> None:
    pairs = [("a b c d e", "a b c d e"), ("a", "a"), ("k l m", "k l m"), ("a", "b c")]
    together = model.score(pairs)
    assert [len(logprobs) for logprobs in together] == [6, 2, 4, 3]
    for pair, logprobs in zip(pairs, together, strict=True):
        assert model.score([pair])[0] == pytest.approx(logprobs, abs=1e-5)
    assert all(logprob < 0 for logprobs in together for logprob in logprobs)
    assert model.score([]) == []


def test_a_forced_translation_equals_the_models_own(model: Model) -> None:
    for own in model.translate(LINES):
        forced = model.forced(own.source, own.text)
        assert (forced.text, forced.tokens, forced.source_tokens) == (own.text, own.tokens, own.source_tokens)
        assert forced._answer.hypotheses[0].logprobs == pytest.approx(own._answer.hypotheses[0].logprobs, abs=1e-4)
        np.testing.assert_allclose(forced.attention.weights, own.attention.weights, atol=1e-5)
    other = model.forced("a b c", "c b")
    assert other.tokens == ("c", " b", "</s>") and other.attention.weights.shape == (LAYERS, HEADS, 3, 4)


def test_a_forced_translation_has_the_score_of_the_search(model: Model) -> None:
    for own in model.translate(LINES):
        assert model.forced(own.source, own.text).score == pytest.approx(own.score, abs=1e-4)


def test_tags_are_added_to_source_and_target(tagged: Model) -> None:
    found = tagged.translate("a b c")
    assert found.source_tokens[0] == "<from>" and found.tokens[0] == "<to>" and "<" not in found.text
    (logprobs,) = tagged.score([("a b c", found.text)])
    assert logprobs == pytest.approx(found._answer.hypotheses[0].logprobs, abs=1e-4)


def test_a_forced_translation_has_its_tag(tagged: Model) -> None:
    own = tagged.translate("a b c")
    forced = tagged.forced("a b c", own.text)
    assert forced.tokens == own.tokens
    assert len(forced._answer.hypotheses[0].logprobs) == len(forced.tokens)
    np.testing.assert_allclose(forced.attention.weights, own.attention.weights, atol=1e-5)


def test_scores_lowercase_their_texts_too(tmp_path: Path) -> None:
    found = make(tmp_path, lowercase=True)
    assert found.translate("A B").text == found.translate("a b").text
    assert found.score([("A B", "A b")])[0] == pytest.approx(found.score([("a b", "a b")])[0], abs=1e-5)


def test_a_blank_line_is_translated_to_a_blank_line(model: Model) -> None:
    found = model.translate(["a", " ", "b"])
    assert [line.text for line in found][1] == "" and found[1].tokens == () and found[1].score == 0.0
    assert found[1].attention.weights.size == 0
    forced = model.forced("a", "")
    assert forced.tokens == ("</s>",) and forced.attention.weights.shape == (LAYERS, HEADS, 1, 2)


def test_the_attention_of_a_blank_source_is_empty(model: Model) -> None:
    forced = model.forced("", "a")
    assert forced.tokens == ("a", "</s>")
    assert forced.attention.weights.shape[2] in (0, 2)


def test_weights_are_chosen_by_name_or_file(model: Model) -> None:
    best = regard.load(model.run.path, device="cpu", weights="best")
    snapshot = regard.load(model.run.path, device="cpu", weights="step-60")
    assert (best.step, snapshot.step) == (60, 60)
    assert best.score([("a b", "a b")]) == snapshot.score([("a b", "a b")])
    with pytest.raises(UserError, match=r"has no weights newest; .* has best, last, step-60"):
        regard.load(model.run.path, weights="newest")


# -- arguments, copies, processes --------------------------------------------------------------------------------------


def test_dir_lists_the_public_names() -> None:
    assert set(regard.__all__) <= set(dir(regard))


def test_the_repr_of_a_model_describes_it(model: Model) -> None:
    said = repr(model)
    count = sum(p.numel() for p in model.module.parameters())
    for part in (str(model.run.path), "transformer", f"{count:,} parameters", "best weights, step 60", "fp32 on cpu"):
        assert part in said, said


def test_long_input_is_truncated_with_a_warning_that_names_it(model: Model) -> None:
    long = "a " * 1500
    with pytest.warns(UserWarning, match=r"^input 1 is longer than the 1,024 tokens that this model reads") as seen:
        found = model.translate(["a b", long], beam=1, max_ratio=0.01)
    assert [one.truncated for one in found] == [False, True] and len(found[1].source_tokens) == 1024
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="^the text is longer"):
        assert model.translate(long, beam=1, max_ratio=0.01).truncated
    with pytest.warns(UserWarning, match="^input 1 is longer"):
        assert [len(logprobs) for logprobs in model.score([("a", "a"), ("a", long)])] == [2, 1024]
    with pytest.warns(UserWarning, match="^the text is longer"):
        assert model.forced(long, "a").truncated
    assert not model.forced("a", "a").truncated


def test_a_translation_can_be_pickled_copied_and_converted_to_a_dict(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model.translate("a b c", nbest=2)
    for copied in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert copied == found and copied.attention.weights.tolist() == found.attention.weights.tolist()
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert found.as_dict()["alternatives"] == [{"text": t, "score": s} for t, s in found.alternatives]
    assert dataclasses.asdict(found)["text"] == found.text
    seen = pickle.dumps(found)  # attention was asked for: it is in the pickle
    monkeypatch.setattr(Model, "_attention", None)
    assert pickle.loads(seen).attention.weights.shape == found.attention.weights.shape


def test_a_pickled_model_is_loaded_again(model: Model) -> None:
    loaded = regard.load(model.run.path, device="cpu", precision="int8")
    copied = pickle.loads(pickle.dumps(loaded))
    assert repr(copied) == repr(loaded) and len(pickle.dumps(loaded)) < 1000
    assert copied.translate("a b c").text == loaded.translate("a b c").text
    assert pickle.loads(pickle.dumps(copied.translate)).__self__ is copied  # a pool's tasks share one in a worker
    assert copy.deepcopy(loaded).module is not loaded.module


def test_unpickling_refuses_other_weights(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.run.path, tmp_path / "run")
    found = pickle.dumps(regard.load(tmp_path / "run", device="cpu").translate("a b"))
    tensors, about = tensor_io.load(tmp_path / "run" / "model.safetensors")
    tensor_io.save(tmp_path / "run" / "model.safetensors", tensors, {**about, "step": 61})
    with pytest.raises(UserError, match="are of step 61 now, and were of step 60"):
        pickle.loads(found).attention  # noqa: B018


def test_processes_translate(model: Model) -> None:
    """A forked process with several threads would wait for threads of its parent."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = [found.text for found in model.translate(LINES * 20)]
        for start in ("fork", "spawn"):
            with multiprocessing.get_context(start).Pool(1) as pool:
                found = pool.map_async(model.translate, [LINES * 20]).get(600)
            assert [one.text for one in found[0]] == expected, start
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_datasets_map_with_processes(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    given = datasets.Dataset.from_dict({"en": LINES})
    found = given.map(lambda batch: {"out": [str(t) for t in model.translate(batch["en"])]}, batched=True, num_proc=2)
    assert found["out"][:] == [str(one) for one in model.translate(LINES)]
    assert [one.text for one in model.translate(given["en"])] == found["out"][:]


def test_threads_share_a_model(model: Model) -> None:
    expected = [found.text for found in model.translate(LINES)]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(model.translate, [LINES] * 12):
            assert [one.text for one in found] == expected


def test_sampling_is_a_function_of_the_seed(model: Model) -> None:
    def drawn(seed: int | None) -> list[str]:
        return [found.text for found in model.translate(LINES * 4, method="sample", temperature=3.0, seed=seed)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert drawn(None) != drawn(None)


def test_a_translation_begins_with_its_prefix(model: Model) -> None:
    assert all(found.text.startswith("k l") for found in model.translate(LINES, prefix="k l"))
    assert [found.text[0] for found in model.translate(LINES[:2], prefix=["r", "s"])] == ["r", "s"]
    with pytest.raises(UserError, match="1 prefixes for 2 texts"):
        model.translate(LINES[:2], prefix=["r"])
    with pytest.raises(UserError, match="not in this model's vocabulary"):
        model.translate("a", prefix="§")


def test_tags_can_be_chosen(tagged: Model) -> None:
    assert tagged.translate("a", source_tag="<from>", target_tag="<to>").tokens[0] == "<to>"
    with pytest.raises(UserError, match=r"no tag '<2fr>' \(known: <from>, <to>\)"):
        tagged.translate("a", target_tag="<2fr>")


def test_nbest_raises_the_number_of_beams(model: Model) -> None:
    assert len(model.translate("a b", nbest=6).alternatives) == 5
    with pytest.raises(UserError, match="beam must be at least 6"):
        model.translate("a b", nbest=6, beam=2)
    with pytest.raises(UserError, match="nbest = 0: must be at least 1"):
        model.translate("a b", nbest=0)


def test_wrong_keywords_and_values_are_named(model: Model) -> None:
    with pytest.raises(
        TypeError, match=r"translate\(\) has no keyword 'beams': did you mean beam\? It takes nbest, seed"
    ):
        model.translate("a", beams=2)
    with pytest.raises(UserError, match=r"^beam = 0: must be greater than or equal to 1$"):
        model.translate("a", beam=0)
    with pytest.raises(UserError, match=r"^method = 'greedy': must be 'beam' or 'sample'$"):
        model.translate("a", method="greedy")


def test_arguments_of_other_functions_are_checked_too(model: Model) -> None:
    with pytest.raises(TypeError, match=r"explain\(\) has no keyword 'mask': did you mean masks\?"):
        model.explain("a b", mask=3)
    for call in (model.trace, model.explain):
        with pytest.raises(TypeError, match=r"takes one string, not bytes \(b'a'\)"):
            call(b"a")  # type: ignore[arg-type]
    for name in ("nbest", "seed"):
        with pytest.raises(TypeError, match=rf"^{name} must be a whole number, not str \('3'\)"):
            model.translate("a", **{name: "3"})
    assert model.translate("a", nbest=np.int64(2)).alternatives


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"a b", r"^translate takes a string, or several in a list, not bytes \(b'a b'\)"),
        (None, "not None"),
        (3, r"not int \(3\)"),
        ({"en": "a"}, "not dict"),
        ([["a"]], r"input 0 must be a string, not list \(\['a'\]\)"),
        (["a", float("nan")], r"input 1 must be a string, not float \(nan\)"),
    ],
)
def test_inputs_that_are_not_text_are_named(model: Model, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        model.translate(given)


def test_texts_come_in_many_containers(model: Model) -> None:
    pandas = pytest.importorskip("pandas")
    expected = [found.text for found in model.translate(LINES)]
    for given in (tuple(LINES), iter(LINES), np.array(LINES), pandas.Series(LINES), dict.fromkeys(LINES).keys()):
        assert [found.text for found in model.translate(given)] == expected
    assert type(model.translate(np.array(LINES)[0]).source) is str
    for pair in ("ab", ("a", 1), ("a", "b", "c"), None):
        with pytest.raises(TypeError, match="pair 1 must be two strings"):
            model.score([("a", "b"), pair])  # type: ignore[list-item]


def test_half_a_surrogate_pair_is_named(model: Model) -> None:
    with pytest.raises(UserError, match="input 0: not valid Unicode"):
        model.translate("a \ud800")
