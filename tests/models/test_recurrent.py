"""Recurrent models: cells, gates, both directions, attention to the source, and decoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention import use_backend
from regard.errors import UserError
from regard.interpret.recorder import Recorder, intervene
from regard.models import build
from regard.models.recurrent import Recurrent, RecurrentSettings
from regard.nn.recurrent import RecurrentLayer, reversal_index
from regard.packed import PackedLayout, SeqBatch
from regard.recipes.schema import Recipe
from regard.registry import SCORES
from regard.text import BOS, EOS

CELLS = ["lstm", "gru"]
ATTENTIONS = ["none", "dot", "bilinear", "additive", "multihead"]
SOURCES = [[5, 6, 7, EOS], [EOS], [8, 9, 10, 11, 12, EOS], [6, 8, EOS]]
TARGETS = [[13, EOS], [14, 15, 16, EOS], [EOS], [4, 5, 6, 7, EOS]]


def settings(**changes: Any) -> RecurrentSettings:
    small = dict(width=8, encoder_width=8, embedding=6, encoder_layers=1, decoder_layers=1, dropout=0.0, heads=2)
    if changes.get("attention") in SCORES:
        changes["score"] = changes["attention"]
        changes["attention"] = "bahdanau" if changes["score"] == "additive" else "luong"
    return RecurrentSettings.model_validate({**small, **changes})


def make_model(vocabulary: int = 20, seed: int = 1, **changes: Any) -> Recurrent:
    """Return a model in float64 with random biases."""
    torch.manual_seed(seed)
    model = Recurrent(settings(**changes), vocabulary, vocabulary).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def pairs(spare: int = 0) -> SeqBatch:
    sizes = [sum(map(len, side)) + spare for side in (SOURCES, TARGETS)]
    return SeqBatch.from_lists(SOURCES, TARGETS, bos=BOS, source_size=sizes[0], target_size=sizes[1])


def by_hand(recurrence: RecurrentLayer, x: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run one sentence x [L, I] by the textbook equations: outputs [L, D] and gates [L, 3 or 2, D]."""
    cell = recurrence.cell
    gates_per_cell = 4 if recurrence.lstm else 3
    w, u = (list(m.chunk(gates_per_cell)) for m in (cell.weight_ih_l0, cell.weight_hh_l0))
    b, d = (list(m.chunk(gates_per_cell)) for m in (cell.bias_ih_l0, cell.bias_hh_l0))
    outputs, gates = [], []
    for word in x:
        from_input = [w[k] @ word + b[k] for k in range(gates_per_cell)]
        from_state = [u[k] @ h + d[k] for k in range(gates_per_cell)]
        if c is not None:
            i, f, o = (torch.sigmoid(from_input[k] + from_state[k]) for k in (0, 1, 3))
            c = f * c + i * torch.tanh(from_input[2] + from_state[2])
            h = o * torch.tanh(c)
            gates.append(torch.stack([i, f, o]))
        else:
            r, z = (torch.sigmoid(from_input[k] + from_state[k]) for k in (0, 1))
            h = (1 - z) * torch.tanh(from_input[2] + r * from_state[2]) + z * h
            gates.append(torch.stack([r, z]))
        outputs.append(h)
    return torch.stack(outputs), torch.stack(gates)


