"""Tokenizers, chat templates and random answers of each form of calls."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from helpers.checkpoints import write_tokenizer
from longdraft.request.structured import Structure
from longdraft.sampling.grammar import checked, new_tokenizer
from longdraft.text.harmony import MARKS
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.forms import FORMS, GENERIC

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {
    "type": "object", "required": ["city", "tags"], "properties": {
        "city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9}, "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]}},
    "$defs": {"place": {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"},
                                                                           "name": {"type": "string"}}}}}}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ALL = {form.name: form for form in (*FORMS, GENERIC)}

_ROLES = "<{{ m.role }}>{{ m.content }}"
_XML = ("{% for k, v in f.arguments.items() %}BEFORE{{ k }}BEHIND{{ v if v is string else v | tojson }}END{% endfor %}")


def _template(calls: str, before: str = "", between: str = "", behind: str = "", gap: str = "") -> str:
    """A chat template whose calls are written as `calls` says, for the function f with the id i."""
    return ("{{ tools | tojson if tools else '' }}{% for m in messages %}" + _ROLES + "{% if m.tool_calls %}"
            + (f"{{% if m.content %}}{{{{ {gap!r} }}}}{{% endif %}}" if gap else "") + before
            + "{% for c in m.tool_calls %}{% set f = c.function %}{% set i = c.id %}"
            + (f"{{% if not loop.first %}}{{{{ {between!r} }}}}{{% endif %}}" if between else "")
            + calls + "{% endfor %}" + behind + "{% endif %}{% endfor %}")


def _parameters(before: str, behind: str, end: str) -> str:
    return _XML.replace("BEFORE", before).replace("BEHIND", behind).replace("END", f"{{{{ {end!r} }}}}")


_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}'
_GEMMA_VALUE = """{%- macro value(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is none -%}null
{%- elif v is mapping -%}{{ '{' }}{%- for k, w in v | dictsort -%}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}
{%- endfor -%}{{ '}' }}
{%- elif v is sequence -%}[{%- for w in v -%}{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"""


def _dsml(envelope: str) -> str:
    behind = """{{ '" string="true">' if v is string else '" string="false">' }}"""
    parameters = _parameters('<｜DSML｜parameter name="', behind, "</｜DSML｜parameter>\n")
    calls = ("{{ '<｜DSML｜invoke name=\"' + f.name + '\">\n' }}" + parameters + "{{ '\n' if not f.arguments }}"
             + "</｜DSML｜invoke>")
    return _template(calls, f"{{{{ '\n\n<｜DSML｜{envelope}>\n' }}}}", "\n", f"{{{{ '\n</｜DSML｜{envelope}>' }}}}")


TEMPLATES = {  # with the spelling of each family's own template
    "harmony": _template("{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
                         " to={{ 'functions.' + f.name }}<|channel|>commentary json<|message|>"
                         "{{ f.arguments | tojson }}"),
    "gemma4": _GEMMA_VALUE + _template("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"),
    "glm-lines": _template("{{ '<tool_call>' + f.name + '\n' }}" + _parameters(
        "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>", between="\n", gap="\n"),
    "glm": _template("<tool_call>{{ f.name }}" + _parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
                     + "</tool_call>"),
    "seed-xml": _template("{{ '<seed:tool_call>\n<function=' + f.name + '>\n' }}" + _parameters(
        "<parameter=", ">", "</parameter>\n") + "{{ '</function>\n</seed:tool_call>' }}", between="\n", gap="\n\n"),
    "qwen-xml": _template("{{ '<tool_call>\n<function=' + f.name + '>\n' }}" + _parameters(
        "<parameter=", "{{ '>\n' }}", "\n</parameter>\n") + "{{ '</function>\n</tool_call>' }}", between="\n",
        gap="\n\n"),
    "hermes": _template("{{ '<tool_call>\n' }}" + _JSON + "{{ '}\n</tool_call>' }}", between="\n", gap="\n"),
    "hermes-inline": _template('{{ \'<tool_call>{"name": "\' }}' + _JSON.removeprefix('{"name": "')
                               + "{{ '}</tool_call>' }}", between="\n", gap="\n"),
    "mistral-args": _template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek-json": _template(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name + '\n```json\n' + f.arguments + '\n```' }}"
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek": _template("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>",
                          "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseek-v3.2": _dsml("function_calls"),
    "deepseek-v4": _dsml("tool_calls"),
    "olmo3": _template("{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
                       "{{ ', ' if not loop.last }}{% endfor %})", "<function_calls>", "\n", "</function_calls>"),
    "llama3": _template('{{ \'{"name": "\' + f.name + \'", "parameters": \' + f.arguments | tojson + \'}\' }}'
                        "{# ipython #}"),
    "granite": "<|start_of_role|><|tool_call|>{% for m in messages %}" + _ROLES + "{% endfor %}",
    "phi4": "<|tool_call|>{% for m in messages %}" + _ROLES + "{% endfor %}",
    "generic": "{% for m in messages %}" + _ROLES + "{% endfor %}",
}


def new_form_tokenizer(folder: Path, name: str, kind: str) -> Tokenizer:
    """A byte-level tokenizer in which the form's markers are special tokens, added tokens, or text, as `kind` says."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    markers = [*MARKS, "<|constrain|>", "<|call|>"] if name == "harmony" else list(ALL[name].markers)
    if kind == "special" or name == "harmony":
        tokenizer.add_special_tokens(markers)
    elif kind == "added":
        tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (*markers, "<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def random_answer(tokenizer: Tokenizer, structure: Structure, draw: random.Random, limit: int = 400
                  ) -> tuple[list[int], bool]:
    """The tokens of a random answer that the grammar allows, and whether it is complete."""
    from llguidance import LLMatcher

    end = 1
    engine = new_tokenizer(tokenizer._tokenizer.to_str(), tokenizer.size, end)
    matcher = LLMatcher(engine, checked(engine, *structure, ""), log_level=0)
    likely = {*tokenizer.added_tokens.values(), *tokenizer.encode('<tool_cal>\n{"name', add_special_tokens=False)}
    tokens: list[int] = []
    while len(tokens) < limit:
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(packed, bitorder="little")[: tokenizer.size]).tolist()
        preferred = [token for token in allowed if token in likely and token > end]
        token = draw.choice(preferred if preferred and draw.random() < 0.5 else allowed)
        if end in allowed and (token == end or draw.random() < 0.3):
            return tokens, True
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokens, False
