"""Imported encoders (RoBERTa, XLM-R, DistilBERT, ModernBERT) compute what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import locally_trained as trained
import pytest
import torch
from imported import imported_cases
from test_huggingface import spread, transformers, wordpieces

from regard.interop.check import largest_difference
from regard.interop.name_map import inverse
from regard.interop.vocabularies import ids_of
from regard.runs import LoadedRun

BOUND = 1e-4
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
ROLES = dict(cls_token="<s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")
BRACKETS = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "unk", "mask")}


def roberta_tokenizer(path: Path) -> int:
    tokenizer = trained.byte_level([*SPECIALS, trained.AddedToken("<mask>", lstrip=True, special=True)])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("</s>", "<s>")]
    from tokenizers import processors

    tokenizer.post_processor = processors.RobertaProcessing(*ids, add_prefix_space=False, trim_offsets=True)
    return trained.save(tokenizer, path, **ROLES)


def xlmr_tokenizer(path: Path) -> int:
    return trained.save(trained.unigram(SPECIALS, "<s> $A </s>", mask="<mask>"), path, **ROLES)


def modernbert_tokenizer(path: Path) -> int:
    tokenizer = trained.byte_level(list(BRACKETS.values()), nfc=True)
    from tokenizers import processors

    known = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=known)
    return trained.save(tokenizer, path, **BRACKETS)


def distilbert_tokenizer(path: Path) -> int:
    wordpieces(path)
    return len((path / "vocab.txt").read_text(encoding="utf-8").splitlines())


SMALL_CONFIG = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
DISTIL = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=70)
MODERN = {**SMALL_CONFIG, "num_hidden_layers": 4, "local_attention": 8, "max_position_embeddings": 64}
ROBERTA = {**SMALL_CONFIG, "max_position_embeddings": 72, "type_vocab_size": 1}


@dataclass(frozen=True)
class Case:
    kind: str
    task: str
    tokenizer: Callable[[Path], int]
    settings: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    everyday: bool = True


CASES = {
    "roberta": Case("Roberta", "ForMaskedLM", roberta_tokenizer, ROBERTA),
    "roberta classifier": Case("Roberta", "ForSequenceClassification", roberta_tokenizer, ROBERTA, {"num_labels": 3}),
    "roberta body": Case("Roberta", "Model", roberta_tokenizer, ROBERTA, everyday=False),
    "xlm-roberta": Case("XLMRoberta", "ForMaskedLM", xlmr_tokenizer, ROBERTA),
    "camembert": Case("Camembert", "ForMaskedLM", xlmr_tokenizer, ROBERTA, everyday=False),
    "distilbert": Case("DistilBert", "ForMaskedLM", distilbert_tokenizer, DISTIL),
    "distilbert classifier": Case("DistilBert", "ForSequenceClassification", distilbert_tokenizer, DISTIL),
    "modernbert": Case("ModernBert", "ForMaskedLM", modernbert_tokenizer, MODERN),
    "modernbert classifier": Case(
        "ModernBert", "ForSequenceClassification", modernbert_tokenizer, MODERN, {"classifier_pooling": "mean"}
    ),
    "modernbert with biases": Case(
        "ModernBert",
        "ForMaskedLM",
        modernbert_tokenizer,
        MODERN,
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
        everyday=False,
    ),
}
MARKED_CASES = [
    pytest.param(name, marks=[] if case.everyday else pytest.mark.slow)
    for name, case in CASES.items()
    if hasattr(transformers, f"{case.kind}Config")
]


def folder_of(case: Case, path: Path) -> Any:
    size = case.tokenizer(path)
    tokens = transformers.AutoTokenizer.from_pretrained(path) if case.kind != "DistilBert" else None
    pad = 35 if tokens is None else tokens.pad_token_id
    # positions of RoBERTa are numbered from the padding token on, whose id is 1 there
    settings = {
        **case.settings,
        "vocab_size": size,
        "pad_token_id": 1 if "oberta" in case.kind else pad,
        **case.changes,
    }
    if case.kind == "ModernBert":
        names = {"bos": "cls", "eos": "sep", "cls": "cls", "sep": "sep"}
        settings |= {f"{a}_token_id": getattr(tokens, f"{b}_token_id") for a, b in names.items()}
    if case.kind == "Camembert":
        settings["pad_token_id"] = 1
    model = spread(
        getattr(transformers, case.kind + case.task)(getattr(transformers, f"{case.kind}Config")(**settings)), 0
    )
    model.save_pretrained(path)
    if case.kind == "DistilBert":
        (path / "tokenizer_config.json").write_text(
            json.dumps({"do_lower_case": True, "tokenizer_class": "DistilBertTokenizer"})
        )
    kind = getattr(transformers, case.kind + case.task)
    return kind.from_pretrained(path, attn_implementation="eager").eval()


made = imported_cases(lambda name, path: folder_of(CASES[name], path))


@pytest.mark.parametrize("name", MARKED_CASES)
def test_an_imported_encoder_computes_the_same_logits(made: Any, name: str) -> None:
    _, folder, run = made(name)
    found = largest_difference(run, folder)
    print(f"{name}: the largest difference of the logits is {found:.1e}")
    assert found <= BOUND


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "modernbert"])
def test_masks_are_filled_as_transformers_fills_them(made: Any, name: str) -> None:
    model, folder, run = made(name)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours, target = LoadedRun.load(run.path, device="cpu").filler(), run.tokenizers[0]
    for text in ("the cat sat on the <mask> and the dog", "<mask> saw other cats"):
        inputs = theirs(text.replace("<mask>", theirs.mask_token), return_tensors="pt")
        assert [ids_of(target)[token] for token in ours.encode(text)] == inputs["input_ids"][0].tolist()
        at = inputs["input_ids"][0].tolist().index(theirs.mask_token_id)
        likely = model(**inputs).logits[0, at].softmax(-1)
        words = [ids_of(target)[token] for token in range(target.first, len(target))]
        best = max(words, key=lambda i: float(likely[i]))
        (filled,) = ours([text], top=1)
        assert filled.guesses[0][0].text.strip() == target.token_texts([inverse(ids_of(target))[best]])[0].strip()


@pytest.mark.parametrize("name", ["xlm-roberta"])
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_tokenizers_split_and_join_text_as_theirs(made: Any, name: str, count: int) -> None:
    _, folder, run = made(name)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), run.tokenizers[0]
    for text in trained.strings(count, seed=7):
        ids = ours.encode(text)
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert [ids_of(ours)[token] for token in ids] == expected, text
        if theirs.unk_token_id not in expected:
            assert ours.decode(ids) == theirs.decode(expected), text


def test_a_run_of_roberta_is_drawn(made: Any, tmp_path: Path) -> None:
    from regard.cli import run as run_command

    _, _, run = made("roberta")
    out = tmp_path / "picture.svg"
    assert run_command(["draw", str(run.path), "the cat <mask> there", "--out", str(out)], debug=True) == 0
    assert out.read_text().startswith("<svg")
    assert torch.isfinite(torch.tensor(out.stat().st_size))
