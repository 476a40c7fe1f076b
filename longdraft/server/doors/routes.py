"""The URLs of other APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from longdraft.server.body_types import StrictModel
from longdraft.server.doors import messages, responses
from longdraft.server.doors.blocks import Conversion
from longdraft.server.jobs import EventQueue
from longdraft.server.prepare import PreparedRequest, Preparer
from longdraft.server.replies import NewReply
from longdraft.server.schemas import ChatRequest, body_reference, validated
from longdraft.server.service import ServiceDependency

router = APIRouter()
BODIES = (messages.CountRequest, messages.MessagesRequest, responses.InputTokensRequest, responses.ResponsesRequest)
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


@router.post("/v1/responses", summary="Answer a conversation, as OpenAI's responses. Nothing is stored.",
             openapi_extra=body_reference(responses.ResponsesRequest))
async def create_response(request: Request, service: ServiceDependency) -> Response:
    def new_reply(body: responses.ResponsesRequest) -> NewReply:
        return partial(responses.ResponsesReply, body=body)

    return await service.respond(request, responses.ResponsesRequest, partial(
        _prepare, service.preparer, responses.to_chat, new_reply, "resp_"))


@router.post("/v1/responses/input_tokens", summary="The tokens of a conversation, as OpenAI's responses.",
             openapi_extra=body_reference(responses.InputTokensRequest))
async def count_response_tokens(request: Request, service: ServiceDependency) -> Response:
    return await service.admission.prepare(request, responses.InputTokensRequest, partial(
        _count, service.preparer, responses.to_chat, {"object": "response.input_tokens"}))
