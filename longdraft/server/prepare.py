"""From a request body to jobs: settings checked, prompts tokenised, memory estimated. Nothing is generated yet.

This runs in a thread of its own, outside the event loop. Errors are ApiErrors that name the request's parameter.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from longdraft.checkpoint.sizing import LARGEST_TREE
from longdraft.engine.engine import Engine
from longdraft.engine.loaded_model import DrafterChoice
from longdraft.errors import JournalError, UsageError, check
from longdraft.journal.format import journal_exists, read_journal
from longdraft.request.openai_body import joined_settings, known_spellings
from longdraft.request.sampling_params import ALIASES, MAX_SEED, SamplingParams
from longdraft.request.tools import FIELDS as TOOL_FIELDS
from longdraft.request.tools import ToolRequest, parse_tools
from longdraft.sampling.grammar import MATCHER_BYTES
from longdraft.server.errors import ApiError, retry_later
from longdraft.server.jobs import EventQueue, GenerationJob
from longdraft.server.journals import has_space, prompt_excerpt
from longdraft.server.logs import log_event
from longdraft.server.replies import NewReply, ReplyBuilder, ResponseOptions
from longdraft.server.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResumeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from longdraft.server.settings import ServerSettings
from longdraft.text.effort import Effort
from longdraft.text.tools.model_tools import ModelTools

COMPLETION_TOKENS = 16  # OpenAI's default for completions
CHAT_TOKENS = 4096  # as `longdraft chat`; less where the context has less room
# Largest values of drafter options in requests: they take memory and rows of forwards from all texts.
_MOST = {"": {"capacity": 262_144}, "suffix": {"capacity": 262_144, "budget": 64}}
_RECOGNISED = 32  # characters at the beginning of a message by which it is found in its prompt
_FILE_OPTIONS = ("corpus", "model")  # drafter options that name files, which clients may not choose
_SCRATCH_BYTES = 32 << 20  # memory of a text besides caches: scratch buffers, n-gram tables
_LOGPROB_BYTES, _TOP_LOGPROB_BYTES = 320, 160  # of a token in an event, and of each likeliest token beside it
_GROWTH = 1.15  # caches grow by blocks, beyond the length in use


Request = TypeVar("Request", bound=SamplingRequest)


class PreparedRequest(NamedTuple):
    """A request's texts, all of which write to one queue, and how to answer it."""

    jobs: list[GenerationJob]
    options: ResponseOptions
    events: EventQueue
    check_grammar: Callable[[], object] | None = None  # raises ApiError; takes up to seconds. None: it is known
    new_reply: NewReply = ReplyBuilder
    is_detached: bool = False
    is_background: bool = False  # the reply does not wait for the text


