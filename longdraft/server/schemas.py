"""Request bodies. The server honours every parameter listed here and refuses every other one by name.

Lists and objects have a largest length, and the first wrong item of a list ends its validation: a body of wrong items
costs no more than a good one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticCustomError

from longdraft.request.openai_body import UNSUPPORTED, ThinkingRequest, parse_json, read_thinking, unsupported
from longdraft.request.sampling_params import EFFORTS
from longdraft.server.body_types import (
    AnyObject,
    BodySettings,
    ExtensionSettings,
    Name,
    StrictModel,
    Utf8Text,
    check_utf8,
    one_of,
)
from longdraft.server.errors import ApiError, from_validation_error

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
MAX_LOGPROBS = 20
_MAX_MESSAGES, _MAX_PARTS = 4096, 1024
_MAX_CALLS = 1024  # of a message
_EMPTY_MEMBERS = ("annotations", "audio", "refusal")
_MAX_TOKENS = 1 << 24  # of /detokenize, within the limit for bodies


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
        check_utf8(text)
    return value


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
# Checked by hand: a pydantic union would report one error for each of its alternatives.
PromptInput = Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema({"anyOf": [
    {"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, _IDS,
    {"type": "array", "items": _IDS, "minItems": 1}]})]


class LongdraftOptions(ExtensionSettings):
    """The `longdraft` object of a request: settings for which OpenAI's API has no name, and options of the server."""

    path: ClassVar[str] = "longdraft."

    drafter: Name | None = Field(default=None, description="Drafter. Does not change the text.")
    drafter_options: AnyObject | None = Field(default=None, description="As --drafter-option of the command line.")
    journal: Annotated[bool | Annotated[str, Field(pattern=ID_PATTERN)] | None, one_of(
        "true, false or an id: 1 to 100 letters, digits, '_', '.' and '-', the first a letter or digit")] = Field(
            default=None, description="Keep the text on disk under this id (true: the response's id), to resume it.")
    timeout: float | None = Field(
        default=None, gt=0, allow_inf_nan=False,
        description="Limit in seconds, including time in the queue; the server's own limit applies as well.")
    cache: bool = Field(default=True, description="Take keys and values of earlier texts that begin alike, and give "
                                                  "this text's. Does not change the text.")
    details: bool = Field(default=False, description="Chunks have each token, its drafter, and the speed.")
    detach: bool = Field(default=False, description="The text goes on if its client leaves, for the server's --detach, "
                                                    "and any client with its key can read on.")


class StreamOptions(StrictModel):
    path: ClassVar[str] = "stream_options."
    include_usage: bool = Field(default=False, description="Send one more chunk at the end, with the usage.")
    include_obfuscation: bool = Field(default=False, description="No effect: chunks have no padding.")


class SamplingRequest(BodySettings):
    """The parameters that completions and chat have in common."""

    checked: ClassVar[frozenset[str]] = frozenset(UNSUPPORTED)

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, description="Number of texts per prompt. Text i has the seed `seed` + i.")
    user: Name | None = Field(default=None, description="Label for the server's log.")
    return_progress: bool = Field(default=False, description="A stream has chunks with `prompt_progress` while the "
                                                             "prompt is read.")
    cache_salt: Name = Field(default="", description="Texts with different salts share no cached prompts.")
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
        if "best_of" in foreign:  # the best n of n texts are all of them
            foreign["best_of"] = (body.get("n") or 1,)
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
    echo: bool = Field(default=False, description="The prompt comes first; with `logprobs`, so do those of its tokens.")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each a text or token ids."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and self.stream:
            raise PydanticCustomError("echo", "a stream has log-probabilities of new tokens only; with echo and "
                                              "logprobs, leave stream out", {"param": "echo"})
        return self


class ContentPart(StrictModel):
    path: ClassVar[str] = "messages[].content[]."
    type: Literal["text"]
    text: Utf8Text


class ChatMessage(StrictModel):
    path: ClassVar[str] = "messages[]."
    checked: ClassVar[frozenset[str]] = frozenset(("reasoning", "provider_specific_fields", *_EMPTY_MEMBERS))
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Utf8Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=_MAX_PARTS)], one_of(
        f"a text, or a list of at most {_MAX_PARTS:,} parts with the type text")]
    name: Name | None = None
    reasoning_content: Utf8Text | None = Field(default=None, description="An answer's thinking, for templates that "
                                                                         "show it. Also `reasoning`.")
    tool_calls: Annotated[list[AnyObject], Field(fail_fast=True, max_length=_MAX_CALLS)] | None = Field(
        default=None, description="An answer's calls of functions.")
    tool_call_id: Name | None = Field(default=None, description="Of the call whose result this is.")
    function_call: AnyObject | None = Field(default=None, description="OpenAI's old name of a single call.")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_members(cls, message: Any) -> Any:
        """Clients send answers back as they got them, with members that are empty."""
        if not isinstance(message, Mapping):
            return message
        kept = {name: value for name, value in message.items()
                if (value is not None or name == "content")
                and name != "provider_specific_fields"  # LiteLLM's own, about another server
                and not (name in _EMPTY_MEMBERS and value in ([], {}))}
        if "reasoning" in kept:
            kept.setdefault("reasoning_content", kept.pop("reasoning"))
        if kept.get("content") is None and (kept.get("tool_calls") or kept.get("function_call")):
            kept["content"] = ""
        return kept

    def for_template(self) -> dict[str, Any]:
        """The message with its parts joined, without empty members."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        optional = {name: getattr(self, name)
                    for name in ("name", "reasoning_content", "tool_calls", "tool_call_id", "function_call")}
        return {"role": self.role, "content": content} | {name: value for name, value in optional.items() if value}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=_MAX_MESSAGES)]


_EffortName: Any = Literal[EFFORTS]


class ReasoningOptions(StrictModel):
    """OpenRouter's names for the settings of thinking."""

    path: ClassVar[str] = "reasoning."
    effort: _EffortName | None = Field(default=None, description="As reasoning_effort.")
    max_tokens: int | None = Field(default=None, ge=0, description="As thinking_budget.")
    enabled: bool | None = Field(default=None, description="false: as the effort none.")
    exclude: bool = Field(default=False, description="The thinking is written, and not sent.")


