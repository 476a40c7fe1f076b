"""The forms of calls: their parts, which form a model has, and messages as its chat template expects them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longdraft.errors import UsageError
from longdraft.request.tools import FORM_NAMES, MAX_SCHEMA_DEPTH, ToolRequest, history, is_shallow
from longdraft.text.chat_template import ChatTemplate, with_thought
from longdraft.text.harmony import ARGUMENTS_MARK, CALL_MARK

GEMMA_QUOTE = '<|"|>'  # around texts in the arguments of Gemma 4
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Style = Literal["json", "xml", "gemma", "keywords"]


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes calls. An answer with calls is

        text  gap  begin  opening NAME middle ARGUMENTS closing  between  opening NAME middle ARGUMENTS closing  end

    signs      texts that a chat template with this form has, all of them
    trigger    beginning of `begin` and `opening`, behind which the rest is certain
    markers    texts that may be single tokens
    gap        between text and calls; None: calls are not behind a text
    has_gap_always  calls without a text have the gap before them, too
    style      of the arguments; of "xml": `parameter` has what is before and behind a name, and behind a value;
               `json_behind` what is behind the name of a value that is no text, if that differs; `empty` what is in the
               place of no parameters. "keywords": key=JSON, key=JSON
    is_single  an answer has one call
    is_rendered  the template shows the calls of earlier answers; otherwise they are part of its content
    declared_by  what lists the functions: the template; a member of the system's message; or its text
    takes_texts  the template expects arguments as JSON texts
    has_short_ids  ids of calls are nine letters or digits
    """

    name: str
    signs: tuple[str, ...]
    trigger: str
    markers: tuple[str, ...]
    opening: str
    middle: str
    closing: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    gap: str | None = "\n"
    has_gap_always: bool = False
    style: Style = "json"
    parameter: tuple[str, str, str] = ("", "", "")
    json_behind: str = ""
    empty: str = ""
    is_single: bool = False
    is_rendered: bool = True
    declared_by: Literal["template", "member", "text"] = "template"
    takes_texts: bool = False
    has_short_ids: bool = False

    @property
    def lead(self) -> str:
        """What is before `begin` in any answer with calls."""
        return (self.gap or "") if self.has_gap_always else ""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as text, of a form with the style "json"."""
        return f"{self.opening}{name}{self.middle}{json.dumps(arguments, ensure_ascii=False)}{self.closing}"


_HERMES = ("<tool_call>", "</tool_call>")
_NAMED = ('{"name": "', '", "arguments": ')
_XML = ("<parameter=", ">\n", "\n</parameter>\n")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
             "<｜tool▁calls▁end｜>")
_DSML = "｜DSML｜"  # the token of DeepSeek's markup language, within the angle brackets of its tags


def _dsml(name: str, signs: tuple[str, ...], envelope: str) -> ToolForm:
    """DeepSeek's markup: calls are in an element `envelope`."""
    return ToolForm(
        name, signs, _DSML, (_DSML,), f'<{_DSML}invoke name="', '">\n', f"</{_DSML}invoke>", f"{_DSML}{envelope}>\n",
        "\n", f"\n</{_DSML}{envelope}>", gap="\n\n<", has_gap_always=True, style="xml",
        parameter=(f'<{_DSML}parameter name="', '" string="true">', f"</{_DSML}parameter>\n"),
        json_behind='" string="false">', empty="\n")


GENERIC = ToolForm("generic", (), "<tool_call>", _HERMES, f"<tool_call>\n{_NAMED[0]}", _NAMED[1], "}\n</tool_call>",
                   is_rendered=False, declared_by="text")
HARMONY = ToolForm("harmony", ("<|channel|>", "functions."), CALL_MARK, (), CALL_MARK, ARGUMENTS_MARK, "", gap="",
                   is_single=True)
