"""The server's sampling settings: samplers by the names that clients send, banned phrases, structured output."""

from __future__ import annotations

import re

import pytest

from helpers import serving
from longdraft.sampling.grammar import GrammarRules

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)
post = pytest.fixture(serving.poster)


SAMPLERS = {"presence_penalty": 0.4, "frequency_penalty": 0.1, "dry_multiplier": 0.8,
            "dry_sequence_breakers": '["\\n"]',
            "dry_range": 512, "typical": 0.95, "nsigma": 2.0, "xtc_probability": 0.5, "repetition_penalty_range": 64,
            "samplers": ["penalties", "dry", "top_n_sigma", "typ_p", "xtc", "temperature"]}


def test_samplers_are_set_by_the_names_that_clients_send(post):
    """At the top level, under `longdraft`, and as the Python API does."""
    body = {"prompt": "It was", "max_tokens": 24, "seed": 5, "temperature": 0.9}
    top, inner = post("/v1/completions", body | SAMPLERS), {**SAMPLERS}
    outer = {name: inner.pop(name) for name in ("presence_penalty", "frequency_penalty")}
    nested = post("/v1/completions", body | outer | {"longdraft": inner})
    without = post("/v1/completions", body)
    texts = [reply.json()["choices"][0]["text"] for reply in (top, nested, without)]
    assert texts[0] == texts[1] != texts[2]
    names = {"samplers": None, "temperature_last": True, "typical": None, "typical_p": 0.95, "dry_range": None,
             "dry_penalty_last_n": 512, "nsigma": None, "top_n_sigma": 2.0, "dry_sequence_breakers": ["\n"]}
    assert post("/v1/completions", body | SAMPLERS | names).json()["choices"][0]["text"] == texts[0]


@pytest.mark.parametrize("path, structure, expression", [
    ("/v1/completions", {"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
    ("/v1/completions", {"longdraft": {"structured_outputs": {"choice": ["yes", "no"]}}}, "yes|no"),
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "strict": True, "schema": {"type": "integer", "minimum": 10, "maximum": 99}}}}, "[0-9]{2}"),
    ("/v1/completions", {"grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
])
def test_a_text_matches_the_structure_that_a_request_asks_for(post, path, structure, expression):
    pytest.importorskip("llguidance")
    reply = post(path, {"prompt": "It was", "max_tokens": 50, "seed": 5} | structure).json()["choices"][0]
    assert re.fullmatch(expression, reply["text"]) and reply["finish_reason"] == "stop"


def test_a_schema_that_cannot_be_used_is_refused_by_name(post):
    pytest.importorskip("llguidance")
    reply = post("/v1/completions", {"prompt": "a", "guided_json": {"type": "nonsense"}})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "guided_json" and "Invalid type: nonsense" in error["message"]


def test_banned_phrases_are_not_in_the_reply(post):
    body = {"prompt": "It was", "max_tokens": 60, "seed": 5, "banned_strings": ["the", " of"]}
    reply = post("/v1/completions", body).json()
    assert " the" not in reply["choices"][0]["text"].lower()
    assert reply["usage"]["completion_tokens"] == 60


def test_a_grammar_is_compiled_once_for_a_request(post, monkeypatch):
    pytest.importorskip("llguidance")
    compiled, compile_rules = [], GrammarRules.compile

    def count(*arguments):
        compiled.append(arguments)
        return compile_rules(*arguments)

    monkeypatch.setattr(GrammarRules, "compile", count)
    body = {"prompt": "It was", "max_tokens": 9, "n": 2, "guided_regex": "[d-f]{5}"}
    for _ in range(2):
        assert re.fullmatch("[d-f]{5}", post("/v1/completions", body).json()["choices"][1]["text"])
    assert len(compiled) == 1
    assert post("/v1/completions", {**body, "guided_regex": "[d-f]{4}"}).status_code == 200 and len(compiled) == 2
