"""Views of a trace: every carrier shows the same numbers, to the precision it states; no text breaks any of them."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import shutil
import subprocess
import unicodedata
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.api import Model
from regard.errors import UserError
from regard.interpret import position_study
from regard.interpret.trace import Trace
from regard.run_dir import RunDir
from regard.text.display import columns
from regard.text.tokenizers import join_tokens
from regard.viz import matplotlib_backend, standalone, views
from regard.viz.colours import Ramp, rgb, rgbs, signed_rgb, signed_rgbs
from regard.viz.grid import Grid
from regard.viz.scene import MAX_RECTS, Cells, Scene, png
from regard.viz.terminal import SHADES, painted
from regard.viz.views import MapChoice
from regard.viz.views.heads import pooled
from tiny_runs import FAMILIES, make_run, text_for

SIDES = ("source", "target", "inputs")

Get = Callable[[str], Trace]
SVG = "{http://www.w3.org/2000/svg}"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
SEEN_AS_COLOUR = 0.005  # how exactly a weight can be read off its colour: eight bits a channel
UINT8_ERROR = 0.5 / 255 + 1e-6  # how exactly uint8 carries one
WRITTEN = 1e-6  # of a number with six digits, for weights up to 1


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Return the trace of a small random model of a family, recorded once."""
    made: dict[str, Trace] = {}

    def get(family: str) -> Trace:
        if family not in made:
            run = make_run(tmp_path_factory.mktemp("run") / "tiny", family)
            made[family] = Model(run, "cpu").trace(text_for(family))
        return made[family]

    return get


