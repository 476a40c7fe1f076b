"""KoboldCpp's API: texts whole, as events, and as far as they are, by the key that a request gives to its text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from longdraft.request.events import Event
from longdraft.server.body_types import Name, StrictModel, Utf8Text
from longdraft.server.doors.blocks import SettingNames, TextReply, refused, without_none
from longdraft.server.errors import ApiError
from longdraft.server.jobs import GenerationJob
from longdraft.server.replies import ResponseOptions, as_json
from longdraft.server.schemas import LongdraftOptions
from longdraft.text.tokenizer import Tokenizer

PREFIX = "kobold-"  # of the ids of texts
API_VERSION, KOBOLD_VERSION = "1.2.5", "1.99"  # that clients ask for, at least
_SETTINGS = SettingNames(
    {"max_length": "max_tokens", "rep_pen": "repetition_penalty", "rep_pen_range": "penalty_window",
     "typical": "typical_p", "sampler_seed": "seed", "stop_sequence": "stop", "banned_tokens": "banned_strings",
     "nsigma": "top_n_sigma", "genkey": "user"} | {
        name: name for name in (
            "temperature", "top_k", "top_p", "min_p", "presence_penalty", "dry_multiplier", "dry_base",
            "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "xtc_probability",
            "dynatemp_range", "dynatemp_exponent", "grammar", "logit_bias")},
    # A prompt is never cut, and a text is sent as it was written.
    idle=("max_context_length", "stream", "quiet", "mirostat_tau", "mirostat_eta", "grammar_retain_state",
          "replace_instruct_placeholders"),
    off={"n": (1,), "top_a": (0,), "tfs": (1,), "smoothing_factor": (0,), "mirostat": (0,), "rep_pen_slope": (0, 1),
         "trim_stop": (True,), "render_special": (False,), "images": ([],), "logprobs": (False,), "negative_prompt": (
             "",)})
# KoboldCpp's numbers of samplers, in its own order, where the temperature comes last; and with the temperature first.
_LAST_ORDER, _FIRST_ORDER = [6, 0, 1, 3, 4, 2, 5], [6, 5, 0, 1, 3, 4, 2]


class _Generate(StrictModel):
    prompt: Utf8Text
    memory: Utf8Text = Field(default="", description="Text before the prompt.")
    bypass_eos: bool = Field(default=False, description="As ignore_eos.")
    ban_eos_token: bool = Field(default=False, description="As ignore_eos.")
    use_default_badwordsids: bool = Field(default=False, description="As ignore_eos.")
    sampler_order: Any = Field(default=None, description=f"{_LAST_ORDER}: as temperature_last; {_FIRST_ORDER}.")
    longdraft: LongdraftOptions | None = None


class KeyBody(StrictModel):
    """genkey: of the text; none: the latest one"""

    genkey: Name | None = None


class CountBody(StrictModel):
    prompt: Utf8Text
    special: bool = True


if TYPE_CHECKING:
    GenerateBody = _Generate
else:
    GenerateBody = _SETTINGS.body("KoboldGenerate", _Generate)


def completion_of(body: GenerateBody, *, is_stream: bool) -> dict[str, Any]:
    """The same request as a completion. Raises ApiError for what cannot be one."""
    if body.sampler_order not in (None, _LAST_ORDER, _FIRST_ORDER):
        raise refused("sampler_order", body.sampler_order, f"{_LAST_ORDER} or {_FIRST_ORDER}")
    settings = _SETTINGS.read(body.model_dump(exclude_unset=True, exclude=set(_Generate.model_fields)))
    ignores_end = body.bypass_eos or body.ban_eos_token or body.use_default_badwordsids
    return settings | without_none({
        "prompt": body.memory + body.prompt, "stream": is_stream, "longdraft": body.longdraft,
        "ignore_eos": ignores_end or None, "temperature_last": body.sampler_order == _LAST_ORDER or None})


class KoboldReply(TextReply):
    """The reply to `/api/v1/generate`, or to `/api/extra/generate/stream`."""

    def __init__(self, options: ResponseOptions, model: str, tokenizer: Tokenizer, jobs: list[GenerationJob]) -> None:
        super().__init__(options, jobs)

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        text = "".join(part.text for part in self._choice.read(events))
        yield _message({"token": text, "finish_reason": self._reason})

    def end(self) -> Iterator[bytes]:
        yield from ()

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield _message({"token": "", "finish_reason": "error", "error": str(error)})

    def whole(self) -> Iterator[bytes]:
        yield as_json({"results": [{
            "text": self._choice.answer.content, "finish_reason": self._reason, "logprobs": None,
            "prompt_tokens": self._options.prompt_tokens, "completion_tokens": self._job.num_tokens}]})

    @property
    def _reason(self) -> str | None:
        return {"length": "length", None: None}.get(self._choice.finish_reason, "stop")


def _message(content: dict[str, Any]) -> bytes:
    return b"event: message\ndata: " + as_json(content) + b"\n\n"
