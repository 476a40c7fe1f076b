"""Server-sent events: `data:` lines for programs, comments that keep proxies awake and tell the progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def data(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def comment(content: dict[str, Any]) -> bytes:
    """Clients pass over it."""
    return b": progress " + json.dumps(content).encode() + b"\n\n"


class EventStream(Response):
    """Sends what an iterator gives, until the client has gone or takes nothing for `stall_s` seconds.

    on_leave  called when the stream is over, however that came
    """

    def __init__(self, pieces: AsyncIterator[bytes], stall_s: float, on_leave: Callable[[], None],
                 headers: dict[str, str]) -> None:
        super().__init__(None, 200, _HEADERS | headers, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._pieces, self._stall_s, self._on_leave = pieces, stall_s, on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._on_leave()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except TimeoutError:  # a client that does not read
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
