"""The server as its clients see it: OpenAI's own client, and plain HTTP."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import serving
import torch

from longdraft.__main__ import run
from longdraft.errors import UsageError
from longdraft.generation import LARGEST_TREE
from longdraft.server import settings as server_settings
from longdraft.server.logs import Lines
from longdraft.server.prepare import Preparer
from longdraft.server.schemas import CompletionRequest
from longdraft.server.settings import Settings, free_memory, read_keys

OURS = {"longdraft": {"min_p": 0.1}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return serving.load(serving.talkative(tmp_path_factory.mktemp("model") / "talker"))


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    with serving.running(engine, journals=tmp_path_factory.mktemp("journals"), max_body_bytes=100_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def post(server):
    return lambda path, body, **options: httpx.post(server.url + path, json=body, timeout=60, **options)


def written(engine, prompt, **settings) -> str:
    """What the library writes."""
    params = engine.params(**({"max_new_tokens": 30, "seed": 7, "min_p": 0.1} | settings))
    return "".join(event.text for event in engine.generate(prompt, params))


# Texts


def test_a_completion_is_the_command_lines_text(client, capfd):
    reply = client.completions.create(model="novelist", prompt="It was", max_tokens=40, seed=11, temperature=0.9,
                                      extra_body=OURS)
    assert run(["generate", "It was", "--max-new-tokens", "40", "--seed", "11", "--temperature", "0.9", "--min-p",
                "0.1"]) == 0
    assert reply.choices[0].text == capfd.readouterr().out
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (2, 40, 42)
    assert reply.model_extra["longdraft"]["stats"]["exactness"] == "bit-exact"


@pytest.mark.parametrize("drafter", ["plain", "suffix", "tokenswift", "magicdec", "auto"])
def test_every_drafter_gives_the_same_text(client, engine, drafter):
    reply = client.completions.create(model="novelist", prompt="The ship", max_tokens=30, seed=7,
                                      extra_body={"longdraft": {"min_p": 0.1, "drafter": drafter}})
    assert reply.choices[0].text == written(engine, "The ship")
    assert reply.model_extra["longdraft"]["stats"]["drafter"] == drafter


def test_a_stream_gives_the_same_text_then_usage_and_acceptance(client, engine):
    chunks = list(client.completions.create(model="novelist", prompt="The ship", max_tokens=30, seed=7, stream=True,
                                            stream_options={"include_usage": True}, extra_body=OURS))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == written(engine, "The ship")
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 30
    last = chunks[-2]
    assert last.choices[0].finish_reason == "length"
    found = last.model_extra["metrics"]["speculative_decoding"]
    assert set(found) == {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram",
                          "acceptance_histogram_by_draft_length", "num_spec_steps", "num_accepted_draft_tokens",
                          "num_draft_tokens", "num_spec_tokens"}
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"])
    assert found["num_accepted_draft_tokens"] + found["num_spec_steps"] == 30
    assert found["mean_acceptance_length"] == pytest.approx(30 / found["num_spec_steps"])
    assert all("usage" not in chunk.model_extra and chunk.usage is None for chunk in chunks[:-1])


def test_several_prompts_and_several_texts_of_each(client, engine):
    reply = client.completions.create(model="novelist", prompt=["It was", "The ship"], n=2, max_tokens=12, seed=5,
                                      extra_body=OURS)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    expected = [written(engine, prompt, seed=seed, max_new_tokens=12) for prompt in ("It was", "The ship")
                for seed in (5, 6)]
    assert [choice.text for choice in reply.choices] == expected
    assert reply.usage.completion_tokens == 48
    assert reply.usage.prompt_tokens == len(engine.encode("It was")) + len(engine.encode("The ship"))


def test_several_streams_in_one(client, engine):
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="novelist", prompt="It was", n=2, max_tokens=20, seed=5, stream=True,
                                           extra_body=OURS):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {i: written(engine, "It was", seed=5 + i, max_new_tokens=20) for i in (0, 1)}


def test_token_ids_are_a_prompt_and_echo_repeats_it(client, engine):
    ids = engine.encode("The ship")
    plain = client.completions.create(model="novelist", prompt=ids, max_tokens=10, seed=7, extra_body=OURS)
    echoed = client.completions.create(model="novelist", prompt="The ship", max_tokens=10, seed=7, echo=True,
                                       extra_body=OURS)
    assert echoed.choices[0].text == "The ship" + plain.choices[0].text
    chunks = client.completions.create(model="novelist", prompt="The ship", max_tokens=10, seed=7, echo=True,
                                       stream=True, extra_body=OURS)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_chat_goes_through_the_models_template(client, engine):
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]}]
    reply = client.chat.completions.create(model="novelist", messages=messages, max_completion_tokens=20, seed=3,
                                           extra_body=OURS)
    ids = engine.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}])
    assert reply.choices[0].message.content == written(engine, ids, seed=3, max_new_tokens=20)
    assert reply.choices[0].message.role == "assistant" and reply.object == "chat.completion"
    chunks = list(client.chat.completions.create(model="novelist", messages=messages, max_tokens=20, seed=3,
                                                 stream=True, extra_body=OURS))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == reply.choices[0].message.content
    shouted = client.chat.completions.create(model="novelist", messages=messages, max_tokens=20, seed=3, extra_body={
        **OURS, "chat_template_kwargs": {"shout": True}})
    assert shouted.usage.prompt_tokens > reply.usage.prompt_tokens


@pytest.mark.parametrize("name", ["messages", "self"])
def test_a_templates_variable_may_not_be_called_as_our_own(server, name):
    reply = httpx.post(server.url + "/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}})
    assert reply.status_code == 400 and f"no variable '{name}'" in reply.json()["error"]["message"]


def test_stop_texts_end_it_and_are_not_shown(client, engine):
    whole = written(engine, "The ship", max_new_tokens=60)
    stop = whole[20:24]
    for stream in (False, True):
        reply = client.completions.create(model="novelist", prompt="The ship", max_tokens=60, seed=7, stop=stop,
                                          stream=stream, extra_body=OURS)
        chunks = list(reply) if stream else [reply]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_logit_bias_forbids_and_forces(client, engine, capfd):
    ids = engine.encode("The ship")
    first = engine.tokenizer.encode(written(engine, ids, max_new_tokens=1), add_special_tokens=False)[0]
    reply = client.completions.create(model="novelist", prompt="The ship", max_tokens=5, temperature=0,
                                      logit_bias={str(first): 100}, seed=7)
    assert reply.choices[0].text == engine.tokenizer.decode([first] * 5)
    banned = client.completions.create(model="novelist", prompt="The ship", max_tokens=30, seed=7,
                                       logit_bias={str(first): -100}, extra_body=OURS)
    assert run(["generate", "The ship", "--max-new-tokens", "30", "--seed", "7", "--min-p", "0.1", "--logit-bias",
                f"{first}=-100"]) == 0
    assert banned.choices[0].text == capfd.readouterr().out
    assert first not in engine.tokenizer.encode(banned.choices[0].text, add_special_tokens=False)


# Log-probabilities


def test_logprobs_are_those_of_the_distribution_that_was_sampled(client, engine):
    """With top-k 3 the three add up to one, and the chosen one is among them, whichever drafter."""
    told = []
    for drafter in ("plain", "tokenswift"):
        reply = client.completions.create(model="novelist", prompt="The ship", max_tokens=20, seed=7, logprobs=3,
                                          extra_body={"longdraft": {"top_k": 3, "drafter": drafter}})
        found = reply.choices[0].logprobs
        assert "".join(found.tokens) == reply.choices[0].text
        assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(20)]
        for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert sum(math.exp(each) for each in top.values()) == pytest.approx(1)
            assert top[token] == value
        told.append(found.token_logprobs)
    assert told[0] == told[1]


def test_chat_logprobs_have_bytes_and_alternatives(client):
    reply = client.chat.completions.create(model="novelist", messages=[{"role": "user", "content": "Who?"}], seed=1,
                                           max_tokens=8, logprobs=True, top_logprobs=2, temperature=0)
    content = reply.choices[0].logprobs.content
    assert len(content) == 8
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == reply.choices[0].message.content
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


# Refusals

BAD = [
    ({"prompt": "a", "frobnicate": 1}, "frobnicate"),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
    ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 2}, "top_p"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 1000}, "n"),
    ({"prompt": "a", "seed": -1}, "seed"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"999999": 1}}, None),
    ({"prompt": "a", "logit_bias": {"1": 1000}}, "logit_bias"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({}, "prompt"),
    ({"prompt": "a", "longdraft": {"drafter": "oracle"}}, "longdraft.drafter"),
    ({"prompt": "a", "longdraft": {"drafter": "draft-model", "drafter_options": {"model": "/etc"}}},
     "longdraft.drafter_options"),
    ({"prompt": "a", "longdraft": {"drafter": "suffix", "drafter_options": {"corpus": "/etc/passwd"}}},
     "longdraft.drafter_options"),
    ({"prompt": "a", "longdraft": {"min_p": 3}}, "longdraft.min_p"),
    ({"prompt": "a", "longdraft": {"what": 3}}, "longdraft.what"),
    ({"prompt": "a", "longdraft": {"journal": "../../etc"}}, "longdraft.journal"),
    ({"prompt": "a", "longdraft": {"on_loop": "dance"}}, "longdraft.on_loop"),
    ({"prompt": "a", "top_k": 3, "longdraft": {"top_k": 4}}, "top_k"),
    ({"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
]


@pytest.mark.parametrize("body, param", BAD, ids=[json.dumps(body)[:60] for body, _ in BAD])
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(server, body, param):
    reply = httpx.post(server.url + "/v1/completions", content=json.dumps(body),
                       headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    if param:
        assert (error["param"] or "").startswith(param), error


def test_what_asks_for_nothing_is_taken(post):
    body = {"prompt": "a", "max_tokens": 2, "presence_penalty": 0, "best_of": 1, "suffix": None, "tools": []}
    assert post("/v1/completions", body).status_code == 200


def test_a_context_that_is_too_long_says_so(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="novelist", prompt="a", max_tokens=200_000)
    assert caught.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_model_without_a_template_cannot_chat(caplog):
    """It says so, the connection stays, and the log has no traceback."""
    with serving.running(serving.load("novelist")) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="novelist", messages=[{"role": "user", "content": "a"}])
        with httpx.Client() as raw:
            for _ in range(2):
                body = {"messages": [{"role": "user", "content": "a"}]}
                assert raw.post(server.url + "/v1/chat/completions", json=body).status_code == 400
            connections = list(raw._transport._pool.connections)
            assert len(connections) == 1 and connections[0].is_idle()
    assert not any(entry.exc_info for entry in caplog.records)


def test_what_is_no_request(server):
    url = server.url + "/v1/completions"
    for content, status in ((b"{", 400), (b"\xff\xfe", 400), (b"[" * 50_000, 400), (b"null", 400), (b"[]", 400),
                            (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400), (b"", 400),
                            (b'{"prompt": "' + b"a" * 100_001 + b'"}', 413)):
        reply = httpx.post(url, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == status and "error" in reply.json(), (content[:20], reply.text)
    assert httpx.post(url, content=iter([b"a" * 50_000] * 3)).status_code == 413  # of no declared length
    assert httpx.post(url, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}).status_code == 400
    assert httpx.get(url).status_code == 405
    assert httpx.get(server.url + "/nowhere").json()["error"]["code"] == "not_found"


# Beside texts


def test_models_tokenize_detokenize_version(client, server, engine, post):
    assert [model.id for model in client.models.list()] == ["novelist"]
    assert client.models.retrieve("novelist").model_extra["max_model_len"] == 131072
    found = post("/tokenize", {"prompt": "It was"}).json()
    assert found == {"tokens": engine.encode("It was"), "count": 2, "max_model_len": 131072}
    assert post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "It was"}
    assert post("/detokenize", {"tokens": [10**9]}).status_code == 400
    assert post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["count"] > 1
    assert httpx.get(server.url + "/version").json()["version"]
    assert httpx.get(server.url + "/ready").json()["ready"] is True


def test_metrics_have_vllms_stems(server, post):
    post("/v1/completions", {"prompt": "a", "max_tokens": 30, "temperature": 0})
    text = httpx.get(server.url + "/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
                 "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
                 "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
                 "request_queue_time_seconds_bucket", "spec_decode_num_drafts_total",
                 "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
                 "spec_decode_num_accepted_tokens_per_pos_total"):
        assert f"\nlongdraft:{name}{{" in text, name
    assert 'finished_reason="length",model_name="novelist"' in text


def test_metrics_tell_the_time_between_tokens(server, post):
    def series() -> tuple[float, float]:
        text = httpx.get(server.url + "/metrics").text
        found = (re.search(rf"inter_token_latency_seconds_{name}{{.*}} (.*)", text) for name in ("count", "sum"))
        return tuple(float(match[1]) for match in found)

    before, began = series(), time.monotonic()
    reply = post("/v1/completions", {"prompt": "a", "max_tokens": 30, "longdraft": {"drafter": "plain"}}).json()
    count, seconds = (now - then for now, then in zip(series(), before, strict=True))
    decoding = reply["longdraft"]["stats"]["decode_seconds"]
    assert count == 29 and 0.5 * decoding < seconds < time.monotonic() - began


def test_what_clients_invent_makes_no_series_and_no_lines(server, caplog):
    httpx.request("BREW" * 9, server.url + "/v1/models")
    httpx.request("PATCH", server.url + "/v1/models")
    text = httpx.get(server.url + "/metrics").text
    assert "BREW" not in text and 'method="other"' in text and 'method="PATCH"' in text
    with caplog.at_level("INFO", logger="longdraft.server"):
        httpx.get(server.url + "/forged%0a2026-01-01T00:00:00.000Z%20info%20request%20status=200")
        serving.wait_for(lambda: any("forged" in Lines().format(entry) for entry in caplog.records))
    (line,) = (found for found in map(Lines().format, caplog.records) if "forged" in found)
    assert "\n" not in line and re.findall(r" status=(\d+)", re.sub(r'"[^"]*"', "", line)) == ["404"]
    assert " client=127.0.0.1" in line, "what is plain is written as it is"


def test_a_stream_tells_its_progress_in_comments(server):
    body = {"prompt": "It was", "max_tokens": 400, "seed": 7, "stream": True}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    told = [json.loads(line.removeprefix(": progress ")) for line in reply.text.splitlines() if line[:1] == ":"]
    assert len(told) >= 3 and told[-1]["new_tokens"] > 0 and told[-1]["eta_seconds"] is not None
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"


def test_details_tell_who_guessed_each_token_and_what_plain_decoding_would_take(server, engine):
    body = {"prompt": "It was", "max_tokens": 60, "seed": 7, "stream": True, "longdraft": {"details": True}}
    chunks = serving.events(httpx.post(server.url + "/v1/completions", json=body, timeout=60).text)
    details = [chunk["longdraft"] for chunk in chunks]
    tokens = [token for detail in details for token in detail["tokens"]]
    pieces = [piece for detail in details for piece in detail["pieces"]]
    sources = [source for detail in details for source in detail["sources"]]
    steps = [count for detail in details for count in detail["steps"]]
    assert len(tokens) == len(pieces) == len(sources) == sum(steps) == 60
    assert "".join(pieces) == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert sources.count("") == len(steps)  # the target adds one token to each step
    assert "".join(pieces) == written(engine, "It was", max_new_tokens=60, min_p=0)
    assert details[-1]["progress"]["plain_tokens_per_second"] > 0
    assert details[-1]["stats"]["seed"] == 7


# Many at once


def test_texts_written_in_turns_are_those_written_alone(server, engine):
    def ask(i):
        body = {"prompt": "The ship", "max_tokens": 40 + i, "seed": i, "longdraft": {
            "min_p": 0.1, "drafter": ["plain", "suffix", "auto", "magicdec"][i % 4]}}
        return httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(12)))
    assert texts == [written(engine, "The ship", seed=i, max_new_tokens=40 + i) for i in range(12)]
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    assert server.scheduler.figures()["reserved_bytes"] == 0


def test_turns_are_fair(server):
    """A short text does not wait for a long one that came before it."""
    with httpx.stream("POST", server.url + "/v1/completions", timeout=60,
                      json={"prompt": "It was", "max_tokens": 50_000, "stream": True}) as long:
        lines = long.iter_lines()
        next(lines)
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "The", "max_tokens": 20}, timeout=30)
        assert reply.json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("drafter", ["plain", "auto"])
def test_who_hangs_up_frees_the_engine_within_a_second(server, stream, drafter):
    body = json.dumps({"prompt": "It was", "max_tokens": 100_000, "stream": stream, "longdraft": {"drafter": drafter}})
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall((head + body).encode())
        serving.wait_for(lambda: any(job.num_tokens for job in server.scheduler.jobs() if job.ended is None))
    assert serving.wait_for(lambda: server.scheduler.num_jobs == 0) < 1.0


def test_too_many_are_told_to_come_back(engine):
    with serving.running(engine, max_running=1, max_queued=1) as server:
        long = {"prompt": "It was", "max_tokens": 50_000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=long) as first, \
                httpx.stream("POST", server.url + "/v1/completions", json=long) as second:
            lines = first.iter_lines(), second.iter_lines()  # a reader that is let go of hangs up
            assert next(lines[0]) and "queued" in next(lines[1])
            reply = httpx.post(server.url + "/v1/completions", json=long)
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["code"] == "queue_full"


def test_memory_is_a_budget(engine):
    with serving.running(engine, memory_bytes=64 << 20) as server:
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "It was", "max_tokens": 100_000})
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "memory_exceeded"
        one = {"prompt": "It was", "max_tokens": 2500, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=one) as first, \
                httpx.stream("POST", server.url + "/v1/completions", json=one) as second:
            lines = first.iter_lines(), second.iter_lines()
            assert next(lines[0]) and "queued" in next(lines[1])
            assert server.scheduler.figures()["waiting"] == 1  # there are places, there is no memory


def bytes_of(engine, tokens: int) -> int:
    """What a text of so many tokens is counted as."""
    request = CompletionRequest(prompt=[5] * 10, max_tokens=tokens - 10)
    return Preparer(engine, Settings()).completion(request, "cmpl")[0].num_bytes


@pytest.mark.parametrize("name, dtype, width", [
    ("reference", "bfloat16", 4), ("reference", "float32", 4), ("portable", "bfloat16", 2), ("portable", "float32", 4)])
def test_the_budget_counts_what_caches_take_on_these_kernels(tiny, name, dtype, width):
    engine = serving.load(tiny["mha"], drafter="plain", dtype=dtype, kernels_name=name)
    config = engine.model.config
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    assert bytes_of(engine, 1010) - bytes_of(engine, 10 + 1) == pytest.approx(1.15 * 999 * each, abs=1)


def test_the_budget_counts_what_caches_take_on_a_device(tiny, monkeypatch):
    """8 bits with a scale for each key and value; a cache is reserved whole, with room for trees."""
    engine = serving.load(tiny["mha"], drafter="plain", dtype="float32")
    kernels, config = engine.model.kernels, engine.model.config
    monkeypatch.setattr(kernels, "dtype", torch.float16)
    monkeypatch.setattr(kernels, "is_device", True, raising=False)
    monkeypatch.setattr(kernels, "cache_bytes", lambda head_dim: head_dim + 4, raising=False)
    each = 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4)
    assert bytes_of(engine, 1010) - bytes_of(engine, 10 + 1) == pytest.approx(1.15 * 999 * each, abs=1)
    assert bytes_of(engine, 1010) >= (1010 + LARGEST_TREE) * each


def test_the_budget_is_what_the_device_leaves_else_what_system_and_container_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(server_settings, "_PROC", tmp_path)
    monkeypatch.setattr(server_settings, "_CGROUP", tmp_path)
    assert 1 << 20 < free_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "nobody says"
    (tmp_path / "meminfo").write_text("MemTotal: 64000 kB\nMemAvailable:   50000 kB\n")
    assert free_memory() == int(0.8 * 50_000 * 1024)
    assert free_memory(10 << 30) == 8 << 30, "the device's own"
    (tmp_path / "memory.max").write_text(f"{20 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{20 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {4 << 20}\nfile {16 << 20}\ninactive_file {15 << 20}\nactive_file 1\n")
    assert free_memory() == 12 << 20, "pages of files make room"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == int(0.8 * 50_000 * 1024)


def test_a_text_may_take_only_so_long(post):
    reply = post("/v1/completions", {"prompt": "It was", "max_tokens": 100_000, "longdraft": {"timeout": 0.3}})
    assert reply.status_code == 408 and reply.json()["error"]["code"] == "timeout"


def test_a_text_that_runs_out_of_memory_is_the_only_one_that_fails(server, engine, monkeypatch):
    from longdraft.generation import Generation

    go_on = Generation.go_on

    def poisoned(self, answer=None):
        if self.params.seed == 666 and len(self.tokens) > 3:
            raise MemoryError
        return go_on(self, answer)

    monkeypatch.setattr(Generation, "go_on", poisoned)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(httpx.post, server.url + "/v1/completions", timeout=60,
                             json={"prompt": "The ship", "max_tokens": 30, "seed": seed, "longdraft": {"min_p": 0.1}})
                 for seed in (7, 666, 8)]
    good, bad, other = (each.result() for each in asked)
    assert bad.status_code == 503 and bad.json()["error"]["code"] == "out_of_memory"
    assert good.json()["choices"][0]["text"] == written(engine, "The ship")
    assert other.status_code == 200
    assert server.scheduler.figures()["reserved_bytes"] == 0 and server.scheduler.is_alive


def test_a_failure_in_a_stream_is_an_error_in_the_stream(client, monkeypatch):
    from longdraft.generation import Generation

    def fail(self, answer=None):
        raise ZeroDivisionError

    monkeypatch.setattr(Generation, "go_on", fail)
    with pytest.raises(openai.APIError, match="internal error"):
        list(client.completions.create(model="novelist", prompt="a", stream=True))


# Who may


def test_everything_but_health_is_behind_the_key(engine):
    with serving.running(engine, api_keys=("first-key", "second-key")) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        for path in ("/", "/ready", "/version", "/metrics", "/v1/models", "/openapi.json", "/v1/longdraft/generations",
                     "/nowhere", "/page/page.js"):
            assert httpx.get(server.url + path).status_code == 401, path
        for path in ("/v1/completions", "/tokenize"):
            reply = httpx.post(server.url + path, json={"prompt": "a"})
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        for key in ("first-key", "second-key"):
            client = openai.OpenAI(base_url=server.url + "/v1", api_key=key)
            assert client.completions.create(model="novelist", prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="first").models.list()
        asked = httpx.get(server.url + "/", headers={"Accept": "text/html"})
        assert asked.headers["www-authenticate"].startswith("Basic")
        assert httpx.get(server.url + "/", auth=("anybody", "second-key")).status_code == 200


def test_a_web_page_elsewhere_cannot_use_a_local_server(server, engine):
    url = server.url + "/v1/completions"
    assert httpx.post(url, json={"prompt": "a"}, headers={"Host": "evil.example"}).status_code == 403
    reply = httpx.options(url, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in reply.headers
    reply = httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers={"Origin": "https://evil.example"})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"
    assert httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers={"Origin": server.url}).status_code == 200
    assert httpx.get(server.url + "/version", headers={"Host": "["}).status_code == 403
    with serving.running(engine, cors_origins=("https://good.example",)) as open_server:
        reply = httpx.options(open_server.url + "/v1/completions", headers={
            "Origin": "https://good.example", "Access-Control-Request-Method": "POST"})
        assert reply.headers["access-control-allow-origin"] == "https://good.example"


def test_request_ids_come_back_and_logs_hold_no_text(server, caplog):
    with caplog.at_level("INFO", logger="longdraft.server"):
        reply = httpx.post(server.url + "/v1/completions", headers={"X-Request-Id": "abc-1"}, timeout=30,
                           json={"prompt": "A very secret prompt", "max_tokens": 3, "user": "ann"})
        serving.wait_for(lambda: any(entry.getMessage() == "request" for entry in caplog.records))
    assert reply.headers["x-request-id"] == "abc-1"
    fields = [getattr(entry, "longdraft_fields", {}) for entry in caplog.records]
    assert any(each.get("id") == "abc-1" and each.get("status") == 200 for each in fields)
    assert any(each.get("user") == "ann" and each.get("new_tokens") == 3 for each in fields)
    assert "secret" not in str(fields) + caplog.text


def test_keys_are_read_from_options_a_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_API_KEY", "three")
    (tmp_path / "keys").write_text("# ours\none\n\ntwo\n")
    assert read_keys(("zero",), tmp_path / "keys") == ("zero", "one", "two", "three")
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys((), tmp_path / "keys")


@pytest.mark.parametrize("host, is_local", [("127.0.0.1", True), ("::1", True), ("localhost", True),
                                            ("0.0.0.0", False), ("example.org", False)])
def test_which_addresses_are_this_machines_own(host, is_local):
    assert Settings(host=host).is_local is is_local


def test_the_dashboard_asks_for_series_that_are_there(server, post):
    post("/v1/completions", {"prompt": "a", "max_tokens": 30, "temperature": 0})
    told = set(re.findall(r"longdraft:\w+", httpx.get(server.url + "/metrics").text))
    dashboard = (Path(__file__).parent.parent / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"longdraft:\w+", dashboard))
    assert len(json.loads(dashboard)["panels"]) >= 10 and len(asked) > 12
    assert asked - told <= {"longdraft:request_failure_total"}  # there when something has failed
