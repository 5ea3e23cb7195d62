"""``/kv``: why prompts missed, the server's state, what tenants used, and what loading takes."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic_core import to_json
from starlette.responses import Response

from kvkeep.core.keys import Namespace
from kvkeep.observe.explain import (
    Cause,
    ExplainSummary,
    Explanation,
    Span,
    around,
    why_of,
)
from kvkeep.observe.usage import LoadReport
from kvkeep.serve.engine import Engine
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
from kvkeep.serve.server.text import showable, showable_at

if TYPE_CHECKING:
    from kvkeep.core.tokens import TokenArray
    from kvkeep.store import KVStore, Miss

__all__ = ["router"]

Decode = Callable[[Sequence[int]], str]

# Fields of evidence that have tokens of prompts.
_TOKENS = ("given", "cached")


def as_line(explained: Explanation, *, id: str | None) -> dict[str, Any]:
    """Return the entry of a list of requests."""
    session = explained.session
    return {
        "id": id,
        "at": explained.at,
        "endpoint": explained.kind,
        "cache_salt": showable(explained.namespace.tenant),
        "session": None if session is None else showable(session),
        "prompt_tokens": explained.prompt_tokens,
        "generated_tokens": explained.generated_tokens,
        "ttft_s": explained.ttft_s,
        "seconds": explained.seconds,
        "outcome": explained.outcome,
        "reused": {showable(source): tokens for source, tokens in explained.reused.items()},
        "computed": dict(explained.computed),
        "sentence": showable(explained.sentence),
    }


def as_answer(explained: Explanation, *, id: str | None, decode: Decode | None) -> dict[str, Any]:
    """Return the whole explanation; without ``decode``, without text and tokens of prompts."""
    diverged = next((span.evidence for span in explained.spans if span.reason == "diverged"), None)
    return {
        **as_line(explained, id=id),
        "spans": [_span(span, text=decode is not None) for span in explained.spans],
        "text": _text(diverged, decode),
    }


def as_summary(summary: ExplainSummary, decode: Decode | None) -> dict[str, Any]:
    """Return the summary as JSON has it; the order of the causes is kept."""
    return {
        "requests": summary.requests,
        "prompt_tokens": summary.prompt_tokens,
        "reused": {showable(source): tokens for source, tokens in summary.reused.items()},
        "computed": dict(summary.computed),
        "causes": [_cause(cause, decode) for cause in summary.causes],
    }


def _span(span: Span, *, text: bool) -> dict[str, Any]:
    evidence = {
        name: _shown(value) for name, value in span.evidence.items() if text or name not in _TOKENS
    }
    why = why_of(span)
    return {
        "start": span.start,
        "stop": span.stop,
        "source": None if span.source is None else showable(span.source),
        "reason": span.reason,
        "why": None if why is None else showable(why),
        "evidence": evidence,
    }


def _text(diverged: Mapping[str, Any] | None, decode: Decode | None) -> dict[str, Any] | None:
    """Return the texts around a difference."""
    if diverged is None or decode is None:
        return None
    words = around(diverged, decode)
    given, at_given = showable_at(words["given_text"], words["at_given"])
    cached, at_cached = showable_at(words["cached_text"], words["at_cached"])
    return {
        "given_text": given,
        "cached_text": cached,
        "at_given": at_given,
        "at_cached": at_cached,
    }


def _cause(cause: Cause, decode: Decode | None) -> dict[str, Any]:
    return {
        "reason": cause.reason,
        "tokens": cause.tokens,
        "tokens_per_hour": round(cause.tokens_per_hour),
        "share": cause.share,
        "requests": cause.requests,
        "cache_salt": None if cause.tenant is None else showable(cause.tenant),
        "position": cause.position,
        "example": cause.example,
        "sentence": showable(cause.sentence),
        "tenants": cause.tenants,
        "advice": cause.advice,
        "text": _text(cause.difference, decode),
    }


def _shown(value: Any) -> Any:
    """Return a piece of evidence with all texts made safe to display (see `showable`)."""
    if isinstance(value, str):
        return showable(value)
    if isinstance(value, dict):
        return {showable(str(name)): _shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value


_PATIENCE_S = 2.0


async def would_load(
    engine: Engine, tokens: "TokenArray", namespace: Namespace, cached: int
) -> LoadReport:
    """Return what would be loaded behind the ``cached`` tokens, and why the others would not.

    What the engine has learned of its costs decides what would be loaded, as if it did nothing
    else. No block is read; tiers shared with other processes are queried, for two seconds at most.
    The report is empty without a store, and if less than a page could be loaded.
    """
    tenant = engine.store_tenant(namespace)
    if engine.store is None or tenant is None or len(tokens) - 1 - cached < engine.cache.page_size:
        return LoadReport()
    began = time.monotonic()
    lookup = asyncio.to_thread(_lookup, engine, engine.store, tokens, tenant, cached)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await lookup
    except TimeoutError:  # the thread ends by itself when the tier answers
        return LoadReport(seconds=time.monotonic() - began, late=True)


def _lookup(
    engine: Engine, store: "KVStore", tokens: "TokenArray", tenant: str, cached: int
) -> LoadReport:
    began = time.monotonic()
    answer = store.lookup(tokens, tenant=tenant)
    last = len(tokens) - 1
    sources: list[tuple[int, int, str]] = []
    slower: list[Miss] = []
    if answer.tokens - cached >= engine.cache.page_size:  # less than a page is not loaded
        choice = store.worth_loading(tokens, cached, tenant=tenant)
        slower = [replace(miss, stop=min(miss.stop, last)) for miss in choice.misses]
        start = 0
        for tier, count in answer.tiers:
            begin, stop = max(start, cached), min(start + count, last, choice.tokens)
            if begin < stop:
                sources.append((begin, stop, tier))
            start += count
    why = store.why(tokens, max(answer.tokens, cached), tenant=tenant)
    return LoadReport(tuple(sources), (*slower, *why), time.monotonic() - began)


router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

_NOT_HERE = errors(404)
_MOST = 1000


@router.get("/explain/{id:path}", responses={**READ_ERRORS, **_NOT_HERE}, operation_id="kv_explain")
async def explain(
    id: Annotated[str, Path(min_length=1, max_length=256, description="A response's: cmpl-….")],
    service: ServiceOf,
) -> dict[str, Any]:
    """Why each token of a request's prompt was reused or computed; also while it runs."""
    explainer = service.explainer

    def look() -> dict[str, Any] | None:
        explained = explainer.explain(id)
        if explained is None:
            return None
        return as_answer(explained, id=id, decode=service.decode)

    answer = await service.threads.for_inspection(look)
    if answer is None:
        message = f"no request {id[:100]!r} is known; about the last {_MOST:,} are kept"
        raise ApiError(404, message, param="id", code="unknown_request")
    return answer


