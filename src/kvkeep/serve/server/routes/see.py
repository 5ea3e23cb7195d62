"""Why prompts missed, what was asked for, and the server at this moment."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from kvkeep.observe.explain import Explainer
from kvkeep.serve.server import explaining
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.jobs import asked_tokens
from kvkeep.serve.server.routes.base import ERRORS, READ_ERRORS, JSONRoute, ServiceOf, errors
from kvkeep.serve.server.schemas.chat import characters
from kvkeep.serve.server.schemas.see import (
    ExplainQuestion,
    ExplanationAnswer,
    LiveAnswer,
    RequestsAnswer,
    SummaryAnswer,
)
from kvkeep.serve.server.service import Service
from kvkeep.serve.server.stored import stored

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

_NOT_HERE = errors(404)
_MOST = 1000


@router.get("/explain/{id:path}", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_explain")
async def explain(
    id: Annotated[str, Path(min_length=1, max_length=256, description="Of an answer: cmpl-….")],
    service: ServiceOf,
) -> ExplanationAnswer:
    """What was reused of a request's prompt, and why the rest was computed; also while it runs."""
    explainer = _explainer(service)

    def look() -> ExplanationAnswer | None:
        explained = explainer.explain(id)
        if explained is None:
            return None
        return explaining.as_answer(explained, id=id, decode=_decode(service))

    answer = await service.counting(look)
    if answer is None:
        message = f"no request {id[:100]!r} is remembered; the last {_MOST:,} or so are"
        raise ApiError(404, message, param="id", code="unknown_request")
    return answer


@router.post("/explain", responses={**ERRORS, **_NOT_HERE}, operation_id="kv_explain_prompt")
async def explain_prompt(asked: ExplainQuestion, service: ServiceOf) -> ExplanationAnswer:
    """The same for a prompt, as if it were asked now. Changes nothing."""
    explainer = _explainer(service)
    size = characters(asked.messages or ()) + len(asked.prompt or ())
    tokens = await service.counting(partial(asked_tokens, service, asked), size)
    space = service.namespace(asked.cache_salt)
    cached = await asyncio.to_thread(service.engine.cache.match, tokens[:-1], space)
    sources, missing = await stored(service.engine, tokens, space, cached.num_tokens)

    def look() -> ExplanationAnswer:
        explained = explainer.prompt(
            tokens, space, cached.num_tokens, sources=sources, missing=missing
        )
        return explaining.as_answer(explained, id=None, decode=_decode(service))

    return await service.counting(look)


@router.get("/requests", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_requests")
async def requests(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = 50
) -> RequestsAnswer:
    """The last requests, newest first."""
    explainer = _explainer(service)

    def look() -> RequestsAnswer:
        found = explainer.recent(last)
        return RequestsAnswer(requests=[explaining.as_line(one, id=one.id) for one in found])

    return await service.counting(look)


@router.get("/summary", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_summary")
async def summary(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = _MOST
) -> SummaryAnswer:
    """What the last requests had to compute, and what of that costs most."""
    explainer = _explainer(service)
    return await service.counting(lambda: explaining.as_summary(explainer.summary(last)))


@router.get("/live", response_model=LiveAnswer, responses=READ_ERRORS, operation_id="kv_live")
async def live(service: ServiceOf) -> Response:
    """The server at this moment, half a second old at most: to be asked every second."""
    return Response(await service.live.answer(), media_type="application/json")


def _explainer(service: Service) -> Explainer:
    explainer = service.watching.explainer
    if explainer is None:
        message = "this server explains nothing: it was started with --no-explain"
        raise ApiError(404, message, code="explain_off")
    return explainer


def _decode(service: Service) -> Callable[[Sequence[int]], str] | None:
    return service.tokenizer.decode if service.settings.text else None
