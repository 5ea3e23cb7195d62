"""`TenantUsage`: the ledger of tenants of one server, and its report for ``/kv/usage``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.errors import IllegalStep
from kvkeep.observe.usage import TenantLedger
from kvkeep.observe.usage.shortened import shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.keys import Namespace
    from kvkeep.observe.usage.pages import PageOwners
    from kvkeep.observe.usage.shortened import TenantOrder
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.server.settings import ServerSettings

__all__ = ["TenantUsage", "UsagePart", "usage_of"]

_EVERY_S: Final = 10.0
"""Seconds between two looks at the tiers for reports on the largest tenants alone."""


class UsagePart(NamedTuple):
    """Which tenants a report has; see `shortened`."""

    order: TenantOrder = "prompt_tokens"
    search: str = ""
    most: int | None = None


class TenantUsage:
    """Counts what each tenant uses from the start of the server on.

    What the pool keeps is exact. The tiers are read for reports on all tenants; what they keep is
    up to ten seconds old in the others.

    Thread safety: `report`, and the ledger.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, namespace: Callable[[str], Namespace]
    ) -> None:
        self.ledger = TenantLedger(engine.cache.page_size, named=settings.weights)
        self._since = time.time()
        self._model = settings.name
        self._engine = engine
        self._namespace = namespace
        self._sampled = float("-inf")

    def start(self, pages: PageOwners) -> None:
        """Follow the pages of the pool."""
        # Nothing runs yet: no page is stored between these two lines.
        self.ledger.begin(pages.pages)
        pages.changed = self.ledger.pages_changed

    def report(self, part: UsagePart) -> dict[str, Any]:
        """Return what tenants used and keep. Cost: a pass over namespaces and tenants."""
        now = time.monotonic()
        if part.most is None or now - self._sampled >= _EVERY_S:
            self._sampled = now
            self._sample()
        return usage_of(self.ledger, part, model=self._model, since=self._since)

    def _sample(self) -> None:
        """Note what the tiers keep now."""
        store = self._engine.store
        if store is None:
            return
        tenants = {}
        for tenant in self.ledger.tenants:
            stored = self._engine.store_tenant(self._namespace(tenant))
            if stored is not None:
                tenants[stored] = tenant
        try:
            own, others = store.used_bytes(list(tenants))
        except IllegalStep:  # the store was closed
            return
        size = max(1, store.geometry.bytes_per_token)
        tokens = {tenants[name]: count / size for name, count in own.items()}
        self.ledger.tiers_keep(tokens, others / size)


def usage_of(ledger: TenantLedger, part: UsagePart, *, model: str, since: float) -> dict[str, Any]:
    """Return rows of a ledger that began at ``since``, those with the most tokens first.

    The last row has all tenants without a row, and no ``cache_salt``.
    """
    lines, count = shortened(ledger.report(), order=part.order, search=part.search, most=part.most)
    rows = [
        {
            "cache_salt": line.tenant,
            **asdict(line.counts),
            "pool_tokens": line.pool_tokens,
            "tier_tokens": round(line.tier_tokens),
        }
        for line in lines
    ]
    return {
        "model": model,
        "since": since,
        "until": time.time(),
        "count": count,
        "tenants": rows,
    }
