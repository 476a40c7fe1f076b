"""Real client packages against a running server: each calls a tool, and sends the result back."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from helpers import serving

pytest.importorskip("llguidance")

CITY = {"type": "object", "required": ["city", "unit"], "properties": {
    "city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}}}
ABOUT = {"name": "get_weather", "description": "Weather of a city."}
TOOL = {"type": "function", "function": ABOUT | {"parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = "What is the weather in Rome?"
COMMON: dict[str, Any] = {"model": "novelist", "max_tokens": 120, "temperature": 0}

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed")


def test_five_turns_of_openais_client(server):
    """Each turn reads what is new, and the rows that the prefix tree does not share: 128 at most on the CPU."""
    chats, messages = serving.client(server).chat.completions, [{"role": "user", "content": QUESTION}]
    before = 0
    for turn in range(5):
        reply = chats.create(messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
                             seed=turn, **COMMON)
        message, usage = reply.choices[0].message, reply.usage
        call, = message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), CITY)
        assert usage.prompt_tokens_details.cached_tokens >= before - 129
        before = usage.prompt_tokens + usage.completion_tokens
        messages += [message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.id, "content": f'{{"degrees": {turn}}}'}]


def test_five_turns_of_anthropics_client(server):
    anthropic = needs("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(5):
        with client.messages.stream(
                model="novelist", max_tokens=120, messages=messages, tools=[ABOUT | {"input_schema": CITY}],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                extra_body={"seed": turn, "temperature": 0}) as stream:
            reply = stream.get_final_message()
        call, = reply.content
        jsonschema.validate(call.input, CITY)
        assert reply.stop_reason == "tool_use" and call.type == "tool_use"
        messages += [{"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12"}]}]
    assert client.messages.count_tokens(model="novelist", messages=messages).input_tokens > 0


def test_litellm_calls_by_both_doors(server):
    litellm = needs("litellm")
    for name, base in (("openai/novelist", server.url + "/v1"), ("anthropic/novelist", server.url)):
        reply = litellm.completion(model=name, api_base=base, api_key="none", tools=[TOOL], tool_choice=NAMED,
                                   messages=[{"role": "user", "content": QUESTION}], max_tokens=150)
        call = reply.choices[0].message.tool_calls[0]
        jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_litellm_writes_through_ollamas_door(server):
    litellm = needs("litellm")
    for name in ("ollama/novelist", "ollama_chat/novelist"):
        reply = litellm.completion(model=name, api_base=server.url, messages=[{"role": "user", "content": QUESTION}],
                                   max_tokens=20, temperature=0)
        assert reply.choices[0].message.content and reply.usage.completion_tokens == 20


def test_langchain_calls_through_openais_door(server):
    module = needs("langchain_openai")
    model = module.ChatOpenAI(base_url=server.url + "/v1", api_key="none", **COMMON)
    reply = model.bind_tools([TOOL], tool_choice="get_weather").invoke(QUESTION)
    jsonschema.validate(reply.tool_calls[0]["args"], CITY)
    pieces = list(model.bind_tools([TOOL], tool_choice="get_weather").stream(QUESTION))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"] == reply.tool_calls[0]["args"]


def test_langchain_calls_through_anthropics_door(server):
    module = needs("langchain_anthropic")
    model = module.ChatAnthropic(base_url=server.url, api_key="none", model="novelist", max_tokens=150)
    reply = model.bind_tools([ABOUT | {"input_schema": CITY}], tool_choice="get_weather").invoke(QUESTION)
    jsonschema.validate(reply.tool_calls[0]["args"], CITY)


def test_pydantic_ai_reads_a_typed_output(server):
    needs("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        unit: bool

    model = OpenAIChatModel("novelist", provider=OpenAIProvider(base_url=server.url + "/v1", api_key="none"))
    agent = Agent(model, output_type=Weather, model_settings={"max_tokens": 150, "temperature": 0.0})
    result = agent.run_sync(QUESTION)
    assert isinstance(result.output, Weather)
