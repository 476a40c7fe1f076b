"""Chat templates render the same text as in transformers; `longdraft chat` holds a conversation."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from transformers import PreTrainedTokenizerFast

import longdraft
from helpers.checkpoints import make_checkpoint, write_tokenizer
from helpers.gguf_files import convert
from helpers.terminal import terminal
from helpers.thinkers import make_thinker
from longdraft.__main__ import run
from longdraft.errors import ModelError, UsageError
from longdraft.text.chat_template import ChatTemplate, parse_option
from longdraft.text.tokenizer import Tokenizer

TURNS = [{"role": "system", "content": "Be <brief> & \"kind\"."}, {"role": "user", "content": "caf\u00e9?\n"},
         {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, {"role": "user", "content": "Why"}]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
             "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if m['role'] == 'system' %}\n  [{{ m['content'] }}]\n"
              "    {% elif loop.last %}\n    last {{ m.content }}\n    {% endif %}\n{%- endfor %}\n",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
            "{{ {'b': 1, 'a': '<'} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
                     "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}\n{% endfor %}",
    "history": "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n') }};{% endfor %}<think>\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
                 "{{ tools is none }}{{ tools is defined }}{{ eos_token }}{{ pad_token is defined }}",
    "date": "{{ strftime_now('%Y') }}{% if not date_string is defined %}{% set date_string = 'x' %}{% endif %}",
}
TALK = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and shout %}{{ m.content | upper }}"
        "{% else %}{{ m.role }}: {{ m.content }}{% endif %}\n{% endfor %}assistant:")


def template_folder(path, template, **settings):
    write_tokenizer(path)
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_the_same_text_as_in_transformers(name, tmp_path):
    write_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>",
                                     eos_token="</s>", chat_template=TEMPLATES[name])
    expected = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert Tokenizer(template_folder(tmp_path, TEMPLATES[name])).chat(TURNS) == expected


def test_a_thought_has_the_name_that_the_template_reads():
    """gpt-oss's template reads `thinking`, most others `reasoning_content`; clients send any of three names."""
    for read in ("thinking", "reasoning_content"):
        template = ChatTemplate(f"{{% for m in messages %}}<think>{{{{ m.{read} }}}}</think>{{% endfor %}}", {})
        for sent in ("reasoning_content", "thinking", "reasoning"):
            assert template.render([{"role": "assistant", sent: "hm"}]) == "<think>hm</think>"
        assert template.render([{"role": "assistant", "reasoning_content": "hm"}],
                               continue_final_message=True) == "<think>hm"


def test_the_template_is_read_from_a_file_or_the_entry_named_default(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "one"}]
    assert Tokenizer(template_folder(tmp_path, named)).chat("x") == "one"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}two")
    assert Tokenizer(tmp_path).chat("x") == "<s>two"


def test_another_template_may_be_given_for_a_folder_and_for_a_gguf_file_whose_own_is_broken(tmp_path, capfd):
    model = make_checkpoint(tmp_path / "model")
    template_folder(tmp_path / "model", "{% for %}")
    convert(tmp_path / "model", model, tmp_path / "model.gguf", values={
        "tokenizer.chat_template": "{% for %}", "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1})
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}{{ messages[0].content }}")
    for path in (tmp_path / "model", tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match=r"template is invalid.*; give another with --chat-template FILE"):
            Tokenizer(path).chat("So")
        assert longdraft.load(str(path), drafter="plain", chat_template=other).tokenizer.chat("So") == "<s>So"
        arguments = ["--model", str(path), "--chat", "--max-new-tokens", "3", "--temperature", "0", "--ignore-eos"]
        assert run(["generate", "So", *arguments]) == 2
        assert run(["generate", "So", *arguments, "--chat-template", str(other)]) == 0
    capfd.readouterr()
    other.write_text("{% for %}")
    for path in (other, tmp_path / "none", "/dev/zero"):
        assert run(["generate", "So", *arguments, "--chat-template", str(path)]) == 2
        assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("template, error, message", [
    (None, UsageError, "has no chat template"),
    ([{"name": "rag", "template": "x"}], ModelError, "templates rag, but none is named 'default'"),
    (7, ModelError, "chat_template is a int"),
    ("{% for %}", ModelError, "is invalid"),
    ("{{ messages.nothing.at.all }}", ModelError, "template fails"),
    ("{{ 1 + 'a' }}", ModelError, "template fails: TypeError"),
    ("{{ messages.append(1) }}", ModelError, "template fails: SecurityError"),
    ("{{ ''.__class__.__mro__ }}", ModelError, "template fails: SecurityError"),
    ("{{ raise_exception('roles must alternate') }}", UsageError, "refuses these messages: roles must alternate"),
])
def test_a_missing_broken_or_refusing_template_raises_a_clear_error(tmp_path, template, error, message):
    with pytest.raises(error, match=message):
        Tokenizer(template_folder(tmp_path, template)).chat("Hello")


def test_template_variables_can_be_set_and_unknown_ones_are_refused():
    template = ChatTemplate("{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{{ n }}", {})
    assert template.options == ["enable_thinking", "n"]
    assert template.render([], enable_thinking=parse_option("false"), n=parse_option("x=1")) == "quickx=1"
    with pytest.raises(UsageError, match="no variable 'enable_thnking'; available: enable_thinking, n"):
        template.render([], enable_thnking=False)


@pytest.mark.parametrize("text, value", [("false", False), ("False", False), ("3", 3), ("high", "high"), ("", ""),
                                         ("26 Jul 2024", "26 Jul 2024"), ("null", None)])
def test_option_values_are_parsed_to_their_type(text, value):
    assert parse_option(text) == value and type(parse_option(text)) is type(value)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    make_checkpoint(folder)
    return template_folder(folder, TALK)


ENDED = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ END if m.role == 'assistant' else '' }}{% endfor %}"


