"""``/kv``: why prompts missed, the server's state, what tenants used, and what loading takes."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic_core import to_json
from starlette.responses import Response

from kvkeep.observe.explain import Explainer
from kvkeep.serve.server import explaining
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.routes.base import (
    ERRORS,
    READ_ERRORS,
    JSONRoute,
    ServiceOf,
    errors,
    read_prompt,
)
from kvkeep.serve.server.schemas.kv import ExplainRequest
from kvkeep.serve.server.service import Service
from kvkeep.serve.server.stored import stored

__all__ = ["prompts", "router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)
# What needs a tokenizer and the cache itself.
prompts = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

_NOT_HERE = errors(404)
_MOST = 1000


@router.get("/explain/{id:path}", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_explain")
async def explain(
    id: Annotated[str, Path(min_length=1, max_length=256, description="A response's: cmpl-….")],
    service: ServiceOf,
) -> dict[str, Any]:
    """Why each token of a request's prompt was reused or computed; also while it runs."""
    explainer = _explainer(service)

    def look() -> dict[str, Any] | None:
        explained = explainer.explain(id)
        if explained is None:
            return None
        return explaining.as_answer(explained, id=id, decode=service.decode)

    answer = await service.threads.for_inspection(look)
    if answer is None:
        message = f"no request {id[:100]!r} is known; about the last {_MOST:,} are kept"
        raise ApiError(404, message, param="id", code="unknown_request")
    return answer


@prompts.post("/explain", responses={**ERRORS, **_NOT_HERE}, operation_id="kv_explain_prompt")
async def explain_prompt(body: ExplainRequest, service: ServiceOf) -> dict[str, Any]:
    """The same for a prompt, as if it were sent now. Changes nothing."""
    explainer = _explainer(service)
    tokens = await read_prompt(service, body)
    space = service.namespace(body.cache_salt)
    cached = await asyncio.to_thread(service.engine.cache.match, tokens[:-1], space)
    sources, missing = await stored(service.engine, tokens, space, cached.num_tokens)

    def look() -> dict[str, Any]:
        explained = explainer.prompt(
            tokens,
            space,
            cached.num_tokens,
            sources=sources,
            missing=missing,
            stored=cached.stored_tokens,
        )
        return explaining.as_answer(explained, id=None, decode=service.decode)

    return await service.threads.for_inspection(look)


@router.get("/requests", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_requests")
async def requests(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = 50
) -> dict[str, Any]:
    """The last requests, newest first."""
    explainer = _explainer(service)

    def look() -> dict[str, Any]:
        found = explainer.recent(last)
        return {"requests": [explaining.as_line(one, id=one.id) for one in found]}

    return await service.threads.for_inspection(look)


@router.get("/summary", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_summary")
async def summary(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = _MOST
) -> dict[str, Any]:
    """The tokens that the last requests reused and computed, and the costliest causes."""
    explainer = _explainer(service)
    return await service.threads.for_inspection(
        lambda: explaining.as_summary(explainer.summary(last))
    )


@router.get("/live", responses=READ_ERRORS, operation_id="kv_live")
async def live(service: ServiceOf) -> Response:
    """The server's state, half a second old at most, for clients that poll every second."""
    return Response(await service.live.answer(), media_type="application/json")


@router.get("/cost", responses=READ_ERRORS, operation_id="kv_cost")
async def cost(service: ServiceOf) -> Response:
    """What prompts and tiers take, and how many tokens were loaded and computed because of that."""
    learned = await asyncio.to_thread(service.costs.as_dict)
    text = to_json(learned, exclude_none=True, inf_nan_mode="null")
    return Response(text, media_type="application/json")


def _explainer(service: Service) -> Explainer:
    explainer = service.explainer
    if explainer is None:
        raise ApiError(404, service.unexplained, code="explain_off")
    return explainer
