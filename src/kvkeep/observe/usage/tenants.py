"""`TenantLedger`: the tokens that each tenant read, computed and stored."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace
from heapq import nlargest
from typing import TYPE_CHECKING

from kvkeep.core.errors import whole
from kvkeep.observe.usage.records import (
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestEnded,
    RequestLoaded,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvkeep.observe.usage.records import RequestEvent

__all__ = ["TenantCounts", "TenantLedger"]

_LEAST_SHARE = 0.01
"""Share of all prompt tokens from which on a tenant has a series of its own in metrics."""


@dataclass(slots=True)
class TenantCounts:
    """What a tenant used since the start: requests that were admitted, and tokens.

    ``read_tokens`` of the prompts were reused, ``loaded_tokens`` of these came from tiers;
    ``computed_tokens`` include repetitions after a preemption. ``stored_tokens`` were handed to the
    tiers.
    """

    requests: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    stored_tokens: int = 0

    def add(self, other: TenantCounts, sign: int = 1) -> None:
        """Add the counts of ``other``, or subtract them."""
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


_COUNTED = tuple(field.name for field in fields(TenantCounts))


class TenantLedger:
    """A `RequestObserver` (`see`) that counts by tenant; it loses nothing.

    At most ``most`` tenants have counts, beside those ``named``: beyond that, half of them are
    added to those of all others, those with the fewest prompt tokens. The sum over all is exact.

    Thread safety: all methods. Memory: about 300 bytes a tenant. Cost: about 2 µs an event.
    """

    def __init__(self, *, most: int = 1000, named: Collection[str] = ()) -> None:
        self._named = frozenset(named)
        self._most = whole("most", most, 2) + len(self._named)
        self._lock = threading.Lock()
        self._rows: dict[str, TenantCounts] = {}
        self._others = TenantCounts()
        self._series: dict[str, TenantCounts] = {}  # by tenant: the counts when its series began

    def see(self, event: RequestEvent) -> None:
        """Count an event of a request."""
        with self._lock:
            match event:
                case RequestAdmitted():
                    counts = self._row(event.request.namespace.tenant)
                    counts.requests += 1
                    counts.prompt_tokens += len(event.request.prompt)
                    counts.read_tokens += event.cached_tokens
                case RequestLoaded():
                    counts = self._row(event.request.namespace.tenant)
                    counts.read_tokens += event.report.tokens
                    counts.loaded_tokens += event.report.tokens
                case PromptComputed():
                    self._row(event.request.namespace.tenant).computed_tokens += event.tokens
                case PromptStored():
                    self._row(event.request.namespace.tenant).stored_tokens += event.tokens
                case RequestEnded():
                    self._row(event.request.namespace.tenant).generated_tokens += event.generated

    def _row(self, tenant: str) -> TenantCounts:
        row = self._rows.get(tenant)
        if row is None:
            if len(self._rows) >= self._most:
                self._fold()
            row = self._rows[tenant] = TenantCounts()
        return row

    def _fold(self) -> None:
        """Add half of the rows to that of all others."""
        fixed = self._named | self._series.keys()
        small = [name for name in self._rows if name not in fixed]
        small.sort(key=lambda name: self._rows[name].prompt_tokens)
        for name in small[: max(1, len(small) // 2)]:
            self._others.add(self._rows.pop(name))

    def largest(self, most: int) -> list[tuple[str, TenantCounts]]:
        """Return the ``most`` tenants with the most prompt tokens, largest first, and copies."""
        with self._lock:
            rows = nlargest(most, self._rows.items(), key=lambda row: row[1].prompt_tokens)
            return [(tenant, replace(counts)) for tenant, counts in rows]

    def series(self, most: int) -> list[tuple[str | None, TenantCounts]]:
        """Return counts for counters in metrics: none of them ever falls.

        At most ``most`` tenants have a series, and keep it: named ones, then those with a
        hundredth of all prompt tokens. A series begins at 0, and what was before stays in the one
        of all others, which is the last.
        """
        with self._lock:
            whole = TenantCounts()
            for row in (*self._rows.values(), self._others):
                whole.add(row)
            self._begin_series(most, whole.prompt_tokens)
            lines: list[tuple[str | None, TenantCounts]] = []
            for tenant, before in self._series.items():
                counts = replace(self._rows[tenant])
                counts.add(before, -1)
                whole.add(counts, -1)
                lines.append((tenant, counts))
            return [*lines, (None, whole)]

    def _begin_series(self, most: int, prompts: int) -> None:
        room = most - len(self._series)
        if room <= 0:
            return
        new = [name for name in self._rows if name not in self._series]
        least = max(1.0, prompts * _LEAST_SHARE)

        def order(name: str) -> tuple[bool, int]:
            return name in self._named, self._rows[name].prompt_tokens

        for name in nlargest(room, new, key=order):
            if name in self._named or self._rows[name].prompt_tokens >= least:
                self._series[name] = replace(self._rows[name])
