"""From a request to the texts it asks for: settings checked, prompts read, nothing begun yet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.core import ALIASES, MAX_SEED, SamplingParams
from longdraft.engine import Engine
from longdraft.errors import JournalError, UsageError
from longdraft.generation import LARGEST_TREE
from longdraft.journal import is_there, read
from longdraft.server.errors import ApiError
from longdraft.server.jobs import EventQueue, Job, Plan
from longdraft.server.journals import title
from longdraft.server.schemas import ChatRequest, CompletionRequest, ResumeRequest, Sampling
from longdraft.server.settings import Settings

COMPLETION_TOKENS = 16  # OpenAI's default for completions
CHAT_TOKENS = 4096  # as `longdraft chat`; less where the context has less room
_FILES = ("corpus", "model")  # drafter options that name files of the server's
_BESIDE = 32 << 20  # bytes that a text takes beside caches: scratch, tables of n-grams
_MORE = 1.15  # stores grow by blocks
# Settings at a request's top level, and those of its `longdraft` object.
_TOP = ("max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
        "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "seed")
_OURS = ("min_p", "top_k", "eta_cutoff", "min_tokens_to_keep", "repetition_penalty", "penalty_window", "min_new_tokens",
         "stop_token_ids", "ignore_eos", "on_loop")


@dataclass(frozen=True)
class Preparer:
    """Knows the engine and the limits."""

    engine: Engine
    settings: Settings

    def completion(self, request: CompletionRequest, name: str) -> list[Plan]:
        prompts = request.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        self._require_few(len(prompts) * request.n, "prompt" if len(prompts) > request.n else "n")
        return self._plans(request, [self._encoded(prompt) for prompt in prompts], COMPLETION_TOKENS, name,
                           request.logprobs)

    def chat(self, request: ChatRequest, name: str) -> list[Plan]:
        self._require_few(request.n, "n")
        options = request.chat_template_kwargs or {}
        ids = self.engine.chat([message.plain() for message in request.messages], **options)
        room = max(1, self.limit - len(ids))
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._plans(request, [self._fitting(ids)], min(CHAT_TOKENS, room), name, logprobs)

    def resumed(self, folder: Path, request: ResumeRequest) -> Plan:
        """The rest of a journal's text."""
        header = read(folder).header
        engine = self._engine(request.drafter, request.drafter_options)
        try:
            start = partial(_resume, engine, folder)
            return Plan(start, len(header.prompt), header.params,
                        self._num_bytes(engine, len(header.prompt) + header.params.max_new_tokens),
                        title(engine, header.prompt), folder, keeps=True, compares=request.details)
        except UsageError as error:
            raise JournalError(str(error)) from error

    @property
    def limit(self) -> int:
        """Tokens of prompt and text together."""
        return self.engine.model.config.max_positions

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model_name):
            raise ApiError(404, f"the model {name!r} is not served here; this server has "
                           f"{self.settings.model_name!r}", param="model", code="model_not_found")

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        try:
            return self._fitting(self.engine.encode(prompt))
        except UsageError as error:
            raise ApiError(400, str(error), param="prompt", code="invalid_value") from error

    def _fitting(self, ids: list[int]) -> list[int]:
        if len(ids) >= self.limit:
            raise ApiError(400, f"the prompt has {len(ids):,} tokens; allowed: {self.limit - 1:,} (the model's context "
                           "limit, less one to write)", param="prompt", code="context_length_exceeded")
        return ids

    def _plans(self, request: Sampling, prompts: list[list[int]], tokens: int, name: str,
               logprobs: int | None) -> list[Plan]:
        self.require_model(request.model)
        params = self._params(request, tokens)
        longest = max(len(ids) for ids in prompts)
        if longest + params.max_new_tokens > self.limit:
            raise ApiError(400, f"the prompt ({longest:,} tokens) and max_tokens ({params.max_new_tokens:,}) are "
                           f"{longest + params.max_new_tokens:,} tokens; allowed: {self.limit:,} (the model's context "
                           "limit)", param="max_tokens", code="context_length_exceeded")
        extension = request.longdraft
        engine = self._engine(extension.drafter, extension.drafter_options)
        seed = params.seed if params.seed is not None else time.time_ns() & (2**53 - 1)  # a number that JSON can hold
        count = len(prompts) * request.n
        plans = []
        for i in range(count):
            ids, each = prompts[i // request.n], params.with_seed((seed + i % request.n) % (MAX_SEED + 1))
            own = name if count == 1 else f"{name}-{i}"
            folder = self._journal(extension.journal, own, each, count)
            plans.append(Plan(partial(_generate, engine, ids, each, folder, logprobs), len(ids), each,
                              self._num_bytes(engine, len(ids) + each.max_new_tokens), title(engine, ids), folder,
                              keeps=bool(extension.journal), compares=extension.details))
        return plans

    def _params(self, request: Sampling, tokens: int) -> SamplingParams:
        """ApiError naming a parameter as the request does."""
        extension = request.longdraft
        given: dict[str, Any] = {name: getattr(request, name) for name in _TOP}
        for name in _OURS:
            value, outer = getattr(extension, name), given.get(name)
            if value is not None and outer not in (None, value):
                raise ApiError(400, f"{name} is {outer!r} and longdraft.{name} {value!r}; give one of them", param=name,
                               code="invalid_value")
            given[name] = value if outer is None else outer
        given = {name: value for name, value in given.items() if value is not None}
        given["logit_bias"] = _bias(request.logit_bias)
        if not {ALIASES.get(name, name) for name in given} & {"max_new_tokens"}:
            given["max_new_tokens"] = tokens
        try:
            return self.engine.params(**given)
        except UsageError as error:
            spelt = _spelt(error.name, given, extension.model_fields_set)
            raise ApiError(400, str(error), param=spelt, code="invalid_value") from error

    def _engine(self, drafter: str | None, options: Mapping[str, Any] | None) -> Engine:
        if drafter is None and not options:
            return self.engine
        named = next((key for key in _FILES if key in (options or {})), None)
        try:
            if named:
                raise UsageError(f"drafter option {named!r} names files of the server; it is set where it is started")
            return self.engine.with_drafter(drafter or self.engine.drafter, options, may_load=False)
        except UsageError as error:
            where = "longdraft.drafter_options" if options else "longdraft.drafter"
            raise ApiError(400, str(error), param=where, code="invalid_value") from error

    def _journal(self, asked: bool | str | None, name: str, params: SamplingParams, count: int) -> Path | None:
        root = self.settings.journals
        if root is None:
            if asked:
                raise ApiError(400, "this server keeps no journals; leave longdraft.journal out", code="no_journals",
                               param="longdraft.journal")
            return None
        if isinstance(asked, str) and count > 1:
            raise ApiError(400, "longdraft.journal names one text and the request asks for several; use true",
                           param="longdraft.journal", code="invalid_value")
        if asked is False or (not asked and params.max_new_tokens < self.settings.journal_from):
            return None
        folder = root / (asked if isinstance(asked, str) else name)
        if is_there(folder):
            raise ApiError(409, f"the journal {folder.name!r} is there already; go on with POST "
                           f"/v1/longdraft/generations/{folder.name}/resume, or give another id",
                           param="longdraft.journal", code="journal_exists")
        return folder

    def _num_bytes(self, engine: Engine, tokens: int) -> int:
        """The most that a text of so many tokens takes of the memory, with who drafts it."""
        rows = tokens + (LARGEST_TREE if engine.model.kernels.is_device else 0)  # reserved whole there
        return int(rows * engine.model.cache_bytes_per_token * _MORE) + engine.drafter_bytes(tokens) + _BESIDE

    def _require_few(self, count: int, param: str) -> None:
        if count > self.settings.max_choices:
            raise ApiError(400, f"the request asks for {count} texts; allowed: {self.settings.max_choices} (prompts "
                           "times n)", param=param, code="invalid_value")


def jobs(plans: list[Plan], name: str, outlet: EventQueue, user: str | None,
         timeouts: tuple[float | None, float]) -> list[Job]:
    """What the scheduler takes. timeouts: the request's, the server's (0: none)."""
    asked, allowed = timeouts
    seconds = min((limit for limit in (asked, allowed) if limit), default=None)
    deadline = None if seconds is None else time.monotonic() + seconds
    return [Job(name if len(plans) == 1 else f"{name}-{i}", i, plan, outlet, deadline, user)
            for i, plan in enumerate(plans)]


def _generate(engine: Engine, ids: list[int], params: SamplingParams, folder: Path | None, logprobs: int | None,
              on_prefill: Any) -> Any:
    return engine.generate(ids, params, journal=folder, logprobs=logprobs, on_prefill=on_prefill)


def _resume(engine: Engine, folder: Path, on_prefill: Any) -> Any:
    return engine.resume(folder, on_prefill=on_prefill)


def _bias(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's map of token ids, which are texts in JSON."""
    try:
        return tuple(sorted((int(token), float(value)) for token, value in (given or {}).items()))
    except ValueError as error:
        raise ApiError(400, "logit_bias: keys are token ids", param="logit_bias", code="invalid_value") from error


def _spelt(name: str | None, given: Mapping[str, Any], ours: set[str]) -> str | None:
    """As the request spells the setting `name`."""
    if name is None:
        return None
    spelt = next((key for key in given if ALIASES.get(key, key) == name), name)
    return f"longdraft.{spelt}" if spelt in ours else spelt
