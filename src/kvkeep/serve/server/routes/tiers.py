"""``/kv/tiers``: the tiers of the store, attached and detached while it is used."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Path, Query

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue, MissingExtra
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.routes.base import (
    ERRORS,
    READ_ERRORS,
    Errors,
    JSONRoute,
    ServiceOf,
    errors,
    require_key,
    route_with,
)
from kvkeep.serve.server.schemas.responses import ErrorResponse
from kvkeep.serve.server.schemas.tiers import (
    AttachRequest,
    DetachResponse,
    TierRow,
    TiersResponse,
)
from kvkeep.serve.server.service import Service

if TYPE_CHECKING:
    from kvkeep.store import KVStore

__all__ = ["router"]

router = APIRouter(prefix="/kv", tags=["cache"], route_class=JSONRoute)
_all = APIRouter(route_class=route_with("GET, POST"))

_CONFLICT: Errors = {
    409: {
        "model": ErrorResponse,
        "description": "The place is attached already, it is the last tier, or another one is "
        "being attached or detached.",
    }
}


@_all.get("/tiers", responses={**READ_ERRORS, **errors(404)}, operation_id="kv_tiers")
async def tiers(service: ServiceOf) -> TiersResponse:
    """The levels of the store, fastest first."""
    return TiersResponse(tiers=await _rows(_store(service)))


@_all.post(
    "/tiers",
    responses={**ERRORS, **errors(403, 404), **_CONFLICT},
    operation_id="kv_attach_tier",
)
async def attach(body: AttachRequest, service: ServiceOf) -> TiersResponse:
    """Open a tier and use it from now on; it is listed in the background. Requires an API key."""
    require_key(service, "attach tiers")
    store = _store(service)
    try:
        await asyncio.to_thread(store.attach, body.url, below=body.below)
    except IllegalStep as error:
        raise _conflict(error) from error
    except (InvalidValue, BackendFailed, MissingExtra) as error:
        raise ApiError(400, _line(error), param="url", code="wrong_tier") from error
    return TiersResponse(tiers=await _rows(store))


@router.delete(
    "/tiers/{name}",
    responses={**READ_ERRORS, **errors(403, 404), **_CONFLICT},
    operation_id="kv_detach_tier",
)
async def detach(
    name: Annotated[str, Path(min_length=1, max_length=256, description="As in GET /kv/tiers.")],
    service: ServiceOf,
    *,
    move: Annotated[
        bool, Query(description="Copy what it alone has to other tiers, where these have room.")
    ] = True,
    timeout_s: Annotated[
        float, Query(ge=0, le=3600, description="Seconds for writing, copying and reads that run.")
    ] = 60.0,
) -> DetachResponse:
    """Use a tier no longer; nothing is deleted there. Requires an API key.

    Queued writes are finished first, and it is read until the end.
    """
    require_key(service, "detach tiers")
    store = _store(service)
    if name not in store.tiers:
        there = ", ".join(store.tiers)
        raise ApiError(404, f"no tier is called {name!r}; there are {there}", param="name")
    leave = partial(store.detach, name, move=move, timeout=timeout_s)
    try:
        done = await asyncio.to_thread(leave)
    except IllegalStep as error:
        raise _conflict(error) from error
    except InvalidValue as error:  # memory, or it was detached meanwhile
        raise ApiError(409, _line(error), param="name", code="conflict") from error
    return DetachResponse(
        name=done.name,
        moved=done.moved,
        moved_bytes=done.moved_bytes,
        left=done.left,
        tiers=await _rows(store),
    )


def _store(service: Service) -> "KVStore":
    store = service.engine.store
    if store is None:
        raise ApiError(404, "this server has no store: it was started without tiers")
    return store


async def _rows(store: "KVStore") -> list[TierRow]:
    found = (await asyncio.to_thread(store.stats)).tiers
    return [
        TierRow(
            name=one.name,
            place=one.place,
            codec=one.codec,
            capacity=one.capacity,
            used_bytes=one.used_bytes,
            blocks=one.blocks,
            queued_bytes=one.queued_bytes,
            breaker=one.breaker,
        )
        for one in found
    ]


def _conflict(error: IllegalStep) -> ApiError:
    return ApiError(409, _line(error), code="conflict")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


router.include_router(_all)
