"""`Live`: the state of a server at this moment, computed at most twice a second.

`ServerLosses` follows evictions and errors: in the last minute, the last ten, in all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_json

from kvkeep.observe.usage.history import EVERY_S, Lately
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import Counter

    from kvkeep.observe.usage import TenantCounts
    from kvkeep.observe.usage.history import Counts
    from kvkeep.observe.usage.table import ReuseTotals
    from kvkeep.serve.engine import EngineStats
    from kvkeep.serve.server.engine_costs import EngineCosts
    from kvkeep.serve.server.service import Service
    from kvkeep.store.tiers import TierStats

__all__ = ["MOST_SHOWN", "EngineState", "Live", "ServerLosses", "loss_counts"]

_POOL: Final = "pool"
_REQUESTS: Final = "requests"
_OUTCOMES: Final = ("failed", "timeout", "refused")
# What the row is called → the counter of a tier.
_OF_TIERS: Final = {
    "evicted": "evictions",
    "errors": "errors",
    "late": "late",
    "damaged": "damaged",
    "dropped": "drops",
}
_KINDS: Final = {"evicted": "eviction", "refused": "refusal"}
_PATIENCE_S: Final = 10.0


class ServerLosses:
    """Follows what is lost: pages and blocks that are evicted, requests and calls that fail.

    ``read`` returns the counters, by what they count and where. A thread samples them every five
    seconds, so that the last minute is known when somebody looks; ``read`` is called there, too.

    Thread safety: `rows`; `start` and `close` belong to one thread.
    """

    def __init__(self, read: Callable[[], Counts]) -> None:
        self._read = read
        self._lately = Lately()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep losses", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    def rows(self, counts: Counts) -> list[dict[str, Any]]:
        """Return what ever happened, and how often lately; ``counts`` are those of this moment."""
        self._lately.note(counts)
        return [
            {
                "kind": _KINDS.get(what, "error"),
                "what": what,
                "place": showable(place),
                "minute": grown.minute,
                "ten_minutes": grown.ten_minutes,
                "total": grown.total,
            }
            for (what, place), grown in self._lately.growth(counts).items()
            if grown.total
        ]

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._lately.due:  # else somebody looks at the dashboard
                self._lately.note(self._read())


def loss_counts(
    evicted_pages: int, tiers: Iterable[TierStats], requests: Counter | None = None
) -> Counts:
    """Return the counters of a pool, of tiers, and of ``requests`` by outcome."""
    counts: Counts = {("evicted", _POOL): evicted_pages}
    counts |= {
        (what, tier.name): int(tier.counters[name])
        for tier in tiers
        for what, name in _OF_TIERS.items()
    }
    if requests is None:
        return counts
    counts |= {(outcome, _REQUESTS): 0 for outcome in _OUTCOMES}
    for metric in requests.collect():
        for sample in metric.samples:
            key = sample.labels.get("outcome", ""), _REQUESTS
            if key in counts and sample.name.endswith("_total"):
                counts[key] += int(sample.value)
    return counts


_FRESH_S = 0.5
MOST_SHOWN = 20
"""Tenants of an answer."""


class Live:
    """Makes the answer of ``/kv/live`` and keeps it for half a second, for all clients.

    A separate thread calls ``state``, so that an answer waits neither for tokenizers nor for tiers.

    Thread safety: none; it belongs to the event loop.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state
        self._thread = ThreadPoolExecutor(1, "kvkeep live")
        self._answer = b""
        self._until = float("-inf")
        self._pending: asyncio.Future[bytes] | None = None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def answer(self) -> bytes:
        """Return the answer as JSON, half a second old at most."""
        if time.monotonic() < self._until:
            return self._answer
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.run_in_executor(self._thread, self._make)
            self._pending.add_done_callback(self._keep)
        return await asyncio.shield(self._pending)

    def _keep(self, made: asyncio.Future[bytes]) -> None:
        self._pending = None
        if not made.cancelled() and made.exception() is None:
            self._answer = made.result()
            self._until = time.monotonic() + _FRESH_S

    def _make(self) -> bytes:
        """In the thread."""
        return to_json(self._state(), inf_nan_mode="null")


