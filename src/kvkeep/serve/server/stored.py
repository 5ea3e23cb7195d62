"""Look up a prompt in the engine's store without running it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvkeep.core.cost import LoadablePrompt, Meeting, meet
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
    if found.tokens - cached >= engine.cache.page_size:  # less than a page is not loaded
        start = 0
        for tier, count in found.tiers:
            begin, stop = max(start, cached), min(start + count, last)
            if begin < stop:
                sources.append((begin, stop, tier))
            start += count
    sources, slower = _worth_loading(engine, store, sources, cached, len(tokens))
    fates = store.why(tokens, max(found.tokens, cached), tenant=tenant)
    return sources, [*slower, *missing(fates)]


def _worth_loading(
    engine: Engine, store: KVStore, sources: list[Source], cached: int, tokens: int
) -> tuple[list[Source], list[Missing]]:
    """Return the sources that are worth loading, and those that are faster to compute."""
    cost = engine.cost
    if not sources or not cost.prefill.known:
        return sources, []
    prefill, token_bytes = cost.prefill.cost, engine.runner.geometry.bytes_per_token
    stop = sources[-1][1]

    def load_s(count: int) -> float:
        tiers: dict[str, float] = {}
        for begin, end, tier in sources:
            some = min(count, stop - begin) - max(0, stop - end)
            if some > 0:
                tiers[tier] = tiers.get(tier, 0.0) + some * token_bytes
        return cost.load_s(tiers)

    if store.snapshots:  # loaded as a whole, or not at all
        behind = prefill.prefill_s(stop, tokens)
        loading = load_s(stop - cached)
        alone, loaded = prefill.prefill_s(cached, tokens), loading + behind
        best = Meeting(cached, loaded, 0.0, loading, alone, loaded)
    else:
        found = LoadablePrompt(cached, stop, stop, tokens, store.block_tokens)
        best = meet(found, prefill.prefill_s, load_s)
    at = stop if best.all_computed_s <= best.seconds else best.at
    why = "expected" if at == stop else "overtaken"
    times = {"load_s": best.all_loaded_s, "compute_s": best.all_computed_s}
    slower = [
        Missing(begin, min(end, at), "not_loaded", {"tier": tier, "why": why, **times})
        for begin, end, tier in sources
        if begin < at
    ]
    return [(max(begin, at), end, tier) for begin, end, tier in sources if end > at], slower
