"""Thinking of each family: what closes a thought, what an effort means, and how a server divides an answer.

The templates are short ones, in the words of these tests, with each family's markers and variables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import longdraft
from helpers import serving
from helpers.thinkers import OPENING_TEMPLATE, make_thinker
from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams

pytestmark = pytest.mark.full
IM = ("<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")


class Family(NamedTuple):
    """A family. special, added: tokens; answer: what follows <answer>, of which the template may have the beginning;
    closing: what closes its thought"""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    answer: tuple[str, ...]
    closing: str
    low: dict[str, Any]  # variables of the template for the effort low
    none: dict[str, Any]  # and for none
    shares: bool = False  # the effort is a budget


def turns(begin: str, end: str, answer: str, thought: str = "", head: str = "", assistant: str = "assistant") -> str:
    """A template. answer: what begins an answer; thought: how an earlier one has its thinking"""
    return (head + "{% for m in messages %}{% if m.role == 'assistant' %}" + begin.replace("ROLE", assistant)
            + ("{% if m.reasoning_content %}" + thought + "{% endif %}" if thought else "") + "{{ m.content }}" + end
            + "{% else %}" + begin.replace("ROLE", "{{ m.role }}") + "{{ m.content }}" + end
            + "{% endif %}{% endfor %}{% if add_generation_prompt %}" + begin.replace("ROLE", assistant)
            + f"<answer>{answer}{{% endif %}}")


R = "{{ m.reasoning_content }}"
OFF = "{% if enable_thinking is defined and not enable_thinking %}"
QWEN = "<|quad_start|>"
SENTENCE = ("\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly "
            "now.\n")
PIECES = ("Think", "ing")
OPENED = OPENING_TEMPLATE.replace("assistant\n<think>", "assistant\n<answer><think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
FAMILIES = {
    "Qwen3": Family(
        turns("<|im_start|>ROLE\n", "<|im_end|>\n", OFF + "<think>\n\n</think>\n\n{% endif %}",
              f"<think>\n{R}\n</think>\n\n"),
        (QWEN, *IM, "<answer>"), (*THINK, "\n\n"), ("<think>", *PIECES, "</think>", "\n\n", "Hel", "lo"),
        SENTENCE + "</think>\n\n", {"enable_thinking": True}, {"enable_thinking": False}, True),
    "Qwen3.5 and 3.6": Family(
        OPENED, (QWEN, *IM, "<answer>"), (*THINK, "\n\n"), ("<think>", "\n", *PIECES, "</think>", "\n\n", "Hel", "lo"),
        SENTENCE + "</think>\n\n", {"enable_thinking": True}, {"enable_thinking": False}, True),
    "Qwen3.8": Family(
        "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') %}"
        "{{ raise_exception('no such effort') }}{% endif %}" + OPENED, (QWEN, *IM, "<answer>"),
        (*THINK, "\n\n"), ("<think>", "\n", *PIECES, "</think>", "\n\n", "Hel", "lo"),
        SENTENCE + "</think>\n\n",
        {"enable_thinking": True, "reasoning_effort": "low"}, {"enable_thinking": False}),
    "GLM": Family(
        turns("<|ROLE|>\n", "", OFF + "<think></think>\n{% endif %}", f"<think>{R}</think>\n"),
        ("<|user|>", "<|assistant|>", "<answer>"), THINK, ("<think>", *PIECES, "</think>", "\n", "Hel", "lo"),
        "\n</think>\n", {"enable_thinking": True}, {"enable_thinking": False}, True),
    "DeepSeek R1": Family(
        turns("<｜ROLE｜>", "", "<think>\n"), ("<｜user｜>", "<｜assistant｜>", "<answer>"), (*THINK, "\n\n"),
        ("<think>", "\n", *PIECES, "</think>", "\n\n", "Hel", "lo"), "\n</think>\n\n", {}, {}, True),
    "DeepSeek V3.1": Family(
        turns("<｜ROLE｜>", "", "{% if thinking %}<think>{% else %}</think>{% endif %}"),
        ("<｜user｜>", "<｜assistant｜>", "<answer>"), THINK, ("<think>", *PIECES, "</think>", "Hel", "lo"),
        "\n</think>",
        {"thinking": True}, {"thinking": False}, True),
    "gpt-oss": Family(
        turns("<|start|>ROLE", "<|end|>", "", head="{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}\n"
              "{% endif %}").replace("{{ m.content }}", "<|message|>{{ m.content }}"),
        (*HARMONY, "<answer>"), ("analysis", "assistant", "final"),
        ("<|channel|>", "analysis", "<|message|>", *PIECES, "<|end|>"),
        "<|end|><|start|>assistant<|channel|>final<|message|>", {"reasoning_effort": "low"},
        {"reasoning_effort": "low"}),
    "Seed-OSS": Family(
        turns("<seed:bos>ROLE\n", "<seed:eos>", "", f"<seed:think>{R}</seed:think>",
              head="{% if thinking_budget is defined %}{{ thinking_budget }} tokens to think.{% endif %}"),
        ("<seed:bos>", "<seed:eos>", "<answer>"), ("<seed:think>", "</seed:think>"),
        ("<seed:think>", *PIECES, "</seed:think>", "Hel", "lo"), "\n</seed:think>", {}, {}, True),
    "Gemma 4": Family(
        turns("<start_of_turn>ROLE\n", "<end_of_turn>\n", "{% if not enable_thinking %}<|channel>thought\n<channel|>"
              "{% endif %}", f"<|channel>thought\n{R}\n<channel|>", assistant="model"),
        ("<start_of_turn>", "<end_of_turn>", "<|channel>", "<channel|>", "<answer>"), ("thought",),
        ("<|channel>", "thought", "\n", *PIECES, "<channel|>", "Hel", "lo"), "\n<channel|>",
        {"enable_thinking": True}, {"enable_thinking": False}, True),
    "SmolLM3 and EXAONE 4": Family(
        turns("[|ROLE|]", "[|endofturn|]", OFF + "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"),
        ("[|user|]", "[|assistant|]", "[|endofturn|]", "<answer>"), (*THINK, "\n\n"),
        ("<think>", "\n", *PIECES, "</think>", "\n\n", "Hel", "lo"), "\n</think>\n\n", {"enable_thinking": True},
        {"enable_thinking": False}, True),
    "Granite, tags of several tokens": Family(
        turns("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>", "", f"<think>{R}</think>",
              head="{% if thinking %}Write your thoughts between <think> and </think>.{% endif %}"),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<answer>"), (),
        ("<th", "ink>", *PIECES, "</t", "hink>", "Hel", "lo"), "\n</think>", {"thinking": True}, {"thinking": False},
        True),
    "Magistral": Family(
        turns("[INST]", "[/INST]", "", f"[THINK]{R}[/THINK]"), ("[INST]", "[/INST]", "[THINK]", "[/THINK]", "<answer>"),
        (), ("[THINK]", *PIECES, "[/THINK]", "Hel", "lo"), "\n[/THINK]", {}, {}, True),
    "newer Mistral": Family(
        turns("[INST]", "[/INST]", "", f"[THINK]{R}[/THINK]", head="{% if reasoning_effort is defined %}"
              "[MODEL_SETTINGS]{\"reasoning_effort\": \"{{ reasoning_effort }}\"}{% endif %}"),
        ("[INST]", "[/INST]", "[THINK]", "[/THINK]", "<answer>"), (), ("[THINK]", *PIECES, "[/THINK]", "Hel", "lo"),
        "\n[/THINK]", {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(name, tmp_path_factory) -> longdraft.Engine:
    about = FAMILIES[name]
    folder = make_thinker(tmp_path_factory.mktemp("family"), about.template, about.special, about.added, about.answer)
    return longdraft.load(str(folder), drafter="suffix", threads=1)


@pytest.fixture(scope="module")
def server(engine):
    with serving.running(engine) as running:
        yield running


def ask(server, **settings) -> tuple[Any, tuple[str, str]]:
    """The reply, and its thinking and content; those of a stream are the same."""
    body = dict(model="novelist", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=200,
                extra_body=settings)
    client = serving.client(server)
    reply = client.chat.completions.create(**body)
    message = reply.choices[0].message
    parts = getattr(message, "reasoning_content", None) or "", message.content
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **body)]
    streamed = ("".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
                "".join(delta.content or "" for delta in deltas))
    assert streamed == parts
    return reply, parts


def thinks(name: str) -> dict[str, Any]:
    """For families whose templates think on request only."""
    return {"reasoning_effort": "max"} if name in ("DeepSeek V3.1", "Gemma 4") else {}


def test_what_closes_a_thought_is_what_the_template_writes(name, engine):
    params = engine.loaded.with_closing(SamplingParams(thinking_budget=9))
    closing = engine.tokenizer._tokenizer.decode(list(params.thinking_close), skip_special_tokens=False)
    assert closing == FAMILIES[name].closing
    end = closing.strip().split("\n")[-1]
    markers = [token for token in FAMILIES[name].added + FAMILIES[name].special if token in end]
    assert markers or name == "Granite, tags of several tokens"
    assert all(engine.tokenizer.vocabulary()[token] in params.thinking_close for token in markers)


@pytest.mark.parametrize("effort", ["low", "none"])
def test_an_effort_is_the_templates_own_setting_or_a_budget(name, engine, effort):
    about = FAMILIES[name]
    found = engine.effort(SamplingParams(reasoning_effort=effort))
    assert found.variables == getattr(about, effort)
    budget = found.applied(SamplingParams(reasoning_effort=effort, max_new_tokens=100)).thinking_budget
    assert budget == ((20 if effort == "low" else -1 if about.none else 0) if about.shares else -1)


def test_thinking_and_answer_are_apart(name, server):
    reply, parts = ask(server, **thinks(name))
    assert parts == ("Thinking", "" if name == "gpt-oss" else "Hello")
    details = reply.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens <= reply.usage.completion_tokens


def test_a_thought_that_is_closed_is_apart_from_its_answer(name, server):
    opened = len(FAMILIES[name].answer) - FAMILIES[name].answer.index("Think")
    budget = 1 + (FAMILIES[name].answer[-opened - 1] == "\n")  # behind the opening marker
    reply, (thinking, content) = ask(server, thinking_budget=budget, **thinks(name))
    assert thinking.split("\n")[0] == "Think" and "Hello" not in thinking
    assert content == ("Thinking" if name == "gpt-oss" else "Hello")  # its vocabulary has one <|message|>
    assert reply.model_extra["longdraft"]["stats"]["thinking"]["closed_by"] == "budget"


def test_no_effort_is_no_thinking(name, server):
    """Families that are asked in words may think all the same; thinking and answer are apart then, too."""
    is_asked = name in ("gpt-oss", "newer Mistral", "Granite, tags of several tokens")
    _, parts = ask(server, reasoning_effort="none")
    assert parts == ("Thinking" if is_asked else "", "" if name == "gpt-oss" else "Hello")


def test_the_thinking_can_be_written_and_not_sent(name, server):
    _, parts = ask(server, reasoning={"exclude": True} | ({"effort": "max"} if thinks(name) else {}))
    assert parts == ("", "" if name == "gpt-oss" else "Hello")


def test_a_message_is_continued_inside_its_thought(name, engine, server):
    """Where the template shows the thought of the last message once."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "reasoning_content": "Think"}]
    if "reasoning_content" not in FAMILIES[name].template:
        with pytest.raises(UsageError, match="does not show the last message once"):
            engine.chat(messages, continue_final_message=True)
        return
    reply = serving.client(server).chat.completions.create(
        model="novelist", messages=messages, temperature=0, max_tokens=40, extra_body={"continue_final_message": True})
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("ing", "Hello")


def test_thoughts_of_earlier_turns_do_not_count(name, engine):
    """Nor does a marker in a question."""
    form, opening = engine.loaded.answer_format, "".join(FAMILIES[name].answer).partition("Think")[0].rstrip("\n")
    text = {"gpt-oss": "<|start|>assistant<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final"
                       "<|message|>Yes<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant"}.get(name)
    if text is None:
        turn = [{"role": "user", "content": f"What is {opening}?"}]
        text = engine.tokenizer.chat(turn, add_generation_prompt=False) + FAMILIES[name].special[0]
    rules = engine.loaded.thought_rules(SamplingParams(), engine.tokenizer.encode(text, add_special_tokens=False))
    assert form is not None and rules.begun is None
    if name == "gpt-oss":
        begun = text + "<|channel|>analysis<|message|>Think"
        rules = engine.loaded.thought_rules(SamplingParams(), engine.tokenizer.encode(begun, add_special_tokens=False))
        assert rules.begun == tuple(engine.tokenizer.encode("Think", add_special_tokens=False))
