"""What the doors have in common."""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import Field, create_model

from longdraft.request.events import Event
from longdraft.request.sampling_params import EFFORTS
from longdraft.server.body_types import StrictModel
from longdraft.server.errors import ApiError
from longdraft.server.jobs import GenerationJob
from longdraft.server.logs import log_event
from longdraft.server.replies import EVENTS, Choice, ResponseOptions, data_event, is_large, logprobs_of
from longdraft.text.chat_template import THINKING_SWITCHES
from longdraft.text.tokenizer import StopText, Tokenizer

Body = TypeVar("Body", bound=StrictModel)
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


@dataclass(frozen=True)
class SettingNames:
    """The settings of another API.

    names  its names -> those of chats
    idle   names without an effect here
    off    samplers that longdraft has not, with the values that turn them off
    """

    names: Mapping[str, str]
    idle: Sequence[str] = ()
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def body(self, name: str, base: type[Body]) -> type[Body]:
        """A class of bodies with a member for each name that `base` has not."""
        about = {each: f"As `{own}`." for each, own in self.names.items()} | dict.fromkeys(self.idle, "No effect.") | {
            each: f"Off only: {', '.join(map(str, values))}." for each, values in self.off.items()}
        members: dict[str, Any] = {each: (Any, Field(default=None, description=text)) for each, text in about.items()
                                   if each not in base.model_fields}
        body = create_model(name, __base__=base, **members)
        body.spellings = self.names
        return body

    def read(self, given: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """The settings by the names of chats. Raises ApiError for what longdraft has not. place: before their names"""
        read: dict[str, Any] = {}
        for name, value in given.items():
            if value is None or name in self.idle or value in self.off.get(name, ()):
                continue
            if name not in self.names:
                allowed = " or ".join(map(str, self.off.get(name, ())))
                raise refused(f"{place}{name}", value, allowed or f"the options {', '.join(sorted(self.names))}")
            own = self.names[name]
            if not ((own == "seed" and value == -1) or (own == "max_tokens" and value in _TO_THE_END)):
                read.setdefault(own, value)
        window = read.get("penalty_window")
        if window == -1:
            read["penalty_window"] = _MAX_WINDOW
        elif window == 0:  # no window: no penalties
            read = {name: value for name, value in read.items() if name not in _OF_WINDOW} | {"repetition_penalty": 1}
        return read


_TO_THE_END = (-1, -2)  # of max_tokens: without a limit of its own
_MAX_WINDOW = 1 << 20  # of a penalty window of -1: the whole context
_OF_WINDOW = ("penalty_window", "repetition_penalty", "presence_penalty", "frequency_penalty")


class TextReply:
    """What the replies of these APIs have in common. Each is that of one text; most send nothing before it."""

    media_type = EVENTS
    is_numbered = False

    def __init__(self, options: ResponseOptions, jobs: list[GenerationJob]) -> None:
        self._options = options
        self._job, = jobs
        self._choice = Choice.of(options, self._job)

    @property
    def is_large(self) -> bool:
        return is_large(self._job.num_tokens, len(self._choice.logprobs))

    def begin(self) -> Iterator[bytes]:
        yield from ()

    def prompt_news(self, job: GenerationJob) -> Iterator[bytes]:
        yield from ()

    def add(self, job: GenerationJob, events: list[Event]) -> None:
        self._choice.parts += self._choice.read(events)
        self._choice.logprobs += logprobs_of(events)


class StopSearch:
    """Which stop text ended a text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder, self._stops = tokenizer.stream(), sorted(stops, key=len, reverse=True)
        self._tail = ""  # the end of the text, stop text included

    def add(self, events: Iterable[Event]) -> None:
        if self._stops:
            new = "".join(self._decoder.push(token) for event in events for token in event.tokens)
            self._tail = (self._tail + new)[-2 * len(self._stops[0]) - 64 :]

    @property
    def stop(self) -> str | None:
        """The stop text; None where the text has none."""
        return next((stop for stop in self._stops if StopText((stop,)).push(self._tail)[1]), None)


def named_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event with the name of its type."""
    return f"event: {content['type']}\n".encode() + data_event(content)


def without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


Conversion = Callable[[Any, frozenset[str]], dict[str, Any]]
"""From a door's body, and the variables of the chat template, to the body of a chat."""
