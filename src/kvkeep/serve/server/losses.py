"""`ServerLosses`: evictions and errors of a server: in the last minute, the last ten, in all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from kvkeep.observe.usage.history import EVERY_S, Lately
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Counter

    from kvkeep.observe.usage.history import Counts
    from kvkeep.store.tiers import TierStats

__all__ = ["ServerLosses", "loss_counts"]

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
