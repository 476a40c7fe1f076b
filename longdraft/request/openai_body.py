"""Unsupported parameters of request bodies in OpenAI's format, for the server and for the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Parameters that longdraft does not support, with the values that have no effect and are accepted: clients send them
# without being asked to.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "function_call": ("none",), "functions": ([],), "guided_decoding_backend": ("",),
    "guided_whitespace_pattern": ("",), "chat_template": ("",), "detokenize": (True,), "documents": ([],),
    "early_stopping": (False,), "include_stop_str_in_output": (False,), "length_penalty": (1,), "metadata": ({},),
    "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (True, False), "prediction": (),
    "prompt_logprobs": (), "reasoning_effort": (), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "truncate_prompt_tokens": (-1,),
    "spaces_between_special_tokens": (True, False),
    "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "use_beam_search": (False,), "verbosity": (),
    "web_search_options": (),
}


def unsupported(body: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> tuple[str, str] | None:
    """The first parameter with an unsupported value, and its allowed values; None if there is none."""
    for name, idle in known.items():
        if body.get(name) is not None and body[name] not in idle:
            return name, " or ".join(map(repr, idle)) or "leaving it out"
    return None