# -- cells and their gates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_the_fused_cell_equals_the_loop(cell: str, reverse: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    recurrence = RecurrentLayer(cell, 5, 7).to(dtype)
    with torch.no_grad():
        for parameter in recurrence.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    turned = reversal_index(PackedLayout([4, 9, 1])) if reverse else None
    x = torch.randn(3, 9, 5, dtype=dtype, requires_grad=True)
    states = [torch.randn(3, 7, dtype=dtype, requires_grad=True) for _ in range(2 if cell == "lstm" else 1)]
    results = []
    for name in ("plain", "fused"):
        with use_backend(name):
            outputs, last = recurrence(x, tuple(states), turned)
        wrt = [x, *states, *recurrence.parameters()]
        objective = outputs.square().sum() + sum(s.sin().sum() for s in last)
        results.append([outputs, *last, *torch.autograd.grad(objective, wrt)])
    for slow, quick in zip(*results, strict=True):
        torch.testing.assert_close(quick, slow, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cell", CELLS)
def test_recorded_gates_are_those_of_the_textbook(cell: str) -> None:
    model = make_model(cell=cell, attention="none")
    batch = pairs(spare=3)
    with torch.no_grad(), Recorder(model) as seen:
        model.logits(batch)
        sentences = batch.source.layout.split(model.source_embedding(batch.source.ids))
        summary = model.encode(batch.source)[1]
        decoder = model.decoder[0]
        initial_states = decoder.begin(summary)
        written = batch.inputs.layout.split(model.target_embedding(batch.inputs.ids))
    zeros = torch.zeros(4, dtype=torch.float64)
    for n, (x, y) in enumerate(zip(sentences, written, strict=True)):
        for way, order in (("forward_cell", x), ("backward_cell", x.flip(0))):
            _, gates = by_hand(getattr(model.encoder[0], way), order, zeros, zeros if cell == "lstm" else None)
            gates = gates if way == "forward_cell" else gates.flip(0)
            torch.testing.assert_close(seen.values[f"encoder.0.{way}.gates"][n, : len(x)], gates)
        states = [state[n] for state in initial_states]
        _, gates = by_hand(decoder.cell, y, states[0], states[1] if cell == "lstm" else None)
        torch.testing.assert_close(seen.values["decoder.0.cell.gates"][n, : len(y)], gates)
    for name, value in seen.values.items():
        if name.endswith("gates"):
            assert value.shape[2] == (3 if cell == "lstm" else 2)
            assert value.min() >= 0 and value.max() <= 1 and not value.requires_grad


@pytest.mark.parametrize("attention", ["none", "additive"])
@pytest.mark.parametrize("cell", CELLS)
def test_gates_of_decoding_steps_equal_those_of_a_full_pass(cell: str, attention: str) -> None:
    model = make_model(cell=cell, attention=attention, decoder_layers=2)
    batch = SeqBatch.from_lists(SOURCES, [[13, 14, EOS]] * 4, bos=BOS)
    with torch.no_grad(), Recorder(model) as whole:
        model.logits(batch)
    with torch.no_grad(), Recorder(model) as steps:
        state = model.start(batch.source)
        for token in (BOS, 13, 14):
            _, state = model.step(state, torch.full((4, 1), token))
    for layer in (0, 1):
        name = f"decoder.{layer}.cell.gates"
        torch.testing.assert_close(torch.cat(steps.history[name], 1), whole.values[name])  # type: ignore[arg-type]


def test_an_lstm_with_closed_forget_gates_depends_on_input_and_output_alone() -> None:
    """f = 0 and i = o = 1: c = g, so h = tanh(tanh(W_g x + U_g h + b))."""
    model = make_model(cell="lstm", attention="none", bidirectional=False)

    def gates(value: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0, 1.0], dtype=value.dtype)[:, None].expand_as(value)

    batch = pairs()
    with torch.no_grad(), intervene(model, {"encoder.0.forward_cell.gates": gates}):
        actual = batch.source.layout.split(model.encode(batch.source)[0])
    cell = model.encoder[0].forward_cell.cell
    w, u = cell.weight_ih_l0[16:24], cell.weight_hh_l0[16:24]
    b = (cell.bias_ih_l0 + cell.bias_hh_l0)[16:24]
    for sentence, outputs in zip(SOURCES, actual, strict=True):
        h = torch.zeros(8, dtype=torch.float64)
        for token, output in zip(sentence, outputs, strict=True):
            x = model.source_embedding(torch.tensor([token]))[0]
            h = torch.tanh(torch.tanh(w @ x + u @ h + b))
            torch.testing.assert_close(output, h)


def test_the_update_gate_of_a_gru_keeps_or_replaces_its_state() -> None:
    model = make_model(cell="gru", attention="none", bidirectional=False)
    batch = pairs()
    with torch.no_grad(), intervene(model, {"encoder.0.forward_cell.gates": torch.ones_like}):
        assert not model.encode(batch.source)[0].any()  # the initial state is zero
    with torch.no_grad(), intervene(model, {"encoder.0.forward_cell.gates": torch.zeros_like}):
        actual = model.encode(batch.source)[0]
    cell = model.encoder[0].forward_cell.cell
    x = model.source_embedding(batch.source.ids)
    torch.testing.assert_close(actual, torch.tanh(x @ cell.weight_ih_l0[16:].T + cell.bias_ih_l0[16:]))


