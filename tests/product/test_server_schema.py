"""Requests from the schema of bodies, valid and invalid: no 5xx, and errors that name the member, in one format."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from unittest import SkipTest

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from helpers import serving
from longdraft.batch.requests import parse
from longdraft.request.openai_body import parse_json
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import names_of
from longdraft.server.schemas import ChatMessage, ChatRequest, CompletionRequest, ContentPart, LongdraftOptions

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis; pip install '.[dev]'")

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    limits = dict(journals=tmp_path_factory.mktemp("journals"), timeout_s=0.5, memory_bytes=60 << 20, max_choices=4)
    with serving.running(serving.load("novelist"), **limits) as server:
        yield schemathesis.openapi.from_url(server.url + "/openapi.json")


MODES = {"valid": schemathesis.GenerationMode.POSITIVE, "invalid": schemathesis.GenerationMode.NEGATIVE}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_no_request_breaks_the_server(api, mode):
    for operation in (found.ok() for found in api.get_all_operations()):
        try:
            tried(operation, mode)()
        except (Unsatisfiable, SkipTest):  # a request without a body cannot be invalid
            assert mode is schemathesis.GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw


def tried(operation, mode):
    """A property of one route: each answer has a documented status below 500."""
    documented = {int(code) for code in operation.definition.raw["responses"]}

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def sound(case):
        reply = case.call()
        is_supported = not operation.definition.raw["summary"].startswith("Not supported")
        assert reply.status_code < 500 if is_supported else reply.status_code == 501, reply.text
        assert reply.status_code in documented, (reply.status_code, reply.text)
        if reply.status_code >= 400:
            if operation.path.startswith(("/api/v1/", "/api/extra/")):  # KoboldCpp's
                assert set(reply.json()["detail"]) == {"msg", "type"}
                return
            error = reply.json()["error"]
            if operation.path.startswith("/api/"):  # Ollama's
                assert isinstance(error, str)
            else:
                is_anthropics = operation.path.startswith("/v1/messages")
                assert set(error) == {"message", "type"} | (set() if is_anthropics else {"param", "code"})

    return sound


def test_the_schema_lists_every_route_and_its_errors(api):
    paths = api.raw_schema["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health",
                 "/ready", "/version", "/metrics", "/v1/longdraft/generations",
                 "/v1/longdraft/generations/{name}/resume"):
        assert path in paths
        for operation in paths[path].values():
            assert "422" not in operation["responses"] and "400" in operation["responses"]


# Every member of a body, with values that it must not have. Its place, and the body around it:

QUICK = {"max_tokens": 1, "seed": 1, "temperature": 0}
COMPLETION = {"prompt": "It was", **QUICK}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], **QUICK}
VALUES = {"a wrong type": '[{"x": [[]]}]', "5,000 digits": "9" * 5000, "-5,000 digits": "-" + "9" * 5000,
          "4,300 digits": "9" * 4300}


def members():
    """Path, body and place."""
    for path, model, body in (("completions", CompletionRequest, COMPLETION), ("chat/completions", ChatRequest, CHAT)):
        for name in model.model_fields:
            yield path, body, (name,)
        for name in LongdraftOptions.model_fields:
            yield path, body, ("longdraft", name)
        yield path, body | {"stream": True}, ("stream_options", "include_usage")
    for name in ChatMessage.model_fields:
        yield path, CHAT, ("messages", 0, name)
    for name in ContentPart.model_fields:
        yield path, CHAT, ("messages", 0, "content", 0, name)


REQUIRED = ("prompt", "messages", "role", "content", "type", "text")


def with_member(body, place, value):
    """The body as JSON, with JSON in the place of a member."""
    body = copy.deepcopy(body)
    at = body
    for step in place[:-1]:
        at = at.setdefault(step, {}) if isinstance(at, dict) else at[step]
    at[place[-1]] = "MEMBER"
    return json.dumps(body).replace('"MEMBER"', value)


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """Status and content of the reply to a body."""
    engine = serving.load(serving.talkative(tmp_path_factory.mktemp("model") / "talker"))
    with serving.running(engine) as server, httpx.Client(base_url=server.url + "/v1/", timeout=60) as client:
        def post(path, body):
            reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
            if reply.status_code == 200 and "event-stream" in reply.headers["content-type"]:
                return 200, {"choices": [each["choices"] for each in serving.events(reply.text)]}
            return reply.status_code, reply.json()

        yield post


@pytest.mark.parametrize("path, body, place", list(members()), ids=lambda each: ".".join(map(str, each)) if isinstance(
    each, tuple) else "")
def test_a_member_may_be_null_if_it_is_optional_and_is_refused_by_name_otherwise(answer, path, body, place):
    param = ".".join(str(step) for step in place if isinstance(step, str))
    for what, value in VALUES.items():
        status, content = answer(path, with_member(body, place, value))
        assert status == 400, (what, content)
        named = content["error"]["param"]
        assert named == place[-1] or f"{named}.".startswith(f"{param}."), (what, content)  # or a member inside of it
    status, content = answer(path, with_member(body, place, "null"))
    if place[-1] in REQUIRED:
        assert status == 400 and content["error"]["param"] == param, content
    else:
        without = {name: value for name, value in body.items() if name != place[-1]}
        if place[-1] not in QUICK:
            assert answer(path, json.dumps(without))[1]["choices"] == content["choices"]
        assert status == 200, content


OBJECTS = [("completions", COMPLETION, ()), ("completions", COMPLETION, ("longdraft",)),
           ("completions", COMPLETION | {"stream": True}, ("stream_options",)), ("chat/completions", CHAT, ()),
           ("chat/completions", CHAT, ("messages", 0)), ("chat/completions", CHAT, ("messages", 0, "content", 0))]


@pytest.mark.parametrize("path, body, place", OBJECTS, ids=lambda each: str(each)[:40])
def test_an_unknown_member_of_any_object_is_refused_by_name(answer, path, body, place):
    status, content = answer(path, with_member(body, (*place, "cache_control"), '{"type": "ephemeral"}'))
    name = ".".join(map(str, (*place, "cache_control")))
    assert status == 400 and content["error"]["code"] == "unknown_parameter"
    assert content["error"]["message"] == f"unknown parameter '{name}'; remove it"


def rows():
    for path, body, place in members():
        if place[-1] in names_of(SamplingParams) or place[0] in ("messages", "prompt", "chat_template_kwargs"):
            yield path, body, place


@pytest.mark.parametrize("path, body, place", list(rows()), ids=lambda each: ".".join(map(str, each)) if isinstance(
    each, tuple) else "")
def test_a_row_of_a_batch_takes_the_same_nulls_and_names_the_same_members(path, body, place):
    def parsed(body):
        return parse({"custom_id": "a", "url": f"/v1/{path}", "body": parse_json(body)}, 1, "novelist")

    for value in VALUES.values():
        if place[-1] not in ("name", "reasoning_content"):  # of messages, which the template reads
            request = parsed(with_member(body, place, value))
            assert place[-1] in request.problem or _spelled(place[-1]) in request.problem or place[0] in request.problem
    request = parsed(with_member(body, place, "null"))
    without = {name: value for name, value in body.items() if name != place[-1]}
    is_required = place[-1] in REQUIRED
    assert bool(request.problem) == is_required, request.problem
    if not is_required:
        without = parsed(json.dumps(without))
        assert replace(request, prompt=_as_the_template_reads(request.prompt)) == replace(
            without, prompt=_as_the_template_reads(without.prompt))


def _as_the_template_reads(prompt):
    """The prompt without null members of messages, which `ChatTemplate.render` leaves out."""
    return prompt if isinstance(prompt, str) else [
        {name: value for name, value in message.items() if value is not None} for message in prompt]


def _spelled(name):
    return names_of(SamplingParams)[name].name if name in names_of(SamplingParams) else name
