"""Types that request bodies share: texts, lists and objects of limited length, and the sampling settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from longdraft.errors import UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import Range, Setting, SettingScope, names_of
from longdraft.request.structured import MAX_STRUCTURE
from longdraft.system.files import require_text

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024  # texts, characters of each
MAX_IDS = 1024  # of stop_token_ids and logit_bias
_MAX_NAME = 256  # characters of a model's name, a drafter's or a label
MAX_MEMBERS = 128  # of an object
_OF_A_MEMBER = 2  # longer places than these are (alternative of the union, item of the list, member)


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
    """For a union: one error, which says what is allowed, or what is wrong with a member of an object in a list.
    Pydantic reports one for each of the alternatives."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            if "utf8" in {each["type"] for each in errors}:
                raise surrogate_error() from error
            inside = next((each for each in errors if len(each["loc"]) > _OF_A_MEMBER), None)
            if inside is not None:
                raise ValidationError.from_exception_data("one_of", [InitErrorDetails(
                    type=PydanticCustomError(inside["type"], inside["msg"]), loc=inside["loc"][1:],
                    input=inside["input"])]) from error
            shown = "is null; must be" if value is None else "must be"
            raise PydanticCustomError("one_of", "{shown} {words}", {"shown": shown, "words": words}) from error

    return WrapValidator(validate)


Utf8Text = Annotated[str, AfterValidator(check_utf8)]
Name = Annotated[Utf8Text, Field(max_length=_MAX_NAME)]
StopString = Annotated[Utf8Text, Field(max_length=MAX_STOP_LENGTH)]
StructureText = Annotated[Utf8Text, Field(max_length=MAX_STRUCTURE)]
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_IDS)]
AnyObject = Annotated[dict[str, Any], Field(max_length=MAX_MEMBERS)]


def _check_bias(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_IDS:
        raise PydanticCustomError("too_long", "has {count} entries; allowed: {limit}",
                                  {"count": len(value), "limit": MAX_IDS})
    return value


# Checked before its values: pydantic would report an error for each of them.
LogitBias = Annotated[dict[str, float], BeforeValidator(_check_bias), Field(max_length=MAX_IDS)]
# Spellings of settings whose values have a form of their own.
_FORMS: dict[str, Any] = {
    "samplers": Annotated[list[Name], Field(fail_fast=True, max_length=MAX_STOPS)],
    "thinking": Annotated[dict[str, Annotated[int | float | str, one_of("a number or a text")]],
                          Field(max_length=MAX_STOPS)],
    "response_format": Annotated[AnyObject, Field(description="OpenAI's: text, json_object, json_schema.")],
    "structured_outputs": Annotated[AnyObject, Field(
        description="vLLM's: an object with one of json, regex, choice, grammar.")],
    "guided_json": Annotated[AnyObject | StructureText, one_of(
        f"a JSON schema, as an object of at most {MAX_MEMBERS} members or as JSON")],
    "guided_regex": StructureText,
    "guided_choice": Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)],
    "guided_grammar": StructureText,
    "json_schema": Annotated[AnyObject, Field(description="llama.cpp's.")],
    "grammar": Annotated[StructureText, Field(description="llama.cpp's GBNF, or Lark.")],
}


class StrictModel(BaseModel):
    """A body without unknown fields, or an object in one. Values are not converted: "1" is not a number. A member that
    may be left out may be null, too, which means the same.

    A validation context is a function that is called with each unknown member, which is left out.

    path     before the names of members in that call
    checked  names that are no fields, and which a class checks itself
    spellings  names of parameters of another API -> those of chats, which errors have otherwise
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    path: ClassVar[str] = ""
    checked: ClassVar[frozenset[str]] = frozenset()
    spellings: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _check_members(cls, body: Any, handler: ModelWrapValidatorHandler[Self],
                       info: ValidationInfo[Callable[[str], None] | None]) -> Self:
        """Before the other checks: pydantic would report an error for each unknown member."""
        if not isinstance(body, Mapping):
            return handler(body)
        if len(body) > MAX_MEMBERS:
            raise PydanticCustomError("too_long", "the object has {count} members; allowed: {limit}",
                                      {"count": len(body), "limit": MAX_MEMBERS})
        optional = {name for name, each in cls.model_fields.items() if not each.is_required()}
        if info.context is not None:
            unknown = body.keys() - cls.model_fields.keys() - cls.checked
            for name in unknown:
                info.context(f"{cls.path}{name}")
            body = {name: value for name, value in body.items() if name not in unknown}
        return handler({name: value for name, value in body.items() if value is not None or name not in optional})

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, in which members that may be left out may be null."""
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        for name, member in resolved.get("properties", {}).items():
            if name not in resolved.get("required", ()) and _NULL not in member.get("anyOf", ()):
                about = {key: member.pop(key) for key in ("title", "description", "default") if key in member}
                resolved["properties"][name] = {"anyOf": [*member.get("anyOf", [member]), _NULL], **about}
        return schema


_NULL = {"type": "null"}


class SettingsBody(StrictModel):
    """A body, or a part of one, with sampling settings. Subclasses have them as fields: see `settings_body`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were given, by the names that they were given by."""
        given = {name: getattr(self, name, None) for name in names_of(SamplingParams)}
        return {name: value for name, value in given.items() if value is not None}


def settings_body(name: str, scope: SettingScope, owner: type = SamplingParams) -> type[SettingsBody]:
    """A class with a field for each name of the sampling settings that may be given in `scope`. The fields check types
    and sizes; `owner` checks ranges."""
    members: dict[str, Any] = {
        spelling: (_FORMS.get(spelling) or _type_of(each),
                   Field(default=None, description=each.help, json_schema_extra=_range_of(each)))
        for spelling, each in names_of(owner).items() if scope in each.scopes}
    return create_model(name, __base__=SettingsBody, **members)


def _type_of(each: Setting) -> Any:
    """The type of a setting's values in a body."""
    if isinstance(each.allowed, tuple):
        return Literal[each.allowed]
    count, length = each.limits
    text: Any = Annotated[Utf8Text, Field(max_length=length)]
    if each.type == tuple[str, ...]:
        one: Any = Annotated[Utf8Text, Field(max_length=count * length)] if each.has_json_lists else text
        several: Any = Annotated[list[text], Field(fail_fast=True, max_length=count)]
        return Annotated[one | several, one_of(f"a text or a list of at most {count:,} texts, of {length:,} characters "
                                               "each")]
    return {str: text, tuple[int, ...]: TokenIds, tuple[tuple[int, float], ...]: LogitBias}.get(each.type, each.type)


def _range_of(each: Setting) -> dict[str, Any]:
    """The range of a number as members of a JSON schema."""
    allowed = each.allowed
    if not isinstance(allowed, Range) or allowed.others:
        return {}
    ends = {"exclusiveMinimum" if allowed.above else "minimum": allowed.low,
            "exclusiveMaximum" if allowed.below else "maximum": allowed.high}
    return {name: end for name, end in ends.items() if math.isfinite(end)}


if TYPE_CHECKING:
    BodySettings = SettingsBody
    ExtensionSettings = SettingsBody
else:
    BodySettings = settings_body("BodySettings", SettingScope.BODY)  # at the top level of a body
    ExtensionSettings = settings_body("ExtensionSettings", SettingScope.EXTENSION)  # in its object `longdraft`
