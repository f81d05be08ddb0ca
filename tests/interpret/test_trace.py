"""A trace holds what happened: its weights are the kernel's, its output the model's, its file what it held."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from regard import tensor_io
from regard.api import Model
from regard.data.builtin import pairs
from regard.errors import UserError
from regard.interpret.alignments import measure
from regard.interpret.interventions import parse
from regard.interpret.recorder import Recorder, intervene
from regard.interpret.trace import Trace, request_key
from regard.interpret.trace.stats import describe
from regard.models.bert import TextClassBatch
from regard.packed import SeqBatch
from regard.tasks.aligner import Aligner, AttentionView
from regard.tasks.translator import Translator
from regard.text import BOS, EOS, UNK
from regard.viz.maps import Map
from tiny_runs import FAMILIES, make_run, text_for

Get = Callable[[str], Model]
ATTENDING = [family for family in FAMILIES if family != "recurrent (no attention)"]
WRITING = [family for family in FAMILIES if "bert" not in family]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """A small random model of a family, made once."""
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            made[family] = Model(make_run(tmp_path_factory.mktemp("run") / "tiny", family), "cpu")
        return made[family]

    return get


def ids(trace: Trace, side: str) -> list[int]:
    return [token["id"] for token in trace.elements(side)]


# -- recorded values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ATTENDING)
def test_weights_times_values_equal_the_output_of_the_kernel(model: Get, family: str) -> None:
    """In a pass over the trace's tokens, the heads of the fused kernel are weights @ values."""
    one = model(family)
    trace = one.trace(text_for(family))
    batch = _by_hand(one, trace)
    with torch.inference_mode(), Recorder(one.module) as seen:
        one.module.logits(batch)
    assert [entry["name"] for entry in trace.header["attention"]] == list(seen.attention)
    for entry in trace.header["attention"]:
        exact = torch.from_numpy(trace.array(entry["array"]))
        value = seen.attention[entry["name"]].offered.value[0]  # [H, K, D]
        heads = seen.values[f"{entry['name']}.heads"]  # [Q, H, D], by the kernel
        torch.testing.assert_close((exact @ value).transpose(0, 1), heads, atol=1e-5, rtol=1e-4)


def _by_hand(one: Model, trace: Trace) -> Any:
    """Make the batch of a trace from its tokens."""
    from regard.packed import PackedTokens

    source, inputs, target = (ids(trace, side) for side in ("source", "inputs", "target"))
    task = trace.header["model"]["task"]
    if task == "classify":
        return TextClassBatch.from_lists([source])
    if task == "fill":
        row = PackedTokens.from_lists([inputs])
        return SeqBatch(row, row, row.ids)
    if one.run.recipe.model.family == "gpt" and task == "translate":  # one sequence in the trace, two for the model
        begin = inputs.index(BOS)
        source, inputs, target = inputs[:begin], inputs[begin:], target[begin:]
    return SeqBatch(PackedTokens.from_lists([source]), PackedTokens.from_lists([inputs]), torch.tensor(target))


