"""Imported models compute what transformers computes, and are exported unchanged.

The models are small and random, made here with transformers, with tokenizers trained here; transformers and the
tokenizer libraries are the independent side of every comparison.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from imported import Imported, imported_cases
from safetensors.torch import load_file, save_file

from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import agreement, export_run, import_folder
from regard.interop.check import largest_difference
from regard.interop.vocabularies import ids_of
from regard.recipes.schema import Recipe
from regard.run_dir import RunDir
from regard.text import BOS, EOS, PAD, UNK

os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("CI"):  # there it has to be installed
    import sentencepiece
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason="needs regard[formats]")
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs regard[formats]")

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

ENGLISH = "the cat sat on the mat and the dog saw the other cats sitting there in their small house"
SPANISH = "el gato se sentó en la alfombra y el perro vio a los otros gatos sentados en su pequeña casa"
BOUND = 1e-5  # float32 arithmetic in another order, on logits of the size of 1


def texts(words: str, seed: int, count: int = 200) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(words.split(), k=draw.randint(3, 12))) + draw.choice(" .!?").strip() for _ in range(count)
    ]


# -- models to import --------------------------------------------------------------------------------------------------


def spread(model: Any, seed: int) -> Any:
    """Randomise every parameter, with values so large that no two tokens are nearly equally likely."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("position_ids") or "embed_positions" in name or name.endswith("token_type_ids"):
                continue
            scales = name.endswith("weight") and ("norm" in name.lower() or "ln_" in name)  # of a norm: about 1
            centre = 1.0 if scales else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2_folder(path: Path, seed: int = 0, body: bool = False, padding: int = 0, **changes: Any) -> Any:
    """A GPT-2 with a byte-level BPE tokenizer that `tokenizers` trained, EOS after all other tokens, as in GPT-2."""
    import tokenizers

    learner = tokenizers.ByteLevelBPETokenizer()
    paragraphs = [f"{one}\n\n\n{other}" for one, other in zip(texts(ENGLISH, 1), texts(ENGLISH, 2), strict=True)]
    learner.train_from_iterator(paragraphs, vocab_size=330, min_frequency=2, show_progress=False)
    path.mkdir(parents=True)
    learner.save_model(str(path))
    vocabulary = json.loads((path / "vocab.json").read_text())
    end = vocabulary["<|endoftext|>"] = len(vocabulary)
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | changes
    config = transformers.GPT2Config(vocab_size=end + 1 + padding, bos_token_id=end, eos_token_id=end, **settings)
    model = spread((transformers.GPT2Model if body else transformers.GPT2LMHeadModel)(config), seed)
    with torch.no_grad():
        model.get_input_embeddings().weight[end] *= 3  # so that some texts end
    model.save_pretrained(path)
    return model


def wordpieces(path: Path) -> None:
    import tokenizers

    learner = tokenizers.BertWordPieceTokenizer(lowercase=True)
    learner.train_from_iterator(texts(ENGLISH, 2), vocab_size=90, min_frequency=1, show_progress=False)
    path.mkdir(parents=True)
    learner.save_model(str(path))
    words = (path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    moved = [*words[5:40], *words[:5], *words[40:]]  # the special tokens stand in the midst, as in BERT's own
    (path / "vocab.txt").write_text("\n".join([*moved, ""]), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))


def bert_folder(path: Path, kind: str = "BertForMaskedLM", seed: int = 0, **changes: Any) -> Any:
    wordpieces(path)
    rows = len((path / "vocab.txt").read_text(encoding="utf-8").splitlines())
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 70,
        "vocab_size": rows,
        "pad_token_id": 35,
    }
    model = spread(getattr(transformers, kind)(transformers.BertConfig(**settings | changes)), seed)
    model.save_pretrained(path)
    return model


def sentencepieces(lines: list[str], size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, minloglevel=2, hard_vocab_limit=False
    )
    return model.getvalue()


