"""Imported encoder-decoders (BART, mBART-50, M2M100, NLLB, T5) compute what transformers computes."""

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
from test_huggingface import sentencepieces, spread, transformers

from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import check, import_folder
from regard.interop.check import largest_difference
from regard.interop.vocabularies import ids_of
from regard.runs import LoadedRun
from regard.text import EOS

BOUND = 1e-4
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
ROLES = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
SMALL = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
SMALL |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=70)


def bart_tokenizer(path: Path) -> dict[str, int]:
    tokenizer = trained.byte_level(SPECIALS)
    known = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = trained.processors.TemplateProcessing("<s> $A </s>", special_tokens=known)
    trained.save(tokenizer, path, **ROLES)
    return tokenizer.get_vocab()


def language_tokenizer(path: Path) -> dict[str, int]:
    tokenizer = trained.unigram([*SPECIALS, "en_XX", "es_XX"], "en_XX $A </s>")
    trained.save(tokenizer, path, **ROLES)
    return tokenizer.get_vocab()


def m2m_tokenizer(path: Path) -> dict[str, int]:
    path.mkdir(parents=True)
    content = sentencepieces(trained.strings(300, 5), 120)
    (path / "sentencepiece.bpe.model").write_bytes(content)
    from test_huggingface import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    words = [*SPECIALS, *(processor.id_to_piece(i) for i in range(3, len(processor)))]
    (path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    codes = [f"__{code}__" for code in trained_codes()]
    (path / "special_tokens_map.json").write_text(json.dumps({**ROLES, "additional_special_tokens": codes}))
    settings = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "en", "tgt_lang": "es", **ROLES}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return {word: i for i, word in enumerate([*words, *codes])}


