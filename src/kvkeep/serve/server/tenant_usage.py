"""`TenantUsage`: the ledger of tenants of one server, with what the pool and the tiers keep."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import IllegalStep
from kvkeep.observe.usage import TenantLedger

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.keys import Namespace
    from kvkeep.observe.usage.pages import PageOwners
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.server.settings import ServerSettings

__all__ = ["TenantUsage"]

_EVERY_S: Final = 10.0
"""Seconds between two looks at what the tiers keep."""


class TenantUsage:
    """Counts what each tenant uses from the start of the server on.

    What the pool keeps is exact. The tiers are read every ten seconds, and for each report.

    Thread safety: `sample`, and the ledger; `start` and `close` belong to the server.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, namespace: Callable[[str], Namespace]
    ) -> None:
        self.ledger = TenantLedger(engine.cache.page_size, named=settings.weights)
        self.since = time.time()
        self._engine = engine
        self._namespace = namespace
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, pages: PageOwners) -> None:
        """Follow the pages of the pool, and the tiers, if there are any."""
        # Nothing runs yet: no page is stored between these two lines.
        self.ledger.begin(pages.pages)
        pages.changed = self.ledger.pages_changed
        if self._engine.store is not None:
            self._thread = threading.Thread(target=self._run, name="kvkeep usage", daemon=True)
            self._thread.start()

    def sample(self) -> None:
        """Note what the tiers keep now. Cost: a pass over namespaces and tenants."""
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

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_EVERY_S)

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.sample()
