"""Structured output: every text matches its grammar, and every drafter and resume point gives the same text."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import longdraft
import longdraft.sampling.grammar
from helpers import serving
from helpers.equality import DRAFTERS
from helpers.extents import extent
from longdraft.__main__ import run
from longdraft.engine import provenance
from longdraft.errors import JournalError, UsageError
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.structured import structured_outputs
from longdraft.request.tree import Tree, chain, root_only
from longdraft.sampling.grammar import FORCED, Grammar, GrammarRules

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["title", "chapters"],
    "properties": {"title": {"type": "string", "maxLength": 12},
                   "chapters": {"type": "array", "minItems": 2, "maxItems": 2, "items": {
                       "type": "object", "additionalProperties": False, "required": ["brief", "words"],
                       "properties": {"brief": {"enum": ["love", "war"]},
                                      "words": {"type": "integer", "minimum": 100, "maximum": 900}}}}}}
JSON = ("json", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def engine() -> longdraft.Engine:
    return longdraft.load("novelist", drafter="suffix", threads=1)


@pytest.fixture(scope="module")
def rules(engine) -> GrammarRules:
    found = engine.loaded.grammar_rules(SamplingParams(structured_outputs=JSON))
    assert found is not None
    return found


def text_of(generation: longdraft.Generation) -> str:
    return "".join(event.text for event in generation)


def params_of(structure: tuple[str, str] = JSON, **changes) -> SamplingParams:
    return SamplingParams(**(dict(max_new_tokens=160, seed=3, temperature=0.8, min_p=0.02, dry_multiplier=0.3,
                                  structured_outputs=structure) | changes))


# Equality


@pytest.fixture(scope="module")
def tiny_engine(tiny: dict[str, Path]) -> longdraft.Engine:
    return longdraft.load(str(tiny["gqa"]), drafter="plain", threads=1)


@pytest.fixture(scope="module")
def plain(tiny_engine) -> list[int]:
    generation = tiny_engine.generate("It was", params_of())
    jsonschema.validate(json.loads(text_of(generation)), SCHEMA)
    assert generation.finish_reason == "eos"
    return generation.tokens.tolist()


@pytest.mark.parametrize("drafter", extent(
    ["auto", "ngram", "suffix", "tokenswift", "magicdec, streaming", "medusa", "eagle", "glide, long and wide",
     "draft-model, itself", "triforce"], ["auto", "suffix", "tokenswift", "medusa", "draft-model, itself"]))
def test_every_drafter_writes_the_plain_text(tiny, tiny_engine, plain, drafter):
    name, options = DRAFTERS[drafter]
    if "model" in options:
        options = options | {"model": str(tiny["gqa"])}
    engine = longdraft.load(str(tiny["gqa"]), drafter=name, drafter_options=options, threads=1)
    generation = engine.generate("It was", params_of())
    list(generation)
    assert generation.tokens.tolist() == plain
    forced = generation.stats()["by_source"][FORCED]
    assert forced["accepted"] > 0 and generation.stats()["steps"] < len(plain) - 5


def test_plain_decoding_drafts_nothing(tiny_engine, plain):
    generation = tiny_engine.generate("It was", params_of())
    list(generation)
    assert generation.stats()["steps"] == len(plain) and generation.stats()["by_source"] == {}


def test_a_batch_and_log_probabilities_change_nothing(tiny_engine, plain):
    other = tiny_engine.with_drafter("suffix")
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for place, event in other.generate_many(["It was"] * 2, params_of()):
        tokens[place] += event.tokens
    assert tokens == {0: plain, 1: plain}
    generation = other.generate("It was", params_of(), logprobs=1)
    assert [entry.token for event in generation for entry in event.logprobs] == plain


def test_a_heavy_grammar_consumes_its_tokens_apart_and_changes_nothing(tiny_engine, plain, monkeypatch):
    monkeypatch.setattr(longdraft.sampling.grammar, "_HEAVY_S", -1.0)
    generation = tiny_engine.with_drafter("suffix").generate("It was", params_of())
    list(generation)
    assert generation.tokens.tolist() == plain and generation.stats()["by_source"][FORCED]["accepted"] > 0


@pytest.mark.parametrize("after", [1, 9, 30])
def test_a_text_cut_anywhere_is_resumed_to_the_same_text(tiny_engine, plain, tmp_path, after):
    generation = tiny_engine.generate("It was", params_of(), journal=tmp_path)
    for _ in range(after):
        next(generation)
    generation.close()
    resumed = tiny_engine.with_drafter("suffix").resume(tmp_path)
    list(resumed)
    assert resumed.tokens.tolist() == plain


def test_another_version_of_llguidance_is_refused_like_other_kernels(tiny_engine, tmp_path, monkeypatch):
    with tiny_engine.generate("It was", params_of(), journal=tmp_path) as generation:
        next(generation)
    monkeypatch.setattr(provenance.grammar, "version", lambda: "0.1")
    with pytest.raises(JournalError, match=r"begun with other kernels: llguidance .*, now 0.1"):
        tiny_engine.resume(tmp_path)


def test_a_journal_of_a_schema_whose_objects_were_open_is_refused_by_name(tiny_engine, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "_arithmetic", lambda model, _: model.arithmetic | {
            "llguidance": llguidance.__version__})
        with tiny_engine.generate("It was", params_of(), journal=tmp_path) as generation:
            next(generation)
    with pytest.raises(JournalError, match="begun with other kernels: schemas open, now closed"):
        tiny_engine.resume(tmp_path)


# Every text matches


@pytest.mark.parametrize("seed", range(4))
def test_every_text_of_a_schema_validates(engine, seed):
    text = text_of(engine.generate("It was", params_of(seed=seed, temperature=1.2)))
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("expression", ["[0-9]{3}-[a-f]+x", "(yes|no|perhaps)( and (yes|no)){2}", "a{2,5}b?c",
                                        "(?i)the [a-z ]{5,20}\\."])
def test_every_text_of_a_regular_expression_matches_as_a_whole(engine, expression):
    for seed in range(3):
        generation = engine.generate("It was", params_of(("regex", expression), seed=seed, max_new_tokens=120))
        text = text_of(generation)
        assert re.fullmatch(expression, text) or generation.finish_reason == "length", text
    assert re.fullmatch(expression, text)


def test_a_grammar_may_be_in_the_notation_of_lark_or_of_llama_cpp(engine):
    for grammar in ('start: "Chapter " /[1-9]/ ": " /[a-z]{3,9}/', 'root ::= "Chapter " [1-9] ": " [a-z]{3,9}'):
        text = text_of(engine.generate("It was", params_of(("grammar", grammar))))
        assert re.fullmatch(r"Chapter [1-9]: [a-z]{3,9}", text), text


def test_a_choice_is_one_of_its_texts(engine):
    choices = ["war & peace (1869)", "a.b*c", "line\nbreak", "{x}[y]-^$|\\"]
    structure = structured_outputs("guided_choice", choices)
    texts = {text_of(engine.generate("It was", params_of(structure, seed=seed, temperature=50.0, temperature_last=True,
                                                         min_p=0.0))) for seed in range(8)}
    assert texts <= set(choices) and len(texts) > 1


def test_a_text_that_is_cut_short_says_so(engine):
    generation = engine.generate("It was", params_of(max_new_tokens=12))
    assert text_of(generation) and generation.finish_reason == "length"


# The faults that other engines had


def obvious_mask(rules: GrammarRules, tokens: list[int]) -> np.ndarray | None:
    """The mask after some tokens, from a new matcher."""
    matcher = llguidance.LLMatcher(rules.tokenizer, rules.grammar)
    for token in tokens:
        if token in rules.eos_ids:
            return rules.end_only
        if not matcher.try_consume_tokens([token]):
            return None
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(packed, bitorder="little")[: rules.vocabulary].astype(bool)


def test_every_node_has_the_mask_of_its_own_path_and_drafts_leave_no_trace(engine, rules):
    """State advanced by rejected drafts (vllm-project/vllm#44006), rows without a mask after an invalid draft
    (vllm-project/vllm#54442), masks of finished matchers (sgl-project/sglang#15373)."""
    pick, text = random.Random(5), [*engine.encode('{"title": "a b", "chapters": [{"brief": "war", "words": 200}]}')]
    context, grammar = Context([4, 7]), Grammar(rules)
    written: list[int] = []
    while (mask := grammar.mask(context, [])) is not None and not mask[rules.eos_ids[0]] and len(written) < 60:
        allowed = np.flatnonzero(mask)
        parents, tokens = [-1], [context.last]
        for node in range(1, 14):
            parents.append(pick.randrange(node))
            tokens.append(int(pick.choice(allowed)) if pick.random() < 0.6 else pick.choice(text))
        tree = Tree(tuple(tokens), tuple(parents), ("",) + ("liar",) * 13)
        for node, found in enumerate(grammar.masks(tree, context)):
            path = [tree.tokens[n] for n in tree.path(node)[1:]]
            expected = obvious_mask(rules, [*written, *path])
            assert (found is None) == (expected is None)
            assert found is None or np.array_equal(found, expected)
        token = int(pick.choice(allowed))
        written.append(token)
        context.extend([token])
    assert len(written) > 10


def test_the_end_may_be_inside_a_draft_and_nothing_follows_it(engine):
    """The end of the grammar was missed inside an accepted run (sgl-project/sglang#21723)."""
    rules = engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", "ab")))
    first, end = engine.tokenizer.encode("ab", add_special_tokens=False), rules.eos_ids[0]
    grammar, context = Grammar(rules), Context([5])
    masks = grammar.masks(chain(5, [*first, end, first[0]], "liar"), context)
    assert [mask is not None for mask in masks] == [True] * (len(first) + 2) + [False]
    assert np.flatnonzero(masks[len(first)]).tolist() == [end]
    context.extend([*first, end])
    assert np.array_equal(grammar.mask(context, []), rules.end_only)
    assert grammar.extended(root_only(end), context, 5) == root_only(end)


def test_rows_of_the_vocabulary_beyond_the_tokenizer_are_masked(engine):
    size = engine.tokenizer.size
    words = longdraft.sampling.grammar.new_tokenizer(engine.tokenizer._tokenizer.to_str(), size + 64, 1)
    rules = GrammarRules.compile(("regex", ".*"), words, (1, size + 3), size + 64)
    mask = Grammar(rules).mask(Context([5]), [])
    assert mask[: size].sum() > 1000 and mask[1] and np.flatnonzero(mask[size:]).tolist() == [3]  # the second end


def test_forced_tokens_are_always_right(engine):
    generation = engine.generate("It was", params_of(("regex", "Once upon a time there was (a|no) king\\.")))
    assert re.fullmatch(r"Once upon a time there was (a|no) king\.", text_of(generation))
    stats = generation.stats()
    assert stats["by_source"][FORCED]["accepted"] > 0.8 * stats["new_tokens"] - 3 and stats["steps"] <= 4


# Requests


@pytest.mark.parametrize("name, value, expected", [
    ("response_format", {"type": "text"}, None),
    ("response_format", {"type": "json_object"}, ("json", '{"type": "object"}')),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}},
     ("json", '{"type": "null"}')),
    ("structured_outputs", {"regex": "a+", "json": None}, ("regex", "a+")),
    ("structured_outputs", {"json_object": True}, ("json", '{"type": "object"}')),
    ("structured_outputs", {}, None),
    ("guided_json", {"type": "null"}, ("json", '{"type": "null"}')),
    ("guided_json", '{"type": "null"}', ("json", '{"type": "null"}')),
    ("guided_regex", "[a-z]", ("regex", "[a-z]")),
    ("guided_choice", ["a", "b.c"], ("regex", r"(a)|(b\.c)")),
    ("guided_grammar", 'start: "a"', ("grammar", 'start: "a"')),
    ("grammar", 'root ::= "a"', ("grammar", 'root ::= "a"')),
    ("json_schema", {"type": "null"}, ("json", '{"type": "null"}')),
])
def test_the_names_of_other_tools_mean_the_same(name, value, expected):
    params = SamplingParams.from_names({name: value})
    assert params.structured_outputs == (expected or ())


