"""``/kv``: why prompts missed, the last requests, and the server's state at this moment."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
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
from kvkeep.serve.server.schemas.see import (
    ExplainRequest,
    ExplainResponse,
    LiveResponse,
    RequestsResponse,
    SummaryResponse,
)
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
) -> ExplainResponse:
    """Why each token of a request's prompt was reused or computed; also while it runs."""
    explainer = _explainer(service)

    def look() -> ExplainResponse | None:
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
async def explain_prompt(body: ExplainRequest, service: ServiceOf) -> ExplainResponse:
    """The same for a prompt, as if it were sent now. Changes nothing."""
    explainer = _explainer(service)
    tokens = await read_prompt(service, body)
    space = service.namespace(body.cache_salt)
    cached = await asyncio.to_thread(service.engine.cache.match, tokens[:-1], space)
    sources, missing = await stored(service.engine, tokens, space, cached.num_tokens)

    def look() -> ExplainResponse:
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
) -> RequestsResponse:
    """The last requests, newest first."""
    explainer = _explainer(service)

    def look() -> RequestsResponse:
        found = explainer.recent(last)
        return RequestsResponse(requests=[explaining.as_line(one, id=one.id) for one in found])

    return await service.threads.for_inspection(look)


@router.get("/summary", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_summary")
async def summary(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = _MOST
) -> SummaryResponse:
    """The tokens that the last requests reused and computed, and the costliest causes."""
    explainer = _explainer(service)
    return await service.threads.for_inspection(
        lambda: explaining.as_summary(explainer.summary(last))
    )


@router.get("/live", response_model=LiveResponse, responses=READ_ERRORS, operation_id="kv_live")
async def live(service: ServiceOf) -> Response:
    """The server's state, half a second old at most, for clients that poll every second."""
    return Response(await service.live.answer(), media_type="application/json")


def _explainer(service: Service) -> Explainer:
    explainer = service.explainer
    if explainer is None:
        raise ApiError(404, service.unexplained, code="explain_off")
    return explainer
