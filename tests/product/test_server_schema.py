"""Requests generated from the OpenAPI schema, valid and invalid: no 5xx, and errors in one format."""

from __future__ import annotations

from unittest import SkipTest

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from helpers import serving

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
        except (Unsatisfiable, SkipTest):  # a request without parameters cannot be invalid
            assert mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get"


def tried(operation, mode):
    """A property of one route: each answer has a documented status below 500."""
    documented = {int(code) for code in operation.definition.raw["responses"]}

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def sound(case):
        reply = case.call()
        assert reply.status_code < 500, reply.text
        assert reply.status_code in documented, (reply.status_code, reply.text)
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    return sound


def test_the_schema_lists_every_route_and_its_errors(api):
    paths = api.raw_schema["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health",
                 "/ready", "/version", "/metrics", "/v1/longdraft/generations",
                 "/v1/longdraft/generations/{name}/resume"):
        assert path in paths
        for operation in paths[path].values():
            assert "422" not in operation["responses"] and "400" in operation["responses"]
