"""Errors in OpenAI's format: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import errno
from collections.abc import Container, Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from longdraft.errors import JournalError, LongdraftError, ModelError, OutputError, UsageError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
          429: "rate_limit_error"}
ANTHROPIC_PATHS = "/v1/messages"
RETRY_AFTER_S = 5
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; only the log and the metrics show it
_MAX_NAME = 100  # characters of a parameter
_MAX_MESSAGE = 1000  # characters: messages quote what the client sent


class Cancelled(Exception):
    """The client disconnected or cancelled the text.

    keeps_journal  the journal remains on disk: an explicit cancellation, after which the client may resume
    """

    def __init__(self, *, keeps_journal: bool = False) -> None:
        super().__init__()
        self.keeps_journal = keeps_journal


class ApiError(HTTPException):
    """An error as the client receives it. `param` names the request's parameter, `code` is for programs, and so are
    `details` in Anthropic's form."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None, details: dict[str, Any] | None = None) -> None:
        shown = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "…"
        super().__init__(status, shown, headers or {})
        self.param = param
        self.code = code
        self.details = details

    def __str__(self) -> str:
        return self.detail

    @property
    def body(self) -> dict[str, Any]:
        error_type = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)

    def response_to(self, scope: Scope) -> JSONResponse:
        """The response in the format of the API that has the path of this request."""
        path = scope["path"]
        if path.startswith(ANTHROPIC_PATHS):
            content = anthropic_error(self) | {"request_id": scope.get("state", {}).get("request_id")}
            return JSONResponse(content, self.status_code, self.headers)
        if path.startswith(("/api/v1/", "/api/extra/")):  # KoboldCpp's
            return JSONResponse({"detail": {"msg": str(self), "type": self.code or "error"}}, self.status_code,
                                self.headers)
        if path.startswith("/api/"):
            return JSONResponse({"error": str(self)}, self.status_code, self.headers)
        return self.response


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error in the format of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    details = {"details": error.details} if error.details else {}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}, "request_id": None}


_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


def retry_later(message: str, code: str, status: int = 429) -> ApiError:
    """The request is valid, but the server has no room for it now. The response has a Retry-After header."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def to_api_error(error: BaseException) -> ApiError:
    """The client's view of any exception. Bugs of the server appear without details, which are in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Cancelled):
        return ApiError(409, "the text was cancelled", code="cancelled")
    if isinstance(error, MemoryError):
        return retry_later("the server is out of memory; request fewer tokens, or retry later", "out_of_memory", 503)
    if isinstance(error, UsageError):
        return ApiError(400, str(error), param=error.name, code="invalid_value")
    if isinstance(error, ModelError):  # raised by a chat template: the model itself is loaded by now
        return ApiError(400, str(error), code="model_error")
    if isinstance(error, JournalError):
        return ApiError(409, str(error), code="journal")
    if isinstance(error, OutputError):
        return retry_later(str(error), "storage", 503)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return retry_later("the server is out of file descriptors; retry later", "out_of_files", 503)
    if isinstance(error, LongdraftError):
        return ApiError(500, str(error), code=type(error).__name__)
    return ApiError(500, "internal error; see the server's log", code="internal_error")


def from_validation_error(first: Mapping[str, Any], extension: Container[str] = ()) -> ApiError:
    """The error of a body or a path: the first of pydantic's list. `param` is the name of the parameter.

    extension  names that are known in the object `longdraft` of a body
    """
    location = [str(part)[:_MAX_NAME] for part in first["loc"] if part != "body"]
    context = first.get("ctx") or {}
    param = str(context.get("param") or ".".join(part for part in location if part.isidentifier())) or None
    if first["type"] == "extra_forbidden":
        cure = f'write "longdraft": {{"{param}": ...}}' if len(location) == 1 and param in extension else "remove it"
        return ApiError(400, f"unknown parameter {'.'.join(location)!r}; {cure}", param=param,
                        code="unknown_parameter")
    message = first["msg"] if "param" in context else f"{'.'.join(location) or 'the body'}: {first['msg']}"
    code = "missing_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, message, param=param, code=code)
