"""llama.cpp's and KoboldCpp's APIs: what their clients read first, and texts that are those of completions."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest

from helpers import serving
from helpers.processes import wait_for
from longdraft.errors import UsageError
from longdraft.server.run import require_usable
from longdraft.server.settings import ServerSettings

SETTINGS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "min_p": 0.1}
LLAMA = SETTINGS | {"prompt": "It was", "n_predict": 40, "repeat_penalty": 1.1, "repeat_last_n": 64,
                    "cache_prompt": True, "stop": [], "n_probs": 0, "mirostat": 0}
KOBOLD: dict[str, Any] = {
    "prompt": " was", "memory": "It", "max_length": 40, "rep_pen": 1.1, "rep_pen_range": 64, "temperature": 0.8,
    "min_p": 0.1, "sampler_seed": 3, "max_context_length": 2048, "top_a": 0, "tfs": 1, "quiet": True,
    "use_default_badwordsids": False}

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
post = pytest.fixture(scope="module")(serving.poster)


def completion(post, **changes: Any) -> str:
    body = SETTINGS | {"prompt": "It was", "max_tokens": 40, "repetition_penalty": 1.1, "penalty_window": 64} | changes
    reply = post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def contents(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]


@pytest.fixture(scope="module")
def text(post) -> str:
    return completion(post)


# llama.cpp


def test_a_completion_of_llama_cpp_is_openais_whole_and_streamed(post, engine, text):
    whole = post("/completion", LLAMA | {"return_tokens": True}).json()
    *chunks, last = contents(post("/completions", LLAMA | {"stream": True}))
    assert whole["content"] == text == "".join(chunk["content"] for chunk in chunks)
    assert engine.tokenizer.decode(whole["tokens"]) == text and len(whole["tokens"]) == whole["tokens_predicted"] == 40
    assert whole["stop"] and last["stop"] and not chunks[0]["stop"]
    assert whole["stop_type"] == last["stop_type"] == "limit" and whole["timings"]["predicted_n"] == 40
    assert whole["generation_settings"]["seed"] == 3 and whole["prompt"] == "It was"


def test_a_stop_text_of_llama_cpp_is_named(post, text):
    stop = text[10:14]
    whole = post("/completion", LLAMA | {"stop": ["zzz", stop]}).json()
    assert whole["content"] == text.partition(stop)[0]
    assert (whole["stop_type"], whole["stopping_word"]) == ("word", stop)


def test_probabilities_of_llama_cpp_are_openais(post):
    whole = post("/completion", LLAMA | {"n_probs": 2, "n_predict": 5}).json()
    same = post("/v1/completions", SETTINGS | {"prompt": "It was", "max_tokens": 5, "repetition_penalty": 1.1,
                                               "penalty_window": 64, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert [each["logprob"] for each in whole["completion_probabilities"]] == same["token_logprobs"]
    assert [each["token"] for each in whole["completion_probabilities"]] == same["tokens"]
    assert all(len(each["top_logprobs"]) == 2 for each in whole["completion_probabilities"])


def test_a_large_reply_with_probabilities_is_sent_in_pieces(post):
    """Encoding it at once would take a second, in which the server answers nobody."""
    body = LLAMA | {"n_probs": 20, "n_predict": 600, "ignore_eos": True, "return_tokens": True}
    whole, streamed = post("/completion", body), contents(post("/completion", body | {"stream": True}))
    assert "content-length" not in whole.headers
    for name in ("completion_probabilities", "tokens"):
        assert whole.json()[name] == [item for each in streamed for item in each[name]]
        assert len(whole.json()[name]) == 600
    detached = post("/completion", body, headers={"X-Conversation-Id": "large"})
    assert "content-length" not in detached.headers
    assert detached.json()["completion_probabilities"] == whole.json()["completion_probabilities"]


def test_no_tokens_of_llama_cpp_read_the_prompt_into_the_cache(post):
    body = LLAMA | {"prompt": "The sea was calm. " * 60}
    whole = post("/completion", body | {"n_predict": 0, "n_probs": 1}).json()
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")
    assert whole["tokens_cached"] == 0 and whole["completion_probabilities"] == []
    streamed = contents(post("/completion", body | {"n_predict": 0, "stream": True}))
    assert {each["content"] for each in streamed} == {""} and streamed[-1]["stop"]
    assert streamed[-1]["tokens_cached"] > whole["tokens_evaluated"] // 2


def test_other_spellings_of_llama_cpp_mean_what_they_mean_there(post, text):
    unpenalised = post("/completion", LLAMA | {"repeat_last_n": 0})
    assert unpenalised.status_code == 200, unpenalised.text
    assert unpenalised.json()["content"] == completion(post, repetition_penalty=1)
    biased = post("/completion", LLAMA | {"logit_bias": [[300, False], [301, 2.5]]}).json()["content"]
    assert biased == completion(post, logit_bias={"300": -100, "301": 2.5})
    assert len(post("/completion", LLAMA | {"logprobs": 1, "n_predict": 2}).json()["completion_probabilities"]) == 2
    drawn = post("/completion", LLAMA | {"seed": -1, "cache_prompt": False}).json()
    assert drawn["generation_settings"]["seed"] >= 0 and drawn["tokens_cached"] == 0


def test_clients_of_llama_cpp_find_the_model_and_its_tokens(server, post, engine):
    about = httpx.get(server.url + "/props").json()
    assert about["default_generation_settings"]["n_ctx"] == engine.model.config.max_positions
    assert about["chat_template"] == serving.TEMPLATE and about["total_slots"] == 8
    assert [slot["is_processing"] for slot in httpx.get(server.url + "/slots").json()] == [False] * 8
    messages = [{"role": "user", "content": "Hi"}]
    assert post("/apply-template", {"messages": messages}).json() == {"prompt": "<user>Hi\n<assistant>"}
    tokens = post("/tokenize", {"content": "It was"}).json()
    assert tokens == {"tokens": engine.tokenizer.encode("It was", add_special_tokens=False)}
    pieces = post("/tokenize", {"content": "It was", "with_pieces": True}).json()["tokens"]
    assert "".join(each["piece"] for each in pieces) == "It was"
    parts = post("/tokenize", {"content": "\u00b6", "with_pieces": True}).json()["tokens"]
    assert [each["piece"] for each in parts] == [[0xC2], [0xB6]]
    assert post("/detokenize", tokens).json()["content"] == "It was"


@pytest.mark.parametrize("changes, param", [
    ({"mirostat": 1}, "mirostat"), ({"echo": True}, "echo"), ({"n": 2}, "n"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": ["a", "b"]}, "prompt"), ({"n_probs": 99}, "n_probs"),
    ({"logit_bias": [["a", 1]]}, "logit_bias"), ({"mumble": 1}, "mumble"), ({"lora": [{"id": 0}]}, "lora"),
    ({"n_predict": -5}, "n_predict"), ({"max_tokens": -5}, "max_tokens"), ({"repeat_last_n": -5}, "repeat_last_n"),
    ({"temperature": -1}, "temperature")])
def test_what_llama_cpp_has_and_longdraft_has_not_is_refused_by_name(post, changes, param):
    reply = post("/completion", LLAMA | changes)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


# KoboldCpp


def test_a_text_of_kobold_is_openais_whole_and_in_events(post, text):
    whole, = post("/api/v1/generate", KOBOLD).json()["results"]
    reply = post("/api/extra/generate/stream", KOBOLD)
    events = contents(reply)
    assert reply.text.startswith(("event: message", ":"))
    assert whole["text"] == text == "".join(each["token"] for each in events)
    assert whole["finish_reason"] == events[-1]["finish_reason"] == "length" and events[0]["finish_reason"] is None
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (2, 40)


def test_the_order_of_kobolds_samplers_says_where_the_temperature_is(post):
    last, = post("/api/v1/generate", KOBOLD | {"sampler_order": [6, 0, 1, 3, 4, 2, 5]}).json()["results"]
    assert last["text"] == completion(post, temperature_last=True)
    stopped, = post("/api/v1/generate", KOBOLD | {"stop_sequence": ["e"]}).json()["results"]
    assert stopped["text"] == completion(post, stop=["e"]) and stopped["finish_reason"] == "stop"


def test_a_running_text_of_kobold_is_read_and_ended_by_its_key(server, post):
    found: list[httpx.Response] = []
    body = KOBOLD | {"max_length": 3000, "genkey": "KCPP1"}
    writer = threading.Thread(target=lambda: found.append(post("/api/v1/generate", body)))
    writer.start()

    def so_far(name: str | None = None) -> str:
        return post("/api/extra/generate/check", {"genkey": name} if name else {}).json()["results"][0]["text"]

    wait_for(lambda: so_far("KCPP1"), 60)
    shown = so_far("KCPP1")
    assert so_far().startswith(shown) and so_far("KCPP2") == ""
    assert httpx.get(server.url + "/api/extra/generate/check").json()["results"][0]["text"].startswith(shown)
    assert httpx.post(server.url + "/api/extra/generate/check").json()["results"][0]["text"].startswith(shown)
    assert post("/api/extra/abort", {"genkey": "KCPP2"}).json() == {"success": "false"}
    assert post("/api/extra/abort", {"genkey": "KCPP1"}).json() == {"success": "true"}
    writer.join(60)
    assert httpx.post(server.url + "/api/extra/abort").json() == {"success": "false"}
    assert found[0].status_code == 409 and "cancelled" in found[0].json()["detail"]["msg"]


def test_clients_of_kobold_find_the_model_and_its_tokens(server, post, engine):
    def get(path: str) -> Any:
        return httpx.get(f"{server.url}/api/{path}").json()

    assert get("v1/model") == {"result": "longdraft/novelist"} and get("extra/version")["result"] == "KoboldCpp"
    limit = {"value": engine.model.config.max_positions}
    assert get("v1/config/max_context_length") == get("extra/true_max_context_length") == limit
    assert get("v1/info/version")["result"].count(".") == 2
    ids = engine.tokenizer.encode("It was")
    assert post("/api/extra/tokencount", {"prompt": "It was"}).json() == {"value": len(ids), "ids": ids}


@pytest.mark.parametrize("changes, word", [
    ({"top_a": 0.5}, "top_a"), ({"sampler_order": [0]}, "sampler_order"), ({"mumble": 1}, "mumble"),
    ({"max_length": -5}, "max_length is -5"), ({"stop_sequence": [""]}, "stop_sequence is ''"),
    ({"n": 2}, "n is 2"), ({"images": ["x"]}, "images"), ({"prompt": 1}, "prompt")])
def test_what_kobold_has_and_longdraft_has_not_is_refused_in_its_form(post, changes, word):
    reply = post("/api/v1/generate", KOBOLD | changes)
    assert reply.status_code == 400 and word in reply.json()["detail"]["msg"], reply.text


# Both


def test_embeddings_and_rankings_are_not_supported(post):
    for path in ("/v1/embeddings", "/api/embed", "/v1/rerank"):
        reply = post(path, {"input": "x"})
        assert reply.status_code == 501 and "writes texts" in reply.text
    assert post("/v1/embeddings", {}).json()["error"]["code"] == "not_supported"


def test_a_second_port_serves_the_same(engine):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving.running(engine, ollama_port=port) as found:
        models = [httpx.get(url + "/api/tags").json() for url in (found.url, f"http://127.0.0.1:{port}")]
    assert models[0] == models[1] and models[0]["models"]
    with pytest.raises(UsageError, match=f"--ollama-port is {port}; allowed: another port than --port"):
        require_usable(ServerSettings(port=port, ollama_port=port))
