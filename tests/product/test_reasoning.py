"""Thinking between tags, through the server and `longdraft chat`: a model writes a thought, and then its answer."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from helpers import serving
from helpers.checkpoints import make_checkpoint, write_chain
from longdraft.__main__ import run
from longdraft.errors import UsageError
from longdraft.server.settings import ServerSettings

pytestmark = pytest.mark.full

HELLO = [{"role": "user", "content": "Hi"}]
KINDS = {"opened": ("<think>", "</think>", False), "written": ("<think>", "</think>", False),
         "special": ("[THINK]", "[/THINK]", True)}


@pytest.fixture(scope="module", params=KINDS)
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model's `folder`, and the `whole` text of its answers. Its template opens the thinking if `is_opened`."""
    folder, (opening, closing, is_special) = tmp_path_factory.mktemp("thinker"), KINDS[request.param]
    is_opened = request.param == "opened"
    answer = [opening, "\n", "Think", "ing", " \n", closing, "\n\n", "Hel", "lo"]
    model = make_checkpoint(folder, tie_word_embeddings=False)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<answer>", *[opening, closing] * is_special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in answer
                          if not (is_special and token in (opening, closing))])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_chain(model, [tokenizer.token_to_id(token) for token in ["<answer>", *answer, "</s>"]])
    model.save_pretrained(folder)
    template = ("{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}\n{% endfor %}"
                "{% if add_generation_prompt %}<answer>"
                + (f"{opening}{{{{ '\n' if enable_thinking is not defined else '{closing}\n\n' }}}}" * is_opened)
                + "{% endif %}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    whole = "".join(token for token in answer[2 * is_opened :] if not (is_special and token in (opening, closing)))
    return SimpleNamespace(folder=folder, whole=whole, opening=opening, closing=closing, is_opened=is_opened,
                           is_special=is_special)


@pytest.fixture(scope="module")
def server(thinker):
    with serving.running(serving.load(thinker.folder, drafter="suffix")) as found:
        yield found


def ask(server, messages=HELLO, **settings):
    return serving.client(server).chat.completions.create(
        model="novelist", messages=messages, temperature=0, **({"max_tokens": 12} | settings))


def parts(reply) -> tuple[str | None, str]:
    message = reply.choices[0].message
    return getattr(message, "reasoning_content", None), message.content


def streamed(server, **settings) -> tuple[str, str]:
    deltas = [chunk.choices[0].delta for chunk in ask(server, stream=True, **settings)]
    return ("".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
            "".join(delta.content or "" for delta in deltas))


def test_thinking_and_answer_are_apart(server):
    assert parts(ask(server)) == streamed(server) == ("Thinking", "Hello")


def test_tokens_and_their_probabilities_are_those_of_the_whole_text(server, thinker):
    for reply in (ask(server, logprobs=True), ask(server, logprobs=True, extra_body={"reasoning_format": "none"})):
        shown = "".join(entry.token for entry in reply.choices[0].logprobs.content)
        assert shown == thinker.whole and len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens


@pytest.mark.parametrize("settings, reason, wanted", [
    ({"stop": "ing"}, "stop", ("Think", "")), ({"stop": "lo"}, "stop", ("Thinking", "Hel")),
    ({"stop": "kin"}, "stop", ("Thin", "")), ({"stop": "Hell no"}, "stop", ("Thinking", "Hello"))])
def test_stop_texts_end_the_answer_in_either_part(server, settings, reason, wanted):
    reply = ask(server, **settings)
    assert (reply.choices[0].finish_reason, parts(reply)) == (reason, (wanted[0].removesuffix("kin"), wanted[1]))
    assert streamed(server, **settings) == parts(reply)


def test_an_unfinished_thought_is_thinking(server, thinker):
    reply = ask(server, max_tokens=3 if thinker.is_opened else 5)
    assert (reply.choices[0].finish_reason, parts(reply)) == ("length", ("Thinking \n", ""))


def test_the_division_can_be_turned_off(server, thinker):
    off = {"extra_body": {"reasoning_format": "none"}}
    assert parts(ask(server, **off)) == (None, thinker.whole)
    assert streamed(server, **off) == ("", thinker.whole)
    with serving.running(server.app.service.engine, reasoning_format="none") as other:
        assert parts(ask(other)) == (None, thinker.whole)
        assert parts(ask(other, extra_body={"reasoning_format": "auto"})) == ("Thinking", "Hello")
    with pytest.raises(openai.BadRequestError, match="reasoning_format"):
        ask(server, extra_body={"reasoning_format": "some"})
    with pytest.raises(UsageError, match="--reasoning-format is 'some'; allowed: auto or none"):
        ServerSettings(reasoning_format="some")


def test_completions_have_the_text_as_it_is_written(server, thinker):
    prompt = "Hi<answer>" + f"{thinker.opening}\n" * thinker.is_opened
    reply = serving.client(server).completions.create(model="novelist", prompt=prompt, temperature=0, max_tokens=12)
    assert reply.choices[0].text == thinker.whole


def test_a_template_that_closes_the_thinking_leaves_only_content(server, thinker):
    closed = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    if thinker.is_opened:
        assert parts(ask(server, **closed)) == (None, "Hello")
    else:
        with pytest.raises(openai.BadRequestError, match="template has no variable 'enable_thinking'"):
            ask(server, **closed)


def test_a_continued_message_goes_on_in_its_part(server, thinker):
    def rest(begun):
        return parts(ask(server, [*HELLO, {"role": "assistant", "content": begun}], max_tokens=8,
                         extra_body={"continue_final_message": True}))

    assert rest(f"{thinker.opening}\nThink") == ("ing", "Hello")
    assert rest(f"{thinker.opening}\nHm{thinker.closing}\n\nHel") == (None, "lo")


def chat(monkeypatch, thinker, lines, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert run(["chat", "--model", str(thinker.folder), "--drafter", "plain", "--temperature", "0", *options]) == 0


def test_chat_shows_thinking_on_stderr(monkeypatch, capfd, thinker, tmp_path):
    saved = tmp_path / "saved.json"
    chat(monkeypatch, thinker, ["Hi", "Why?", f"/save {saved}"])
    assert capfd.readouterr() == ("Hello\n" * 2, "Thinking:\nThinking\n\n" * 2)
    answer = {"role": "assistant", "reasoning_content": "Thinking", "content": "Hello"}
    assert json.loads(saved.read_text())["messages"] == [*HELLO, answer, {"role": "user", "content": "Why?"}, answer]
    chat(monkeypatch, thinker, ["Hi"], "--quiet")
    assert capfd.readouterr() == ("Hello\n", "")


def test_chat_shows_the_whole_text_on_request(monkeypatch, capfd, thinker):
    chat(monkeypatch, thinker, ["Hi"], "--reasoning-format", "none")
    opened = f"{thinker.opening}\n" * thinker.is_opened
    assert capfd.readouterr() == (f"{opened}{thinker.whole}\n", "")
    assert run(["chat", "--reasoning-format", "some"]) == 2
    assert "--reasoning-format is 'some'; allowed: auto or none" in capfd.readouterr().err


def test_chats_of_a_batch_are_divided(thinker, tmp_path):
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    rows = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}, {"id": "b", **body}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--model", str(thinker.folder),
                "--drafter", "plain", "--quiet"]) == 0
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    message = first["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello", "reasoning_content": "Thinking"}
    assert second["text"] == thinker.whole