def _matplotlib() -> None:
    """The extra `pictures`: on a user's machine it may be missing, where everything is tested it may not."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("matplotlib")


def weight_of(colours: np.ndarray) -> np.ndarray:
    """Colours [..., 3] back through the colour table: the weight whose colour is nearest."""
    table = np.linspace(0, 1, 1001)
    distance = np.abs(colours[..., None, :].astype(int) - rgbs(table).astype(int)).sum(-1)
    return table[distance.argmin(-1)]


def cells_of(scene: Scene) -> tuple[Cells, float, float]:
    """The matrix of a picture, and where it lies."""
    return next((item, x, y) for item, x, y in scene.flat() if isinstance(item, Cells))


# -- colours -----------------------------------------------------------------------------------------------------------


def test_many_colours_at_once_are_those_one_by_one() -> None:
    weights = np.concatenate([np.linspace(-0.2, 1.2, 333), np.arange(31) / 30])
    assert [tuple(c) for c in rgbs(weights).tolist()] == [rgb(float(w)) for w in weights]
    numbers = np.linspace(-1.3, 1.3, 333)
    assert [tuple(c) for c in signed_rgbs(numbers).tolist()] == [signed_rgb(float(v)) for v in numbers]


def test_a_weight_can_be_read_off_its_colour() -> None:
    weights = np.linspace(0, 1, 1000)
    assert np.abs(weight_of(rgbs(weights)) - weights).max() <= SEEN_AS_COLOUR


def test_a_ramp_spans_its_numbers() -> None:
    numbers = np.array([2.0, 3.0, 6.0])
    assert Ramp.between(numbers).shares(numbers).tolist() == [0.0, 0.25, 1.0]
    assert Ramp.signed(-numbers).shares(numbers).tolist() == pytest.approx([1 / 3, 0.5, 1.0])
    assert Ramp.signed(np.zeros(3)).rgb(0.0) == signed_rgb(0.0)
    assert Ramp.between(np.ones(3)).rgb(1.0) == rgb(0.0)


# -- one map, every carrier --------------------------------------------------------------------------------------------


ONE = MapChoice("cross", layer=1, head=1, words=False)


def exact(trace: Trace) -> np.ndarray:
    return trace.array("decoder.1.cross_attn.weights")[1]


def test_svg_and_terminal_show_the_weights_by_their_colours(trace: Get) -> None:
    seen, weights = trace("transformer"), exact(trace("transformer"))
    picture = views.draw(seen, "maps", ONE)
    group = next(g for g in ET.fromstring(picture.scene().svg()).iter(SVG + "g") if g.get("class") == "cells")
    fills = np.array([[int(str(r.get("fill"))[i : i + 2], 16) for i in (1, 3, 5)] for r in group.iter(SVG + "rect")])
    assert np.abs(weight_of(fills).reshape(weights.shape) - weights).max() <= SEEN_AS_COLOUR
    tips = [float(str(r.findtext(SVG + "title")).rsplit(": ", 1)[1]) for r in group.iter(SVG + "rect")]
    assert np.abs(np.array(tips) - weights.ravel()).max() <= 0.005 + 1e-6

    drawn = picture.text(width=200, colour="truecolor").split("\n\n", 1)[1]  # below the title, above the legend
    grounds = re.findall(r";48;2;(\d+);(\d+);(\d+)m", drawn)[: weights.size]
    found = weight_of(np.array(grounds, int)).reshape(weights.shape)
    assert np.abs(found - weights).max() <= SEEN_AS_COLOUR
    entries = re.findall(r";48;5;(\d+)m", picture.text(width=200, colour="256"))[: weights.size]
    assert entries == re.findall(
        r";48;5;(\d+)m", "".join(painted(" ", rgb(w), "256") for w in weights.ravel().tolist())
    )
    shades = picture.text(width=3 + 2 * weights.shape[1] + 16, colour="none")
    assert set(shades) & set(SHADES)


def test_json_safetensors_and_html_hold_the_weights(trace: Get, tmp_path: Path) -> None:
    seen, weights = trace("transformer"), exact(trace("transformer"))
    picture = views.draw(seen, "maps", ONE)
    for name in ("map.json", "map.safetensors", "map.html"):
        assert picture.save(tmp_path / name) == ""

    written = json.loads((tmp_path / "map.json").read_text())
    assert np.abs(np.array(written["weights"]) - weights).max() <= WRITTEN
    assert written["trace"] == seen.header and written["attention"] == "decoder.1.cross_attn"

    again = Trace.load(tmp_path / "map.safetensors")
    assert again.header == seen.header
    assert np.abs(exact(again) - weights).max() <= UINT8_ERROR

    assert np.abs(_embedded((tmp_path / "map.html").read_text(), seen)[1] - weights).max() <= UINT8_ERROR


def _embedded(page: str, seen: Trace) -> np.ndarray:
    """The weights that a page carries: base64 of deflated bytes, in steps of 1/255."""
    found = re.search(r'<script type="application/json" id="regard-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    (packed,) = [value for name, value in data["arrays"].items() if name.endswith("/decoder.1.cross_attn.weights")]
    raw = zlib.decompress(base64.b64decode(packed), -15)
    about = seen.header["arrays"]["decoder.1.cross_attn.weights"]
    return np.frombuffer(raw, np.uint8).reshape(about["shape"]) * about["scale"]


def test_png_and_pdf_show_the_weights_by_their_colours(trace: Get, tmp_path: Path) -> None:
    _matplotlib()
    from matplotlib.image import imread

    seen, weights = trace("transformer"), exact(trace("transformer"))
    picture = views.draw(seen, "maps", ONE)
    for name in ("map.png", "map.pdf"):
        picture.save(tmp_path / name)
    scene = picture.scene()
    cells, x, y = cells_of(scene)
    dots = imread(tmp_path / "map.png")
    scale = dots.shape[1] / scene.width
    assert dots.shape[0] == pytest.approx(scene.height * scale, abs=1)
    found = np.empty((*weights.shape, 3))
    for r, c in np.ndindex(weights.shape):  # beside the number, which stands in the middle
        across, down = x + cells.x + (c + 0.5) * cells.across, y + cells.y + (r + 0.15) * cells.down
        found[r, c] = np.rint(dots[int(down * scale), int(across * scale), :3] * 255)
    assert np.abs(weight_of(found) - weights).max() <= SEEN_AS_COLOUR

    paints = _fills((tmp_path / "map.pdf").read_bytes())
    assert {tuple(paint) for paint in rgbs(weights).reshape(-1, 3).tolist()} <= paints


def _fills(pdf: bytes) -> set[tuple[int, ...]]:
    """The colours that anything in a PDF is filled with."""
    streams = []
    for data in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            streams.append(zlib.decompress(data))
        except zlib.error:
            continue
    numbers = [match for stream in streams for match in re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg", stream)]
    return {tuple(round(float(part) * 255) for part in match) for match in numbers}


def test_a_notebook_gets_the_page_in_a_frame_and_a_picture(trace: Get) -> None:
    seen = trace("transformer")
    shown = seen._repr_html_()
    frame = re.search(r'srcdoc="([^"]*)"', shown)
    image = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', shown)
    assert frame is not None and image is not None and "<script" not in shown  # all of it escaped, none injected
    assert np.abs(_embedded(html.unescape(frame[1]), seen)[1] - exact(seen)).max() <= UINT8_ERROR
    assert base64.b64decode(image[1]).decode() == views.draw(seen).scene().svg("light")
    assert ET.fromstring(views.draw(seen)._repr_svg_()).get("role") == "img"


# -- the other views ---------------------------------------------------------------------------------------------------


def test_small_maps_have_their_colours_and_say_their_numbers(trace: Get) -> None:
    seen = trace("transformer")
    picture = views.draw(seen, "heads")
    matrices = [item for item, _, _ in picture.scene().flat() if isinstance(item, Cells)]
    order = [
        "encoder.0.self_attn",
        "encoder.1.self_attn",
        "decoder.0.self_attn",
        "decoder.1.self_attn",
        "decoder.0.cross_attn",
        "decoder.1.cross_attn",
    ]
    heads = [head for name in order for head in seen.array(f"{name}.weights")]
    for cells, weights in zip(matrices, heads, strict=False):  # the last matrix is the legend
        assert np.abs(weight_of(cells.colours) - weights).max() <= SEEN_AS_COLOUR + UINT8_ERROR
    assert len(matrices) == len(heads) + 1
    stats = seen.header["attention"][0]["stats"][0]
    said = f"entropy {stats['entropy']:.2f}"
    assert said in picture.scene().svg() and said in picture.text(width=80, colour="none")
    by_name = {entry["name"]: entry for entry in picture.numbers["heads"]}
    written = np.array(by_name["decoder.0.cross_attn"]["weights"]) * by_name["decoder.0.cross_attn"]["scale"]
    assert np.abs(written - seen.array("decoder.0.cross_attn.weights")).max() <= UINT8_ERROR


def test_of_a_long_text_small_maps_keep_the_greatest_weight_of_each_cell() -> None:
    weights = np.arange(35.0).reshape(5, 7) / 35
    assert (pooled(weights, 3) * 35).tolist() == [[9, 12, 13], [23, 26, 27], [30, 33, 34]]
    assert pooled(weights, 7) is weights


def test_gates_are_means_over_units_and_single_units_on_request(trace: Get) -> None:
    seen = trace("recurrent (no attention)")
    overview = views.draw(seen)
    assert overview.view == "gates"
    first = seen.header["gates"][0]
    assert overview.numbers["gates"][0]["mean"] == pytest.approx(seen.array(first["array"]).mean(1), rel=1e-5)
    cells, _, _ = cells_of(overview.scene())
    assert np.abs(weight_of(cells.colours[0]) - seen.array(first["array"]).mean(1)).max() <= SEEN_AS_COLOUR
    units = views.draw(seen, "gates", MapChoice("encoder", layer=0))
    cells, _, _ = cells_of(units.scene())
    values = seen.array(first["array"])
    order = np.argsort(-values.mean(0), kind="stable")
    assert np.abs(weight_of(cells.colours) - values.T[order]).max() <= SEEN_AS_COLOUR


def test_the_walk_says_what_the_header_says(trace: Get) -> None:
    seen = trace("gpt")
    picture = views.draw(seen, "walk")
    text = picture.text(width=200, colour="none")
    norms = seen.header["stream"][0]["norms"]
    assert all(f"{norm:.2f}" in text for norm in norms)
    step = min((t for t, token in enumerate(seen.elements("target")) if not token["given"]),
               key=lambda t: seen.header["output"]["p"][t])  # fmt: skip
    for top in seen.header["output"]["top"][step][:3]:
        assert f"{100 * top['p']:.1f} %" in text
    assert text.count("← chosen") == 1
    assert next(line for line in text.splitlines() if re.match(r"\d\.", line)).startswith("1. Tokens and ids")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_view_of_every_family_can_be_drawn(trace: Get, family: str) -> None:
    seen = trace(family)
    for view in views.fitting(seen):
        picture = views.draw(seen, view)
        root = ET.fromstring(picture.scene().svg())
        assert root.get("aria-label") and root.findtext(SVG + "desc")
        json.dumps(picture.numbers)
        for width in (30, 80, 160):
            for colour in ("none", "256", "truecolor"):
                text = picture.text(width=width, colour=colour)  # type: ignore[arg-type]
                assert max(columns(ESCAPES.sub("", line)) for line in text.splitlines()) <= width, view


def test_words_and_gold_links(trace: Get) -> None:
    """Subwords are merged into words as the header counts them; links between words are outlined in both."""
    seen = _changed(trace("transformer"))
    tokens = {side: axis["elements"] for side, axis in seen.header["axes"].items()}
    links = [[0, 1], [1, 0]]
    seen.header["gold"] = {
        "links": links, "all": 12.5, "mean": {"decoder.0.cross_attn": 20.0, "decoder.1.cross_attn": 30.0},
        "aer": {"decoder.0.cross_attn": [50.0, 25.0], "decoder.1.cross_attn": [75.0, 24.0]},
    }  # fmt: skip
    for side in ("source", "target"):
        for i, token in enumerate(tokens[side]):
            token["group"] = -1 if token["special"] else i // 2
    words = views.draw(seen, "align")
    assert "AER 12.5 %" in words.panels[0].title  # type: ignore[union-attr]
    assert words.numbers["links"] == links
    pieces = views.draw(seen, "align", MapChoice(words=False))
    assert [[r // 2, c // 2] for r, c in pieces.numbers["links"]] == [[0, 1]] * 4 + [[1, 0]] * 4
    best = views.draw(seen, "align", MapChoice(head="best"))
    assert (best.numbers["layer"], best.numbers["head"]) == (1, 1) and "AER 24.0 %" in best.numbers["title"]
    best = views.draw(seen, "align", MapChoice(layer=0, head="best"))
    assert (best.numbers["layer"], best.numbers["head"]) == (0, 1)
    assert np.array(words.numbers["weights"]).sum(1) == pytest.approx(1, abs=1e-4)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Return the trace of a prompt and its continuation, with no space between them."""
    model = Model(make_run(tmp_path_factory.mktemp("run") / "tiny", "gpt"), "cpu")
    return model.trace("naïve café 😀 I am", ", мир 世")


