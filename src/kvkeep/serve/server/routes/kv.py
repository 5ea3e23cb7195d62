"""``/kv``: statistics of the cache, the prefix trees, and removal of cached KV."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Path

from kvkeep.serve.server.routes.base import (
    ERRORS,
    READ_ERRORS,
    JSONRoute,
    ServiceOf,
    errors,
    read_prompt,
    require_key,
)  # fmt: skip
from kvkeep.serve.server.schemas.kv import (
    ClearRequest,
    ClearResponse,
    KVStats,
    MemoryPoint,
    RemoveRequest,
    RemoveResponse,
    SessionRequest,
    SessionResponse,
    TierFreed,
)

if TYPE_CHECKING:
    from kvkeep.store.tiers import Removed

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)


@router.get("/stats", responses=READ_ERRORS, operation_id="kv_stats")
async def stats(service: ServiceOf) -> KVStats:
    """Statistics of the cache, the engine and the store."""
    cache, engine = await service.stats()
    return KVStats(
        reuse=service.engine.cache.reuse,
        cache=cache.as_dict(),
        engine=engine,
        store=await service.store_stats(),
        what_if=[MemoryPoint(**asdict(point)) for point in cache.what_if] or None,
    )


@router.post("/clear", responses=ERRORS, operation_id="kv_clear")
async def clear(body: ClearRequest, service: ServiceOf) -> ClearResponse:
    """Forget everything that no running request uses, in the pool and in the store."""
    salt, engine = body.cache_salt, service.engine
    space = None if salt is None else service.namespace(salt)
    # The store first: KV loaded from it meanwhile is then in the pool, and is cleared too.
    stored = await asyncio.to_thread(engine.clear_store, space)
    pages = await asyncio.to_thread(engine.cache.clear, space)
    freed = 0 if stored is None else stored.bytes
    return ClearResponse(pages=pages, stored_bytes=freed, tiers=_tiers(stored))


@router.post("/remove", responses={**ERRORS, **errors(403)}, operation_id="kv_remove")
async def remove(body: RemoveRequest, service: ServiceOf) -> RemoveResponse:
    """Delete the KV of one prompt in the pool and all tiers. Requires an API key.

    Also deletes continuations of the prompt, and prompts that share its first page or block.
    """
    require_key(service, "remove prompts")
    tokens = await read_prompt(service, body)
    space, engine = service.namespace(body.cache_salt), service.engine
    # The store first, as in `clear`.
    stored = await asyncio.to_thread(engine.remove_stored, tokens, space)
    pool = await asyncio.to_thread(engine.cache.remove, tokens, space)
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
    body: SessionRequest,
    service: ServiceOf,
) -> SessionResponse:
    """Hint that a session pauses or is over; this changes the order of eviction."""
    hinted = service.engine.cache.session(session, service.namespace(body.cache_salt))

    def apply() -> SessionResponse:
        known = hinted.known
        if body.action == "suspend":
            assert body.eta_s is not None, "SessionRequest checks it"
            return SessionResponse(known=known, pages=hinted.suspend(body.eta_s))
        return SessionResponse(known=known, pages=hinted.close())

    return await asyncio.to_thread(apply)


def _tiers(removed: "Removed | None") -> list[TierFreed]:
    """Return what each tier removed, and whether it succeeded; nothing without a store."""
    if removed is None:
        return []
    return [
        TierFreed(name=name, freed_bytes=freed, complete=name not in removed.failed)
        for name, freed in removed.tiers
    ]