def test_cells_start_with_forget_biases_of_one_and_orthogonal_matrices() -> None:
    cell = RecurrentLayer("lstm", 5, 6).cell
    assert (cell.bias_ih_l0 + cell.bias_hh_l0).tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 12
    for matrix in cell.weight_hh_l0.split(6):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(6), atol=1e-5, rtol=0)


# -- both directions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_the_backward_cell_reads_the_reversed_sentence(cell: str) -> None:
    model = make_model(cell=cell, attention="none")
    layer = model.encoder[0]
    layer.backward_cell.load_state_dict(layer.forward_cell.state_dict())
    batch = pairs(spare=2)
    turned = SeqBatch.from_lists([s[::-1] for s in SOURCES], TARGETS, bos=BOS)
    with torch.no_grad():
        one = batch.source.layout.split(model.encode(batch.source)[0])
        other = turned.source.layout.split(model.encode(turned.source)[0])
    for straight, reversed in zip(one, other, strict=True):
        torch.testing.assert_close(straight[:, 4:], reversed[:, :4].flip(0))


@pytest.mark.parametrize("cell", CELLS)
def test_the_encoder_equals_pytorch_s_bidirectional_one_on_each_sentence_alone(cell: str) -> None:
    model = make_model(cell=cell, attention="none", encoder_layers=2, encoder_width=10)
    theirs: Any = (nn.LSTM if cell == "lstm" else nn.GRU)(6, 5, 2, batch_first=True, bidirectional=True).double()
    with torch.no_grad():
        for number, layer in enumerate(model.encoder):
            for way, suffix in ((layer.forward_cell, ""), (layer.backward_cell, "_reverse")):
                for name, parameter in way.cell.named_parameters():
                    getattr(theirs, name.replace("l0", f"l{number}") + suffix).copy_(parameter)
        batch = pairs(spare=4)
        actual, summary = model.encode(batch.source)
        for n, ours in enumerate(batch.source.layout.split(actual)):
            x = model.source_embedding(torch.tensor(SOURCES[n]))
            expected, last = theirs(x[None])
            torch.testing.assert_close(ours, expected[0])
            h = last[0] if cell == "lstm" else last
            torch.testing.assert_close(summary[n], torch.cat([h[2, 0], h[3, 0]]))  # the upper layer's two ends


# -- attention to the source -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS[1:])
@pytest.mark.parametrize("cell", CELLS)
def test_the_context_is_a_mean_of_values_with_weights_that_sum_to_one(cell: str, attention: str) -> None:
    model = make_model(cell=cell, attention=attention)
    batch = pairs(spare=2)
    with torch.no_grad(), Recorder(model) as seen:
        model.logits(batch)
        source = batch.source.layout.split(model.encode(batch.source)[0])
    (name,) = seen.attention
    assert name == ("decoder.0.cross_attn" if attention == "additive" else "readout.cross_attn")
    heads = batch.inputs.layout.split(seen.values[f"{name}.heads"])  # [Q, H, D] each
    for n, source_states in enumerate(source):
        weights = seen.attention[name].sentence(n)
        assert weights.shape == (2 if attention == "multihead" else 1, len(TARGETS[n]), len(SOURCES[n]))
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2], dtype=torch.float64))
        if attention == "multihead":
            values = model.readout.cross_attn.kv_proj(source_states)[:, 8:].unflatten(-1, (2, 4)).transpose(0, 1)
        else:
            values = source_states[None]
        torch.testing.assert_close(heads[n], (weights @ values).transpose(0, 1))


@pytest.mark.parametrize("attention", ["dot", "bilinear"])
def test_luong_scores_compare_output_states(attention: str) -> None:
    model = make_model(attention=attention)
    batch = pairs()
    with torch.no_grad(), Recorder(model) as seen:
        model.logits(batch)
        source = batch.source.layout.split(model.encode(batch.source)[0])
    states = batch.inputs.layout.split(seen.values["decoder.0.stream"])
    matrix = model.readout.cross_attn.score.weight if attention == "bilinear" else torch.eye(8, dtype=torch.float64)
    for n, source_states in enumerate(source):
        expected = (states[n] @ matrix @ source_states.T).softmax(-1)
        torch.testing.assert_close(seen.attention["readout.cross_attn"].sentence(n)[0], expected)


