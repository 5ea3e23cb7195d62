"""`ServerLosses`: evictions and errors of a server: in the last minute, the last ten, in all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal

from kvkeep.observe.usage.lately import EVERY_S, Lately
from kvkeep.serve.server.schemas.see import LiveLoss
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client import Counter

    from kvkeep.core.cache import CacheStats
    from kvkeep.observe.usage.lately import Counts
    from kvkeep.serve.engine import Engine
    from kvkeep.store.tiers import TierStats

__all__ = ["ServerLosses", "loss_rows", "tier_losses"]

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
_KINDS: Final[dict[str, Literal["eviction", "refusal"]]] = {
    "evicted": "eviction",
    "refused": "refusal",
}
_PATIENCE_S: Final = 10.0


class ServerLosses:
    """Follows what is lost: pages and blocks that are evicted, requests and calls that fail.

    ``requests`` counts requests by outcome. A thread samples the counters every five seconds, so
    that the last minute is known when somebody looks.

    Thread safety: `rows`; `start` and `close` belong to the server.
    """

    def __init__(self, engine: Engine, requests: Counter) -> None:
        self._engine = engine
        self._requests = requests
        self._lately = Lately()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep losses", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    def rows(self, cache: CacheStats, tiers: Sequence[TierStats]) -> list[LiveLoss]:
        """Return what ever happened, with the counters of these statistics."""
        return loss_rows(self._lately, self._counts(cache, tiers))

    def _counts(self, cache: CacheStats, tiers: Sequence[TierStats]) -> Counts:
        """Return counters by what they count and where."""
        counts: Counts = {("evicted", _POOL): cache.evicted_pages}
        counts |= {(outcome, _REQUESTS): 0 for outcome in _OUTCOMES}
        for metric in self._requests.collect():
            for sample in metric.samples:
                key = sample.labels.get("outcome", ""), _REQUESTS
                if key in counts and sample.name.endswith("_total"):
                    counts[key] += int(sample.value)
        return counts | tier_losses(tiers)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._lately.due:  # else somebody looks at the dashboard
                store = self._engine.store
                tiers = () if store is None else store.stats().tiers
                self._lately.note(self._counts(self._engine.cache.stats(), tiers))


def tier_losses(tiers: Iterable[TierStats]) -> Counts:
    """Return what tiers lost, by what was lost and the name of the tier."""
    return {
        (what, tier.name): int(tier.counters[name])
        for tier in tiers
        for what, name in _OF_TIERS.items()
    }


def loss_rows(lately: Lately, counts: Counts) -> list[LiveLoss]:
    """Note ``counts``, and return those that ever happened, with how many of them lately."""
    lately.note(counts)
    return [
        LiveLoss(
            kind=_KINDS.get(what, "error"),
            what=what,
            place=showable(place),
            minute=grown.minute,
            ten_minutes=grown.ten_minutes,
            total=grown.total,
        )
        for (what, place), grown in lately.growth(counts).items()
        if grown.total
    ]
