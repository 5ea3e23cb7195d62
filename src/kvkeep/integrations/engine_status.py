"""`EngineStatus`: what kvkeep tells of its cache inside an engine, over HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from kvkeep.integrations.request_watch import RequestWatch
from kvkeep.integrations.watch_sink import WatchSink
from kvkeep.observe.explain import Explainer
from kvkeep.observe.usage import TenantLedger, UsageTable
from kvkeep.serve.server.engine_costs import EngineCosts
from kvkeep.serve.server.live import (
    MOST_SHOWN,
    Live,
    load_figures,
    source_figures,
    tenant_figures,
    tier_figures,
    time_figures,
)
from kvkeep.serve.server.losses import ServerLosses, loss_counts
from kvkeep.serve.server.schemas.kv import KVStats
from kvkeep.serve.server.schemas.see import LivePages, LiveResponse, LiveTotals, LiveTtft
from kvkeep.serve.server.status_metrics import StatusMetrics
from kvkeep.serve.server.text import showable
from kvkeep.serve.server.thread_pools import ThreadPools

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.cost import CostModel
    from kvkeep.store.tiers import TierStats

__all__ = ["EngineFacts", "EngineStatus"]


_UNTOLD: Final = frozenset({"what_if", "sessions"})
_OF_REQUESTS: Final = frozenset({"pages", "ttft", "history", "tenants", "reused", "loads"})


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine, as its status names it.

    Attributes:
        engine: its name and version, as "vLLM 0.33.0".
        model: the name of the model that it serves.
        page_tokens: tokens of a page of its own cache.
        num_pages: of these.
        policy: the eviction policy of that cache.
    """

    engine: str
    model: str
    page_tokens: int
    num_pages: int
    policy: str = "lru"


class EngineStatus:
    """An `kvkeep.serve.server.status.OutsideSource`: requests, by `watch`; and tiers.

    Explanations have no text and no tokens of prompts, and there is no map of pages.

    Thread safety: all methods; `watch` belongs to the engine's thread. Memory: that of an
    `Explainer`, 150 MB at most, which grows with the prompts that it remembers.

    Arguments:
        facts: of the engine.
        cost: what computing and loading take.
        tiers: returns the state of the tiers, with the numbers of ranks if there are several.
        requests: whether `watch` is told of requests.
        free_pages: returns the pages that no running request has; None: unknown.

    Attributes:
        watch: what the engine tells of its requests.
    """

    decode = None

    def __init__(
        self,
        facts: EngineFacts,
        cost: CostModel,
        *,
        tiers: Callable[[], Sequence[tuple[int, TierStats]]],
        free_pages: Callable[[], int | None] = lambda: None,
        requests: bool = True,
    ) -> None:
        self._facts = facts
        self._tiers_of = tiers
        self._free_pages = free_pages
        self._began = time.monotonic()
        self._since = time.time()
        self._version = version("kvkeep")
        self._explainer = Explainer(facts.page_tokens, facts.policy)
        self._usage = UsageTable(facts.num_pages)
        self._ledger = TenantLedger()
        self.costs = EngineCosts(cost)
        self._sink = WatchSink(
            self._explainer, self._usage, (self._ledger.see, self.costs.see),
            num_pages=facts.num_pages, prefill_s=cost.prefill.prefill_s,
        )  # fmt: skip
        self.watch = RequestWatch(self._sink, facts.page_tokens)
        self._losses = ServerLosses(lambda: loss_counts(self._sink.evicted_pages, self._tiers))
        self._losses.start()
        self._metrics = StatusMetrics(self._usage, self._ledger, self.costs)
        self._told = requests
        self.live = Live(self._live, _UNTOLD if requests else _UNTOLD | _OF_REQUESTS)
        self.threads = ThreadPools()

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self._facts.engine

    @property
    def explainer(self) -> Explainer | None:
        """What explains requests, with all that happened so far; None: nothing is told of them."""
        self.watch.settle()
        return self._explainer if self._told else None

    @property
    def unexplained(self) -> str:
        """Why requests are not explained, if they are not."""
        return f"{self.engine} tells of no tokens here, so no request is explained"

    @property
    def _tiers(self) -> list[TierStats]:
        """The tiers of all ranks; of several ranks, each has its number in its name."""
        found = list(self._tiers_of())
        several = len({rank for rank, _ in found}) > 1
        return [
            replace(tier, name=f"{tier.name} (rank {rank})") if several else tier
            for rank, tier in found
        ]

    def _requests(self) -> dict[str, int | float]:
        sink, watch = self._sink, self.watch
        return {
            "running": watch.running,
            "waiting": watch.waiting,
            "requests": sink.requests,
            "prompt_tokens": sink.prompt_tokens,
            "cached_tokens": sink.cached_tokens,
            "loaded_tokens": sink.loaded_tokens,
            "generated_tokens": sink.generated_tokens,
            "observer_errors": watch.lost,
        }

    def _pages(self) -> LivePages:
        """Return the pages by state; of those in use nearly all can be reused, or will be."""
        total, free = self._facts.num_pages, self._free_pages()
        stored = min(self._sink.full_pages, total)
        used = 0 if free is None else min(total, max(0, total - free))
        held = min(stored, used)
        return LivePages(
            total=total,
            free=max(0, total - used - (stored - held)),
            cached_evictable=stored - held,
            cached_held=held,
            private=used - held,
            pinned=0,
        )

    def _live(self) -> LiveResponse:
        self.watch.settle()
        facts, sink = self._facts, self._sink
        usage, tiers = self._usage.moment(MOST_SHOWN), self._tiers
        return LiveResponse(
            at=time.time(),
            uptime_s=time.monotonic() - self._began,
            version=self._version,
            model=showable(facts.model),
            engine=facts.engine,
            policy=facts.policy,
            page_size=facts.page_tokens,
            text=False,
            explain=self._told,
            map=False,
            running=self.watch.running,
            waiting=self.watch.waiting,
            totals=LiveTotals(
                requests=sink.requests,
                prompt_tokens=sink.prompt_tokens,
                cached_tokens=sink.cached_tokens,
                loaded_tokens=sink.loaded_tokens,
                generated_tokens=sink.generated_tokens,
                evicted_pages=sink.evicted_pages,
            ),
            pages=self._pages(),
            reused=source_figures(usage.reuse),
            losses=self._losses.rows(loss_counts(sink.evicted_pages, tiers)),
            ttft=LiveTtft(cold=time_figures(usage.cold), warm=time_figures(usage.warm)),
            history=usage.history,
            tiers=[tier_figures(tier, self.costs) for tier in tiers],
            loads=load_figures(self.costs),
            what_if=None,
            tenants=tenant_figures(usage.namespaces, self._usage.pages.pages),
            sessions=[],
        )

    def stats(self) -> KVStats:
        """Return the counters of requests, pages and tiers. Cost: a call of each tier's."""
        self.watch.settle()
        pages = self._pages().model_dump()
        cache = {f"pages_{name}": count for name, count in pages.items()}
        return KVStats(
            reuse=True,
            cache={**cache, "evicted_pages": self._sink.evicted_pages},
            engine=self._requests(),
            store={"tiers": [tier.as_dict() for tier in self._tiers]},
            what_if=None,
        )

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads. Cost: some milliseconds."""
        self.watch.settle()
        reasons = self._explainer.computed()
        tiers = [tier.as_dict() for tier in self._tiers]
        return self._metrics.exposition(self._requests(), reasons, tiers)

    def close(self) -> None:
        """End all threads. A second call does nothing."""
        self._losses.close()
        self.watch.close()
        self._explainer.close()
        self.live.close()
        self.threads.close()
