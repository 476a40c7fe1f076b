"""The ASGI application: routes, error handlers, the page, and the middleware around them.

    app = App(engine, ServerSettings(api_keys=("secret",)))     # `run.run_server` listens on a socket for it
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
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from longdraft.engine.engine import Engine
from longdraft.errors import LongdraftError
from longdraft.server import routes
from longdraft.server.doors import routes as door_routes
from longdraft.server.doors import text_routes
from longdraft.server.errors import ApiError, Cancelled, from_validation_error
from longdraft.server.logs import log
from longdraft.server.middleware import RequestMiddleware
from longdraft.server.schemas import body_schemas
from longdraft.server.service import Service
from longdraft.server.settings import ServerSettings
from longdraft.system import machine
from longdraft.version import __version__

_ROUTERS = (routes.router, door_routes.router, text_routes.router)
_PRUNE_POLL_S = 5.0  # between two looks whether journals are due to be pruned
_MAX_PATH = 100  # characters of a path in a message
_MEMORY_INTERVAL_S = 10.0  # between two returns of freed memory
_PAGE_FILES = {"index.html": "text/html", "page.css": "text/css", "icon.svg": "image/svg+xml"} | dict.fromkeys(
    ("page.js", "stream.js", "text.js", "takes.js", "charts.js", "files.js"), "text/javascript")
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"description": text} for status, text in (
    (400, "The request is invalid; `param` names the parameter."), (401, "The API key is missing or wrong."),
    (403, "The origin or the host name is not allowed."), (404, "Not found."), (405, "Method not allowed."),
    (408, "The body or the text was not complete in time."), (409, "The text's state does not allow this."),
    (413, "The body is too large."), (429, "The queue is full; see Retry-After."),
    (500, "A bug, or a full disk."), (501, "This server does not do this."),
    (503, "The server is shutting down or out of memory; see Retry-After."))}


class App:
    """The ASGI application and the service behind it."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.service = Service(engine, settings)
        self._api = self._build()
        # Outside of FastAPI, so that it sees every response, those of unhandled exceptions included.
        guarded: ASGIApp = RequestMiddleware(self._answer, settings, self.service.metrics, self.service.keys)
        if settings.cors_origins:
            guarded = CORSMiddleware(guarded, allow_origins=settings.cors_origins, allow_methods=["*"],
                                     allow_headers=["*"], expose_headers=["X-Request-Id", "X-Generation-Id"])
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._api if scope["type"] == "lifespan" else self._guarded)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the routes. HEAD is answered as GET; uvicorn leaves the body out."""
        if scope.get("method") != "HEAD":
            await self._api(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        try:
            await self._api(as_get, receive, send)
        finally:
            scope["route"] = as_get.get("route")  # for the log

    def _build(self) -> FastAPI:
        api = FastAPI(title="longdraft", version=__version__, docs_url=None, redoc_url=None, lifespan=self._lifespan,
                      responses=dict(_ERROR_RESPONSES),
                      description="Ultra-long texts by speculative decoding, identical to those of plain decoding.")
        api.state.service = self.service
        for router in _ROUTERS:
            api.include_router(router)
        _add_page(api)
        api.add_exception_handler(RequestValidationError, _handle_validation_error)
        api.add_exception_handler(HTTPException, _handle_http_error)
        # Starlette closes the connection after handlers of Exception, but not after those of named exceptions.
        for exception in (LongdraftError, MemoryError, Cancelled, Exception):
            api.add_exception_handler(exception, _handle_error)
        schema = api.openapi
        api.openapi = lambda: _complete_schema(schema())  # type: ignore[method-assign]
        return api

    @contextlib.asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        self.service.scheduler.start()
        chores = [asyncio.ensure_future(chore) for chore in (self._prune_journals(), _return_memory())]
        try:
            yield
        finally:
            for chore in chores:
                chore.cancel()
            self.service.detached.close()
            await asyncio.to_thread(self.service.scheduler.close)

    async def _prune_journals(self) -> None:
        """Remove old journals at the start, and whenever that is due."""
        journals, settings, is_due = self.service.journals, self.service.settings, True
        while journals:
            if is_due:
                try:
                    await asyncio.to_thread(journals.prune, settings)
                except Exception as error:  # the next round may find the reason gone
                    log.warning("old journals cannot be removed: %s", error)
            await asyncio.sleep(_PRUNE_POLL_S)
            is_due = journals.is_due(settings)


async def _return_memory() -> None:
    """Give the memory of ended texts and requests back to the system at intervals."""
    while True:
        await asyncio.sleep(_MEMORY_INTERVAL_S)
        await asyncio.to_thread(machine.return_free_memory)


def _add_page(api: FastAPI) -> None:
    """Serve the page at / and its files from memory."""
    folder = resources.files("longdraft.server") / "page"
    for name, media_type in _PAGE_FILES.items():
        path = "/" if name == "index.html" else f"/page/{name}"
        endpoint = _static_endpoint((folder / name).read_bytes(), media_type)
        api.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)


def _static_endpoint(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return endpoint


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation_error(error.errors()[0]).response_to(request.scope)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response_to(request.scope)
    if error.status_code in (404, 405):
        return _no_route(request).response_to(request.scope)
    return ApiError(error.status_code, str(error.detail), code="invalid_request",
                    headers=dict(error.headers or {})).response_to(request.scope)


def _no_route(request: Request) -> ApiError:
    """The error of a path that no route has, or none with the request's method."""
    all_routes = [*(route for router in _ROUTERS for route in router.routes), *request.app.routes]
    known_routes = [route for route in all_routes if isinstance(route, Route)]
    methods = {method for route in known_routes if route.path_regex.match(request.url.path)
               for method in route.methods or ()}
    path = repr(request.url.path[:_MAX_PATH])
    if methods:
        allowed = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
        return ApiError(405, f"{request.method[:_MAX_PATH]} is not allowed for {path}; allowed: {allowed}",
                        code="method_not_allowed", headers={"Allow": allowed})
    own = dict.fromkeys(route.path_format for route in routes.router.routes if isinstance(route, Route))
    return ApiError(404, f"no route {path} exists; routes: {', '.join(own)}; and those of other APIs, which "
                    "/openapi.json lists", code="not_found")


async def _handle_error(request: Request, error: Exception) -> Response:
    service: Service = request.app.state.service
    api_error = service.api_error(error)
    if api_error.status_code == 500:
        log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return api_error.response_to(request.scope)


def _complete_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI schema with the bodies, which FastAPI does not parse, and without its 422: the status is 400."""
    bodies = body_schemas((*door_routes.BODIES, *text_routes.BODIES))
    schema.setdefault("components", {}).setdefault("schemas", {}).update(bodies)
    for operations in schema.get("paths", {}).values():
        for operation in operations.values():
            operation.get("responses", {}).pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema
