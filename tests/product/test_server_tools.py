"""Tools in chats through the server: calls whole and as deltas, choices, histories, batch rows, and the same text by
every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

import longdraft
from helpers import serving
from longdraft.batch.requests import parse
from longdraft.batch.worker import BatchJob, BatchWorker

pytest.importorskip("llguidance")

CITY = {"type": "object", "required": ["city", "unit"], "properties": {
    "city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "Hi"}]
BODY = {"messages": HELLO, "tools": [WEATHER, NOW], "max_tokens": 150, "seed": 3, "parallel_tool_calls": False}

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
post = pytest.fixture(scope="module")(serving.poster)


def chat(post, **changes: Any) -> httpx.Response:
    return post("/v1/chat/completions", BODY | changes)


def message(post, **changes: Any) -> dict[str, Any]:
    reply = chat(post, **changes)
    assert reply.status_code == 200, reply.text
    choice, = reply.json()["choices"]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}


@pytest.fixture(scope="module")
def required(post) -> dict[str, Any]:
    return message(post, tool_choice="required")


def test_a_required_call_is_valid_and_ends_the_answer(required):
    call, = required["tool_calls"]
    assert required["content"] is None and required["finish_reason"] == "tool_calls"
    schema = {"get_weather": CITY, "now": {"maxProperties": 0}}[call["function"]["name"]]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_keywords_of_schemas_that_are_left_out_are_named_in_the_reply_and_in_the_log(post, caplog):
    odd = {"type": "function", "function": {"name": "f", "parameters": CITY | {"not": {"required": ["x"]}}}}
    with caplog.at_level("WARNING"):
        replies = [chat(post, tools=[tool], max_tokens=4).json()["longdraft"] for tool in (odd, WEATHER, odd)]
    named = ['tools: Unimplemented keys: ["not"]']
    assert [reply.get("warnings") for reply in replies] == [named, None, named]
    assert [record.getMessage() for record in caplog.records].count("left_out") == 1  # when the grammar is made


def test_the_deltas_of_a_stream_are_the_whole_call(post, required):
    chunks = serving.events(chat(post, tool_choice="required", stream=True,
                                 stream_options={"include_usage": True}).text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first, *rest = calls
    assert first == {"index": 0, **required["tool_calls"][0], "function": {
        "name": required["tool_calls"][0]["function"]["name"], "arguments": ""}}
    assert all(call.keys() == {"index", "function"} and call["index"] == 0 for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest) == required["tool_calls"][0]["function"]["arguments"]
    assert deltas[-1] == {} and chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" and chunks[-1]["usage"]


def test_openais_client_reads_calls_whole_and_streamed(server):
    chats, body = serving.client(server).chat.completions, BODY | {"model": "novelist", "tool_choice": "required"}
    call, = chats.create(**body).choices[0].message.tool_calls
    with chats.stream(**body) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (final.id, final.function.name, final.function.arguments) == (
        call.id, call.function.name, call.function.arguments)


def test_a_named_function_is_called_and_none_calls_nothing(post):
    named = message(post, tool_choice={"type": "function", "function": {"name": "now"}})
    assert [call["function"] for call in named["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    for choice in ("none", "auto"):
        assert message(post, tool_choice=choice, max_tokens=20, temperature=0).get("tool_calls", []) is not None
    assert "tool_calls" not in message(post, tool_choice="none", max_tokens=20)


def test_old_functions_have_old_replies(post):
    reply = message(post, tools=None, parallel_tool_calls=None, functions=[NOW["function"]],
                    function_call={"name": "now"})
    assert reply["function_call"] == {"name": "now", "arguments": "{}"} and reply["finish_reason"] == "function_call"
    chunks = serving.events(chat(post, tools=None, parallel_tool_calls=None, functions=[NOW["function"]],
                                 function_call={"name": "now"}, stream=True).text)
    calls = [chunk["choices"][0]["delta"]["function_call"] for chunk in chunks
             if "function_call" in chunk["choices"][0]["delta"]]
    assert calls[0] == {"name": "now", "arguments": ""} and "".join(each["arguments"] for each in calls) == "{}"


def test_an_answer_that_is_cut_within_a_call_says_length(post):
    cut = message(post, tool_choice="required", max_tokens=30)
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ['"unit"', "\n", "{", "}"])
def test_a_call_that_a_stop_text_cuts_is_none(post, stop):
    changes = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "stop": [stop]}
    cut = message(post, **changes)
    last = serving.events(chat(post, **changes, stream=True).text)[-1]["choices"][0]
    assert cut["finish_reason"] == last["finish_reason"] == "stop" and not cut["content"]


def test_a_call_that_is_complete_before_a_stop_text_is_one(post, required):
    whole = message(post, tool_choice="required", stop=["</tool_call>"])
    assert whole["tool_calls"] == required["tool_calls"] and whole["finish_reason"] == "tool_calls"


def test_the_next_turn_reuses_the_rows_of_the_call(engine, post, required):
    """The bundled model has no tool tokens: its form is the generic one."""
    turns = [*HELLO, {name: required[name] for name in ("role", "content", "tool_calls")},
             {"role": "tool", "tool_call_id": required["tool_calls"][0]["id"], "content": "12 degrees"}]
    first = chat(post, tool_choice="required").json()["usage"]
    second = chat(post, messages=turns, tool_choice="auto", max_tokens=5).json()["usage"]
    tokens = first["prompt_tokens"] + first["completion_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= tokens - 160, (first, second)


def test_the_next_turn_may_have_a_call_that_was_cut(post):
    """OpenAI's arguments are a text, which need not be JSON."""
    cut = message(post, tool_choice="required", stop=['"unit"'])
    call, = cut["tool_calls"]
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}]
    assert chat(post, messages=turns, tool_choice="auto", max_tokens=5).status_code == 200


