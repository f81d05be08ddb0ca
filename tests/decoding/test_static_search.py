"""Search with static shapes, captured or not, finds what the eager search finds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import taps
from regard.attention import use_backend
from regard.decoding import Hypothesis, SearchRequest, cuda_graphs, search, static_search
from regard.decoding.cuda_graphs import CapturedRunner, is_inference, obstacle
from regard.decoding.decisive import decisive
from regard.decoding.repetition import completed_ngrams
from regard.decoding.search import Runner, select_runner
from regard.decoding.static_search import StaticRunner, rounded
from regard.decoding.terms import NO_TOKEN
from regard.decoding.topk import topk
from regard.decoding.watching import Beams, Watch
from regard.models import SequenceModel, build
from regard.models.ensemble import Ensemble
from regard.models.gpt import GPT
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import BOS, EOS, PAD

WORDS = 24  # size of the vocabulary, special tokens included
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

MODELS: dict[str, dict[str, Any]] = {
    "transformer": dict(family="transformer", width=16, heads=2, ffn_width=24, encoder_layers=1, decoder_layers=2),
    "learned": dict(
        family="transformer", width=16, heads=4, ffn_width=24, encoder_layers=1, decoder_layers=1, positions="learned"
    ),
    "gpt": dict(family="gpt", width=16, heads=2, layers=2, ffn_width=24, max_positions=128),
    "window": dict(
        family="gpt", width=16, heads=2, layers=2, ffn_width=24, max_positions=128, mask="window", mask_size=3
    ),
    "rotary": dict(family="gpt", width=16, heads=2, layers=1, ffn_width=24, max_positions=128, positions="rotary"),
    "relative": dict(family="gpt", width=16, heads=2, layers=2, ffn_width=24, max_positions=128, positions="relative"),
    "lstm": dict(family="recurrent", cell="lstm", width=12, encoder_width=8, embedding=10, attention="bahdanau"),
    "gru": dict(family="recurrent", cell="gru", width=12, encoder_width=8, embedding=10, attention="none"),
    "heads": dict(family="recurrent", width=12, encoder_width=8, embedding=10, attention="multihead", heads=2),
}

ENSEMBLES = {
    "ensemble": ("transformer", "learned"),
    "of two families": ("transformer", "lstm"),
    "of gpts": ("gpt", "window"),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": dict(beam=1, max_extra=30),
    "beam": dict(beam=4, max_extra=30),
    "no early stopping": dict(beam=4, early_stopping=False, length_penalty=1.0),
    "min length": dict(beam=3, min_length=6),
    "no repeated bigrams": dict(beam=3, no_repeat_ngram=2),
    "repetition penalty": dict(beam=3, repetition_penalty=1.5),
    "suppressed": dict(beam=3, suppress_ids=[7, 9], begin_suppress_ids=[EOS, 5, 6]),
    "sampling": dict(method="sample"),
    "top-k": dict(method="sample", top_k=5, temperature=0.7, max_extra=20),
    "top-p": dict(method="sample", top_p=0.8, no_repeat_ngram=1),
}


def crossed(names: Sequence[str], settings: Sequence[str], usual: str, some: Sequence[str]) -> list[Any]:
    """Return all pairs of models and settings; slow are those with neither the usual setting nor one of some models.

    Models differ in their states, and settings in how they choose from logits.
    """
    everyday = {(name, how) for name in names for how in settings if how == usual or name in some}
    pairs = itertools.product(names, settings)
    return [pytest.param(*pair, marks=() if pair in everyday else pytest.mark.slow) for pair in pairs]


def model_of(name: str, seed: int = 0, size: int = WORDS) -> SequenceModel:
    if name in ENSEMBLES:
        return Ensemble([model_of(member, seed + n, size) for n, member in enumerate(ENSEMBLES[name])]).eval()
    given = {"dropout": 0.0, **MODELS[name]}
    if given["family"] == "recurrent":
        given.update(encoder_layers=1, decoder_layers=2)
    torch.manual_seed(seed)
    model = build(Recipe.model_validate({"data": {"corpus": "copy"}, "model": given}).model, size, size, True)
    with torch.no_grad():  # so that no two decisions are close, and no two layers alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


def sources(count: int, seed: int = 0, longest: int = 9, size: int = WORDS) -> list[list[int]]:
    random = Random(seed)
    lengths = [random.randint(0, longest - 1) for _ in range(count)]
    return [[*(random.randrange(4, size) for _ in range(n)), EOS] for n in lengths]


def found(
    model: SequenceModel,
    lines: list[list[int]],
    how: dict[str, Any],
    run: Runner | None,
    device: str = "cpu",
    watch: Watch | None = None,
    **options: Any,
) -> tuple[list[list[Hypothesis]], Callable[[], list[bool]]]:
    """The results of a search, and a function that says which of them are decided by more than rounding."""
    settings = DecodingSettings.model_validate({"max_ratio": 1.0, "max_extra": 6, **how})
    options = {"nbest": 2 if settings.method == "sample" or settings.beam > 1 else 1, "seed": 5, **options}
    row = PackedTokens.from_lists(lines).to(device)
    request = SearchRequest(row, settings, banned=[PAD, BOS], **options)
    results = search(model, request, watch=watch, run=run)
    return results, lambda: decisive(model, request, results)


def assert_same(got: tuple[Any, Any], expected: tuple[Any, Callable[[], list[bool]]]) -> None:
    """Compare hypotheses and scores, except for sentences that are decided by no more than rounding."""
    assert len(got[0]) == len(expected[0])
    for n, (some, others) in enumerate(zip(got[0], expected[0], strict=True)):
        if [h.tokens for h in some] != [h.tokens for h in others] and not expected[1]()[n]:
            continue
        assert [h.tokens for h in some] == [h.tokens for h in others]
        assert [h.finished for h in some] == [h.finished for h in others]
        assert [h.score for h in some] == pytest.approx([h.score for h in others], abs=1e-4)
        for one, two in zip(some, others, strict=True):
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


# -- static shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how"),
    crossed([*MODELS, *ENSEMBLES], [*SETTINGS], "beam", ["transformer", "gpt", "lstm", "of two families"]),
)
@pytest.mark.parametrize("device", DEVICES)
def test_static_shapes_change_nothing(monkeypatch: pytest.MonkeyPatch, device: str, name: str, how: str) -> None:
    """With sentences that fill the batch, a state that grows twice and a batch that shrinks; and with none of that."""
    model, lines = model_of(name).to(device), sources(7)
    expected = found(model, lines, SETTINGS[how], None, device)
    assert_same(found(model, lines, SETTINGS[how], StaticRunner(), device), expected)
    monkeypatch.setattr(static_search, "CAPACITY", 10)
    monkeypatch.setattr(static_search, "MIN_BEAMS_TO_SHRINK", 0)
    assert_same(found(model, lines, SETTINGS[how], StaticRunner(round_sizes=True), device), expected)


@pytest.mark.parametrize("name", ["transformer", "window", "heads"])
@pytest.mark.parametrize("which", ["plain", "fused"])
def test_every_attention_backend_reads_the_same_static_cache(which: str, name: str) -> None:
    model, lines = model_of(name), sources(5)
    expected = found(model, lines, SETTINGS["beam"], None)
    with use_backend(which):
        assert_same(found(model, lines, SETTINGS["beam"], StaticRunner(round_sizes=True)), expected)


@pytest.mark.parametrize("how", ["beam", "no repeated bigrams", "sampling"])
@pytest.mark.parametrize("name", ["transformer", "gpt", "lstm"])
def test_forced_prefixes_are_kept(name: str, how: str) -> None:
    model, lines = model_of(name), sources(6)
    prefixes = [[4, 5, 6, 7][:n] for n in (0, 1, 2, 3, 4, 0)]
    expected = found(model, lines, SETTINGS[how], None, prefixes=prefixes)
    for sizes in (False, True):
        got = found(model, lines, SETTINGS[how], StaticRunner(sizes), prefixes=prefixes)
        assert_same(got, expected)
    for hypotheses, prefix in zip(got[0], prefixes, strict=True):
        assert all(list(h.tokens[: len(prefix)]) == prefix for h in hypotheses)


def test_output_ends_where_every_token_is_banned() -> None:
    model, lines = model_of("transformer"), sources(3)
    settings = DecodingSettings(beam=2)
    row = PackedTokens.from_lists(lines)
    got = search(model, SearchRequest(row, settings, banned=range(WORDS)), run=StaticRunner())
    expected = search(model, SearchRequest(row, settings, banned=range(WORDS)))
    assert [[h.tokens for h in some] for some in got] == [[h.tokens for h in some] for some in expected] == [[()]] * 3
    assert [some[0].score for some in got] == pytest.approx([some[0].score for some in expected], abs=1e-5)


def test_a_beam_may_be_wider_than_the_vocabulary() -> None:
    model, lines = model_of("transformer", size=6), sources(3, size=6)
    assert_same(
        found(model, lines, dict(beam=30, max_extra=3, max_ratio=0.1), StaticRunner(), nbest=12),
        found(model, lines, dict(beam=30, max_extra=3, max_ratio=0.1), None, nbest=12),
    )


@pytest.mark.parametrize("name", ["transformer", "gpt", "gru"])
def test_a_sentence_does_not_depend_on_its_batch(name: str) -> None:
    model, lines = model_of(name), sources(5)
    together = found(model, lines, SETTINGS["beam"], StaticRunner(round_sizes=True))
    alone = [found(model, [line], SETTINGS["beam"], StaticRunner(round_sizes=True)) for line in lines]
    assert_same(([one[0] for one, _ in alone], None), together)


def test_prompts_may_have_different_lengths_or_be_empty() -> None:
    model = model_of("gpt")
    for prompts in ([[5, 6, 7, 8], [9], [], [10, 11]], [[], []]):
        options: dict[str, Any] = dict(begin=[4] * len(prompts), prompts=[[*p, 4] for p in prompts])
        for how in ("greedy", "repetition penalty", "sampling"):
            expected = found(model, prompts, SETTINGS[how], None, **options)
            assert_same(found(model, prompts, SETTINGS[how], StaticRunner(round_sizes=True), **options), expected)


@pytest.mark.parametrize("how", ["greedy", "beam", "sampling"])
def test_a_prompt_that_fills_the_context_may_share_a_batch_with_a_short_one(how: str) -> None:
    """It is done long before the other, and no position beyond the context is used."""
    model, prompts = model_of("gpt"), [[5, 6] * 60, [7, 8]]
    options: dict[str, Any] = dict(max_length=[128 - len(p) for p in prompts])
    settings = {**SETTINGS[how], "max_extra": 126, "min_length": 126}
    expected = found(model, prompts, settings, None, **options)
    assert_same(found(model, prompts, settings, StaticRunner(round_sizes=True), **options), expected)
    assert [len(some[0].tokens) for some in expected[0]] == [8, 126]


def test_a_watcher_sees_and_stops_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_search, "MIN_BEAMS_TO_SHRINK", 0)
    model, lines = model_of("transformer"), sources(6)

    def watcher(seen: list[object]) -> Callable[[list[int], Beams], Tensor]:
        def watch(inside: list[int], beams: Beams) -> Tensor:
            rows = beams.tokens.tolist()
            for n, k in beams.alive.nonzero().tolist():
                seen.append((inside[n], beams.tokens.shape[-1], tuple(rows[n][k])))
            return beams.alive & (beams.tokens[..., -1] % 5 == 0)

        return watch

    for how in ("greedy", "beam", "sampling"):
        logs: list[list[object]] = [[], []]
        expected = found(model, lines, SETTINGS[how], None, watch=watcher(logs[0]))
        assert_same(
            found(model, lines, SETTINGS[how], StaticRunner(round_sizes=True), watch=watcher(logs[1])), expected
        )
        assert sorted(logs[0], key=repr) == sorted(logs[1], key=repr) and logs[0]
        assert any(not h.finished for some in expected[0] for h in some)  # some were stopped


def test_two_stage_topk_equals_torch_topk() -> None:
    torch.manual_seed(0)
    for size in (5, 900, 4096, 5001):
        values = torch.randn(2, 2, size)
        values[0, 0, 7:] = -math.inf
        for count in (1, 3, 9):
            top = values.topk(min(count, size))
            got, where = topk(values, count)
            torch.testing.assert_close(got, top.values, rtol=0, atol=0)
            assert torch.equal(values.gather(-1, where), got)
            assert all(len(set(row)) == len(row) for row in where.flatten(0, 1).tolist())  # no duplicates


@pytest.mark.parametrize("size", [1, 2, 3])
def test_repeated_ngrams_are_found_in_histories_of_any_length(size: int) -> None:
    torch.manual_seed(size)
    history, steps = torch.randint(0, 4, (13, 2, 12)), torch.arange(13)
    written = torch.where(torch.arange(12) < steps[:, None, None], history, NO_TOKEN)
    got = [completed_ngrams(written[n : n + 1], steps[n : n + 1], size, 4)[0] for n in range(13)]
    for n, k in itertools.product(range(13), range(2)):
        past = tuple(history[n, k, : int(steps[n])].tolist())
        grams = {past[i : i + size] for i in range(len(past) - size + 1)}
        expected = [len(past) >= size and (*past[len(past) - size + 1 :], v) in grams for v in range(4)]
        assert got[n][k].tolist() == expected


def test_sizes_are_rounded_to_few_values() -> None:
    sizes = [rounded(n) for n in range(1, 1000)]
    assert all(n <= size < 1.5 * n + 1 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 20 and sizes == sorted(sizes)


# -- captured ----------------------------------------------------------------------------------------------------------


class Tape:
    """Replaces a CUDA graph without a GPU: replaying it runs the captured action again."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.replay = action


