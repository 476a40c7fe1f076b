"""OpenAI's responses: the text is that of the chat, in items and events that OpenAI's client reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers import serving

pytest.importorskip("llguidance")

CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "maxLength": 12}}}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": CITY, "strict": True}
SPACE = {"type": "namespace", "name": "mcp", "tools": [TOOL]}
BODY = {"model": "novelist", "max_output_tokens": 60, "input": "Hi", "temperature": 0, "seed": 3,
        "longdraft": {"min_p": 0.1}, "store": False}

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
post = pytest.fixture(scope="module")(serving.poster)


def respond(post, **changes: Any) -> dict[str, Any]:
    reply = post("/v1/responses", BODY | changes)
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(reply: dict[str, Any]) -> str:
    return "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])


def test_the_text_is_that_of_the_chat(post):
    chat = post("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."},
                                                      {"role": "user", "content": "Hi"}],
                                         "max_tokens": 60, "temperature": 0, "min_p": 0.1}).json()
    reply = respond(post, instructions="Be brief.")
    assert text_of(reply) == chat["choices"][0]["message"]["content"]
    assert reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}


def test_events_of_a_call_come_in_their_order_and_end_with_the_whole_response(server, post):
    changes = {"tools": [SPACE, {"type": "web_search"}], "tool_choice": "required", "max_output_tokens": 150,
               "parallel_tool_calls": False, "stream": True}
    contents = [json.loads(line.removeprefix("data: ")) for line in post(
        "/v1/responses", BODY | changes).text.splitlines() if line.startswith("data: ")]
    assert [each["sequence_number"] for each in contents] == list(range(len(contents)))
    kinds = [each["type"] for each in contents if not each["type"].endswith(".delta")]
    assert kinds == ["response.created", "response.in_progress", "response.output_item.added",
                     "response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    item, = contents[-1]["response"]["output"]
    assert item["name"] == "mcp__get_weather" and json.loads(item["arguments"]).keys() == {"city"}
    assert "".join(each["delta"] for each in contents if each["type"].endswith(".delta")) == item["arguments"]
    whole = respond(post, **(changes | {"stream": False}))
    assert whole["output"][0]["arguments"] == item["arguments"] and whole["output"][0]["call_id"] == item["call_id"]


@pytest.mark.parametrize("changes, status", [
    ({}, "incomplete"), ({"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 32}, "incomplete"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}}}, "completed")])
def test_the_item_that_the_limit_cuts_is_incomplete(post, changes, status):
    whole = respond(post, **changes)
    last = json.loads(post("/v1/responses", BODY | changes | {"stream": True}).text.split("data: ")[-1])["response"]
    for reply in (whole, last):
        assert [item["status"] for item in reply["output"]] == [reply["status"]] == [status]


def test_openais_client_reads_the_stream(server, post):
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}}
    with serving.client(server).responses.stream(model="novelist", input="Hi", temperature=0, text=form,
                                                 extra_body={"longdraft": {"min_p": 0.1}}) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == text_of(respond(post, text=form))


def test_items_become_the_messages_of_a_chat(post):
    items = [{"role": "developer", "content": "Be brief."},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
             {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
             {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rom"}'},
             {"type": "function_call_output", "call_id": "c1", "output": "12"}]
    chat = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "12"}]
    same = post("/v1/chat/completions", {"messages": chat, "max_tokens": 20, "temperature": 0, "min_p": 0.1}).json()
    reply = respond(post, input=items, max_output_tokens=20)
    assert text_of(reply) == same["choices"][0]["message"]["content"]
    count = post("/v1/responses/input_tokens", {"input": items}).json()
    assert count == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}


def test_a_schema_is_the_form_of_the_text(post):
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}}
    assert json.loads(text_of(respond(post, text=form))) in ("yes", "no")


def test_settings_that_ask_for_nothing_are_accepted(post):
    reply = respond(post, tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=True,
                    text={"verbosity": "medium"}, top_logprobs=0, include=["reasoning.encrypted_content"],
                    max_tool_calls=3, prompt_cache_options={"mode": "implicit"})
    assert text_of(reply) == text_of(respond(post))


@pytest.mark.parametrize("changes, param", [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "x"}, "conversation"),
    ({"input": [{"type": "image_generation_call"}]}, "input"), ({"input": [1]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"), ({"text": {"verbosity": "low"}}, "text"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"include": 5}, "include"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"input": []}, "input"), ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format"),
    ({"tools": "x"}, "tools"), ({"mumble": 1}, "mumble")])
def test_what_cannot_be_used_is_refused_by_name(post, changes, param):
    reply = post("/v1/responses", BODY | changes)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
