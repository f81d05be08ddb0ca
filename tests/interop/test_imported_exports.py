"""Imported runs exported to CTranslate2 compute what the run computes; what it cannot express is named in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from imported import Imported, imported_cases
from test_decoders import CASES as DECODERS
from test_decoders import folder_of as decoder_folder
from test_huggingface import CASES as OTHERS
from test_huggingface import transformers
from test_translators import CASES as TRANSLATORS
from test_translators import folder_of as translator_folder

from regard.errors import UserError
from regard.interop import agreement
from regard.interop.exported import verify
from regard.registry import EXPORTERS

if not os.environ.get("CI"):  # there it has to be installed
    pytest.importorskip("ctranslate2", reason="needs regard[ctranslate2]")

EVERYDAY = {"llama 2", "qwen3", "bart", "t5", "marian"}
REFUSED = {  # the settings without a counterpart
    "llama 3": ["rope_scaling = 'llama3'"],
    "llama, yarn": ["rope_scaling = 'yarn'"],
    "llama, yarn with settings": ["rope_scaling = 'yarn'"],
    "mistral": ["mask = 'window'"],
    "qwen2 with windows": ["mask = 'window'"],
    "gemma 2": ["norm_place = 'both'", "softcap = 4.0", "logit_softcap = 5.0", "mask = 'window'"],
    "gemma 3": ["norm_place = 'both'", "local_base = 10000.0", "mask = 'window'"],
    "smollm3": ["unrotated_layers = [3]"],
    "olmo 2": ["norm_place = 'output'", "qk_norm_all = True"],
    "olmo 3": ["norm_place = 'output'", "qk_norm_all = True", "mask = 'window'"],
}
KNOWN = [name for name, case in DECODERS.items() if hasattr(transformers, f"{case.kind}Config")]
KNOWN += [*TRANSLATORS, *(name for name in OTHERS if "bert" not in name)]


def save(name: str, path: Path) -> Any:
    if name in DECODERS:
        return decoder_folder(DECODERS[name], path)
    if name in TRANSLATORS:
        return translator_folder(TRANSLATORS[name], path)
    return OTHERS[name].make(path, **OTHERS[name].changes)


made = imported_cases(save)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.slow) for name in KNOWN if name not in REFUSED],
)
def test_ctranslate2_computes_what_an_imported_run_computes(
    made: Callable[[str], Imported], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 12)
    if name == "umt5":  # of its random weights, CTranslate2's beam search finds 4 of 12 hypotheses that are less likely
        monkeypatch.setattr(agreement, "MAX_TOTAL_LOSS", 0.2)
    run = made(name).run
    found = verify(run, EXPORTERS["ctranslate2"](run, tmp_path / "out"), "ctranslate2")
    assert found is not None and [each.texts for each in found] == [12] * (2 if run.recipe.data.kind == "pairs" else 1)
    assert found[0].equal == 12 and found[0].difference is not None and found[0].difference > 0


@pytest.mark.parametrize("name", [name for name in KNOWN if name in REFUSED])
def test_a_decoder_that_ctranslate2_cannot_express_is_refused(
    made: Callable[[str], Imported], name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        EXPORTERS["ctranslate2"](made(name).run, tmp_path / "out")
    message = str(caught.value)
    assert "\n" not in message and all(f"model.{setting}" in message for setting in REFUSED[name])
    assert "has no counterpart in CTranslate2" in message and not (tmp_path / "out").exists()