def test_without_a_grammar_for_all_calls_it_is_on_where_one_is_required_or_strict(engine):
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    with serving.running(engine, tool_grammar="strict") as found:
        own = serving.poster(found)
        for changes, is_on in (({}, False), ({"tool_choice": "required"}, True), ({"tools": [strict, NOW]}, True),
                               ({"tool_choice": "none"}, False)):
            reply = chat(own, **changes, max_tokens=20).json()
            assert bool(reply["longdraft"]["stats"]["sampling"]["structured_outputs"]) == is_on, changes
        assert reply["choices"][0]["message"]["content"]


def test_the_statistics_say_where_a_prompt_parts_from_earlier_ones(post):
    turns = [{"role": role, "content": f"{role} says something that is long enough, as number {number}"}
             for number, role in enumerate(("system", "user", "assistant", "user"))]

    def prefix(messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 1, "cache_salt": "parts"}
        reply = post("/v1/chat/completions", body).json()
        return reply["longdraft"]["stats"]["prefix"] | {"read": reply["usage"]["prompt_tokens"]}

    assert prefix(turns)["matched"] == 0
    again = prefix(turns)
    assert again["parted_at"] is None and again["matched"] == again["read"] - 1
    for changed in range(4):
        edited = [{**turn, "content": turn["content"] + "!"} if index == changed else turn
                  for index, turn in enumerate(turns)]
        parted = prefix(edited)
        assert parted["message"] == changed and parted["matched"] == parted["parted_at"] < again["matched"]


@pytest.mark.parametrize("changes, param", [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"), ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]}, "messages"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"guided_regex": "a"}, "guided_regex")])
def test_what_cannot_be_used_is_refused_by_name(post, changes, param):
    reply = chat(post, **changes)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_response_format_is_the_form_of_an_answer_without_a_call(post):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    reply = message(post, response_format=schema, tool_choice="auto")
    assert reply.get("tool_calls") or json.loads(reply["content"]) in ("yes", "no")


def test_several_texts_have_calls_of_their_own(post):
    choices = chat(post, tool_choice="required", n=2, temperature=1).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_every_drafter_writes_the_call_of_plain_decoding_in_fewer_steps(post, required):
    """At least 1.5 tokens for each forward: most of a call is certain."""
    for drafter in ("plain", "ngram", "suffix", "auto"):
        reply = chat(post, tool_choice="required", longdraft={"drafter": drafter}).json()
        assert reply["choices"][0]["message"]["tool_calls"] == required["tool_calls"]
        stats = reply["longdraft"]["stats"]
        assert drafter == "plain" or stats["new_tokens"] >= 1.5 * stats["steps"]


def test_a_batch_row_has_the_call_of_the_server(engine, required, tmp_path: Path):
    job = BatchJob(tmp_path / "work", {"model": str(engine.loaded.files.folder), "threads": 1}, {}, 0, "novelist",
                   fsync="never")
    row = {"custom_id": "a", "url": "/v1/chat/completions", "body": BODY | {"tool_choice": "required"}}
    requests = [parse(row, 1, "novelist")]
    with BatchWorker(job) as worker:
        record = next(progress.record for progress in worker.write(lambda wait: requests.pop() if requests else None)
                      if progress and progress.record)
    choice, = record["response"]["body"]["choices"]
    assert choice["message"]["tool_calls"] == required["tool_calls"] and choice["finish_reason"] == "tool_calls"


def test_a_batch_row_whose_tools_cannot_be_used_is_an_error_record():
    row = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": HELLO, "tools": "x"}}
    assert "tools is 'x'" in parse(row, 1, "novelist").problem


def test_tools_are_refused_in_completions(post):
    reply = post("/v1/completions", {"prompt": "It was", "tools": [NOW]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"


def test_a_text_with_calls_is_resumed_from_its_journal(engine: longdraft.Engine, tmp_path: Path):
    structure = ("tools", 'start: "<a>" /[0-9]{40}/')
    params = engine.params(max_new_tokens=60, seed=1, structured_outputs=structure)
    whole = engine.generate("It was", params)
    list(whole)
    cut = engine.generate("It was", params, journal=tmp_path)
    for _ in range(3):
        next(cut)
    cut.close()
    resumed = engine.resume(tmp_path)
    list(resumed)
    assert resumed.tokens.tolist() == whole.tokens.tolist()