def marian_folder(path: Path, seed: int = 0, **changes: Any) -> Any:
    """A Marian as published: EOS first, then subwords of both languages, the padding token last."""
    path.mkdir(parents=True)
    pieces: dict[str, None] = {}
    for name, words in (("source", ENGLISH), ("target", SPANISH)):
        content = sentencepieces(texts(words, 3), 60)
        (path / f"{name}.spm").write_bytes(content)
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        pieces |= {processor.id_to_piece(i): None for i in range(3, len(processor))}
    tokens = ["</s>", "<unk>", ">>esp<<", *pieces, "<pad>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "es"}))
    settings = {
        "vocab_size": len(tokens),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 70,
        "pad_token_id": len(tokens) - 1,
        "decoder_start_token_id": len(tokens) - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "scale_embedding": True,
        "activation_function": "swish",
    }
    model = spread(transformers.MarianMTModel(transformers.MarianConfig(**settings | changes)), seed)
    model.save_pretrained(path)
    return model


def marian_apart(path: Path, **changes: Any) -> Any:
    """A Marian with separate vocabularies."""
    marian_folder(path, **changes)
    for file in path.glob("*.safetensors"):
        file.unlink()
    words = list(json.loads((path / "vocab.json").read_text()))
    target = {word: number for number, word in enumerate([*words[:40], words[-1]])}
    (path / "target_vocab.json").write_text(json.dumps(target))
    (path / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))
    config = transformers.MarianConfig.from_pretrained(path)
    config.share_encoder_decoder_embeddings = False
    config.decoder_vocab_size = len(target)
    config.decoder_start_token_id = config.pad_token_id = len(target) - 1
    vocabulary = {word: number for number, word in enumerate(words)}  # a special token has the same id on both sides
    first, last = words[len(target) - 1], words[-1]
    vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    model = spread(transformers.MarianMTModel(config), 5)
    model.save_pretrained(path)
    return model


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    changes: dict[str, Any]


CASES = {
    "gpt2": Case(gpt2_folder, {}),
    "gpt2 narrow, inner 20": Case(gpt2_folder, {"n_embd": 12, "n_head": 3, "n_layer": 1, "n_inner": 20}),
    "gpt2 deep, relu, padded rows": Case(
        gpt2_folder, {"n_layer": 4, "n_head": 1, "activation_function": "relu", "padding": 7}
    ),
    "gpt2 untied": Case(gpt2_folder, {"tie_word_embeddings": False}),
    "gpt2 body": Case(gpt2_folder, {"body": True}),
    "bert": Case(bert_folder, {}),
    "bert one layer, one head": Case(bert_folder, {"num_hidden_layers": 1, "num_attention_heads": 1}),
    "bert classifier": Case(bert_folder, {"kind": "BertForSequenceClassification", "num_labels": 3}),
    "bert classifier, relu": Case(bert_folder, {"kind": "BertForSequenceClassification", "hidden_act": "relu"}),
    "marian": Case(marian_folder, {}),
    "marian 1 + 3 layers, relu, unscaled": Case(
        marian_folder,
        {"encoder_layers": 1, "decoder_layers": 3, "activation_function": "relu", "scale_embedding": False},
    ),
}
if int(transformers.__version__.split(".")[0]) >= 5:  # before, it gave such a decoder a table of the encoder's size
    CASES |= {
        "marian two vocabularies": Case(marian_apart, {}),
        "marian two vocabularies, untied": Case(marian_apart, {"tie_word_embeddings": False}),
    }


made = imported_cases(lambda name, path: CASES[name].make(path, **CASES[name].changes))


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_an_imported_model_computes_the_same_logits(made: Callable[[str], Imported], name: str) -> None:
    case = made(name)
    found = largest_difference(case.run, case.folder)
    size = max(float(p.detach().abs().max()) for p in case.model.parameters())
    print(f"{name}: the largest difference of the logits is {found:.1e} (weights up to {size:.1f})")
    assert found <= BOUND


