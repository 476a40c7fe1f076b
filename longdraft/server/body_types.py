"""Types that request bodies share: texts, lists and objects of limited length, and the sampling settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from longdraft.errors import UsageError
from longdraft.request.sampling_params import MAX_PHRASE, MAX_PHRASES
from longdraft.request.structured import MAX_STRUCTURE
from longdraft.system.files import require_text

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024  # texts, characters of each
MAX_IDS = 1024  # of stop_token_ids and logit_bias
_MAX_NAME = 256  # characters of a model's name, a drafter's or a label
MAX_MEMBERS = 128  # of an object


def check_utf8(text: str) -> str:
    """The text, if it is valid UTF-8."""
    try:
        require_text(text, "the text", "escape it as whole characters")
    except UsageError as error:
        raise surrogate_error() from error
    return text


def surrogate_error() -> PydanticCustomError:
    return PydanticCustomError("utf8", "the text has half of a surrogate pair; send whole characters")


def one_of(words: str) -> WrapValidator:
    """For a union: one error, which says what is allowed. Pydantic reports one for each of the alternatives."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if "utf8" in {each["type"] for each in error.errors(include_url=False, include_input=False)}:
                raise surrogate_error() from error
            raise PydanticCustomError("one_of", "must be {words}", {"words": words}) from error

    return WrapValidator(validate)


Utf8Text = Annotated[str, AfterValidator(check_utf8)]
Name = Annotated[Utf8Text, Field(max_length=_MAX_NAME)]
BreakerText = Annotated[Utf8Text, Field(max_length=MAX_STOPS * MAX_STOP_LENGTH)]
StopString = Annotated[Utf8Text, Field(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)]
Phrases = Annotated[list[Annotated[Utf8Text, Field(max_length=MAX_PHRASE)]],
                    Field(fail_fast=True, max_length=MAX_PHRASES)]
StructureText = Annotated[Utf8Text, Field(max_length=MAX_STRUCTURE)]
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_IDS)]
AnyObject = Annotated[dict[str, Any], Field(max_length=MAX_MEMBERS)]


class StrictModel(BaseModel):
    """A body without unknown fields. Values are not converted: "1" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_many_members(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Before the other checks: pydantic would report an error for each unknown member."""
        if isinstance(body, Mapping) and len(body) > MAX_MEMBERS:
            raise PydanticCustomError("too_long", "the object has {count} members; allowed: {limit}",
                                      {"count": len(body), "limit": MAX_MEMBERS})
        return handler(body)


class SamplerFields(StrictModel):
    """Settings beyond OpenAI's, by the names of llama.cpp and vLLM, and other names that clients send for them.

    They are the same at the top level of a body and in its `longdraft` object. longdraft/request/sampling_params.py
    has their meaning.
    """

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    penalty_window: int | None = None
    penalty_range: int | None = None
    repetition_penalty_range: int | None = None
    rep_pen_range: int | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_range: int | None = None
    dry_sequence_breakers: Annotated[BreakerText | Stops | None, one_of(
        f"at most {MAX_STOPS} texts of {MAX_STOP_LENGTH:,} characters, as a list or as JSON")] = Field(
            default=None, description="A list, or a list as JSON.")
    no_repeat_ngram_size: int | None = None
    typical_p: float | None = None
    typical: float | None = None
    typ_p: float | None = None
    top_n_sigma: float | None = None
    nsigma: float | None = None
    top_nsigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    temperature_last: bool | None = None
    temp_last: bool | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    samplers: Annotated[list[Name], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    banned_strings: Phrases | None = Field(default=None, description="Phrases that the text must not contain.")
    banned_phrases: Phrases | None = None
    response_format: AnyObject | None = Field(default=None, description="OpenAI's: text, json_object, json_schema.")
    structured_outputs: AnyObject | None = Field(
        default=None, description="vLLM's: an object with one of json, regex, choice, grammar.")
    guided_json: Annotated[AnyObject | StructureText | None, one_of(
        f"a JSON schema, as an object of at most {MAX_MEMBERS} members or as JSON")] = None
    guided_regex: StructureText | None = None
    guided_choice: Stops | None = None
    guided_grammar: StructureText | None = None
    json_schema: AnyObject | None = Field(default=None, description="llama.cpp's.")
    grammar: StructureText | None = Field(default=None, description="llama.cpp's GBNF, or Lark.")
    structured_after: Annotated[str, Field(max_length=MAX_PHRASE)] | None = Field(
        default=None, description="The text after which the structure begins, such as </think>.")
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