class EngineState:
    """Tells the state of the engine of a `Service`. Thread safety: one call at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = time.monotonic()
        self._version = version("kvkeep")

    def __call__(self) -> dict[str, Any]:
        """Return the state now. Cost: one pass over the pool's reference counts."""
        service = self._service
        cache = service.engine.cache.stats()
        # Counters are read one by one while the engine works, so they may be off by a step.
        engine = service.engine.stats()
        store = service.engine.store
        tiers = () if store is None else store.stats().tiers
        settings, usage = service.settings, service.watching.usage.moment()
        return {
            "at": time.time(),
            "uptime_s": time.monotonic() - self._began,
            "version": self._version,
            "model": settings.name,
            "policy": service.engine.cache.policy,
            "page_size": service.engine.cache.page_size,
            "text": settings.text,
            "running": engine.running,
            "waiting": engine.waiting,
            "totals": _totals(engine),
            "reused": _source_figures(usage.reuse),
            "losses": service.losses.rows(service.loss_counts(cache, tiers)),
            "pages": {
                "total": cache.pages_total,
                **cache.pages_by_state(),
                "pinned": cache.pinned_pages,
            },
            "ttft": {"cold": asdict(usage.cold), "warm": asdict(usage.warm)},
            "history": usage.history,
            "tiers": [_tier_figures(tier, service.costs) for tier in tiers],
            "loads": _load_figures(service.costs),
            "what_if": [
                {
                    "times": point.times,
                    "pages": point.pages,
                    "hit_rate": point.hit_rate,
                    "kv_only": point.kv_only,
                }
                for point in cache.what_if
            ]
            or None,
            "tenants": _tenant_figures(
                service.watching.tenants.largest(MOST_SHOWN), service.watching.usage.pages.pages
            ),
        }


def _source_figures(reuse: ReuseTotals) -> list[dict[str, Any]]:
    """Return where reused tokens came from, and the time that this saved."""
    saved = reuse.saved_seconds
    return [
        {"source": showable(source), "tokens": tokens, "saved_s": saved.get(source, 0.0)}
        for source, tokens in reuse.hit_tokens.items()
    ]


def _totals(engine: EngineStats) -> dict[str, Any]:
    return {
        "requests": engine.requests,
        "prompt_tokens": engine.prompt_tokens,
        "cached_tokens": engine.cached_tokens,
        "loaded_tokens": engine.loaded_tokens,
        "generated_tokens": engine.generated_tokens,
    }


def _tenant_figures(
    tenants: Iterable[tuple[str, TenantCounts]], pages: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return tenants as JSON has them; ``pages`` has the cached ones of each."""
    return [
        {
            "cache_salt": showable(tenant),
            "requests": counts.requests,
            "prompt_tokens": counts.prompt_tokens,
            "reused_tokens": counts.read_tokens,
            "pages": pages.get(tenant, 0),
        }
        for tenant, counts in tenants
    ]


def _load_figures(costs: EngineCosts) -> dict[str, Any]:
    """Return what was loaded lately."""
    recent = costs.recent
    return {
        "loads": recent.loads,
        "loaded_tokens": recent.loaded_tokens,
        "computed_stored_tokens": recent.computed_stored_tokens,
    }


def _tier_figures(tier: TierStats, costs: EngineCosts) -> dict[str, Any]:
    """Return one tier as JSON has it; names are made showable."""
    counted = {name: int(value) for name, value in tier.counters.items()}
    return {
        "name": showable(tier.name),
        "place": showable(tier.place),
        "blocks": tier.blocks,
        "used_bytes": tier.used_bytes,
        "capacity": tier.capacity,
        "queued_bytes": tier.queued_bytes,
        "breaker": tier.breaker,
        "breakers": {call: state for call, state in tier.breakers.items() if state != "closed"},
        "parts": {showable(part): state for part, state in tier.parts.items()},
        "hits": counted["hits"],
        "misses": counted["misses"],
        "drops": counted["drops"],
        "errors": counted["errors"],
        "damaged": counted["damaged"],
        "late": counted["late"],
        "evictions": counted["evictions"],
        "read_bytes": counted["read_bytes"],
        "written_bytes": counted["written_bytes"],
        "read_bytes_per_s": costs.read_bytes_per_s(tier.name),
    }
