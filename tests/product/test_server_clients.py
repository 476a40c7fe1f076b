"""What real clients send: recorded bodies, messages to continue, progress while a prompt is read, cached prompts.

`golden/client_bodies.json` holds bodies that the named versions of the clients sent to a server which recorded them.
Those of SillyTavern and Open WebUI were put together from the names in their sources, with their default values.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from helpers import serving
from longdraft.text.chat_template import ChatTemplate

BODIES = json.loads((Path(__file__).parent / "golden" / "client_bodies.json").read_text())
STORY = "It was a dark and stormy night, and the rain fell in torrents. " * 40

engine = pytest.fixture(scope="module")(serving.talker)


@pytest.fixture(scope="module")
def server(engine):
    with serving.running(engine, api_keys=("one", "two")) as found:
        yield found


@pytest.fixture(scope="module")
def post(server):
    def send(path: str, body: dict, key: str = "one") -> httpx.Response:
        return httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    return send


def chat(post, messages: list[dict], **settings) -> httpx.Response:
    return post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "seed": 3} | settings)


@pytest.mark.parametrize("recorded", BODIES, ids=lambda recorded: recorded["client"])
def test_the_bodies_of_real_clients_are_accepted(post, recorded):
    body = recorded["body"]
    limit = {"max_tokens": min(body.get("max_tokens", 20), 20)} if "max_completion_tokens" not in body else {}
    reply = post(recorded["path"], body | limit)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        assert len(reply.json()["choices"]) == body.get("n", 1)
        return
    usage = (body.get("stream_options") or {}).get("include_usage", False)
    found = serving.events(reply.text)
    assert ("usage" in found[-1]) == usage and all(("usage" in each) == usage for each in found)
    assert found[-1 - usage]["choices"][0]["finish_reason"]


def test_members_that_ask_for_nothing_are_accepted_with_any_value(post):
    body = {"prompt_cache_key": "k", "safety_identifier": "user", "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "implicit"}, "verbosity": "medium", "max_tokens": 2}
    hello = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, prompt in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", hello)):
        reply = post(path, body | prompt | {"stream": True, "stream_options": {"include_obfuscation": True}})
        assert reply.status_code == 200 and "usage" not in serving.events(reply.text)[0], reply.text


@pytest.mark.parametrize("change, message", [
    ({"best_of": 3}, "best_of is not supported by this server; allowed: 1"),
    ({"best_of": 3, "n": 2}, "allowed: 2"), ({"top_k": -2}, "top_k"), ({"length_penalty": 2}, "length_penalty"),
    ({"spaces_between_special_tokens": "x"}, "spaces_between"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend")])
def test_values_that_ask_for_something_else_are_refused_by_name(post, change, message):
    reply = post("/v1/completions", {"prompt": "It was", "max_tokens": 2} | change)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_unknown_parameters_are_refused_or_left_out_with_a_warning(engine, post, caplog):
    body = {"prompt": "It was", "max_tokens": 2, "seed": 1, "num_ctx": 5}
    assert post("/v1/completions", body).json()["error"]["param"] == "num_ctx"
    with serving.running(engine, unknown_parameters="warn") as lenient:
        replies = [httpx.post(lenient.url + "/v1/completions", json=body) for _ in range(2)]
        del body["num_ctx"]
        expected = post("/v1/completions", body).json()["choices"][0]["text"]
        assert [reply.json()["choices"][0]["text"] for reply in replies] == [expected] * 2
        refused = httpx.post(lenient.url + "/v1/completions", json=body | {"best_of": 3})
        assert refused.status_code == 400
    assert sum("unknown_parameter" in record.getMessage() for record in caplog.records) == 1


def test_unknown_members_of_inner_objects_are_left_out_with_a_warning(engine, caplog):
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"id": "m1", "role": "user", "content": [part]}], "max_tokens": 2, "stream": True,
            "stream_options": {"include_usage": True, "include_padding": False}, "longdraft": {"cahce": True}}
    with serving.running(engine, unknown_parameters="warn") as lenient:
        url = lenient.url + "/v1/chat/completions"
        reply = httpx.post(url, json=body)
        assert reply.status_code == 200 and "usage" in serving.events(reply.text)[-1], reply.text
        calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}  # not without a loss of sense
        refused = httpx.post(url, json=body | {"messages": [*body["messages"], calls]})
        assert refused.status_code == 400 and "messages.1.tool_calls" in refused.json()["error"]["message"]
    names = {record.longdraft_fields["name"] for record in caplog.records if record.getMessage() == "unknown_parameter"}
    assert names == {"messages[].id", "messages[].content[].cache_control", "stream_options.include_padding",
                     "longdraft.cahce"}


@pytest.mark.parametrize("source, prompt", [
    ("{% for m in messages %}{% if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
     "<system>Be brief.<user>Hi"),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<system>Be brief.<user>Hi"),
    ("{% for m in messages %}{% if m.role == 'developer' %}<D>{% endif %}{{ m.content }} {% endfor %}",
     "<D>Be brief. Hi ")], ids=["refuses it", "prints any role", "reads it"])
def test_a_developers_message_is_a_systems_message_unless_the_template_reads_that_role(source, prompt):
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ChatTemplate(source, {}).render(messages) == prompt


def test_a_template_that_accepts_one_message_of_the_system_gets_the_later_ones_as_reminders():
    source = ("{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
              "{{ raise_exception('one system message') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    messages = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"},
                {"role": "user", "content": "Hi"}, {"role": "system", "content": "C"},
                {"role": "assistant", "content": "D"}, {"role": "system", "content": "E"}]
    assert ChatTemplate(source, {}).render(messages) == (
        "<system>A\n\nB<user>Hi\n<system-reminder>\nC\n</system-reminder><assistant>D"
        "<user><system-reminder>\nE\n</system-reminder>")


def test_content_without_a_text_is_refused_with_what_is_allowed(post):
    for message in ({"role": "user", "content": None}, {"role": "user", "content": [{"type": "image_url"}]}):
        error = post("/v1/chat/completions", {"messages": [message]}).json()["error"]
        assert error["param"].startswith("messages.content"), error
    error = post("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}).json()["error"]
    assert error["message"].startswith("messages.0.content: is null; must be a text, or a list of at most 1,024 parts")


RECIPES = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()


@pytest.mark.parametrize("package", ["openai", "langchain_openai", "litellm"])
def test_the_recipes_of_the_document_write_a_text(engine, server, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    code, = (block for block in re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL)
             if re.search(rf"(from|import) {package}\b", block))
    names: dict[str, object] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url).replace("KEY", "one"), names)
    assert names["text"] and engine.encode(names["text"])
    if package != "langchain_openai":  # which has a temperature of its own
        penalty = {"dry_multiplier": 0.8} if package == "openai" else {}
        assert names["text"] == serving.written(engine, "It was", max_new_tokens=60, seed=7, **penalty)


def test_the_recipe_of_curl_is_accepted(post):
    body, = re.findall(r"-d '(\{.*?\})'", RECIPES)
    assert post("/v1/completions", json.loads(body)).status_code == 200


# The rest of a message


def test_a_message_is_continued_where_it_ends(engine, post):
    """The prompt ends with the message itself, blanks included, and the reply has only what is new."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It was "}]
    reply = chat(post, messages, continue_final_message=True, temperature=0).json()
    prompt = "<user>Hi\n<assistant>It was "
    ids = engine.encode(engine.tokenizer.encode(prompt, add_special_tokens=False))
    assert reply["choices"][0]["message"]["content"] == serving.written(engine, ids, max_new_tokens=12, seed=3,
                                                                        temperature=0, min_p=0)
    assert reply["usage"]["prompt_tokens"] == len(ids)


