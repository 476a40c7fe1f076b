"""All routes of the API: texts, models and tokens as in OpenAI's and vLLM's APIs, generations, and status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import fastapi
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from longdraft import drafters
from longdraft.journal.format import journal_exists
from longdraft.journal.writer import is_being_written
from longdraft.server.body_types import StrictModel
from longdraft.server.errors import ApiError, Cancelled
from longdraft.server.jobs import GenerationJob
from longdraft.server.schemas import (
    ID_PATTERN,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ExportRequest,
    ResumeRequest,
    TokenizeRequest,
    body_reference,
)
from longdraft.server.service import Service, ServiceDependency
from longdraft.version import __version__

router = APIRouter()
GenerationId = Annotated[str, fastapi.Path(pattern=ID_PATTERN)]
_GENERATIONS = "/v1/longdraft/generations"

# Texts, models, tokens


@router.post("/v1/completions", summary="Continue a prompt.", openapi_extra=body_reference(CompletionRequest))
async def completions(request: Request, service: ServiceDependency) -> Response:
    return await service.respond(request, CompletionRequest, service.preparer.completion)


@router.post("/v1/chat/completions", summary="Answer a conversation, with the model's chat template.",
             openapi_extra=body_reference(ChatRequest))
async def chat(request: Request, service: ServiceDependency) -> Response:
    return await service.respond(request, ChatRequest, service.preparer.chat)


@router.get("/v1/models", summary="List the served model.")
async def models(service: ServiceDependency) -> dict[str, Any]:
    name = service.settings.model_name
    return {"object": "list", "data": [_model_object(service)], "has_more": False, "first_id": name, "last_id": name}


@router.get("/v1/models/{model:path}", summary="Describe the served model.")
async def model(model: str, service: ServiceDependency) -> dict[str, Any]:
    service.preparer.require_model(model)
    return _model_object(service)


@router.post("/tokenize", summary="Token ids of a text or a conversation.",
             openapi_extra=body_reference(TokenizeRequest))
async def tokenize(request: Request, service: ServiceDependency) -> Response:
    return await service.admission.prepare(request, TokenizeRequest, partial(_as_json, service.preparer.tokenize))


@router.post("/detokenize", summary="The text of token ids.", openapi_extra=body_reference(DetokenizeRequest))
async def detokenize(request: Request, service: ServiceDependency) -> Response:
    return await service.admission.prepare(request, DetokenizeRequest, partial(_as_json, service.preparer.detokenize))


@router.get("/tokenizer_info", summary="Special tokens and chat template, as in vLLM.")
async def tokenizer_info(service: ServiceDependency) -> dict[str, str]:
    tokenizer = service.engine.tokenizer
    template = {"chat_template": tokenizer.chat_template.source} if tokenizer.chat_template else {}
    return tokenizer.special_tokens | template


@router.post("/v1/longdraft/export", summary="A text as an EPUB or Markdown file.", response_class=Response,
             openapi_extra=body_reference(ExportRequest))
async def export_text(request: Request, service: ServiceDependency) -> Response:
    return await service.export(request)


def _as_json(work: Callable[[Any], dict[str, Any]], body: StrictModel) -> Response:
    """The response, encoded here: this runs in a thread."""
    return JSONResponse(work(body))


def _model_object(service: Service) -> dict[str, Any]:
    """The model as OpenAI's and vLLM's lists have it, and as Anthropic's have it."""
    name, started, limit = service.settings.model_name, int(service.started), service.preparer.context_limit
    return {"id": name, "object": "model", "created": started, "owned_by": "longdraft", "root": service.engine.name,
            "parent": None, "max_model_len": limit,
            "type": "model", "display_name": name, "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
            "lifecycle": "active", "max_input_tokens": limit, "max_tokens": limit}


# Generations: texts that are queued, running or ended, and journals


@router.get(_GENERATIONS, summary="List texts and journals, newest first.")
async def generations(request: Request, service: ServiceDependency) -> dict[str, Any]:
    journals = service.journals
    latest = {job.resume_id or job.id: job for job in reversed(service.scheduler.jobs())}
    jobs = [_generation_object(job) for job in latest.values()]
    active = {job["id"] for job in jobs if job["state"] in ("queued", "prefill", "running")}
    on_disk = await service.files.run(request, partial(journals.list, active)) if journals else []
    with_journal = {summary["id"] for summary in on_disk}
    listed = [job for job in jobs if job["id"] in active or job["id"] not in with_journal] + on_disk
    return {"object": "list", "data": sorted(listed, key=lambda each: each.get("created") or 0.0, reverse=True)}


@router.get(_GENERATIONS + "/{name}", summary="One text: settings, progress, and the content of its journal.")
async def generation(name: GenerationId, request: Request, service: ServiceDependency) -> dict[str, Any]:
    job, journals = _find_job(service, name), service.journals
    on_disk = journals is not None and journal_exists(journals.root / name)
    if job is None and not on_disk:
        raise _not_found(name)
    detail = await service.files.run(request, partial(journals.detail, name)) if journals and on_disk else {}
    if job is not None:
        detail |= _generation_object(job) | {"sampling": dataclasses.asdict(job.params), "stats": job.stats}
    return detail


