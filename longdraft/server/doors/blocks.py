"""What the doors have in common."""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from longdraft.request.sampling_params import EFFORTS
from longdraft.server.errors import ApiError
from longdraft.server.logs import log_event
from longdraft.server.replies import data_event
from longdraft.text.chat_template import THINKING_SWITCHES

_CARRIED = "ld1."  # before a thought that a client carries without showing it
_MAX_THOUGHT = 1 << 24  # bytes of a thought that is unpacked
# Options of templates that drop the thoughts of earlier answers, with the values that keep them: what a conversation
# has in common with its next turn is longer then.
_KEEP_THOUGHTS = {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False}


def refused(place: str, value: object, allowed: str) -> ApiError:
    """The error of a member of a body."""
    return ApiError(400, f"{place} is {repr(value)[:80]}; allowed: {allowed}", param=place.partition(".")[0],
                    code="invalid_value")


def is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def objects(value: Any, place: str) -> list[Mapping[str, Any]]:
    """A list of objects. Raises ApiError for anything else."""
    if not isinstance(value, list) or not all(map(is_object, value)):
        raise refused(place, value, "a list of objects")
    return value


def text_of(value: Any, place: str, kinds: Iterable[str] = ("text",)) -> str:
    """The text of a content: a text, or a list of parts of these kinds."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    texts = []
    for index, part in enumerate(objects(value, place)):
        if str(part.get("type")) not in kinds or not isinstance(part.get("text"), str):
            raise refused(f"{place}.{index}", part, f"parts of the type {' or '.join(kinds)}")
        texts.append(part["text"])
    return "".join(texts)


def carry(thought: str) -> str:
    """A thought as a text that means nothing to a client, which sends it back."""
    return _CARRIED + base64.b64encode(zlib.compress(thought.encode())).decode()


def carried(text: object) -> str:
    """The thought of `carry`; "" for other texts, such as those of other servers."""
    if not isinstance(text, str) or not text.startswith(_CARRIED):
        return ""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text[len(_CARRIED) :], validate=True), _MAX_THOUGHT)
        return data.decode() if unpacker.eof else ""
    except (binascii.Error, zlib.error, ValueError):
        return ""


def effort_of(value: object, place: str) -> str | None:
    """A level of thinking. Raises ApiError for a word that is none."""
    if value is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise refused(place, value, ", ".join(EFFORTS))


def template_options(known: Iterable[str], thinks: bool | None) -> dict[str, Any]:
    """Variables of a chat template that has the variables `known`. thinks: None: as the template decides"""
    options = {name: value for name, value in _KEEP_THOUGHTS.items() if name in known}
    if thinks is not None:
        options |= {name: thinks for name in THINKING_SWITCHES if name in known}
    return options


def left_out(what: str, names: Iterable[object]) -> None:
    """Log what of a request has no effect here."""
    if listed := sorted({str(name)[:100] for name in names}):
        log_event("left_out", level=logging.WARNING, what=what, names=", ".join(listed)[:1000])


def named_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event with the name of its type."""
    return f"event: {content['type']}\n".encode() + data_event(content)


def without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


Conversion = Callable[[Any, frozenset[str]], dict[str, Any]]
"""From a door's body, and the variables of the chat template, to the body of a chat."""
