"""The URLs of other APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from longdraft.server.body_types import StrictModel
from longdraft.server.detached import DetachedText
from longdraft.server.doors import messages, ollama, responses
from longdraft.server.doors.blocks import Conversion
from longdraft.server.errors import ApiError, Cancelled
from longdraft.server.jobs import EventQueue
from longdraft.server.prepare import PreparedRequest, Preparer
from longdraft.server.replies import NewReply, ReplyBuilder
from longdraft.server.schemas import ChatRequest, CompletionRequest, body_reference, validated
from longdraft.server.service import Service, ServiceDependency

router = APIRouter()
BODIES = (messages.CountRequest, messages.MessagesRequest, responses.InputTokensRequest, responses.ResponsesRequest,
          ollama.ChatBody, ollama.GenerateBody, ollama.ShowBody)
Body = TypeVar("Body", bound=StrictModel)


def _chat(preparer: Preparer, convert: Conversion, body: StrictModel) -> ChatRequest:
    """The chat that a body of another API asks for. Raises ApiError."""
    return validated(ChatRequest, convert(body, preparer.template_variables))


def _prepare(preparer: Preparer, convert: Conversion, new_reply: Callable[[Any], NewReply], prefix: str, body: Any,
             events: EventQueue) -> PreparedRequest:
    """The texts of a request of another API. prefix: of its id"""
    prepared = preparer.chat(_chat(preparer, convert, body), events, clamps=True, prefix=prefix)
    return prepared._replace(new_reply=new_reply(body))


def _count(preparer: Preparer, convert: Conversion, about: Mapping[str, Any], body: StrictModel) -> Response:
    return JSONResponse({**about, "input_tokens": preparer.count(_chat(preparer, convert, body))})


@router.post("/v1/messages", summary="Answer a conversation, in Anthropic's format.",
             openapi_extra=body_reference(messages.MessagesRequest))
async def create_message(request: Request, service: ServiceDependency) -> Response:
    def new_reply(body: messages.MessagesRequest) -> NewReply:
        return partial(messages.MessagesReply, hides_thinking=(body.thinking or {}).get("display") == "omitted",
                       context_limit=service.preparer.context_limit)

    return await service.respond(request, messages.MessagesRequest, partial(
        _prepare, service.preparer, messages.to_chat, new_reply, "msg_"))


@router.post("/v1/messages/count_tokens", summary="The tokens of a conversation, in Anthropic's format.",
             openapi_extra=body_reference(messages.CountRequest))
async def count_message_tokens(request: Request, service: ServiceDependency) -> Response:
    return await service.admission.prepare(request, messages.CountRequest, partial(
        _count, service.preparer, messages.to_chat, {}))


@router.post("/v1/responses", summary="Answer a conversation, as OpenAI's responses.",
             openapi_extra=body_reference(responses.ResponsesRequest))
async def create_response(request: Request, service: ServiceDependency) -> Response:
    def new_reply(body: responses.ResponsesRequest) -> NewReply:
        return partial(responses.ResponsesReply, body=body)

    def prepare(body: responses.ResponsesRequest, events: EventQueue) -> PreparedRequest:
        prepared = _prepare(service.preparer, responses.to_chat, new_reply, "resp_", body, events)
        return prepared._replace(is_background=body.background and not body.stream)

    prepared = await service.prepare(request, responses.ResponsesRequest, prepare)
    if prepared.is_background:
        return JSONResponse(await _response_so_far(service, service.detach(request, prepared)))
    return await service.answer(request, prepared)


@router.post("/v1/responses/input_tokens", summary="The tokens of a conversation, as OpenAI's responses.",
             openapi_extra=body_reference(responses.InputTokensRequest))
async def count_response_tokens(request: Request, service: ServiceDependency) -> Response:
    return await service.admission.prepare(request, responses.InputTokensRequest, partial(
        _count, service.preparer, responses.to_chat, {"object": "response.input_tokens"}))


# Ollama


@router.get("/api/version", summary="The version of Ollama's API.")
async def ollama_version() -> dict[str, str]:
    return {"version": ollama.VERSION}


@router.get("/api/tags", summary="The served model, in Ollama's format.")
@router.get("/api/ps", summary="The served model, in Ollama's format.")
async def ollama_models(service: ServiceDependency) -> dict[str, Any]:
    return {"models": [ollama.model_object(service.settings.model_name, service.engine, service.started)]}


@router.post("/api/show", summary="What the model can do, in Ollama's format.",
             openapi_extra=body_reference(ollama.ShowBody))
async def ollama_show(request: Request, service: ServiceDependency) -> Response:
    def show(body: ollama.ShowBody) -> Response:
        name = body.model or body.name
        service.preparer.require_model(ollama.own_name(name) if name else None)
        preparer = service.preparer
        return JSONResponse(ollama.shown_model(service.engine, preparer.context_limit, preparer.shows_thinking))

    return await service.admission.prepare(request, ollama.ShowBody, show)


def _ollama_load(preparer: Preparer, body: ollama.Body, answer: dict[str, Any]) -> Response:
    """The answer to a request that only loads the model or unloads it, neither of which happens here."""
    preparer.require_model(ollama.own_name(body.model))
    return JSONResponse(ollama.loaded(body) | answer)


@router.post("/api/chat", summary="Answer a conversation, in Ollama's format.",
             openapi_extra=body_reference(ollama.ChatBody))
async def ollama_chat(request: Request, service: ServiceDependency) -> Response:
    def prepare(body: ollama.ChatBody, events: EventQueue) -> PreparedRequest | Response:
        if not body.messages:
            return _ollama_load(service.preparer, body, ollama.EMPTY_MESSAGE)
        return _prepare(service.preparer, ollama.chat_of, lambda _: ollama.OllamaReply, "ollama-", body, events)

    return await service.respond(request, ollama.ChatBody, prepare)


@router.post("/api/generate", summary="Answer or continue a prompt, in Ollama's format.",
             openapi_extra=body_reference(ollama.GenerateBody))
async def ollama_generate(request: Request, service: ServiceDependency) -> Response:
    new_reply: NewReply = partial(ollama.OllamaReply, is_chat=False)

    def prepare(body: ollama.GenerateBody, events: EventQueue) -> PreparedRequest | Response:
        preparer = service.preparer
        if not body.prompt:
            return _ollama_load(preparer, body, ollama.EMPTY_RESPONSE)
        if body.raw or not preparer.engine.tokenizer.chat_template:
            completion = validated(CompletionRequest, ollama.completion_of(body))
            prepared = preparer.completion(completion, events, clamps=True, prefix="ollama-")
            return prepared._replace(new_reply=new_reply)
        return _prepare(preparer, ollama.generate_chat_of, lambda _: new_reply, "ollama-", body, events)

    return await service.respond(request, ollama.GenerateBody, prepare)


_DOORS: dict[str, NewReply] = {"chat": ReplyBuilder, "messages": messages.MessagesReply}


@router.get("/v1/longdraft/generations/{name:path}/events",
            summary="Read on a detached text: what comes behind `from` tokens, or behind Last-Event-ID.")
async def read_on(name: str, request: Request, service: ServiceDependency) -> Response:
    given = request.headers.get("last-event-id", "").rpartition(":")[2] or request.query_params.get("from", "0")
    num_seen = _number(given, "from")
    door = request.query_params.get("door")
    if door is not None and door not in _DOORS:
        raise ApiError(400, f"door is {door[:80]!r}; allowed: {', '.join(_DOORS)}, or none for the request's own",
                       param="door", code="invalid_value")
    return service.read_on(_detached(request, service, name), num_seen, _DOORS[door] if door else None)


@router.get("/v1/responses/{name:path}",
            summary="A detached response, as far as it is written. With stream=true its events, behind "
                    "starting_after=N.")
async def read_response(name: str, request: Request, service: ServiceDependency) -> Response:
    text, query = _detached(request, service, name), request.query_params
    so_far = await _response_so_far(service, text)
    if query.get("stream", "false").lower() != "true":
        return JSONResponse(so_far)
    num_pieces = _number(query["starting_after"], "starting_after") + 1 if "starting_after" in query else 0
    return service.read_on(text, 0, num_pieces=num_pieces)


@router.post("/v1/responses/{name:path}/cancel", summary="Cancel a detached response.")
async def cancel_response(name: str, request: Request, service: ServiceDependency) -> Response:
    text = _detached(request, service, name)
    service.scheduler.cancel(text.job, Cancelled(keeps_journal=True))
    is_response = isinstance(text.make_reply(None), responses.ResponsesReply)
    content = await _response_so_far(service, text) if is_response else {"id": text.job.id, "object": "response"}
    return JSONResponse(content if text.is_ended and is_response else content | {"status": "cancelled"})


async def _response_so_far(service: Service, text: DetachedText) -> dict[str, Any]:
    """A detached text as a response. Raises ApiError (404) for a text of another API."""
    reply = await text.so_far()
    if not isinstance(reply, responses.ResponsesReply):
        raise _no_text(text.job.id)
    return reply.so_far(service.api_error(text.error) if text.error else None)


def _number(given: str, name: str) -> int:
    """A number of a query. Raises ApiError for anything else."""
    if not given.isdigit() or len(given) > 12:
        raise ApiError(400, f"{name} is {given[:80]!r}; allowed: a whole number", param=name, code="invalid_value")
    return int(given)


def _detached(request: Request, service: Service, name: str) -> DetachedText:
    """A text by its id or conversation. Raises ApiError (404) if there is none for the key of the request."""
    text = service.detached.find(name, getattr(request.state, "key_label", None))
    if text is None:
        raise _no_text(name)
    return text


def _no_text(name: str) -> ApiError:
    return ApiError(404, f"no detached text {name[:100]!r} exists; it may be too long ago", param="name",
                    code="not_found")
