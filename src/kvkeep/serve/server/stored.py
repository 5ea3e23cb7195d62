"""Look up a prompt in the engine's store without running it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
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
    """Return ``(start, stop, tier)`` of tokens that would be loaded, and why the others would not.

    What the engine has learned of its costs decides what would be loaded, as if it did nothing
    else. Only tokens behind the ``cached`` ones are considered. No block is read; tiers shared with
    other processes are queried, for two seconds at most. Both lists are empty without a store, and
    if less than a page could be loaded.
    """
    tenant = engine.store_tenant(namespace)
    last = len(tokens) - 1
    if engine.store is None or tenant is None or last - cached < engine.cache.page_size:
        return [], []
    began = time.monotonic()
    lookup = asyncio.to_thread(_lookup, engine, engine.store, tokens, tenant, cached)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await lookup
    except TimeoutError:  # the thread ends by itself when the tier answers
        waited = {"tier": None, "why": "late", "waited_s": time.monotonic() - began}
        return [], [Missing(cached, last, "tier_unavailable", waited)]


def _lookup(
    engine: Engine, store: KVStore, tokens: TokenArray, tenant: str, cached: int
) -> tuple[list[Source], list[Missing]]:
    found = store.lookup(tokens, tenant=tenant)
    last = len(tokens) - 1
    sources: list[Source] = []
    slower: list[Missing] = []
    if found.tokens - cached >= engine.cache.page_size:  # less than a page is not loaded
        choice = store.worth_loading(tokens, cached, tenant=tenant)
        slower = missing([replace(one, stop=min(one.stop, last)) for one in choice.misses])
        start = 0
        for tier, count in found.tiers:
            begin, stop = max(start, cached), min(start + count, last, choice.tokens)
            if begin < stop:
                sources.append((begin, stop, tier))
            start += count
    fates = store.why(tokens, max(found.tokens, cached), tenant=tenant)
    return sources, [*slower, *missing(fates)]
