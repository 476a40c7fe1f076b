"""The URLs of APIs that continue a prompt, llama.cpp's and KoboldCpp's; and what this server does not do."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from longdraft.server.doors import kobold, llama_cpp
from longdraft.server.errors import ApiError, Cancelled
from longdraft.server.jobs import EventQueue, GenerationJob
from longdraft.server.prepare import PreparedRequest
from longdraft.server.replies import NewReply
from longdraft.server.schemas import ChatRequest, CompletionRequest, body_reference, validated
from longdraft.server.service import Service, ServiceDependency

router = APIRouter()
BODIES = (llama_cpp.CompletionBody, kobold.GenerateBody, kobold.KeyBody, kobold.CountBody)


def _prepare(service: Service, body: dict[str, Any], new_reply: NewReply, prefix: str, events: EventQueue
             ) -> PreparedRequest:
    """The text of a request of another API, whose body was converted. prefix: of its id"""
    completion = validated(CompletionRequest, body)
    prepared = service.preparer.completion(completion, events, clamps=True, prefix=prefix)
    return prepared._replace(new_reply=new_reply)


# llama.cpp


@router.post("/completion", summary="Continue a prompt, in llama.cpp's format.",
             openapi_extra=body_reference(llama_cpp.CompletionBody))
@router.post("/completions", summary="Continue a prompt, in llama.cpp's format.",
             openapi_extra=body_reference(llama_cpp.CompletionBody))
async def llama_completion(request: Request, service: ServiceDependency) -> Response:
    def prepare(body: llama_cpp.CompletionBody, events: EventQueue) -> PreparedRequest:
        return _prepare(service, llama_cpp.completion_of(body), partial(llama_cpp.CompletionReply, body=body), "cmpl-",
                        events)

    return await service.respond(request, llama_cpp.CompletionBody, prepare)


@router.get("/props", summary="The model, as llama.cpp describes it.")
async def llama_properties(service: ServiceDependency) -> dict[str, Any]:
    settings = service.settings
    return llama_cpp.properties(service.engine, settings.model_name, service.preparer.context_limit,
                                settings.max_running)


@router.get("/slots", summary="The places of running texts, as llama.cpp lists them.")
async def llama_slots(service: ServiceDependency) -> list[dict[str, Any]]:
    running = [job for job in reversed(service.scheduler.jobs()) if job.started is not None and job.ended is None]
    return llama_cpp.slots(running, service.preparer.context_limit, service.settings.max_running)


@router.post("/apply-template", summary="The prompt of a conversation, as the chat template writes it.",
             openapi_extra=body_reference(ChatRequest))
async def apply_template(request: Request, service: ServiceDependency) -> Response:
    return await service.admission.prepare(request, ChatRequest, lambda body: JSONResponse(
        {"prompt": service.preparer.rendered(body)}))


# KoboldCpp


@router.post("/api/v1/generate", summary="Continue a prompt, in KoboldCpp's format.",
             openapi_extra=body_reference(kobold.GenerateBody))
async def kobold_generate(request: Request, service: ServiceDependency) -> Response:
    return await _kobold(request, service, is_stream=False)


@router.post("/api/extra/generate/stream", summary="Continue a prompt, as events of KoboldCpp.",
             openapi_extra=body_reference(kobold.GenerateBody))
async def kobold_stream(request: Request, service: ServiceDependency) -> Response:
    return await _kobold(request, service, is_stream=True)


async def _kobold(request: Request, service: Service, *, is_stream: bool) -> Response:
    def prepare(body: kobold.GenerateBody, events: EventQueue) -> PreparedRequest:
        return _prepare(service, kobold.completion_of(body, is_stream=is_stream), kobold.KoboldReply, kobold.PREFIX,
                        events)

    return await service.respond(request, kobold.GenerateBody, prepare)


@router.get("/api/extra/generate/check", summary="The latest running text of KoboldCpp's API, so far.")
async def kobold_check_latest(request: Request, service: ServiceDependency) -> dict[str, Any]:
    return await asyncio.to_thread(_so_far, service, _kobold_job(request, service, None))


@router.post("/api/extra/generate/check", summary="A running text of KoboldCpp's API, so far.",
             openapi_extra=body_reference(kobold.KeyBody))
async def kobold_check(request: Request, service: ServiceDependency) -> dict[str, Any]:
    body = await service.admission.prepare(request, kobold.KeyBody, lambda body: body)
    return await asyncio.to_thread(_so_far, service, _kobold_job(request, service, body.genkey))


@router.post("/api/extra/abort", summary="End a running text of KoboldCpp's API.",
             openapi_extra=body_reference(kobold.KeyBody))
async def kobold_abort(request: Request, service: ServiceDependency) -> dict[str, str]:
    body = await service.admission.prepare(request, kobold.KeyBody, lambda body: body)
    job = _kobold_job(request, service, body.genkey)
    if job is not None:
        service.scheduler.cancel(job, Cancelled(keeps_journal=True))
    return {"success": "false" if job is None else "true"}


def _kobold_job(request: Request, service: Service, name: str | None) -> GenerationJob | None:
    """The latest running text of the request's API key with this `genkey`; None: any."""
    label = getattr(request.state, "key_label", None)
    return next((job for job in service.scheduler.jobs() if job.ended is None and job.id.startswith(kobold.PREFIX)
                 and job.events.key_label == label and name in (None, job.user)), None)


def _so_far(service: Service, job: GenerationJob | None) -> dict[str, Any]:
    """The text of a job, which may take a while to decode."""
    generation = job.generation if job else None
    text = service.engine.tokenizer.decode(generation.tokens.tolist()) if generation else ""
    return {"results": [{"text": text}]}


@router.post("/api/extra/tokencount", summary="The tokens of a text, in KoboldCpp's format.",
             openapi_extra=body_reference(kobold.CountBody))
async def kobold_count(request: Request, service: ServiceDependency) -> Response:
    def count(body: kobold.CountBody) -> Response:
        ids = service.preparer.encode_text(body.prompt, "prompt", body.special)
        return JSONResponse({"value": len(ids), "ids": ids})

    return await service.admission.prepare(request, kobold.CountBody, count)


@router.get("/api/v1/model", summary="The model's name, in KoboldCpp's format.")
async def kobold_model(service: ServiceDependency) -> dict[str, str]:
    return {"result": f"longdraft/{service.settings.model_name}"}


@router.get("/api/v1/info/version", summary="The version of KoboldAI's API.")
async def kobold_api_version() -> dict[str, str]:
    return {"result": kobold.API_VERSION}


@router.get("/api/extra/version", summary="The version of KoboldCpp's API.")
async def kobold_version(service: ServiceDependency) -> dict[str, Any]:
    return {"result": "KoboldCpp", "version": kobold.KOBOLD_VERSION, "protected": bool(service.keys),
            "txt2img": False, "vision": False, "audio": False, "transcribe": False, "multiplayer": False,
            "websearch": False, "tts": False, "embeddings": False, "admin": 0}


@router.get("/api/v1/config/max_context_length", summary="Tokens of a prompt and its text together.")
@router.get("/api/extra/true_max_context_length", summary="Tokens of a prompt and its text together.")
async def kobold_context(service: ServiceDependency) -> dict[str, int]:
    return {"value": service.preparer.context_limit}


# What this server does not do


async def _not_supported() -> Response:
    raise ApiError(501, "this server writes texts; for embeddings and rankings use another one", code="not_supported")


for _path in ("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings", "/v1/rerank", "/rerank",
              "/v1/reranking", "/reranking"):
    router.add_api_route(_path, _not_supported, methods=["POST"], summary="Not supported: status 501.")