@router.post("/explain", responses=ERRORS, operation_id="kv_explain_prompt")
async def explain_prompt(body: ExplainRequest, service: ServiceOf) -> dict[str, Any]:
    """The same for a prompt, as if it were sent now. Changes nothing."""
    explainer = service.explainer
    tokens = await read_prompt(service, body)
    space = service.namespace(body.cache_salt)
    pool = await asyncio.to_thread(service.engine.cache.match, tokens[:-1], space, everywhere=True)
    report = await would_load(service.engine, tokens, space, pool.num_tokens)

    def look() -> dict[str, Any]:
        explained = explainer.prompt(tokens, space, pool.miss, report)
        return as_answer(explained, id=None, decode=service.decode)

    return await service.threads.for_inspection(look)


@router.get("/requests", responses=READ_ERRORS, operation_id="kv_requests")
async def requests(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = 50
) -> dict[str, Any]:
    """The last requests, newest first."""
    explainer = service.explainer

    def look() -> dict[str, Any]:
        found = explainer.recent(last)
        return {"requests": [as_line(one, id=one.id) for one in found]}

    return await service.threads.for_inspection(look)


@router.get("/summary", responses=READ_ERRORS, operation_id="kv_summary")
async def summary(
    service: ServiceOf, last: Annotated[int, Query(ge=1, le=_MOST)] = _MOST
) -> dict[str, Any]:
    """The tokens that the last requests reused and computed, and the costliest causes."""
    explainer, decode = service.explainer, service.decode
    return await service.threads.for_inspection(lambda: as_summary(explainer.summary(last), decode))


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
