"""What the routes stand on: one engine, one scheduler, and the way from plans to an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from longdraft.engine import Engine
from longdraft.server import errors, prepare, sse
from longdraft.server.jobs import EventQueue, Job, Plan
from longdraft.server.metrics import Metrics
from longdraft.server.prepare import Preparer
from longdraft.server.replies import Kind, Reply, split
from longdraft.server.scheduler import Scheduler
from longdraft.server.settings import Settings

_READERS = 2  # threads that read prompts: more would crowd the event loop out
_TOGETHER_S = 0.01  # steps of a text that come faster than this share a chunk
_LOOK_S = 0.25  # how often it is asked whether a client that waits for the whole is still there
P = ParamSpec("P")
T = TypeVar("T")
CLOSED = 499  # nginx's status for a client that has gone; nobody reads it


@dataclass(frozen=True)
class ResponseOptions:
    """How a request wants its answer."""

    kind: Kind
    name: str
    prompt_tokens: int
    is_stream: bool
    with_usage: bool = False
    echo: list[str] | None = None
    logprobs: bool = False
    details: bool = False
    user: str | None = None
    timeout_s: float | None = None


class Service:
    """One server's parts."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(settings.model_name)
        self.scheduler = Scheduler(engine, settings, self.metrics)
        self.preparer = Preparer(engine, settings)
        self.began = time.time()
        self._readers = ThreadPoolExecutor(_READERS, "reader")

    async def run_in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what takes a while outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(work, *args, **kwargs))

    async def answer(self, request: Request, plans: list[Plan], manner: ResponseOptions) -> Response:
        """Have the texts written and send them, as a stream or whole."""
        outlet = EventQueue(asyncio.get_running_loop())
        jobs = prepare.jobs(plans, manner.name, outlet, manner.user, (manner.timeout_s, self.settings.timeout_s))
        reply = Reply(manner.kind, manner.name, self.settings.model_name, self.engine.tokenizer, jobs,
                      prompt_tokens=manner.prompt_tokens, echo=manner.echo, logprobs=manner.logprobs,
                      details=manner.details)
        self.scheduler.submit(jobs)
        if manner.is_stream:
            return sse.EventStream(self._stream(jobs, outlet, reply, manner), self.settings.stall_s,
                                   lambda: self._leave(jobs), {"X-Generation-Id": jobs[0].id})
        try:
            return await self._whole(request, jobs, outlet, reply)
        finally:
            self._leave(jobs)

    def _leave(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.scheduler.cancel(job)

    async def _whole(self, request: Request, jobs: list[Job], outlet: EventQueue, reply: Reply) -> Response:
        pending = set(jobs)
        while pending:
            events, ends = split(await outlet.take(_LOOK_S))
            for job, told in events.items():
                for event in told:
                    reply.add(job, event)
            for job, end in ends.items():
                pending.discard(job)
                if end.error is not None:
                    raise errors.of(end.error)
            if pending and await request.is_disconnected():
                return Response(status_code=CLOSED)
        return JSONResponse(reply.whole())

    async def _stream(self, jobs: list[Job], outlet: EventQueue, reply: Reply, manner: ResponseOptions) -> AsyncIterator[bytes]:
        for chunk in reply.openings():
            yield sse.data(chunk)
        pending, told_at = set(jobs), time.monotonic()
        yield self._progress(jobs[0])
        while pending:
            rest = told_at + self.settings.progress_s - time.monotonic()
            events, ends = split(await outlet.take(max(0.0, rest)))
            for job, new in events.items():
                yield sse.data(reply.chunk(job, new))
            for job, end in ends.items():
                pending.discard(job)
                if end.error is not None:
                    yield sse.data(errors.of(end.error).body)
                    yield sse.DONE
                    return
            if time.monotonic() - told_at >= self.settings.progress_s:
                told_at = time.monotonic()
                for job in pending:
                    yield self._progress(job)
            if pending:
                await asyncio.sleep(_TOGETHER_S)
        if manner.with_usage:
            yield sse.data(reply.usage_chunk())
        yield sse.DONE

    def _progress(self, job: Job) -> bytes:
        about = {"id": job.id, **job.progress()}
        return sse.comment(about | ({"position": self.scheduler.position(job)} if job.state == "queued" else {}))
