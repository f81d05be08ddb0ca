"""Imported decoders of the Llama family compute what transformers computes: logits, tokens of searches, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import locally_trained as trained
import pytest
import torch
from imported import Imported, imported_cases
from safetensors.torch import load_file
from test_huggingface import spread, transformers

from regard.cli import decoders
from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import agreement, import_folder
from regard.interop.check import largest_difference
from regard.interop.exported import verify
from regard.interop.hf_folder import HFFolder
from regard.interop.huggingface import export_run
from regard.interop.rope import rotary
from regard.interop.vocabularies import ids_of
from regard.run_dir import RunDir
from regard.runs import LoadedRun
from regard.text import EOS, chat
from regard.text.chat import render

BOUND = 1e-4
ROPE5 = int(transformers.__version__.split(".")[0]) >= 5
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama2() -> Any:
    return trained.byte_fallback(["<unk>", "<s>", "</s>"], "<s>", prepend=True)


def llama3() -> Any:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return trained.byte_level(names, trained.LLAMA3, bos=names[0])


def qwen() -> Any:
    return trained.byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], trained.QWEN2, nfc=True)


def gemma() -> Any:
    return trained.byte_fallback(["<pad>", "<eos>", "<bos>", "<unk>"], "<bos>", prepend=False)


def gpt_neox() -> Any:
    return trained.byte_level(["<|padding|>", "<|endoftext|>"])


LLAMA2 = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
LLAMA3 = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
QWEN = dict(eos_token="<|endoftext|>", pad_token="<|endoftext|>", add_bos_token=False)
GEMMA = dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
NEOX = dict(eos_token="<|endoftext|>", pad_token="<|padding|>")


@dataclass(frozen=True)
class Case:
    kind: str  # prefix of the classes of transformers
    tokenizer: Callable[[], Any]
    specials: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    everyday: bool = False


CASES = {
    "llama 2": Case("Llama", llama2, LLAMA2, {"num_key_value_heads": 4}, everyday=True),
    "llama 3": Case(
        "Llama",
        llama3,
        LLAMA3,
        {"tie_word_embeddings": True, "head_dim": 12},
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 16},
        everyday=True,
    ),
    "llama with biases": Case("Llama", llama3, LLAMA3, {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": Case("Llama", llama2, LLAMA2, {}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama, dynamic": Case("Llama", llama2, LLAMA2, {}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "llama, yarn": Case(
        "Llama",
        llama2,
        LLAMA2,
        {},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "llama, yarn with settings": Case(
        "Llama",
        llama2,
        LLAMA2,
        {"head_dim": 16},
        {"rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0, "original_max_position_embeddings": 32}
        | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "mistral": Case("Mistral", llama2, LLAMA2, {"sliding_window": 5, "num_key_value_heads": 1}, everyday=True),
    "mistral without a window": Case("Mistral", llama2, LLAMA2, {"sliding_window": None, "head_dim": 16}),
    "qwen2": Case("Qwen2", qwen, QWEN, {"tie_word_embeddings": True}, everyday=True),
    "qwen2 with windows": Case(
        "Qwen2", qwen, QWEN, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3", qwen, QWEN, {"head_dim": 16}, everyday=True),
    "gemma": Case("Gemma", gemma, GEMMA, {"head_dim": 16, "num_key_value_heads": 1}, everyday=True),
    "gemma 2": Case(
        "Gemma2",
        gemma,
        GEMMA,
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0}
        | {"final_logit_softcapping": 5.0},
        everyday=True,
    ),
    "gemma 3": Case(
        "Gemma3Text", gemma, GEMMA, {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7}, everyday=True
    ),
    "smollm3": Case("SmolLM3", llama3, LLAMA3, {"num_hidden_layers": 5, "pad_token_id": None}, everyday=True),
    "olmo": Case("Olmo", gpt_neox, NEOX, {"num_key_value_heads": 4}, everyday=True),
    "olmo 2": Case("Olmo2", gpt_neox, NEOX, {}, everyday=True),
    "olmo 3": Case("Olmo3", gpt_neox, NEOX, {"num_hidden_layers": 5, "sliding_window": 4}),
}
MARKED_CASES = [
    pytest.param(name, marks=[] if case.everyday else pytest.mark.slow)
    for name, case in CASES.items()
    if hasattr(transformers, f"{case.kind}Config")
]


def folder_of(case: Case, path: Path, seed: int = 0) -> Any:
    """Write a random model of this kind, with its tokenizer; return the model."""
    size = trained.save(case.tokenizer(), path, **case.specials)
    vocabulary = json.loads((path / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    roles = {f"{role}_id": ids[case.specials[role]] for role in ("bos_token", "eos_token") if role in case.specials}
    settings = {**SMALL, "vocab_size": size + 3, "pad_token_id": None, **roles, **case.changes}
    if case.rope:
        old = {key: value for key, value in case.rope.items() if key != "rope_theta"}
        settings |= (
            {"rope_parameters": case.rope} if ROPE5 else {"rope_scaling": old, "rope_theta": case.rope["rope_theta"]}
        )
    config = getattr(transformers, f"{case.kind}Config")(**settings)
    config._attn_implementation = "eager"  # the only one that bounds scores
    kind = f"{case.kind.removesuffix('Text')}ForCausalLM"
    model = spread(getattr(transformers, kind)(config), seed)
    with torch.no_grad():
        model.get_input_embeddings().weight[roles["eos_token_id"]] *= 2
    model.save_pretrained(path)
    # read again, because the buffers that are not saved were randomised too
    return getattr(transformers, kind).from_pretrained(path, attn_implementation="eager").eval()


made = imported_cases(lambda name, path: folder_of(CASES[name], path))


@pytest.mark.parametrize("name", MARKED_CASES)
def test_an_imported_decoder_computes_the_same_logits(made: Callable[[str], Imported], name: str) -> None:
    case = made(name)
    found = largest_difference(case.run, case.folder)
    print(f"{name}: the largest difference of the logits is {found:.1e}")
    assert found <= BOUND


@pytest.mark.parametrize("name", MARKED_CASES)
def test_greedy_and_beam_search_give_transformers_tokens(made: Callable[[str], Imported], name: str) -> None:
    case, prompts = made(name), ["the cat sat", "a", "the dog saw the other cats in their house"]
    theirs = transformers.AutoTokenizer.from_pretrained(case.folder)
    _, target = case.run.tokenizers
    ids = ids_of(target)
    model = LoadedRun.load(case.run.path, device="cpu")
    for beams in (1, 3):
        generator = model.generator(method="beam", beam=beams, length_penalty=0.0)
        suppressed = sorted({ids[token] for token in generator.forbidden if ids[token] >= 0} - {ids[EOS]})
        for prompt, ours in zip(prompts, generator(prompts, tokens=14), strict=True):
            inputs = theirs(prompt, return_tensors="pt")
            out = case.model.generate(
                inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=14,
                num_beams=beams,
                do_sample=False,
                length_penalty=0.0,
                early_stopping=False,
                suppress_tokens=suppressed,
                pad_token_id=ids[EOS],
            )[0, inputs["input_ids"].shape[1] :].tolist()
            found = [ids[token] for token in ours.hypotheses[0].tokens]
            assert found == out[: out.index(ids[EOS])] if ids[EOS] in out else found == out, (beams, prompt)


@pytest.mark.parametrize(("default", "local"), [(5e5, 1e4), (1e6, 2e4)])  # of OLMo 3, and of Gemma 3
def test_the_base_of_layers_with_a_window_in_the_layout_of_transformers_4(
    tmp_path: Path, default: float, local: float
) -> None:
    """OLMo 3 had one base for all layers, Gemma 3 another one for these."""
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 1e4}))
    found = rotary(HFFolder(tmp_path), default, 5e5 if default == 5e5 else 2e4)
    assert (found["position_base"], found["local_base"]) == (1e4, local)


@pytest.mark.parametrize("name", ["llama 2", "llama 3", "qwen2", "gemma", "olmo"])
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_tokenizers_split_and_join_text_as_theirs(made: Callable[[str], Imported], name: str, count: int) -> None:
    case = made(name)
    theirs = transformers.AutoTokenizer.from_pretrained(case.folder)
    ours = case.run.tokenizers[1]
    for text in trained.strings(count, seed=7):
        ids = ours.encode(text)
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert [ids_of(ours)[token] for token in ids] == expected, text
        assert ours.decode(ids) == theirs.decode(expected), text
        assert "".join(ours.token_texts(ids)).count("⟨") or "".join(ours.token_texts(ids)) == ours.decode(ids)


EXPORTED = {  # name: whether the test is an everyday one
    **{"llama 2": False, "llama 3": True, "llama with biases": False, "llama, linear": False, "llama, yarn": False},
    **{"llama, yarn with settings": False, "mistral": True, "mistral without a window": False, "qwen2": True},
    **{"qwen2 with windows": False, "qwen3": False, "gemma": False, "olmo 2": False},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if e else pytest.mark.slow) for n, e in EXPORTED.items()])
def test_an_imported_decoder_is_exported_with_its_weights_tokens_and_settings(
    made: Callable[[str], Imported], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "MAX_TEXTS", 12)
    case = made(name)
    out = export_run(case.run, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (case.folder, out))
    assert before.keys() == after.keys()
    for tensor, weight in before.items():
        close = CASES[name].kind == "Gemma" and "norm" in tensor  # whose weights are stored without their 1
        torch.testing.assert_close(after[tensor], weight, **({} if close else {"atol": 0, "rtol": 0}), msg=tensor)
    (found,) = verify(case.run, out, "huggingface") or []
    assert found.texts == found.equal == 12
    again = import_folder(out, tmp_path / "again")
    assert again.recipe.model == case.run.recipe.model and again.recipe.decoding == case.run.recipe.decoding
    kind = "Llama" if name == "mistral without a window" else CASES[name].kind  # the same model
    assert type(transformers.AutoModelForCausalLM.from_pretrained(out)).__name__ == f"{kind}ForCausalLM"


@pytest.mark.parametrize(
    ("name", "setting"), [("gemma 2", "softcap = 4.0"), ("smollm3", "unrotated_layers = "), ("olmo", "activation = ")]
)
def test_a_decoder_that_is_not_exported_is_refused_by_its_setting(
    made: Callable[[str], Imported], name: str, setting: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"model.{setting}.* has no counterpart in") as caught:
        export_run(made(name).run, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_chat_template_gives_transformers_tokens_and_stop_ids_end_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    case = Case("Qwen2", qwen, {**QWEN, "chat_template": TEMPLATE})
    folder_of(case, tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ends = [theirs.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")]
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    run = import_folder(tmp_path / "theirs", tmp_path / "run")
    tokenizer = run.tokenizers[1]
    assert [ids_of(tokenizer)[token] for token in run.recipe.decoding.stop_ids] == [ends[0]]
    messages = [{"role": "system", "content": "the house"}, {"role": "user", "content": "the cat?"}]
    expected = theirs(theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
    tokens = decoders.chat(run.path, tokenizer, "the house")("the cat?")
    assert [ids_of(tokenizer)[token] for token in tokens] == expected
    exported = export_run(run, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(exported)
    assert (
        again(again.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"] == expected
    )
    assert {*transformers.GenerationConfig.from_pretrained(exported).eos_token_id} == {*ends}
    command = ["generate", str(run.path), "the cat?", "--chat", "--tokens", "5", "--greedy", "--device", "cpu"]
    assert run_command(command, debug=True) == 0
    assert not capsys.readouterr().out.startswith("the cat?"), "only the answer is printed"
    with pytest.raises(UserError, match="must not contain"):
        decoders.chat(run.path, tokenizer, None)("the <|im_end|> cat")
    (run.path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(UserError, match="the chat template failed"):
        decoders.chat(run.path, tokenizer, None)("the cat")


TEMPLATES = {
    "generation tag": """
{%- for message in messages %}
    {%- set kind = "outer" %}
    {% generation %}
    {%- set kind = "inner" %}