@pytest.mark.parametrize("cell", CELLS)
def test_additive_attention_by_hand(cell: str) -> None:
    """s_t = cell([y_t; c_t], s_(t-1)), c_t = softmax(v · tanh(W s_(t-1) + U h + b)) @ h, read out with y_t."""
    model = make_model(cell=cell, attention="additive", tie_embeddings=False)
    batch = pairs()
    with torch.no_grad(), Recorder(model) as seen:
        logits = batch.inputs.layout.split(model.logits(batch))
        encoded, summary = model.encode(batch.source)
    layer, score = model.decoder[0], model.decoder[0].cross_attn.score
    for n, source_states in enumerate(batch.source.layout.split(encoded)):
        states = [state[n] for state in layer.begin(summary)]
        for t, token in enumerate([BOS, *TARGETS[n][:-1]]):
            hidden = torch.tanh(score.query.weight @ states[0] + score.key(source_states))
            weights = (hidden @ score.out.weight[0]).softmax(0)
            torch.testing.assert_close(seen.attention["decoder.0.cross_attn"].sentence(n)[0, t], weights)
            y, context = model.target_embedding(torch.tensor([token]))[0], weights @ source_states
            x = torch.cat([y, context])
            if cell == "lstm":
                i, f, g, o = (layer.cell.project(x) + layer.cell.cell.weight_hh_l0 @ states[0]).chunk(4)
                c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
                states = [o.sigmoid() * c.tanh(), c]
            else:
                states = [by_hand(layer.cell, x[None], states[0], None)[0][0]]
            features = torch.tanh(model.readout.mix(torch.cat([states[0], context, y])))
            torch.testing.assert_close(logits[n][t], model.output @ features)


@pytest.mark.parametrize(("cell", "attention"), list(itertools.product(CELLS, ATTENTIONS[1:])))
def test_replaced_weights_change_a_full_pass_and_steps_alike(cell: str, attention: str) -> None:
    model = make_model(cell=cell, attention=attention, decoder_layers=2)
    name = ("decoder.0" if attention == "additive" else "readout") + ".cross_attn.weights"
    batch = SeqBatch.from_lists([[5, 6, 7, EOS]] * 2, [[13, 14, 15, EOS]] * 2, bos=BOS)

    def first(weights: Tensor) -> Tensor:
        return torch.zeros_like(weights).index_fill(-1, torch.tensor([0]), 1.0)

    with torch.no_grad(), intervene(model, {name: first}), Recorder(model) as seen:
        changed = model.logits(batch)
        state, steps = model.start(batch.source), []
        for token in (BOS, 13, 14, 15):
            logits, state = model.step(state, torch.full((2, 1), token))
            steps.append(logits)
    with torch.no_grad():
        assert (model.logits(batch) - changed).abs().max() > 1e-3
    torch.testing.assert_close(torch.cat(steps, 1).flatten(0, 1), changed)
    assert seen.attention[name.removesuffix(".weights")].sentence(0)[..., 0].eq(1).all()


@pytest.mark.parametrize("attention", ["dot", "additive"])
@pytest.mark.parametrize("cell", CELLS)
def test_replaced_gates_change_a_full_pass_and_steps_alike(cell: str, attention: str) -> None:
    model = make_model(cell=cell, attention=attention)
    name = ("decoder.0" if attention == "additive" else "readout") + ".cross_attn"
    batch = SeqBatch.from_lists([[5, 6, 7, EOS]] * 2, [[13, 14, 15, EOS]] * 2, bos=BOS)

    def half(gates: Tensor) -> Tensor:
        return torch.full_like(gates, 0.5)

    with torch.no_grad(), intervene(model, {"decoder.0.cell.gates": half}):
        with Recorder(model) as whole:
            changed = model.logits(batch)
        state, steps = model.start(batch.source), []
        with Recorder(model) as each:
            for token in (BOS, 13, 14, 15):
                logits, state = model.step(state, torch.full((2, 1), token))
                steps.append(logits)
    with torch.no_grad():
        assert (model.logits(batch) - changed).abs().max() > 1e-3
    torch.testing.assert_close(torch.cat(steps, 1).flatten(0, 1), changed)
    step_weights = torch.cat([attended.sentence(0) for attended in each.history[f"{name}.weights"]], 1)  # type: ignore[union-attr]
    torch.testing.assert_close(whole.attention[name].sentence(0), step_weights)


