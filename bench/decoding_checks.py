"""Check that the static-shape search, captured or not, finds what the eager search finds, for every model family.

    python -m bench.decoding_checks [--device cuda] [--plant]
    python -m bench.decoding_checks --old PATH        # also compare tokens/s with an older checkout (decoding_versions)

A difference counts where the decisions of the eager search depend on more than rounding (`decoding.decisive`). With
freshly initialised weights few do, and few decisions depend on more than the last token, so noise is added to all
weights and the logits are multiplied by 12. A check fails if fewer than half of its sentences are decisive. With
--plant, errors are planted one after the other, and each must be detected. The exit status is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.machine import heading
from regard.attention import StaticBeamTree
from regard.decoding import Hypothesis, SearchRequest, search
from regard.decoding.beam_state import SearchState
from regard.decoding.constraints import Constraints
from regard.decoding.cuda_graphs import CapturedRunner
from regard.decoding.decisive import decisive
from regard.decoding.sample_search import SampleState
from regard.decoding.search import Runner
from regard.decoding.static_search import StaticRunner
from regard.models import SequenceModel, build
from regard.models.ensemble import Ensemble
from regard.packed import PackedTokens
from regard.recipes.schema import DecodingSettings, Recipe
from regard.text import BOS, EOS, PAD

DISTURBANCE = 1e-3  # of the logits, several times what they are rounded by: they are scaled
SCORE_TOLERANCE = 1e-3  # tolerance for scores of equal outputs
SCALE, NOISE = 12.0, 0.2  # factor of the logits, and standard deviation of the noise in the weights
NUM_ALLOWED = 64  # ids that are not banned, so that EOS is not too rare
WORDS, SENTENCES, LONGEST = 1000, 9, 25
SIZE = {"width": 128, "heads": 4, "ffn_width": 256}
RECURRENT = {"family": "recurrent", "width": 128, "encoder_width": 128, "embedding": 128}
GPT = {"family": "gpt", **SIZE, "layers": 3, "max_positions": 256}
MODELS: dict[str, dict[str, Any]] = {
    "Transformer": {"family": "transformer", **SIZE, "encoder_layers": 2, "decoder_layers": 3},
    "LSTM, additive": {**RECURRENT, "cell": "lstm", "attention": "bahdanau"},
    "GRU, no attention": {**RECURRENT, "cell": "gru", "attention": "none"},
    "GPT, learned": {**GPT, "positions": "learned"},
    "GPT, sinusoidal": {**GPT, "positions": "sinusoidal"},
    "GPT, rotary": {**GPT, "positions": "rotary"},
    "GPT, relative": {**GPT, "positions": "relative"},
    "GPT, window": {**GPT, "positions": "rotary", "mask": "window", "mask_size": 5},
}
ENSEMBLES = {"two Transformers": ("Transformer", "Transformer"), "two GPTs": ("GPT, learned", "GPT, rotary")}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam 4": {"beam": 4},
    "sampling": {"method": "sample", "temperature": 0.8, "top_p": 0.95},
    "rules": {"beam": 4, "no_repeat_ngram": 2, "repetition_penalty": 1.2, "min_length": 5},
}


def model_of(name: str, device: torch.device, seed: int = 1, scale: float = SCALE) -> SequenceModel:
    if name in ENSEMBLES:
        members = enumerate(ENSEMBLES[name])  # members that are sure of different tokens would tie
        return Ensemble([model_of(member, device, seed + n, SCALE / 4) for n, member in members]).eval()
    torch.manual_seed(seed)
    recipe = Recipe.model_validate({"data": {"corpus": "copy"}, "model": {"dropout": 0.0, **MODELS[name]}})
    model = build(recipe.model, WORDS, WORDS, True)
    last = dict(model.named_parameters()).get("decoder.norm.weight")  # None in recurrent models
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        (model.target_embedding.table if last is None else last).mul_(scale)  # type: ignore[union-attr, operator]
    return model.eval().to(device)


def sentences(count: int = SENTENCES) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=draw).tolist()
    words = torch.randint(4, WORDS, (count, LONGEST), generator=draw).tolist()
    return [[*row[: n - 1], EOS] for row, n in zip(words, lengths, strict=True)]


@dataclass(frozen=True)
class Check:
    """The result of one variant of the search, compared with the eager search."""

    same: int
    decisive: int
    wrong: int  # decisive sentences that differ
    apart: float  # largest difference of scores of equal output
    count: int

    @property
    def verdict(self) -> str:
        if self.wrong or self.apart > SCORE_TOLERANCE:
            return "WRONG"
        return "right" if 2 * self.decisive >= self.count else "UNDECIDED"

    def __str__(self) -> str:
        counts = f"{self.same} of {self.count} the same, {self.decisive} decisive, scores apart {self.apart:.1e}"
        return f"{counts}   {self.verdict}"


Found = tuple[list[list[Hypothesis]], list[bool]]  # and whether each is decided by more than rounding


def found(model: SequenceModel, how: dict[str, Any], run: Runner | None, device: torch.device) -> Found:
    settings = DecodingSettings.model_validate({"max_ratio": 1.0, "max_extra": 20, **how})
    nbest = 2 if settings.method == "sample" or settings.beam > 1 else 1
    row = PackedTokens.from_lists(sentences()).to(device)
    request = SearchRequest(row, settings, nbest, banned=[PAD, BOS, *range(NUM_ALLOWED, WORDS)], seed=5)
    results = search(model, request, run=run)
    return results, decisive(model, request, results, DISTURBANCE) if run is None else [True] * len(results)


def compared(got: Found, expected: Found) -> Check:
    same = [[h.tokens for h in a] == [h.tokens for h in b] for a, b in zip(got[0], expected[0], strict=True)]
    wrong = sum(not s and c for s, c in zip(same, expected[1], strict=True))
    pairs = [p for x, y, s in zip(got[0], expected[0], same, strict=True) if s for p in zip(x, y, strict=True)]
    apart = max((abs(a.score - b.score) for a, b in pairs), default=0.0)
    return Check(sum(same), sum(expected[1]), wrong, apart, len(same))


def runners(device: torch.device) -> dict[str, Runner]:
    if device.type != "cuda":
        return {"fixed shapes": StaticRunner(round_sizes=True)}
    return {"fixed shapes": StaticRunner(round_sizes=True), "captured": CapturedRunner(bf16=False)}


def check(name: str, how: str, device: torch.device, expected: Found | None = None) -> Iterator[tuple[str, Check]]:
    """Check each variant three times: steps are captured, then the prefill, then everything is replayed."""
    model = model_of(name, device)
    expected = found(model, SEARCHES[how], None, device) if expected is None else expected
    for label, run in runners(device).items():
        for turn in range(3 if isinstance(run, CapturedRunner) else 1):
            result = compared(found(model, SEARCHES[how], run, device), expected)
            captured = not isinstance(run, CapturedRunner) or (run.steps and not run.failed)
            yield f"{label}{f', turn {turn + 1}' if turn else ''}{'' if captured else ', NOT CAPTURED'}", result


def check_all(say: Callable[[str], None], device: torch.device) -> int:
    """Check every family and search; return how many checks failed."""
    failures = 0
    for name in (*MODELS, *ENSEMBLES):
        for how in SEARCHES:
            try:
                for label, result in check(name, how, device):
                    failures += result.verdict != "right" or "NOT" in label
                    say(f"  {name}, {how}: {label}: {result}")
            except Exception:
                failures += 1
                say(f"  {name}, {how}: FAILED\n{traceback.format_exc()}")
    return failures


# -- planted errors ----------------------------------------------------------------------------------------------------


def _fixed_only(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a search state that is wrong only with static shapes."""

    def method(self: Any, *arguments: Any) -> Any:
        return (instead if self.static else original)(self, *arguments)

    return method


