"""Ollama's API: what its clients read first, and texts that are those of chats and completions."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest

from helpers import serving
from longdraft.request.events import Event
from longdraft.server.doors.ollama import OllamaReply
from longdraft.server.jobs import GenerationJob
from longdraft.server.replies import ResponseOptions
from longdraft.text.tools.reader import Part

pytest.importorskip("llguidance")

CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "maxLength": 12}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}
HELLO = [{"role": "user", "content": "Hi"}]
OPTIONS = {"temperature": 0, "seed": 3, "num_predict": 40, "num_ctx": 4096, "min_p": 0.1, "repeat_penalty": 1.1}

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
post = pytest.fixture(scope="module")(serving.poster)


def ask(post, path: str = "chat", **changes: Any) -> list[dict[str, Any]]:
    body = {"model": "novelist:latest", "options": OPTIONS} | ({"messages": HELLO} if path == "chat" else {}) | changes
    reply = post(f"/api/{path}", body)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def same_chat(post, **changes: Any) -> str:
    body = {"messages": HELLO, "temperature": 0, "seed": 3, "max_tokens": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    return post("/v1/chat/completions", body | changes).json()["choices"][0]["message"]["content"]


def test_clients_find_the_model_and_what_it_can_do(server, post):
    version = httpx.get(server.url + "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    model, = httpx.get(server.url + "/api/tags").json()["models"]
    shown = post("/api/show", {"model": model["name"]}).json()
    assert "tools" in shown["capabilities"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] > 0
    assert post("/api/show", {"model": "another"}).json()["error"].startswith("the model 'another'")


def test_the_text_is_that_of_the_chat_whole_and_in_lines(post):
    *lines, last = ask(post)
    whole, = ask(post, stream=False)
    text = "".join(line["message"]["content"] for line in lines)
    assert text == whole["message"]["content"] == same_chat(post)
    assert last["done"] and last["done_reason"] == "length" and last["eval_count"] == 40 and not lines[0]["done"]


def test_a_prompt_is_a_chat_or_with_raw_a_completion(post):
    whole, = ask(post, "generate", prompt="Hi", system="Be brief.", stream=False)
    assert whole["response"] == same_chat(post, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    raw, = ask(post, "generate", prompt="It was", raw=True, stream=False)
    body = {"prompt": "It was", "temperature": 0, "seed": 3, "max_tokens": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    completion = post("/v1/completions", body).json()
    assert raw["response"] == completion["choices"][0]["text"]


def test_calls_come_whole_and_results_belong_to_them_by_name(post):
    schema, = ask(post, format={"enum": ["yes", "no"]}, stream=False)
    assert json.loads(schema["message"]["content"]) in ("yes", "no")
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rom"}}}
    turns = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "12", "tool_name": "get_weather"}]
    same = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "12"}]
    whole, = ask(post, messages=turns, stream=False)
    assert whole["message"]["content"] == same_chat(post, messages=same)
    lines = ask(post, tools=[TOOL], options=OPTIONS | {"num_predict": 100})
    for line in lines[:-1]:
        for each in line["message"].get("tool_calls", ()):
            jsonschema.validate(each["function"]["arguments"], CITY)


def test_log_probabilities_are_openais_whole_and_in_lines(post):
    asked = {"logprobs": True, "top_logprobs": 2}
    body = {"temperature": 0, "seed": 3, "max_tokens": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    same = post("/v1/chat/completions", body | asked | {"messages": HELLO}).json()["choices"][0]["logprobs"]["content"]
    for path, changes in (("chat", {}), ("generate", {"prompt": "Hi"})):
        whole, = ask(post, path, stream=False, **asked, **changes)
        lines = ask(post, path, **asked, **changes)
        assert whole["logprobs"] == [each for line in lines for each in line.get("logprobs", ())] == same
    raw, = ask(post, "generate", prompt="It was", raw=True, stream=False, **asked)
    completion = post("/v1/completions", body | {"prompt": "It was", "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert [each["logprob"] for each in raw["logprobs"]] == completion["token_logprobs"]
    assert "logprobs" not in ask(post, stream=False, top_logprobs=2)[0]


def lines_of(engine, parts: list[Part]) -> list[dict[str, Any]]:
    """The whole reply of an answer of these parts, and the lines of a stream of it."""
    options = ResponseOptions("chat.completion", "x", 1, True,
                              new_reader=lambda seed: SimpleNamespace(read=lambda events, is_end: parts))
    end = Event((1,), "", finish_reason="length")
    whole, streamed = (OllamaReply(options, "novelist", engine.tokenizer, [GenerationJob(
        "x", 0, None, lambda: None, engine.params(), 1, 0)]) for _ in range(2))
    whole.add(whole._job, [end])
    return [json.loads(line) for line in (*whole.whole(), *streamed.news(streamed._job, [end]), *streamed.end())]


def functions(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in line["message"].get("tool_calls", ())]


def test_a_call_that_is_cut_is_left_out(engine):
    lines = lines_of(engine, [Part("call", "get_weather", "c"), Part("arguments", '{"city": "Rom"}'),
                              Part("call", "get_weather", "d"), Part("arguments", '{"city": ')])
    calls = [[function["arguments"] for function in functions(line)] for line in lines]
    assert calls == [[{"city": "Rom"}], [{"city": "Rom"}], []] and lines[0]["done_reason"] == "length"


def test_calls_have_the_same_numbers_whole_and_in_lines(engine):
    parts = [Part("call", "get_weather", "c"), Part("arguments", "{}"), Part("call", "get_time", "d"),
             Part("arguments", "{}")]
    whole, *lines = lines_of(engine, parts)
    assert [each["index"] for each in functions(whole)] == [0, 1]
    assert functions(whole) == [each for line in lines for each in functions(line)]


def test_a_request_without_a_text_loads_or_unloads(post):
    empty = {"message": {"role": "assistant", "content": ""}}
    for path, body, answer in (("generate", {}, {"response": ""}), ("generate", {"prompt": ""}, {"response": ""}),
                               ("chat", {"messages": []}, empty)):
        for changes, reason in (({}, "load"), ({"keep_alive": 0, "stream": False}, "unload"),
                                ({"keep_alive": "5m"}, "load")):
            line, = ask(post, path, **body, **changes)
            assert answer.items() <= line.items() and (line["done"], line["done_reason"]) == (True, reason)
    assert post("/api/generate", {"model": "another"}).status_code == 404


def test_empty_members_of_ollamas_clients_mean_nothing(post):
    shown = {"model": "novelist", "system": "", "template": "", "verbose": False, "options": None}
    assert post("/api/show", shown).status_code == 200
    empty = {"suffix": "", "system": "", "template": "", "images": [], "options": None, "context": None}
    same, = ask(post, "generate", prompt="Hi", stream=False)
    assert ask(post, "generate", prompt="Hi", stream=False, **empty | {"options": OPTIONS})[0]["response"] == same[
        "response"]


def test_what_a_prompt_cannot_have_is_refused_by_name(engine):
    with serving.running(engine, unknown_parameters="warn") as found:
        for name, value in (("images", ["a"]), ("suffix", "x"), ("template", "x"), ("context", [1])):
            reply = serving.poster(found)("/api/generate", {"model": "novelist", "prompt": "Hi", name: value})
            assert reply.status_code == 400 and reply.json()["error"].startswith(f"{name}: must be empty"), reply.text


@pytest.mark.parametrize("changes, words", [
    ({"options": {"mirostat": 1}}, "options.mirostat"), ({"options": {"mumble": 1}}, "options.mumble"),
    ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "images"), ({"format": "xml"}, "format"),
    ({"options": {"num_predict": -5}}, "options.num_predict is -5"),
    ({"options": {"repeat_penalty": "x"}}, "options.repeat_penalty: Input"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"mumble": 1}, "mumble"), ({"model": "another"}, "another")])
def test_what_cannot_be_used_is_refused_in_ollamas_form(post, changes, words):
    reply = post("/api/chat", {"model": "novelist", "messages": HELLO} | changes)
    assert reply.status_code in (400, 404) and words in reply.json()["error"], reply.text


def test_ollamas_client_chats_and_calls(server):
    ollama = pytest.importorskip("ollama", reason="ollama is not installed")
    client = ollama.Client(host=server.url)
    assert client.list().models[0].model == "novelist" and client.show("novelist").capabilities
    whole = client.chat("novelist", HELLO, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert len(whole.logprobs) == 40 and whole.logprobs[0].top_logprobs[0].logprob == whole.logprobs[0].logprob
    pieces = [piece.message.content for piece in client.chat("novelist", HELLO, options=OPTIONS, stream=True)]
    assert "".join(pieces) == whole.message.content
    assert client.generate("novelist", "Hi", options=OPTIONS).response == whole.message.content
