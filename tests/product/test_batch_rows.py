"""Rows of a batch job, valid or not: each becomes one valid record."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longdraft
from helpers.jobs import ROWS, put, records, write_row
from helpers.thinkers import make_thinker
from longdraft.batch import job_files, work_folder
from longdraft.batch.job_files import _line
from longdraft.batch.local import in_process
from longdraft.batch.requests import error_record, key_of, parse, text_record
from longdraft.batch.run import run
from longdraft.batch.worker import BatchJob, BatchWorker
from longdraft.text.chat_template import ChatTemplate
from longdraft.text.tools.reader import Call, WholeAnswer


@pytest.mark.parametrize("row, complaint", [
    ("{", "not valid JSON"),
    ("[1]", "the line is no JSON object; a row is one, such as"),
    ({"prompt": "x"}, "the row has no id; give it"),
    ({"id": "", "prompt": "x"}, "id is ''"),
    ({"id": "line 3", "prompt": "x"}, "except 'line N'"),
    ({"id": "a"}, "both prompt and messages, or neither"),
    ({"id": "a", "prompt": ""}, "prompt is ''"),
    ({"id": "a", "prompt": ["x", "y"]}, "one text, or token ids"),
    ({"id": "a", "prompt": "x", "temprature": 1}, "unknown sampling setting 'temprature'"),
    ({"id": "a", "prompt": "x", "top_p": 7}, "top_p is 7"),
    ({"id": "a", "prompt": "x", "stop": 3}, "of the wrong kind"),
    ({"id": "a", "prompt": "x", "logit_bias": {"the": 3}}, "of the wrong kind"),
    ({"id": "a", "prompt": "x", "logit_bias": {"7": 300}}, "logit_bias is 300"),
    ({"id": "a", "messages": "x"}, "a list of objects with role and content"),
    ({"id": "a", "messages": [{"role": "user", "content": "x"}], "chat_options": 3}, "chat_options is '3'"),
    ({"id": "a", "messages": [{"role": "user", "content": None}]}, "content of a message is null or missing; allowed"),
    ({"id": "a", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a list of parts with the type"),
    ({"id": "a", "prompt": "x", "top_k": 10**4000}, "top_k is inf"),
    ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "POST /v1/chat/completions or /v1/completions"),
    ({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}, "the request is GET"),
    ({"custom_id": "a", "prompt": "x"}, "the row has no url; allowed: /v1/chat/completions or /v1/completions, or"),
    ({"custom_id": "a", "url": "/v1/completions"}, "body is missing or no JSON object"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"messages": []}}, "has prompt, and no messages"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "model": "other"}}, "--served-model-name"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}, "n is '2'; supported: 1"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "tools": [{}]}}, "tools"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "prediction": {}}}, "leaving it out"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "longdraft": {"journal": True}}},
     "'journal'"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "longdraft": 3}}, "longdraft is '3'"),
    ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "min_p": 0.1, "longdraft": {"min_p": 0.2}}},
     "min_p is 0.1 and longdraft.min_p is 0.2; give one of them"),
])
def test_the_problem_of_an_invalid_row_is_reported(tmp_path, row, complaint):
    rows = put(tmp_path / "in.jsonl", [row])
    ((line, read),) = job_files.read_rows(rows)
    assert line == 1 == job_files.count_rows(rows) and complaint in parse(read, line, "tiny").problem


@pytest.mark.parametrize("wrong", [{"url": "/v1/responses"}, {"method": "GET", "url": "/v1/completions"}, {}])
def test_the_error_record_of_an_openai_row_has_its_id(wrong):
    request = parse({"custom_id": "a", "body": {"input": "x"}} | wrong, 1, "tiny")
    assert error_record(request, "invalid_request", request.problem)["custom_id"] == "a"


def test_an_openai_body_is_parsed_like_a_server_request():
    body = {"prompt": "x", "max_tokens": 7, "stream": False, "tools": [], "verbosity": None, "user": "me",
            "top_k": -1, "cache_salt": "s", "longdraft": {"min_p": 0.1, "penalty_window": 64}}
    task = parse({"custom_id": "a", "url": "/v1/completions", "body": body}, 1, "tiny")
    assert not task.problem
    assert task.settings == {"max_new_tokens": 7, "min_p": 0.1, "penalty_window": 64, "top_k": 0}


def test_a_thought_that_is_sent_back_has_the_name_that_templates_read():
    answer = {"role": "assistant", "content": "Hi", "reasoning": "They greet."}
    body = {"messages": [{"role": "user", "content": "Hello"}, answer]}
    task = parse({"custom_id": "a", "url": "/v1/chat/completions", "body": body}, 1, "tiny")
    template = ChatTemplate("{% for message in messages %}[{{ message.reasoning_content }}]{% endfor %}", {})
    assert template.render(task.prompt) == "[][They greet.]"


HALF = "\ud800"  # a lone surrogate: JSON can escape it, UTF-8 cannot encode it
VALUES = (st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5)
          | st.sampled_from([10**400, -(2**70), HALF, "It was", 2**32, 0.5]))
NAMES = [*(field.name for field in fields(longdraft.SamplingParams)), "max_tokens", "do_sample", "n", "metadata",
         "chat_options", "chat_template_kwargs", "longdraft", "model", "method", "temprature", HALF]
ANYTHING = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from([*NAMES, "id", "prompt", "messages", "body", "role"]), inner, max_size=3), max_leaves=6)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.text(max_size=3)}, optional={"content": VALUES}), max_size=2)
OPTIONS = st.dictionaries(st.sampled_from(["messages", "self", "excited"]), VALUES, max_size=1)
TEXTS = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=2)
ASKED = st.one_of(TEXTS, *(st.builds(dict.__or__, TEXTS, st.fixed_dictionaries(each)) for each in (
    {"prompt": ANYTHING}, {"prompt": VALUES}, {"messages": ANYTHING},
    {"messages": MESSAGES, "chat_options": OPTIONS}, {"messages": MESSAGES, "chat_template_kwargs": OPTIONS})))
IDS = st.sampled_from(["a", "a", HALF, "", 7, None, 1.5])
ROW = ANYTHING | st.builds(lambda asked, key: {**asked, "id": key}, ASKED, IDS) | st.fixed_dictionaries(
    {"custom_id": IDS, "url": st.sampled_from(["/v1/completions", "/v1/chat/completions"]), "body": ASKED | ANYTHING})


@pytest.fixture(scope="module")
def writer(chatty, tmp_path_factory) -> BatchWorker:
    """A worker whose texts have two tokens."""
    job = BatchJob(tmp_path_factory.mktemp("one") / "work", {"model": str(chatty), "drafter": "suffix", "threads": 1},
              {"on_loop": "off", "max_new_tokens": 2}, 0, "tiny", fsync="never")
    return BatchWorker(job)


@pytest.mark.full
@given(row=ROW)
@settings(max_examples=250)
def test_any_row_becomes_a_valid_record(writer, row):
    task = parse(row if isinstance(row, dict) else "no row", 1, "tiny")
    assert task.key and (task.problem or task.prompt)
    record = list(write_row(writer, task))[-1].record
    work_folder.forget(writer._job.work_folder, task.key)
    line = _line(record)
    assert key_of(record) == task.key and json.loads(line.decode()) == record and b"NaN" not in line


@pytest.mark.parametrize("output", ["out.jsonl", pytest.param("out.parquet", marks=pytest.mark.full)])
def test_rows_that_json_or_utf8_cannot_represent_become_records(job, tmp_path, output):
    deep: list = []
    for _ in range(300):
        deep = [deep]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    bad = [{"id": "hot", "prompt": "x", "temperature": 10**400, "metadata": {"page": HALF}},
           {"id": "half", "prompt": HALF}, {"id": HALF, "prompt": "x"}, {"id": "said", "messages": [{"role": HALF}]},
           {"id": "twice", **chat, "chat_options": {"messages": 1}}, {"id": "me", **chat, "chat_options": {"self": 1}},
           {"id": "deep", "prompt": "x", "metadata": deep}, {"id": "name", "prompt": "x", HALF: 1},
           {"custom_id": "method", "method": HALF, "url": "/v1/completions", "body": {"prompt": "x"}}]
    rows = put(tmp_path / "in.jsonl", [ROWS[0], *bad, {**ROWS[1], "metadata": HALF}])
    totals = run(rows, tmp_path / output, job, in_process)
    assert (totals.done, totals.failed) == (11, 9)
    if output == "out.jsonl":
        found = {record.get("id"): record for record in records(tmp_path / output)}
        assert found["row 1"]["metadata"] == HALF and found["hot"]["metadata"] == {"page": HALF}
        assert "id is not UTF-8 text" in found["line 4"]["error"]["message"]
        assert "more than 64 deep" in found["deep"]["error"]["message"]
        assert "no variable 'messages'" in found["twice"]["error"]["message"]


def test_an_invalid_row_becomes_an_error_record_and_valid_rows_are_written(job, tmp_path):
    rows = put(tmp_path / "in.jsonl", [ROWS[0], "{", {"id": "long", "prompt": "x", "max_new_tokens": 10**6},
                                       {"id": "far", "prompt": [10**6]}, "", ROWS[0], ROWS[1]])
    totals = run(rows, tmp_path / "out.jsonl", job, in_process)
    found = {record["id"]: record for record in records(tmp_path / "out.jsonl")}
    assert set(found) == {"row 0", "row 1", "line 2", "long", "far", "line 6"} and totals.failed == 4
    assert "context limit" in found["long"]["error"]["message"] and found["far"]["error"]["code"] == "invalid_request"
    assert "is that of line 1 too" in found["line 6"]["error"]["message"]
    assert not job.work_folder.exists()


def test_a_stop_text_in_a_thought_that_is_not_searched_ends_no_row(tmp_path):
    """The record has the whole thought, and the answer behind it."""
    folder = make_thinker(tmp_path / "model")
    engine = longdraft.load(str(folder), drafter="plain", threads=1)
    prompt, settings = engine.chat("Hello"), {"thinking_budget": 20, "ignore_eos": True, "stop_in_thinking": False}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "seed": 5, "longdraft": settings}
    params = engine.params(max_new_tokens=60, seed=5, **settings)
    text = "".join(event.text for event in engine.generate(prompt, engine.loaded.completed(params, prompt)))
    thought, _, answer = text.partition("</think>")
    stop = thought[3:5]
    assert stop not in answer
    rows = put(tmp_path / "in.jsonl", [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "stop": [stop]}}])
    job = BatchJob(tmp_path / "work", {"model": str(folder), "drafter": "plain", "threads": 1}, {}, 0, "thinker")
    assert run(rows, tmp_path / "out.jsonl", job, in_process).failed == 0
    (record,) = records(tmp_path / "out.jsonl")
    choice = record["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"].startswith(thought.rstrip())
    assert choice["message"]["content"] == answer.lstrip()


@pytest.mark.parametrize("end, arguments, reason", [
    ("loop", [], "loop"), ("eos", [], "stop"), ("eos", ['{"a": 1}'], "tool_calls"),
    ("stop", ['{"a": 1}', '{"a": '], "stop"), ("length", ['{"a": 1}'], "length")])
def test_a_record_says_why_its_text_ended_as_the_server_does(end, arguments, reason):
    """A call that a stop text cuts is none."""
    request = parse({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}, 1, "tiny")
    stats = {"finish_reason": end, "seed": 1, "sha256_tokens": "", "prompt_tokens": 1, "new_tokens": 9}
    calls = [Call("c", "f", each) for each in arguments]
    record = text_record(request, "la la", WholeAnswer("", "la la", calls), stats, "tiny", "fp")
    assert record["response"]["body"]["choices"][0]["finish_reason"] == reason
