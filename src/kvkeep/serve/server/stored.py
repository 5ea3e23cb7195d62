"""What the engine's store has of a prompt that is not run, and why not the rest."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvkeep.observe.explain import Missing, missing

if TYPE_CHECKING:
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Engine
    from kvkeep.store import KVStore

    Source = tuple[int, int, str]

__all__ = ["stored"]

_PATIENCE_S = 2.0


async def stored(
    engine: Engine, tokens: TokenArray, namespace: Namespace, cached: int
) -> tuple[list[Source], list[Missing]]:
    """``(start, stop, tier)`` of tokens behind ``cached`` ones that would come from the store.

    And what it says of the others. Nothing is read; tiers that others may write to are asked, for
    two seconds at most. Both are empty without a store, and where it could not save a page.
    """
    tenant = engine.store_tenant(namespace)
    last = len(tokens) - 1
    if engine.store is None or tenant is None or last - cached < engine.cache.page_size:
        return [], []
    began = time.monotonic()
    looking = asyncio.to_thread(_look, engine.store, tokens, tenant, cached, engine.cache.page_size)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await looking
    except TimeoutError:  # its thread is left to itself
        waited = {"tier": None, "why": "late", "waited_s": time.monotonic() - began}
        return [], [Missing(cached, last, "tier_unavailable", waited)]


def _look(
    store: KVStore, tokens: TokenArray, tenant: str, cached: int, page_size: int
) -> tuple[list[Source], list[Missing]]:
    there = store.lookup(tokens, tenant=tenant)
    last = len(tokens) - 1
    sources: list[Source] = []
    if there.tokens - cached >= page_size:  # nothing less is loaded
        start = 0
        for tier, count in there.tiers:
            begin, stop = max(start, cached), min(start + count, last)
            if begin < stop:
                sources.append((begin, stop, tier))
            start += count
    fates = store.why(tokens, max(there.tokens, cached), tenant=tenant)
    return sources, missing(fates)
