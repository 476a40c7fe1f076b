"""API keys: which key a request has, the label that names it in logs and metrics, and its quotas.

    ring = KeyRing(settings, metrics)
    label = ring.label_of(headers)              # None: no key, or an unknown one
    ring.admit(label)                           # ApiError (429) beyond a quota
    ring.charge(label, 200)                     # tokens

A quota is a token bucket: it holds the amount of one period at most and refills evenly. A text is charged while it is
written and never stopped by a quota, so a key may exceed its tokens by the texts that it has running. The next request
then waits until the bucket has refilled.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable

from starlette.datastructures import Headers

from longdraft.server.errors import ApiError
from longdraft.server.metrics import ServerMetrics
from longdraft.server.settings import ServerSettings

_MINUTE_S, _HOUR_S = 60.0, 3600.0


class Bucket:
    """At most `amount` within `period_s`, refilled evenly. `clock` gives monotonic seconds."""

    def __init__(self, amount: float, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._amount = amount
        self._rate = amount / period_s
        self._clock = clock
        self._left = amount
        self._at = clock()

    def wait_s(self) -> float:
        """Seconds until at least 1 is left; 0 if it is now."""
        now = self._clock()
        self._left = min(self._amount, self._left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (1.0 - self._left) / self._rate)

    def take(self, amount: float) -> None:
        """Take this much, also beyond what is left."""
        self._left -= amount


class KeyRing:
    """The keys of one server. Its methods may be called from any thread."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._labels = {hashlib.sha256(key.encode()).digest(): label
                        for key, label in zip(settings.api_keys, settings.labels, strict=True)}
        labels = set(self._labels.values())
        self._requests = {label: Bucket(settings.key_requests, _MINUTE_S) for label in labels if settings.key_requests}
        self._tokens = {label: Bucket(settings.key_tokens, _HOUR_S) for label in labels if settings.key_tokens}
        self._metrics = metrics
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether a key is required."""
        return bool(self._labels)

    def label_of(self, headers: Headers) -> str | None:
        """The label of a request's key: a Bearer token or `x-api-key` (API clients), or the Basic
        password (browsers).

        Compares with every key in constant time.
        """
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        scheme, _, value = given.partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
            except (binascii.Error, ValueError):
                return None
        elif scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(value.strip().encode()).digest()
        matching = [label for key, label in self._labels.items() if hmac.compare_digest(digest, key)]
        return matching[0] if matching else None

    def admit(self, label: str) -> None:
        """Count a request of this key. Raises ApiError (429, with Retry-After) beyond a quota."""
        with self._lock:
            for buckets, what in ((self._requests, "requests per minute"), (self._tokens, "tokens per hour")):
                if label in buckets and (wait_s := buckets[label].wait_s()) > 0:
                    self._metrics.count_failure("quota")
                    seconds = max(1, math.ceil(wait_s))
                    raise ApiError(429, f"the {what} of this key are used up; retry in {seconds} s",
                                   code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
            if label in self._requests:
                self._requests[label].take(1.0)
        self._metrics.count_key(label, requests=1)

    def charge(self, label: str | None, tokens: int) -> None:
        """Count tokens of this key, if there is one: those of a prompt that is read, or of a text that is written."""
        if label is None:
            return
        with self._lock:
            if label in self._tokens:
                self._tokens[label].take(tokens)
        self._metrics.count_key(label, tokens=tokens)
