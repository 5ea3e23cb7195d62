"""What became of blocks that are gone: the last thing that happened to each, and in which tier."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Fate", "Fates", "Happened", "What"]

What = Literal[
    "evicted", "dropped", "refused", "removed", "damaged", "unavailable", "late", "never"
]


@dataclass(frozen=True, slots=True)
class Fate:
    """Why tokens ``start`` … ``stop - 1`` of a prompt do not come from a store.

    ``at`` is in Unix seconds, None where no moment is known; of several blocks it is the latest.
    ``tier`` is empty where it is none's doing. ``detail`` is a word, and maybe ``": "`` with more
    text behind it:

    - "evicted": it made room there. The name of the tier's eviction policy.
    - "dropped": not written there. "queue full", "no room", "write failed", "breaker" (the tier is
      left alone), "no time" (it had to leave the tier above at once).
    - "refused": "admission" (the store's tiering admits it later, or never); "answer" (it was
      generated, and only prompts were to be stored); else a record that is not for this tier, and
      why.
    - "removed": "cleared" or "removed" by request, "ttl" (its time was over), "gone" (the place has
      lost it, or others took it away).
    - "damaged": what did not verify.
    - "unavailable": "breaker" (the tier is left alone now), or what failed.
    - "late": what took too long.
    - "never": nothing is known of it; "part" where less than is worth loading is stored.
    """

    start: int
    stop: int
    tier: str
    what: What
    at: float | None
    detail: str


class Happened(NamedTuple):
    """What happened to a block; the words are those of `Fate`."""

    tier: str
    what: What
    at: float | None
    detail: str


class Fates:
    """The last thing that happened to each of the last ``most`` blocks that something happened to.

    What is stored again keeps its fate here: who asks, asks only about what is not there. An
    eviction does not hide that a tier further down refused or dropped the block: it would be there
    still. ``tiers`` are their names, fastest first.

    Thread safety: all methods. Cost: one change of a dict under a lock for each event, and about
    350 bytes a block.
    """

    def __init__(
        self,
        tiers: Sequence[str] = (),
        most: int = 100_000,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.most = most
        self._rank = {name: rank for rank, name in enumerate(tiers)}
        self._clock = clock
        self._lock = threading.Lock()
        self._last: OrderedDict[bytes, Happened] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, blocks: Iterable[bytes], tier: str, what: What, detail: str) -> None:
        """It happened to ``blocks`` now."""
        event = Happened(tier, what, self._clock(), detail)
        last = self._last
        with self._lock:
            for block in blocks:
                known = last.get(block)
                if known is None:
                    last[block] = event
                    if len(last) > self.most:
                        last.popitem(last=False)
                    continue
                if what != "evicted" or not self._lost_below(known, tier):
                    last[block] = event
                last.move_to_end(block)

    def of(self, block: bytes) -> Happened | None:
        """The last thing that happened to ``block``, if that is remembered."""
        return self._last.get(block)

    def _lost_below(self, known: Happened, tier: str) -> bool:
        if known.what not in ("refused", "dropped"):
            return False
        rank = self._rank
        return rank.get(known.tier, 0) > rank.get(tier, 0)
