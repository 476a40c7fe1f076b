"""From events to what a client reads: OpenAI's objects, whole or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from longdraft.core import Event, TokenLogprob
from longdraft.model.tokenizer import Tokenizer
from longdraft.server.jobs import End, Job

Kind = Literal["text_completion", "chat.completion"]
_REASONS = {"length": "length", "eos": "stop", "stop": "stop", "loop": "loop"}
_BYTE_LEVEL = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that such tokenizers write as they are
_LETTERS = {chr(byte): byte for byte in _BYTE_LEVEL} | {
    chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _BYTE_LEVEL)}


@dataclass
class Choice:
    """One text of a reply, as far as it has come."""

    job: Job
    text: list[str] = field(default_factory=list)
    length: int = 0  # letters told so far
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class Reply:
    """Builds what a request is answered with. Objects are dictionaries, ready for JSON."""

    def __init__(self, kind: Kind, name: str, model: str, tokenizer: Tokenizer, jobs: list[Job], *,
                 prompt_tokens: int, echo: list[str] | None = None, logprobs: bool = False,
                 details: bool = False) -> None:
        """echo: the prompt's text for each job, told first."""
        self._kind, self._name, self._model, self._tokenizer = kind, name, model, tokenizer
        self._created = int(time.time())
        self._prompt_tokens = prompt_tokens
        self._logprobs, self._details = logprobs, details
        self.choices = {job: Choice(job) for job in jobs}
        self._echo = dict(zip(jobs, echo, strict=True)) if echo else {}

    def openings(self) -> Iterable[dict[str, Any]]:
        """Chunks before any token: the roles of a chat, the prompts that are echoed."""
        for job in self.choices:
            if self._kind == "chat.completion":
                yield self._chunk(job, {"delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                        "finish_reason": None})
            elif job in self._echo:
                self.choices[job].length = len(self._echo[job])
                yield self._chunk(job, {"text": self._echo[job], "logprobs": None, "finish_reason": None})

    def chunk(self, job: Job, events: list[Event]) -> dict[str, Any]:
        """What events that came together add to a text. The last carries acceptance and statistics."""
        choice = self.choices[job]
        text = "".join(event.text for event in events)
        logprobs = [entry for event in events for entry in event.logprobs]
        reason = next((event.finish_reason for event in events if event.finish_reason), None)
        choice.finish_reason = reason and _REASONS[reason]
        content: dict[str, Any] = {"delta": {"content": text}} if self._kind == "chat.completion" else {"text": text}
        content |= {"logprobs": self._told(choice, logprobs), "finish_reason": choice.finish_reason}
        choice.length += len(text)
        chunk = self._chunk(job, content)
        if self._details:
            chunk["longdraft"] = self._detail(job, events)
        if reason:
            chunk["metrics"] = {"speculative_decoding": job.acceptance.report()}
            chunk["longdraft"] = chunk.get("longdraft", {}) | self._summary(job)
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope(".chunk") | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        written = sum(job.num_tokens for job in self.choices)
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": written,
                "total_tokens": self._prompt_tokens + written}

    def add(self, job: Job, event: Event) -> None:
        """Of a reply that is sent whole."""
        choice = self.choices[job]
        choice.text.append(event.text)
        choice.logprobs += event.logprobs
        if event.finish_reason:
            choice.finish_reason = _REASONS[event.finish_reason]

    def whole(self) -> dict[str, Any]:
        choices = []
        for job, choice in self.choices.items():
            text = self._echo.get(job, "") + "".join(choice.text)
            content: dict[str, Any] = {"text": text}
            if self._kind == "chat.completion":
                content = {"message": {"role": "assistant", "content": text}}
            choices.append({"index": job.index, **content, "logprobs": self._told(choice, choice.logprobs),
                            "finish_reason": choice.finish_reason, "longdraft": self._summary(job),
                            "metrics": {"speculative_decoding": job.acceptance.report()}})
        reply = self._envelope("") | {"choices": choices, "usage": self.usage()}
        if len(choices) == 1:  # where vLLM has it
            reply |= {name: choices[0].pop(name) for name in ("metrics", "longdraft")}
        return reply

    def _envelope(self, suffix: str) -> dict[str, Any]:
        kind = self._kind + (suffix if self._kind == "chat.completion" else "")
        return {"id": self._name, "object": kind, "created": self._created, "model": self._model,
                "system_fingerprint": None}

    def _chunk(self, job: Job, content: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(".chunk") | {"choices": [{"index": job.index, **content}]}

    def _summary(self, job: Job) -> dict[str, Any]:
        return {"id": job.id, "seed": job.plan.params.seed, "journal": job.resume_id if job.plan.keeps else None,
                "finish_reason": (job.stats or {}).get("finish_reason"), "stats": job.stats}

    def _detail(self, job: Job, events: list[Event]) -> dict[str, Any]:
        return {"id": job.id, "seed": job.plan.params.seed,
                "tokens": [token for event in events for token in event.tokens],
                "pieces": [piece for event in events for piece in event.pieces],
                "sources": [source for event in events for source in event.sources],
                "steps": [len(event.tokens) for event in events],
                "progress": job.progress()}

    def _told(self, choice: Choice, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs or not entries:
            return None
        if self._kind == "chat.completion":
            return {"content": [self._entry(e.token, e.logprob) | {
                "top_logprobs": [self._entry(token, value) for token, value in e.top]} for e in entries],
                "refusal": None}
        texts = [self._tokenizer.text_of(e.token) for e in entries]
        offsets, at = [], choice.length
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {"tokens": texts, "token_logprobs": [e.logprob for e in entries], "text_offset": offsets,
                "top_logprobs": [self._likeliest(e) for e in entries]}

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, as the format has it: of several tokens that read alike the likeliest."""
        found: dict[str, float] = {}
        for token, value in sorted(entry.top, key=lambda each: -each[1]):
            found.setdefault(self._tokenizer.text_of(token), value)
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.text_of(token)
        return {"token": text, "logprob": logprob, "bytes": self._bytes(token, text)}

    def _bytes(self, token: int, text: str) -> list[int] | None:
        """A token's bytes; None where the tokenizer does not tell those of a broken character."""
        if "\ufffd" not in text:
            return list(text.encode())
        letters = self._tokenizer.letters(token)
        if token in self._tokenizer.byte_fallbacks:
            return [int(letters[3:5], 16)]  # <0xE2>
        return [_LETTERS[letter] for letter in letters] if all(letter in _LETTERS for letter in letters) else None


def split(items: list[tuple[Job, Event | End]]) -> tuple[dict[Job, list[Event]], dict[Job, End]]:
    """What came together, by text."""
    events: dict[Job, list[Event]] = {}
    ends: dict[Job, End] = {}
    for job, item in items:
        if isinstance(item, End):
            ends[job] = item
        else:
            events.setdefault(job, []).append(item)
    return events, ends
