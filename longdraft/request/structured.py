"""Structured output: what a text must match, from the names that clients and other tools use for it.

    structured_outputs("guided_regex", "[0-9]+")                                  -> ("regex", "[0-9]+")
    structured_outputs("response_format", {"type": "json_object"})                -> ("json", '{"type": "object"}')
    structured_outputs("structured_outputs", {"choice": ["yes", "no"]})           -> ("regex", "(yes)|(no)")

The setting is a pair of a kind and a text: ("json", a JSON schema), ("regex", a regular expression of the whole text),
("grammar", a grammar in Lark's or llama.cpp's notation), and for requests with tools ("tools", a grammar that
longdraft/text/tools/grammar.py writes). longdraft/sampling/grammar.py enforces it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from longdraft.errors import UsageError

Structure = tuple[str, str]
KINDS = ("json", "regex", "grammar", "tools")  # the last one: an answer that may call functions
MAX_STRUCTURE = 1 << 20  # characters of a schema, an expression or a grammar
# Other names of `structured_outputs` in requests: OpenAI's, vLLM's old ones, and llama.cpp's.
SPELLINGS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema",
             "grammar")
_OBJECT = json.dumps({"type": "object"})


def structured_outputs(name: str, value: Any) -> Structure | None:
    """The pair for a setting; None where it asks for nothing. UsageError for what cannot be understood."""
    if isinstance(value, tuple) and not value:
        return None
    if value == "" and name != "structured_outputs":  # clients send their empty fields
        return None
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _by_kind(name, value)
    if name == "json_schema":
        return _by_kind(name, {"json": value})
    return _by_kind(name, {name.removeprefix("guided_"): value})


def check_structure(name: str, structure: object) -> None:
    """Raise UsageError unless it is a pair of a kind and a text, or empty."""
    if structure == ():
        return
    is_pair = isinstance(structure, tuple) and len(structure) == 2 and all(isinstance(part, str) for part in structure)
    if not isinstance(structure, tuple) or not is_pair or structure[0] not in KINDS:
        raise UsageError(f"structured_outputs is {str(structure)[:80]!r}; allowed: a pair of {', '.join(KINDS)} and a "
                         "text", "structured_outputs")
    if not structure[1] or len(structure[1]) > MAX_STRUCTURE:
        raise UsageError(f"structured_outputs has {len(structure[1]):,} characters; allowed: 1 to {MAX_STRUCTURE:,}",
                         "structured_outputs")


def _response_format(value: Any) -> Structure | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json", _OBJECT
    schema = value.get("json_schema") if isinstance(value, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping) or "schema" not in schema:
        raise UsageError(f"response_format is {str(value)[:80]!r}; allowed: type text, json_object, or json_schema "
                         "with json_schema: {name, schema}", "response_format")
    return _by_kind("response_format", {"json": schema["schema"]})


def _by_kind(name: str, value: Any) -> Structure | None:
    if isinstance(value, tuple | list) and len(value) == 2 and value[0] in KINDS:
        return value[0], value[1]  # from a journal, or written in Python
    given = {kind: content for kind, content in value.items() if content is not None} if isinstance(
        value, Mapping) else {}
    if not given and isinstance(value, Mapping):
        return None
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    if len(given) != 1 or next(iter(given)) not in kinds:
        raise UsageError(f"{name} is {str(value)[:80]!r}; allowed: an object with one of {', '.join(kinds)}", name)
    (kind, content), = given.items()
    if kind == "json_object":
        return ("json", _OBJECT) if content else None
    if kind == "choice":
        if not isinstance(content, list) or not content or not all(isinstance(each, str) and each for each in content):
            raise UsageError(f"{name} is {str(content)[:80]!r}; allowed: a list of texts to choose from", name)
        return "regex", "|".join(f"({escaped(each)})" for each in content)
    if kind == "json" and not isinstance(content, str):
        if not isinstance(content, Mapping | bool):
            raise UsageError(f"{name} is {str(content)[:80]!r}; allowed: a JSON schema", name)
        return "json", json.dumps(content)
    if not isinstance(content, str):
        raise UsageError(f"{name} is {str(content)[:80]!r}; allowed: a text", name)
    return kind, content


def escaped(text: str) -> str:
    """The regular expression of exactly this text, as Rust's parser reads it."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text).replace("\n", r"\n")