@pytest.mark.parametrize("settings, message", [
    ({"response_format": {"type": "xml"}}, "response_format is .* allowed: type text, json_object, or json_schema"),
    ({"guided_choice": []}, "guided_choice is .* allowed: a list of texts"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "an object with one of json, regex, choice"),
    ({"guided_regex": "a", "guided_json": {}}, "contradicts another spelling"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos is True; allowed: false with structured_outputs"),
    ({"guided_regex": "a", "min_new_tokens": 3}, "min_new_tokens is 3; allowed: 0 with structured_outputs"),
    ({"guided_regex": "a", "no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3; allowed: off with structured"),
    ({"guided_regex": "a", "banned_strings": ["b"]}, "banned_strings is .* allowed: off with structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "allowed: 1 to"),
])
def test_wrong_requests_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams.from_names(settings)


@pytest.mark.parametrize("structure, message", [
    (("json", '{"type": "nonsense"}'), "the JSON schema cannot be used: Invalid type: nonsense"),
    (("json", '{"type": "object", "unevaluatedProperties": false}'), "Unimplemented keys"),
    (("json", '{"type": '), "the JSON schema cannot be used: Expecting value"),
    (("regex", "(a"), "the regular expression cannot be used: .*unclosed group"),
    (("grammar", "start: nonsense"), "the grammar cannot be used"),
])
def test_a_bad_grammar_is_one_clear_line(engine, structure, message):
    with pytest.raises(UsageError, match=message) as caught:
        engine.generate("It was", params_of(structure))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


# A grammar that is too much work ends its request only


def of_chain(notation: str, length: int) -> str:
    """Rules of which each names the next one."""
    equals, start = (":", "start") if notation == "lark" else ("::=", "root")
    return "".join([f"{start} {equals} r0\n", *(f"r{i} {equals} r{i + 1}\n" for i in range(length)),
                    f'r{length} {equals} "x"\n'])


def of_definitions(length: int, keyword: str) -> str:
    """A schema whose definitions each name the next one."""
    following = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(length)]
    links = {f"d{i}": {"allOf": [each]} if keyword == "allOf" else {"type": "array", keyword: each}
             for i, each in enumerate(following)}
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def doubled(times: int) -> str:
    return "".join(["start: T0\n", *(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(times)), f'T{times}: "x"\n'])


HEAVY = {
    "a chain of Lark rules": ("grammar", of_chain("lark", 40_000)),
    "a chain of GBNF rules": ("grammar", of_chain("gbnf", 30_000)),
    "definitions that name the next in items": ("json", of_definitions(15_000, "items")),
    "definitions that name the next in allOf": ("json", of_definitions(15_000, "allOf")),
    "terminals that double": ("grammar", doubled(20)),
    "a long text that is forced": ("json", json.dumps({"const": "x" * 100_000})),
    "alternatives": ("grammar", "start: " + " | ".join(f'"w{i}"' for i in range(60_000))),
    "nested schemas": ("json", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    "nested parentheses": ("regex", "(" * 100_000 + "a" + ")" * 100_000)}


@pytest.mark.full
@pytest.mark.parametrize("name", HEAVY)
def test_a_grammar_that_is_too_much_work_is_one_clear_line(engine, name):
    compiler = engine.tokenizer.grammars(engine.model.config.vocab_size, engine.model.config.eos_token_ids)
    for _ in range(2):  # the second time from memory
        with pytest.raises(UsageError, match=r"structured_outputs: the .* (cannot be used|takes more|is nested too)"):
            engine.generate("It was", params_of(HEAVY[name]))
    assert compiler.is_known(HEAVY[name], "")
    assert re.fullmatch("[ab]{3}", text_of(engine.generate("It was", params_of(("regex", "[ab]{3}")))))


@pytest.mark.parametrize("structure", [("grammar", of_chain("lark", 3000)), ("json", of_definitions(1500, "items"))])
def test_long_chains_of_rules_that_end_a_thread_of_common_size_are_compiled_on_a_large_stack(engine, structure):
    assert text_of(engine.generate("It was", params_of(structure, max_new_tokens=2)))


def write_first_tokens(grammar: Grammar, context: Context) -> None:
    """Write the first allowed token again and again."""
    while True:
        context.extend([int(np.flatnonzero(grammar.mask(context, []))[0])])


def test_the_latest_results_are_kept_within_a_number_of_characters(engine, monkeypatch):
    rules = {text: engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", text))) for text in "ab"}
    assert engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", "a"))) is rules["a"]
    monkeypatch.setattr(longdraft.sampling.grammar, "_MAX_KEPT_CHARACTERS", 9000)
    engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", "c")))
    known = [engine.loaded.knows_grammar(SamplingParams(structured_outputs=("regex", text)), []) for text in "abc"]
    assert known == [True, False, True]


def test_a_text_that_exhausts_its_grammar_takes_nothing_from_other_texts_with_the_same_grammar(engine):
    """Copies of a matcher share the states of the lexer, so that each text has a matcher of its own."""
    rules = engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", "[ab](((a{50}){50}){50})")))
    counts = []
    for _ in range(2):
        grammar, context = Grammar(rules), Context([5])
        with pytest.raises(UsageError, match="too many"):
            write_first_tokens(grammar, context)
        counts.append(len(context))
    assert counts[0] == counts[1] > 1


@pytest.mark.parametrize("structure, message", [
    (("json", '{"$ref": "#"}'), "the JSON schema cannot be used: no text matches it"),
    (("json", "false"), "the JSON schema cannot be used: no text matches it"),
    (("json", "3"), "the JSON schema cannot be used: it is 3; allowed: an object, or true"),
    (("json", '["a"]'), "the JSON schema cannot be used: it is .* allowed: an object, or true"),
    (("grammar", "start: start"), "the grammar cannot be used: no text matches it"),
])
def test_a_grammar_without_any_text_is_refused(engine, structure, message):
    with pytest.raises(UsageError, match=message):
        engine.generate("It was", params_of(structure))


def test_the_schema_true_allows_every_value(engine):
    json.loads(text_of(engine.generate("It was", params_of(("json", "true"), max_new_tokens=300, seed=4))))


def test_an_object_has_the_properties_that_its_schema_lists_and_no_others(engine):
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}})
    for structure in (("json", schema), ("json", schema[:-1] + ', "x-guidance": {"lenient": true}}')):
        for seed in range(3):
            assert json.loads(text_of(engine.generate("It was", params_of(structure, seed=seed)))) in ({}, {"a": 1})


def test_an_error_of_the_engine_is_shown_instead_of_a_mismatch(engine):
    rules = engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", "[ab](((a{50}){50}){50})")))
    grammar, context = Grammar(rules), Context([5])
    with pytest.raises(UsageError, match="structured_outputs cannot be followed: lexer error: too many"):
        write_first_tokens(grammar, context)
    other = Grammar(engine.loaded.grammar_rules(SamplingParams(structured_outputs=("regex", "x[0-9]"))))
    with pytest.raises(UsageError, match="the text does not match structured_outputs"):
        other.mask(context, [])


def test_without_llguidance_the_line_says_what_to_install(engine, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[structured\]'"):
        engine.generate("It was", params_of())


@pytest.mark.full
def test_the_command_line_takes_a_schema_a_regular_expression_or_a_grammar(tmp_path, capfd):
    command = ["generate", "It was", "--seed", "1", "--quiet", "--threads", "1", "--drafter", "suffix"]
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert run([*command, "--max-new-tokens", "200", "--json-schema", str(tmp_path / "schema.json")]) == 0
    jsonschema.validate(json.loads(capfd.readouterr().out), SCHEMA)
    assert run([*command, "--regex", "[a-c]{4}"]) == 0
    assert re.fullmatch("[a-c]{4}", capfd.readouterr().out.rstrip("\n"))
    assert run([*command, "--regex", "a", "--grammar", "x"]) == 2
    assert "--regex and --grammar are given; give one of them" in capfd.readouterr().err
    assert run([*command, "--max-new-tokens", "200", "--json-schema", json.dumps(SCHEMA)]) == 0
    jsonschema.validate(json.loads(capfd.readouterr().out), SCHEMA)
    assert run([*command, "--json-schema", "{"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert run([*command, "--json-schema", str(tmp_path / "none.json")]) == 2
    assert "--json-schema cannot read" in capfd.readouterr().err


# After the thinking


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> longdraft.Engine:
    """The bundled model with `</think>` as a token of its own, and a template that opens the thinking."""
    folder = serving.talkative(tmp_path_factory.mktemp("thinker") / "model")
    words = json.loads((folder / "tokenizer.json").read_text())
    unused = max(words["model"]["vocab"], key=words["model"]["vocab"].get)
    number = words["model"]["vocab"].pop(unused)
    words["model"]["merges"] = [pair for pair in words["model"]["merges"]
                                if "".join(pair if isinstance(pair, list) else pair.split(" ")) != unused]
    words["added_tokens"].append(dict(id=number, content="</think>", single_word=False, lstrip=False, rstrip=False,
                                      normalized=False, special=False))
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n")
    return longdraft.load(str(folder), drafter="suffix", threads=1)


AFTER = [(("regex", "[ab]{3}/[0-9]"), r"[ab]{3}/[0-9]"), (("regex", r"[ab]{3}\/[0-9]"), r"[ab]{3}/[0-9]"),
         (structured_outputs("guided_choice", ["yes", "no", "N/A", "a\nb"]), r"(yes|no|N/A|a\nb)"),
         (("grammar", 'start: ("x" | "y")+ "."'), r"[xy]+\."),
          (("json", '{"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}'), r"\[\s*1\s*,\s*1\s*\]")]


@pytest.mark.parametrize("structure, matches", AFTER)
def test_the_grammar_begins_after_the_thinking_that_the_prompt_opens(thinker, structure, matches):
    """What comes before is free. A bias makes the model write the tag."""
    ids = thinker.chat("A plan.")
    tag, = thinker.tokenizer.encode("</think>", add_special_tokens=False)
    params = params_of(structure, max_new_tokens=300, logit_bias=((tag, 9.0),))
    plain = text_of(thinker.with_drafter("plain").generate(ids, params))
    assert text_of(thinker.generate(ids, params)) == plain
    free, _, rest = plain.partition("</think>")
    assert free and re.fullmatch(r"[ \n]{0,2}" + matches, rest), plain


@pytest.mark.parametrize("structure, matches", AFTER)
def test_the_grammar_begins_after_a_text_that_is_named(engine, structure, matches):
    params = params_of(structure, max_new_tokens=300, structured_after=".")
    plain = text_of(engine.with_drafter("plain").generate("It was", params))
    assert text_of(engine.generate("It was", params)) == plain
    assert re.fullmatch(r"[^.]+\.[ \n]{0,2}" + matches, plain), plain
    with pytest.raises(UsageError, match=r"structured_after is 'x'; allowed: .*, with structured_outputs"):
        SamplingParams(structured_after="x")