<{{ message.role }}> {{ message.content }} {{ kind }}
    {% endgeneration %}
{{ kind }}
{% endfor %}""",
    "break and continue": """{% for message in messages %}
{% if message.role == "system" %}{% continue %}{% endif %}{{ message.content }}{% break %}
{% endfor %}""",
    "date": "{{ strftime_now('%Y') }} {{ messages[0].content }}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "json with options": "{{ messages | tojson(separators=(',', ':')) }} {{ messages | tojson(ensure_ascii=true) }}",
    "what is not given": "{{ tools is none }} {{ documents is defined }} {{ tools is defined }} {{ eos_token }}",
    "special tokens": "{{ bos_token is defined }} {{ bos_token }} {{ eos_token }} {{ pad_token }}",
    "operators": "{{ 'ab' * 3 + 'c' }} {{ 2 ** 10 + 3 * 1.5 }} {{ ([1] + [2]) * 2 }} {{ 2 ** -1 }}",
}


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, RunDir]:
    pytest.importorskip("jinja2")
    path = tmp_path_factory.mktemp("chat")
    folder_of(Case("Qwen2", qwen, {**QWEN, "chat_template": TEMPLATE}), path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(path / "theirs")
    return theirs, import_folder(path / "theirs", path / "run")


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_have_transformers_tags_functions_and_filters(chatting: tuple[Any, RunDir], name: str) -> None:
    theirs, run = chatting
    messages = [{"role": "system", "content": "<b> & 'é'"}, {"role": "user", "content": 'the "cat"?'}]
    expected = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert render(TEMPLATES[name], messages, run.tokenizers[1]) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}many words{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ ([0] * 10 ** 12) | length }}",
        "{{ 10 ** 12 * 'a' }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{# " + "a" * 2**18 + " #}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x %}{{ n.x ~ n.x }}{% endset %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}many{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set x = '%1000000000000d' % 1 %}",
        "{% set x = '{:>1000000000000}'.format(1) %}",
        "{% set x = 'a'.ljust(10 ** 12) %}",
        "{% set x = ('a' * 10 ** 6).replace('a', 'a' * 10 ** 6) %}",
        "{% set x = 'a' | center(10 ** 12) %}",
        "{% set x = 'a' | indent(10 ** 12, true) %}",
        "{% set x = (['a' * 10 ** 6] * 10 ** 6) | join %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_chat_template_cannot_fill_the_memory_or_run_forever(
    chatting: tuple[Any, RunDir], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    with pytest.raises(UserError, match="the chat template failed"):
        render(template, [{"role": "user", "content": "the cat"}], chatting[1].tokenizers[1])


def test_a_chat_template_that_is_too_long_is_not_imported(tmp_path: Path) -> None:
    folder_of(Case("Qwen2", qwen, {**QWEN, "chat_template": "a" * (2**18 + 1)}), tmp_path / "theirs")
    with pytest.raises(UserError, match="the chat template has more than 262,144 characters"):
        import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()
