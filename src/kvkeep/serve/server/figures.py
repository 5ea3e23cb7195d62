"""`Figures`: what a server has lately done, kept so that telling it costs next to nothing."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Figures", "FirstTokenTimes", "ReuseTotals", "SessionFigures", "TenantFigures"]

_BUCKET_S = 5
_BUCKETS = 120  # ten minutes
_WINDOW_S = 300.0
_MOST_TIMES = 2000
_WARM = 0.5  # so much of its prompt was reused
# Those that came longest ago are forgotten.
_MOST_TENANTS = 1000
_MOST_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds to the first token of late requests; None where there were none."""

    count: int
    p50_s: float | None
    p95_s: float | None


@dataclass(slots=True)
class ReuseTotals:
    """What was asked for, and how many tokens of it were reused."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0

    def take(self, prompt_tokens: int, reused_tokens: int) -> None:
        """One request more."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused_tokens


@dataclass(slots=True)
class TenantFigures(ReuseTotals):
    """Of one tenant, which is a ``cache_salt``."""

    tenant: str = ""


@dataclass(slots=True)
class SessionFigures(ReuseTotals):
    """Of one session of a tenant."""

    tenant: str = ""
    session: str = ""
    turns: int = 0
    last_at: float = 0.0
    latest: int = field(default=-1, repr=False)
    """The number of the latest turn."""


@dataclass(slots=True)
class _Bucket(ReuseTotals):
    """What was asked for within five seconds."""

    number: int = 0


class Figures:
    """The last ten minutes in steps of five seconds, times to first tokens, tenants, sessions.

    Tenants and sessions are remembered up to a thousand each, their figures since they were first
    remembered. Memory is bounded: below a megabyte, names aside. Cost: a microsecond or two a
    request.

    Thread safety: every method takes the one lock. ``clock`` gives seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = int(clock()) // _BUCKET_S
        self._buckets: deque[_Bucket] = deque(maxlen=_BUCKETS)
        self._times: deque[tuple[float, float, bool]] = deque(maxlen=_MOST_TIMES)
        self._tenants: OrderedDict[str, TenantFigures] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], SessionFigures] = OrderedDict()

    # --- noting ------------------------------------------------------------------------------

    def opened(
        self, prompt_tokens: int, reused: int, tenant: str, session: str | None, turn: int | None
    ) -> tuple[ReuseTotals, ...]:
        """A request was admitted, with so much of its prompt there.

        Returns where it was counted, for `reused`: what else it reuses belongs there.
        """
        now = self._clock()
        with self._lock:
            shares: list[ReuseTotals] = [self._bucket(now), self._tenant(tenant)]
            if session is not None:
                shares.append(self._session(tenant, session, turn, now))
            for share in shares:
                share.take(prompt_tokens, reused)
        return tuple(shares)

    def reused(self, shares: Iterable[ReuseTotals], tokens: int) -> None:
        """So many tokens more were reused by a request that `opened` has counted."""
        with self._lock:
            for share in shares:
                share.reused_tokens += tokens

    def note_first_token(self, seconds: float, *, prompt_tokens: int, reused_tokens: int) -> None:
        """A client has waited so long for its first token."""
        with self._lock:
            self._times.append((self._clock(), seconds, reused_tokens >= _WARM * prompt_tokens))

    def _bucket(self, now: float) -> _Bucket:
        number = int(now) // _BUCKET_S
        if not self._buckets or self._buckets[-1].number < number:  # a clock may be set back
            self._buckets.append(_Bucket(number=number))
        return self._buckets[-1]

    def _tenant(self, tenant: str) -> TenantFigures:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = TenantFigures(tenant=tenant)
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return known

    def _session(self, tenant: str, session: str, turn: int | None, now: float) -> SessionFigures:
        key = tenant, session
        known = self._sessions.get(key)
        if known is None:
            known = self._sessions[key] = SessionFigures(tenant=tenant, session=session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        known.last_at = now
        if turn is None or turn > known.latest:  # others of a turn stand beside it
            known.turns += 1
            known.latest = known.latest if turn is None else turn
        return known

    # --- telling -----------------------------------------------------------------------------

    def history(self) -> list[tuple[int, int, int]]:
        """``(seconds since 1970, prompt tokens, reused tokens)`` of each five seconds, in order.

        The last ten minutes, or since the start; the last of them are not over yet.
        """
        with self._lock:
            newest = max(int(self._clock()) // _BUCKET_S, self._newest)
            first = max(self._began, newest - _BUCKETS + 1)
            noted = {bucket.number: bucket for bucket in self._buckets}
            empty = _Bucket()
            return [
                (number * _BUCKET_S, bucket.prompt_tokens, bucket.reused_tokens)
                for number in range(first, newest + 1)
                for bucket in (noted.get(number, empty),)
            ]

    @property
    def _newest(self) -> int:
        return self._buckets[-1].number if self._buckets else self._began

    def times(self) -> tuple[FirstTokenTimes, FirstTokenTimes]:
        """Times to the first token in the last five minutes: of cold requests, and of warm ones.

        Warm is who reused half of its prompt or more. Of the last 2,000 requests at most.
        """
        since = self._clock() - _WINDOW_S
        with self._lock:
            late = [(seconds, warm) for at, seconds, warm in self._times if at >= since]
        cold, warm = ([s for s, is_warm in late if is_warm == asked] for asked in (False, True))
        return _times(cold), _times(warm)

    def tenants(self, most: int) -> list[TenantFigures]:
        """Those with the most prompt tokens first."""
        with self._lock:
            known = self._tenants.values()
            largest = heapq.nlargest(most, known, key=lambda one: one.prompt_tokens)
            return [replace(one) for one in largest]

    def sessions(self, most: int) -> list[SessionFigures]:
        """Those that were heard of last first."""
        with self._lock:
            latest = islice(reversed(self._sessions.values()), most)
            return [replace(one) for one in latest]


def _times(seconds: list[float]) -> FirstTokenTimes:
    if not seconds:
        return FirstTokenTimes(0, None, None)
    seconds.sort()
    last = len(seconds) - 1
    return FirstTokenTimes(len(seconds), seconds[round(last * 0.5)], seconds[round(last * 0.95)])