FORMS = (  # the first one whose signs a template has
    HARMONY,
    ToolForm("gemma4", ("<|tool_call>",), "<|tool_call>", ("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
             "<|tool_call>call:", "", "<tool_call|>", between="", gap=None, style="gemma"),
    ToolForm("glm-lines", ("<arg_key>", "</arg_key>\n<arg_value>"), "<tool_call>",
             (*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), "<tool_call>", "\n", "</tool_call>",
             style="xml", parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
    ToolForm("glm", ("<arg_key>",), "<tool_call>",
             (*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), "<tool_call>", "", "</tool_call>",
             between="", gap="", style="xml", parameter=("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
    ToolForm("seed-xml", ("<seed:tool_call>", "<function="), "<seed:tool_call>",
             ("<seed:tool_call>", "</seed:tool_call>"), "<seed:tool_call>\n<function=", ">\n",
             "</function>\n</seed:tool_call>", gap="\n\n", style="xml",
             parameter=("<parameter=", ">", "</parameter>\n")),
    ToolForm("qwen-xml", ("<tool_call>", "<function="), "<tool_call>", _HERMES, "<tool_call>\n<function=", ">\n",
             "</function>\n</tool_call>", gap="\n\n", style="xml", parameter=_XML),
    ToolForm("granite", ("<|tool_call|>", "<|start_of_role|>"), "<|tool_call|>", ("<|tool_call|>",), *_NAMED, "}",
             "<|tool_call|>[", ", ", "]", gap="", is_rendered=False),
    ToolForm("hermes-inline", ("<tool_call>{",), "<tool_call>", _HERMES, f"<tool_call>{_NAMED[0]}", _NAMED[1],
             "}</tool_call>"),
    ToolForm("hermes", ("<tool_call>",), "<tool_call>", _HERMES, f"<tool_call>\n{_NAMED[0]}", _NAMED[1],
             "}\n</tool_call>"),
    ToolForm("phi4", ("<|tool_call|>",), "<|tool_call|>", ("<|tool_call|>", "<|/tool_call|>"), *_NAMED, "}",
             "<|tool_call|>[", ", ", "]<|/tool_call|>", gap="", is_rendered=False, declared_by="member"),
    ToolForm("mistral-args", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]",
             "[ARGS]", "", between="", gap="", has_short_ids=True),
    ToolForm("mistral-space", ("[TOOL_CALLS] [",), "[TOOL_CALLS]", ("[TOOL_CALLS]",), *_NAMED, "}",
             "[TOOL_CALLS] [", ", ", "]", gap="", has_short_ids=True),
    ToolForm("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", ("[TOOL_CALLS]",), *_NAMED, "}", "[TOOL_CALLS][", ", ",
             "]", gap="", has_short_ids=True),
    ToolForm("deepseek-json", (_DEEPSEEK[0], "```json"), _DEEPSEEK[0], _DEEPSEEK,
             f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}", "\n```json\n", f"\n```{_DEEPSEEK[3]}", _DEEPSEEK[0], "\n",
             _DEEPSEEK[4], gap="", takes_texts=True),
    ToolForm("deepseek", (_DEEPSEEK[0],), _DEEPSEEK[0], _DEEPSEEK, _DEEPSEEK[1], _DEEPSEEK[2], _DEEPSEEK[3],
             _DEEPSEEK[0], "", _DEEPSEEK[4], gap="", takes_texts=True),
    _dsml("deepseek-v3.2", (_DSML, "function_calls"), "function_calls"),
    _dsml("deepseek-v4", (_DSML,), "tool_calls"),
    ToolForm("olmo3", ("<function_calls>",), "<function_calls>", ("<function_calls>", "</function_calls>"), "", "(",
             ")", "<function_calls>", "\n", "</function_calls>", gap="", style="keywords"),
    ToolForm("llama3", ("ipython", '"parameters": '), _NAMED[0], (), _NAMED[0], '", "parameters": ', "}", gap=None,
             is_single=True),
)


def find_form(template: ChatTemplate | None, name: str = "auto") -> ToolForm:
    """The form of a model with this chat template. UsageError if its template reads tools and shows no known form.

    name  of a form, in place of the one that the template shows
    """
    if name != "auto":
        return next(form for form in (*FORMS, GENERIC) if form.name == name)
    source = template.source if template else ""
    known = next((form for form in FORMS if all(sign in source for sign in form.signs)), None)
    if known is not None and (template is None or template.reads_tools or not known.is_rendered):
        return known
    if template is not None and template.reads_tools:
        raise UsageError("the model's chat template lists tools in a form that longdraft does not know; give the form "
                         f"with --tool-form: {', '.join(FORM_NAMES[1:])}", "tools")
    return GENERIC


_SYSTEM = """You may call functions. These are their signatures, as JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as a JSON object within <tool_call> and </tool_call>:
{example}"""
_EXAMPLE = '<tool_call>\n{"name": "the name", "arguments": {"the argument": "its value"}}\n</tool_call>'


def template_messages(form: ToolForm, messages: Sequence[Mapping[str, Any]],
                      tools: ToolRequest | None) -> list[dict[str, Any]]:
    """The messages for the model's chat template. Raises UsageError as `history` does."""
    plain = history(messages)
    if not form.is_rendered:
        plain = [_with_calls_as_text(form, each) for each in plain]
    if form is GENERIC:
        plain = _with_results_of_users(plain)
    if form.style == "gemma":
        plain = _with_responses(plain)
    if form is HARMONY:
        plain = [_with_analysis(each) for each in plain]
    if tools is not None and form.declared_by != "template":
        plain = _declared(form, tools, plain)
    for message in plain:
        if form.has_short_ids and message.get("tool_call_id"):
            message["tool_call_id"] = _short(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = _short(call["id"]) if form.has_short_ids else call["id"]
            if form.takes_texts:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return plain


def _declared(form: ToolForm, tools: ToolRequest, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a first one, of the system, that lists the functions."""
    has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
    system = messages[0] if has_system else {"role": "system", "content": ""}
    if form.declared_by == "member":
        system = system | {"tools": json.dumps([each["function"] for each in tools.definitions], ensure_ascii=False)}
    else:
        listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in tools.definitions)
        text = _SYSTEM.format(tools=listed, example=_EXAMPLE)
        system = system | {"content": f"{system['content']}\n\n{text}" if system["content"] else text}
    return [system, *messages[has_system:]]


def _short(name: str) -> str:
    """An id of nine characters."""
    return name if _SHORT_ID.fullmatch(name) else hashlib.blake2b(name.encode()).hexdigest()[:9]


def _with_calls_as_text(form: ToolForm, message: dict[str, Any]) -> dict[str, Any]:
    if not (calls := message.pop("tool_calls", None)):
        return message
    content = message["content"]
    written = form.between.join(form.call(**call["function"]) for call in calls)
    return message | {"content": f"{content}{form.gap if content else ''}{form.begin}{written}{form.end}"}


def _with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of calls as a member of the message with the calls, whose content is the text behind them: Gemma 4 writes
    all of this in one turn."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message.get("role") == "tool" and last.get("tool_calls"):
            last.setdefault("tool_responses", []).append({"name": message["name"], "response": _response(message)})
        elif message.get("role") == "assistant" and not message.get("tool_calls") and last.get("tool_responses"):
            last["content"] = f"{last['content']}{message.get('content') or ''}"
        else:
            joined.append({**message})
    return joined


def _with_analysis(message: dict[str, Any]) -> dict[str, Any]:
    """A message with calls for gpt-oss's template, which refuses a content beside a thought: both are thought."""
    if not message.get("tool_calls"):
        return message
    texts = (with_thought(message).get("reasoning_content"), message["content"])
    thought = "\n\n".join(text for text in texts if text)
    return message | {"reasoning_content": thought, "thinking": thought, "content": ""}


def _response(message: Mapping[str, Any]) -> Any:
    """The result of a call: an object if its content is the JSON of one, else the text."""
    content = message.get("content") or ""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return value if isinstance(value, dict) and is_shallow(value, MAX_SCHEMA_DEPTH) else content


def _with_results_of_users(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of calls as messages of the user; those of one answer are one message."""
    joined: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if was_result:
                joined[-1]["content"] += f"\n{text}"
            else:
                joined.append({"role": "user", "content": text})
        else:
            joined.append(message)
        was_result = is_result
    return joined
