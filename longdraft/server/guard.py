"""What every request passes: a key, a host that is meant, a body of decent size that comes in time; and its line in
the log. Plain ASGI, so that streams flow through untouched."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longdraft.server.errors import ApiError
from longdraft.server.logs import record
from longdraft.server.metrics import Metrics
from longdraft.server.settings import Settings

OPEN = ("/health",)
_LOCAL = ("localhost", "127.0.0.1", "::1")
_READING = ("GET", "HEAD", "OPTIONS")
_METHODS = (*_READING, "POST", "PUT", "PATCH", "DELETE")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
                               "form-action 'none'",
}


class RequestMiddleware:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics,
                 route_of: Callable[[Scope], str]) -> None:
        self._app, self._settings, self._metrics, self._route_of = app, settings, metrics, route_of
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start, status = Headers(scope=scope), time.monotonic(), 0
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                for name, value in {**_HEADERS, "X-Request-Id": request_id}.items():
                    sent.setdefault(name, value)
            await send(message)

        try:
            if (refusal := self._refusal(scope, headers)) is not None:
                await refusal.response(scope, receive, answer)
            else:
                await self._app(scope, Body(receive, headers, self._settings), answer)
        except ApiError as error:  # of a body that nobody had begun to answer
            if not status:
                await error.response(scope, receive, answer)
        finally:
            route = self._route_of(scope)
            method = scope["method"] if scope["method"] in _METHODS else "other"  # clients may write anything there
            self._metrics.answered(method, route, status or 499)
            record("request", id=request_id, method=scope["method"], path=scope["path"][:200], status=status or 499,
                   seconds=round(time.monotonic() - start, 4), client=(scope.get("client") or ("",))[0])

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Why this request goes no further."""
        if scope["path"] in OPEN:
            return None
        # A browser adds the password it knows to whatever a web page asks for, but says which page that is.
        origin, host = headers.get("origin"), headers.get("host", "")
        is_foreign = origin is not None and _netloc(origin)[0] != host
        if is_foreign and scope["method"] not in _READING and origin not in self._settings.cors_origins:
            return ApiError(403, "web pages of other places may not do this; --cors-origin names those that may",
                            code="origin_not_allowed")
        if self._keys:
            return None if self._has_key(headers) else _no_key(headers)
        # Without a key a web page could call a server on this machine, by a name of its own that leads here.
        if self._settings.is_local:
            name = _netloc(f"//{host}")[1]
            if name not in (*_LOCAL, self._settings.host, *self._settings.allowed_hosts):
                return ApiError(403, "this server is meant for its own machine; --allowed-host names others",
                                code="host_not_allowed")
        return None

    def _has_key(self, headers: Headers) -> bool:
        """Bearer, as API clients send it, or the password of Basic, as browsers do. All keys are compared, in
        constant time."""
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(value.strip().encode()).digest()
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0


def _netloc(url: str) -> tuple[str, str]:
    """Host with port, and host alone; neither of what is no URL."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""


def _no_key(headers: Headers) -> ApiError:
    """A browser is told how to ask its user."""
    scheme = "Basic" if "text/html" in headers.get("accept", "") else "Bearer"
    return ApiError(401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key", headers={"WWW-Authenticate": f'{scheme} realm="longdraft"'})


class Body:
    """A `receive` that counts what comes, and waits for the rest of a body only so long."""

    def __init__(self, receive: Receive, headers: Headers, settings: Settings) -> None:
        self._receive, self._settings = receive, settings
        self._declared = headers.get("content-length", "0")
        self._size = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:  # now only a disconnect can come
            return await self._receive()
        if self._declared.isdigit() and int(self._declared[:20]) > self._settings.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._settings.stall_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the rest of the body did not come", code="body_timeout",
                           headers={"Connection": "close"}) from None
        self._size += len(message.get("body", b""))
        if self._size > self._settings.max_body_bytes:
            raise self._too_large()
        self._is_whole = message["type"] == "http.request" and not message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._settings.max_body_bytes:,} bytes, which is the limit",
                        code="request_too_large", headers={"Connection": "close"})