@pytest.mark.parametrize("feed", ["start", "every"])
def test_without_attention_the_decoder_gets_one_vector(feed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for attention in ATTENTIONS:
        model, batch = make_model(attention=attention, feed=feed), pairs()
        before = model.logits(batch)
        encoded, summary = model.encode(batch.source)
        monkeypatch.setattr(model, "encode", lambda source, e=encoded, s=summary: (e + 1, s))
        same = torch.equal(model.logits(batch), before)
        assert same is (attention == "none"), attention


# -- how many parameters -----------------------------------------------------------------------------------------------


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3)])
def test_the_number_of_parameters_follows_the_equations(cell: str, gates: int) -> None:
    d, e, i, v = 12, 10, 7, 30

    def recurrence(inputs: int, width: int) -> int:
        return gates * width * (inputs + width + 2)  # PyTorch's cells have two biases

    states = 2 if cell == "lstm" else 1
    bridge = (e + 1) * d * states
    encoder = 2 * recurrence(i, e // 2) + 2 * recurrence(e, e // 2)
    upper = recurrence(d, d) + bridge
    first = {
        "none": recurrence(i, d) + bridge,
        "bilinear": recurrence(i, d) + bridge,
        "multihead": recurrence(i, d) + bridge,
        "additive": recurrence(i + e, d) + bridge + d * d + (e + 1) * d + d,  # W, U with its bias, v
    }
    readout = {
        "none": (d + 1) * i,
        "bilinear": (d + e + 1) * i + d * e,
        "multihead": (d + d + 1) * i + (d + 1) * d + (e + 1) * 2 * d + (d + 1) * d,
        "additive": (d + e + i + 1) * i,
    }
    for attention, first_layer in first.items():
        sizes = settings(
            cell=cell, attention=attention, width=d, encoder_width=e, embedding=i, encoder_layers=2, decoder_layers=2
        )
        assert count(build(sizes, v, v, shared=True)) == v * i + encoder + first_layer + upper + readout[attention], (
            attention
        )


def test_tying_sharing_and_feeding() -> None:
    tied = count(Recurrent(settings(), 20, 20))
    assert count(Recurrent(settings(), 20, 20, shared=False)) == tied + 20 * 6
    untied = count(Recurrent(settings(tie_embeddings=False), 20, 20))
    assert untied == tied + 20 * 8 + (8 + 8 + 6 + 1) * (
        8 - 6
    )  # a table of width 8, and an output layer of 8 features, not 6
    assert count(Recurrent(settings(feed="every"), 20, 20)) == tied + 8 * 4 * 8 + 8 * 6


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("feed", ["start", "every"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_steps_equal_a_full_pass(cell: str, attention: str, feed: str, tied: bool) -> None:
    layers = 1 + (tied != (feed == "every"))
    model = make_model(
        cell=cell, attention=attention, feed=feed, tie_embeddings=tied, decoder_layers=layers, bidirectional=tied
    )
    written = [[[4, 5, 6], [7, 8, 9]], [[10, 11, 12], [13, 14, 15]]]  # [N, K] beams
    batch = SeqBatch.from_lists(
        [SOURCES[0]] * 2 + [SOURCES[2]] * 2, [[*beam, EOS] for beams in written for beam in beams], bos=BOS
    )
    with torch.no_grad():
        expected = torch.stack(batch.inputs.layout.split(model.logits(batch))).unflatten(0, (2, 2))  # [N, K, 4, V]
        state = model.start(SeqBatch.from_lists(SOURCES[:3], [[EOS]] * 3, bos=BOS).source)
        state = state.select(torch.tensor([2, 0])).reorder(torch.tensor([[0, 0], [0, 0]])).select(torch.tensor([1, 0]))
        for t in range(4):
            tokens = torch.tensor([[([BOS, *beam])[t] for beam in beams] for beams in written])
            if t == 2:  # swap the beams of the second sentence, and swap them back
                state = state.reorder(torch.tensor([[0, 1], [1, 0]])).reorder(torch.tensor([[0, 1], [1, 0]]))
            logits, state = model.step(state, tokens)
            torch.testing.assert_close(logits, expected[:, :, t])


@pytest.mark.parametrize("attention", ["none", "bilinear", "additive", "multihead"])
def test_encoder_and_decoder_may_differ_in_width(attention: str) -> None:
    for width, encoder_width, embedding in ((8, 14, 5), (16, 6, 9)):
        model = make_model(
            attention=attention, width=width, encoder_width=encoder_width, embedding=embedding, feed="every"
        )
        batch = pairs(spare=1)
        assert model.logits(batch).shape == (len(batch.labels), 20)
        model(batch).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dot_attention_needs_equal_widths() -> None:
    with pytest.raises(ValueError, match='score = "dot" needs width = encoder_width'):
        settings(attention="dot", encoder_width=6)


def test_heads_share_the_width_where_there_are_heads() -> None:
    with pytest.raises(ValueError, match="width 9 is not a multiple of heads 2"):
        settings(attention="multihead", width=9)
    assert settings(attention="additive", width=9).width == 9


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_without_dropout_training_draws_no_random_numbers(attention: str) -> None:
    model = make_model(attention=attention, encoder_layers=2, decoder_layers=2).train()
    before = torch.random.get_rng_state()
    model(pairs()).backward()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_equal_finite_differences(attention: str) -> None:
    model, batch = make_model(attention=attention, decoder_layers=2, feed="every"), pairs(spare=1)
    coefficients = torch.randn(batch.num_targets, 20, dtype=torch.float64)

    def objective() -> Tensor:
        return (model.logits(batch)[: batch.num_targets] * coefficients).sum()

    objective().backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
            up = objective()
            parameter.sub_(direction, alpha=2e-6)
            down = objective()
            parameter.add_(direction, alpha=1e-6)
        assert parameter.grad is not None
        expected_change = (parameter.grad * direction).sum().item()
        assert (up - down).item() / 2e-6 == pytest.approx(expected_change, rel=1e-5, abs=1e-6), name


def copies(generator: torch.Generator, symbols: int = 6) -> Iterator[SeqBatch]:
    while True:
        lengths = torch.randint(2, 7, (32,), generator=generator).tolist()
        lines = [[*torch.randint(4, 4 + symbols, (n,), generator=generator).tolist(), EOS] for n in lengths]
        yield SeqBatch.from_lists(lines, lines, bos=BOS)


@pytest.mark.slow
def test_a_small_model_with_additive_attention_learns_to_copy() -> None:
    torch.manual_seed(3)
    sizes = settings(width=48, encoder_width=48, embedding=32, cell="gru", attention="additive")
    model = Recurrent(sizes, 10, 10).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stream = copies(torch.Generator().manual_seed(3))
    for _ in range(300):
        batch = next(stream)
        optimizer.zero_grad()
        (model(batch) / batch.num_targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    batch = next(stream)
    with torch.no_grad(), Recorder(model) as seen:
        right = (model.logits(batch).argmax(-1) == batch.labels).float().mean().item()
    assert right > 0.98  # chance is one in seven
    tables = [seen.attention["decoder.0.cross_attn"].sentence(n)[0] for n in range(len(batch.source.layout))]
    diagonal_weights = [row[max(i - 1, 0) : i + 2].sum().item() for table in tables for i, row in enumerate(table)]
    # It attends to the copied token or a neighbour, whose state also contains it; uniform weights would give 0.52.
    assert np.mean(diagonal_weights) > 0.85


@pytest.mark.parametrize("attention", ["none", "additive"])
def test_a_run_shows_its_attention_if_it_has_any(attention: str, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "data": {"corpus": "copy", "count": 30},
            "text": {"unit": "word", "vocabulary": 260},
            "model": {"family": "recurrent", **settings(attention=attention).model_dump(exclude={"family"})},
            "training": {"steps": 2, "batch_tokens": 64, "validate_lines": 0},
        }
    )
    translation = regard.train(recipe, tmp_path / "run", device="cpu", quiet=True).forced("a b c", "c a")
    if attention == "none":
        with pytest.raises(UserError, match="no weights to show"):
            _ = translation.attention
    else:
        assert translation.attention.weights.shape == (1, 1, 3, 4)
        assert translation.attention.weights.sum(-1) == pytest.approx(np.ones((1, 1, 3)), abs=1e-5)