def test_a_model_is_tuned_for_chat_if_it_ends_texts_as_its_template_ends_answers(tmp_path):
    make_checkpoint(tmp_path)
    tuned = []
    for template in (TALK, ENDED.replace("END", "eos_token"), ENDED.replace("END", "'<|im_end|>'"), "{{ fails.here }}"):
        engine = longdraft.load(str(template_folder(tmp_path, template)), drafter="plain")
        tuned.append(engine.is_tuned_for_chat)
    assert tuned == [False, True, False, False]  # TALK begins with a token that ends no answer
    assert not longdraft.load("novelist", drafter="plain").is_tuned_for_chat


def test_generate_names_chat_once_and_says_that_a_text_ended_at_once(tmp_path, capfd):
    make_checkpoint(tmp_path)
    folder = template_folder(tmp_path, ENDED.replace("END", "eos_token"))
    end = Tokenizer(folder).vocabulary()["</s>"]
    command = ["generate", "It was", "--model", str(folder), "--drafter", "plain", "--max-new-tokens", "4"]

    def said(*options):
        assert run([*command, *options]) == 0
        return capfd.readouterr().err

    assert said().count("--chat") == 1
    assert not said("--chat") and not said("--quiet")
    at_once = ["--logit-bias", f"{end}=100"]
    assert "ended the text at once" in said("--chat", *at_once) and not said("--quiet", *at_once)