WRITTEN_WORDS = ("<s>", "naïve", "café", "😀", "I", "am", ",", "мир", "⟨e4⟩⟨b8⟩")  # the last byte is not read any more


def test_words_are_whole_and_end_where_the_prompt_does(written: Trace) -> None:
    grid = views.draw(written, "maps").panels[0]
    assert isinstance(grid, Grid) and grid.rows == grid.columns == WRITTEN_WORDS
    assert "мир" in views.draw(written, "maps").text(width=200, colour="none")
    pieces = views.draw(written, "maps", MapChoice(words=False)).panels[0]
    assert isinstance(pieces, Grid) and "⟨c3⟩" in pieces.rows


def test_the_page_joins_words_as_the_pictures_do(written: Trace) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    tokens = written.elements("inputs")
    odd = ["⟨d0⟩⟨bc⟩⟨ed⟩", "⟨a0⟩⟨80⟩⟨f0⟩", "⟨9f⟩⟨98⟩⟨80⟩😀⟨c3⟩", "⟨", "c3", "⟩⟨af⟩⟨", "⟩"]
    odd_tokens = [{"text": text, "group": 0, "special": False, "given": True} for text in odd]
    script = f"""
        const [tokens, odd] = {json.dumps([tokens, odd_tokens])};
        const labels = (some) => wordLabels(some, wordGroups(some));
        console.log(JSON.stringify([labels(tokens), labels(odd), labels(odd.slice(0, 1))]));"""
    asked = [node, "--input-type=module", "--eval", standalone.files()["js/tokens.js"].decode() + script]
    found = json.loads(subprocess.run(asked, capture_output=True, check=True, encoding="utf-8").stdout)
    assert found == [list(WRITTEN_WORDS), [join_tokens(odd)], odd[:1]]