class Taped(CapturedRunner):
    """A runner that captures with `Tape`; with a GPU, `CapturedRunner` itself is tested too."""

    def _captured(self, action: Callable[[], None]) -> Tape:
        action()
        return Tape(action)


RECORDERS = [(Taped, "cpu"), *([(CapturedRunner, "cuda")] if torch.cuda.is_available() else [])]
recorders = pytest.mark.parametrize(("recorder", "device"), RECORDERS)


@recorders
@pytest.mark.parametrize(
    ("name", "how"),
    crossed(
        ["transformer", "gpt", "window", "rotary", "relative", "lstm", "ensemble", "of two families"],
        ["beam", "repetition penalty", "top-k"],
        "beam",
        ["transformer", "lstm"],
    ),
)
def test_a_captured_step_serves_other_batches(
    monkeypatch: pytest.MonkeyPatch, recorder: type[CapturedRunner], device: str, name: str, how: str
) -> None:
    monkeypatch.setattr(static_search, "CAPACITY", 16)
    model, run = model_of(name).to(device), recorder(bf16=False)
    eager = {seed: found(model, sources(7, seed), SETTINGS[how], None, device) for seed in (1, 2, 3)}
    for seed in (1, 2, 3, 1):
        assert_same(found(model, sources(7, seed), SETTINGS[how], run, device), eager[seed])
    assert not run.failed and 1 <= len(run.steps) <= 6 and bool(run.prefills) == (name in ("transformer", "ensemble"))
    kinds = set(run.steps)
    more = [*sources(7, 1), sources(7, 1)[0]]  # as many as seven are when rounded up
    assert_same(found(model, more, SETTINGS[how], run, device), found(model, more, SETTINGS[how], None, device))
    assert set(run.steps) == kinds


