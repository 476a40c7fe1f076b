"""Texts that outlive their clients: read on from anywhere, by several readers, in another format, with their key."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest

from helpers import serving
from helpers.processes import wait_for

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "seed": 3, "stream": True,
                        "longdraft": {"detach": True, "min_p": 0.1}}

engine = pytest.fixture(scope="module")(serving.talker)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    with serving.running(engine, api_keys=("one", "two"), journals=tmp_path_factory.mktemp("journals")) as found:
        yield found


def key(name: str = "one", **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}", **more}


def post(server, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/chat/completions", json=BODY | changes, headers=key(**headers or {}),
                      timeout=60)


def ids(body: str) -> list[str]:
    return re.findall(r"^id: (.*)$", body, re.MULTILINE)


def content(body: str) -> str:
    choices = [choice for chunk in serving.events(body) for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def read_on(server, name: str, query: str = "", **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}/v1/longdraft/generations/{name}/events{query}", headers=key(**headers), timeout=60)


@pytest.fixture(scope="module")
def whole(server) -> str:
    return post(server).text


def test_a_reader_who_left_at_any_event_reads_the_rest(server, whole):
    plain = post(server, longdraft={"min_p": 0.1})
    assert content(whole) == content(plain.text)
    name = ids(whole)[0].partition(":")[0]
    for seen in range(0, 61, 7):
        rest = read_on(server, name, f"?from={seen}").text
        shown = content(rest)
        assert content(whole).endswith(shown) and serving.events(rest)[-1]["choices"][0]["finish_reason"] == "length"
        assert shown == content(whole) if seen == 0 else len(shown) < len(content(whole))
    pieces = re.split(r"\n\n", whole)
    for position in range(1, len(pieces) - 2, 5):
        last = ids("\n".join(pieces[:position]))[-1]
        before = content("\n\n".join([*pieces[:position], "data: [DONE]"]))
        assert before + content(read_on(server, name, **{"Last-Event-ID": last}).text) == content(whole)


def test_a_text_goes_on_without_its_client_and_several_read_it(server, whole):
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=BODY | {"max_tokens": 300},
                      headers=key(**{"X-Conversation-Id": "talk"}), timeout=60) as reply:
        next(reply.iter_lines())
    texts = [content(read_on(server, "talk").text) for _ in range(3)]
    assert texts[0] == texts[1] == texts[2] == content(post(server, max_tokens=300).text)
    assert texts[0].startswith(content(whole))


def test_another_format_has_the_same_text(server, whole):
    name = ids(whole)[0].partition(":")[0]
    reply = read_on(server, name, "?door=messages").text
    lines = [json.loads(line.removeprefix("data: ")) for line in reply.splitlines() if line.startswith("data: ")]
    assert "".join(each["delta"]["text"] for each in lines if each["type"] == "content_block_delta") == content(whole)


def test_another_key_and_wrong_requests_read_nothing(server, whole):
    name = ids(whole)[0].partition(":")[0]
    url = f"{server.url}/v1/longdraft/generations/{name}/events"
    assert httpx.get(url, headers=key("two")).status_code == 404
    assert read_on(server, "nothing").status_code == 404
    for query in ("?from=x", "?from=-1", "?door=window"):
        assert read_on(server, name, query).status_code == 400
    assert post(server, n=2).status_code == 400


def test_no_other_key_takes_the_name_of_a_conversation_or_an_id_away(server, whole):
    mine = ids(whole)[0].partition(":")[0]

    def begin(name: str, conversation: str) -> None:
        httpx.post(server.url + "/v1/chat/completions", json=BODY | {"max_tokens": 5}, timeout=60,
                   headers=key(name, **{"X-Conversation-Id": conversation}))

    begin("one", "ours")
    of_conversation = content(read_on(server, "ours").text)
    for conversation in ("ours", mine):
        begin("two", conversation)
    assert content(read_on(server, "ours").text) == of_conversation
    assert content(read_on(server, mine).text) == content(whole)


def test_conversations_have_names_of_any_length_and_with_slashes(server):
    for path in ("/v1/longdraft/generations/{}/events?from=0", "/v1/responses/{}?stream=true"):
        assert "no detached text 'org/model'" in httpx.get(server.url + path.format("org/model"), headers=key()).text
    names = ("chat::org/model", "x" * 200 + "a", "x" * 200 + "b")
    texts = [content(post(server, {"X-Conversation-Id": name}, seed=seed, max_tokens=20).text)
             for seed, name in enumerate(names)]
    assert [content(read_on(server, name).text) for name in names] == texts and len(set(texts)) == 3


def test_a_reader_gets_log_probabilities_in_small_chunks(server):
    """Encoding those of hundreds of tokens at once would keep the server from other requests."""
    body = {"max_tokens": 300, "logprobs": True, "top_logprobs": 20, "longdraft": {"detach": True, "drafter": "plain"}}
    whole = post(server, stream=False, **body)
    name = whole.headers["x-generation-id"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in serving.events(read_on(server, name).text)]
    found = [chunk["content"] for chunk in chunks if chunk]
    assert [each for some in found for each in some] == whole.json()["choices"][0]["logprobs"]["content"]
    assert max(map(len, found)) <= 16


def test_a_conversation_is_cancelled_by_its_name(server):
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=BODY | {"max_tokens": 3000},
                      headers=key(**{"X-Conversation-Id": "user:1/long"}), timeout=60) as reply:
        url = f"{server.url}/v1/longdraft/generations/user:1/long/cancel"
        assert httpx.post(url, json={}, headers=key("two")).status_code == 404
        assert httpx.post(url, json={}, headers=key()).status_code == 200
        assert '"cancelled"' in reply.read().decode()


def test_a_whole_reply_is_detached_too_and_a_text_can_be_cancelled(server, whole):
    assert post(server, stream=False).json()["choices"][0]["message"]["content"] == content(whole)
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=BODY | {"max_tokens": 3000},
                      headers=key(), timeout=60) as reply:
        name = reply.headers["x-generation-id"]
        cancelled = httpx.post(f"{server.url}/v1/responses/{name}/cancel", json={}, headers=key())
        assert cancelled.json()["status"] == "cancelled" and '"cancelled"' in reply.read().decode()


def test_a_stream_that_is_no_stream_of_events_is_not_detached(server):
    body = {"model": "novelist", "messages": BODY["messages"], "options": {"num_predict": 3}}
    replies = [httpx.post(server.url + "/api/chat", json=body | {"stream": is_stream}, timeout=60,
                          headers=key(**{"X-Conversation-Id": "lines"})) for is_stream in (True, False)]
    assert [reply.status_code for reply in replies] == [400, 200]
    assert read_on(server, "lines", "?door=chat").status_code == 200 and server.scheduler.num_jobs == 0


# OpenAI's responses in the background

RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 60, "seed": 3, "longdraft": {"min_p": 0.1},
                            "background": True}


def begin(server, **changes: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/responses", json=RESPONSE | changes, headers=key(), timeout=60)


def get(server, name: str, query: str = "", by: str = "one") -> httpx.Response:
    return httpx.get(f"{server.url}/v1/responses/{name}{query}", headers=key(by), timeout=60)


def contents(body: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


def output(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_response_in_the_background_is_read_while_it_is_written_and_afterwards(server, whole):
    client = serving.client(server).with_options(api_key="one")
    begun = client.responses.create(model="novelist", background=True, extra_body=RESPONSE)
    assert begun.status in ("queued", "in_progress") and begun.background and begun.usage is None

    def is_complete() -> bool:
        so_far = client.responses.retrieve(begun.id)
        assert content(whole).startswith(so_far.output_text)
        return so_far.status == "incomplete"

    wait_for(is_complete, 60)
    assert client.responses.retrieve(begun.id).output_text == content(whole)
    kinds = [event.type for event in client.responses.retrieve(begun.id, stream=True, starting_after=1)]
    assert kinds[0] == "response.output_item.added" and kinds[-1] == "response.incomplete"


def test_the_events_of_a_response_go_on_behind_any_of_them(server, whole):
    uncut = contents(begin(server, stream=True).text)
    name = uncut[0]["response"]["id"]
    assert [each["sequence_number"] for each in uncut] == list(range(len(uncut)))
    assert output(uncut[-1]["response"]) == content(whole)
    assert contents(get(server, name, "?stream=true").text) == uncut
    for seen in range(0, len(uncut) - 1, 5):
        assert contents(get(server, name, f"?stream=true&starting_after={seen}").text) == uncut[seen + 1 :]


def test_a_running_response_is_read_on_and_cancelled(server):
    with httpx.stream("POST", server.url + "/v1/responses", json=RESPONSE | {"max_output_tokens": 3000, "stream": True},
                      headers=key(), timeout=60) as reply:
        lines = reply.iter_lines()
        first = [json.loads(line.removeprefix("data: ")) for line in (next(lines) for _ in range(60))
                 if line.startswith("data: ")]
    name, seen = first[0]["response"]["id"], len(first) - 1
    assert httpx.post(f"{server.url}/v1/responses/{name}/cancel", headers=key()).json()["status"] == "cancelled"
    rest = contents(get(server, name, f"?stream=true&starting_after={seen}").text)
    assert [each["sequence_number"] for each in rest] == list(range(seen + 1, seen + 1 + len(rest)))
    assert rest[-1]["type"] == "response.failed" and rest[-1]["response"]["status"] == "cancelled"
    assert contents(get(server, name, "?stream=true").text)[seen + 1 :] == rest
    assert get(server, name).json()["status"] == "cancelled"


def test_only_the_key_of_a_response_reads_it_and_others_are_unknown(server, whole):
    name = begin(server, max_output_tokens=5).json()["id"]
    chat_name = ids(whole)[0].partition(":")[0]
    unknown = (get(server, name, by="two"), get(server, "resp_1"), get(server, chat_name),
               httpx.post(f"{server.url}/v1/responses/{name}/cancel", headers=key("two")))
    assert [reply.status_code for reply in unknown] == [404] * 4
    assert get(server, name, "?stream=true&starting_after=x").status_code == 400
    plain = begin(server, background=False, max_output_tokens=5).json()
    assert get(server, plain["id"]).status_code == 404


def test_a_text_without_readers_ends_with_a_journal(engine, tmp_path):
    with serving.running(engine, detach_s=0.3, journals=tmp_path) as found:
        with httpx.stream("POST", found.url + "/v1/chat/completions", json=BODY | {"max_tokens": 4000},
                          timeout=60) as reply:
            name = reply.headers["x-generation-id"]
            next(reply.iter_lines())
        wait_for(lambda: not found.scheduler.num_jobs, 60)
        assert (tmp_path / name).is_dir()
        deadline = time.monotonic() + 30
        while found.app.service.detached.find(name, None) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found.app.service.detached.find(name, None) is None