@pytest.mark.parametrize("name", [name for name in CASES if "body" not in name])
def test_an_imported_model_is_exported_bit_for_bit(made: Callable[[str], Imported], name: str, tmp_path: Path) -> None:
    case = made(name)
    folder = export_run(case.run, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (case.folder, folder))
    assert after.keys() == before.keys()
    for tensor in before:
        assert torch.equal(before[tensor], after[tensor]), tensor
    old, new = (json.loads((path / "config.json").read_text()) for path in (case.folder, folder))
    apart = {"attn_pdrop", "attention_probs_dropout_prob", "n_inner"}  # dropout we do not have; 4 * width written out
    for setting in new.keys() - apart:
        assert old.get(setting, new[setting]) == new[setting], setting


def test_a_body_without_its_head_is_imported_and_exported_with_one(
    made: Callable[[str], Imported], tmp_path: Path
) -> None:
    gpt = made("gpt2 body")  # whose head is its embedding
    exported = load_file(export_run(gpt.run, tmp_path / "gpt") / "model.safetensors")
    for name, tensor in gpt.model.state_dict().items():
        assert torch.equal(exported["transformer." + name], tensor)
    bert = bert_folder(tmp_path / "theirs", "BertModel")
    run = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert "its head is new" in run.recipe.about
    assert largest_difference(run, tmp_path / "theirs") <= BOUND, "of what goes into the head"
    exported = load_file(export_run(run, tmp_path / "bert") / "model.safetensors")
    for name, tensor in bert.state_dict().items():
        if not name.startswith("pooler"):
            assert torch.equal(exported["bert." + name], tensor)


# -- text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "gpt2 narrow, inner 20"])
def test_greedy_generation_gives_transformers_tokens(made: Callable[[str], Imported], name: str) -> None:
    from regard.tasks.generator import Generator, generation_settings

    case = made(name)
    settings = generation_settings(case.run.recipe.decoding, method="beam", beam=1)
    tokenizers = case.run.tokenizers
    continuer = Generator.for_recipe(case.run.model(), tokenizers, case.run.recipe, settings)
    theirs = transformers.GPT2Tokenizer.from_pretrained(case.folder)
    prompts = ["", "the cat", "the", "a dog saw them all, there", "in the house\n\n\nthe cats"]
    found = continuer(prompts, tokens=30)
    assert name != "gpt2" or {one.hypotheses[0].finished for one in found} == {True, False}, "some end, some do not"
    for prompt, ours in zip(prompts, found, strict=True):
        ids = torch.tensor([theirs(prompt)["input_ids"] or [theirs.bos_token_id]])
        out = case.model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        tokens = [ids_of(tokenizers[1])[token] for token in ours.hypotheses[0].tokens]
        ended = [ids_of(tokenizers[1])[EOS]] if ours.hypotheses[0].finished else []
        assert tokens + ended == out.tolist()
        assert ours.text == theirs.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("marian")])
def test_greedy_translation_gives_transformers_tokens(made: Callable[[str], Imported], name: str) -> None:
    from regard.api import load

    case = made(name)
    theirs = transformers.MarianTokenizer.from_pretrained(case.folder, separate_vocabs="two" in name)
    lines = [*texts(ENGLISH, 4, 6), "a ☃ and the cat"]
    source, target = case.run.tokenizers
    longest = 20
    translator = load(case.run.path, device="cpu").translator(beam=1, max_ratio=1e-9, max_extra=longest)
    suppressed = [[ids_of(target)[mark]] for mark in (BOS, UNK)]
    suppressed += [[ids_of(target)[target.tag(tag)]] for tag in target.tags]
    for line, answer in zip(lines, translator(lines), strict=True):
        ids = theirs(line, return_tensors="pt")
        assert [ids_of(source)[token] for token in answer.source] == ids["input_ids"][0].tolist()
        out = case.model.generate(
            **ids,
            max_new_tokens=longest,
            num_beams=1,
            do_sample=False,
            bad_words_ids=suppressed,
            forced_eos_token_id=None,
        )[0, 1:].tolist()
        ours = [ids_of(target)[token] for token in answer.hypotheses[0].tokens]
        assert ours == [token for token in out if token != ids_of(target)[EOS]]
        if "two" not in name:
            assert answer.texts[0] == theirs.decode(out, skip_special_tokens=True)