def _late(self: StaticBeamTree, *arguments: Any) -> None:
    """Shift positions by one."""
    self.fed.add_(1)
    APPEND(self, *arguments)
    self.fed.sub_(1)


def _same_draws(self: SampleState, *arguments: Tensor) -> Any:
    """Use the random numbers of the first step at every step."""
    with mock.patch.object(self, "uniform", self.uniform[..., :1].expand_as(self.uniform)):
        return DRAW(self, *arguments)


def _no_top_p(self: SampleState, *arguments: Tensor) -> Any:
    with mock.patch.object(self, "settings", self.settings.model_copy(update={"top_p": 1.0})):
        return DRAW(self, *arguments)


APPEND, DRAW, FINISH = StaticBeamTree.append, SampleState._choose, SearchState.finish
PENALIZE = Constraints.penalize_repetition


def _unrestrained(self: Constraints, logits: Tensor, history: Tensor) -> Tensor:
    return PENALIZE(self, logits, history.flip(1))


PLANTS: dict[str, tuple[str, str, Any, str, Callable[..., Any]]] = {
    "beams are not reordered": (
        "Transformer", "beam 4", StaticBeamTree, "reorder", lambda self, parents: None
    ),
    "beams of a GPT are not reordered": (
        "GPT, rotary", "beam 4", StaticBeamTree, "reorder", lambda self, parents: None
    ),
    "positions are one too large": ("GPT, learned", "greedy", StaticBeamTree, "append", _late),
    "rotary positions are one too large": ("GPT, rotary", "greedy", StaticBeamTree, "append", _late),
    "relative positions are one too large": ("GPT, relative", "sampling", StaticBeamTree, "append", _late),
    "every step draws the same number": (
        "GPT, learned", "sampling", SampleState, "_choose", _fixed_only(DRAW, _same_draws)
    ),
    "top-p is ignored": ("GPT, learned", "sampling", SampleState, "_choose", _fixed_only(DRAW, _no_top_p)),
    "finished hypotheses are dropped": (
        "two GPTs", "beam 4", SearchState, "finish",
        _fixed_only(FINISH, lambda self, which, penalty: self.total.masked_fill_(which, -torch.inf)),
    ),
    "the repetition penalty reads another beam": (
        "Transformer", "rules", Constraints, "penalize_repetition", _unrestrained
    ),
}  # fmt: skip


@contextmanager
def planted(mistake: str) -> Iterator[None]:
    _, _, owner, name, method = PLANTS[mistake]
    with mock.patch.object(owner, name, method):
        yield


def caught(mistake: str, device: torch.device) -> bool:
    """Return whether the check fails with this error in the static-shape search."""
    name, how, *_ = PLANTS[mistake]
    expected = found(model_of(name, device), SEARCHES[how], None, device)
    with planted(mistake):
        return any(result.verdict == "WRONG" for _, result in check(name, how, device, expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plant", action="store_true", help="also make mistakes on purpose, which have to be found")
    parser.add_argument("--old", metavar="PATH", help="a checkout of another version, to be timed beside this one")
    given = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # scores of recurrent models are compared to 1e-3
    device, say = torch.device(given.device), partial(print, flush=True)
    say(heading() + "\n\nThe same as the eager search?")
    failures = check_all(say, device)
    for mistake in PLANTS if given.plant else ():
        found_out = caught(mistake, device)
        failures += not found_out
        say(f"  planted: {mistake}: {'caught' if found_out else 'NOT CAUGHT'}")
    say(f"{failures} failures")
    if given.old:
        versions = [sys.executable, "-m", "bench.decoding_versions", given.old, "--device", given.device]
        failures += subprocess.run(versions).returncode
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
