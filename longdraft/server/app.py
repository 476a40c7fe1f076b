"""All routes together, behind the guard.

    app = create(engine, Settings(api_keys=("secret",)))     # an ASGI application; `run.serve` gives it a socket
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Scope

from longdraft.engine import Engine
from longdraft.errors import LongdraftError
from longdraft.server import errors, generations, openai, status
from longdraft.server.errors import ApiError, Cancelled
from longdraft.server.guard import RequestMiddleware
from longdraft.server.journals import Journals
from longdraft.server.logs import log
from longdraft.server.service import Service
from longdraft.server.settings import Settings
from longdraft.version import __version__

_PRUNE_S = 600.0
_PAGE = {"index.html": "text/html", "page.css": "text/css", "icon.svg": "image/svg+xml"}
_SCRIPTS = ("page.js", "stream.js", "text.js", "charts.js", "files.js")
_SAID: dict[int | str, dict[str, Any]] = {status: {"description": text} for status, text in (
    (400, "The request is not what it should be; `param` names what."), (401, "The key is missing or wrong."),
    (403, "Not from here."), (404, "Nothing of that name."), (405, "Another method."), (408, "Not in time."),
    (409, "Not in its present state."), (413, "The body is too large."), (429, "Too many wait; see Retry-After."),
    (500, "A bug, or a disk that is full."), (503, "Draining, or out of memory; see Retry-After."))}


class App:
    """The ASGI application and the service behind it."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.service = Service(engine, settings)
        self.journals = Journals(settings.journals, engine) if settings.journals else None
        self._api = self._build()
        guarded: ASGIApp = RequestMiddleware(self._api, settings, self.service.metrics, _route)
        if settings.cors_origins:
            guarded = CORSMiddleware(guarded, allow_origins=settings.cors_origins, allow_methods=["*"],
                                     allow_headers=["*"], expose_headers=["X-Request-Id", "X-Generation-Id"])
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await (self._api if scope["type"] == "lifespan" else self._guarded)(scope, receive, send)

    def _build(self) -> FastAPI:
        api = FastAPI(title="longdraft", version=__version__, docs_url=None, redoc_url=None, lifespan=self._live,
                      responses=dict(_SAID),
                      description="Ultra-long texts by speculative decoding, exactly those of plain decoding.")
        api.include_router(openai.routes(self.service))
        api.include_router(status.routes(self.service))
        api.include_router(generations.routes(self.service, self.journals))
        _add_page(api)
        api.add_exception_handler(RequestValidationError, _of_validation)
        api.add_exception_handler(HTTPException, _of_http)
        for known in (LongdraftError, MemoryError, Cancelled):  # answered; what is not named here ends its connection
            api.add_exception_handler(known, _of_any)
        api.add_exception_handler(Exception, _of_any)
        schema = api.openapi

        def openapi() -> dict[str, Any]:
            return _honest(schema())

        api.openapi = openapi  # type: ignore[method-assign]
        return api

    @contextlib.asynccontextmanager
    async def _live(self, api: FastAPI) -> AsyncIterator[None]:
        self.service.scheduler.start()
        pruning = asyncio.ensure_future(self._prune())
        try:
            yield
        finally:
            pruning.cancel()
            await asyncio.to_thread(self.service.scheduler.close)

    async def _prune(self) -> None:
        """Keep the folder of journals from growing for ever."""
        while self.journals:
            try:
                await asyncio.to_thread(self.journals.prune, self.service.settings.keep_finished)
            except OSError as error:
                log.warning("old journals cannot be removed: %s", error)
            await asyncio.sleep(_PRUNE_S)


def _add_page(api: FastAPI) -> None:
    """The page at / and its files, which lie in the package."""
    folder = resources.files("longdraft.server") / "page"
    kinds = _PAGE | dict.fromkeys(_SCRIPTS, "text/javascript")
    for name, kind in kinds.items():
        content = (folder / name).read_bytes()
        path = "/" if name == "index.html" else f"/page/{name}"

        api.add_api_route(path, _fixed(content, kind), methods=["GET"], include_in_schema=False)


def _fixed(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return endpoint


async def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return errors.of_validation(error).response


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return ApiError(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {})).response


async def _of_any(request: Request, error: Exception) -> Response:
    known = errors.of(error)
    if known.status_code == 500:
        log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return known.response


def _honest(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the errors that are sent: 400 in OpenAI's shape, never FastAPI's 422."""
    for operations in schema.get("paths", {}).values():
        for operation in operations.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema


def _route(scope: Scope) -> str:
    """The route's pattern, for metrics: a few values, whatever clients ask for."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