def test_the_most_probable_fills_are_transformers(made: Callable[[str], Imported]) -> None:
    from regard.api import load

    case = made("bert")
    theirs = transformers.BertTokenizer.from_pretrained(case.folder)
    filler = load(case.run.path, device="cpu").filler()
    for line in ("the [MASK] sat on the mat", "[MASK] dog saw the [MASK]s, there!"):
        ids = theirs(line, return_tensors="pt")
        chances = case.model(**ids).logits[0].softmax(-1)
        chances[:, theirs.all_special_ids] = 0
        masks = [place for place, token in enumerate(ids["input_ids"][0]) if token == theirs.mask_token_id]
        (filled,) = filler([line], top=3)
        assert len(filled.guesses) == len(masks)
        for mask, guesses in zip(masks, filled.guesses, strict=True):
            best = chances[mask].topk(3)
            assert [guess.text for guess in guesses] == theirs.convert_ids_to_tokens(best.indices.tolist())
            assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_class_of_a_text_is_transformers(made: Callable[[str], Imported]) -> None:
    from regard.api import load

    case = made("bert classifier")
    theirs = transformers.BertTokenizer.from_pretrained(case.folder)
    model = load(case.run.path, device="cpu")
    lines = texts(ENGLISH, 6, 12)
    logits = [case.model(**theirs(line, return_tensors="pt")).logits[0] for line in lines]
    wanted = [case.model.config.id2label[int(found.argmax())] for found in logits]
    predictions = model.predict(lines)
    assert [prediction.label for prediction in predictions] == wanted
    for found, prediction in zip(logits, predictions, strict=True):
        assert prediction.probability == pytest.approx(found.softmax(-1).max().item(), abs=1e-5)


def test_probability_goes_only_to_tokens_of_the_model(made: Callable[[str], Imported]) -> None:
    """Our special tokens that GPT-2 lacks, and the second copy of its EOS, have no probability."""
    from regard.packed import PackedTokens, SeqBatch

    case = made("gpt2")
    (tokenizer, _) = case.run.tokenizers
    assert [ids_of(tokenizer)[mark] for mark in (PAD, UNK)] == [-1, -1]
    assert ids_of(tokenizer)[BOS] == ids_of(tokenizer)[EOS] == case.model.config.eos_token_id
    row = PackedTokens.from_lists([tokenizer.encode("the cat sat")])
    with torch.inference_mode():
        chances = case.run.model().logits(SeqBatch(PackedTokens.from_lists([[]]), row, row.ids)).softmax(-1)
    assert chances[:, [PAD, BOS, UNK]].max() == 0 and chances[:, EOS].min() > 0


def test_perplexity_and_scores_are_transformers(made: Callable[[str], Imported]) -> None:
    from regard.api import load
    from regard.metrics.perplexity import text_perplexity

    gpt = made("gpt2")
    text = "the dog saw the cat\n\n\nin the small house"
    ids = transformers.GPT2Tokenizer.from_pretrained(gpt.folder)(text, return_tensors="pt")["input_ids"]
    ours = text_perplexity(
        gpt.run.model(), gpt.run.tokenizers[0], [text], context=64, stride=64, stream=True, device="cpu"
    )
    assert ours.tokens == ids.shape[1] - 1
    assert ours.loss == pytest.approx(gpt.model(ids, labels=ids).loss.item(), rel=1e-5)

    marian = made("marian")
    tokenizer = transformers.MarianTokenizer.from_pretrained(marian.folder)
    pair = ("the cat sat", "el gato se sentó")
    (score,) = load(marian.run.path, device="cpu").score([pair])
    batch = tokenizer(pair[0], text_target=pair[1], return_tensors="pt")
    assert -sum(score) / len(score) == pytest.approx(marian.model(**batch).loss.item(), rel=1e-5)


# -- the same tokens ---------------------------------------------------------------------------------------------------

AWKWARD = ["the cat's  mats", "Größe ☃ 🙂", "a\tb", "THE Cats sat!?", "x" * 120, "é e\u0301 中文", ""]