def test_the_walk_writes_whole_characters(written: Trace) -> None:
    seen = _changed(written)
    p = seen.header["output"]["p"]
    p[:] = [1.0] * (len(p) - 3) + [0.0] + [1.0] * 2  # least sure of the first byte of the last character
    assert "Next token after “мир”" in views.draw(seen, "walk").text(width=80, colour="none")


def test_the_mean_is_over_all_layers_and_heads(trace: Get) -> None:
    seen = trace("transformer")
    both = np.stack([seen.array(f"decoder.{layer}.cross_attn.weights") for layer in (0, 1)])
    found = views.draw(seen, "align", MapChoice(words=False)).numbers["weights"]
    assert np.array(found) == pytest.approx(both.mean((0, 1)), abs=1e-6)
    found = views.draw(seen, "align", MapChoice(head=1, words=False)).numbers["weights"]
    assert np.array(found) == pytest.approx(both[:, 1].mean(0), abs=1e-6)


@pytest.mark.parametrize(
    ("family", "view", "choice", "said"),
    [
        ("transformer", "gates", MapChoice(), "without gates; it has align, maps, heads, walk"),
        ("gpt", "align", MapChoice(), "without cross-attention; it has maps, heads, walk"),
        ("recurrent (no attention)", "heads", MapChoice(), "without attention; it has gates, walk"),
        ("gpt", "maps", MapChoice("encoder"), "--part encoder: this model has attention in its decoder"),
        ("transformer", "maps", MapChoice("encoder", layer=2), "--layer 3: this model has 2 encoder layers"),
        ("transformer", "align", MapChoice(head=2), "--head 3: this model has 2 heads"),
        ("transformer", "align", MapChoice(head="best"), "needs a sentence with a gold alignment"),
        ("transformer", "maps", MapChoice("encoder", head="best"), "--head best applies to cross-attention"),
        ("recurrent (additive)", "gates", MapChoice(layer=7), "--layer 8: this model has 2 layers with gates"),
        ("transformer (norm after, gated)", "gates", MapChoice("cross"), "has gates in its decoder and encoder"),
    ],
)
def test_a_missing_view_is_refused_with_the_available_ones(
    trace: Get, family: str, view: str, choice: MapChoice, said: str
) -> None:
    with pytest.raises(UserError) as error:
        views.draw(trace(family), view, choice)
    assert said in str(error.value) and "\n" not in str(error.value)


