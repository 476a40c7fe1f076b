"""/v1/longdraft/generations: texts that wait, run or have ended, and journals that can be gone on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from longdraft.journal import is_being_written, is_there
from longdraft.server.errors import ApiError, Cancelled
from longdraft.server.jobs import Job
from longdraft.server.journals import Journals
from longdraft.server.schemas import ID, ResumeRequest
from longdraft.server.service import ResponseOptions, Service

_ROUTE = "/v1/longdraft/generations"
Name = Annotated[str, Path(pattern=ID)]


def routes(service: Service, journals: Journals | None) -> APIRouter:
    router = APIRouter()
    scheduler = service.scheduler

    @router.get(_ROUTE, summary="Every text that is known, the latest first.")
    async def generations() -> dict[str, Any]:
        latest = {job.resume_id or job.id: job for job in reversed(scheduler.jobs())}
        live = [_about(job) for job in latest.values()]
        kept = await service.run_in_thread(journals.list) if journals else []
        running = {each["id"] for each in live if each["state"] in ("queued", "prefill", "running")}
        on_disk = {each["id"] for each in kept}
        found = [each for each in live if each["id"] in running or each["id"] not in on_disk]
        found += [each for each in kept if each["id"] not in running]
        return {"object": "list", "data": sorted(found, key=lambda each: each.get("created") or 0.0, reverse=True)}

    @router.get(_ROUTE + "/{name}", summary="One text: settings, progress, and what its journal holds.")
    async def generation(name: Name) -> dict[str, Any]:
        job = _live(service, name)
        on_disk = journals is not None and is_there(journals.root / name)
        if job is None and not on_disk:
            raise _unknown(name)
        kept = await service.run_in_thread(journals.detail, name) if journals and on_disk else {}
        return kept | (_about(job) | {"sampling": dataclasses.asdict(job.plan.params), "stats": job.stats}
                       if job else {})

    @router.post(_ROUTE + "/{name}/cancel", summary="End a text. What is in its journal stays.")
    async def cancel(name: Name) -> dict[str, Any]:
        job = _live(service, name)
        if job is None:
            raise _unknown(name)
        scheduler.cancel(job, Cancelled(keeps=True))
        return _about(job)

    @router.delete(_ROUTE + "/{name}", summary="Remove a journal that nobody writes.")
    async def remove(name: Name) -> dict[str, Any]:
        folder = _folder(journals, name)
        if is_being_written(folder):
            raise ApiError(409, f"{name!r} is being written; cancel it first", code="running")
        assert journals is not None
        await service.run_in_thread(journals.remove, name)
        return {"id": name, "deleted": True}

    @router.post(_ROUTE + "/{name}/resume", summary="Go on with a text that was cut. The answer is a completion, from "
                                                    "its first word.")
    async def resume(name: Name, body: ResumeRequest, request: Request) -> Response:
        folder = _folder(journals, name)
        if is_being_written(folder):
            raise ApiError(409, f"{name!r} is being written; wait for it, or cancel it first", code="running")
        plan = await service.run_in_thread(service.preparer.resumed, folder, body)
        options = body.stream_options
        manner = ResponseOptions("text_completion", name, plan.prompt_tokens, body.stream,
                        with_usage=options is not None and options.include_usage, details=body.details,
                        timeout_s=body.timeout)
        return await service.answer(request, [plan], manner)

    return router


def _live(service: Service, name: str) -> Job | None:
    """The latest text of this id, if this process had one."""
    return next((job for job in service.scheduler.jobs() if job.id == name or job.resume_id == name), None)


def _about(job: Job) -> dict[str, Any]:
    return {"id": job.resume_id or job.id, **job.progress(), "title": job.plan.title, "created": job.began_at,
            "seed": job.plan.params.seed, "finish_reason": (job.stats or {}).get("finish_reason"),
            "journal": job.resume_id, "resumable": False, "user": job.user}


def _folder(journals: Journals | None, name: str) -> FilePath:
    if journals is None or not is_there(journals.root / name):
        raise _unknown(name)
    return journals.root / name


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"no generation {name!r} is known here", param="name", code="not_found")