class ChatRequest(SamplingRequest):
    messages: Messages
    reasoning: ReasoningOptions | None = Field(default=None, description="How much the model thinks, as OpenRouter "
                                               "has it.")
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: AnyObject | None = Field(default=None, description="Variables of the chat template.")
    add_generation_prompt: bool | None = Field(default=None, description="End the prompt with the beginning of an "
                                               "answer. Default: unless the last message is continued.")
    continue_final_message: bool = Field(default=False, description="Continue the last message, an assistant's. The "
                                                                    "reply has only what is new.")

    # Checked by longdraft/request/tools.py, as those of a batch.
    tools: Any = Field(default=None, description="Functions that the answer may call.")
    tool_choice: Any = Field(default=None, description="none, auto, required, or one function or several.")
    parallel_tool_calls: bool | None = Field(default=None, description="false: an answer has one call at most.")
    functions: Any = Field(default=None, description="OpenAI's old name of `tools`.")
    function_call: Any = Field(default=None, description="OpenAI's old name of `tool_choice`.")
    reasoning_format: Literal["auto", "none"] | None = Field(
        default=None, description="auto: the thinking of models that mark it is `reasoning_content`; none: it is part "
                                  "of `content`. Default: the server's.")

    @model_validator(mode="after")
    def _check_final_message(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError("final", "continue_final_message continues the last message, and "
                                      "add_generation_prompt begins another one; set one of them to false",
                                      {"param": "add_generation_prompt"})
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise PydanticCustomError("final", "continue_final_message needs an assistant's message at the end, not "
                                      "one with the role {role}", {"param": "messages", "role": self.messages[-1].role})
        return self

    @property
    def asked_thinking(self) -> ThinkingRequest:
        """UsageError where the request contradicts itself."""
        return read_thinking(super().settings | {"reasoning": self.reasoning and self.reasoning.model_dump(),
                                                 "reasoning_format": self.reasoning_format})

    @property
    def settings(self) -> dict[str, Any]:
        given = super().settings
        given.pop("thinking", None)
        return given | self.asked_thinking.settings

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs needs logprobs: true", {"param": "top_logprobs"})
        return self


class TokenizeRequest(StrictModel):
    model: Name | None = None
    prompt: Utf8Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    content: Utf8Text | None = Field(default=None, description="llama.cpp's name of `prompt`. The reply is as it "
                                                               "has it, too.")
    add_special: bool = Field(default=False, description="With content: as add_special_tokens.")
    parse_special: Literal[True] = Field(default=True, description="Special tokens in a text are always read as such.")
    with_pieces: bool = Field(default=False, description="With content: the text of each token, too.")

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise PydanticCustomError("one", "give one of prompt, messages and content", {"param": "prompt"})
        return self


class DetokenizeRequest(StrictModel):
    model: Name | None = None
    tokens: Annotated[list[int], Field(fail_fast=True, max_length=_MAX_TOKENS)]


class ExportRequest(StrictModel):
    """A text that becomes a file. Its chapters begin at its Markdown headings."""

    text: Utf8Text
    format: Literal["epub", "markdown"] = "epub"
    title: Utf8Text = ""
    author: Utf8Text = ""
    language: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,35}$")] = "en"


class ResumeRequest(StrictModel):
    """Options of a resumed text. Everything that determines the text is in the journal."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    drafter: Name | None = None
    drafter_options: AnyObject | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    details: bool = False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, ExportRequest,
          ResumeRequest)
_SCHEMAS = "#/components/schemas/"
Model = TypeVar("Model", bound=StrictModel)


def parse_body(model: type[Model], body: bytes | bytearray, on_unknown: Callable[[str], None] | None = None) -> Model:
    """The request of a JSON body. Raises ApiError (400) for the first thing that is wrong.

    on_unknown  called with the name of each unknown parameter, which is left out; None: such a body is refused
    """
    try:
        content = parse_json(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    return validated(model, content, on_unknown)


def validated(model: type[Model], content: Any, on_unknown: Callable[[str], None] | None = None) -> Model:
    """The request of a body that is parsed. Raises ApiError as `parse_body` does."""
    try:
        return model.model_validate(content, context=on_unknown)
    except ValidationError as error:
        extension = LongdraftOptions.model_fields if issubclass(model, SamplingRequest) else ()
        raise from_validation_error(error.errors(include_url=False, include_input=False)[0], extension) from None


def body_reference(model: type[StrictModel]) -> dict[str, Any]:
    """The part of a route's OpenAPI description that names its body."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def body_schemas(others: Iterable[type[StrictModel]] = ()) -> dict[str, Any]:
    """The JSON schemas of all bodies and their parts, by name. others: bodies of other APIs"""
    bodies: list[type[StrictModel]] = [*BODIES, *others]
    _, found = models_json_schema([(model, "validation") for model in bodies], ref_template=_SCHEMAS + "{model}")
    return dict(found["$defs"])