@router.post(_GENERATIONS + "/{name:path}/cancel", summary="Cancel a text. Its journal remains.")
async def cancel(name: str, request: Request, service: ServiceDependency) -> dict[str, Any]:
    detached = service.detached.find(name, getattr(request.state, "key_label", None))  # by its conversation, too
    job = detached.job if detached else _find_job(service, name)
    if job is None:
        raise _not_found(name)
    service.scheduler.cancel(job, Cancelled(keeps_journal=True))
    return _generation_object(job)


@router.post(_GENERATIONS + "/{name}/answer", summary="End the thought of a running text: its answer begins.")
async def answer(name: GenerationId, service: ServiceDependency) -> dict[str, Any]:
    job = _find_job(service, name)
    if job is None:
        raise _not_found(name)
    generation, thinking = job.generation, job.thinking()
    if generation is None or not thinking or not generation.is_thinking:
        raise ApiError(409, f"{name!r} is not in a thought now; only a running text that thinks can be asked to answer",
                       code="not_thinking")
    generation.answer_now()
    return _generation_object(job)


@router.delete(_GENERATIONS + "/{name}", summary="Remove the journal of a text that is not being written.")
async def remove(name: GenerationId, request: Request, service: ServiceDependency) -> dict[str, Any]:
    folder = _journal_of(service, name)
    if is_being_written(folder):
        raise ApiError(409, f"{name!r} is being written; cancel it first", code="running")
    assert service.journals is not None
    await service.files.run(request, partial(service.journals.remove, name))
    return {"id": name, "deleted": True}


@router.post(_GENERATIONS + "/{name}/resume", openapi_extra=body_reference(ResumeRequest),
             summary="Continue an unfinished text. The reply is a completion with the whole text.")
async def resume(name: GenerationId, request: Request, service: ServiceDependency) -> Response:
    folder = _journal_of(service, name)
    if is_being_written(folder):
        raise ApiError(409, f"{name!r} is being written; wait for its end, or cancel it first", code="running")
    return await service.respond(request, ResumeRequest, partial(service.preparer.resume, folder))


def _find_job(service: Service, name: str) -> GenerationJob | None:
    """The latest job with this id, if this process had one."""
    return next((job for job in service.scheduler.jobs() if name in (job.id, job.resume_id)), None)


def _generation_object(job: GenerationJob) -> dict[str, Any]:
    return {"id": job.resume_id or job.id, **job.progress(), "title": job.title, "created": job.created,
            "seed": job.params.seed, "finish_reason": job.finish_reason, "journal": job.resume_id, "resumable": False,
            "user": job.user}


def _journal_of(service: Service, name: str) -> Path:
    if service.journals is None or not journal_exists(service.journals.root / name):
        raise _not_found(name)
    return service.journals.root / name


def _not_found(name: str) -> ApiError:
    return ApiError(404, f"no generation {name!r} exists; GET {_GENERATIONS} lists them", param="name",
                    code="not_found")


# Status


@router.get("/health", summary="Whether the server works. Needs no key.")
async def health(service: ServiceDependency) -> JSONResponse:
    is_alive = service.scheduler.is_alive
    return JSONResponse({"status": "ok" if is_alive else "the engine has ended"}, 200 if is_alive else 503)


@router.get("/ready", summary="Whether the server accepts new texts.")
async def ready(service: ServiceDependency) -> JSONResponse:
    load = service.scheduler.load()
    is_ready = load["problem"] is None
    return JSONResponse({"ready": is_ready, **load}, 200 if is_ready else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics", summary="Metrics for Prometheus.", response_class=PlainTextResponse)
async def metrics(service: ServiceDependency) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/longdraft/status", summary="Model, drafters, limits and load.")
async def status(service: ServiceDependency) -> dict[str, Any]:
    engine = service.engine
    model = engine.model
    available = [name for name, spec in drafters.DRAFTERS.items()
                 if name == engine.drafter or not spec.needs or getattr(engine, spec.needs) is not None]
    return {
        **service.scheduler.load(),
        "model": service.settings.model_name,
        "max_model_len": service.preparer.context_limit,
        "drafter": engine.drafter,
        "drafters": available,
        "defaults": dict(engine.defaults.settings),
        "has_chat_template": engine.tokenizer.chat_template is not None,
        "is_tuned_for_chat": engine.is_tuned_for_chat,
        "journals": service.settings.journals is not None,
        "kernels": model.kernels.name, "device": str(model.kernels.device),
        "exactness": "bit-exact" if model.kernels.is_row_invariant else "distribution",
        "quantize": model.weights.quantize,
        "started": service.started,
        "version": __version__,
    }
