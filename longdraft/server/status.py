"""The routes that tell how the server is: health, readiness, metrics, version, status."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from longdraft import drafters
from longdraft.server.service import Service
from longdraft.version import __version__


def routes(service: Service) -> APIRouter:
    """A router on a service."""
    router = APIRouter()

    @router.get("/health", summary="Whether the server lives. Needs no key.")
    async def health() -> JSONResponse:
        alive = service.scheduler.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    @router.get("/ready", summary="Whether new texts are taken.")
    async def ready() -> JSONResponse:
        figures = service.scheduler.figures()
        is_ready = service.scheduler.is_alive and not figures["draining"]
        return JSONResponse({"ready": is_ready, **figures}, 200 if is_ready else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", summary="For Prometheus.", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/longdraft/status", summary="Model, drafters, limits and what runs.")
    async def status() -> dict[str, Any]:
        engine = service.engine
        model = engine.model
        return {
            **service.scheduler.figures(),
            "model": service.settings.model_name,
            "max_model_len": service.preparer.limit,
            "drafter": engine.drafter,
            "drafters": [name for name, kind in drafters.KINDS.items() if _serves(service, name, kind)],
            "defaults": dict(engine.defaults.settings),
            "has_chat_template": engine.tokenizer.chat_template is not None,
            "journals": service.settings.journals is not None,
            "kernels": model.kernels.name, "device": str(model.kernels.device),
            "exactness": "bit-exact" if model.kernels.is_row_invariant else "distribution",
            "quantize": model.weights.quantize,
            "started": service.began,
            "version": __version__,
        }

    return router


def _serves(service: Service, name: str, kind: drafters.Kind) -> bool:
    """Whether a request may name this drafter."""
    engine = service.engine
    return name == engine.drafter or not kind.needs or getattr(engine, kind.needs) is not None
