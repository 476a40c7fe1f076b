"""Tools in request bodies: the functions that a model may call, and the calls and results among messages.

    parse_tools({"tools": [{"type": "function", "function": {"name": "get", "parameters": {...}}}],
                 "tool_choice": "required"})         -> ToolRequest
    history(messages)                                -> messages whose calls have arguments as objects

longdraft/text/tools/ has what models write and read of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longdraft.errors import UsageError

FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")  # of bodies
# How models write calls: longdraft/text/tools/forms.py
FORM_NAMES = ("auto", "harmony", "gemma4", "glm-lines", "glm", "seed-xml", "qwen-xml", "granite", "hermes-inline",
              "hermes", "phi4", "mistral-args", "mistral-space", "mistral", "deepseek-json", "deepseek",
              "deepseek-v3.2", "deepseek-v4", "olmo3", "llama3", "generic")
MAX_TOOLS = 128  # as OpenAI's
MAX_TOOLS_CHARACTERS = 1 << 20  # of all definitions as JSON; the largest known agents have some 60,000
MAX_SCHEMA_DEPTH = 64  # levels of lists and objects in a schema: converting them recurses
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")  # what every form can write without escapes
_NAMES = "1 to 128 letters, digits, '_', '.', ':' and '-'"
_CHOICES = ("'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
            "{'type': 'allowed_tools', ...}")
# Keywords whose value is no schema for the members of the object itself.
_COMBINATORS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "patternProperties",
                "additionalProperties", "unevaluatedProperties")
_OF_ONE_OBJECT = ("properties", "allOf", "anyOf", "oneOf", "$ref")  # two of them beside each other describe one object


class Tool(NamedTuple):
    """One function. parameters: the JSON schema of its arguments, an object; definition: as the request gives it"""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    definition: Mapping[str, Any]


@dataclass(frozen=True)
class ToolRequest:
    """The tools of one request.

    declared     all functions, which the prompt lists
    callable     those that the answer may call; none: it may call none
    is_required  the answer is a call
    is_parallel  an answer may have several calls
    is_legacy    the request has OpenAI's old `functions`
    """

    declared: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    is_required: bool = False
    is_parallel: bool = True
    is_legacy: bool = False

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The functions as chat templates expect them."""
        return [{"type": "function", "function": dict(tool.definition)} for tool in self.declared]


def parse_tools(body: Mapping[str, Any]) -> ToolRequest | None:
    """The tools of a body, from its members in FIELDS; None if it has none. UsageError for what cannot be used."""
    functions = body.get("functions") or []
    is_legacy = bool(functions)
    if is_legacy and body.get("tools"):
        raise UsageError("the request has tools and functions, their old name; give one of them", "functions")
    given = [{"type": "function", "function": each} for each in _list(functions, "functions")] if is_legacy else (
        _list(body.get("tools") or [], "tools"))
    param = "functions" if is_legacy else "tools"
    choice = body.get("function_call") if is_legacy else body.get("tool_choice")
    for name, needed in (("tool_choice", not given or is_legacy), ("function_call", not is_legacy)):
        if needed and body.get(name) not in (None, "none", "auto"):
            raise UsageError(f"{name} is {_shown(body[name])}, and the request has no "
                             f"{'tools that are ' if name == 'tool_choice' else ''}functions", name)
    if not given:
        return None
    if len(given) > MAX_TOOLS:
        raise UsageError(f"{param} has {len(given):,} functions; allowed: {MAX_TOOLS}", param)
    declared = tuple(_tool(each, f"{param}.{index}", param) for index, each in enumerate(given))
    if len(json.dumps([each.definition for each in declared])) > MAX_TOOLS_CHARACTERS:
        raise UsageError(f"{param} has more than {MAX_TOOLS_CHARACTERS:,} characters; give fewer functions", param)
    names = [tool.name for tool in declared]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{param} has two functions with the name {twice!r}; each needs its own", param)
    mode, allowed = _choice(choice, "function_call" if is_legacy else "tool_choice")
    if unknown := next((name for name in allowed or () if name not in names), None):
        raise UsageError(f"tool_choice names {unknown[:80]!r}; the request has {', '.join(names)[:200]}", "tool_choice")
    callable = () if mode == "none" else tuple(tool for tool in declared if allowed is None or tool.name in allowed)
    parallel = body.get("parallel_tool_calls")
    if not (parallel is None or isinstance(parallel, bool)):
        raise UsageError(f"parallel_tool_calls is {_shown(parallel)}; allowed: true or false", "parallel_tool_calls")
    return ToolRequest(declared, callable, mode == "required" and bool(callable),
                       parallel is not False and not is_legacy, is_legacy)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name} is {_shown(value)}; allowed: a list of functions", name)
    return list(value)


