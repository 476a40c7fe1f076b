"""Request bodies in OpenAI's format, for the server and the rows of a batch: their JSON, and what is unsupported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

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
    "tool_choice": ("none", "auto"), "tools": ([],), "use_beam_search": (False,), "verbosity": (),
    "web_search_options": (), "prompt_cache_key": _AnyValue(), "prompt_cache_retention": _AnyValue(),
    "safety_identifier": _AnyValue(),
}


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. An integer of more than 100 digits is infinity, which each member's own check refuses
    by name. Raises ValueError, and RecursionError for deeply nested lists and objects."""
    return json.loads(text, parse_int=_parse_int)


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else -math.inf if digits.startswith("-") else math.inf


def known_spellings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with longdraft's value where that of another engine means the same: vLLM's `top_k` of -1 is 0."""
    return settings | {"top_k": 0} if settings.get("top_k") == -1 else settings


def unsupported(body: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> tuple[str, str] | None:
    """The first parameter with an unsupported value, and its allowed values; None if there is none."""
    for name, idle in known.items():
        if body.get(name) is not None and body[name] not in idle:
            return name, " or ".join(map(repr, idle)) or "leaving it out"
    return None