def t5_tokenizer(path: Path) -> dict[str, int]:
    tokenizer = trained.unigram(["<pad>", "</s>", "<unk>"], "$A </s>")
    tokenizer.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(5))])
    trained.save(tokenizer, path, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    return tokenizer.get_vocab()


def trained_codes() -> list[str]:
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    return list(FAIRSEQ_LANGUAGE_CODES["m2m100"])


@dataclass(frozen=True)
class Case:
    kind: str
    tokenizer: Callable[[Path], dict[str, int]]
    target: str | None  # the token that every target begins with
    changes: dict[str, Any] = field(default_factory=dict)
    everyday: bool = True
    sizes: dict[str, Any] = field(default_factory=lambda: SMALL)
    start: str = "</s>"  # what decoders are fed first


SMALL_T5 = dict(d_model=32, d_kv=6, d_ff=48, num_layers=2, num_heads=4)
SMALL_T5 |= dict(relative_attention_num_buckets=16, relative_attention_max_distance=20)
GATED = {"feed_forward_proj": "gated-gelu"}


def t5(kind: str = "T5", *, everyday: bool = False, **changes: Any) -> Case:
    return Case(kind, t5_tokenizer, None, changes, everyday, SMALL_T5, "<pad>")


CASES = {
    "bart": Case("Bart", bart_tokenizer, "<s>"),
    "bart scaled, relu, 1 + 3 layers": Case(
        "Bart",
        bart_tokenizer,
        None,
        {"scale_embedding": True, "activation_function": "relu", "encoder_layers": 1, "decoder_layers": 3},
        everyday=False,
    ),
    "mbart": Case("MBart", language_tokenizer, "es_XX", {"scale_embedding": True}),
    "nllb": Case("M2M100", language_tokenizer, "es_XX"),
    "m2m100": Case("M2M100", m2m_tokenizer, "__es__", {"activation_function": "gelu"}),
    "t5": t5(everyday=True),
    "t5 v1.1": t5(**GATED, tie_word_embeddings=False, everyday=True),
    "t5, heads as wide as the model": t5(d_kv=8, num_decoder_layers=1),
    "t5, many buckets": t5(relative_attention_num_buckets=32, relative_attention_max_distance=128),
    "t5, gated silu": t5(feed_forward_proj="gated-silu", layer_norm_epsilon=1e-3),
    "mt5": t5("MT5", **GATED, tie_word_embeddings=False),
    "umt5": t5("UMT5", **GATED),
}
if int(transformers.__version__.split(".")[0]) < 5:  # which divides outputs by the root of the width also if untied
    CASES["umt5 untied"] = t5("UMT5", **GATED, tie_word_embeddings=False)
MARKED_CASES = [pytest.param(name, marks=[] if case.everyday else pytest.mark.slow) for name, case in CASES.items()]


def folder_of(case: Case, path: Path) -> Any:
    vocabulary = case.tokenizer(path)
    ids = {
        "pad_token_id": vocabulary["<pad>"],
        "eos_token_id": vocabulary["</s>"],
        "bos_token_id": vocabulary.get("<s>"),
    }
    settings = {**case.sizes, "vocab_size": len(vocabulary) + 2, **ids, **case.changes}
    settings |= {"decoder_start_token_id": vocabulary[case.start], "forced_eos_token_id": None}
    kind, config = (getattr(transformers, case.kind + end) for end in ("ForConditionalGeneration", "Config"))
    model = kind(config(**settings))
    if case.changes.get("tie_word_embeddings") is False:  # transformers 5 ties those of T5 unless they differ
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model = spread(model, 3)
    if case.target is not None:
        model.generation_config.forced_bos_token_id = vocabulary[case.target]
    model.save_pretrained(path)
    return kind.from_pretrained(path, attn_implementation="eager").eval()


made = imported_cases(lambda name, path: folder_of(CASES[name], path))


@pytest.mark.parametrize("name", MARKED_CASES)
def test_an_imported_translator_computes_the_same_logits(made: Any, name: str) -> None:
    _, folder, run = made(name)
    found = largest_difference(run, folder)
    print(f"{name}: the largest difference of the logits is {found:.1e}")
    assert found <= BOUND


def test_inputs_that_a_model_of_transformers_does_not_take_are_one_line(made: Any) -> None:
    """Such as token types, which tokenizers of transformers 4 return unless their settings name other inputs."""
    with pytest.raises(UserError, match="BartForConditionalGeneration fails on input_ids: ") as caught:
        check._call(made("bart").model, {"input_ids": torch.rand(1, 3)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MARKED_CASES)
def test_greedy_and_beam_search_give_transformers_tokens(made: Any, name: str) -> None:
    model, folder, run = made(name)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    target = run.tokenizers[1]
    ids, forced = ids_of(target), CASES[name].target is not None
    lines = ["the cat sat on the mat", "a dog", "el gato vio a los otros gatos"]
    for beams in (1, 4):
        translator = LoadedRun.load(run.path, device="cpu").translator(
            beam=beams, max_ratio=1e-9, max_extra=12, length_penalty=0.0
        )
        suppressed = sorted({ids[token] for token in translator.forbidden if ids[token] >= 0} - {ids[EOS]})
        for line, answer in zip(lines, translator(lines), strict=True):
            inputs = theirs(line, return_tensors="pt")
            assert [ids_of(run.tokenizers[0])[token] for token in answer.source] == inputs["input_ids"][0].tolist()
            begin = [
                model.config.decoder_start_token_id,
                *([model.generation_config.forced_bos_token_id] if forced else []),
            ]
            out = model.generate(
                **inputs,
                decoder_input_ids=torch.tensor([begin]),
                forced_bos_token_id=None,
                max_new_tokens=13 - len(begin),
                num_beams=beams,
                do_sample=False,
                length_penalty=0.0,
                early_stopping=False,
                suppress_tokens=suppressed,
            )[0].tolist()[1:]
            out = out[: out.index(ids[EOS])] if ids[EOS] in out else out
            assert [ids[token] for token in answer.hypotheses[0].tokens] == out, (beams, line)


def test_a_run_of_bart_translates_and_is_drawn(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, run = made("bart")
    assert run_command(["translate", str(run.path), "the cat", "--device", "cpu"], debug=True) == 0
    assert capsys.readouterr().out.strip()
    out = tmp_path / "picture.svg"
    assert run_command(["draw", str(run.path), "the cat", "--out", str(out)], debug=True) == 0
    assert out.read_text().startswith("<svg")


@pytest.mark.slow
def test_all_verbs_take_an_imported_t5(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, run = made("t5 v1.1")
    source, target = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_text("the cat sat\na dog saw the house\n" * 8)
    target.write_text("el gato\nel perro vio\n" * 8)
    data = [f"data.{name}={value}" for name, value in (("source", source), ("target", target))]
    data += [f'data.valid=["{source}","{target}"]', "training.steps=2", "training.validate_every=2"]
    data += ["training.save_every=2", "training.batch_tokens=64", "training.average=0"]
    changes = [word for setting in data for word in ("--set", setting)]
    path, picture = str(run.path), tmp_path / "picture.svg"
    for command in (
        ["import", str(folder), "--out", str(tmp_path / "checked"), "--check"],
        ["translate", path, "the cat", "--device", "cpu"],
        ["draw", path, "the cat", "--out", str(picture)],
        ["explain", path, "the cat", "--masks", "8", "--device", "cpu"],
        ["evaluate", path, "--source", str(source), "--reference", str(target), "--device", "cpu"],
        ["train", str(run.path / "recipe.toml"), "--from", path, "--out", str(tmp_path / "tuned"), *changes],
        ["translate", str(tmp_path / "tuned"), "the cat", "--device", "cpu"],
    ):
        assert run_command(command, debug=True) == 0, command
    assert picture.read_text().startswith("<svg") and "BLEU" in capsys.readouterr().out


@pytest.mark.parametrize("forced", [999_999, -1, True, "es_XX"])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_forced_token_that_is_no_token_is_refused(made: Any, tmp_path: Path, forced: Any, file: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for one in made("nllb")[1].iterdir():
        (folder / one.name).symlink_to(one)
    for name in ("generation_config.json", "config.json"):
        content = json.loads((folder / name).read_text()) | {"forced_bos_token_id": forced if name == file else None}
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{file}: forced_bos_token_id"):
        import_folder(folder, tmp_path / "run")