@pytest.mark.parametrize("family", ATTENDING)
def test_rows_sum_to_one_and_causal_attention_is_causal(model: Get, family: str) -> None:
    trace = model(family).trace(text_for(family))
    for entry in trace.header["attention"]:
        found = trace.array(entry["array"])
        queries, keys = (len(trace.elements(entry[axis])) for axis in ("queries", "keys"))
        assert found.shape == (entry["heads"], queries, keys)
        np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-5)
        if entry["part"] == "decoder":
            assert not np.triu(found, 1).any()  # exactly zero
            assert not np.triu(trace.display(entry["array"]), 1).any()
        if entry["part"] == "decoder" and "window" in family:
            assert not np.tril(found, -3).any()  # a window of three


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_described_and_is_plain_json(model: Get, family: str) -> None:
    trace = model(family).trace(text_for(family))
    header = trace.header
    assert json.loads(json.dumps(header, allow_nan=False)) == header
    assert header["format"] == "regard-trace" and header["version"] == 2
    for name, about in header["arrays"].items():
        exact, shown = trace.array(name), trace.display(name)
        assert exact.dtype == np.float32 and list(exact.shape) == list(shown.shape) == about["shape"]
        assert str(shown.dtype) == about["dtype"] and shown.flags.c_contiguous
    named = {entry["array"] for part in ("attention", "rollout", "gates", "stream") for entry in header[part]}
    parts = {entry[kind] for entry in header["embedding"] for kind in ("tokens", "positions") if entry[kind]}
    assert named | parts | {header["output"]["logits"]} == set(header["arrays"])
    for entry in (*header["gates"], *header["stream"]):
        assert len(trace.array(entry["array"])) == len(header["axes"][entry["side"]]["elements"])
    for entry in header["stream"]:
        norms = np.linalg.norm(trace.array(entry["array"]), axis=-1)
        np.testing.assert_allclose(entry["norms"], norms, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_probabilities_are_the_softmax_of_the_logits(model: Get, family: str) -> None:
    """The most probable tokens come first, and the logit lens of the last layer gives the output."""
    trace = model(family).trace(text_for(family))
    output, target = trace.header["output"], ids(trace, "target")
    logits = torch.from_numpy(trace.array("output.logits"))
    p = logits.softmax(-1)
    for row, (label, given) in enumerate(zip(target, output["p"], strict=True)):
        if given is not None:  # a source token of another vocabulary has none
            assert given == pytest.approx(float(p[row, label]), rel=1e-3)
            assert output["logp"][row] == pytest.approx(math.log(given), abs=1e-3)
        best = p[row].topk(len(output["top"][row]))
        assert [one["p"] for one in output["top"][row]] == pytest.approx(best.values.tolist(), rel=1e-3)
        np.testing.assert_array_equal(trace.array(f"output.logits/{row}"), logits[row].numpy())
    last = trace.layers[-1]["top"]
    assert [[one["p"] for one in row] for row in last] == [
        pytest.approx([one["p"] for one in row[: len(found)]], rel=1e-3)
        for row, found in zip(output["top"], last, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logit_lens_applies_the_output_layer_to_each_stream(model: Get, family: str) -> None:
    """Layer by layer, with the model's own output layer; the header holds only the names of the layers."""
    one = model(family)
    trace = one.trace(text_for(family))
    assert [{key: layer[key] for key in layer if key != "top"} for layer in trace.layers] == trace.header["layers"]
    assert "top" not in trace.header["layers"][0]
    whole = trace.header["model"]["task"] in ("fill", "classify")
    classifies = trace.header["model"]["task"] == "classify"
    batch = SeqBatch.from_lists([ids(trace, "source")], [ids(trace, "target")], bos=BOS)
    batch = TextClassBatch.from_lists([ids(trace, "source")]) if classifies else batch
    for layer in trace.layers:
        stream = torch.from_numpy(trace.array(f"{layer['name']}.stream"))
        with torch.inference_mode():
            p = one.module.logit_lens(stream, batch).float().softmax(-1)
        assert len(layer["top"]) == (len(p) if whole else len(trace.elements("inputs")))
        for row, top in zip(p, layer["top"], strict=True):
            assert [each["p"] for each in top] == pytest.approx(row.topk(min(5, len(row))).values.tolist(), rel=1e-4)
            assert [float(row[each["id"]]) for each in top] == pytest.approx([each["p"] for each in top], rel=1e-4)


def test_the_logit_lens_is_computed_once_on_access(model: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked = model("gpt"), []
    read_off = type(one.module).logit_lens
    monkeypatch.setattr(type(one.module), "logit_lens", lambda *given: asked.append(given[1].shape) or read_off(*given))
    trace = one.trace(text_for("gpt"))
    before = len(asked)
    assert before == 1, "the output itself"
    assert trace.layers is trace.layers and len(asked) == before + len(trace.header["layers"])


@pytest.mark.parametrize("family", [family for family in WRITING if FAMILIES[family]["data"] == "en-es"])
def test_a_trace_belongs_to_the_hypothesis_that_the_beam_returned(model: Get, family: str) -> None:
    one = model(family)
    assert one.run.recipe.decoding.beam == 3
    translation, trace = one.translate(text_for(family)), one.trace(text_for(family))
    assert trace.header["text"]["target"] == translation.text
    assert trace.header["text"]["score"] == pytest.approx(translation.score, rel=1e-4)
    written = [token["text"] for token in trace.elements("target") if not token["given"]]
    assert tuple(written) == translation.tokens
    logprobs = translation._answer.hypotheses[0].logprobs
    assert trace.header["output"]["logp"][-len(logprobs) :] == pytest.approx(logprobs, abs=1e-4)
    if family.startswith("transformer"):
        for layer, found in enumerate(translation.attention.weights):
            np.testing.assert_allclose(trace.array(f"decoder.{layer}.cross_attn.weights"), found, atol=1e-5)


def test_a_text_is_continued_greedily(model: Get) -> None:
    one = model("gpt")
    trace = one.trace("Once upon a time")
    found = one.generate("Once upon a time", tokens=12, method="beam", beam=1)
    assert trace.header["text"]["target"] == found.text
    given = [token["given"] for token in trace.elements("target")]
    prompt = one.generator().read("Once upon a time")[0]
    assert given == [True] * (len(prompt) - 1) + [False] * len(found.hypotheses[0].logprobs)
    assert ids(trace, "inputs")[1:] == ids(trace, "target")[:-1]  # each position predicts the next


def test_masks_are_filled_as_fill_does(model: Get) -> None:
    one = model("bert (fill)")
    trace = one.trace("Once [MASK] a [MASK] there")
    assert trace.header["text"]["target"] == one.fill("Once [MASK] a [MASK] there").text
    gaps = [place for place, token in enumerate(trace.elements("target")) if not token["given"]]
    guesses = one.fill("Once [MASK] a [MASK] there", top=1).guesses
    assert [trace.header["output"]["p"][gap] for gap in gaps] == pytest.approx(
        [guess[0].probability for guess in guesses], rel=1e-3
    )


def test_a_class_is_that_of_predict(model: Get) -> None:
    one = model("bert (classify)")
    prediction = one.predict("Tom was sad.")
    assert one.trace("Tom was sad.").header["text"]["target"] == prediction.label
    happy = one.trace("Tom was sad.", "happy")
    assert happy.header["text"]["target"] == "happy"
    assert happy.header["output"]["p"] == [pytest.approx(prediction.probabilities["happy"], rel=1e-4)]


@pytest.mark.parametrize("family", ["transformer", "recurrent (additive)"])
def test_a_given_target_is_scored_unchanged(model: Get, family: str) -> None:
    one = model(family)
    trace = one.trace("this cat is very large", "este gato es muy grande")
    assert trace.header["output"]["logp"] == pytest.approx(
        one.score([("this cat is very large", "este gato es muy grande")])[0], abs=1e-4
    )
    assert trace.header["text"]["score"] == pytest.approx(
        one.forced("this cat is very large", "este gato es muy grande").score, rel=1e-4
    )


@pytest.mark.parametrize("family", WRITING)
def test_extending_token_by_token_gives_the_greedy_output(model: Get, family: str) -> None:
    """`after` holds the output so far; one more token each time gives the output of greedy search."""
    one, text = model(family), text_for(family)
    so_far: list[int] = []
    for _ in range(3):
        trace = one.trace(text, after=so_far)
        written = [token["id"] for token in trace.elements("target") if not token["given"]]
        assert len(written) == 1 and len(trace.header["output"]["p"]) == len(trace.elements("inputs"))
        so_far = [*so_far, *written]
    if one.run.recipe.data.kind == "text":
        greedy = one.generate(text, tokens=3, method="beam", beam=1).hypotheses[0].tokens
    else:
        greedy = one.translator(beam=1)([text])[0].hypotheses[0].tokens
    assert tuple(so_far) == tuple(greedy[:3])


def test_outputs_that_cannot_be_extended_are_refused(model: Get) -> None:
    one = model("transformer")
    for after, why in (([EOS], "no token follows EOS"), ([99999], "no token 99999"), ([5] * 60, "the model can write")):
        with pytest.raises(UserError, match=why):
            one.trace("this cat", after=after)
    with pytest.raises(UserError, match="not both"):
        one.trace("this cat", "gato", after=[])
    with pytest.raises(UserError, match="blank"):
        one.trace("  ")
    with pytest.raises(UserError, match="longer than"):
        one.trace("this cat", "gato " * 100)
    with pytest.raises(UserError, match="takes no target"):
        model("bert (fill)").trace("a [MASK]", "a cat")
    with pytest.raises(UserError, match="'xyzzy' is not a class"):
        model("bert (classify)").trace("Tom", "xyzzy")


# -- tokens, words, heads ----------------------------------------------------------------------------------------------


def test_tokens_are_described(model: Get) -> None:
    tokens = model("transformer").trace("this cat, very large").elements("source")
    assert tokens[-1] | {"id": EOS, "special": True, "group": -1} == tokens[-1]
    assert "".join(token["text"] for token in tokens[:-1]) == "this cat, very large"
    comma = next(token for token in tokens if token["text"] == ",")
    assert comma["punctuation"] and comma["group"] == 1  # no blank before it
    assert tokens[0]["group"] == 0 and tokens[-2]["group"] == 3


def test_text_that_looks_like_a_special_token_is_text(model: Get) -> None:
    tokens = model("transformer").trace("a </s> b").elements("source")
    assert [token["special"] for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert max(token["group"] for token in tokens) == 2


def test_head_statistics_equal_their_sums_cell_by_cell() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(7, 0.1), (3, 5))  # [H, Q, K], of which some are next to nothing
    weights[0, 2], weights[1, :, 4] = 0.0, 0.0  # a query without weights, and a key without weights
    special, points = rng.random(7) < 0.4, rng.random(7) < 0.4
    found = describe(torch.tensor(weights), torch.tensor(special).float(), torch.tensor(points).float())
    for head, told in zip(weights, found, strict=True):
        rows = [row for row in head if row.sum() > 0]
        cells = [(q, k, w) for q, row in enumerate(head) for k, w in enumerate(row)]
        expected = {
            "entropy": sum(-w * math.log(w) for _, _, w in cells if w > 0),
            "diagonal": sum(w for q, k, w in cells if abs(k - q * 6 / 4) <= 1),
            "special": sum(w for _, k, w in cells if special[k]),
            "punctuation": sum(w for _, k, w in cells if points[k]),
        }
        assert told == {name: pytest.approx(value / len(rows), rel=1e-4) for name, value in expected.items()}


def test_head_statistics_by_hand() -> None:
    """One head on the diagonal and one with equal weights, over two words and EOS."""
    straight, even, third = np.eye(3), np.full((3, 3), 1 / 3), pytest.approx(1 / 3, rel=1e-5)
    special, points = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    one, other = describe(torch.tensor(np.stack([straight, even])), special, points)
    assert one == {"entropy": 0.0, "diagonal": 1.0, "special": third, "punctuation": third}
    assert other["entropy"] == pytest.approx(math.log(3), rel=1e-5) and other["diagonal"] == pytest.approx(
        7 / 9, rel=1e-5
    )
    (empty,) = describe(torch.zeros(1, 2, 3), special, points)
    assert empty == {"entropy": 0.0, "diagonal": 0.0, "special": 0.0, "punctuation": 0.0}


def test_gold_links_and_their_error_are_those_of_evaluate(tmp_path: Path) -> None:
    """For the reference, force-decoded, the AER of every head is that of `regard align`."""
    run = make_run(tmp_path / "run", "transformer")
    one = Model(run, "cpu")
    pair = next(pairs("en-es", "test"))
    gold = one.trace(pair.source, pair.target).header["gold"]
    assert gold["links"] == sorted([j, i] for i, j in pair.alignment)
    from regard.metrics.alignment import Aligned, Gold

    corpus = [Aligned(pair.source, pair.target, Gold.of(pair.alignment))]
    counted = measure(Aligner(one.module, run.tokenizers, run.recipe), corpus).scores
    for layer in range(2):
        name = f"decoder.{layer}.cross_attn"
        assert gold["aer"][name] == pytest.approx(
            [counted[AttentionView(layer, head)].aer for head in range(2)], rel=1e-5
        )
        assert gold["mean"][name] == pytest.approx(counted[AttentionView(layer)].aer, rel=1e-5)
    assert gold["all"] == pytest.approx(counted[AttentionView()].aer, rel=1e-5)
    other = one.trace(pair.source, "otra cosa").header
    assert other["gold"] is None and other["text"]["reference"] == pair.target
    assert one.trace("no such sentence").header["text"]["reference"] is None


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["transformer", "recurrent (additive)", "gpt", "bert (fill)"])
def test_a_file_holds_the_trace_to_its_stated_precision(model: Get, family: str, tmp_path: Path) -> None:
    trace = model(family).trace(text_for(family))
    trace.save(tmp_path / "trace.safetensors")
    loaded = Trace.load(tmp_path / "trace.safetensors")
    assert (loaded.header, loaded.layers) == (trace.header, trace.layers)
    for name, about in trace.header["arrays"].items():
        np.testing.assert_array_equal(loaded.display(name), trace.display(name))
        exact, read = trace.array(name), loaded.array(name)
        assert read.dtype == np.float32
        if about["dtype"] == "uint8":
            assert np.abs(read - exact).max() <= 0.5 / 255 + 1e-6  # half a step
        elif about["dtype"] == "float16":
            np.testing.assert_allclose(read, exact, rtol=2**-11, atol=2**-25)
        else:
            np.testing.assert_array_equal(read, exact)
    loaded.save(tmp_path / "again.safetensors")
    again = Trace.load(tmp_path / "again.safetensors")
    assert all(np.array_equal(again.display(name), trace.display(name)) for name in trace.names)


def test_values_beyond_float16_are_stored_as_float32(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "transformer")
    one = Model(run, "cpu")
    with torch.no_grad():
        one.module.decoder[0].self_attn.out_proj.bias += 1e6  # type: ignore[operator, union-attr, index]
    trace = one.trace("this cat")
    kinds = {name: about["dtype"] for name, about in trace.header["arrays"].items()}
    assert kinds["decoder.0.self_attn.stream"] == "float32" and kinds["encoder.0.self_attn.stream"] == "float16"
    assert np.isfinite(trace.display("decoder.0.self_attn.stream")).all()


def test_a_file_that_is_no_trace_is_named(model: Get, tmp_path: Path) -> None:
    trace = model("transformer").trace("this cat")
    path = tmp_path / "trace.safetensors"
    tensors = {"a": torch.zeros(1)}
    for about, why in (
        ({"format": "something"}, "is no trace"),
        (trace.header | {"version": 1}, "version 1; this regard reads version 2"),
        (trace.header, "do not agree"),
    ):
        tensor_io.save(path, tensors, about)
        with pytest.raises(UserError, match=why):
            Trace.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        Trace.load(path)
    for name in ("decoder.9.cross_attn.weights", "output.logits/999", "output.logits/-1", "output.logits/x"):
        with pytest.raises(KeyError, match="no array"):
            trace.array(name)


def test_a_trace_of_a_snapshot_has_its_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "transformer")
    best, early = Model(run, "cpu"), Model(run, "cpu", run.snapshot(10))
    assert (best.trace("this cat").header["model"]["step"], early.trace("this cat").header["model"]["step"]) == (20, 10)


def test_a_request_is_one_string_in_python_and_in_the_page() -> None:
    """As JSON.stringify writes it: no spaces, no needless escapes, 1.0 as 1."""
    changes = [{"kind": "row", "weights": [1.0, 0.25]}]
    assert request_key("en-es", None, 'é "', None, [3], changes) == (
        '["en-es",null,"é \\"",null,[3],[{"kind":"row","weights":[1,0.25]}]]'
    )


def test_a_map_can_be_made_of_any_attention(model: Get) -> None:
    trace = model("gpt").trace("Once upon a time")
    entry = trace.header["attention"][0]
    labels = tuple(token["label"] for token in trace.elements("inputs"))
    assert Map(trace.array(entry["array"])[0], labels, labels).weights.shape == (len(labels), len(labels))


# -- interventions -----------------------------------------------------------------------------------------------------


def head(attention: str, number: int) -> dict[str, Any]:
    return {"kind": "head", "attention": attention, "head": number}


@pytest.mark.parametrize("family", ATTENDING)
def test_ablating_a_head_equals_intervening_by_hand(model: Get, family: str) -> None:
    one, text = model(family), text_for(family)
    plain = one.trace(text)
    name = plain.header["attention"][-1]["name"]
    changed = one.trace(text, changes=[head(name, 0)])

    def silent(weights: torch.Tensor) -> torch.Tensor:
        off = weights.clone()
        off[..., 0, :, :] = 0.0
        return off

    with torch.inference_mode(), intervene(one.module, {f"{name}.weights": silent}):
        by_hand = one.module.logits(_by_hand(one, plain)).float()
    held = changed.header["held"]["logp"]
    labels = ids(plain, "target")[-len(by_hand) :]
    expected = functional.log_softmax(by_hand, -1)[range(len(labels)), labels].tolist()
    assert held[-len(labels) :] == pytest.approx(expected, abs=1e-3)
    assert changed.header["before"]["p"] == plain.header["output"]["p"]
    assert changed.header["before"]["text"] == plain.header["text"]["target"]
    assert changed.header["changes"] == [head(name, 0)]
    assert held != pytest.approx(plain.header["output"]["logp"], abs=1e-5)


@pytest.mark.parametrize("family", ["transformer", "recurrent (additive)", "recurrent (heads)", "gpt on pairs"])
def test_the_output_under_ablation_is_that_of_the_search_under_intervention(model: Get, family: str) -> None:
    one, text = model(family), text_for(family)
    name = one.trace(text).header["attention"][-1]["name"]

    def silent(heads: torch.Tensor) -> torch.Tensor:
        off = heads.clone()
        off[..., 0, :] = 0.0
        return off

    changed = one.trace(text, changes=[head(name, 0)])
    with intervene(one.module, {f"{name}.heads": silent}):
        assert changed.header["text"]["target"] == one.translate(text).text


@pytest.mark.parametrize("family", ["transformer", "recurrent (additive)", "gpt on pairs"])
def test_masking_a_word_equals_translating_with_the_unknown_token(model: Get, family: str) -> None:
    one, text = model(family), text_for(family)
    plain = one.trace(text)
    side = "source" if plain.elements("source") else "inputs"
    changed = one.trace(text, changes=[{"kind": "hide", "side": side, "element": 1}])
    translator: Translator = one.translator()
    source = translator.encode([text])[0][0]
    source[1] = UNK
    assert ids(changed, side)[: len(source)] == source
    (best,) = translator.of_tokens([source])
    assert changed.header["text"]["target"] == one.run.tokenizers[1].decode(best.tokens)
    with torch.inference_mode():
        said = [token["id"] for token in plain.elements("target")]
        said = said[len(source) :] if side == "inputs" else said
        logits = one.module.logits(SeqBatch.from_lists([source], [said], bos=BOS)).float()
    expected = functional.log_softmax(logits, -1)[range(len(said)), said].tolist()
    assert changed.header["held"]["logp"][-len(said) :] == pytest.approx(expected, abs=1e-4)


def test_masking_a_word_of_a_prompt(model: Get) -> None:
    one = model("gpt")
    changed = one.trace("Once upon a time", changes=[{"kind": "hide", "side": "inputs", "element": 2}])
    assert ids(changed, "inputs")[2] == UNK and ids(changed, "target")[1] == UNK
    view, _ = one.generator().read("Once upon a time")
    view[2] = UNK
    found = one.generator(method="beam", beam=1).after(view, 12)
    assert [token["id"] for token in changed.elements("target") if not token["given"]] == list(found.tokens)


@pytest.mark.parametrize("family", ATTENDING)
def test_a_replaced_row_is_used_and_the_output_is_forced(model: Get, family: str) -> None:
    one, text = model(family), text_for(family)
    plain = one.trace(text)
    entry = plain.header["attention"][-1]
    before = plain.array(entry["array"])
    wanted = [3.0] + [0.0] * (before.shape[2] - 1)
    row = {"kind": "row", "attention": entry["name"], "head": 0, "query": 1, "weights": wanted}
    changed = one.trace(text, changes=[row])
    after = changed.array(entry["array"])
    assert after[0, 1].tolist() == [1.0] + [0.0] * (before.shape[2] - 1)  # made to sum to one
    rest = np.ones(before.shape[:2], dtype=bool)
    rest[0, 1] = False
    np.testing.assert_allclose(after[rest], before[rest], atol=1e-6)
    assert changed.header["text"]["target"] == plain.header["text"]["target"]
    assert changed.header["output"]["p"] == changed.header["held"]["p"]

    def by_hand(weights: torch.Tensor) -> torch.Tensor:
        other = weights.clone()
        other[0, 0, 1] = 0.0
        other[0, 0, 1, 0] = 1.0
        return other

    with torch.inference_mode(), intervene(one.module, {f"{entry['name']}.weights": by_hand}):
        logits = one.module.logits(_by_hand(one, plain)).float()
    exact = changed.array("output.logits")[-len(logits) :]
    np.testing.assert_allclose(exact, logits.numpy(), atol=1e-4, rtol=1e-4)


def test_a_replaced_row_respects_the_mask(model: Get) -> None:
    one = model("gpt")
    trace = one.trace("Once upon a time")
    entry = trace.header["attention"][0]
    keys = len(trace.elements("inputs"))
    row = {"kind": "row", "attention": entry["name"], "head": None, "query": 1}
    changed = one.trace("Once upon a time", changes=[{**row, "weights": [1.0] * keys}])
    assert changed.array(entry["array"])[:, 1].tolist() == [[0.5, 0.5] + [0.0] * (keys - 2)] * entry["heads"]
    with pytest.raises(UserError, match="may not attend to any"):
        one.trace("Once upon a time", changes=[{**row, "weights": [0.0] * (keys - 1) + [1.0]}])


def test_no_changes_change_nothing(model: Get) -> None:
    trace = model("transformer").trace("this cat")
    assert trace.header["before"] is None and trace.header["held"] is None and trace.header["changes"] == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "brain"}, "one of head, hide, edge, row"),
        ({"kind": "head", "attention": "decoder.0.cross_attn"}, "has attention, head"),
        (head("decoder.7.cross_attn", 0), "no attention 'decoder.7.cross_attn': there are encoder.0.self_attn"),
        (head("decoder.0.cross_attn", 2), "no head 2 in decoder.0.cross_attn: it has 2"),
        (head("decoder.0.cross_attn", -1), "no head -1"),
        ({"kind": "head", "attention": "decoder.0.cross_attn", "head": True}, "head = True"),
        ({"kind": "hide", "side": "inputs", "element": 0}, "only elements of the"),
        ({"kind": "hide", "side": "source", "element": 99}, "no element 99"),
        ({"kind": "hide", "side": "source", "element": -1}, "no element -1"),
        (
            {"kind": "row", "attention": "decoder.0.cross_attn", "head": 0, "query": 0, "weights": [1.0]},
            "1 weights for the",
        ),
        ({"kind": "row", "attention": "decoder.0.cross_attn", "head": 0, "query": 99, "weights": [1.0]}, "no query 99"),
        (
            {"kind": "row", "attention": "decoder.0.cross_attn", "head": 0, "query": 0, "weights": [0.0]},
            "not all of them 0",
        ),
        (
            {"kind": "row", "attention": "decoder.0.cross_attn", "head": 0, "query": 0, "weights": [-1.0, 2.0]},
            "from 0 to a million",
        ),
        (
            {"kind": "row", "attention": "decoder.0.cross_attn", "head": 0, "query": 0, "weights": [10**400]},
            "a million",
        ),
        (
            {"kind": "row", "attention": "decoder.0.cross_attn", "head": 0, "query": 0, "weights": [math.nan]},
            "from 0 to a million",
        ),
    ],
)
def test_an_invalid_intervention_is_refused(model: Get, change: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        model("transformer").trace("this cat is very large", changes=[change])
    assert "\n" not in str(refused.value)


def test_special_tokens_cannot_be_masked(model: Get) -> None:
    one = model("transformer")
    end = len(one.trace("this cat").elements("source")) - 1
    with pytest.raises(UserError, match="is a special token"):
        one.trace("this cat", changes=[{"kind": "hide", "side": "source", "element": end}])


def test_interventions_survive_a_round_trip_through_json() -> None:
    row = {"kind": "row", "attention": "a", "head": None, "query": 0, "weights": [1.0, 2.0]}
    (read,) = parse([row])
    assert parse([read]) == (read,)


def test_tracing_does_not_change_later_results(model: Get) -> None:
    one = model("transformer")
    before = one.translate("this cat is very large")
    one.trace("this cat is very large", changes=[head("decoder.0.cross_attn", 0)])
    after = one.translate("this cat is very large")
    assert (before.text, before.score) == (after.text, after.score)


def test_a_trace_of_a_long_text_and_many_heads_is_small(tmp_path: Path) -> None:
    """512 tokens, 12 layers of 12 heads: one byte per weight."""
    run = make_run(tmp_path / "run", "gpt", width=24, heads=12, layers=12, max_positions=560)
    trace = Model(run, "cpu").trace("Once upon a time there was a cat. " * 45)
    tokens = len(trace.elements("inputs"))
    shapes = [trace.header["arrays"][entry["array"]]["shape"] for entry in trace.header["attention"]]
    assert tokens > 480 and shapes == [[12, tokens, tokens]] * 12
    assert sum(trace.display(entry["array"]).nbytes for entry in trace.header["attention"]) == 144 * tokens**2


# -- masks, forced outputs, the vocabulary -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["transformer", "gpt", "bert (fill)"])
def test_a_mask_lists_the_keys_of_each_query(model: Get, family: str) -> None:
    trace = model(family).trace(text_for(family))
    causal = 0
    for entry in trace.header["attention"]:
        found = trace.array(entry["array"])
        seen = np.ones(found.shape[1:], bool)
        if entry["mask"] is not None:
            causal += 1
            for query, edges in enumerate(trace.header["masks"][entry["mask"]]):
                seen[query] = False
                for start, stop in zip(edges[::2], edges[1::2], strict=True):
                    seen[query, start:stop] = True
            np.testing.assert_array_equal(seen, np.tril(np.ones_like(seen)))
        assert (found[:, ~seen] == 0).all() and (found[:, seen] > 0).all()
    decoders = [entry for entry in trace.header["attention"] if entry["part"] == "decoder"]
    assert causal == len(decoders) and len(trace.header["masks"]) == bool(decoders)


@pytest.mark.parametrize("family", ["transformer", "gpt"])
def test_a_replaced_row_forces_the_output_and_the_free_one_is_recorded_too(model: Get, family: str) -> None:
    one, text = model(family), text_for(family)
    plain = one.trace(text)
    assert not plain.header["forced"] and plain.header["free"] is None
    entry = plain.header["attention"][-1]
    shape = plain.array(entry["array"]).shape
    query = shape[1] - 1  # of the last token, so that the tokens before it stay what they are
    same = [
        {"kind": "row", "attention": entry["name"], "head": head, "query": query, "weights": row.tolist()}
        for head, row in enumerate(plain.array(entry["array"])[:, query])
    ]
    kept = one.trace(text, changes=same).header
    greedy = (
        one.translate(text, beam=1) if family == "transformer" else one.generate(text, beam=1, method="beam", tokens=12)
    )
    assert kept["forced"] and kept["text"]["target"] == plain.header["text"]["target"]
    assert kept["free"]["text"] == greedy.text
    first = plain.elements("target").index(next(t for t in plain.elements("target") if not t["given"]))
    only = {
        "kind": "row",
        "attention": entry["name"],
        "head": None,
        "query": first,
        "weights": [1.0] + [0.0] * (shape[2] - 1),
    }
    hidden = {"kind": "hide", "side": "source" if family == "transformer" else "inputs", "element": 1}
    changed = one.trace(text, changes=[only, hidden]).header
    assert changed["forced"] and changed["text"]["target"] == changed["before"]["text"]
    assert changed["free"]["logp"] <= 0 and changed["free"]["text"] is not None
    off = {"kind": "head", "attention": entry["name"], "head": 0}
    assert not one.trace(text, changes=[off]).header["forced"]


def test_the_vocabulary_holds_every_token_and_is_saved_with_the_trace(model: Get, tmp_path: Path) -> None:
    trace = model("gpt").trace("Once upon")
    assert len(trace.vocabulary) == trace.header["model"]["vocabulary"]
    for top in trace.header["output"]["top"]:
        assert all(trace.vocabulary[one["id"]] == one["text"] for one in top)
    trace.save(tmp_path / "trace.safetensors")
    again = Trace.load(tmp_path / "trace.safetensors")
    assert again.vocabulary == trace.vocabulary and "vocabulary" not in again.header
