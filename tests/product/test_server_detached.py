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


def post(server, **changes: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/chat/completions", json=BODY | changes, headers=key(), timeout=60)


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


def test_a_whole_reply_is_detached_too_and_a_text_can_be_cancelled(server, whole):
    assert post(server, stream=False).json()["choices"][0]["message"]["content"] == content(whole)
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=BODY | {"max_tokens": 3000},
                      headers=key(), timeout=60) as reply:
        name = reply.headers["x-generation-id"]
        cancelled = httpx.post(f"{server.url}/v1/responses/{name}/cancel", json={}, headers=key())
        assert cancelled.json()["status"] == "cancelled" and '"cancelled"' in reply.read().decode()


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
