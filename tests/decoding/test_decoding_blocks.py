"""Decoding steps with fewer operators have the results of plain blocks, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.decoding.test_continuous import Caller, request_of
from tests.decoding.test_cpu_fast_paths import FAMILIES, sources

from regard import taps
from regard.accelerate import linear_backends, use_step_blocks
from regard.accelerate.decoding_blocks import StepDecoderBlock, StepEncoderBlock
from regard.attention import KVCache
from regard.decoding import SearchRequest, search
from regard.models import SequenceModel, build
from regard.nn.blocks import DecoderBlock, EncoderBlock
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.special_tokens import BOS

VARIANTS: dict[str, dict[str, Any]] = {
    "transformer": {"family": "transformer"},
    "norms after, silu": {"family": "transformer", "norm_first": False, "activation": "silu"},
    "shared keys": {"family": "gpt", "kv_heads": 2},
    "gpt": {"family": "gpt"},
}
PLAIN_VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {"family": "transformer", "positions": "rotary"},
    "gated": {"family": "transformer", "activation": "gated"},
    "rms": {"family": "gpt", "norm": "rms"},
    "normed queries": {"family": "gpt", "qk_norm": True},
}


def prepared(model: dict[str, Any], steps: bool) -> SequenceModel:
    settings = {"dropout": 0.0, **FAMILIES[model["family"]], **model}
    torch.manual_seed(1)
    built = build(Recipe.model_validate({"data": {"corpus": "copy"}, "model": settings}).model, 300, 300, shared=True)
    with torch.no_grad():
        for parameter in built.parameters():  # biases start as zeros
            parameter.add_(0.3 * torch.randn(parameter.shape) * (parameter.dim() == 1))
    linear_backends.prepare(built.eval())
    if steps:
        use_step_blocks(built)
    return built


@pytest.fixture
def no_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain blocks may compute anything but decoding steps."""
    for kind in (EncoderBlock, DecoderBlock):

        def forward(self: Any, x: Any, layout: Any, *rest: Any, plain: Any = kind.forward, **more: Any) -> Any:
            is_step = isinstance(layout, KVCache) and not layout.tree.is_prompt
            assert not (is_step and isinstance(self, StepDecoderBlock | StepEncoderBlock))
            return plain(self, x, layout, *rest, **more)

        monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.usefixtures("no_plain_steps")
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("beam", [1, 4])
def test_a_search_with_them_has_the_same_bits(name: str, beam: int) -> None:
    request = SearchRequest(sources(), DecodingSettings(beam=beam, max_extra=6))
    expected, found = (search(prepared(VARIANTS[name], steps), request) for steps in (False, True))
    assert found == expected


@pytest.mark.usefixtures("no_plain_steps")
@pytest.mark.parametrize("name", VARIANTS)
def test_continuous_batching_with_them_has_the_same_bits(name: str) -> None:
    """Sentences alone, in step with others, and at different steps, in batches that grow and shrink."""
    found: list[dict[int, Any]] = []
    for steps in (False, True):
        caller, lines = Caller(prepared(VARIANTS[name], steps), rows=5), sources(9)
        for number, line in enumerate(lines.layout.split(lines.ids)):
            caller.submit(request_of(line.tolist(), number, {"beam": 3}))
            for _ in range(number % 3):
                caller.engine.turn()
        caller.run()
        found.append(caller.found)
    assert len(found[0]) == 9 and found[0] == found[1]


def test_changed_weights_are_used() -> None:
    model, request = prepared(VARIANTS["transformer"], True), SearchRequest(sources(), DecodingSettings())
    before = search(model, request)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = search(model, request)
    plain = prepared(VARIANTS["transformer"], False)
    plain.load_state_dict(model.state_dict())
    assert after == search(plain, request) != before


def test_a_listener_sees_their_steps() -> None:
    model, kinds = prepared(VARIANTS["transformer"], True), set()
    with torch.no_grad(), taps.listen(lambda module, kind, value: kinds.add(kind)):
        state = model.start(PackedTokens.from_lists([[5, 6, 2]]))
        kinds.clear()
        model.step(state, torch.tensor([[BOS]]))
    assert {"weights", "heads", "stream"} <= kinds


@pytest.mark.parametrize("name", PLAIN_VARIANTS)
def test_blocks_with_other_parts_stay_plain(name: str) -> None:
    blocks = list(prepared(PLAIN_VARIANTS[name], True).decoder)  # type: ignore[arg-type]
    assert blocks and {type(block) for block in blocks} <= {EncoderBlock, DecoderBlock}


def test_training_and_parameter_names_stay() -> None:
    plain, quick = (prepared(VARIANTS["transformer"], steps) for steps in (False, True))
    assert plain.state_dict().keys() == quick.state_dict().keys()
    x = torch.randn(4, 32)
    for model in (plain, quick):
        model.decoder[0].feed_forward(x).sum().backward()  # type: ignore[index,operator]
    grads = ([p.grad for p in model.parameters() if p.grad is not None] for model in (plain, quick))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
