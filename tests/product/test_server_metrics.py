"""What the server tells beside texts: its models, tokenizer, metrics, log lines, progress and details."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime

import httpx
import pytest

from helpers import serving
from longdraft.server.logs import TextFormatter

pytestmark = pytest.mark.full

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
client = pytest.fixture(scope="module")(serving.client)
post = pytest.fixture(serving.poster)


def test_the_list_of_models_has_what_anthropics_clients_read_too(server):
    listed = httpx.get(server.url + "/v1/models").json()
    model, = listed["data"]
    assert (model["type"], model["display_name"], model["max_input_tokens"]) == ("model", "novelist", 131072)
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "novelist", "novelist")


def test_models_tokenize_detokenize_version(client, server, engine, post):
    assert [model.id for model in client.models.list()] == ["novelist"]
    assert client.models.retrieve("novelist").model_extra["max_model_len"] == 131072
    found = post("/tokenize", {"prompt": "It was"}).json()
    assert found == {"tokens": engine.encode("It was"), "count": 2, "max_model_len": 131072}
    assert post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "It was", "content": "It was"}
    assert post("/detokenize", {"tokens": [10**9]}).status_code == 400
    assert post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["count"] > 1
    about = httpx.get(server.url + "/tokenizer_info").json()
    assert about["chat_template"] == serving.TEMPLATE
    assert post("/tokenize", {"prompt": about["eos_token"]}).json()["tokens"] == list(engine.model.config.eos_token_ids)
    assert httpx.get(server.url + "/version").json()["version"]
    assert httpx.get(server.url + "/ready").json()["ready"] is True


def test_metrics_have_vllms_names(server, post):
    body = {"prompt": "a", "max_tokens": 30, "temperature": 0, "longdraft": {"drafter": "magicdec"}}
    assert post("/v1/completions", body).status_code == 200
    text = httpx.get(server.url + "/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
                 "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
                 "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
                 "request_queue_time_seconds_bucket", "spec_decode_num_drafts_total",
                 "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
                 "spec_decode_num_accepted_tokens_per_pos_total"):
        assert f"\nlongdraft:{name}{{" in text, name
    assert 'finished_reason="length",model_name="novelist"' in text


def test_metrics_have_the_time_between_tokens(server, post):
    def series() -> tuple[float, float]:
        text = httpx.get(server.url + "/metrics").text
        found = (re.search(rf"inter_token_latency_seconds_{name}{{.*}} (.*)", text) for name in ("count", "sum"))
        return tuple(float(match[1]) for match in found)

    before, began = series(), time.monotonic()
    reply = post("/v1/completions", {"prompt": "a", "max_tokens": 30, "longdraft": {"drafter": "plain"}}).json()
    count, seconds = (now - then for now, then in zip(series(), before, strict=True))
    decoding = reply["longdraft"]["stats"]["decode_seconds"]
    assert count == 29 and 0.5 * decoding < seconds < time.monotonic() - began


def test_clients_cannot_create_series_or_log_lines(server, caplog):
    httpx.request("BREW" * 9, server.url + "/v1/models")
    httpx.request("PATCH", server.url + "/v1/models")
    text = httpx.get(server.url + "/metrics").text
    assert "BREW" not in text and 'method="other"' in text and 'method="PATCH"' in text
    with caplog.at_level("INFO", logger="longdraft.server"):
        httpx.get(server.url + "/forged%0a2026-01-01T00:00:00.000Z%20info%20request%20status=200")
        serving.wait_for(lambda: any("forged" in TextFormatter().format(entry) for entry in caplog.records))
    (line,) = (found for found in map(TextFormatter().format, caplog.records) if "forged" in found)
    assert "\n" not in line and re.findall(r" status=(\d+)", re.sub(r'"[^"]*"', "", line)) == ["404"]
    assert " client=127.0.0.1" in line, "what is plain is written as it is"


def test_a_stream_has_progress_comments(server):
    body = {"prompt": "It was", "max_tokens": 4000, "seed": 7, "stream": True}  # half a second at the least
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    told = [json.loads(line.removeprefix(": progress ")) for line in reply.text.splitlines() if line[:1] == ":"]
    assert len(told) >= 3 and told[-1]["new_tokens"] > 0 and told[-1]["eta_seconds"] is not None
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"


def test_details_have_each_tokens_drafter_and_the_speed_of_plain_decoding(server, engine):
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
    assert "".join(pieces) == serving.written(engine, "It was", max_new_tokens=60, min_p=0)
    assert details[-1]["progress"]["plain_tokens_per_second"] > 0
    assert details[-1]["stats"]["seed"] == 7