# -- any text, any length ----------------------------------------------------------------------------------------------


def _changed(trace: Trace) -> Trace:
    """Return a copy of a trace that may be changed."""
    header, layers = json.loads(json.dumps([trace.header, trace.layers]))
    return Trace(header, {name: lambda n=name: trace.array(n) for name in trace.names}, lambda: layers)


HOSTILE_TEXTS = (
    "<img src=x onerror=alert(1)>",
    " قطة",
    " 大きい",
    "\x1b[31m",
    "]]>&\"'",
    "\u202eabc",
    "e\u0301",
    "\x00",
)


@pytest.mark.parametrize("family", ["transformer", "gpt", "recurrent (additive)"])
def test_tokens_stay_text_in_every_carrier(trace: Get, family: str, tmp_path: Path) -> None:
    seen = _changed(trace(family))
    for side in (axis["elements"] for axis in seen.header["axes"].values()):
        for i, token in enumerate(side):
            token["text"] = HOSTILE_TEXTS[i % len(HOSTILE_TEXTS)]
    for rows in (*(layer["top"] for layer in seen.layers), seen.header["output"]["top"]):
        for row in rows:
            for i, top in enumerate(row):
                top["text"] = HOSTILE_TEXTS[i % len(HOSTILE_TEXTS)]
    for view in views.fitting(seen):
        picture = views.draw(seen, view, MapChoice(words=False))
        drawing = picture.scene().svg()
        ET.fromstring(drawing)
        assert "<img" not in drawing and "\x1b" not in drawing
        for line in picture.text(width=70, colour="none").splitlines():
            assert columns(line) <= 70 and not any(unicodedata.category(sign) == "Cc" for sign in line)
    page = tmp_path / "page.html"
    views.draw(seen, "walk").save(page)
    assert "<img src=x" not in page.read_text()


def test_right_to_left_text_is_isolated(trace: Get) -> None:
    seen = _changed(trace("gpt"))
    for token in seen.elements("inputs"):
        token["text"] = " قطة"
    texts = [
        t.text for t in ET.fromstring(views.draw(seen, "maps", MapChoice(words=False)).scene().svg()).iter(SVG + "text")
    ]
    assert "\u2068قطة\u2069" in texts


