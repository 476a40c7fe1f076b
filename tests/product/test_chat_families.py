"""Chats with Gemma 2, 3 and 4 and gpt-oss: templates of their formats, through the server and the command line."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import longdraft
from helpers import serving
from helpers.checkpoints import write_chain
from helpers.families import make_family
from longdraft.__main__ import run
from longdraft.server.journals import prompt_excerpt

pytestmark = pytest.mark.full

# Each format: the special tokens, those that end an answer, the template, and what it makes of CHAT.
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]
_TURNS = """{{ bos_token }}{% set ns = namespace(intro='') %}
{%- if messages[0]['role'] == 'system' %}{% set ns.intro = messages[0]['content'] + '\n\n' %}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}
{{- (ns.intro if loop.first else '') + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
FORMATS = {
    "gemma2": SimpleNamespace(
        family="gemma2", special=["<start_of_turn>", "<end_of_turn>"], ends=["<end_of_turn>"], bos="<s>",
        template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + _TURNS,
        chat=None, short="<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
    "gemma3": SimpleNamespace(
        family="gemma3", special=["<start_of_turn>", "<end_of_turn>"], ends=["<end_of_turn>"], bos="<s>",
        template=_TURNS, short="<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        chat="<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
             "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"),
    "gemma4": SimpleNamespace(
        family="gemma4", special=["<|turn>", "<turn|>", "<|think|>"], ends=["<turn|>"], bos="<s>",
        template="""{{ bos_token }}{% if enable_thinking %}{{ '<|turn>system\n<|think|><turn|>\n' }}{% endif %}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '<turn|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}""",
        short="<s><|turn>user\nHi<turn|>\n<|turn>model\n",
        chat="<s><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
             "<|turn>user\nWhy?<turn|>\n<|turn>model\n"),
    "gpt_oss": SimpleNamespace(
        family="gpt_oss", special=["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
        ends=["<|return|>", "<|call|>"], bos="",
        template="""{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages %}
{%- if m['role'] == 'system' %}{{ '<|start|>developer<|message|># Instructions\n\n' + m['content'] + '<|end|>' }}
{%- elif m['role'] == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}
{%- else %}{{ '<|start|>user<|message|>' + m['content'] + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
        short="<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant",
        chat="<|start|>system<|message|>Reasoning: medium<|end|><|start|>developer<|message|># Instructions\n\n"
             "Be brief.<|end|><|start|>user<|message|> Hi\n<|end|><|start|>assistant<|channel|>final<|message|>Hello"
             "<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant"),
}
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=FORMATS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A format, with the `folder` of a random model of the family that has its tokens and its template."""
    form = FORMATS[request.param]
    form.folder = tmp_path_factory.mktemp("chat")
    make_family(form.folder, form.family)
    tokenizer = HFTokenizer.from_file(str(form.folder / "tokenizer.json"))
    tokenizer.add_special_tokens(form.special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(form.folder / "tokenizer.json"))
    form.end_ids = [tokenizer.token_to_id(token) for token in form.ends]
    write(form.folder / "tokenizer_config.json", chat_template=form.template, bos_token="<s>", eos_token="</s>")
    write(form.folder / "generation_config.json", eos_token_id=[1, *form.end_ids])
    return form


def write(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def engine(form) -> longdraft.Engine:
    return serving.load(form.folder, drafter="auto")


@pytest.fixture(scope="module")
def server(engine):
    with serving.running(engine) as found:
        yield found


def test_prompts_are_those_of_transformers_and_of_the_format(form, engine):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(form.folder / "tokenizer.json"), bos_token="<s>",
                                     eos_token="</s>", chat_template=form.template)
    for messages, wanted in ((HELLO, form.short), (CHAT, form.chat)):
        if wanted is not None:
            assert engine.tokenizer.chat(messages) == wanted
            assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == wanted
    ids, names = engine.chat(HELLO), {token: text for text, token in engine.tokenizer.vocabulary().items()}
    assert engine.encode("Hi")[0] == 0 and ids.count(0) == bool(form.bos)  # no second one before that of the template
    assert [names[token] for token in ids if names[token] in form.special] == [
        token for token in re.findall(r"<\|?\w+\|?>", form.short) if token in form.special]


def ask(server, messages, **settings):
    return serving.client(server).chat.completions.create(
        model="novelist", messages=messages, max_tokens=12, temperature=0, **settings)


def test_the_server_answers_the_prompt_of_the_template(form, engine, server):
    for messages, prompt in ((HELLO, form.short), (CHAT, form.chat)):
        if prompt is None:
            with pytest.raises(openai.BadRequestError, match="no system role"):
                ask(server, messages)
            continue
        ids = engine.tokenizer.encode(prompt, add_special_tokens=False)
        reply = ask(server, messages)
        assert reply.usage.prompt_tokens == len(ids)
        assert reply.choices[0].message.role == "assistant"
        assert reply.choices[0].message.content == serving.written(
            engine, ids, max_new_tokens=12, temperature=0, min_p=0)


def test_every_end_of_the_format_ends_the_answer_without_a_trace_of_it(form, server):
    for end in form.end_ids:
        reply = ask(server, HELLO, logit_bias={str(end): 100})
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("stop", "")
    if form.family == "gpt_oss":  # after the end of a message the answer goes on
        other = form.end_ids[0] - 1
        reply = ask(server, HELLO, logit_bias={str(other): 100})
        assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 12)


def test_the_command_writes_the_servers_answer(form, server, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    options = ["--model", str(form.folder), "--drafter", "plain", "--max-new-tokens", "12", "--temperature", "0"]
    assert run(["chat", *options, *(["--system", "Be brief."] if form.chat else [])]) == 0
    wanted = ask(server, [*CHAT[: 1 if form.chat else 0], *HELLO]).choices[0].message.content
    assert capfd.readouterr().out.rstrip("\n") == wanted.rstrip("\n")


def test_the_title_of_a_chat_is_its_last_message(engine):
    turns = [*HELLO, *CHAT[2:3], {"role": "user", "content": "Tell me\nmore, as a user?"}]
    titles = [prompt_excerpt(engine.tokenizer, engine.chat(messages)) for messages in (HELLO, turns)]
    assert titles == ["Hi", "Tell me more, as a user?"]
    assert prompt_excerpt(engine.tokenizer, engine.encode("It was user\nmodel\n")) == "It was user model"
    template, shown = engine.tokenizer.chat_template, partial(engine.tokenizer.decode, shows_special=True)
    assert [template.only_message(shown(engine.chat(messages))) for messages in (HELLO, turns)] == ["Hi", None]


def test_variables_of_the_template_are_options(form, engine, server):
    given = {"gemma4": {"enable_thinking": True}, "gpt_oss": {"reasoning_effort": "high"}}.get(form.family)
    if given is None:
        assert engine.tokenizer.chat_template.options == []
        return
    prompt = engine.tokenizer.chat(HELLO, **given)
    assert ("<|think|>" in prompt) or ("Reasoning: high" in prompt)
    reply = ask(server, HELLO, extra_body={"chat_template_kwargs": given})
    assert reply.usage.prompt_tokens == len(engine.tokenizer.encode(prompt, add_special_tokens=False))


THOUGHT = ["Think", "ing"]
ANSWER = ["<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Hel", "lo", "<|return|>"]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes one chain of tokens: after `Well` a thought, then an answer in the channel `final`."""
    folder, form = tmp_path_factory.mktemp("thinking"), FORMATS["gpt_oss"]
    model = make_family(folder, "gpt_oss")
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(form.special)
    tokenizer.add_tokens(["Well", *[token for token in THOUGHT + ANSWER if token not in form.special]])
    tokenizer.save(str(folder / "tokenizer.json"))
    chain = [tokenizer.token_to_id(token) for token in ["Well", *THOUGHT, *ANSWER]]
    write_chain(model, chain)
    model.save_pretrained(folder)
    start = "<|start|>assistant"
    template = form.template.replace(f"'{start}' }}", f"'{start}<|channel|>analysis<|message|>Well' }}")
    write(folder / "tokenizer_config.json", chat_template=template, bos_token="<s>", eos_token="</s>")
    write(folder / "generation_config.json", eos_token_id=[1, chain[-1]])
    return folder


@pytest.mark.parametrize("drafter", ["plain", "suffix"])
def test_thinking_and_answer_of_gpt_oss_are_apart(thinking, drafter):
    with serving.running(serving.load(thinking, drafter=drafter)) as server:
        message = ask(server, HELLO).choices[0].message
        assert (message.reasoning_content, message.content) == ("Thinking", "Hello")
        parts = [chunk.choices[0].delta for chunk in ask(server, HELLO, stream=True)]
        assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "Thinking"
        assert "".join(part.content or "" for part in parts) == "Hello"