def _tool(given: Any, place: str, param: str) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    kind = given.get("type", "function") if isinstance(given, Mapping) else given
    if kind != "function" or not isinstance(function, Mapping):
        raise UsageError(f"{place} is {_shown(given)}; allowed: {{'type': 'function', 'function': {{'name': ...}}}}",
                         param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{place} has the name {_shown(name)}; allowed: {_NAMES}", param)
    if not isinstance(parameters, Mapping | None):
        raise UsageError(f"{place}: parameters is {_shown(parameters)}; allowed: a JSON schema of an object", param)
    schema = dict(parameters or {})
    if schema.get("type", "object") != "object":
        raise UsageError(f"{place}: parameters has the type {_shown(schema['type'])}; allowed: 'object'", param)
    if not is_shallow(schema, MAX_SCHEMA_DEPTH):
        raise UsageError(f"{place}: parameters nests lists or objects more than {MAX_SCHEMA_DEPTH} deep; allowed: "
                         f"{MAX_SCHEMA_DEPTH}", param)
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise UsageError(f"{place}: strict is {_shown(strict)}; allowed: true or false", param)
    schema = {"type": "object", "properties": {}} | schema
    definition = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return Tool(name, schema, bool(strict), definition | {"parameters": schema})


def is_shallow(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested at most `levels` deep."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels > 0 and all(is_shallow(each, levels - 1) for each in inner)


def _choice(choice: Any, name: str) -> tuple[str, list[str] | None]:
    """none, auto or required; and the names of the functions that may be called, None: all."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice or "auto", None
    if isinstance(choice, Mapping):
        inner = choice.get("allowed_tools", choice) if choice.get("type") == "allowed_tools" else None
        if isinstance(inner, Mapping) and inner.get("mode") in ("auto", "required") and isinstance(
                inner.get("tools"), list):
            return inner["mode"], [_chosen_name(each, name) for each in inner["tools"]]
        if inner is None:
            return "required", [_chosen_name(choice, name)]
    raise UsageError(f"{name} is {_shown(choice)}; allowed: {_CHOICES}", name)


def _chosen_name(choice: Any, param: str) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UsageError(f"{param} is {_shown(choice)}; allowed: {_CHOICES}", param)
    return name


def _shown(value: Any) -> str:
    return repr(value)[:80]


def closed_schema(schema: Any) -> Any:
    """The schema without descriptions, in which objects have the properties that they list and no others, unless they
    say otherwise or are parts of another object. What matches it matches the schema."""
    return _closed(schema, _parts(schema))


def _closed(schema: Any, parts: Container[int]) -> Any:
    if isinstance(schema, list | tuple):
        return [_closed(each, parts) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("description", "title", "examples", "default", "$comment", "deprecated"):
            continue
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            closed[key] = {name: _closed(each, parts) for name, each in value.items()}
        else:
            closed[key] = value if key in ("enum", "const", "required") else _closed(value, parts)
    is_open = id(schema) in parts or any(key in schema for key in _COMBINATORS)
    if isinstance(schema.get("properties"), Mapping) and not is_open:
        closed["additionalProperties"] = False
    return closed


def _parts(root: Any) -> set[int]:
    """The ids of the schemas within one whose objects have further properties by another schema, such as the members of
    `allOf`."""
    schemas, waiting = [root], []
    for each in schemas:  # which grows
        if isinstance(each, Mapping):
            schemas += each.values()
            if sum(key in each for key in _OF_ONE_OBJECT) > 1 or _has_several(each.get("allOf")):
                waiting += _members(each, root)
        elif isinstance(each, list | tuple):
            schemas += each
    parts: set[int] = set()
    for each in waiting:  # which grows
        if id(each) not in parts:
            parts.add(id(each))
            waiting += _members(each, root)
    return parts


def _members(schema: Mapping[str, Any], root: Any) -> list[Mapping[str, Any]]:
    """The schemas, apart from its properties, that what matches this schema matches, or one of them."""
    members = [each for key in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(key), list | tuple)
               for each in schema[key]]
    if isinstance(place := schema.get("$ref"), str):
        target = root
        for name in place.split("/")[1:]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        members.append(target)
    return [each for each in members if isinstance(each, Mapping)]


def _has_several(schemas: Any) -> bool:
    return isinstance(schemas, list | tuple) and len(schemas) > 1


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None for what is not the JSON of one, such as those of a call that was
    cut."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_MEMBERS = (("function_call", Mapping, "an object"), ("tool_call_id", str, "a text"), ("tool_calls", list, "a list"))


def history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their calls as chat templates expect them: arguments are objects, results name their function.

    OpenAI's old `function_call` and the role `function` become `tool_calls` and the role `tool`. Arguments that are not
    the JSON of an object, such as those of a call that was cut, become {"invalid": text}.

    Raises UsageError for a result of no earlier call.
    """
    names: dict[str, str] = {}  # of the calls so far, by their ids
    plain = []
    for index, message in enumerate(messages):
        message = {name: value for name, value in message.items() if value is not None or name == "content"}
        place = f"messages.{index}"
        for name, kind, words in _MEMBERS:
            if not isinstance(message.get(name), kind | None):
                raise UsageError(f"{place}.{name} is {_shown(message[name])}; allowed: {words}", "messages")
        if old := message.pop("function_call", None):
            message["tool_calls"] = [{"id": f"call_{index}", "type": "function", "function": old}]
        if message.get("role") == "function":
            matching = [key for key, name in names.items() if name == message.get("name")]
            message |= {"role": "tool", "tool_call_id": matching[-1] if matching else ""}
        if message.get("tool_calls"):
            if message.get("role") != "assistant":
                raise UsageError(f"{place} has tool_calls and the role {_shown(message.get('role'))}; allowed: "
                                 "assistant", "messages.tool_calls")
            calls = [_call(each, f"{place}.tool_calls.{i}")
                     for i, each in enumerate(_list(message["tool_calls"], f"{place}.tool_calls"))]
            names |= {call["id"]: call["function"]["name"] for call in calls}
            message |= {"tool_calls": calls, "content": message.get("content") or ""}
        else:
            message.pop("tool_calls", None)
        if message.get("role") == "tool":
            given = message.get("tool_call_id")
            if given not in names:
                raise UsageError(f"{place}: tool_call_id is {_shown(given)}, and no earlier message has a call with "
                                 "this id", "messages")
            message["name"] = names[given]
        plain.append(message)
    return plain


def _call(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not isinstance(given.get("id", ""), str):
        raise UsageError(f"{place} is {_shown(given)}; allowed: an object with id and function: {{name, arguments}}",
                         "messages")
    arguments = function.get("arguments", "")
    return {"id": given.get("id") or f"call_{place}", "type": "function",
            "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(given: Any) -> dict[str, Any]:
    value = parsed_arguments(given or "{}") if isinstance(given, str) else given
    if isinstance(value, Mapping) and is_shallow(value, MAX_SCHEMA_DEPTH):
        return dict(value)
    return {"invalid": given if isinstance(given, str) else json.dumps(given)}
