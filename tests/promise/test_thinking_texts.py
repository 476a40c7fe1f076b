"""Texts whose thought is under rules, written by an engine: journals, batches, closings on request, phrases, stops."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

import longdraft
from helpers.extents import extent
from helpers.thinkers import OPENING_TEMPLATE, TOKENS, make_thinker
from longdraft.engine.loaded_model import LoadedModel
from longdraft.errors import UsageError
from longdraft.journal import format as form
from longdraft.journal.format import read_journal
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tools import parse_tools
from longdraft.text.harmony import MARKS
from longdraft.text.tools.model_tools import ModelTools
from longdraft.text.tools.reader import put_together

HELLO = "Hi"
PARAMS = dict(max_new_tokens=70, seed=5, temperature=1.0, min_p=0.02, thinking_budget=25, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> longdraft.Engine:
    return longdraft.load(str(make_thinker(tmp_path_factory.mktemp("thinker"))), drafter="suffix", threads=1)


def params_of(**changes) -> SamplingParams:
    return SamplingParams(**(PARAMS | changes))


def text_of(generation: longdraft.Generation) -> tuple[list[int], str]:
    text = "".join(event.text for event in generation)
    return generation.tokens.tolist(), text


def write(engine, params, **options) -> list[int]:
    return text_of(engine.generate(engine.chat(HELLO), params, **options))[0]


RULES = {
    "budget": {}, "reserve": dict(thinking_budget=-1, thinking_reserve=30), "minimum": dict(min_thinking_tokens=20),
    "message": dict(thinking_message="So:"), "waits and a soft close": dict(thinking_wait=2, thinking_soft=0.5),
    "own sampling": dict(thinking=(("temperature", 0.5), ("top_k", 30)), repetition_penalty=1.2),
}


def resumed_after(cut, steps: int, engine, journal) -> list[int]:
    """The tokens of a text that was cut after some steps, and resumed from its journal by another engine."""
    with cut:
        for _ in range(steps):
            next(cut)
    resumed = engine.resume(journal)
    list(resumed)
    return resumed.tokens.tolist()


@pytest.mark.parametrize("rules", RULES)
def test_a_text_cut_anywhere_is_resumed_to_the_same_text(engine, tmp_path, rules):
    params = params_of(**RULES[rules])
    whole = write(engine, params)
    plain = engine.with_drafter("plain")
    assert write(plain, params) == whole
    for after in (1, 8, 25, 26, 40):
        cut = plain.generate(engine.chat(HELLO), params, journal=tmp_path / str(after))
        assert resumed_after(cut, after, engine, tmp_path / str(after)) == whole, after


def test_batches_and_several_texts_of_a_prompt_are_the_same_texts(engine):
    prompt, settings = engine.chat(HELLO), [params_of(**rules) for rules in RULES.values()]
    tokens: dict[int, list[int]] = {place: [] for place in range(len(settings))}
    for place, event in engine.generate_many([prompt] * len(settings), settings):
        assert event.error is None
        tokens[place] += event.tokens
    assert list(tokens.values()) == [write(engine, params) for params in settings]


def test_log_probabilities_are_those_of_the_same_text_and_0_for_given_tokens(engine):
    params = params_of()
    generation = engine.generate(engine.chat(HELLO), params, logprobs=2)
    entries = [entry for event in generation for entry in event.logprobs]
    assert [entry.token for entry in entries] == write(engine, params)
    given = generation.stats()["thinking"]["forced"]
    at = [entry.token for entry in entries].index(engine.tokenizer.vocabulary()["</think>"]) - 1
    assert given and {entry.logprob for entry in entries[at : at + given]} == {0.0}


def test_without_a_rule_the_text_is_that_of_a_model_without_marks(engine):
    """The statistics know the thought; nothing else does."""
    plain = params_of(thinking_budget=-1)
    generation = engine.generate(engine.chat(HELLO), plain)
    list(generation)
    thinking = generation.stats()["thinking"]
    assert thinking["opened"] and thinking["forced"] == 0 and type(generation.step.sampler).__name__ == "Sampler"
    assert generation.params == plain


def test_the_statistics_say_what_closed_the_thought(engine):
    def figures(**changes):
        generation = engine.generate(engine.chat(HELLO), params_of(**changes))
        list(generation)
        return generation.stats()["thinking"]

    message = len(engine.tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
    assert figures() | {"tokens": 0} == {
        "opened": True, "tokens": 0, "closed_by": "budget", "forced": message, "waits": 0}
    assert 24 <= figures()["tokens"] <= 27  # the template's line break behind <think> is the first of the budget
    assert figures(thinking_budget=-1, thinking_reserve=40)["closed_by"] == "reserve"
    close = engine.tokenizer.vocabulary()["</think>"]
    assert figures(logit_bias=((close, 100.0),))["closed_by"] == "model"
    assert figures(logit_bias=((close, 100.0),), thinking_wait=3)["waits"] == 3
    assert figures(thinking_close_at=4, thinking_budget=-1)["closed_by"] == "request"


def test_answer_now_enters_the_journal_and_a_text_with_its_place_is_the_same_text(engine, tmp_path):
    for after in (0, 1, 7, 20):
        folder, params = tmp_path / str(after), params_of(thinking_budget=-1)
        generation = engine.generate(engine.chat(HELLO), params, journal=folder)
        shown = [token for _ in range(after) for token in next(generation).tokens]
        generation.answer_now()
        whole = shown + text_of(generation)[0][len(shown) :]
        place = generation.stats()["sampling"]["thinking_close_at"]
        assert place == len(shown) and generation.stats()["thinking"]["closed_by"] == "request"
        assert write(engine, params_of(thinking_budget=-1, thinking_close_at=place)) == whole
        assert write(engine.with_drafter("plain"), params_of(thinking_budget=-1, thinking_close_at=place)) == whole
        content = read_journal(folder)
        assert content.closing.token == place and content.params.thinking_close_at == place
        assert content.tokens.tolist() == whole


def records(path: Path) -> list[tuple[int, int]]:
    """Kind and end offset of each record."""
    content, digest = path.read_bytes(), form.RunningHash()
    with path.open("rb") as file:
        file.seek(len(form.MAGIC))
        return [(kind, end) for end, kind, _ in form._records(file, len(content), digest)]


def test_a_process_that_ends_between_the_record_and_the_next_token_loses_nothing(engine, tmp_path):
    folder = tmp_path / "journal"
    generation = engine.generate(engine.chat(HELLO), params_of(thinking_budget=-1), journal=folder)
    for _ in range(5):
        next(generation)
    generation.answer_now()
    whole = text_of(generation)[0]
    path = folder / form.FILE
    content, ends = path.read_bytes(), records(path)
    at = next(index for index, (kind, _) in enumerate(ends) if kind == form.CLOSING)
    for cut in (ends[at][1], ends[at + 1][1], ends[at][1] + 3):
        path.write_bytes(content[:cut])
        resumed = engine.resume(folder)
        list(resumed)
        assert resumed.tokens.tolist() == whole
    path.write_bytes(content[: ends[at - 1][1]])  # before the record, the request is lost, as a token would be
    resumed = engine.resume(folder)
    list(resumed)
    assert resumed.tokens.tolist() == write(engine, params_of(thinking_budget=-1))


def test_a_request_outside_a_thought_has_no_effect(engine, tmp_path):
    params = params_of(thinking_budget=4)
    generation = engine.generate(engine.chat(HELLO), params, journal=tmp_path / "a")
    while not (generation.stats()["thinking"]["closed_by"]):
        next(generation)
    generation.answer_now()
    assert text_of(generation)[0] == write(engine, params) and read_journal(tmp_path / "a").closing is None


def test_a_thought_that_a_grammar_covers_is_closed_only_where_the_grammar_allows_it(engine, tmp_path, caplog):
    """The prompt has begun the thought, so the grammar covers what follows. The request is not in the journal."""
    pytest.importorskip("llguidance")
    prompt = engine.chat(HELLO) + engine.tokenizer.encode(" so", add_special_tokens=False)
    params = params_of(structured_outputs=("regex", "(yes|no){5}"), ignore_eos=False, thinking_budget=-1)
    generation = engine.generate(prompt, params, journal=tmp_path / "a")
    begun = next(generation).text
    generation.answer_now()
    tokens, text = text_of(generation)
    assert re.fullmatch("(yes|no){5}", begun + text) and "structured_outputs covers it" in caplog.text
    assert read_journal(tmp_path / "a").closing is None
    assert tokens == text_of(engine.generate(prompt, params))[0]


@pytest.mark.parametrize("in_thinking", [True, False])
def test_stop_texts_end_the_thought_only_if_they_are_searched_there(engine, in_thinking):
    """And they are never searched in the tokens that close it, nor across them."""
    tokens, text = text_of(engine.generate(engine.chat(HELLO), params_of()))
    inside = text[3:5]
    generation = engine.generate(engine.chat(HELLO), params_of(stop=(inside,), stop_in_thinking=in_thinking))
    shown = text_of(generation)[1]
    thought_tokens = generation.stats()["thinking"]["forced"]
    if in_thinking:
        assert generation.finish_reason == "stop" and shown == text[: text.index(inside)] and not thought_tokens
    else:
        assert thought_tokens and shown.startswith(text[: text.index("</think>")])
    never = engine.generate(engine.chat(HELLO), params_of(stop=("\n</think>", "</think>\n\n"),
                                                          stop_in_thinking=in_thinking))
    assert text_of(never)[0] == tokens


@pytest.mark.parametrize("in_thinking", [True, False])
def test_banned_phrases_are_banned_in_the_thought_only_if_they_are_searched_there(engine, tmp_path, in_thinking):
    _, text = text_of(engine.generate(engine.chat(HELLO), params_of()))
    thought, answer = text.split("</think>")
    phrases = (thought[3:5], answer.lstrip()[3:5], "\n</think>", "</think>\n", ">\n\n")
    params = params_of(banned_strings=phrases, banned_in_thinking=in_thinking, thinking_budget=20)
    generation = engine.with_drafter("plain").generate(engine.chat(HELLO), params)
    tokens, shown = text_of(generation)
    new_thought, _, new_answer = shown.partition("</think>")
    assert generation.stats()["thinking"]["closed_by"] == "budget" and new_answer
    assert (phrases[0].casefold() in new_thought.casefold()) == (not in_thinking)
    assert not any(phrase.casefold() in new_answer.casefold() for phrase in phrases[:2])
    assert write(engine, params) == tokens
    for after in (2, 12, 24):
        folder = tmp_path / str(after)
        with engine.generate(engine.chat(HELLO), params, journal=folder) as cut:
            for _ in range(after):
                next(cut)
        resumed = engine.resume(folder)
        list(resumed)
        assert resumed.tokens.tolist() == tokens, after


def test_a_loop_in_the_thought_is_answered(engine, caplog):
    loop = engine.tokenizer.encode("x", add_special_tokens=False)[0]
    params = params_of(thinking_budget=-1, on_loop="answer", max_new_tokens=1200, temperature=0.0,
                       logit_bias=((loop, 100.0),))
    with caplog.at_level(logging.ERROR):
        generation = engine.generate(engine.chat(HELLO), params)
        list(generation)
    stats = generation.stats()
    assert stats["thinking"]["closed_by"] == "loop" and stats["loop"]["period"] == 1
    assert stats["finish_reason"] == "loop" and 1000 < stats["new_tokens"] < 1100  # the answer loops as well
    assert generation.tokens.tolist() == write(engine.with_drafter("plain"), params)


def test_messages_and_rules_that_cannot_be_used_are_refused(engine, tiny):
    ids = engine.chat(HELLO)
    for changes, words in [(dict(thinking_message="a</think>b"), "thinking_message holds a marker"),
                           (dict(thinking_message="a " * 300), "thinking_message is '600 tokens'; allowed: at most"),
                           (dict(reasoning_effort="low"), "reasoning_effort is 'low'; allowed: chats only")]:
        with pytest.raises(UsageError, match=words):
            engine.generate(ids, params_of(**changes))
    unmarked = longdraft.load(str(tiny["gqa"]), drafter="plain", threads=1)
    with pytest.raises(UsageError, match="thinking_budget needs a model that marks its thinking"):
        unmarked.generate("It was", params_of())
    for changes, words in [(dict(min_thinking_tokens=30), "min_thinking_tokens is 30; allowed: at most"),
                           (dict(thinking_soft=0.5, thinking_budget=-1), "thinking_soft is 0.5; allowed: 0 without"),
                           (dict(thinking=(("seed", 1),)), "thinking is 'seed'; allowed: temperature, top_k"),
                           (dict(thinking=(("temperature", -1),)), "temperature is -1")]:
        with pytest.raises(UsageError, match=words):
            params_of(**changes)


def test_a_continuation_inside_the_thought_is_the_longer_text(engine):
    """A special token would begin another message."""
    never = tuple((token, -100.0) for token in (0, 1, *map(engine.tokenizer.vocabulary().get, TOKENS)))
    prompt, whole = engine.chat(HELLO), write(engine, params_of(logit_bias=never))
    for cut in (5, 24, 26, 40):
        params = params_of(max_new_tokens=70 - cut, logit_bias=never)
        assert text_of(engine.generate(prompt + whole[:cut], params))[0] == whole[cut:], cut


SCHEMA = {"type": "object", "additionalProperties": False, "required": ["a"],
          "properties": {"a": {"enum": ["x", "yz"]}}}


@pytest.mark.parametrize("drafter", ["plain", "suffix"])
@pytest.mark.parametrize("opens", [True, False])
def test_a_structured_answer_comes_after_the_closed_thought(engine, drafter, opens):
    pytest.importorskip("llguidance")
    prompt = engine.chat(HELLO) if opens else engine.tokenizer.encode("Hi")
    think = engine.tokenizer.vocabulary()["<think>"]
    params = params_of(structured_outputs=("json", json.dumps(SCHEMA)), ignore_eos=False, logit_bias=((think, 8.0),))
    generation = engine.with_drafter(drafter).generate(prompt, params)
    tokens, text = text_of(generation)
    assert generation.finish_reason == "eos"
    assert json.loads(text.rpartition("</think>")[2]) in ({"a": "x"}, {"a": "yz"})
    assert generation.stats()["thinking"]["closed_by"] == ("budget" if opens or "<think>" in text else None)
    assert tokens == text_of(engine.with_drafter("ngram").generate(prompt, params))[0]


def test_a_text_that_begins_with_no_thought_matches_its_structure(engine):
    pytest.importorskip("llguidance")
    think = engine.tokenizer.vocabulary()["<think>"]
    params = params_of(structured_outputs=("regex", "ab{20}c"), ignore_eos=False, logit_bias=((think, -100.0),))
    _, text = text_of(engine.generate(engine.tokenizer.encode("Hi"), params))
    assert text == "a" + 20 * "b" + "c"


HARMONY = ("{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
           "<|start|>assistant")
STRUCTURES = {"json": json.dumps(SCHEMA), "regex": "ab{9}c", "grammar": 'start: "yes" | "no"'}


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> longdraft.Engine:
    """A random model with the channels of gpt-oss."""
    pytest.importorskip("llguidance")
    folder = make_thinker(tmp_path_factory.mktemp("channels"), HARMONY, (*MARKS, "<|constrain|>", "<|call|>"))
    return longdraft.load(str(folder), drafter="suffix", threads=1)


def structured(channels: longdraft.Engine, kind: str, **changes) -> SamplingParams:
    """Settings with which thoughts are short."""
    end = channels.tokenizer.vocabulary()["<|end|>"]
    return params_of(**(dict(structured_outputs=(kind, STRUCTURES[kind]), max_new_tokens=600, ignore_eos=False,
                             thinking_budget=-1, logit_bias=((end, 9.0),)) | changes))


def answer_of(engine: longdraft.Engine, tokens: list[int]) -> str:
    """The text behind the last header, which is that of the final channel."""
    whole = engine.tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)
    head, _, answer = whole.rpartition("<|message|>")
    assert head.endswith("<|channel|>final"), whole
    return answer.removesuffix("</s>")


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("rules", [{}, dict(thinking_budget=3, logit_bias=()), dict(thinking_budget=30)])
def test_a_structured_answer_of_gpt_oss_has_its_header(channels, tmp_path, kind, rules):
    """Also behind a thought that the model ended, or a rule."""
    prompt, params = channels.chat(HELLO), structured(channels, kind, **rules)
    plain = channels.with_drafter("plain")
    generation = plain.generate(prompt, params)
    events = list(generation)
    tokens = generation.tokens.tolist()
    assert generation.finish_reason == "eos"
    answer = answer_of(channels, tokens)
    if kind == "json":
        assert json.loads(answer) in ({"a": "x"}, {"a": "yz"})
    else:
        assert answer in {"regex": ("ab" + 8 * "b" + "c",), "grammar": ("yes", "no")}[kind]
    reader = ModelTools(channels.tokenizer, channels.loaded.answer_format).answers(None).reader(prompt)
    assert put_together(reader.read(events, is_end=True)).content == answer
    assert text_of(channels.generate(prompt, params))[0] == tokens
    for after in (2, 9):
        cut = plain.generate(prompt, params, journal=tmp_path / str(after))
        assert resumed_after(cut, after, channels, tmp_path / str(after)) == tokens, after


def test_answer_now_leads_to_the_structured_answer_of_gpt_oss(channels):
    ids = channels.tokenizer.vocabulary()
    never = tuple((ids[name], -100.0) for name in ("<|end|>", "f", "c"))  # a thought without end
    params = structured(channels, "regex", logit_bias=never, structured_outputs=("regex", "ab{9}d"))
    prompt = channels.chat(HELLO)
    generation = channels.generate(prompt, params)
    shown: list[int] = []
    while len(shown) < 20:
        shown += next(generation).tokens
    generation.answer_now()
    tokens = shown + text_of(generation)[0][len(shown) :]
    assert answer_of(channels, tokens) == "ab" + 8 * "b" + "d"
    closed = replace(params, thinking_close_at=generation.stats()["sampling"]["thinking_close_at"])
    assert text_of(channels.with_drafter("plain").generate(prompt, closed))[0] == tokens


def test_a_journal_from_before_headers_is_resumed_as_it_was(channels, tmp_path, monkeypatch):
    prompt, params = channels.chat(HELLO), structured(channels, "regex")
    with monkeypatch.context() as before:
        before.setattr(LoadedModel, "completed", lambda self, params, prompt: self.with_closing(params))
        whole = text_of(channels.generate(prompt, params))[0]
        with channels.with_drafter("plain").generate(prompt, params, journal=tmp_path) as cut:
            for _ in range(4):
                next(cut)
    resumed = channels.resume(tmp_path)
    list(resumed)
    assert resumed.tokens.tolist() == whole and channels.tokenizer.decode(whole) == "ab" + 8 * "b" + "c"


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
CALLERS = {  # form of calls, template, special tokens
    "hermes": (OPENING_TEMPLATE, TOKENS), "qwen-xml": (OPENING_TEMPLATE, TOKENS), "glm": (OPENING_TEMPLATE, TOKENS),
    "harmony": (HARMONY, (*MARKS, "<|constrain|>", "<|call|>"))}


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=() if name in ("hermes", "harmony") else pytest.mark.full) for name in CALLERS])
def caller(request, tmp_path_factory) -> tuple[longdraft.Engine, ModelTools]:
    """A model that thinks, and how it calls functions."""
    template, special = CALLERS[request.param]
    folder = make_thinker(tmp_path_factory.mktemp("caller"), template, special)
    engine = longdraft.load(str(folder), drafter="suffix", threads=1)
    return engine, ModelTools(engine.tokenizer, engine.loaded.answer_format, request.param)


@pytest.mark.parametrize("rule", [{}, dict(thinking_budget=500)])
def test_a_thought_before_calls_is_closed_on_request_or_the_request_is_refused(caller, rule):
    """Refused, the text goes on as it was."""
    pytest.importorskip("llguidance")
    engine, model = caller
    tools = parse_tools({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    ids, marks = engine.tokenizer.vocabulary(), model.form.name == "harmony"
    never = tuple((ids[name], -100.0) for name in ("</s>", *(MARKS if marks else ("<think>", "</think>"))))
    params = model.applied(params_of(**(dict(max_new_tokens=100, thinking_budget=-1, ignore_eos=False,
                                             logit_bias=never) | rule)), tools, engine.chat(HELLO))
    prompt = engine.chat(HELLO)
    if marks:
        header = engine.tokenizer.encode("analysis", add_special_tokens=False)
        prompt = [*prompt, ids["<|channel|>"], *header, ids["<|message|>"]]
    generation = engine.generate(prompt, params)
    if marks and not rule:
        with pytest.raises(UsageError, match="beside tools, unless the request has a rule"):
            generation.answer_now()
        with pytest.raises(UsageError, match="beside tools"):
            engine.generate(prompt, replace(params, thinking_close_at=9))
        assert text_of(generation)[0] == write_from(engine.with_drafter("plain"), prompt, params)
        return
    shown = [token for _ in range(9) for token in next(generation).tokens]
    generation.answer_now()
    whole = shown + text_of(generation)[0][len(shown) :]
    place = generation.stats()["sampling"]["thinking_close_at"]
    assert generation.stats()["thinking"]["closed_by"] == "request" and generation.finish_reason == "eos"
    closed = replace(params, thinking_close_at=place)
    assert write_from(engine.with_drafter("plain"), prompt, closed) == whole


def write_from(engine, prompt, params) -> list[int]:
    return text_of(engine.generate(prompt, params))[0]


@pytest.mark.parametrize("choice, closed_by", extent(
    [(choice, closed_by) for choice in ("required", "auto") for closed_by in ("budget", "reserve", "model")],
    [("required", "budget"), ("auto", "model")]))
def test_calls_come_after_a_thought_that_is_closed(caller, tmp_path, choice, closed_by):
    """One thought, then what the grammar allows: no second thought, though the model is drawn to it."""
    pytest.importorskip("llguidance")
    engine, model = caller
    tools = parse_tools({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False})
    ids, marks = engine.tokenizer.vocabulary(), model.form.name == "harmony"
    close, opening = (ids["<|end|>"], ids["<|channel|>"]) if marks else (ids["</think>"], ids["<think>"])
    rules = {"budget": dict(thinking_budget=9), "reserve": dict(thinking_reserve=150),
             "model": dict(thinking_budget=60, min_thinking_tokens=5)}[closed_by]
    bias = ((opening, -100.0 if marks else 9.0), (close, 20.0 if closed_by == "model" else -100.0))
    params = model.applied(params_of(**(dict(max_new_tokens=180, thinking_budget=-1, ignore_eos=False,
                                             logit_bias=bias) | rules)), tools, engine.chat(HELLO))
    prompt = engine.chat(HELLO)
    if marks:
        header = engine.tokenizer.encode("analysis", add_special_tokens=False)
        prompt = [*prompt, opening, *header, ids["<|message|>"]]
    plain = engine.with_drafter("plain")
    generation = plain.generate(prompt, params)
    events = list(generation)
    tokens = generation.tokens.tolist()
    assert generation.stats()["thinking"]["closed_by"] == closed_by
    answer = put_together(model.answers(tools).reader(prompt).read(events, is_end=True))
    assert answer.reasoning
    if choice == "required":
        assert generation.finish_reason == "eos" and not answer.content
        assert answer.calls and all(json.loads(each.arguments) in ({"a": "x"}, {"a": "yz"}) for each in answer.calls)
    behind = tokens[tokens.index(close) + 1 :]
    assert close not in behind and (marks or opening not in behind)
    for drafter in ("suffix", "ngram"):
        assert text_of(engine.with_drafter(drafter).generate(prompt, params))[0] == tokens, drafter
    for after in (7, 12, 20):
        folder = tmp_path / str(after)
        with plain.generate(prompt, params, journal=folder) as cut:
            for _ in range(after):
                next(cut)
        resumed = engine.resume(folder)
        list(resumed)
        assert resumed.tokens.tolist() == tokens, after