def long_trace(tokens: int = 512, layers: int = 12, heads: int = 12) -> Trace:
    """A model of 144 heads over 512 tokens, as its trace would be."""
    one = np.tril(np.random.default_rng(0).random((tokens, tokens), np.float32))
    one /= one.sum(1, keepdims=True)
    weights = np.broadcast_to(one, (heads, tokens, tokens))
    stats = [{"entropy": 1.0, "diagonal": 0.5, "special": 0.1, "punctuation": 0.0}] * heads
    side = [{"id": i, "text": f" w{i}", "label": f"w{i}", "group": i, "special": False, "punctuation": False,
             "given": i < 9} for i in range(tokens)]  # fmt: skip
    top = [[{"id": 1, "text": " a", "p": 0.5}]] * tokens
    names = [f"decoder.{layer}.self_attn" for layer in range(layers)]
    header: dict[str, Any] = {
        "model": {"name": "long", "family": "gpt", "task": "generate", "output": "sequence", "heads": heads},
        "text": {"source": "", "target": ""},
        "axes": {name: {"kind": "tokens", "elements": side if name != "source" else []} for name in SIDES},
        "attention": [{"name": name, "part": "decoder", "layer": layer, "heads": heads, "queries": "inputs",
                       "keys": "inputs", "array": f"{name}.weights", "stats": stats}
                      for layer, name in enumerate(names)],
        "gates": [], "gold": None, "embedding": [], "rollout": [],
        "layers": [{"name": "embedding", "label": "embedding", "side": "inputs"}],
        "stream": [{"name": "embedding", "side": "inputs", "label": "embedding", "norms": [1.0] * tokens}],
        "output": {"p": [0.5] * tokens, "top": top},
        "arrays": {f"{name}.weights": {"shape": list(weights.shape), "dtype": "uint8", "scale": 1 / 255}
                   for name in names},
    }  # fmt: skip
    layers = [{"name": "embedding", "label": "embedding", "side": "inputs", "top": top}]
    trace = Trace(header, {f"{name}.weights": lambda: weights for name in names}, lambda: layers)
    trace.store("decoder.0.self_attn.weights", weights)
    shown = trace.display("decoder.0.self_attn.weights")
    trace._shown = {f"{name}.weights": shown for name in names}
    return trace


def test_512_tokens_and_144_heads_make_files_of_a_few_megabytes() -> None:
    seen = long_trace()
    for view, most in (("maps", 2e6), ("heads", 12e6), ("walk", 1e6)):
        picture = views.draw(seen, view)
        drawing = picture.scene().svg()
        ET.fromstring(drawing)
        assert len(drawing) < most, view
    one = views.draw(seen, "maps", MapChoice(layer=3, head=2))
    cells, _, _ = cells_of(one.scene())
    assert cells.colours.shape == (512, 512, 3) and cells.is_image
    assert max(columns(line) for line in one.text(width=80, colour="none").splitlines()) <= 80


def test_large_matrices_become_one_lossless_image(trace: Get) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (101, 103, 3), np.uint8)
    assert colours.shape[0] * colours.shape[1] > MAX_RECTS
    drawing = Scene(1, 1, "x", "", (Cells(0, 0, 1, 1, colours, row_tip=lambda r: f"row {r}"),)).svg()
    image = next(ET.fromstring(drawing).iter(SVG + "image"))
    data = base64.b64decode(str(image.get("href")).removeprefix("data:image/png;base64,"))
    assert data == png(colours)
    assert (_unpacked(data) == colours).all()
    assert [t.text for t in ET.fromstring(drawing).iter(SVG + "title")][:2] == ["row 0", "row 1"]


def _unpacked(data: bytes) -> np.ndarray:
    """A PNG by hand: its header's size, and its rows without the filter bytes."""
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    start = data.index(b"IDAT") + 4
    raw = zlib.decompress(data[start : start + int.from_bytes(data[start - 8 : start - 4], "big")])
    return np.frombuffer(raw, np.uint8).reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)


# -- PNG and PDF -------------------------------------------------------------------------------------------------------


def test_the_same_picture_gives_the_same_bytes_and_missing_signs_are_named(trace: Get) -> None:
    _matplotlib()
    scene = views.draw(trace("gpt"), "maps").scene()
    light = matplotlib_backend.draw(scene, "pdf")
    assert light == matplotlib_backend.draw(scene, "pdf") and light != matplotlib_backend.draw(
        scene, "pdf", theme="dark"
    )
    from regard.viz.scene import SceneText

    _, missing = matplotlib_backend.draw(Scene(50, 50, "x", "", (SceneText(1, 1, "a $x$ \U0010fffd"),)), "pdf")
    assert missing in ("", "\U0010fffd")  # a sign for private use, which hardly any font has


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("regard.viz.matplotlib_backend.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"regard\[pictures\]"):
        views.files.checked(tmp_path / "map.png")


# -- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("index", (True, True, False, True)),
        ("fraction", (True, False, True, True)),
        ("learned", (True, False, True, False)),
        ("sinusoidal", (True, True, True, True)),
    ],
)
def test_the_four_criteria_of_the_tour(kind: str, holds: tuple[bool, ...]) -> None:
    study = position_study.study(kind, 30, 32)
    assert tuple(one.holds for one in study.criteria) == holds
    assert study.vectors.shape == (30, 32)
    picture = views.positions(study)
    root = ET.fromstring(picture.scene().svg())
    said = [text.text for text in root.iter(SVG + "text") if text.text in ("yes", "no")]
    assert said == ["yes" if one else "no" for one in holds]
    assert max(columns(line) for line in picture.text(width=80, colour="none").splitlines()) <= 80