@recorders
def test_rounded_source_lengths_stay_within_the_positions_of_the_model(
    monkeypatch: pytest.MonkeyPatch, recorder: type[CapturedRunner], device: str
) -> None:
    monkeypatch.setitem(MODELS, "learned", {**MODELS["learned"], "max_positions": 20})
    model, run = model_of("learned").to(device), recorder(bf16=False)
    lines = [[*range(4, 22), EOS], [5, EOS]]  # 19 tokens, rounded up to 24
    for _ in range(3):
        expected = found(model, lines, SETTINGS["greedy"], None, device, max_length=20)
        assert_same(found(model, lines, SETTINGS["greedy"], run, device, max_length=20), expected)


@recorders
def test_the_number_of_captured_steps_is_limited(
    monkeypatch: pytest.MonkeyPatch, recorder: type[CapturedRunner], device: str
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    model, run = model_of("transformer").to(device), recorder(bf16=False)
    for count in (1, 2, 3, 4, 1):
        lines = sources(count, longest=4)
        assert_same(
            found(model, lines, SETTINGS["greedy"], run, device), found(model, lines, SETTINGS["greedy"], None, device)
        )
        assert len(run.steps) <= 2


@recorders
@pytest.mark.parametrize("name", ["transformer", "ensemble"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_captured_step_uses_the_current_weights(
    recorder: type[CapturedRunner], device: str, bf16: bool, name: str
) -> None:
    """Weights may be changed in place or moved; the next search uses the new ones."""
    model, other = model_of(name, 1).to(device), model_of(name, 3).to(device)
    lines, run = sources(5), recorder(bf16)
    first = found(model, lines, SETTINGS["beam"], run, device)
    expected = found(other, lines, SETTINGS["beam"], recorder(bf16), device)
    assert first[0] != expected[0]
    model.load_state_dict(other.state_dict())
    assert_same(found(model, lines, SETTINGS["beam"], run, device), expected)  # reading the sources is recorded now
    model.load_state_dict(model_of(name, 1).state_dict())
    assert_same(found(model, lines, SETTINGS["beam"], run, device), first)  # and was played again
    model.load_state_dict(other.state_dict())
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert_same(found(model, lines, SETTINGS["beam"], run, device), expected)


@recorders
def test_bf16_scores_are_close_to_fp32(recorder: type[CapturedRunner], device: str) -> None:
    """Matrices are rounded to bf16; norms, positions and sums are not. The model itself is not changed."""
    model, lines = model_of("transformer").to(device), sources(8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = recorder(bf16=True)
    got, _ = found(model, lines, dict(beam=1, min_length=9), run, device)
    exact, _ = found(model, lines, dict(beam=1, min_length=9), None, device)
    for (one,), (two,) in zip(got, exact, strict=True):
        assert one.logprobs[0] == pytest.approx(two.logprobs[0], abs=0.1)
    assert run.copy is not None
    kinds = {name: tensor.dtype for name, tensor in run.copy.model.state_dict().items()}
    assert {kinds[name] for name in kinds if "norm" in name} == {torch.float32}
    assert {kinds[name] for name in kinds if "weight" in name and "norm" not in name} == {torch.bfloat16}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == torch.float32


def test_a_search_that_cannot_be_captured_runs_anyway(capsys: pytest.CaptureFixture[str]) -> None:
    """There is one line about it, once."""

    class Broken(CapturedRunner):
        def _captured(self, action: Callable[[], None]) -> None:
            action()
            self.failed = True
            self._warn("operation not permitted")

    model, lines, run = model_of("transformer"), sources(5), Broken(bf16=False)
    expected = found(model, lines, SETTINGS["beam"], None)
    for _ in range(2):
        assert_same(found(model, lines, SETTINGS["beam"], run), expected)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "slower" in said and "operation not permitted" in said


def test_running_out_of_gpu_memory_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(CapturedRunner):
        def _captured(self, action: Callable[[], None]) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, lines, run = model_of("transformer"), sources(5), Full(bf16=False)
    assert_same(found(model, lines, SETTINGS["beam"], run), found(model, lines, SETTINGS["beam"], None))
    assert "memory" in capsys.readouterr().err and not run.failed


def test_no_step_exceeds_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is started before the host knows which sentences are done, and the batch shrinks."""
    monkeypatch.setattr(static_search, "MIN_BEAMS_TO_SHRINK", 0)
    monkeypatch.setitem(MODELS, "learned", {**MODELS["learned"], "max_positions": 9})
    model, lines = model_of("learned"), sources(8, longest=5)
    for last in (8, 9):  # every eight steps the host looks, and one more is under way then
        limits, settings = [last - 1] * 6 + [last] * 2, {**SETTINGS["beam"], "min_length": last}
        run = Taped(bf16=False)
        expected = found(model, lines, settings, None, max_length=limits)
        assert_same(found(model, lines, settings, run, max_length=limits), expected)


@pytest.mark.parametrize("room", [16, 64])
@pytest.mark.parametrize("how", ["beam", "greedy", "top-k"])
@pytest.mark.parametrize("name", ["transformer", "gpt", "lstm"])
def test_limits_and_capacities_of_all_sizes(monkeypatch: pytest.MonkeyPatch, name: str, how: str, room: int) -> None:
    monkeypatch.setattr(static_search, "MIN_BEAMS_TO_SHRINK", 0)
    monkeypatch.setattr(static_search, "CAPACITY", room)
    model, lines = model_of(name), sources(9, longest=6)
    for limits in ([9, 9, 9, 9, 9, 8, 8, 8, 8], [27, 18, 17, 9, 8, 7, 3, 2, 1], [18] * 9):
        settings = {**SETTINGS[how], "min_length": 30, "max_extra": 40}
        expected = found(model, lines, settings, None, max_length=limits)
        assert_same(found(model, lines, settings, Taped(bf16=False), max_length=limits), expected)


def test_a_bf16_copy_is_retried_after_running_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    class Scarce(cuda_graphs.Bf16Copy):
        def __init__(self, model: nn.Module) -> None:
            made.append(len(made) > 0)
            if not made[-1]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(model)

    monkeypatch.setattr(cuda_graphs, "Bf16Copy", Scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model, lines, run = model_of("transformer"), sources(5), Taped(bf16=True)
    got = found(model, lines, SETTINGS["beam"], run)
    assert made == [False, True] and run.copy is not None
    assert_same(got, found(model, lines, SETTINGS["beam"], Taped(bf16=True)))


def test_models_without_static_states_run_eagerly_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GPT, "has_static_state", False)
    model, lines, run = model_of("rotary"), sources(5), Taped(bf16=False)
    for _ in range(2):
        assert_same(found(model, lines, SETTINGS["beam"], run), found(model, lines, SETTINGS["beam"], None))
    said = capsys.readouterr().err
    assert not run.steps and not run.prefills
    assert said.count("\n") == 1 and "GPT has no decoding state with static shapes" in said


def test_taps_backends_and_training_mode_prevent_capturing() -> None:
    """With a listener, a requested attention backend, or in training mode, every step runs eagerly."""
    model = model_of("transformer")
    assert all(obstacle(model_of(name)) is None for name in [*MODELS, *ENSEMBLES])
    assert obstacle(nn.Linear(2, 2)) == "Linear has no decoding state with static shapes"
    assert obstacle(Ensemble([model_of("gpt"), model_of("lstm")])) is not None  # which count positions differently
    assert is_inference(model)
    with taps.listen(lambda module, kind, value: None):
        assert not is_inference(model)
    with use_backend("plain"):
        assert not is_inference(model)
    assert not is_inference(model.train())


def test_searches_on_a_cpu_are_not_captured() -> None:
    assert select_runner(model_of("transformer")) is None
