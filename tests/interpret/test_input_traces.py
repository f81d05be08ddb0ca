"""Traces of images, graphs and episodes: their axes, weights, rollout and what hiding an element does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.api import Model
from regard.attention.backends import use_backend
from regard.data.shapes import Shapes
from regard.errors import UserError
from regard.interpret.interventions import hiding
from regard.interpret.recorder import Recorder
from regard.interpret.trace import Trace
from regard.packed import FeatureBatch, PackedLayout
from regard.tasks.axes import Hidden
from regard.text import BOS, EOS, PAD
from regard.viz import views
from regard.viz.overlays.patches import pixel_values
from regard.viz.views import MapChoice
from tiny_runs import INPUTS, WRITTEN, make_input_run

Get = Callable[[str], Model]
ALL = INPUTS | WRITTEN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """A small random model of a recipe, made once."""
    made: dict[str, Model] = {}

    def get(recipe: str) -> Model:
        if recipe not in made:
            if recipe == "molecules":
                pytest.importorskip("rdkit")
            made[recipe] = Model(make_input_run(tmp_path_factory.mktemp("run") / recipe, recipe), "cpu")
        return made[recipe]

    return get


def recorded(one: Model, batch: Any) -> Recorder:
    with torch.no_grad(), use_backend("plain"), Recorder(one.module) as seen:
        one.module.logits(batch)
    return seen


def dense_layers(one: Model, batch: Any) -> list[torch.Tensor]:
    """The weights [H, N, N] of every layer, between all positions."""
    seen = recorded(one, batch)
    with torch.no_grad():
        return [attention.sentence(0) for attention in seen.attention.values()]


@pytest.mark.parametrize("recipe", ALL)
def test_a_trace_describes_its_input_and_saves_all_of_it(model: Get, recipe: str, tmp_path: Path) -> None:
    trace = model(recipe).trace(ALL[recipe])
    header = trace.header
    assert json.loads(json.dumps(header, allow_nan=False)) == header
    kind = header["axes"][header["model"]["input"]]["kind"]
    kinds = {"shapes": "patches", "scenes": "patches", "tones": "frames", "key-door": "steps"}
    assert kind == kinds.get(recipe, "nodes")
    for entry in (*header["attention"], *header["rollout"]):
        weights = trace.array(entry["array"])
        assert weights.shape == (entry["heads"], *(len(trace.elements(entry[axis])) for axis in ("queries", "keys")))
        assert weights.min() >= 0 and weights.sum(-1).max() <= 1 + 1e-5
        if kind != "nodes":  # the rest of a row goes to nodes that are not shown
            np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    trace.save(tmp_path / "trace.safetensors")
    again = Trace.load(tmp_path / "trace.safetensors")
    assert again.header == header
    for name in trace.names:
        np.testing.assert_array_equal(again.display(name), trace.display(name))


def test_the_patches_of_an_image_are_its_pixels(model: Get) -> None:
    trace = model("shapes").trace("test 2")
    image = list(Shapes.images("test", 2))[1][0]
    np.testing.assert_allclose(trace.array("axes.source.image"), image / 255, atol=1e-6)
    boxes = [element["box"] for element in trace.elements("source")]
    assert len(boxes) == 16 and boxes[5] == [6, 6, 6, 6] and trace.elements("source")[5]["label"] == "2,2"
    covered = np.zeros((24, 24))
    for x, y, width, height in boxes:
        covered[y : y + height, x : x + width] += 1
    assert (covered == 1).all()


def test_a_hidden_patch_is_read_as_zeros(model: Get) -> None:
    """The projection of a grey patch is its bias; other patches are read as before."""
    one = model("shapes")
    inspection = one.task.inspect(one.run, list(Shapes.images("test", 2))[1][0])  # type: ignore[attr-defined]
    hidden = one.task.hide(inspection, Hidden((5,)))  # type: ignore[attr-defined]
    before, after = (recorded(one, each.content).values["tokens.tokens"] for each in (inspection, hidden))
    torch.testing.assert_close(after[5], one.module.tokens.stem.project.bias)  # type: ignore[union-attr, arg-type]
    others = [n for n in range(16) if n != 5]
    torch.testing.assert_close(after[others], before[others])


def test_weights_of_shown_nodes_are_those_of_the_dense_attention(model: Get) -> None:
    one = model("citations")
    trace = one.trace("paper-3")
    inspection = one.task.inspect(one.run, 3)  # type: ignore[attr-defined]
    rows = list(inspection.axis.rows)
    for entry, dense in zip(trace.header["attention"], dense_layers(one, inspection.content), strict=True):
        expected = dense[:, rows][:, :, rows].numpy()
        np.testing.assert_allclose(trace.array(entry["array"]), expected, atol=1e-6)
        allowed = expected.sum(0) > 0
        ranges = trace.header["masks"][entry["mask"]]
        for query, edges in enumerate(ranges):
            keys = [k for start, stop in zip(edges[::2], edges[1::2], strict=True) for k in range(start, stop)]
            assert set(np.flatnonzero(allowed[query])) <= set(keys)
    centre = trace.array(trace.header["attention"][0]["array"])[:, trace.header["axes"]["source"]["focus"]]
    np.testing.assert_allclose(centre.sum(-1), 1, atol=1e-5)  # all its neighbours are shown


@pytest.mark.parametrize("recipe", INPUTS)
def test_rollout_is_the_product_of_layers_with_residual_connections(model: Get, recipe: str) -> None:
    one = model(recipe)
    trace = one.trace(INPUTS[recipe])
    if recipe == "key-door":
        layers = [trace.array(entry["array"]).mean(0) for entry in trace.header["attention"]]
        rows = range(len(layers[0]))
    else:
        given = one.task.read_argument(INPUTS[recipe])  # type: ignore[attr-defined]
        inspection = one.task.inspect(one.run, given)  # type: ignore[attr-defined]
        layers = [layer.mean(0).numpy() for layer in dense_layers(one, inspection.content)]
        rows = inspection.axis.rows or range(len(layers[0]))
    product = np.eye(len(layers[0]))
    for layer in layers:  # the first layer is the rightmost factor
        product = (layer.astype(np.float64) + np.eye(len(layer))) / 2 @ product
    (entry,) = trace.header["rollout"]
    np.testing.assert_allclose(trace.array(entry["array"])[0], product[np.ix_(list(rows), list(rows))], atol=1e-5)


def test_a_hidden_step_is_the_same_as_a_sequence_without_it(model: Get) -> None:
    """Steps have absolute times, so that nothing but attention connects them."""
    one = model("key-door")
    plain = one.trace(INPUTS["key-door"])
    steps = plain.header["axes"]["inputs"]["steps"]
    hidden = one.trace(INPUTS["key-door"], changes=hiding(plain.header, [str(steps[1]["number"])]))
    from regard.interpret.trace.adapters import adapter_for

    adapter = adapter_for(one)
    inspection, _ = adapter.encode(INPUTS["key-door"])
    batch = inspection.content
    kept = torch.tensor([n for n in range(len(steps)) if n != 1])
    shorter = replace(
        batch,
        layout=PackedLayout([len(steps) - 1]),
        **{name: getattr(batch, name)[kept] for name in ("returns", "states", "actions", "times")},
    )
    with torch.inference_mode():
        expected = one.module.logits(shorter)
    logits = hidden.array("output.logits")
    np.testing.assert_allclose(logits[kept], expected.numpy(), atol=1e-5)
    assert np.abs(logits[2:] - plain.array("output.logits")[2:]).max() > 1e-4


def test_a_hidden_edge_or_node_is_not_attended_to(model: Get) -> None:
    one = model("citations")
    plain = one.trace("paper-3")
    axis = plain.header["axes"]["source"]
    focus = axis["focus"]
    other = next(b if a == focus else a for a, b in axis["edges"] if focus in (a, b))
    names = [plain.elements("source")[n]["label"] for n in (focus, other)]
    array = plain.header["attention"][0]["array"]
    for hide, gone in (([":".join(names)], [(focus, other), (other, focus)]), ([names[1]], [(focus, other)])):
        hidden = one.trace("paper-3", changes=hiding(plain.header, hide))
        for receiver, sender in gone:
            assert (plain.array(array)[:, receiver, sender] > 0).all()
            assert (hidden.array(array)[:, receiver, sender] == 0).all()
        np.testing.assert_allclose(hidden.array(array)[:, focus].sum(-1), 1, atol=1e-5)
        assert hidden.header["before"]["p"] == plain.header["output"]["p"] != hidden.header["output"]["p"]
    alone = one.trace("paper-3", changes=hiding(plain.header, [names[0]]))
    np.testing.assert_allclose(alone.array(array)[:, focus, focus], 1, atol=1e-6)


def test_a_hidden_bond_of_a_molecule_is_hidden_as_a_node_too(model: Get) -> None:
    """Without the bond between its two atoms, a molecule is two single atoms to the model."""
    one = model("molecules")
    plain = one.trace("CO")
    split = one.trace("CO", changes=hiding(plain.header, ["C1:O2"]))
    (array, *_) = (entry["array"] for entry in plain.header["attention"])
    np.testing.assert_allclose(split.array(array), np.stack([np.eye(2)] * len(split.array(array))), atol=1e-6)
    assert plain.array(array)[:, 0, 1].min() > 0
    assert split.header["output"]["numbers"] != plain.header["output"]["numbers"] == split.header["before"]["numbers"]


# -- sound -------------------------------------------------------------------------------------------------------------


def test_the_frames_of_a_recording_divide_its_time(model: Get) -> None:
    """With a subsampling of 2, frame i is centred at the window of frame 2i: 20 i ms later than the first, at 12.5."""
    one = model("tones")
    trace = one.trace("test 2")
    features = one.task.features(one.task.read_argument("test 2"))  # type: ignore[attr-defined]
    axis, elements = trace.header["axes"]["source"], trace.elements("source")
    assert axis["seconds"] == pytest.approx((len(features) - 1) * 0.01 + 0.025)
    times = [tuple(element["time"]) for element in elements]
    assert times[0] == (0.0, 0.0225) and times[1] == (0.0225, 0.0425) and times[-1][1] == axis["seconds"]
    assert all(end == begin for (_, end), (begin, _) in pairwise(times))
    low, high = features.min(), features.max()
    shown = trace.array("axes.source.spectrogram")
    np.testing.assert_allclose(shown, (features - low) / (high - low), atol=1e-6)


@pytest.mark.parametrize("subsample", [1, 2, 4])
def test_hidden_frames_are_read_as_zeros(subsample: int, tmp_path: Path) -> None:
    one = Model(make_input_run(tmp_path / "run", "tones", f"model.subsample={subsample}"), "cpu")
    task: Any = one.task
    inspection = task.inspect(task.read_argument("test 2"))
    frames = len(inspection.axis)
    each = [np.flatnonzero((task.hide(inspection, Hidden((n,))).content == 0).all(1)) for n in range(frames)]
    np.testing.assert_array_equal(np.concatenate(each), np.arange(len(inspection.content)))  # each belongs to one
    middle = frames // 2
    assert abs(each[middle].mean() - (middle * subsample - (subsample > 1) / 2)) < 0.01
    with pytest.raises(UserError, match="only graphs have edges, and this input has frames"):
        task.hide(inspection, Hidden(edges=((0, 1),)))


def test_a_trace_has_the_spikes_of_ctc(model: Get) -> None:
    one = model("tones")
    trace = one.trace("test 2", target="a e i")
    about = trace.header["ctc"]
    batch = FeatureBatch.from_lists([one.task.inspect(one.task.read_argument("test 2")).content], [[EOS]], bos=BOS)  # type: ignore[attr-defined]
    with torch.inference_mode():
        encoded, layout = one.module.encode(batch.source)  # type: ignore[operator]
        expected = one.module.ctc_log_probs(encoded, layout)[0].exp().numpy()  # type: ignore[operator]
    letters = one.run.tokenizers[1].encode("a e i")
    np.testing.assert_allclose(trace.array(about["array"]), expected[:, [PAD, *letters]].T, atol=1e-5)
    assert about["starts"] == sorted(about["starts"]) and len(about["starts"]) == 3


def test_a_trace_of_ctc_alone_has_the_text_and_its_frames(tmp_path: Path) -> None:
    changes = ("model.ctc_weight=1", "model.decoder_layers=0")
    one = Model(make_input_run(tmp_path / "run", "tones", *changes), "cpu")
    trace = one.trace("test 2")
    assert trace.header["text"]["target"] == one.transcribe(soundless(one)).text
    assert {entry["part"] for entry in trace.header["attention"]} == {"encoder"}
    given = one.trace("test 2", target="a e i")
    starts, spikes = given.header["ctc"]["starts"], given.array("output.ctc")
    assert given.header["output"]["p"] == pytest.approx(
        [spikes[n + 1, start] for n, start in enumerate(starts)], rel=1e-3
    )
    assert "CTC" in views.draw(given, "overlay").scene().svg()
    with pytest.raises(UserError, match="the target needs more than the"):
        one.trace("test 2", target="a " * 60)


def soundless(one: Model) -> Any:
    """The samples of the example that traces are made of, without a file."""
    task: Any = one.task
    return task.read_argument("test 2").samples(8000)


def test_hidden_patches_of_a_caption_are_grey_in_the_picture_and_for_the_model(model: Get) -> None:
    one = model("scenes")
    plain = one.trace("test 2")
    hidden = one.trace("test 2", changes=hiding(plain.header, ["2,3"]))
    image = hidden.array("axes.source.image")
    np.testing.assert_allclose(image[8:16, 16:24], 0.5, atol=0.01)
    kept = np.ones((48, 48), bool)
    kept[8:16, 16:24] = False
    np.testing.assert_allclose(image[kept], plain.array("axes.source.image")[kept], atol=1e-6)


def test_predictions_are_those_of_predict(model: Get) -> None:
    for recipe, given in (("shapes", list(Shapes.images("test", 2))[1][0]), ("citations", "paper-3")):
        predicted = model(recipe).predict(given)
        trace = model(recipe).trace(INPUTS[recipe])
        assert trace.header["text"]["target"] == predicted.label
        assert trace.header["output"]["p"] == [pytest.approx(predicted.probability, rel=1e-4)]
    numbers = model("molecules").predict("CC(=O)CCO").numbers
    trace = model("molecules").trace("CC(=O)CCO")
    assert trace.header["output"]["numbers"] == [pytest.approx(list(numbers), rel=1e-4)]


def test_a_given_class_is_traced_with_its_probability(model: Get) -> None:
    probabilities = model("shapes").predict(list(Shapes.images("test", 2))[1][0]).probabilities
    trace = model("shapes").trace("test 2", target="blue cross")
    assert trace.header["output"]["p"] == [pytest.approx(probabilities["blue cross"], rel=1e-4)]


def test_decisions_are_those_that_were_played(model: Get) -> None:
    trace = model("key-door").trace("key-door return 1 seed 3")
    steps = trace.header["axes"]["inputs"]["steps"]
    context = model("key-door").recipe.model.context
    actions = [element["text"] for element in trace.elements("target")]
    assert len(steps) == len(actions) <= context
    assert actions[-1] == steps[-1]["action"]  # earlier ones may have seen other steps while they were played
    roles = [element["role"] for element in trace.elements("inputs")]
    assert roles == ["return", "state", "action"] * len(steps)
    frames = trace.array("axes.inputs.frames")
    assert len(frames) == len(steps) and frames.shape[-1] == 3


MISTAKES = [
    ("shapes", "test 601", "no example 'test 601': test has 600"),
    ("shapes", "nothing.npy", "cannot read nothing.npy"),
    ("citations", "paper-9999", "no node 'paper-9999'"),
    ("key-door", "key-door colour red", "is no episode: write `ENV return R seed N`"),
    ("key-door", "key-door return 1.2.3", "return 1.2.3: must be a number"),
]


@pytest.mark.parametrize(("recipe", "text", "message"), MISTAKES)
def test_an_input_that_does_not_exist_is_refused(model: Get, recipe: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model(recipe).trace(text)


HIDDEN = [
    ("shapes", ["9,9"], "--hide 9,9: there is no '9,9' in the input; there are 1,1, 1,2, 1,3, 4,4"),
    ("citations", ["paper-3:paper-9999"], "there is no 'paper-9999'"),
    ("key-door", ["99"], "there is no '99'"),
]


@pytest.mark.parametrize(("recipe", "names", "message"), HIDDEN)
def test_a_hidden_element_that_does_not_exist_is_refused(
    model: Get, recipe: str, names: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        hiding(model(recipe).trace(INPUTS[recipe]).header, names)


def test_changes_that_make_no_sense_are_refused(model: Get) -> None:
    edge = {"kind": "edge", "side": "source", "ends": [0, 1]}
    with pytest.raises(UserError, match="only graphs have edges"):
        model("shapes").trace("test 2", changes=[edge])
    with pytest.raises(UserError, match="no edge between paper-3 and paper-3"):
        model("citations").trace("paper-3", changes=[edge | {"ends": [0, 0]}])
    with pytest.raises(UserError, match="ends = 3: must be two whole numbers"):
        model("citations").trace("paper-3", changes=[edge | {"ends": 3}])
    row = {"kind": "row", "attention": "encoder.0", "head": 0, "query": 0, "weights": [1.0] * 600}
    with pytest.raises(UserError, match="attention along edges has no rows to replace"):
        model("citations").trace("paper-3", changes=[row])


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("view", ["overlay", "maps", "heads"])
def test_every_kind_of_input_is_drawn_in_all_formats(model: Get, recipe: str, view: str, tmp_path: Path) -> None:
    trace = model(recipe).trace(ALL[recipe])
    assert [one for one in views.fitting(trace) if one != "align"][:3] == ["overlay", "maps", "heads"]
    picture = views.draw(trace, view)
    svg = picture.scene().svg()
    assert svg.startswith("<svg") and svg.count("<svg") == 1
    assert picture.text(width=80, colour="none").strip()
    saved = json.loads(_saved(picture, tmp_path / "picture.json"))
    assert saved["view"] == view and saved["trace"] == trace.header


def _saved(picture: views.Picture, path: Path) -> str:
    picture.save(path)
    return path.read_text(encoding="utf-8")


def test_an_overlay_has_the_weight_of_each_patch_on_its_pixels(model: Get) -> None:
    trace = model("shapes").trace("test 2")
    picture = views.draw(trace, "overlay", MapChoice(layer=1, head=2), at="2,3")
    weights = trace.array("encoder.1.self_attn.weights")[2, 6]  # row 2, column 3
    np.testing.assert_allclose(picture.numbers["shown"]["weights"], weights, rtol=1e-5)
    pixels = pixel_values(trace.header["axes"]["source"], weights)
    np.testing.assert_array_equal(pixels[::6, ::6].ravel(), weights)
    np.testing.assert_array_equal(pixels[0:6, 6:12], np.full((6, 6), weights[1]))


def test_merged_steps_have_the_row_of_the_state_and_the_sum_of_its_tokens(model: Get) -> None:
    trace = model("key-door").trace(INPUTS["key-door"])
    weights = np.mean([trace.array(entry["array"]).mean(0) for entry in trace.header["attention"]], 0)
    steps = len(trace.header["axes"]["inputs"]["steps"])
    expected = weights[1::3].reshape(steps, steps, 3).sum(-1)  # rows of states; return, state and action of each step
    np.testing.assert_allclose(views.draw(trace, "overlay").numbers["weights"], expected, atol=1e-5)


def test_a_part_layer_or_element_that_does_not_exist_is_refused(model: Get) -> None:
    trace = model("citations").trace("paper-3")
    for choice, at, message in (
        (MapChoice(layer=2), None, "--layer 3: this model has 2 encoder layers"),
        (MapChoice(layer=1, head=1), None, "--head 2: this model has 1 head"),
        (MapChoice(head=0, layer="rollout"), None, "leave out --head"),
        (MapChoice(), "paper-9999", "--at paper-9999: there is no such element; there are paper-3"),
    ):
        with pytest.raises(UserError, match=message):
            views.draw(trace, "overlay", choice, at=at)
    with pytest.raises(UserError, match="without cross-attention"):
        views.draw(trace, "align")


def test_a_class_token_is_an_element_that_cannot_be_hidden(tmp_path: Path) -> None:
    one = Model(make_input_run(tmp_path / "run", "shapes", "model.pooling=class-token"), "cpu")
    trace = one.trace("test 2")
    assert [element["predicts"] for element in trace.elements("source")] == [True] + [False] * 16
    weights = trace.array("encoder.2.self_attn.weights").mean(0)
    shown = views.draw(trace, "overlay", MapChoice(layer=2)).numbers["shown"]
    np.testing.assert_allclose(shown["weights"], weights[0], rtol=1e-5)  # the row of the class token
    with pytest.raises(UserError, match=r"element 0 \(class\) is not part of the input"):
        one.trace("test 2", changes=[{"kind": "hide", "side": "source", "element": 0}])
