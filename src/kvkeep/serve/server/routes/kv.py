"""A look into the cache, and a broom: for those who run the server."""

import asyncio
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import PlainTextResponse, Response

from kvkeep.serve.server import tree
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.jobs import asked_tokens
from kvkeep.serve.server.routes.base import ERRORS, READ_ERRORS, JSONRoute, ServiceOf
from kvkeep.serve.server.schemas.chat import characters
from kvkeep.serve.server.schemas.kv import (
    ClearRequest,
    ClearResponse,
    KVStats,
    KVTree,
    MemoryPoint,
    RemoveRequest,
    RemoveResponse,
    SessionRequest,
    SessionResponse,
    TierFreed,
)
from kvkeep.serve.server.schemas.responses import ErrorResponse

if TYPE_CHECKING:
    from kvkeep.store.tiers import Removed

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)

_LOCKED: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorResponse, "description": "This server has no API key, so nobody may."}
}


@router.get("/stats", responses=READ_ERRORS, operation_id="kv_stats")
async def stats(service: ServiceOf) -> KVStats:
    """What cache, engine and store hold and have done."""
    cache, engine = await service.stats()
    return KVStats(
        reuse=service.engine.cache.reuse,
        cache=cache.as_dict(),
        engine=engine,
        store=await service.store_stats(),
        what_if=[MemoryPoint(**asdict(point)) for point in cache.what_if] or None,
    )


@router.get(
    "/tree",
    response_model=KVTree,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **READ_ERRORS},
    operation_id="kv_tree",
)
async def show(
    service: ServiceOf,
    namespace: Annotated[
        str | None, Query(max_length=256, description="A cache_salt; default: all namespaces.")
    ] = None,
    depth: Annotated[int, Query(ge=1, le=32, description="Runs deep.")] = 8,
    branches: Annotated[int, Query(ge=1, le=256, description="Branches of a run.")] = 12,
    format: Annotated[Literal["json", "text"], Query(description="text is drawn.")] = "json",
) -> Response:
    """The prefix trees: which prompts share which pages. It shows the beginnings of prompts."""
    spaces = tree.spaces(service, namespace)
    if format == "text":
        drawn = await asyncio.to_thread(tree.as_text, service, spaces, depth, branches)
        return PlainTextResponse(drawn)
    nested = await asyncio.to_thread(tree.as_json, service, spaces, depth, branches)
    return Response(nested.model_dump_json(), media_type="application/json")


@router.post("/clear", responses=ERRORS, operation_id="kv_clear")
async def clear(asked: ClearRequest, service: ServiceOf) -> ClearResponse:
    """Forget what no running request uses, in the store as well."""
    pages, stored = await service.clear(asked.cache_salt)
    freed = 0 if stored is None else stored.bytes
    return ClearResponse(pages=pages, stored_bytes=freed, tiers=_tiers(stored))


@router.post("/remove", responses={**ERRORS, **_LOCKED}, operation_id="kv_remove")
async def remove(asked: RemoveRequest, service: ServiceOf) -> RemoveResponse:
    """Delete the KV of one prompt in the pool and all tiers: on servers with an API key alone.

    What continues the prompt goes, too, and so do prompts that share its first page or block.
    """
    if service.settings.api_key is None:
        message = "this server lets nobody remove prompts; start it with --api-key-file"
        raise ApiError(403, message, code="no_api_key")
    size = characters(asked.messages or ()) + len(asked.prompt or ())
    tokens = await service.counting(partial(asked_tokens, service, asked), size)
    pool, stored = await service.remove(tokens, asked.cache_salt)
    return RemoveResponse(
        tokens=len(tokens),
        pages=pool.pages,
        pages_in_use=pool.in_use,
        tiers=_tiers(stored),
        complete=not pool.in_use and (stored is None or stored.complete),
    )


@router.post("/sessions/{session:path}", responses=ERRORS, operation_id="kv_session")
async def session(
    session: Annotated[
        str, Path(min_length=1, max_length=256, description="As in kvkeep.session.")
    ],
    asked: SessionRequest,
    service: ServiceOf,
) -> SessionResponse:
    """Say that a session is away, over, or begins anew: what is evicted first follows that."""
    known, pages = await service.hint(session, asked.cache_salt, asked.action, asked.eta_s)
    return SessionResponse(known=known, pages=pages)


def _tiers(removed: "Removed | None") -> list[TierFreed]:
    """What each tier deleted, and whether it did; of no store nothing."""
    if removed is None:
        return []
    return [
        TierFreed(name=name, freed_bytes=freed, complete=name not in removed.failed)
        for name, freed in removed.tiers
    ]