def test_a_cut_answer_and_its_continuation_are_one_longer_answer(engine, post):
    """With the token ids of the answer as prompt; a tokenizer may cut the text of an answer otherwise."""
    messages = [{"role": "user", "content": "Hi"}]
    longer = chat(post, messages, max_tokens=30, temperature=0).json()["choices"][0]["message"]["content"]
    ids = engine.chat(messages)
    first = list(engine.generate(ids, engine.params(max_new_tokens=10, temperature=0, seed=3)))
    tokens = [token for event in first for token in event.tokens]
    rest = post("/v1/completions", {"prompt": ids + tokens, "max_tokens": 20, "temperature": 0, "seed": 3}).json()
    assert engine.tokenizer.decode(tokens) + rest["choices"][0]["text"] == longer


@pytest.mark.parametrize("template, prompt", [
    ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}.{% endfor %}", "[user]Hi.[assistant]It was  "),
    ("{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip() }};{% endfor %}", "Hi;It was  "),
])
def test_templates_that_strip_or_end_messages(template, prompt):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It was  "}]
    assert ChatTemplate(template, {}).render(messages, continue_final_message=True) == prompt


def test_add_generation_prompt_false_leaves_the_beginning_of_an_answer_out(engine, post):
    messages = [{"role": "user", "content": "Hi"}]
    with_it, without = (chat(post, messages, add_generation_prompt=begins).json()["usage"]["prompt_tokens"]
                        for begins in (True, False))
    assert with_it - without == len(engine.tokenizer.encode("<assistant>", add_special_tokens=False))


