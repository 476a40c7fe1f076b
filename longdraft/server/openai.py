"""The routes that OpenAI's and vLLM's clients know: texts, models, tokens."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from longdraft.server.errors import ApiError
from longdraft.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from longdraft.server.service import ResponseOptions, Service


def routes(service: Service) -> APIRouter:
    """A router on a service."""
    router = APIRouter()
    engine, preparer = service.engine, service.preparer

    @router.post("/v1/completions", summary="Go on from a prompt.")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        name = f"cmpl-{secrets.token_hex(12)}"
        plans = await service.run_in_thread(preparer.completion, body, name)
        firsts = plans[:: body.n]
        manner = ResponseOptions("text_completion", name, sum(plan.prompt_tokens for plan in firsts),
                        echo=_prompts(body, service) if body.echo else None, logprobs=body.logprobs is not None,
                        **_common(body))
        return await service.answer(request, plans, manner)

    @router.post("/v1/chat/completions", summary="Answer a conversation, in the model's chat template.")
    async def chat(body: ChatRequest, request: Request) -> Response:
        name = f"chatcmpl-{secrets.token_hex(12)}"
        plans = await service.run_in_thread(preparer.chat, body, name)
        manner = ResponseOptions("chat.completion", name, plans[0].prompt_tokens, logprobs=body.logprobs, **_common(body))
        return await service.answer(request, plans, manner)

    @router.get("/v1/models", summary="The model that is served.")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{model:path}", summary="What is known of a model.")
    async def model(model: str) -> dict[str, Any]:
        preparer.require_model(model)
        return _model(service)

    @router.post("/tokenize", summary="Token ids of a text or a conversation.")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        preparer.require_model(body.model)
        ids = await service.run_in_thread(_tokenize, body, service)
        return {"tokens": ids, "count": len(ids), "max_model_len": preparer.limit}

    @router.post("/detokenize", summary="The text of token ids.")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        preparer.require_model(body.model)
        vocabulary = engine.model.config.vocab_size
        bad = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
        if bad is not None:
            raise ApiError(400, f"tokens holds {bad}; allowed: 0 to {vocabulary - 1}", param="tokens",
                           code="invalid_value")
        return {"prompt": await service.run_in_thread(engine.tokenizer.decode, body.tokens)}

    return router


def _common(body: Sampling) -> dict[str, Any]:
    options = body.stream_options
    return {"is_stream": body.stream, "with_usage": options is not None and options.include_usage, "user": body.user,
            "details": body.longdraft.details, "timeout_s": body.longdraft.timeout}


def _prompts(body: CompletionRequest, service: Service) -> list[str]:
    """The text of each choice's prompt."""
    prompts = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    texts = [prompt if isinstance(prompt, str) else service.engine.tokenizer.decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(body.n)]


def _tokenize(body: TokenizeRequest, service: Service) -> list[int]:
    if body.messages is not None:
        return service.engine.chat([message.plain() for message in body.messages])
    assert body.prompt is not None, "the schema has seen to it"
    return service.engine.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.settings.model_name, "object": "model", "created": int(service.began),
            "owned_by": "longdraft", "root": service.engine.name, "parent": None,
            "max_model_len": service.preparer.limit}
