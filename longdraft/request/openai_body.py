"""Request bodies in OpenAI's format, for the server and the rows of a batch: their JSON, what is unsupported, and what
chats ask of a model's thinking."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from longdraft.errors import UsageError, check

THINKING_FIELDS = ("thinking", "reasoning", "reasoning_format")  # of chats, see `read_thinking`
_REASONING = ("effort", "max_tokens", "enabled", "exclude")  # members of OpenRouter's object
_KINDS = ("enabled", "disabled", "adaptive")  # of Anthropic's
_FORMATS = ("auto", "none")
_MAX_DIGITS = 100  # of an integer: Python neither reads nor shows one of thousands of digits. 2**64 has 20


class _AnyValue(tuple[Any, ...]):
    """The values of a parameter that asks for nothing, whatever its value."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True


# Parameters that longdraft does not support, with the values that have no effect and are accepted: clients send them
# without being asked to.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "function_call": ("none",), "functions": ([],), "guided_decoding_backend": ("",),
    "guided_whitespace_pattern": ("",), "chat_template": ("",), "detokenize": (True,), "documents": ([],),
    "early_stopping": (False,), "include_stop_str_in_output": (False,), "length_penalty": (1,), "metadata": ({},),
    "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (True, False), "prediction": (),
    "prompt_logprobs": (), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "truncate_prompt_tokens": (-1,),
    "spaces_between_special_tokens": (True, False),
    "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "use_beam_search": (False,), "verbosity": ("medium",),
    "web_search_options": (), "prompt_cache_key": _AnyValue(), "prompt_cache_options": _AnyValue(),
    "prompt_cache_retention": _AnyValue(), "safety_identifier": _AnyValue(),
}


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. An integer of more than 100 digits is infinity, which each member's own check refuses
    by name. Raises ValueError, and RecursionError for deeply nested lists and objects."""
    return json.loads(text, parse_int=_parse_int)


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else -math.inf if digits.startswith("-") else math.inf


def joined_settings(settings: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a body, and those of its object `longdraft`. UsageError where they contradict."""
    for name, value in extension.items():
        if settings.get(name, value) != value:
            raise UsageError(f"{name} is {settings[name]!r} and longdraft.{name} is {value!r}; give one of them", name)
    return {**settings, **extension}


def known_spellings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with longdraft's value where that of another engine means the same: vLLM's `top_k` of -1 is 0."""
    return settings | {"top_k": 0} if settings.get("top_k") == -1 else settings


def unsupported(body: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> tuple[str, str] | None:
    """The first parameter with an unsupported value, and its allowed values; None if there is none."""
    for name, idle in known.items():
        if body.get(name) is not None and body[name] not in idle:
            return name, " or ".join(map(repr, idle)) or "leaving it out"
    return None


class ThinkingRequest(NamedTuple):
    """What a chat asks of the model's thinking.

    settings  of sampling; they take the place of those of the body
    turns_on  thinking is on where the chat template has a switch, without an effort
    is_sent   the reply has the thinking
    format    none: the thinking is part of the content; auto: it is apart; None: as usual
    """

    settings: dict[str, Any]
    turns_on: bool
    is_sent: bool
    format: str | None


def read_thinking(body: Mapping[str, Any]) -> ThinkingRequest:
    """The request of a chat's body. `thinking` has sampling settings, and may have the members of Anthropic's, GLM's
    and DeepSeek's objects; `reasoning` is OpenRouter's object. UsageError for what cannot be used, or contradicts."""
    thinking, reasoning = (dict(_object(body, name)) for name in ("thinking", "reasoning"))
    unknown = next((name for name in reasoning if name not in _REASONING), None)
    check(unknown is None, "reasoning", unknown, ", ".join(_REASONING))
    for name in ("enabled", "exclude"):
        if not isinstance(reasoning.get(name), bool | None):
            raise UsageError(f"reasoning.{name} is {reasoning[name]!r}; allowed: true or false", "reasoning")
    format, kind = body.get("reasoning_format"), thinking.pop("type", None)
    check(format in (None, *_FORMATS), "reasoning_format", format, " or ".join(_FORMATS))
    if kind not in (None, *_KINDS):
        raise UsageError(f"thinking.type is {repr(kind)[:80]}; allowed: enabled, disabled or adaptive", "thinking")
    budget = _agreed("thinking_budget", "budgets", thinking.pop("budget_tokens", None), reasoning.get("max_tokens"),
                     body.get("thinking_budget"))
    effort = _agreed("reasoning", "efforts", "none" if reasoning.get("enabled") is False else None,
                     reasoning.get("effort"), body.get("reasoning_effort"))
    settings = {"reasoning_effort": "none" if kind == "disabled" else effort, "thinking_budget": budget,
                "thinking": thinking or None}
    return ThinkingRequest({name: value for name, value in settings.items() if value is not None},
                           kind in ("enabled", "adaptive") or bool(reasoning.get("enabled")),
                           not reasoning.get("exclude"), format)


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = {} if body.get(name) is None else body[name]
    check(isinstance(value, Mapping), name, value, "an object")
    return value


def _agreed(param: str, what: str, *values: Any) -> Any:
    """The value that several members give alike; None if none gives one."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise UsageError(f"the request has the {what} {', '.join(str(value)[:80] for value in given)}; give one of "
                         "them", param)
    return given[0] if given else None
