"""Middleware around every request: access checks, security headers, its line in the log.

This is plain ASGI, so that streams pass unchanged. Starlette's TrustedHostMiddleware does not answer in OpenAI's error
format.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longdraft.server.admission import SMALL_BODY, Turnstile
from longdraft.server.errors import ANTHROPIC_PATHS, CLIENT_CLOSED, ApiError, retry_later
from longdraft.server.keys import KeyRing
from longdraft.server.logs import log_event
from longdraft.server.metrics import ServerMetrics
from longdraft.server.settings import ServerSettings

_PATHS_WITHOUT_KEY = ("/health",)
_PATHS_OF_SURPLUS = ("/health", "/ready", "/metrics")
_PATHS_WITHOUT_QUOTA = ("/cancel", "/answer", "/abort", "/generate/check")  # what ends work is always allowed
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_METHODS = (*_SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
_MAX_METHOD, _MAX_PATH = 20, 200  # characters in the log
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
                               "form-action 'none'",
}


class RequestMiddleware:
    """Checks each request and logs it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics, keys: KeyRing) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._keys = keys
        self._turnstile = Turnstile()
        names = (settings.host, *settings.allowed_hosts, *(_LOCAL_NAMES if settings.is_local else ()))
        self._hosts = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in _PATHS_OF_SURPLUS:
            await self._turnstile.enter()
        headers, start, status = Headers(scope=scope), time.monotonic(), 0
        may_be_large = _may_have_large_body(headers)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        id_headers = {"X-Request-Id": request_id}
        if scope["path"].startswith(ANTHROPIC_PATHS):
            id_headers["Request-Id"] = request_id

        async def receive_to_the_end() -> Message:
            nonlocal may_be_large
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                may_be_large = False
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                for name, value in {**_SECURITY_HEADERS, **id_headers}.items():
                    response_headers.setdefault(name, value)
                if may_be_large:  # otherwise the server would read and parse the rest of it
                    response_headers["Connection"] = "close"
            await send(message)

        try:
            try:
                self._require_access(scope, headers)
            except ApiError as refusal:
                await refusal.response_to(scope)(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive_to_the_end, send_with_headers)
        finally:
            self._record(scope, request_id, status or CLIENT_CLOSED, time.monotonic() - start)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Log and count a request. Clients must not be able to create series: unknown methods and paths share one."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = str(getattr(scope.get("route"), "path", "none"))  # the pattern, such as /v1/models/{model}
        self._metrics.count_http(method, route, status)
        label = scope.get("state", {}).get("key_label")
        is_part_of_page = route.startswith("/page/") and status < 400  # each visit of the page asks for all of them
        log_event("request", logging.DEBUG if is_part_of_page else logging.INFO, id=request_id,
                  method=scope["method"][:_MAX_METHOD], path=scope["path"][:_MAX_PATH], status=status,
                  seconds=round(seconds, 4), client=(scope.get("client") or ("",))[0],
                  **({"key": label} if label else {}))

    def _require_access(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for a request that may not use the server."""
        if scope.get("state", {}).get("is_surplus") and scope["path"] not in _PATHS_OF_SURPLUS:
            error = retry_later("too many connections are open; retry later", "too_many_connections", 503)
            error.headers = {**(error.headers or {}), "Connection": "close"}
            raise error
        if scope["path"] in _PATHS_WITHOUT_KEY:
            return
        # A browser attaches saved passwords to requests of any web page, but names the page's origin.
        origin, host = headers.get("origin"), headers.get("host", "")
        is_foreign = origin is not None and _host_of(origin)[0] != host
        if is_foreign and scope["method"] not in _SAFE_METHODS and origin not in self._settings.cors_origins:
            raise ApiError(403, "the request comes from a web page of another origin; --cors-origin allows origins",
                           code="origin_not_allowed")
        if self._keys:
            self._require_key(scope, headers)
            return
        # Without a key, a web page could reach a local server through a host name of its own (DNS rebinding).
        settings = self._settings
        if (settings.is_local or settings.allowed_hosts) and _host_of(f"//{host}")[1] not in self._hosts:
            raise ApiError(403, "the Host header does not name this server; --allowed-host allows other names",
                           code="host_not_allowed")

    def _require_key(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for a request without a valid key, or beyond the quotas of its key; else note its label."""
        label = self._keys.label_of(headers)
        if label is None:
            raise _missing_key(headers)
        scope.setdefault("state", {})["key_label"] = label
        if scope["method"] not in _SAFE_METHODS and not scope["path"].endswith(_PATHS_WITHOUT_QUOTA):
            self._keys.admit(label)


def _may_have_large_body(headers: Headers) -> bool:
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or len(length) > 20 or int(length) > SMALL_BODY


def _host_of(url: str) -> tuple[str, str]:
    """Host with port, and host alone; empty for what is not a URL."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""


def _missing_key(headers: Headers) -> ApiError:
    """401. For browsers the challenge is Basic, which opens their password dialog."""
    scheme = "Basic" if "text/html" in headers.get("accept", "") else "Bearer"
    return ApiError(401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key", headers={"WWW-Authenticate": f'{scheme} realm="longdraft"'})