@pytest.mark.parametrize("name", ["gpt2", "bert", "marian"])
def test_text_is_encoded_as_their_ids(made: Callable[[str], Imported], name: str, tmp_path: Path) -> None:
    """Mapped ids are those of their tokenizer, from the imported and from the exported folder."""
    case = made(name)
    kind = {"gpt2": "GPT2Tokenizer", "bert": "BertTokenizer", "marian": "MarianTokenizer"}[name]
    written = export_run(case.run, tmp_path / "out")
    for folder in (case.folder, written):
        theirs = getattr(transformers, kind).from_pretrained(folder)
        for text in [*texts(ENGLISH, 7, 20), *AWKWARD]:
            (tokenizer, _) = case.run.tokenizers
            ours = [ids_of(tokenizer)[token] for token in tokenizer.encode(text)]
            assert ours == theirs(text, add_special_tokens=False)["input_ids"], text


def test_both_sides_of_a_marian_have_their_own_sentencepiece_model(made: Callable[[str], Imported]) -> None:
    case = made("marian")
    theirs = transformers.MarianTokenizer.from_pretrained(case.folder)
    source, target = case.run.tokenizers
    for text in texts(SPANISH, 8, 20):
        ids = theirs(text_target=text)["input_ids"]
        assert [ids_of(target)[token] for token in [*target.encode(text), EOS]] == ids
        assert target.decode(target.encode(text)) == theirs.decode(ids, skip_special_tokens=True) == text
    assert any(source.encode(text) != target.encode(text) for text in texts(SPANISH, 8, 20))
    assert source.tags == (">>esp<<",)
    for text in (">>esp<< the cat", ">>esp<<the cat"):
        assert [ids_of(source)[token] for token in source.encode(text)] == theirs(text)["input_ids"][:-1], text
    assert source.tag(">>esp<<") not in source.encode("the >>esp<< cat"), "only at the start of a text"
    assert source.encode(">>esp<< the cat") == [source.tag(">>esp<<"), *source.encode("the cat")]


def test_a_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    for make, kind, files in (
        (gpt2_folder, "GPT2TokenizerFast", ("vocab.json", "merges.txt")),
        (bert_folder, "BertTokenizerFast", ("vocab.txt",)),
    ):
        folder = tmp_path / kind
        make(folder)
        before = import_folder(folder, tmp_path / f"{kind} before")
        getattr(transformers, kind).from_pretrained(folder).save_pretrained(folder)
        for file in files:
            (folder / file).unlink()
        after = import_folder(folder, tmp_path / f"{kind} after")
        assert after.tokenizers[0].to_json() == before.tokenizers[0].to_json()


# -- runs of our own ---------------------------------------------------------------------------------------------------


def own_run(path: Path, recipe: dict[str, Any], lines: list[str]) -> RunDir:
    """An untrained run, as training would create it."""
    from regard import tensor_io
    from regard.text import train

    run = RunDir.create(path, Recipe.model_validate({"data": {"text": "none.txt"}} | recipe))
    text = run.recipe.text
    tags = ["<mask>"] if run.recipe.model.family == "bert" else []
    source = train(lines, text.unit, text.vocabulary, tags)
    run.save_tokenizers(source, source)
    if run.recipe.task == "classification":
        run.save_classes(["very good", "bad"])
    model = run.fresh_model()
    spread(model, 9)
    tensor_io.save(run.best, tensor_io.model_tensors(model), {})
    return run


SMALL = {"width": 32, "heads": 4, "ffn_width": 48, "dropout": 0.1, "max_positions": 64}
PAIRS = {"data": {"pairs": "none.tsv"}}
OUR_RUNS: dict[str, dict[str, Any]] = {
    "gpt": {"text": {"vocabulary": 300}, "model": {"family": "gpt", "layers": 2, **SMALL}},
    "gpt untied": {
        "text": {"vocabulary": 300},
        "model": {"family": "gpt", "layers": 1, "tie_embeddings": False, **SMALL},
    },
    "bert": {"text": {"vocabulary": 300}, "model": {"family": "bert", "layers": 2, **SMALL}},
    "bert of words": {
        "text": {"vocabulary": 300, "unit": "word"},
        "model": {"family": "bert", "layers": 1, **SMALL},
    },
    "bert classifier": {
        **PAIRS,
        "text": {"vocabulary": 300},
        "model": {"family": "bert", "task": "classify", "pooling": "first", "layers": 2, **SMALL},
    },
    "transformer": {
        **PAIRS,
        "text": {"vocabulary": 300},
        "model": {
            **SMALL,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "norm_first": False,
            "positions": "sinusoidal-split",
            "activation": "gelu",
        },
    },
}
OUR_RUNS["transformer untied"] = OUR_RUNS["transformer"] | {
    "model": OUR_RUNS["transformer"]["model"] | {"tie_embeddings": False}
}
PRE_NORM = {"norm_first": True, "positions": "sinusoidal", "position_base": 100, "activation": "relu"}
OUR_RUNS["transformer with norms first"] = OUR_RUNS["transformer"] | {
    "model": OUR_RUNS["transformer"]["model"] | PRE_NORM
}
OUR_RUNS["gpt with rotary positions"] = OUR_RUNS["gpt"] | {"model": OUR_RUNS["gpt"]["model"] | {"positions": "rotary"}}
OUR_RUNS["rotary gpt untied"] = OUR_RUNS["gpt untied"] | {
    "model": OUR_RUNS["gpt untied"]["model"] | {"positions": "rotary", "position_base": 500}
}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "gated", "kv_heads": 1, "qkv_bias": False}
OUR_RUNS["gpt with Llama's settings"] = OUR_RUNS["gpt untied"] | {
    "model": OUR_RUNS["gpt untied"]["model"] | LLAMA | {"out_bias": False, "ffn_bias": False}
}


def test_an_exported_gpt_is_imported_with_its_bos(tmp_path: Path) -> None:
    """It generates the same as before, and both read the same tokens; also after a second export."""
    from regard.api import load

    def greedy(run: RunDir) -> str:
        return load(run.path, device="cpu").generate("the cat", tokens=8, method="beam", beam=1).text

    run = own_run(tmp_path / "run", OUR_RUNS["gpt"], texts(ENGLISH, 10))
    message = greedy(run)
    for name in ("once", "twice"):
        folder = export_run(run, tmp_path / f"{name} out")
        run = import_folder(folder, tmp_path / name)
        assert run.recipe.data.documents == "paragraph"
        assert greedy(run) == message
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer = run.tokenizers[0]
        assert theirs("the cat")["input_ids"] == [
            ids_of(tokenizer)[ours] for ours in (BOS, *tokenizer.encode("the cat"))
        ]


