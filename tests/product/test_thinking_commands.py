"""Rules for thoughts where users set them: the server and its route "answer", the command line, rows of a batch."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

import longdraft
from helpers import serving
from helpers.thinkers import make_thinker
from longdraft.__main__ import run
from longdraft.batch import requests
from longdraft.journal.format import read_journal
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import settings_of

SETTINGS = dict(seed=5, temperature=1.0, max_tokens=60)
EXTENSION = dict(min_p=0.02, ignore_eos=True)
OPENS_THOUGHT = "{{ messages[-1].content }}\n<think>\n{# the answer follows </think> #}"  # a chat template


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> longdraft.Engine:
    return longdraft.load(str(folder), drafter="suffix", threads=1)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    with serving.running(engine, journals=tmp_path_factory.mktemp("journals")) as running:
        yield running


def post(server, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def ask(server, status: int = 200, **body) -> dict:
    body = SETTINGS | {"messages": [{"role": "user", "content": "Hi"}], "longdraft": EXTENSION} | body
    reply = post(server, "/v1/chat/completions", body)
    assert reply.status_code == status, reply.text
    return reply.json()


def tokens_of(engine, **changes) -> list[int]:
    params = SamplingParams.from_names(SETTINGS | EXTENSION | changes)
    generation = engine.generate(engine.chat("Hi"), params)
    list(generation)
    return generation.tokens.tolist()


ALIASES = settings_of(SamplingParams)["thinking_budget"].names


@pytest.mark.parametrize("name", [*ALIASES, "longdraft", "reasoning", "thinking"])
def test_a_budget_has_the_names_of_other_servers(server, name):
    given = {"longdraft": {"longdraft": EXTENSION | {"thinking_budget": 12}}, "reasoning": {"reasoning": {
        "max_tokens": 12}}, "thinking": {"thinking": {"type": "enabled", "budget_tokens": 12}}}.get(name, {name: 12})
    reply = ask(server, **given)
    thinking = reply["longdraft"]["stats"]["thinking"]
    assert thinking["closed_by"] == "budget" and 11 <= thinking["tokens"] <= 14
    assert reply["longdraft"]["stats"]["sampling"]["thinking_budget"] == 12
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == thinking["tokens"] + thinking["forced"]
    assert reply["choices"][0]["message"]["reasoning_content"]


def test_several_texts_of_a_request_are_under_the_same_rules(server):
    reply = ask(server, n=2, thinking_budget=12)
    closed = [choice["longdraft"]["stats"]["thinking"]["closed_by"] for choice in reply["choices"]]
    assert closed == ["budget", "budget"]
    alone = ask(server, thinking_budget=12, seed=6)
    assert reply["choices"][1]["message"] == alone["choices"][0]["message"]


@pytest.mark.parametrize("body, param, words", [
    ({"thinking_budget": -2}, "thinking_budget", "-1 or more"),
    ({"max_thinking_tokens": "many"}, "max_thinking_tokens", "integer"),
    ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget", "contradicts"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "minimal"),
    ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning", "give one of"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning", "low, high; give one of"),
    ({"thinking": {"type": "much"}}, "thinking", "enabled, disabled or adaptive"),
    ({"thinking": {"budget_tokens": "5"}}, "thinking_budget", "whole number"),
    ({"thinking": {"budget_tokens": 5}, "reasoning": {"max_tokens": 6}}, "thinking_budget", "5, 6; give one"),
    ({"longdraft": {"thinking": {"seed": 1}}}, "longdraft.thinking", "temperature, top_k"),
    ({"longdraft": {"thinking": {"temperature": -1}}}, None, "temperature is -1"),
    ({"thinking_budget": 9, "longdraft": {"min_thinking_tokens": 10}}, "longdraft.min_thinking_tokens", "at most"),
    ({"longdraft": {"thinking_message": "</think>"}}, None, ""),
    ({"thinking_budget": 9, "thinking_message": "</think>"}, "thinking_message", "marker"),
])
def test_wrong_rules_are_refused_by_name(server, body, param, words):
    if param is None and not words:  # a message without a rule is never written
        ask(server, **body)
        return
    error = ask(server, 400, **body)["error"]
    assert words in error["message"] and (param is None or error["param"] == param)


def test_an_effort_is_for_chats(server):
    reply = post(server, "/v1/completions", SETTINGS | {"prompt": "Hi", "reasoning_effort": "low"})
    assert reply.status_code == 400 and "chats only" in reply.json()["error"]["message"]
    found = ask(server, reasoning_effort="low")["longdraft"]["stats"]
    assert found["sampling"]["thinking_budget"] == 12 and found["thinking"]["closed_by"] == "budget"
    for off in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"reasoning": {"enabled": False}}):
        assert "reasoning_content" not in ask(server, **off)["choices"][0]["message"], off


def test_the_list_of_texts_shows_the_question_of_a_chat(server):
    for name, thinking in (("on", {"type": "enabled"}), ("off", {"type": "disabled"})):
        ask(server, longdraft=EXTENSION | {"journal": name}, thinking=thinking)
    about = httpx.get(f"{server.url}/v1/longdraft/generations").json()["data"]
    assert {each["id"]: each["title"] for each in about if each["id"] in ("on", "off")} == {"on": "Hi", "off": "Hi"}
    texts = (httpx.get(f"{server.url}/v1/longdraft/generations/{name}").json() for name in ("on", "off"))
    assert [text["message"] for text in texts] == ["Hi", "Hi"], "what the page asks again"


def through(server, path: str, status: int = 200, **body) -> httpx.Response:
    """The reply of another API to the request of `ask`."""
    turns = {"messages": [{"role": "user", "content": "Hi"}]}
    common = {"model": "novelist", "longdraft": EXTENSION}
    settings = {"/v1/messages": SETTINGS | turns, "/api/chat": turns | {"stream": False, "options": {
        "seed": 5, "temperature": 1.0, "num_predict": 60}}, "/v1/responses": {
            "input": "Hi", "max_output_tokens": 60, "seed": 5, "temperature": 1.0}}
    reply = post(server, path, common | settings[path] | body)
    assert reply.status_code == status, reply.text
    return reply


def thought_of(reply: dict) -> tuple[str, str]:
    """The thought and the answer of a reply of any API."""
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"] or ""
    if "message" in reply:
        return reply["message"].get("thinking", ""), reply["message"]["content"]
    if "output" in reply:
        kinds = {item["type"]: item["content"][0]["text"] for item in reply["output"]}
        return kinds.get("reasoning", ""), kinds.get("message", "")
    blocks = {block["type"]: block for block in reply["content"]}
    return blocks.get("thinking", {}).get("thinking", ""), blocks.get("text", {}).get("text", "")


@pytest.mark.parametrize("path, body, rule", [
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 12}}, {"thinking_budget": 12}),
    ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
     {"reasoning_effort": "low"}),
    ("/v1/messages", {"thinking": {"type": "adaptive"}}, {}),
    ("/v1/messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
     {"reasoning_effort": "none"}),
    ("/v1/messages", {"thinking": {"type": "enabled", "temperature": 0.2}}, {"thinking": {"temperature": 0.2}}),
    ("/v1/messages", {}, {"reasoning_effort": "none"}),
    ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ("/v1/responses", {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
    ("/v1/responses", {"reasoning": {"max_tokens": 12}}, {"thinking_budget": 12}),
    ("/v1/responses", {}, {}),
    ("/api/chat", {"think": "low"}, {"reasoning_effort": "low"}),
    ("/api/chat", {"think": True}, {}), ("/api/chat", {"think": False}, {"reasoning_effort": "none"}),
])
def test_every_api_has_the_rules_of_the_chat(server, path, body, rule):
    chat = thought_of(ask(server, **rule))
    assert thought_of(through(server, path, **body).json()) == chat and bool(chat[0]) == (
        rule.get("reasoning_effort") != "none")


@pytest.mark.parametrize("path, body, words", [
    ("/v1/messages", {"output_config": {"effort": "much"}}, "output_config.effort is 'much'; allowed: none"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "is 1.5; allowed: a whole number"),
    ("/v1/messages", {"thinking": {"budget_tokens": 5}}, "thinking.type is None; allowed: enabled"),
    ("/v1/messages", {"thinking": {"type": "enabled", "mood": 1}}, "temperature, top_k"),
    ("/v1/responses", {"reasoning": {"effort": ["low"]}}, "reasoning.effort"),
    ("/v1/responses", {"reasoning": {"mood": 1}}, "mood"),
    ("/api/chat", {"think": "much"}, "think is 'much'; allowed: none"),
    ("/api/chat", {"think": 1}, "think is 1; allowed: none")])
def test_wrong_rules_are_refused_by_every_api(server, path, body, words):
    assert words in through(server, path, 400, **body).text


@pytest.mark.parametrize("path, thinks", [
    ("/v1/messages", {"thinking": {"type": "adaptive"}}), ("/api/chat", {"think": True})])
@pytest.mark.parametrize("ends_thoughts", [True, False])
def test_stop_texts_in_a_thought_mean_the_same_in_every_api(server, path, thinks, ends_thoughts):
    thought, _ = thought_of(ask(server, thinking_budget=20))
    stop = thought[8:11]
    rule = {"thinking_budget": 20, "stop_in_thinking": ends_thoughts}
    chat = ask(server, stop=[stop], **rule)
    assert (thought_of(chat) == (thought.partition(stop)[0].rstrip(), "")) == ends_thoughts
    stops = {"stop_sequences": [stop]} if path == "/v1/messages" else {
        "options": {"seed": 5, "temperature": 1.0, "num_predict": 60, "stop": [stop]}}
    reply = through(server, path, **thinks, **stops, longdraft=EXTENSION | rule).json()
    assert thought_of(reply) == thought_of(chat)
    if path == "/v1/messages":
        assert (reply["stop_sequence"] == stop) == (chat["choices"][0]["finish_reason"] == "stop")


def test_counted_tokens_are_those_of_the_prompt_with_its_effort(server):
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        body = {"messages": [{"role": "user", "content": "Hi"}], "thinking": thinking}
        usage = through(server, "/v1/messages", thinking=thinking).json()["usage"]
        counted = post(server, "/v1/messages/count_tokens", body).json()["input_tokens"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_prompt_that_is_continued_as_it_is_cannot_be_told_to_think(server):
    for think, status in ((True, 400), (False, 200)):
        reply = post(server, "/api/generate", {"model": "novelist", "prompt": "Hi", "raw": True, "think": think,
                                               "options": {"num_predict": 2}})
        assert reply.status_code == status, reply.text


@pytest.mark.full
def test_answer_now_closes_the_thought_of_a_running_text(server, engine):
    """The rest of the text is that of a request with the place."""
    body = SETTINGS | {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 3000,
                       "longdraft": EXTENSION | {"journal": "clicked", "details": True}}
    tokens: list[int] = []
    stats, was_open = None, None
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as stream:
        held = b""
        for part in stream.iter_bytes():
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                detail = json.loads(line[6:]).get("longdraft", {})
                tokens += detail.get("tokens", [])
                stats = detail.get("stats") or stats
                if was_open is None and detail.get("progress"):
                    was_open = detail["progress"]["thinking"]["opened"]
                    reply = post(server, "/v1/longdraft/generations/clicked/answer", {})
                    assert reply.status_code == 200, reply.text
    place = stats["sampling"]["thinking_close_at"]
    assert was_open and stats["thinking"]["closed_by"] == "request" and 0 < place < 3000
    assert tokens == tokens_of(engine, max_tokens=3000, thinking_close_at=place)
    content = read_journal(server.app.service.settings.journals / "clicked")
    assert content.closing.token == place
    shown = httpx.get(f"{server.url}/v1/longdraft/generations/clicked").json()
    assert shown["tokens"] == tokens
    assert post(server, "/v1/longdraft/generations/clicked/answer", {}).json()["error"]["code"] == "not_thinking"
    assert post(server, "/v1/longdraft/generations/other/answer", {}).status_code == 404


def test_an_effort_without_effect_is_refused_unless_a_client_sends_it_by_habit(chatty, tmp_path, capsys):
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "Hi"}]}))
    options = ["--model", str(chatty), "--max-new-tokens", "3", "--drafter", "plain", "--threads", "1"]
    effort, refused = ["--reasoning-effort", "low"], "reasoning_effort needs a model that marks its thinking"
    for command in (["generate", "Hi", "--chat"], ["chat"], ["book", "Hi", "--folder", str(tmp_path / "book")]):
        assert run([*command, *(options if command[0] != "book" else options[:2]), *effort]) == 2
        assert refused in capsys.readouterr().err
    assert run(["batch", str(rows), str(output), *options, *effort]) == 1
    assert refused in output.read_text() and not (tmp_path / "book").exists()
    output.unlink()
    rows.write_text(json.dumps(json.loads(rows.read_text()) | {"reasoning_effort": "low"}))
    assert run(["batch", str(rows), str(output), *options]) == 0
    with serving.running(longdraft.load(str(chatty), drafter="plain", threads=1)) as running:
        assert ask(running, reasoning_effort="low", max_tokens=3)["choices"]


def test_the_command_line_has_every_rule(engine, folder, tmp_path):
    stats = tmp_path / "stats.json"
    options = ["--model", str(folder), "--chat", "--max-new-tokens", "60", "--seed", "5", "--min-p", "0.02",
               "--ignore-eos", "--quiet", "--stats", str(stats), "--drafter", "plain"]
    rules = ["--thinking-budget", "20", "--thinking-reserve", "10", "--min-thinking-tokens", "5", "--thinking-message",
             "So:", "--thinking-wait", "1", "--thinking-soft", "0.7", "--no-stop-in-thinking", "--stop", "QQ",
             "--no-banned-in-thinking", "--thinking", "temperature=0.7", "--thinking", "top_k=40", "--on-loop",
             "answer"]
    assert run(["generate", "Hi", *options, *rules]) == 0
    found = json.loads(stats.read_text())
    assert found["sampling"]["thinking"] == [["temperature", 0.7], ["top_k", 40]]
    assert found["sampling"]["stop_in_thinking"] is False and found["thinking"]["closed_by"] == "budget"
    assert run(["generate", "Hi", *options, "--reasoning-effort", "low"]) == 0
    assert json.loads(stats.read_text())["sampling"]["thinking_budget"] == 12
    assert run(["generate", "Hi", *options, "--thinking", "temperature=hot"]) == 2


def test_a_text_with_rules_by_a_given_chat_template_is_resumed_with_that_template(tmp_path, capfd):
    template, journal = tmp_path / "thinker.jinja", str(tmp_path / "journal")
    template.write_text(OPENS_THOUGHT)
    given = ["--chat-template", str(template), "--threads", "1", "--quiet"]
    assert run(["generate", "Hi", "--chat", *given, "--max-new-tokens", "30", "--thinking-budget", "8", "--seed", "1",
                "--journal", journal]) == 0
    written = capfd.readouterr().out
    assert "</think>" in written
    assert run(["resume", journal, "--quiet"]) == 2
    assert "--chat-template" in capfd.readouterr().err
    assert run(["resume", journal, *given]) == 0
    assert capfd.readouterr().out == written


def test_a_text_by_a_given_chat_template_is_shown_with_that_template(tmp_path, capfd):
    template, journal = tmp_path / "thinker.jinja", str(tmp_path / "journal")
    template.write_text(OPENS_THOUGHT)
    assert run(["generate", "Hi", "--chat", "--chat-template", str(template), "--threads", "1", "--quiet",
                "--seed", "1", "--max-new-tokens", "30", "--thinking-budget", "8", "--no-stop-in-thinking", "--stop",
                " ", "--journal", journal]) == 0
    written = capfd.readouterr().out
    assert " " in written.partition("</think>")[0]
    assert run(["inspect", journal, "--text", "-"]) == 2
    assert "give the --chat-template" in capfd.readouterr().err
    assert run(["inspect", journal, "--text", "-", "--chat-template", str(template)]) == 0
    assert capfd.readouterr().out == written


def test_rows_of_a_batch_have_the_names_too():
    row = {"id": "a", "prompt": "x", "thinking_token_budget": 5, "thinking": {"temperature": 0.5}, "on_loop": "answer"}
    parsed = requests.parse(row, 1, "")
    assert not parsed.problem and parsed.settings["thinking_budget"] == 5
    assert SamplingParams.from_names(parsed.settings).thinking == (("temperature", 0.5),)
    chat = {"custom_id": "b", "url": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high"}}
    assert requests.parse(chat, 1, "").settings == {"reasoning_effort": "high"}


def test_a_batch_job_writes_the_texts_of_the_server(engine, folder, server, tmp_path):
    rows = [{"id": str(number), "messages": [{"role": "user", "content": "Hi"}], **SETTINGS, **EXTENSION, **rules}
            for number, rules in enumerate(({"thinking_budget": 12}, {"reasoning_effort": "low"}))]
    source, output = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["batch", str(source), str(output), "--model", str(folder), "--drafter", "suffix", "--quiet"]
    assert run(command) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    expected = ask(server, thinking_budget=12)["longdraft"]["stats"]["sha256_tokens"]
    assert {record["sha256_tokens"] for record in records} == {expected}


def test_a_row_asks_of_the_thinking_what_a_request_to_the_server_asks(folder, server, tmp_path):
    asked = [{"reasoning": {"effort": "low"}}, {"reasoning": {"enabled": False}}, {"thinking": {"type": "disabled"}},
             {"thinking": {"type": "enabled", "budget_tokens": 12}}, {"reasoning_format": "none"},
             {"reasoning": {"max_tokens": 12, "exclude": True}}]
    common = SETTINGS | {"messages": [{"role": "user", "content": "Hi"}], "longdraft": EXTENSION}
    source, output = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({
        "custom_id": str(number), "url": "/v1/chat/completions", "body": common | each}) + "\n"
        for number, each in enumerate(asked)))
    command = ["batch", str(source), str(output), "--model", str(folder), "--drafter", "suffix", "--quiet"]
    assert run(command) == 0
    for record in map(json.loads, output.read_text().splitlines()):
        message = record["response"]["body"]["choices"][0]["message"]
        assert message == ask(server, **asked[int(record["custom_id"])])["choices"][0]["message"]


@pytest.mark.parametrize("body, words", [
    ({"reasoning": {"mood": 1}}, "reasoning is 'mood'; allowed: effort, max_tokens"),
    ({"reasoning": 3}, "reasoning is 3; allowed: an object"),
    ({"reasoning": {"enabled": 1}}, "reasoning.enabled is 1; allowed: true or false"),
    ({"reasoning": {"effort": "much"}}, "reasoning_effort is 'much'; allowed: none"),
    ({"reasoning": {"enabled": False, "effort": "low"}}, "none, low; give one of them"),
    ({"thinking": {"type": ["on"]}}, "thinking.type is ['on']; allowed: enabled"),
    ({"thinking": {"budget_tokens": 5}, "thinking_budget": 6}, "the budgets 5, 6; give one of them"),
    ({"reasoning_format": "some"}, "reasoning_format is 'some'; allowed: auto or none")])
def test_wrong_rules_in_a_row_are_refused_by_name(body, words):
    row = {"custom_id": "a", "url": "/v1/chat/completions", "body": {
        "messages": [{"role": "user", "content": "Hi"}], **body}}
    assert words in requests.parse(row, 1, "").problem


@pytest.mark.full
def test_the_chapters_of_a_book_have_no_thinking(folder, tmp_path):
    pytest.importorskip("llguidance")
    command = ["book", "A night.", "--chapters", "1", "--words", "50", "--seed", "4", "--model", str(folder),
               "--folder", str(tmp_path / "book"), "--quiet", "--thinking-budget", "20", "--drafter"]
    assert run([*command, "suffix", "--outline-only"]) == 0
    state = json.loads((tmp_path / "book" / "BOOK.json").read_text())
    state["chapters"][0]["words"] = 50
    (tmp_path / "book" / "BOOK.json").write_text(json.dumps(state))
    assert run([*command, "suffix"]) == 0
    content = read_journal(tmp_path / "book" / "chapter-001")
    close = longdraft.load(str(folder), drafter="plain", threads=1).tokenizer.vocabulary()["</think>"]
    assert close in content.tokens and "think>" not in (tmp_path / "book" / "book.md").read_text()
    assert run([*command, "plain"]) == 0  # the same settings: the chapter is kept
