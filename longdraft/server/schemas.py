"""Request bodies. The server honours every parameter listed here and refuses every other one by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from longdraft.errors import UsageError
from longdraft.files import require_text
from longdraft.openai_body import UNSUPPORTED, unsupported

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
MAX_LOGPROBS = 20


def _check_utf8(text: str) -> str:
    try:
        require_text(text, "the text", "escape it as whole characters")
    except UsageError as error:
        raise PydanticCustomError("utf8", "the text has half of a surrogate pair; send whole characters") from error
    return text


Utf8Text = Annotated[str, AfterValidator(_check_utf8)]


def _check_prompt(value: object) -> object:
    """Accept a text, a list of token ids, or a list of texts or of lists of token ids."""
    is_ids = isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
    is_texts = isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
    is_lists = isinstance(value, list) and bool(value) and all(
        isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in value)
    if not (isinstance(value, str) or is_ids or is_texts or is_lists):
        raise PydanticCustomError("prompt", "must be a text, a list of texts, a list of token ids or a list of such "
                                            "lists; lists must not be empty")
    for text in [value] if isinstance(value, str) else value if is_texts else []:  # type: ignore[attr-defined]
        _check_utf8(text)
    return value


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
# Checked by hand: a pydantic union would report one error for each of its alternatives.
PromptInput = Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema({"anyOf": [
    {"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, _IDS,
    {"type": "array", "items": _IDS, "minItems": 1}]})]


class StrictModel(BaseModel):
    """A body without unknown fields. Values are not converted: "1" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LongdraftOptions(StrictModel):
    """The `longdraft` object of a request: options for which OpenAI's API has no name."""

    drafter: Utf8Text | None = Field(default=None, description="Drafter. Does not change the text.")
    drafter_options: dict[str, Any] | None = Field(default=None, description="As --drafter-option of the command line.")
    min_p: float | None = None
    top_k: int | None = None
    eta_cutoff: float | None = None
    min_tokens_to_keep: int | None = None
    repetition_penalty: float | None = None
    penalty_window: int | None = None
    min_new_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    on_loop: Literal["warn", "stop", "off"] | None = None
    journal: bool | Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        default=None, description="Keep the text on disk under this id (true: the response's id), to resume it.")
    timeout: float | None = Field(default=None, gt=0, description="Limit in seconds, including time in the queue; the "
                                                                  "server's own limit applies as well.")
    details: bool = Field(default=False, description="Chunks have each token, its drafter, and the speed.")


class StreamOptions(StrictModel):
    include_usage: bool = Field(default=False, description="Send one more chunk at the end, with the usage.")


class SamplingRequest(StrictModel):
    """The parameters that completions and chat have in common."""

    model: Utf8Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, description="Number of texts per prompt. Text i has the seed `seed` + i.")
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: Utf8Text | list[Utf8Text] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    user: Utf8Text | None = Field(default=None, max_length=256, description="Label for the server's log.")
    longdraft: LongdraftOptions = LongdraftOptions()

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        """Refuse parameters of other servers, but ignore values that request nothing, such as `tools: []`."""
        if not isinstance(body, Mapping):
            return body
        foreign = {name: idle for name, idle in UNSUPPORTED.items() if name not in cls.model_fields}
        if refused := unsupported(body, foreign):
            raise PydanticCustomError("unsupported", "{param} is not supported by this server; allowed: {allowed}",
                                      dict(zip(("param", "allowed"), refused, strict=True)))
        return {name: value for name, value in body.items() if name not in foreign}

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream", "stream_options needs stream: true", {"param": "stream_options"})
        return self


class CompletionRequest(SamplingRequest):
    prompt: PromptInput
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each a text or token ids."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs is not supported: log-probabilities exist for new "
                                              "tokens only; leave one of them out", {"param": "echo"})
        return self


class ContentPart(StrictModel):
    type: Literal["text"]
    text: Utf8Text


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Utf8Text | list[ContentPart]
    name: Utf8Text | None = None

    def for_template(self) -> dict[str, str]:
        """The message as a chat template expects it, with its parts joined."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs needs logprobs: true", {"param": "top_logprobs"})
        return self


class TokenizeRequest(StrictModel):
    model: Utf8Text | None = None
    prompt: Utf8Text | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one", "give either prompt or messages", {"param": "prompt"})
        return self


class DetokenizeRequest(StrictModel):
    model: Utf8Text | None = None
    tokens: list[int]


class ResumeRequest(StrictModel):
    """Options of a resumed text. Everything that determines the text is in the journal."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    drafter: Utf8Text | None = None
    drafter_options: dict[str, Any] | None = None
    timeout: float | None = Field(default=None, gt=0)
    details: bool = False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
