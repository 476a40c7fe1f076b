"""Anthropic's messages: the text is that of the chat, in blocks and events that Anthropic's client reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from helpers import serving
from longdraft.server.doors.blocks import carried, carry

pytest.importorskip("llguidance")

CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "maxLength": 12}}}
TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": CITY}
BODY = {"model": "novelist", "max_tokens": 60, "messages": [{"role": "user", "content": "Hi"}],
        "longdraft": {"min_p": 0.1}, "temperature": 0, "seed": 3}

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
post = pytest.fixture(scope="module")(serving.poster)


def message(post, **changes: Any) -> dict[str, Any]:
    reply = post("/v1/messages?beta=true", BODY | changes)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in reply.text.split("\n\n") if block.startswith("event: ")]
    contents = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert all(name == f"event: {content['type']}" for (name, _), content in zip(blocks, contents, strict=True))
    return contents


def test_the_text_is_that_of_the_chat(post):
    chat = post("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, *BODY["messages"]],
                                         "max_tokens": 60, "temperature": 0, "min_p": 0.1}).json()
    reply = message(post, system=[{"type": "text", "text": "x-anthropic-billing-header: 1\nBe brief.",
                                   "cache_control": {"type": "ephemeral"}}])
    assert reply["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    usage = reply["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert reply["stop_reason"] == "max_tokens" and reply["role"] == "assistant"


def test_events_of_a_call_come_in_their_order_and_are_the_whole_message(post):
    changes = {"tools": [TOOL, {"type": "web_search_20260101", "name": "web_search"}], "max_tokens": 150,
               "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole, contents = message(post, **changes), events(post("/v1/messages", BODY | changes | {"stream": True}))
    assert [each["type"] for each in contents if each["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    block, = whole["content"]
    start = next(each for each in contents if each["type"] == "content_block_start")
    assert start == {"type": "content_block_start", "index": 0, "content_block": block | {"input": {}}}
    written = "".join(each["delta"]["partial_json"] for each in contents if each["type"] == "content_block_delta")
    assert json.loads(written) == block["input"] and block["name"] == "get_weather"
    assert whole["stop_reason"] == "tool_use" == contents[-2]["delta"]["stop_reason"]
    assert contents[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_results_of_calls_and_thoughts_are_messages_of_the_template(post):
    turns = [*BODY["messages"],
             {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": carry("Hm")},
                                               {"type": "tool_use", "id": "t1", "name": "get_weather",
                                                "input": {"city": "Rom"}}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": True,
                                           "content": [{"type": "text", "text": "none"}]},
                                          {"type": "text", "text": "Go on."}]}]
    chat = [{"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}]},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: none"}, {"role": "user", "content": "Go on."}]
    same = post("/v1/chat/completions", {"messages": chat, "max_tokens": 20, "temperature": 0, "min_p": 0.1})
    reply = message(post, messages=turns, max_tokens=20)
    assert reply["content"][0]["text"] == same.json()["choices"][0]["message"]["content"]


def test_a_stop_text_is_named(post):
    text = message(post)["content"][0]["text"]
    stop = text[10:14]
    reply = message(post, stop_sequences=["zzz", stop])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("changes, reason, sequence", [
    ({"stop_sequences": ['"city"']}, "stop_sequence", '"city"'), ({"max_tokens": 32}, "max_tokens", None)])
def test_a_call_that_is_cut_is_left_out(post, changes, reason, sequence):
    changes = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 150} | changes
    whole, contents = message(post, **changes), events(post("/v1/messages", BODY | changes | {"stream": True}))
    begun = next(each["content_block"] for each in contents if each["type"] == "content_block_start")
    assert whole["content"] == [] and begun["type"] == "tool_use"
    ends = [(each["stop_reason"], each["stop_sequence"]) for each in (whole, contents[-2]["delta"])]
    assert ends == [(reason, sequence)] * 2


def test_more_tokens_than_the_context_has_room_for_are_fewer(post, engine):
    reply = post("/v1/messages", BODY | {"max_tokens": 10**6, "stop_sequences": ["e"]})
    assert reply.status_code == 200, reply.text


def test_the_count_of_tokens_is_that_of_the_message(post):
    count = post("/v1/messages/count_tokens", {"messages": BODY["messages"], "tools": [TOOL]}).json()
    usage = message(post, tools=[TOOL], max_tokens=1)["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_last_message_of_the_assistant_is_continued(post):
    whole = message(post)
    begun = whole["content"][0]["text"][:20].rstrip()
    turns = [*BODY["messages"], {"role": "assistant", "content": [{"type": "text", "text": begun}]}]
    chat = post("/v1/chat/completions", {"messages": [*BODY["messages"], {"role": "assistant", "content": begun}],
                                         "continue_final_message": True, "max_tokens": 20, "temperature": 0,
                                         "min_p": 0.1}).json()
    reply = message(post, messages=turns, max_tokens=20)
    assert reply["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    count = post("/v1/messages/count_tokens", {"messages": turns}).json()["input_tokens"]
    assert count == chat["usage"]["prompt_tokens"]
    empty = [*BODY["messages"], {"role": "assistant", "content": ""}]
    assert message(post, messages=empty)["content"] == whole["content"]
    turns[-1] = {"role": "assistant", "content": begun + " \n"}
    refusal = post("/v1/messages", BODY | {"messages": turns})
    assert refusal.status_code == 400 and "white space at its end" in refusal.json()["error"]["message"]


@pytest.mark.parametrize("changes, words", [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "king", "content": "x"}]}, "user, assistant or system"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "letters, digits"),
    ({"tool_choice": {"type": "x"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "any"}, "tools": [{"type": "web_search_20260101", "name": "web_search"}]}, "tool_choice"),
    ({"thinking": {"type": "x"}}, "thinking.type"),
    ({"stop_sequences": [""]}, "stop_sequences is ''"),
    ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens is -5"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format is '3'"),
    ({"max_tokens": 0}, "max_tokens"), ({"mumble": 1}, "mumble")])
def test_what_cannot_be_used_is_refused_in_anthropics_form(post, changes, words):
    reply = post("/v1/messages", BODY | changes)
    assert reply.status_code == 400 and reply.json()["type"] == "error", reply.text
    assert reply.json()["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert reply.json()["error"]["type"] == "invalid_request_error" and words in reply.json()["error"]["message"]


def test_anthropics_clients_learn_that_they_have_to_send_all_messages(post):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        reply = post("/v1/messages", BODY | {"thread": thread, "stream": True})
        details = reply.json()["error"]["details"]
        assert reply.status_code == 400 and details["error_code"] == "thread_unsupported_request"


def test_a_carried_thought_comes_back_and_other_signatures_are_nothing():
    assert carried(carry("é\n" * 9)) == "é\n" * 9
    assert carried("ld1.!!") == carried("EqQB") == carried(None) == carried("ld1.eJw=") == ""


def test_anthropics_key_header_is_a_key(engine):
    with serving.running(engine, api_keys=("one",)) as found:
        statuses = [httpx.post(found.url + "/v1/messages", json=BODY | {"max_tokens": 1}, headers=headers, timeout=60)
                    for headers in ({"x-api-key": "one"}, {"Authorization": "Bearer one"}, {"x-api-key": "two"}, {})]
    assert [each.status_code for each in statuses] == [200, 200, 401, 401]
    assert statuses[2].json()["error"]["type"] == "authentication_error"
