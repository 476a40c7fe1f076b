"""What a request may say. Everything here is honoured; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from longdraft.errors import UsageError
from longdraft.files import require_text
from longdraft.openai_body import UNSUPPORTED, unsupported

ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
MAX_LOGPROBS = 20


def _utf8(text: str) -> str:
    try:
        require_text(text, "the text", "escape it as whole characters")
    except UsageError as error:
        raise PydanticCustomError("utf8", "half of a surrogate pair is no text; send whole characters") from error
    return text


Text = Annotated[str, AfterValidator(_utf8)]


def _prompt(value: object) -> object:
    """A text, token ids, or a list of either."""
    is_ids = isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
    is_texts = isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
    is_lists = isinstance(value, list) and bool(value) and all(
        isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in value)
    if not (isinstance(value, str) or is_ids or is_texts or is_lists):
        raise PydanticCustomError("prompt", "a text, a list of texts, a list of token ids or a list of such lists, "
                                            "none of them empty")
    for text in [value] if isinstance(value, str) else value if is_texts else []:  # type: ignore[attr-defined]
        _utf8(text)
    return value


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
Prompt = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema({"anyOf": [
    {"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, _IDS,
    {"type": "array", "items": _IDS, "minItems": 1}]})]


class Strict(BaseModel):
    """Nothing unknown, and no number that is a text."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Extension(Strict):
    """What OpenAI's API has no name for."""

    drafter: Text | None = Field(default=None, description="Who drafts. Cannot change the text.")
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
    journal: bool | Annotated[str, Field(pattern=ID)] | None = Field(
        default=None, description="Keep the text on disk under this id (true: the response's), to go on with it.")
    timeout: float | None = Field(default=None, gt=0,
                                  description="Seconds, waiting included; at most the server's own.")
    details: bool = Field(default=False, description="Chunks tell each token, who guessed it, and the speed.")


class StreamOptions(Strict):
    include_usage: bool = Field(default=False, description="One more chunk at the end, with the usage.")


class Sampling(Strict):
    """What completions and chat share."""

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, description="Text i has the seed `seed` + i.")
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
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    user: Text | None = Field(default=None, max_length=256, description="Goes into the server's log.")
    longdraft: Extension = Extension()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        """Refuse what others' servers do and this one does not, unless it asks for nothing."""
        if not isinstance(body, Mapping):
            return body
        foreign = {name: idle for name, idle in UNSUPPORTED.items() if name not in cls.model_fields}
        if refused := unsupported(body, foreign):
            raise PydanticCustomError("unsupported", "{param} is not supported by this server; allowed: {allowed}",
                                      dict(zip(("param", "allowed"), refused, strict=True)))
        return {name: value for name, value in body.items() if name not in foreign}

    @model_validator(mode="after")
    def _stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream", "stream_options needs stream: true", {"param": "stream_options"})
        return self


class CompletionRequest(Sampling):
    prompt: Prompt
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError("echo", "echo with logprobs is not supported by this server: it tells "
                                              "log-probabilities of new tokens only", {"param": "echo"})
        return self


class Part(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template wants it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")

    @model_validator(mode="after")
    def _top(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs needs logprobs: true", {"param": "top_logprobs"})
        return self


class TokenizeRequest(Strict):
    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one", "give prompt or messages, one of them", {"param": "prompt"})
        return self


class DetokenizeRequest(Strict):
    model: Text | None = None
    tokens: list[int]


class ResumeRequest(Strict):
    """How to go on with a journal. What the text depends on is in the journal."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    drafter: Text | None = None
    drafter_options: dict[str, Any] | None = None
    timeout: float | None = Field(default=None, gt=0)
    details: bool = False
