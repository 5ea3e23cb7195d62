"""`EngineCosts`: what an engine has learned of its costs, and how it chose by them."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from kvkeep.observe.usage import RequestLoaded
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.cost import CostModel, LearnedTransfer
    from kvkeep.observe.usage import LoadReport, RequestEvent

__all__ = ["EngineCosts", "LoadSums"]

_RECENT: Final = 1000  # loads
_TOKENS: Final = 1000  # of the prompt that gives the seconds per token


@dataclass(slots=True)
class LoadSums:
    """Sums over loads: requests of which the store had more than the pool.

    Attributes:
        loads: their number.
        loaded_tokens: tokens that came from the store.
        computed_stored_tokens: stored tokens that were computed, because that is faster …
        overtaken_tokens: … of these, those whose load turned slow.
        both: loads of which a part was loaded and another computed.
        computed: loads of which all was computed, late ones as well.
    """

    loads: int = 0
    loaded_tokens: int = 0
    computed_stored_tokens: int = 0
    overtaken_tokens: int = 0
    both: int = 0
    computed: int = 0

    def add(self, other: LoadSums) -> None:
        """Add the sums of other loads."""
        for one in fields(LoadSums):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class EngineCosts:
    """The costs of one engine, and the sums of its loads since the start and lately.

    Thread safety: all methods. Memory: 1,000 loads, about 200 bytes each.

    Attributes:
        cost: the engine's model.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._lock = threading.Lock()
        self._total = LoadSums()
        self._recent: deque[LoadSums] = deque(maxlen=_RECENT)

    def see(self, event: RequestEvent) -> None:
        """Count a load; an observer of an engine's requests."""
        if not isinstance(event, RequestLoaded):
            return
        sums = self._sums(event.report)
        if sums is not None:
            with self._lock:
                self._recent.append(sums)
                self._total.add(sums)

    def _sums(self, report: LoadReport) -> LoadSums | None:
        slower = [one for one in report.missing if one.what == "slower"]
        if not (report.sources or slower or report.late):
            return None
        return LoadSums(
            loads=1,
            loaded_tokens=report.tokens,
            computed_stored_tokens=_tokens(slower),
            overtaken_tokens=_tokens(one for one in slower if one.detail.startswith("overtaken")),
            both=bool(report.sources and (slower or report.late)),
            computed=not report.sources,
        )

    @property
    def total(self) -> LoadSums:
        """The sums since the start."""
        found = LoadSums()
        with self._lock:
            found.add(self._total)
        return found

    @property
    def recent(self) -> LoadSums:
        """The sums of the last 1,000 loads."""
        found = LoadSums()
        with self._lock:
            loads = list(self._recent)
        for one in loads:
            found.add(one)
        return found

    @property
    def prefill_seconds_per_token(self) -> float | None:
        """Seconds a token of a prompt of 1,000 tokens; None if nothing is known."""
        learned = self.cost.prefill
        return learned.prefill_s(0, _TOKENS) / _TOKENS if learned.known else None

    def read_bytes_per_s(self, tier: str) -> float | None:
        """The learned bandwidth of reads from a tier; None if it is unknown or has no bound."""
        learned = self.cost.reading(tier)
        return _speed(learned) if learned.known else None

    def tiers(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return, by tier and by read or write, the cost with its bandwidth and queue."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, kinds in self.cost.as_dict()["tiers"].items():
            for kind, one in kinds.items():
                learned = self.cost.reading(name) if kind == "read" else self.cost.writing(name)
                found.setdefault(name, {})[kind] = {**one, **_now(learned)}
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all for JSON; `CostModel.of` reads it. Names of tiers are made showable."""
        tiers = {showable(name): one for name, one in self.tiers().items()}
        return {
            **self.cost.as_dict(),
            "tiers": tiers,
            "loads": {"recent": asdict(self.recent), "total": asdict(self.total)},
        }


def _speed(learned: LearnedTransfer) -> float | None:
    speed = learned.cost.bytes_per_s
    return speed if speed < math.inf else None


def _now(learned: LearnedTransfer) -> dict[str, Any]:
    return {
        "bytes_per_s": _speed(learned),
        "queued_bytes": learned.queued,
        "busy_s": learned.busy_s,
        "running": learned.running,
    }


def _tokens(misses: Iterable[Any]) -> int:
    return sum(one.stop - one.start for one in misses)
