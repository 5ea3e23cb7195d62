"""`LossLog`: why each block that a tier lost, or never wrote, is missing."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["Loss", "LossKind", "LossLog", "Miss"]

_MOST = 100_000  # blocks

LossKind = Literal[
    "evicted", "dropped", "refused", "removed", "damaged", "unavailable", "late", "slower", "never"
]


@dataclass(frozen=True, slots=True)
class Miss:
    """Why tokens ``start`` … ``stop - 1`` of a prompt do not come from a store.

    ``at`` is in Unix seconds, None where no moment is known; for several blocks it is the latest.
    ``load_s`` and ``compute_s`` are the expected seconds with the tokens loaded, and computed, for
    "slower"; None for others.
    ``tier`` names the tier that lost them, empty where no tier did. ``detail`` is one word, which
    ``": "`` and more text may follow:

    - "evicted": deleted to make room. The name of the tier's eviction policy.
    - "dropped": never written. "queue full", "no room", "quota" (the tenant's is full), "write
      failed", "breaker" (the circuit breaker is open), "no time" (the tier above had to delete it
      at once), "write budget" (the tier's write budget is spent), "fault" (a bug of kvkeep; the
      log has the traceback).
    - "refused": "admission" (the tiering policy admits it after more touches); "answer" (generated
      tokens, where only prompts are stored); "unread" (generated tokens, where answers like this
      one are never read again); else why the tier does not serve this record.
    - "removed": "cleared" or "removed" by request, "ttl" (expired), "gone" (deleted by others).
    - "damaged": the record did not verify.
    - "unavailable": "breaker" (the circuit breaker is open), or the error.
    - "late": the tier did not answer in time.
    - "slower": the tier has the tokens, and computing them is faster (`Miss.slower`): "expected"
      (they were not read) or "overtaken" (reading them turned slow). Both times.
    - "never": no loss is recorded; "part" if less is stored than is worth loading, "state" if the
      KV is stored, and no state or window behind which a model could go on.
    """

    start: int
    stop: int
    tier: str
    what: LossKind
    at: float | None
    detail: str
    load_s: float | None = None
    compute_s: float | None = None

    @classmethod
    def slower(
        cls, start: int, stop: int, tier: str, *, load_s: float, compute_s: float,
        overtaken: bool = False,
    ) -> Miss:  # fmt: skip
        """Return why stored tokens were not loaded: computing them is faster.

        ``load_s`` are the expected seconds of the request had they been loaded, ``compute_s`` with
        them computed.
        """
        word = "overtaken" if overtaken else "expected"
        times = f"loading would have taken {_ms(load_s)}, computing {_ms(compute_s)}"
        return cls(start, stop, tier, "slower", time.time(), f"{word}: {times}", load_s, compute_s)


def _ms(seconds: float) -> str:
    number = seconds * 1e3
    return f"{number:.3g} ms" if number < 1000 else f"{number:.0f} ms"


class Loss(NamedTuple):
    """Why one block was lost; for the fields see `Miss`."""

    tier: str
    what: LossKind
    at: float | None
    detail: str


class LossLog:
    """The last loss of each of the last `_MOST` blocks that were lost.

    A block that is stored again keeps its entry; look up only blocks that are missing. An eviction
    does not replace the entry of a lower tier that refused or dropped the block: without that, the
    block would still be there. ``tiers`` are the names of the tiers, fastest first.

    Thread safety: all methods. Cost: one dict update under a lock for each loss, and about 350
    bytes a block.
    """

    def __init__(self, tiers: Sequence[str] = ()) -> None:
        self.dropping: Callable[[str, str], None] = lambda _tier, _why: None
        """Called with the tier and the detail of each loss of the kind "dropped"."""
        self._rank = {name: rank for rank, name in enumerate(tiers)}
        self._lock = threading.Lock()
        self._last: OrderedDict[bytes, Loss] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, blocks: Collection[bytes], tier: str, what: LossKind, detail: str) -> None:
        """Record that ``blocks`` were lost now."""
        event = Loss(tier, what, time.time(), detail)
        last = self._last
        with self._lock:
            for block in blocks:
                known = last.get(block)
                if known is None:
                    last[block] = event
                    if len(last) > _MOST:
                        last.popitem(last=False)
                    continue
                if what != "evicted" or not self._lost_below(known, tier):
                    last[block] = event
                last.move_to_end(block)
        if what == "dropped" and blocks:
            self.dropping(tier, detail)

    def of(self, block: bytes) -> Loss | None:
        """Return the last loss of ``block``, None if none is recorded."""
        return self._last.get(block)

    def _lost_below(self, known: Loss, tier: str) -> bool:
        if known.what not in ("refused", "dropped"):
            return False
        return self._rank.get(known.tier, 0) > self._rank.get(tier, 0)