@pytest.mark.parametrize("last, settings, message", [
    ("assistant", {"continue_final_message": True, "add_generation_prompt": True}, "set one of them to false"),
    ("user", {"continue_final_message": True}, "needs an assistant's message at the end"),
    ("user", {"min_p": 0.1, "longdraft": {"min_p": 0.2}}, "min_p is 0.1 and longdraft.min_p is 0.2; give one of them"),
])
def test_contradictions_are_refused(post, last, settings, message):
    reply = chat(post, [{"role": "user", "content": "Hi"}, {"role": last, "content": "It"}], **settings)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_a_template_that_does_not_show_the_message_is_refused():
    with pytest.raises(Exception, match="does not show the last message once"):
        ChatTemplate("{{ messages[0].content }}", {}).render(
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}], continue_final_message=True)


# Cached prompts


def test_usage_and_metrics_count_cached_tokens(engine, server, post):
    ids = engine.encode(f"Zounds! {STORY}")
    body = {"prompt": ids, "max_tokens": 4, "seed": 1}
    texts, cached = [], []
    for extra, key in (({}, "one"), ({}, "one"), ({}, "two"), ({"cache_salt": "x"}, "one"),
                       ({"longdraft": {"cache": False}}, "one"), ({"n": 2, "seed": 5}, "one")):
        reply = post("/v1/completions", body | extra, key).json()
        texts.append(reply["choices"][0]["text"])
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    hit = len(ids) - 129
    assert cached == [0, hit, 0, 0, 0, hit] and len(set(texts[:5])) == 1
    text = httpx.get(server.url + "/metrics", headers={"Authorization": "Bearer one"}).text
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if "prefix_cache" in line
              and not line.startswith("#")}
    assert values["longdraft:prefix_cache_hits_total"] >= 3 * hit
    assert values["longdraft:prefix_cache_queries_total"] > values["longdraft:prefix_cache_hits_total"]
    assert values["longdraft:prefix_cache_bytes"] > 0


def test_the_tree_gives_way_to_running_texts(engine):
    """The tree and the reserved memory of running texts stay within the memory of the server."""
    tree = engine.loaded.prefixes
    list(engine.generate(engine.encode(STORY), engine.params(max_new_tokens=2)))
    assert tree.nbytes > 1 << 20
    with serving.running(engine, memory_bytes=40 << 20) as small:
        body = {"prompt": "It was", "max_tokens": 100}
        assert httpx.post(small.url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert tree.idle_bytes <= 40 << 20


@pytest.mark.full
def test_progress_of_the_prompt_is_sent_on_request(engine, post):
    ids = engine.encode(STORY * 3)
    body = {"prompt": ids, "max_tokens": 2, "stream": True, "longdraft": {"cache": False}}
    plain = serving.events(post("/v1/completions", body).text)
    assert not any("prompt_progress" in event for event in plain)
    found = [event["prompt_progress"] for event in serving.events(post("/v1/completions", body | {
        "return_progress": True}).text) if "prompt_progress" in event]
    assert found and all(each["total"] == len(ids) - 1 and each["cache"] == 0 for each in found)
    assert [each["processed"] for each in found] == sorted({each["processed"] for each in found})
    assert found[-1]["processed"] == len(ids) - 1