def talk(monkeypatch, talker, lines, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return run(["chat", "--model", str(talker), "--drafter", "plain", "--max-new-tokens", "8", "--temperature", "0",
                *options])


def test_a_piped_conversation_keeps_its_history_saves_and_resets_it(monkeypatch, capfd, talker, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    lines = ["Hello", "//two \\", "lines", f"/save {first}", "/reset", "", "Hello", f"/save {second}", "/quit", "never"]
    assert talk(monkeypatch, talker, lines, "--system", "Be kind", "--chat-option", "shout=true") == 0
    saved = json.loads(first.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[0]["content"] == "Be kind" and saved[3]["content"] == "/two \nlines"
    assert json.loads(second.read_text())["messages"] == saved[:3]  # greedy decoding gives the same answer after /reset
    captured = capfd.readouterr()
    assert captured.out == "".join(saved[i]["content"] + "\n" for i in (2, 4, 2)) and captured.err == ""


def test_an_answer_equals_the_text_that_generate_writes(monkeypatch, capfd, talker):
    assert talk(monkeypatch, talker, ["Hello"]) == 0
    answer = capfd.readouterr().out
    assert run(["generate", "Hello", "--chat", "--model", str(talker), "--drafter", "plain", "--max-new-tokens", "8",
                "--temperature", "0"]) == 0
    assert answer.rstrip("\n") == capfd.readouterr().out.rstrip("\n") != ""


@pytest.mark.parametrize("lines, options, message", [
    (["/rest"], [], "command is '/rest'; allowed: /help"),
    (["/save"], [], "allowed: /help, /reset, /save FILE"),
    (["a" * 5000], [], "/reset starts again"),
    ([], ["--chat-option", "loud=true"], "no variable 'loud'; available: shout"),
    ([], ["--chat-option", "loud"], "--chat-option is 'loud'; allowed: KEY=VALUE"),
    ([], ["--model", "novelist"], "has no chat template"),
    ([], ["--tools", "/no/such"], "--tools"), ([], ["--tool-form", "hermes"], "auto without --tools"),
    ([], ["--temperature", "-1"], "temperature is -1"),
    ([], ["--system", "a\udcff"], "--system is not UTF-8 text"),
    (["a\udcff"], [], "stdin is not UTF-8 text"),
])
def test_a_usage_error_ends_a_script_with_one_line(monkeypatch, capfd, talker, lines, options, message):
    assert talk(monkeypatch, talker, lines, *options) == 2
    captured = capfd.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


LOOK = {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "required": ["a"], "properties": {"a": {"enum": ["x"]}}}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that answers everything with a call."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<answer>"
    return make_thinker(tmp_path_factory.mktemp("caller"), template, ("<answer>",), ("<tool_call>", "</tool_call>"),
                        ("<tool_call>", "</tool_call>"))  # the grammar forces what is between


@pytest.mark.parametrize("listed", [[LOOK], [{"type": "function", "function": LOOK}]])
def test_calls_are_shown_and_their_results_are_typed(monkeypatch, capfd, caller, tmp_path, listed):
    pytest.importorskip("llguidance")
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    tools.write_text(json.dumps(listed))
    lines = ["Hello", "a hat \\", "and a cat", f"/save {saved}", "/reset", "Hello"]
    assert talk(monkeypatch, caller, lines, "--tools", str(tools), "--max-new-tokens", "90") == 0
    captured = capfd.readouterr()
    assert captured.out == 'look({"a": "x"})\n' * 3 and captured.err == ""
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    call, = messages[1]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"a": "x"}'} and messages[1]["content"] == ""
    assert messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "a hat \nand a cat"}
    assert messages[3]["tool_calls"][0]["id"] != call["id"]


def test_a_call_that_is_cut_waits_for_no_result(monkeypatch, capfd, caller, tmp_path):
    pytest.importorskip("llguidance")
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    tools.write_text(json.dumps([LOOK]))
    lines = ["Hello", f"/save {saved}"]
    assert talk(monkeypatch, caller, lines, "--tools", str(tools), "--max-new-tokens", "1") == 0
    assert capfd.readouterr().out == "\n" and json.loads(saved.read_text())["messages"] == []


@pytest.mark.parametrize("content, options, message", [
    ("[{", [], "is not valid JSON"), ("{}", [], "has no list of functions"), ("[]", [], "has no list of functions"),
    ('[{"name": "a b"}]', [], "tools.0 has the name 'a b'"), ("[3]", [], "tools.0 is 3"),
    (json.dumps([LOOK]), ["--tool-form", "x"], "--tool-form is 'x'; allowed: auto"),
    (json.dumps([LOOK]), ["--ban", "x"], "banned_strings is ('x',)")])
def test_functions_that_cannot_be_used_are_one_line(monkeypatch, capfd, caller, tmp_path, content, options, message):
    tools = tmp_path / "tools.json"
    tools.write_text(content)
    assert talk(monkeypatch, caller, [], "--tools", str(tools), *options) == 2
    captured = capfd.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def longdraft_chat(talker, *options):
    return [sys.executable, "-m", "longdraft", "chat", "--model", str(talker), "--drafter", "plain",
            "--stop-token-id", "1", *options]


@pytest.mark.full
def test_a_closed_stdout_pipe_ends_the_command_quietly(talker):
    work = subprocess.Popen(longdraft_chat(talker, "--max-new-tokens", "3900"), stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # Two, because on a busy machine the first reply may be complete before the pipe is closed.
    work.stdin.write(b"Hello\nHello again\n")
    work.stdin.flush()
    assert work.stdout.read(1)
    work.stdout.close()
    assert work.stderr.read() == b"" and work.wait(timeout=60) == 1


needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@pytest.mark.full
@needs_dev_full
def test_a_full_disk_behind_stdout_ends_a_script_with_one_line(talker):
    """Runs in a subprocess, because Python flushes the rest of stdout when it exits."""
    with open("/dev/full", "w") as full:
        work = subprocess.run(longdraft_chat(talker, "--max-new-tokens", "4"), input=b"Hello\n", stdout=full,
                              stderr=subprocess.PIPE, check=False)
    assert work.returncode == 1
    assert b"No space left" in work.stderr and work.stderr.count(b"\n") == 1


@needs_dev_full
def test_a_full_disk_behind_save_ends_a_script_with_one_line(monkeypatch, capfd, talker):
    assert talk(monkeypatch, talker, ["/save /dev/full"]) == 1
    captured = capfd.readouterr()
    assert "No space left" in captured.err and captured.err.count("\n") == 1


def test_a_conversation_continues_if_it_cannot_be_saved(monkeypatch, capfd, talker, tmp_path):
    class Typed(io.StringIO):
        def isatty(self):
            return True

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longdraft.system.files.os.replace", refuse)
    monkeypatch.setattr("sys.stdin", Typed(f"Hello\n/save {tmp_path / 'x'}\nHello\n"))
    assert run(["chat", "--model", str(talker), "--drafter", "plain", "--max-new-tokens", "4", "--quiet"]) == 0
    captured = capfd.readouterr()
    assert captured.out and "No space left" in captured.err and "Traceback" not in captured.err


def test_characters_outside_the_terminals_encoding_are_replaced(monkeypatch, capfd, talker):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert talk(monkeypatch, talker, ["Hello"], "--max-new-tokens", "60", "--temperature", "1", "--seed", "2",
                "--stop-token-id", "1") == 0
    assert b"?" in shown.getvalue() and capfd.readouterr().err == ""


@pytest.mark.full
def test_ctrl_c_stops_the_answer_and_keeps_the_program_running(talker):
    work = subprocess.Popen(longdraft_chat(talker, "--max-new-tokens", "3900", "--seed", "1"), stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    work.stdin.write(b"Hello\n")
    work.stdin.flush()
    assert work.stdout.read(1)
    work.send_signal(signal.SIGINT)
    time.sleep(1)
    assert work.poll() is None
    out, err = work.communicate(b"/help\n", timeout=60)
    assert len(out) < 3900  # the answer was stopped early
    assert work.returncode == 0 and b"/reset" in err and b"Traceback" not in err


@pytest.mark.parametrize("options, count", [(["--stats"], 2), ([], 0), (["--stats", "--quiet"], 0)])
def test_stats_prints_a_summary_of_each_answer_on_a_terminal(monkeypatch, capfd, talker, options, count):
    with terminal("stderr") as shown:
        assert talk(monkeypatch, talker, ["Hello", "Why"], "--stop-token-id", "1", *options) == 0
    assert shown().count("longdraft: 8 tokens · ") == shown().count("tokens/s") == count
    assert "longdraft" not in capfd.readouterr().out


HEAVY_TEMPLATES = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
             "{% endfor %}",
    "a power": "{{ (10 ** (10 ** 9)) % 7 }}",
    "a repetition": "{{ ('a' * messages[0].content | length * 10 ** 10) | length }}",
    "a constant": "{{ 'a' * 10 ** 10 }}",
    "a list": "{{ ([0] * 10 ** 10) | length }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "joined": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "lists that double": "{% set n = namespace(s=[0]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "slices": "{% set l = [range(99999) | list] %}{% for i in range(9999) %}{% for j in range(9999) %}"
              "{{ l[0][:] | length }}{% endfor %}{% endfor %}",
    "indentation of JSON": "{{ [[[[[[1]]]]]] | tojson(indent=10 ** 9) }}",
    "indentation": "{{ 'a' | indent(10 ** 10, true) }}",
    "centring": "{{ 'a' | center(10 ** 10) }}",
    "a format": "{{ '%10000000000d' | format(1) }}",
    "a method": "{{ 'a'.ljust(10 ** 10) }}",
    "replacing": "{{ ('a' * 10 ** 5).replace('a', 'a' * 10 ** 6) }}",
    "joining": "{{ range(99999) | join('a' * 10 ** 6) }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 6) }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a long prompt": "{{ 'a' * 10 ** 8 }}",
    "wrapping": "{{ ('a b ' * 10 ** 7) | wordwrap(1) }}"}


@pytest.mark.full
@pytest.mark.parametrize("name", HEAVY_TEMPLATES)
def test_a_template_that_is_too_much_work_is_one_clear_line(name):
    template = ChatTemplate(HEAVY_TEMPLATES[name], {})
    limits = r"chat template (takes more than (4 s|1024 MB|[0-9,]+ characters)|fails: \w+Error: )"
    with pytest.raises(ModelError, match=limits) as caught:
        template.render([{"role": "user", "content": "a"}])
    assert "\n" not in str(caught.value)
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "a"}]) == "a"


@pytest.mark.parametrize("name", ["a constant", "centring"])
def test_a_template_has_a_limit_of_memory(name):
    test_a_template_that_is_too_much_work_is_one_clear_line(name)
