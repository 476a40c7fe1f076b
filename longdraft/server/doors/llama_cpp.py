"""llama.cpp's own API: `/completion`, and what its clients read before it.

    data: {"content": " and", "tokens": [], "stop": false}, and at last one with "stop": true and all figures
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from longdraft.engine.engine import Engine
from longdraft.request.events import Event, TokenLogprob
from longdraft.request.sampling_params import ALIASES
from longdraft.server.doors.blocks import SettingNames, StopSearch, TextReply, refused, without_none
from longdraft.server.errors import ApiError
from longdraft.server.jobs import GenerationJob
from longdraft.server.replies import (
    ResponseOptions,
    data_event,
    list_pieces,
    logprobs_of,
    pieces_around,
    token_logprobs,
)
from longdraft.server.schemas import MAX_LOGPROBS, CompletionRequest
from longdraft.text.tokenizer import Tokenizer
from longdraft.version import __version__

_SETTINGS = SettingNames(
    {name: own if own == "penalty_window" else name for name, own in ALIASES.items()} | {
        name: name for name in ("prompt", "model", "stream", "user", "longdraft", "cache_salt", "return_progress",
                                "logprobs")} | {
        "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "n_probs": "logprobs"},
    # How llama.cpp runs a model. None of these changes a text here.
    idle=("id_slot", "n_keep", "n_discard", "post_sampling_probs", "timings_per_token", "mirostat_tau", "mirostat_eta"),
    off={"mirostat": (0,), "t_max_predict_ms": (0,), "n_indent": (0,), "min_keep": (0, 1), "lora": ([],),
         "response_fields": ([],), "n": (1,), "echo": (False,), "stream_options": ({"include_usage": False},)})


class _Completion(CompletionRequest):
    cache_prompt: bool = Field(default=True, description="As longdraft.cache.")
    n_predict: Any = Field(default=None, description="As `max_tokens`. 0: the prompt is read into the cache only.")
    return_tokens: bool = Field(default=False, description="The reply has the tokens, too.")
    logit_bias: Any = Field(default=None, description="As in completions, or a list of pairs.")
    seed: Any = Field(default=None, description="-1: a random one.")


if TYPE_CHECKING:
    CompletionBody = _Completion
else:
    CompletionBody = _SETTINGS.body("LlamaCompletion", _Completion)


def completion_of(body: CompletionBody) -> dict[str, Any]:
    """The same request as a completion. Raises ApiError for what cannot be one."""
    given = body.model_dump(exclude_unset=True, exclude={"cache_prompt", "return_tokens", "logit_bias"})
    if len(body.prompts) > 1:
        raise refused("prompt", body.prompt, "one prompt; send several requests")
    extension = given.get("longdraft", {}) | ({} if body.cache_prompt else {"cache": False})
    completion = _SETTINGS.read(given) | {"longdraft": extension or None, "logit_bias": _bias(body.logit_bias)}
    probs = completion.get("logprobs")
    if isinstance(probs, int) and probs > MAX_LOGPROBS:
        raise refused("n_probs", probs, f"0 to {MAX_LOGPROBS}")
    return without_none(completion | {"logprobs": probs or None})


def _bias(given: Any) -> Any:
    """`logit_bias` as completions have it. In llama.cpp it may be pairs, and false bans a token."""
    if not isinstance(given, list):
        return given or None
    pairs = [pair for pair in given if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int)]
    if len(pairs) < len(given):
        raise refused("logit_bias", given, "an object, or a list of pairs of a token id and a number")
    return {str(token): -100.0 if value is False else value for token, value in pairs} or None


class CompletionReply(TextReply):
    """The reply to `/completion`."""

    def __init__(self, options: ResponseOptions, model: str, tokenizer: Tokenizer, jobs: list[GenerationJob], *,
                 body: CompletionBody) -> None:
        super().__init__(options, jobs)
        self._model, self._tokenizer, self._body = model, tokenizer, body
        self._stops = StopSearch(tokenizer, self._job.params.stop)
        self._tokens: list[int] = []

    def prompt_news(self, job: GenerationJob) -> Iterator[bytes]:
        done, total = job.prefill
        if self._options.has_prompt_progress and total and done != self._choice.prompt_done:
            self._choice.prompt_done = done
            yield data_event(self._content("", [], []) | {"prompt_progress": {
                "total": total, "cache": job.cached_tokens, "processed": done}})

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        self._stops.add(events)
        text = "".join(part.text for part in self._choice.read(events))
        yield data_event(self._content(text, self._tokens_of(events), self._probabilities(logprobs_of(events))))

    def end(self) -> Iterator[bytes]:
        yield data_event(self._content("", [], []) | self._figures())

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield data_event(error.body)

    def add(self, job: GenerationJob, events: list[Event]) -> None:
        super().add(job, events)
        self._stops.add(events)
        self._tokens += self._tokens_of(events)

    def whole(self) -> Iterator[bytes]:
        return pieces_around(lambda mark: self._content(self._choice.answer.content, self._tokens, mark)
                             | self._figures(), [list_pieces(self._choice.logprobs, self._probabilities)])

    def _tokens_of(self, events: list[Event]) -> list[int]:
        return [token for event in events for token in event.tokens] if self._body.return_tokens else []

    def _probabilities(self, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        return token_logprobs(entries, self._tokenizer, has_ids=True)

    def _content(self, text: str, tokens: list[int], probabilities: list[dict[str, Any]] | str) -> dict[str, Any]:
        shown = {"completion_probabilities": probabilities} if self._options.logprobs else {}
        return {"index": 0, "content": text, "tokens": tokens, "id_slot": 0, "stop": False,
                "tokens_predicted": self._job.num_tokens, "tokens_evaluated": self._options.prompt_tokens, **shown}

    def _figures(self) -> dict[str, Any]:
        """The members of the last reply."""
        job, params = self._job, self._job.params
        end = self._choice.end
        kind = {"length": "limit", "loop": "limit", "eos": "eos", "stop": "word"}.get(end or "", "none")
        prefill, decoding = (1000 * (job.stats or {}).get(f"{name}_seconds", 0.0) for name in ("prefill", "decode"))
        read = self._options.prompt_tokens - job.cached_tokens
        return {
            "stop": True, "model": self._model, "prompt": self._body.prompt, "truncated": False, "stop_type": kind,
            "stopping_word": (self._stops.stop or "") if end == "stop" else "", "tokens_cached": job.cached_tokens,
            "generation_settings": {
                "n_predict": params.max_new_tokens, "seed": params.seed,
                "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
                "stop": list(params.stop)},
            "timings": {"cache_n": job.cached_tokens, **_speed("prompt", read, prefill),
                        **_speed("predicted", self._job.num_tokens, decoding)}}


def _speed(name: str, count: int, milliseconds: float) -> dict[str, float]:
    return {f"{name}_n": count, f"{name}_ms": milliseconds, f"{name}_per_token_ms": milliseconds / max(1, count),
            f"{name}_per_second": 1000 * count / milliseconds if milliseconds else 0.0}


def properties(engine: Engine, model: str, context_limit: int, num_slots: int) -> dict[str, Any]:
    """What `/props` says of the server."""
    tokenizer = engine.tokenizer
    template, ends = tokenizer.chat_template, engine.model.config.eos_token_ids
    return {"default_generation_settings": {"n_ctx": context_limit, "params": dict(engine.defaults.settings)},
            "total_slots": num_slots, "model_path": model, "model_alias": model,
            "chat_template": template.source if template else "",
            "bos_token": "" if tokenizer.begin_id is None else tokenizer.letters(tokenizer.begin_id),
            "eos_token": tokenizer.letters(ends[0]) if ends else "",
            "modalities": {"vision": False, "audio": False}, "build_info": f"longdraft {__version__}"}


def slots(jobs: Sequence[GenerationJob], context_limit: int, num_slots: int) -> list[dict[str, Any]]:
    """The places of running texts, as `/slots` lists them. jobs: that run"""
    shown: list[dict[str, Any]] = []
    for place in range(num_slots):
        job = jobs[place] if place < len(jobs) else None
        shown.append({"id": place, "n_ctx": context_limit, "speculative": True, "is_processing": job is not None} | (
            {"id_task": job.id, "next_token": {"n_decoded": job.num_tokens, "n_remain": job.remaining_tokens,
                                               "has_next_token": True}} if job else {}))
    return shown
