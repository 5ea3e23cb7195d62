"""`PageOwners`: how many cached pages each namespace has, from the events of the cache."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.events import Evicted, Stored

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvkeep.core.events import Event

    PageArray = npt.NDArray[np.int32]

__all__ = ["PageOwners"]

_NOBODY = 0


class PageOwners:
    """Counts stored pages by the tenant of their namespace; a hook of a cache of ``num_pages``.

    Memory: 4 bytes a page and a little for each tenant with pages. Cost: a few microseconds an
    event. Thread safety: `see` is called by one thread at a time; ``pages`` may be read by any.
    """

    def __init__(self, num_pages: int) -> None:
        self.pages: Counter[str] = Counter()
        self._owners = np.zeros(num_pages, np.int32)  # by page: the number of a tenant
        self._tenants: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._last = _NOBODY

    def see(self, event: Event) -> None:
        """Count an event of the cache."""
        if isinstance(event, Stored):
            self.stored(event.namespace.tenant, event.pages)
        elif isinstance(event, Evicted):
            self._evicted(event.pages)

    def stored(self, tenant: str, pages: PageArray) -> None:
        """Count ``pages`` for a tenant."""
        number = self._numbers.get(tenant)
        if number is None:
            self._last += 1
            number = self._numbers[tenant] = self._last
            self._tenants[number] = tenant
        self._owners[pages] = number
        self.pages[tenant] += len(pages)

    def _evicted(self, pages: PageArray) -> None:
        numbers, counts = np.unique(self._owners[pages], return_counts=True)
        self._owners[pages] = _NOBODY
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            tenant = self._tenants.get(number)
            if tenant is None:
                continue
            self.pages[tenant] -= count
            if self.pages[tenant] <= 0:
                del self.pages[tenant], self._numbers[tenant], self._tenants[number]