@dataclass(frozen=True)
class Preparer:
    """Prepares requests for one engine within the server's limits."""

    engine: Engine
    settings: ServerSettings

    @property
    def context_limit(self) -> int:
        """Largest number of tokens of a prompt and its text together."""
        return self.engine.model.config.max_positions

    @property
    def _snapshot(self) -> dict[str, Any]:
        options = self.settings.snapshots
        return {"snapshot": options.mode, "snapshot_max": options.max_bytes / 2**30}

    def completion(self, request: CompletionRequest, events: EventQueue, *, clamps: bool = False,
                   prefix: str = "cmpl-") -> PreparedRequest:
        """clamps: a text that has no room in the context for max_tokens is shorter, and the default is that of chats;
        prefix: of the request's id"""
        prompts, request_id = request.prompts, f"{prefix}{secrets.token_hex(12)}"
        self._require_few(len(prompts) * request.n, "prompt" if len(prompts) > request.n else "n")
        encoded = [self._encode(prompt) for prompt in prompts]
        default_tokens = COMPLETION_TOKENS
        if clamps:
            room = self._room(max(encoded, key=len))
            request, default_tokens = _clamped(request, room), min(CHAT_TOKENS, room)
        jobs, check_grammar = self._jobs(request, encoded, default_tokens, request_id, request.logprobs, events,
                                         scores_prompt=request.echo)
        echo = None
        if request.echo:
            decode = self.engine.tokenizer.decode
            texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
            echo = [text for text in texts for _ in range(request.n)]
        options = ResponseOptions(
            "text_completion", request_id, sum(map(len, encoded)), request.stream, request.includes_usage,
            echo=echo, logprobs=request.logprobs is not None, details=request.longdraft.details, n=request.n,
            has_prompt_progress=request.return_progress)
        return PreparedRequest(jobs, options, events, check_grammar, is_detached=request.longdraft.detach)

    def chat(self, request: ChatRequest, events: EventQueue, *, clamps: bool = False,
             prefix: str = "chatcmpl-") -> PreparedRequest:
        """clamps: a text that has no room in the context for max_tokens is shorter; prefix: of the request's id"""
        self._require_few(request.n, "n")
        request_id = f"{prefix}{secrets.token_hex(12)}"
        tools = _tools_of(request)
        effort = self._effort(request)
        ids = self._encode_chat(request.messages, effort.variables, request.continue_final_message,
                                request.add_generation_prompt, tools)
        room = self._room(ids)
        request = _clamped(request, room) if clamps else request
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        jobs, check_grammar = self._jobs(request, [self._require_room(ids)], min(CHAT_TOKENS, room), request_id,
                                         logprobs, events, effort, tools)
        for job in jobs:
            job.message_at = partial(self._message_at, request.messages, ids)
        thinking = request.asked_thinking
        divides = (thinking.format or self.settings.reasoning_format) == "auto"
        answers = self._tools.answers(tools, shows_thinking=divides, sends_thinking=thinking.is_sent)
        last = request.messages[-1].for_template() if request.continue_final_message else {}
        begun, thought = last.get("content", ""), last.get("reasoning_content", "")
        options = ResponseOptions("chat.completion", request_id, len(ids), request.stream, request.includes_usage,
                                  details=request.longdraft.details, logprobs=request.logprobs, n=request.n,
                                  has_prompt_progress=request.return_progress,
                                  new_reader=partial(answers.reader, ids, begun, thought),
                                  tools=tools,
                                  warnings=partial(self.engine.loaded.grammar_warnings, jobs[0].params, ids))
        return PreparedRequest(jobs, options, events, check_grammar, is_detached=request.longdraft.detach)

    def _message_at(self, messages: list[ChatMessage], ids: list[int], position: int) -> int:
        """The index of the last message whose content begins before the token at `position` of the prompt `ids`."""
        begun, end, found = self.engine.tokenizer.decode(ids[: position + 1]), 0, 0
        for index, message in enumerate(messages):
            content = str(message.for_template()["content"]).strip()[:_RECOGNISED]
            if (start := begun.find(content, end)) < 0 or not content:
                continue
            end, found = start + len(content), index
        return found

    @cached_property
    def _tools(self) -> ModelTools:
        return ModelTools(self.engine.tokenizer, self.engine.loaded.answer_format, self.settings.tool_form,
                          self.settings.tool_grammar == "always")

    def _effort(self, request: ChatRequest) -> Effort:
        """What the request asks of the model's thinking, before its other settings are read."""
        given = self._settings_of(request, 1)
        names = [name for name in given if ALIASES[name] in ("reasoning_effort", "thinking_budget")]
        with _spelled(given, request.longdraft.model_fields_set):
            params = SamplingParams.from_names({name: given[name] for name in names})
            return self.engine.effort(params, request.chat_template_kwargs or {},
                                      turns_on=request.asked_thinking.turns_on, is_required=False)

    def resume(self, folder: Path, request: ResumeRequest, events: EventQueue) -> PreparedRequest:
        """Continue the text of a journal. Raises JournalError if this engine cannot."""
        content = read_journal(folder)
        header = content.header
        engine = self._engine_with(request.drafter, request.drafter_options)
        try:
            params, prompt_tokens = content.params, len(header.prompt)
            job = GenerationJob(
                folder.name, 0, events, partial(engine.resume, folder, **self._snapshot), params, prompt_tokens,
                self._num_bytes(engine, prompt_tokens + params.max_new_tokens),
                prompt_excerpt(engine.tokenizer, header.prompt), folder, keeps_journal=True,
                times_plain=request.details, deadline=self._deadline(request.timeout), begins_apart=True)
        except UsageError as error:
            raise JournalError(str(error)) from error
        options = ResponseOptions("text_completion", folder.name, prompt_tokens, request.stream,
                                  request.includes_usage, details=request.details)
        return PreparedRequest([job], options, events)

    def count(self, request: ChatRequest) -> int:
        """The number of tokens of a chat's prompt."""
        tools = _tools_of(request)
        return len(self._encode_chat(request.messages, self._effort(request).variables, request.continue_final_message,
                                     request.add_generation_prompt, tools))

    @property
    def shows_thinking(self) -> bool:
        """Whether the model's answers have thinking that is apart."""
        return self.engine.loaded.answer_format is not None

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables of the chat template that a request may set."""
        template = self.engine.tokenizer.chat_template
        return frozenset(template.options if template else ())

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """As vLLM has it; for a request with `content` as llama.cpp has it."""
        self.require_model(request.model)
        if request.content is not None:
            ids = self.encode_text(request.content, "content", request.add_special)
            return {"tokens": [{"id": token, "piece": self._piece(token)} for token in ids]
                    if request.with_pieces else ids}
        if request.messages is not None:
            ids = self._encode_chat(request.messages, {}, False, True, None)
        else:
            assert request.prompt is not None, "TokenizeRequest has a prompt, a content or messages"
            ids = self.encode_text(request.prompt, "prompt", request.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.context_limit}

    def _piece(self, token: int) -> str | list[int]:
        """The text of a token as llama.cpp has it; of one that is a part of a character its bytes."""
        tokenizer = self.engine.tokenizer
        text = tokenizer.text_of(token)
        own = tokenizer.bytes_of(token, text)
        return text if own is None or own == list(text.encode()) else own

    def encode_text(self, text: str, param: str, has_special: bool) -> list[int]:
        """The tokens of a text. param: its name in the request"""
        self._require_short([text], param)
        return self.engine.tokenizer.encode(text, add_special_tokens=has_special)

    def rendered(self, request: ChatRequest) -> str:
        """The prompt of a chat, as its template writes it."""
        return self._render(request.messages, self._effort(request).variables, request.continue_final_message,
                            request.add_generation_prompt, _tools_of(request))

    def detokenize(self, request: DetokenizeRequest) -> dict[str, str]:
        """The text, by vLLM's name and by llama.cpp's."""
        self.require_model(request.model)
        vocab_size = self.engine.model.config.vocab_size
        bad = next((token for token in request.tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ApiError(400, f"tokens holds {bad}; allowed: 0 to {vocab_size - 1}", param="tokens",
                           code="invalid_value")
        text = self.engine.tokenizer.decode(request.tokens)
        return {"prompt": text, "content": text}

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model_name):
            raise ApiError(404, f"the model {name!r} is not served here; use {self.settings.model_name!r}",
                           param="model", code="model_not_found")

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._require_short([prompt], "prompt")
        try:
            return self._require_room(self.engine.encode(prompt))
        except UsageError as error:
            raise ApiError(400, str(error), param="prompt", code="invalid_value") from error

    def _encode_chat(self, messages: list[ChatMessage], variables: Mapping[str, Any], continues: bool,
                     begins_answer: bool | None, tools: ToolRequest | None) -> list[int]:
        prompt = self._render(messages, variables, continues, begins_answer, tools)
        return self.engine.tokenizer.encode(prompt, add_special_tokens=False)

    def _render(self, messages: list[ChatMessage], variables: Mapping[str, Any], continues: bool,
                begins_answer: bool | None, tools: ToolRequest | None) -> str:
        plain = [message.for_template() for message in messages]
        self._require_short([message["content"] for message in plain], "messages")
        prompt = self._tools.prompt(
            plain, tools, variables, continue_final_message=continues,
            add_generation_prompt=not continues if begins_answer is None else begins_answer)
        self._require_short([prompt], "messages")  # a template may write far more than the messages
        return prompt

    def _require_short(self, texts: list[str], param: str) -> None:
        """Refuse texts that are too long for the context without tokenising all of them."""
        tokenizer, num_characters = self.engine.tokenizer, sum(map(len, texts))
        most = self.context_limit * tokenizer.longest_token
        if num_characters > most or (num_characters > self.context_limit and any(
                tokenizer.has_more_tokens(text, self.context_limit) for text in texts)):
            raise ApiError(400, f"the {param} has {num_characters:,} characters, which are more than "
                           f"{self.context_limit - 1:,} tokens (the model's context limit, less one new token); "
                           "shorten it", param=param, code="context_length_exceeded")

    def _require_room(self, ids: list[int]) -> list[int]:
        if len(ids) >= self.context_limit:
            raise ApiError(400, f"the prompt has {len(ids):,} tokens; allowed: {self.context_limit - 1:,} (the "
                           "model's context limit, less one new token); shorten the prompt", param="prompt",
                           code="context_length_exceeded")
        return ids

    def _room(self, ids: list[int]) -> int:
        """Tokens that a text after this prompt may have."""
        return max(1, self.context_limit - len(ids))

    def _require_few(self, count: int, param: str) -> None:
        if count > self.settings.max_choices:
            raise ApiError(400, f"the request asks for {count} texts (prompts times n); allowed: "
                           f"{self.settings.max_choices}; send several requests", param=param, code="invalid_value")

    def _jobs(self, request: SamplingRequest, prompts: list[list[int]], default_tokens: int, request_id: str,
              logprobs: int | None, events: EventQueue, effort: Effort | None = None,
              tools: ToolRequest | None = None, scores_prompt: bool = False
              ) -> tuple[list[GenerationJob], Callable[[], object] | None]:
        """A job for each text: `n` for each prompt. Text i of a prompt has the seed `seed` + i. And the check of the
        grammar, as in `PreparedRequest`.

        scores_prompt  `logprobs` are those of the prompts, too
        """
        self.require_model(request.model)
        given = self._settings_of(request, default_tokens)
        loaded, spelled = self.engine.loaded, partial(_spelled, given, request.longdraft.model_fields_set)
        with spelled():
            params = self.engine.params(**given)
            params = effort.applied(params) if effort else params
            params = self._tools.applied(params, tools, prompts[0])
            loaded.check_settings(params)
            whole = [(loaded.completed(params, prompt), prompt) for prompt in prompts]

        def check_grammar() -> None:
            with spelled():
                for own, prompt in whole:
                    loaded.grammar_rules(own, prompt)
                    if warnings := loaded.grammar_warnings(own, prompt):
                        log_event("left_out", level=logging.WARNING, what="schemas", names="; ".join(warnings)[:1000])

        longest = max(len(ids) for ids in prompts)
        if longest + params.max_new_tokens > self.context_limit:
            raise ApiError(400, f"the prompt ({longest:,} tokens) and max_tokens ({params.max_new_tokens:,}) are "
                           f"{longest + params.max_new_tokens:,} tokens; allowed: {self.context_limit:,} (the model's "
                           "context limit); shorten the prompt or lower max_tokens", param="max_tokens",
                           code="context_length_exceeded")
        extension = request.longdraft
        engine = self._engine_with(extension.drafter, extension.drafter_options)
        seed = params.seed if params.seed is not None else time.time_ns() & (2**53 - 1)  # exact as a JSON number
        count, deadline = len(prompts) * request.n, self._deadline(extension.timeout)
        # Those of all texts wait in the reply until the last one has ended.
        num_bytes = logprob_bytes(count * params.max_new_tokens + scores_prompt * request.n * sum(map(len, prompts)),
                                  logprobs)
        jobs = []
        for i in range(count):
            own, ids = whole[i // request.n]
            own = own.with_seed((seed + i % request.n) % (MAX_SEED + 1))
            job_id = request_id if count == 1 else f"{request_id}-{i}"
            journal = self._journal(extension.journal, job_id, own, count)
            jobs.append(GenerationJob(
                job_id, i, events, partial(engine.generate, ids, own, journal=journal, logprobs=logprobs,
                                           prompt_logprobs=logprobs if scores_prompt else None, **self._snapshot), own,
                len(ids), self._num_bytes(engine, len(ids) + own.max_new_tokens) + num_bytes
                + self._grammar_bytes(own),
                prompt_excerpt(engine.tokenizer, ids),
                journal, keeps_journal=bool(extension.journal), may_journal=extension.journal is not False,
                times_plain=extension.details, deadline=deadline,
                user=request.user, cache_salt=request.cache_salt if extension.cache else None,
                begins_apart=bool(own.structured_outputs or own.banned_strings)))
        return jobs, None if all(loaded.knows_grammar(*each) for each in whole) else check_grammar

    def _settings_of(self, request: SamplingRequest, default_tokens: int) -> dict[str, Any]:
        """The sampling settings of a request, by the names that it gives."""
        given = known_spellings(joined_settings(request.settings, request.longdraft.settings))
        if "max_new_tokens" not in map(ALIASES.get, given):
            given["max_new_tokens"] = default_tokens
        return given

    def _engine_with(self, drafter: str | None, options: Mapping[str, Any] | None) -> Engine:
        """The engine with the drafter of a request."""
        if drafter is None and not options:
            return self.engine
        forbidden = next((key for key in _FILE_OPTIONS if key in (options or {})), None)
        try:
            if forbidden:
                raise UsageError(f"drafter option {forbidden!r} names files of the server; set it when you start the "
                                 "server")
            choice = DrafterChoice.parse(drafter or self.engine.drafter, options)
            for name, most in _MOST.get(choice.name, _MOST[""]).items():
                value = getattr(choice.options, name, 0)
                check(value <= most or value == getattr(self.engine.options, name, 0), name, value,
                      f"at most {most:,} in a request")
            return Engine(self.engine.loaded, choice)
        except UsageError as error:
            param = "longdraft.drafter_options" if options else "longdraft.drafter"
            raise ApiError(400, str(error), param=param, code="invalid_value") from error

    def _journal(self, requested: bool | str | None, job_id: str, params: SamplingParams, count: int) -> Path | None:
        """The folder of a text's journal: requested by the client, or because the text is long."""
        root = self.settings.journals
        if root is None:
            if requested:
                raise ApiError(400, "this server keeps no journals; leave longdraft.journal out", code="no_journals",
                               param="longdraft.journal")
            return None
        if isinstance(requested, str) and count > 1:
            raise ApiError(400, f"longdraft.journal names one text, but the request asks for {count}; use true",
                           param="longdraft.journal", code="invalid_value")
        if requested is False or (not requested and params.max_new_tokens < self.settings.journal_from):
            return None
        if not has_space(root, self.settings.disk_floor_bytes):
            if requested:
                raise retry_later("the disk of the journals is nearly full; leave longdraft.journal out, or retry "
                                  "later", "disk_full", 503)
            log_event("journal_left_out", id=job_id, reason="the disk is nearly full")
            return None
        folder = root / (requested if isinstance(requested, str) else job_id)
        if journal_exists(folder):
            raise ApiError(409, f"the journal {folder.name!r} exists; resume it with POST "
                           f"/v1/longdraft/generations/{folder.name}/resume, or choose another id",
                           param="longdraft.journal", code="journal_exists")
        return folder

    def _num_bytes(self, engine: Engine, tokens: int) -> int:
        """Upper bound of the memory for a text of `tokens` tokens, with the caches of its drafter."""
        rows = tokens + (LARGEST_TREE if engine.model.kernels.is_device else 0)  # devices reserve the whole cache
        return int(rows * engine.model.cache_bytes_per_token * _GROWTH) + engine.drafter_bytes(tokens) + _SCRATCH_BYTES

    def _grammar_bytes(self, params: SamplingParams) -> int:
        """Memory of a text's grammar. A small budget has room for a few such texts, which take far less mostly."""
        return min(MATCHER_BYTES, self.settings.memory_bytes // 4) if params.structured_outputs else 0

    def _deadline(self, timeout_s: float | None) -> float | None:
        """Monotonic time at which a request ends: after its own timeout or the server's, whichever is shorter."""
        limits = [limit for limit in (timeout_s, self.settings.timeout_s) if limit]
        return time.monotonic() + min(limits) if limits else None


def logprob_bytes(tokens: int, logprobs: int | None) -> int:
    """Upper bound of the memory for the log-probabilities of tokens, which wait for the client."""
    return 0 if logprobs is None else tokens * (_LOGPROB_BYTES + logprobs * _TOP_LOGPROB_BYTES)


def _clamped(request: Request, room: int) -> Request:
    """The request with as many tokens as there is room for, at most."""
    is_long = request.settings.get("max_tokens", 0) > room
    return request.model_copy(update={"max_tokens": room}) if is_long else request


def _tools_of(request: ChatRequest) -> ToolRequest | None:
    """The functions that a chat may call; None: it has none. UsageError if they cannot be used."""
    return parse_tools({name: getattr(request, name) for name in TOOL_FIELDS})


@contextmanager
def _spelled(given: Mapping[str, Any], in_extension: set[str]) -> Iterator[None]:
    """Translate a UsageError about a setting. The ApiError has the name by which the request gave it."""
    try:
        yield
    except UsageError as error:
        param = _request_spelling(error.name, given, in_extension)
        message = str(error).replace(f"{error.name} is ", f"{param} is ", 1)
        raise ApiError(400, message, param=param, code="invalid_value") from error


def _request_spelling(name: str | None, given: Mapping[str, Any], in_extension: set[str]) -> str | None:
    """The name by which the request gave the setting `name`."""
    if name is None:
        return None
    param = next((key for key in given if ALIASES[key] == name), name)
    return f"longdraft.{param}" if param in in_extension else param
