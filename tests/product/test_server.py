"""The server's API, through OpenAI's client and plain HTTP."""

from __future__ import annotations

import io
import json
import math
import zipfile

import httpx
import openai
import pytest

from helpers import serving
from longdraft.__main__ import run

OURS = {"longdraft": {"min_p": 0.1}}


engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
client = pytest.fixture(scope="module")(serving.client)
post = pytest.fixture(serving.poster)


# Texts


def test_a_completion_equals_the_command_lines_text(client, capfd):
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
    assert reply.choices[0].text == serving.written(engine, "The ship")
    assert reply.model_extra["longdraft"]["stats"]["drafter"] == drafter


def test_a_stream_has_the_same_text_then_usage_and_acceptance(client, engine):
    chunks = list(client.completions.create(model="novelist", prompt="The ship", max_tokens=30, seed=7, stream=True,
                                            stream_options={"include_usage": True}, extra_body=OURS))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == serving.written(engine, "The ship")
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
    expected = [serving.written(engine, prompt, seed=seed, max_new_tokens=12) for prompt in ("It was", "The ship")
                for seed in (5, 6)]
    assert [choice.text for choice in reply.choices] == expected
    assert reply.usage.completion_tokens == 48
    assert reply.usage.prompt_tokens == len(engine.encode("It was")) + len(engine.encode("The ship"))


def test_several_streams_in_one(client, engine):
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="novelist", prompt="It was", n=2, max_tokens=20, seed=5, stream=True,
                                           extra_body=OURS):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {i: serving.written(engine, "It was", seed=5 + i, max_new_tokens=20) for i in (0, 1)}


def test_token_ids_are_a_prompt_and_echo_repeats_it(client, engine):
    ids = engine.encode("The ship")
    plain = client.completions.create(model="novelist", prompt=ids, max_tokens=10, seed=7, extra_body=OURS)
    echoed = client.completions.create(model="novelist", prompt="The ship", max_tokens=10, seed=7, echo=True,
                                       extra_body=OURS)
    assert echoed.choices[0].text == "The ship" + plain.choices[0].text
    chunks = client.completions.create(model="novelist", prompt="The ship", max_tokens=10, seed=7, echo=True,
                                       stream=True, extra_body=OURS)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_chat_uses_the_models_template(client, engine):
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]}]
    reply = client.chat.completions.create(model="novelist", messages=messages, max_completion_tokens=20, seed=3,
                                           extra_body=OURS)
    ids = engine.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}])
    assert reply.choices[0].message.content == serving.written(engine, ids, seed=3, max_new_tokens=20)
    assert reply.choices[0].message.role == "assistant" and reply.object == "chat.completion"
    chunks = list(client.chat.completions.create(model="novelist", messages=messages, max_tokens=20, seed=3,
                                                 stream=True, extra_body=OURS))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == reply.choices[0].message.content
    shouted = client.chat.completions.create(model="novelist", messages=messages, max_tokens=20, seed=3, extra_body={
        **OURS, "chat_template_kwargs": {"shout": True}})
    assert shouted.usage.prompt_tokens > reply.usage.prompt_tokens


