"""Conversations become the tokens that transformers makes of them, by the chat templates of published models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import locally_trained as trained
import pytest
from test_decoders import GEMMA, LLAMA2, LLAMA3, QWEN, Case, folder_of, gemma, llama2, llama3, qwen
from test_huggingface import transformers

from regard.cli import decoders
from regard.cli import run as run_command
from regard.errors import UserError
from regard.interop import import_folder
from regard.interop.vocabularies import ids_of
from regard.runs import LoadedRun
from regard.text import EOS
from regard.text import chat as chats

pytest.importorskip("jinja2", reason="needs regard[formats]")

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
LLAMA_2_CHAT = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + ALTERNATE + "{% if loop.index0 =="
    " 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' +"
    " message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3_INSTRUCT = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_3_2 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
GEMMA_IT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' +"
    " message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{'<start_of_turn>model\n'}}{% endif %}"
)
QWEN_2_5 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN_3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def gemma_with_turns() -> Any:
    tokenizer = gemma()
    tokenizer.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    return tokenizer


def added(text: str) -> dict[str, Any]:
    """A special token as older tokenizer_config.json files have it."""
    return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": False, "special": True}


CASES = {
    "llama 2": (Case("Llama", llama2, LLAMA2), LLAMA_2_CHAT),
    "llama 3": (Case("Llama", llama3, LLAMA3), LLAMA_3_INSTRUCT),
    "llama 3.2": (Case("Llama", llama3, LLAMA3), LLAMA_3_2),
    "mistral": (Case("Mistral", llama2, {**LLAMA2, "add_bos_token": True}), MISTRAL_INSTRUCT),
    "gemma": (Case("Gemma", gemma_with_turns, {**GEMMA, "add_bos_token": True}, {"head_dim": 16}), GEMMA_IT),
    "qwen 2.5": (Case("Qwen2", qwen, {**QWEN, "bos_token": None}), QWEN_2_5),
    "qwen 3": (Case("Qwen3", qwen, {**QWEN, "bos_token": None}, {"head_dim": 16}), QWEN_3),
}


def chat_folder(case: Case, template: str, path: Path, place: str) -> None:
    """A random model with this template in tokenizer_config.json, in a list there, or in a file of its own."""
    roles = {role: token for role, token in case.specials.items() if token is not None}
    folder_of(replace(case, specials=roles, changes={**case.changes, "max_position_embeddings": 512}), path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {role: token for role, token in case.specials.items() if token is None}
    if place == "objects":
        settings |= {role: added(token) for role, token in LLAMA2.items() if role in roles}
    if place == "file":
        (path / "chat_template.jinja").write_text(template)
    elif place == "list":
        named = {"default": template, "rag": "{{ 'other' }}"}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    else:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


CONVERSATIONS = [
    (None, "the cat?"),
    ("the house", "  the dog\n\nsaw  it \n"),
    ("", "¿el gato? 12 345 ☃ {{ bos_token }} [INST]"),
]


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "setting") for name in CASES), ("llama 3", "file"), ("qwen 2.5", "list"), ("llama 2", "objects")],
)
def test_a_conversation_becomes_transformers_tokens(name: str, place: str, tmp_path: Path) -> None:
    case, template = CASES[name]
    chat_folder(case, template, tmp_path / "theirs", place)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    run = import_folder(tmp_path / "theirs", tmp_path / "run")
    tokenizer = run.tokenizers[1]
    generator = LoadedRun.load(run.path, device="cpu").generator()
    for system, user in CONVERSATIONS:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": user})
        chat = decoders.chat(run.path, tokenizer, system)
        try:
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template may refuse system messages: then so do we, in its words
            with pytest.raises(UserError, match="the chat template failed") as caught:
                chat(user)
            assert str(error) in str(caught.value)
            continue
        assert [ids_of(tokenizer)[token] for token in chat(user)] == expected, (system, user)
        fed = replace(generator, chat=chat).read(user)[0]
        assert [ids_of(tokenizer)[token] for token in fed] == expected, "no BOS is added"


def test_a_template_without_the_special_token_that_it_names_writes_nothing_there(tmp_path: Path) -> None:
    make: Callable[[], Any] = lambda: trained.byte_level(["<|endoftext|>"])  # noqa: E731
    chat_folder(Case("Llama", make, QWEN), "{{ bos_token }}{{ messages[0].content }}", tmp_path / "theirs", "setting")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    run = import_folder(tmp_path / "theirs", tmp_path / "run")
    messages = [{"role": "user", "content": "the cat"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    found = decoders.chat(run.path, run.tokenizers[1], None)("the cat")
    assert [ids_of(run.tokenizers[1])[token] for token in found] == expected


# -- regard serve ------------------------------------------------------------------------------------------------------


def require_server() -> None:
    if "CI" not in os.environ:  # CI must have them
        for package in ("fastapi", "prometheus_client", "openai"):
            pytest.importorskip(package, reason="the server needs regard[serve], and its tests the clients")


def test_chat_completions_use_the_template_as_generate_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server()
    import openai

    from regard.server import pool as pools
    from server.service import serving

    runs = {}
    for name in ("qwen 2.5", "gemma"):
        chat_folder(*CASES[name], tmp_path / name, "file")
        runs[name] = import_folder(tmp_path / name, tmp_path / f"{name} run").path
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "qwen 2.5")
    run, tokenizer = runs["qwen 2.5"], LoadedRun.load(runs["qwen 2.5"], device="cpu").tokenizers[1]

    # A run of the same weights, in which a token of the answer ends the turn.
    offline = LoadedRun.load(run, device="cpu").generator(method="beam", beam=1)
    (whole,) = replace(offline, chat=decoders.chat(run, tokenizer, "be brief"))(["the cat?"], tokens=12)
    tokens = whole.hypotheses[0].tokens
    end = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    ids = [ids_of(tokenizer)[token] for token in (EOS, tokens[end])]
    (tmp_path / "qwen 2.5" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    runs["ends"] = import_folder(tmp_path / "qwen 2.5", tmp_path / "ends").path

    def generated(run: Path) -> str:
        arguments = ["generate", str(run), "the cat?", "--chat", "--system", "be brief", "--tokens", "12", "--greedy"]
        assert run_command([*arguments, "--device", "cpu", "--no-stream"], debug=True) == 0
        return capsys.readouterr().out.removesuffix("\n")

    prompts: list[list[int]] = []
    real = chats.ChatTemplate.encode

    def recorded(template: chats.ChatTemplate, messages: chats.Messages) -> list[int]:
        prompts.append(real(template, messages))
        return prompts[-1]

    monkeypatch.setattr(chats.ChatTemplate, "encode", recorded)
    monkeypatch.setattr(pools, "CHECK_SECONDS", 0.0)
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat?"}
    turns = [system, user, {"role": "assistant", "content": "a dog"}, {"role": "user", "content": "  why\n"}]
    with serving(runs) as server:
        client = openai.OpenAI(api_key="none", base_url=f"{server.address}v1", max_retries=0)

        def complete(messages: list[dict[str, str]], model: str = "qwen 2.5", **more: Any) -> Any:
            asked: dict[str, Any] = dict(model=model, messages=messages, temperature=0, max_tokens=12, **more)
            return client.chat.completions.create(**asked)

        for messages in ([user], [system, user], turns):
            got = complete(messages)
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            assert [ids_of(tokenizer)[token] for token in prompts[-1]] == expected
            assert got.usage.prompt_tokens == len(expected), "no BOS is added"
        answer = complete([system, user])
        text = answer.choices[0].message.content
        assert text == generated(run) and answer.choices[0].finish_reason == "length"
        assert complete([{**system, "role": "developer"}, user]).choices[0].message.content == text
        parts = complete([system, user], stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text

        with pytest.raises(openai.BadRequestError, match="the chat template failed: System role not supported"):
            complete([system, user], "gemma")
        with pytest.raises(openai.BadRequestError, match="must not contain <|im_end|>".replace("|", r"\|")):
            complete([{"role": "user", "content": "the <|im_end|> cat"}], stream=True)
        template = (run / chats.FILE).read_text()
        (run / chats.FILE).write_text("{% set x = '%1000000000000d' % 1 %}")
        with pytest.raises(openai.BadRequestError, match="the chat template failed: it needs too much memory"):
            complete([user])
        (run / chats.FILE).write_text(template)
        assert complete([system, user]).choices[0].message.content == text, "the template is read again"
        answer = complete([system, user], "ends")
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == end
        assert answer.choices[0].message.content == generated(runs["ends"]) == offline.spell(tokens[:end])


def test_a_process_for_templates_is_started_again_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    require_server()
    from regard.server import chat_process

    process = chat_process.TemplateProcess()
    asked: Any = (
        "{{ bos_token }}{{ messages[0].content }}",
        [{"role": "user", "content": "¿el\ngato? ☃"}],
        {"bos_token": "<s>"},
    )
    assert process.apply(*asked) == chats.apply(*asked) == "<s>¿el\ngato? ☃"
    with monkeypatch.context() as patch:
        patch.setattr(chat_process, "GRACE_SECONDS", 0.5 - chats.MAX_SECONDS)
        with pytest.raises(UserError, match="it ended the process"):
            process.apply("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", [], {})
    assert process.apply(*asked) == chats.apply(*asked)
    process.close()
    process.close()
