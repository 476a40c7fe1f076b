"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from longdraft.errors import JournalError, LongdraftError, ModelError, UsageError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
          429: "rate_limit_error"}
RETRY_AFTER_S = 5


class Cancelled(Exception):
    """The reader of a text has gone, or somebody asked for its end, who may want what is there: its journal stays."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.keeps = keeps


class ApiError(HTTPException):
    """What went wrong, for the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers or {})
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.detail

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def busy(message: str, code: str, status: int = 429) -> ApiError:
    """Nothing is wrong with the request; later there may be room."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def of(error: BaseException) -> ApiError:
    """What a client is told of any failure. Bugs of ours are told without their details: those are in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Cancelled):
        return ApiError(409, "the text was cancelled", code="cancelled")
    if isinstance(error, MemoryError):
        return busy("out of memory; a shorter text needs less, and later there may be more", "out_of_memory", 503)
    if isinstance(error, UsageError):
        return ApiError(400, str(error), param=error.name, code="invalid_value")
    if isinstance(error, ModelError):  # of a chat template: the model was loaded long ago
        return ApiError(400, str(error), code="model_error")
    if isinstance(error, JournalError):
        return ApiError(409, str(error), code="journal")
    if isinstance(error, LongdraftError):
        return ApiError(500, str(error), code=type(error).__name__)
    return ApiError(500, "internal error; the server's log has it", code="internal_error")


def of_validation(error: RequestValidationError) -> ApiError:
    """The first fault of a body or a path, naming the parameter."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    context = first.get("ctx") or {}
    param = str(context.get("param") or ".".join(part for part in place if part.isidentifier())) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {'.'.join(place)!r}; this server knows no such parameter", param=param,
                        code="unknown_parameter")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', first['msg'])}", code="invalid_json")
    message = first["msg"] if "param" in context else f"{'.'.join(place) or 'the body'}: {first['msg']}"
    code = "missing_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, message, param=param, code=code)