@pytest.mark.parametrize("name", ["messages", "self", "add_generation_prompt", "continue_final_message", "bos_token"])
def test_reserved_template_variables_are_refused(server, name):
    reply = httpx.post(server.url + "/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}})
    assert reply.status_code == 400 and f"no variable '{name}'" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "chat_template_kwargs"


def test_stop_texts_end_the_text_and_are_removed(client, engine):
    whole = serving.written(engine, "The ship", max_new_tokens=60)
    stop = whole[20:24]
    for stream in (False, True):
        reply = client.completions.create(model="novelist", prompt="The ship", max_tokens=60, seed=7, stop=stop,
                                          stream=stream, extra_body=OURS)
        chunks = list(reply) if stream else [reply]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_logit_bias_forbids_and_forces(client, engine, capfd):
    ids = engine.encode("The ship")
    first = engine.tokenizer.encode(serving.written(engine, ids, max_new_tokens=1), add_special_tokens=False)[0]
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
    """With top-k 3, the three probabilities add up to one and include the chosen token, for every drafter."""
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


def test_offsets_of_tokens_are_places_in_the_text_whole_and_streamed(client):
    """Tokens that are parts of one character begin where it does."""
    pytest.importorskip("llguidance")
    text = "Ah 🙂🙃, \u00e9l\u00e8ve"
    body = {"model": "novelist", "prompt": "The ship", "max_tokens": 60, "logprobs": 1,
            "extra_body": {"guided_choice": [text]}}
    choice = client.completions.create(**body).choices[0]
    offsets = [offset for chunk in client.completions.create(**body, stream=True)
               if chunk.choices[0].logprobs for offset in chunk.choices[0].logprobs.text_offset]
    assert choice.text == text and choice.logprobs.text_offset == offsets == sorted(offsets)
    for token, offset in zip(choice.logprobs.tokens, offsets, strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)
    assert len(set(offsets)) < len(offsets) and offsets[-1] == len(text)  # of the end


def test_the_sampled_token_is_among_the_likeliest(client):
    for count in (0, 1):
        found = client.completions.create(model="novelist", prompt="The ship", max_tokens=20, seed=7, logprobs=count,
                                          temperature=1.5).choices[0].logprobs
        for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert top[token] == value and len(top) <= count + 1


def test_chat_logprobs_have_bytes_and_alternatives(client):
    reply = client.chat.completions.create(model="novelist", messages=[{"role": "user", "content": "Who?"}], seed=1,
                                           max_tokens=8, logprobs=True, top_logprobs=2, temperature=0)
    content = reply.choices[0].logprobs.content
    assert len(content) == 8
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == reply.choices[0].message.content
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_echo_with_logprobs_has_those_of_the_prompts_as_harnesses_ask_for_them(client, engine):
    """Those of the prompt are the model's own, and those of a new token follow them."""
    prompts = [engine.encode("The ship lay in the harbour, and rotted."), engine.encode("It was")]
    body = {"model": "novelist", "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    reply = client.completions.create(prompt=prompts, **body)
    for choice, ids in zip(reply.choices, prompts, strict=True):
        found, count = choice.logprobs, len(ids)
        told = next(engine.generate(ids, engine.params(max_new_tokens=1), prompt_logprobs=1)).prompt_logprobs
        assert found.token_logprobs[:count] == [each.logprob for each in told]
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        for token, each, top in zip(found.tokens[1:count], told[1:], found.top_logprobs[1:count], strict=True):
            assert top[token] == each.logprob and max(top.values()) == each.top[0][1]
        alone = client.completions.create(prompt=ids, **body | {"echo": False}).choices[0]
        assert found.token_logprobs[count:] == alone.logprobs.token_logprobs
        assert "".join(found.tokens) == choice.text == engine.tokenizer.decode(ids) + alone.text
        assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(count + 1)]
    assert reply.usage.completion_tokens == 2
    text = client.completions.create(prompt=engine.tokenizer.decode(prompts[0]), **body).choices[0]
    assert text.logprobs == reply.choices[0].logprobs


def test_no_new_tokens_leave_the_prompt_alone(client, engine):
    """Texts that begin alike share its rows, but not with one whose prompt has log-probabilities."""
    ids = engine.encode("The sea was calm. " * 60)
    body = {"model": "novelist", "prompt": ids, "max_tokens": 0}
    read = client.completions.create(**body)
    assert (read.choices[0].text, read.choices[0].finish_reason, read.usage.completion_tokens) == ("", "length", 0)
    again = client.completions.create(**body, echo=True)
    assert again.choices[0].text == engine.tokenizer.decode(ids)
    assert again.usage.prompt_tokens_details.cached_tokens > len(ids) // 2
    scored = client.completions.create(**body, echo=True, logprobs=0)
    assert scored.usage.prompt_tokens_details.cached_tokens == 0
    assert len(scored.choices[0].logprobs.tokens) == len(ids) and scored.choices[0].text == again.choices[0].text


# Refusals

BAD = [
    ({"prompt": "a", "frobnicate": 1}, "frobnicate"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "longdraft": {"dry_multiplier": -1}}, "longdraft.dry_multiplier"),
    ({"prompt": "a", "dry_multiplier": 1, "dry_sequence_breakers": ["no token has this text"]},
     "dry_sequence_breakers"),
    ({"prompt": "a", "samplers": ["temperature", "dry", "top_k"]}, "samplers"),
    ({"prompt": "a", "dynatemp_range": 0.5}, "dynatemp_range"),
    ({"prompt": "a", "mirostat_mode": 2}, "mirostat_mode"),
    ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 2}, "top_p"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**4299}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 1000}, "n"),
    ({"prompt": "a", "seed": -1}, "seed"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
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
    ({"prompt": "a", "longdraft": {"drafter": "suffix", "drafter_options": {"budget": 1024}}},
     "longdraft.drafter_options"),
    ({"prompt": "a", "longdraft": {"drafter": "suffix", "drafter_options": {"capacity": 2**28}}},
     "longdraft.drafter_options"),
    ({"prompt": "a", "longdraft": {"min_p": 3}}, "longdraft.min_p"),
    ({"prompt": "a", "longdraft": {"what": 3}}, "longdraft.what"),
    ({"prompt": "a", "longdraft": {"journal": "../../etc"}}, "longdraft.journal"),
    ({"prompt": "a", "longdraft": {"on_loop": "dance"}}, "longdraft.on_loop"),
    ({"prompt": "a", "top_k": 3, "longdraft": {"top_k": 4}}, "top_k"),
    ({"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
]


@pytest.mark.parametrize("body, param", BAD, ids=[json.dumps(body)[:60] for body, _ in BAD])
def test_an_unsupported_or_invalid_parameter_is_refused_by_name(server, body, param):
    reply = httpx.post(server.url + "/v1/completions", content=json.dumps(body),
                       headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    if param:
        assert error["param"] == param, error
    for internal in ("pydantic", "function", "tuple"):
        assert internal not in error["message"]


@pytest.mark.parametrize("body, message", [
    ({"stop": ["a"] * 17}, "stop: must be a text or a list of at most 16 texts, of 1,024 characters each"),
    ({"stop": ""}, "stop is ''; allowed: non-empty texts"),
    ({"stop": ["\ud800"]}, "stop: the text has half of a surrogate pair; send whole characters"),
    ({"max_tokens": -1}, "max_tokens is -1; allowed: 0 or more"),
    ({"eta_cutoff": 0.1}, 'unknown parameter \'eta_cutoff\'; write "longdraft": {"eta_cutoff": ...}'),
    ({"longdraft": {"journal": "../x"}}, "longdraft.journal: must be true, false or an id: "),
], ids=lambda each: json.dumps(each)[:40])
def test_a_refusal_says_what_is_allowed(server, body, message):
    reply = httpx.post(server.url + "/v1/completions", content=json.dumps({"prompt": "a"} | body),
                       headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(message), reply.text


def test_unsupported_parameters_with_neutral_values_are_accepted(post):
    body = {"prompt": "a", "max_tokens": 2, "length_penalty": 1, "best_of": 1, "suffix": None, "tools": []}
    assert post("/v1/completions", body).status_code == 200


def test_a_context_that_is_too_long_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="novelist", prompt="a", max_tokens=200_000)
    assert caught.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_model_without_a_template_cannot_chat(caplog):
    """The error is 400, the connection stays open, and the log has no traceback."""
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


def test_malformed_requests_get_an_error_object(server):
    url = server.url + "/v1/completions"
    for content, status in ((b"{", 400), (b"\xff\xfe", 400), (b"[" * 50_000, 400), (b"null", 400), (b"[]", 400),
                            (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400), (b"", 400),
                            (b'{"prompt": "' + b"a" * 100_001 + b'"}', 413)):
        reply = httpx.post(url, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == status and "error" in reply.json(), (content[:20], reply.text)
    assert httpx.post(url, content=iter([b"a" * 50_000] * 3)).status_code == 413  # of no declared length


def test_an_unknown_route_or_method_is_answered_with_those_that_exist(server):
    for path in ("/nowhere", "/v1/completion", "/v1/" + "x" * 5000):
        reply = httpx.post(server.url + path, json={})
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "not_found")
        assert error["message"].startswith(f"no route '{path[:100]}' exists; routes: /v1/completions, /v1/chat/")
        assert "/health" in error["message"] and len(error["message"]) < 1000
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/health", "GET, HEAD"),
                                  ("PUT", "/v1/longdraft/generations/x", "DELETE, GET, HEAD"),
                                  ("POST", "/", "GET, HEAD")):
        reply = httpx.request(method, server.url + path)
        error = reply.json()["error"]
        assert (reply.status_code, reply.headers["allow"], error["code"]) == (405, allowed, "method_not_allowed")
        assert error["message"] == f"{method} is not allowed for '{path}'; allowed: {allowed}"


def test_head_is_answered_as_get_without_a_body(server):
    for path in ("/health", "/ready", "/v1/models", "/", "/v1/completions", "/nowhere"):
        found, head = httpx.get(server.url + path), httpx.head(server.url + path)
        assert (head.status_code, head.content) == (found.status_code, b"")
        assert head.headers["content-type"] == found.headers["content-type"]


# Files


def test_a_text_is_exported_as_a_book(post):
    body = {"text": "# One\n\nIt was.\n\n# Two\n\nThe end.", "title": "A book", "author": "Ann"}
    reply = post("/v1/longdraft/export", body)
    assert reply.headers["content-type"] == "application/epub+zip"
    with zipfile.ZipFile(io.BytesIO(reply.content)) as archive:
        assert "It was." in archive.read("OEBPS/chapter-0001.xhtml").decode()
        assert "A book" in archive.read("OEBPS/package.opf").decode()
    reply = post("/v1/longdraft/export", body | {"format": "markdown"})
    assert reply.text == "# A book\n\n## One\n\nIt was.\n\n## Two\n\nThe end.\n"
    for change in ({"format": "pdf"}, {"language": "a b"}, {"text": 3}):
        assert post("/v1/longdraft/export", body | change).status_code == 400
    error = post("/v1/longdraft/export", {"text": "# a\n" * 2002}).json()["error"]
    assert error["message"].startswith("the text has more than 2,000 headings") and error["param"] == "text"