@pytest.mark.parametrize("name", OUR_RUNS)
def test_an_exported_run_is_the_same_model_in_transformers(name: str, tmp_path: Path) -> None:
    run = own_run(tmp_path / "run", OUR_RUNS[name], texts(ENGLISH, 10))
    folder = export_run(run, tmp_path / "out")
    found = largest_difference(run, folder)
    print(f"{name}: the largest difference of the logits is {found:.1e}")
    assert found <= BOUND
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    _, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    if run.classes:
        assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "very good", "1": "bad"}
        assert import_folder(folder, tmp_path / "again").classes == run.classes
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    (tokenizer, _) = run.tokenizers
    front, back = {"gpt": ([BOS], []), "bert": ([BOS], [EOS])}.get(run.recipe.model.family, ([], [EOS]))
    for text in [*texts(ENGLISH, 11, 20), *AWKWARD]:
        ids = theirs(text)["input_ids"]
        assert ids == [*front, *tokenizer.encode(text), *back], text
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("gpt", {"positions": "relative"}, "model.positions = 'relative' has no counterpart in GPT-2"),
        ("gpt", {"mask": "window"}, "model.mask = 'window' has no counterpart in GPT-2"),
        ("gpt", {"activation": "gated"}, 'model.activation = "gated" has no counterpart in GPT-2'),
        ("gpt", {"score": "dot"}, "model.score = 'dot' has no counterpart in GPT-2"),
        ("transformer", {"cross_score": "additive"}, "model.cross_score = 'additive' has no counterpart in Marian"),
        ("bert", {"norm_first": True}, "model.norm_first = True has no counterpart in BERT"),
        ("transformer", {"positions": "sinusoidal"}, "model.positions = 'sinusoidal' has no counterpart in Marian"),
        ("transformer", {"norm": "rms"}, "model.norm = 'rms' has no counterpart in Marian"),
    ],
)
def test_a_setting_without_counterpart_is_named(
    name: str, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    recipe = OUR_RUNS[name] | {"model": OUR_RUNS[name]["model"] | change}
    run = own_run(tmp_path / "run", recipe, texts(ENGLISH, 10))
    with pytest.raises(UserError, match="counterpart") as caught:
        export_run(run, tmp_path / "out")
    assert complaint in str(caught.value) and not (tmp_path / "out").exists()


# -- what can be wrong with a folder -----------------------------------------------------------------------------------


@pytest.fixture
def copied(made: Callable[[str], Imported], tmp_path: Path) -> Path:
    """A copy of the GPT-2 folder, to be damaged."""
    return Path(shutil.copytree(made("gpt2").folder, tmp_path / "copied"))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        import_folder(folder, folder.parent / "run")
    assert not (folder.parent / "run").exists(), "nothing is left behind"
    return str(caught.value)


def test_missing_and_unknown_tensors_are_named(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    lost = tensors.pop("transformer.h.1.mlp.c_fc.bias")
    save_file(tensors, copied / "model.safetensors")
    assert refused(copied) == f"{copied} lacks tensor: transformer.h.1.mlp.c_fc.bias (1 in all)"
    tensors |= {"transformer.h.1.mlp.c_fc.bias": lost, "adapter.up": lost.clone(), "adapter.down": lost.clone()}
    save_file(tensors, copied / "model.safetensors")
    assert refused(copied) == f"{copied} has an unknown tensor: adapter.down, adapter.up (2 in all)"


def test_masks_and_tied_copies_are_ignored_but_a_different_head_is_not(copied: Path, tmp_path: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    table = tensors["transformer.wte.weight"]
    extra = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "lm_head.weight": table.clone()}
    save_file(tensors | extra, copied / "model.safetensors")
    run = import_folder(copied, tmp_path / "run")
    shutil.rmtree(run.path)
    save_file(tensors | {"lm_head.weight": table + 1}, copied / "model.safetensors")
    assert "lm_head.weight differs from transformer.wte.weight" in refused(copied)


def test_a_bert_in_its_first_published_layout_is_the_same_model(tmp_path: Path) -> None:
    """With the pooler and next-sentence head, which masked LM does not use, and the old names of norms."""
    theirs = tmp_path / "theirs"
    bert_folder(theirs, "BertForPreTraining")
    run = import_folder(theirs, tmp_path / "run")
    assert largest_difference(run, theirs) <= BOUND
    words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = load_file(theirs / "model.safetensors")
    for new, once in words.items():
        old = {name.replace(new, once): tensor for name, tensor in old.items()}
    assert any(name.endswith("gamma") for name in old)
    save_file(old, theirs / "model.safetensors")
    one, other = load_file(run.best), load_file(import_folder(theirs, tmp_path / "again").best)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_weights_in_several_files_are_one_model(made: Callable[[str], Imported], tmp_path: Path) -> None:
    case = made("bert")
    folder = Path(shutil.copytree(case.folder, tmp_path / "copied"))
    (folder / "model.safetensors").unlink()
    case.model.save_pretrained(folder, max_shard_size="20kB")
    assert not (folder / "model.safetensors").exists() and len(list(folder.glob("*.safetensors"))) > 1
    one, several = load_file(case.run.best), load_file(import_folder(folder, tmp_path / "run").best)
    assert one.keys() == several.keys() and all(torch.equal(one[name], several[name]) for name in one)


def test_a_pickle_is_never_loaded(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'echo opened'\ntR.")
    message = refused(copied)
    assert "pytorch_model.bin, a pickle, which regard never loads" in message and "save_pretrained" in message


def test_invalid_settings_and_files_are_named(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    for change, complaint in (
        (
            {"model_type": "mamba"},
            "model_type = 'mamba' has no counterpart here (gpt2, gpt_neox, bert,",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True has no counterpart"),
        ({"activation_function": "mish"}, "activation_function = 'mish' has no counterpart"),
        ({"eos_token_id": 10**6}, "eos_token_id is missing, or outside the vocabulary"),
        ({"vocab_size": 100}, "vocab_size = 100, but transformer.wte.weight has shape (310, 32) in model.safetensors"),
        ({"n_embd": 30}, "width 30 is not a multiple of heads 4"),
        ({"n_embd": 16}, "model.safetensors: transformer.h.0.attn.c_attn.bias has shape (96,), but config.json makes"),
        ({"n_layer": "two"}, "n_layer is missing or not a whole number"),
        ({"resid_pdrop": 7}, "config.json: resid_pdrop must be a number from 0 to below 1, not 7"),
    ):
        (copied / "config.json").write_text(json.dumps(config | change))
        assert complaint in refused(copied)
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"5": "x"}}')
    assert "tokenizer_config.json: added_tokens_decoder: 5 must be an object, not 'x'" in refused(copied)
    (copied / "tokenizer_config.json").unlink()
    (copied / "merges.txt").unlink()
    assert "has no tokenizer" in refused(copied)
    (copied / "config.json").unlink()
    assert "has no config.json" in refused(copied)


# -- on the command line -----------------------------------------------------------------------------------------------


def test_both_verbs_check_themselves(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 12)
    run, out = tmp_path / "run", tmp_path / "out"
    assert run_command(["import", str(copied), "--out", str(run), "--check"], debug=True) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("largest difference of the logits: ") and "regard generate" in captured.err
    assert run_command(["export", str(run), "--to", "huggingface", "--out", str(out), "--check"], debug=True) == 0
    assert capsys.readouterr().out.startswith("largest difference of the logits: ")
    assert run_command(["import", str(copied), "--out", str(run)], debug=False) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_importing_needs_no_transformers_but_checking_does(
    made: Callable[[str], Imported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made("marian").folder
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert run_command(["import", str(folder), "--out", str(tmp_path / "run"), "-q"], debug=True) == 0
    assert run_command(["import", str(folder), "--out", str(tmp_path / "again"), "-q", "--check"], debug=False) == 2
    assert "--check needs transformers: pip install 'regard[formats]'" in capsys.readouterr().err
    assert run_command(["translate", str(tmp_path / "run"), "the cat", "--device", "cpu"], debug=False) == 2
    assert "needs sentencepiece: pip install 'regard[formats]'" in capsys.readouterr().err


def test_a_different_model_fails_its_check(made: Callable[[str], Imported], tmp_path: Path) -> None:
    from regard.interop.check import checked

    case = made("gpt2")
    other = Path(shutil.copytree(case.folder, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["transformer.ln_f.bias"][3] += 0.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="differ by up to"):
        checked(case.run, other)


def test_an_imported_run_is_fine_tuned_and_exported_with_their_ids(
    made: Callable[[str], Imported], tmp_path: Path
) -> None:
    """With data set and --from, training starts from the imported weights."""
    case = made("gpt2")
    (tmp_path / "mine.txt").write_text("\n".join(texts(ENGLISH, 12)))
    changes = [
        f"data.text={tmp_path / 'mine.txt'}",
        "data.held_out=0.1",
        "training.steps=2",
        "training.batch_tokens=256",
    ]
    words = [word for change in changes for word in ("--set", change)]
    recipe, out = case.run.path / "recipe.toml", tmp_path / "tuned"
    assert run_command(["train", str(recipe), "--out", str(out), "-q", "--device", "cpu"], debug=False) == 2  # no data
    command = ["train", str(recipe), "--from", str(case.run.path), *words, "--out", str(out), "-q", "--device", "cpu"]
    assert run_command(command, debug=True) == 0
    folder = export_run(RunDir(out), tmp_path / "theirs")
    assert json.loads((folder / "vocab.json").read_text()) == json.loads((case.folder / "vocab.json").read_text())
    assert largest_difference(RunDir(out), folder) <= BOUND
