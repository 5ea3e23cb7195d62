"""`Watching`: the usage table, the ledger of tenants and the explainer of one server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.observe.explain import Explainer
from kvkeep.observe.usage import TenantLedger, UsageTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvkeep.core.cache import PagedCache
    from kvkeep.observe.usage import RequestObserver

__all__ = ["Watching"]


class Watching:
    """Makes the observers of one server's cache and requests, and ends them.

    ``usage`` and ``tenants`` are always there, with a series in metrics for tenants ``named``;
    ``explainer`` is None before `start`.
    """

    def __init__(self, cache: PagedCache, *, named: Collection[str] = ()) -> None:
        self.usage = UsageTable(cache.num_pages)
        self.tenants = TenantLedger(named=named)
        self.explainer: Explainer | None = None
        self._cache = cache
        for namespace in cache.namespaces():
            for run in cache.runs(namespace):
                self.usage.pages.stored(namespace.tenant, run.pages)
        self._ends: list[Callable[[], None]] = [cache.subscribe(self.usage.pages.see)]

    def start(self) -> tuple[RequestObserver, ...]:
        """Start the explainer's thread; return the observers of requests."""
        cache = self._cache
        self.explainer = explainer = Explainer(
            cache.page_size, cache.policy, reuse=cache.reuse, groups=cache.groups
        )
        explainer.share(cache.public)
        self._ends += [cache.subscribe(explainer.see), explainer.close]
        return self.usage.see, self.tenants.see, explainer.see_request

    def computed_tokens(self) -> dict[str, int]:
        """Return computed tokens by reason since the start."""
        return {} if self.explainer is None else self.explainer.computed()

    def close(self) -> None:
        """End the subscriptions. Past events can still be queried."""
        for end in self._ends:
            end()
        self._ends.clear()