def test_products_of_sinusoids_depend_on_the_distance_alone() -> None:
    study = position_study.study("sinusoidal", 40, 16)
    expected = [sum(math.cos(k / 10000 ** (2 * m / 16)) for m in range(8)) for k in range(40)]
    assert study.dot == pytest.approx(expected, abs=1e-5)
    assert study.spread.max() < 1e-5
    assert position_study.study("learned", 40, 16).spread[1:-1].min() > 0.01


def test_positions_show_their_numbers_and_use_no_global_random_state() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    study = position_study.study("learned", 12, 8)
    assert torch.equal(before, torch.random.get_rng_state())
    picture = views.positions(study)
    cells, _, _ = cells_of(picture.scene())
    assert (cells.colours == Ramp.signed(study.vectors).rgbs(study.vectors)).all()
    assert np.array(picture.numbers["positions"]["array"]) == pytest.approx(study.vectors, rel=1e-5)
    table = np.arange(20.0).reshape(10, 2)
    assert (position_study.study("learned", 4, table=table).vectors == table[:4]).all()


def test_a_models_own_table_is_found(tmp_path: Path) -> None:
    model = Model(make_run(tmp_path / "tiny", "gpt", positions="learned"), "cpu")
    assert position_study.table(model.module).shape == (48, 16)
    with pytest.raises(UserError, match="positions add no vectors"):
        position_study.study("rotary")


# -- curves ------------------------------------------------------------------------------------------------------------


def _measured(run: RunDir, *rows: dict[str, Any], tail: str = "") -> RunDir:
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return run


def test_curves_show_the_last_measurement_of_each_step(tmp_path: Path) -> None:
    rows = [
        {"step": 10, "kind": "train", "loss": 5.0, "learning_rate": 0.1},
        {"step": 20, "kind": "train", "loss": 4.0, "learning_rate": 0.2},
        {"step": 10, "kind": "train", "loss": 4.5, "learning_rate": 0.1},  # resumed from an earlier step
        {"step": 20, "kind": "valid", "weights": "step", "loss": 4.2, "bleu": 7.0},
        {"step": 20, "kind": "valid", "weights": "average", "loss": 1.0, "bleu": 99.0},
        {"step": 30, "kind": "train", "loss": float("nan"), "learning_rate": 0.3},
    ]
    run = _measured(make_run(tmp_path / "tiny", "transformer"), *rows, tail='{"step": 40, "ki')
    picture = views.curves([run])
    loss, quality, rate = picture.panels
    points = {series.name: [(p.x, p.y) for p in series.points] for series in loss.series}  # type: ignore[union-attr]
    assert points == {"training": [(10, 4.5), (20, 4.0)], "validation": [(20, 4.2)]}
    assert [(p.x, p.y) for p in quality.series[0].points] == [(20, 7.0)]  # type: ignore[union-attr]
    assert [p.y for p in rate.series[0].points] == [0.1, 0.2, 0.3]  # type: ignore[union-attr]
    ET.fromstring(picture.scene().svg())


def test_several_runs_share_their_charts_and_runs_without_curves_are_named(tmp_path: Path) -> None:
    one, two = (
        _measured(make_run(tmp_path / name, "gpt"), {"step": 1, "kind": "train", "loss": 2.0, "learning_rate": 0.1})
        for name in ("one", "two")
    )
    names = [series.name for series in views.curves([one, two]).panels[0].series]  # type: ignore[union-attr]
    assert names == ["one, training", "two, training"]
    (two.path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has no metrics"):
        views.curves([two])
    with pytest.raises(UserError, match="no metrics to draw"):
        views.curves([_measured(two)])
