"""Pins with an end for prefixes that clients ask to be kept: `PoolPins` and `StorePins`."""

from __future__ import annotations

import hashlib
import heapq
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvkeep.core.errors import InvalidValue, KVKeepError, NotCached
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Engine

__all__ = ["Keep", "PoolPins", "StorePins", "Unkept"]

_log = logging.getLogger("kvkeep.server")

Unkept = Literal["over_budget", "no_tiers", "not_stored"]
"""Why tokens are not kept: there is no budget left, no tier, or the request stores nothing."""
_SHARE: Final = 0.1
"""Share of the pool, or of the largest tier, that the pins of one namespace cover."""
_ALL_SHARE: Final = 0.5
"""Share that the pins of all namespaces cover together."""
_AFTER_S: Final = (1.0, 10.0, 60.0)
"""Seconds after which a pin is set: some tiers have written the blocks by then, some later."""
_CLOSE_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Keep:
    """What one prompt asks to be kept: (position in tokens, seconds), in order; and the result.

    ``pinned_tokens`` of the prompt are pinned, in whole pages, or whole blocks of tiers and the
    rest behind them; ``unpinned_tokens`` more are not: ``why`` says why.
    """

    wanted: Sequence[tuple[int, float]]
    pinned_tokens: int = 0
    unpinned_tokens: int = 0
    why: Unkept = "over_budget"

    def refuse(self, why: Unkept) -> None:
        """Pin nothing."""
        self.unpinned_tokens = max((at for at, _ in self.wanted), default=0)
        self.why = why


@dataclass(slots=True, eq=False)
class _Pin:
    """The pin of a prefix. ``units`` are digests of the prefixes that end with each unit."""

    tokens: TokenArray
    namespace: Namespace
    units: list[bytes]
    end: float
    handle: Any = None
    tries: int = 0
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Tenant:
    """The pins of one namespace by their last unit, oldest first, and how many cover each unit."""

    pins: OrderedDict[bytes, _Pin] = field(default_factory=OrderedDict)
    units: Counter[bytes] = field(default_factory=Counter)


class _Pins:
    """The pins of all namespaces, with their ends and a cap for each.

    A unit is a page of the pool, or a block of the tiers; with ``tails``, the rest behind the last
    block is one, too. A unit under several pins of a namespace counts once. A pin that exceeds the
    cap of its namespace is shortened to the beginning of its prefix. At the cap for all, the oldest
    pin of the namespace that has the most units ends, for one that has fewer. A prefix that is
    pinned again gets a new end.

    Thread safety: all methods. Memory: about 250 bytes a unit, and 4 bytes a token of each pin.
    Cost: O(units) for a prompt, and O(namespaces) for each pin that ends for another namespace.
    """

    def __init__(self, unit: int, units: int, clock: Callable[[], float], *, tails: bool) -> None:
        self._unit = unit
        self._tails = tails
        self._most_each = int(units * _SHARE)
        self._most = int(units * _ALL_SHARE)
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: dict[Namespace, _Tenant] = {}
        self._ends: list[tuple[float, int, _Pin]] = []
        self._serial = 0
        self._count = 0
        self.pinned_tokens = 0
        """Tokens pinned since the start, again for each request."""
        self.unpinned_tokens = 0
        """Tokens not pinned since the start, because there was no budget left."""
        self.given_tokens = 0
        """Tokens whose pins ended early since the start, for another namespace."""

    def keep(self, tokens: TokenArray, namespace: Namespace, keep: Keep) -> None:
        """Pin what ``keep`` wants of a prompt; set its results."""
        ends = [(self._cut(at, len(tokens)), seconds) for at, seconds in keep.wanted]
        last = max((at for at, _ in ends), default=0)
        if not last:
            return
        row = tokens[:last]
        units = self._units(row)
        with self._lock:
            self._expire()
            for at, seconds in ends:
                if at:
                    pinned = self._keep(row, units[: -(-at // self._unit)], namespace, at, seconds)
                    keep.pinned_tokens = max(keep.pinned_tokens, pinned)
            keep.unpinned_tokens = last - keep.pinned_tokens
            self.pinned_tokens += keep.pinned_tokens
            self.unpinned_tokens += keep.unpinned_tokens

    @property
    def count(self) -> int:
        """Units under pins now."""
        with self._lock:
            self._expire()
            return self._count

    def _cut(self, at: int, length: int) -> int:
        """Return the position of the last whole unit, or the end of the prompt if it may be cut."""
        return at if self._tails and at == length else at // self._unit * self._unit

    def _units(self, row: TokenArray) -> list[bytes]:
        data = memoryview(row.tobytes())
        size = self._unit * TOKEN_BYTES
        digest = hashlib.blake2b(digest_size=16)
        units = []
        for start in range(0, len(data), size):
            digest.update(data[start : start + size])
            units.append(digest.digest())
        return units

    # --- under the lock ----------------------------------------------------------------------

    def _keep(
        self, row: TokenArray, units: list[bytes], namespace: Namespace, at: int, seconds: float
    ) -> int:
        """Pin ``row[:at]`` as far as there is room; return the tokens pinned."""
        tenant = self._tenants.setdefault(namespace, _Tenant())
        covered = 0
        while covered < len(units) and units[covered] in tenant.units:
            covered += 1
        more = min(len(units) - covered, self._most_each - len(tenant.units))
        most = covered + self._room(tenant, more)
        if most < len(units):
            units, at = units[:most], most * self._unit
        pinned = 0
        if units:
            pin = _Pin(row[:at], namespace, units, self._clock() + seconds)
            again = tenant.pins.get(units[-1])
            if again is not None:
                pin.end = max(pin.end, again.end)
            pinned = self._set(pin)
        if pinned:
            if pinned < at:
                pin.tokens, pin.units = row[:pinned], units[: -(-pinned // self._unit)]
            self._add(tenant, pin)
        elif not tenant.pins:
            del self._tenants[namespace]
        return pinned

    def _room(self, tenant: _Tenant, wanted: int) -> int:
        """Return how many units more there is room for, of those wanted; others may give way."""
        while (room := self._most - self._count) < wanted:
            giver = max(self._tenants.values(), key=lambda one: len(one.units))
            if giver is tenant or len(giver.units) <= len(tenant.units) + room:
                break
            oldest = next(iter(giver.pins.values()))
            self.given_tokens += len(oldest.tokens)
            self._drop(oldest)
        return max(0, min(room, wanted))

    def _add(self, tenant: _Tenant, pin: _Pin) -> None:
        before = len(tenant.units)
        tenant.units.update(pin.units)
        self._count += len(tenant.units) - before
        # Pins of shorter prefixes, and an earlier one of the same, that end no later.
        others = [one for unit in pin.units if (one := tenant.pins.get(unit)) is not None]
        tenant.pins.pop(pin.units[-1], None)
        tenant.pins[pin.units[-1]] = pin
        for other in others:
            if other.end <= pin.end:
                self._drop(other)
        self._serial += 1
        heapq.heappush(self._ends, (pin.end, self._serial, pin))
        if len(self._ends) > 2 * self._count + 64:
            self._ends = [item for item in self._ends if not item[2].ended]
            heapq.heapify(self._ends)

    def _drop(self, pin: _Pin, *, over: bool = False) -> None:
        """End a pin; ``over``: its time has passed."""
        tenant = self._tenants[pin.namespace]
        pin.ended = True
        if tenant.pins.get(pin.units[-1]) is pin:
            del tenant.pins[pin.units[-1]]
        free = [unit for unit in pin.units if tenant.units[unit] == 1]
        tenant.units.subtract(pin.units)
        for unit in free:
            del tenant.units[unit]
        self._count -= len(free)
        if not tenant.pins:
            self._tenants.pop(pin.namespace, None)
        if not over:
            self._unset(pin, (len(pin.units) - len(free)) * self._unit)

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            pin = heapq.heappop(self._ends)[2]
            if not pin.ended:
                self._drop(pin, over=True)

    def _set(self, pin: _Pin) -> int:
        """Set a pin where the KV is; return the tokens pinned."""
        raise NotImplementedError

    def _unset(self, pin: _Pin, start: int) -> None:
        """End a pin where the KV is; tokens before ``start`` are under other pins."""
        raise NotImplementedError

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        with self._lock:
            for tenant in self._tenants.values():
                assert tenant.pins, "a namespace without pins"
                assert tenant.units == Counter(
                    unit for pin in tenant.pins.values() for unit in pin.units
                )
                assert len(tenant.units) <= self._most_each
            assert self._count == sum(len(tenant.units) for tenant in self._tenants.values())
            assert self._count <= self._most


class PoolPins(_Pins):
    """Soft pins in the page pool: no request ever waits or fails because of one."""

    def __init__(self, cache: PagedCache, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(cache.page_size, cache.num_pages if cache.reuse else 0, clock, tails=False)
        self._cache = cache

    def keep(self, tokens: TokenArray, namespace: Namespace, keep: Keep) -> None:
        """Pin what ``keep`` wants of a prompt whose pages are cached now; set its results."""
        if self._cache.reuse:
            super().keep(tokens, namespace, keep)

    def _set(self, pin: _Pin) -> int:
        seconds = max(pin.end - self._clock(), 0.001)
        try:
            pin.handle = self._cache.pin(pin.tokens, pin.namespace, ttl=seconds)
        except (NotCached, InvalidValue):  # the request stored nothing, or too many pins are set
            return 0
        pinned: int = pin.handle.num_tokens
        return pinned

    def _unset(self, pin: _Pin, start: int) -> None:
        with suppress(NotCached):  # it has ended by itself
            self._cache.unpin(pin.handle)


class StorePins(_Pins):
    """Pins of stored prompts in every tier with a budget of its own, once they are written there.

    Each tier pins at most half of what it holds. So `keep` promises what the budgets allow, and
    ``lost_tokens`` counts what could not be pinned. A thread of its own sets and ends the pins,
    since tiers may be slow; `close` ends it.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.monotonic,
        *,
        after_s: Sequence[float] = _AFTER_S,
    ) -> None:
        assert engine.store is not None, "a server without a store makes none"
        self._engine = engine
        self._store = store = engine.store
        largest = max((tier.capacity or 0 for tier in store.stats().tiers), default=0)
        blocks = largest // max(1, store.block_tokens * store.geometry.bytes_per_token)
        super().__init__(store.block_tokens, blocks, clock, tails=True)
        self._after_s = after_s
        self._waiting: list[tuple[float, int, _Pin]] = []  # by the time of the next try
        self._over: deque[tuple[TokenArray, int, str]] = deque()
        self._wake = threading.Condition(self._lock)
        self._closing: float | None = None  # the time by which the thread ends
        self._thread: threading.Thread | None = None
        self.lost_tokens = 0
        """Tokens within the budgets that no tier pinned: not written, or more than its half."""

    def close(self) -> None:
        """Set the pins that are still to be set, for two seconds at most, and end the thread."""
        with self._lock:
            self._closing = time.monotonic() + _CLOSE_S
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _set(self, pin: _Pin) -> int:
        pin.handle = self._engine.store_tenant(pin.namespace)
        if pin.handle is None:  # the engine is closed
            return 0
        self._try_later(pin)
        return len(pin.tokens)

    def _unset(self, pin: _Pin, start: int) -> None:
        if start < len(pin.tokens):
            self._over.append((pin.tokens, start, pin.handle))
            self._wake.notify()

    def _try_later(self, pin: _Pin) -> None:
        due = time.monotonic() + self._after_s[pin.tries]
        heapq.heappush(self._waiting, (due, id(pin), pin))
        if self._thread is None and self._closing is None:
            self._thread = threading.Thread(target=self._run, name="kvkeep pins", daemon=True)
            self._thread.start()
        self._wake.notify()

    # --- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except KVKeepError as error:  # the store was closed
                _log.warning("a pin could not be set in the tiers: %s", error)

    def _next(self) -> Callable[[], None] | None:
        """Wait for what is due, or take it at once when this closes; None at the end."""
        with self._lock:
            while not self._over and self._closing is None:
                wait = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if wait is not None and wait <= 0:
                    break
                self._wake.wait(wait)
            if self._closing is not None and time.monotonic() > self._closing:
                return None
            if self._over:
                tokens, start, tenant = self._over.popleft()
                return lambda: self._end(tokens, start, tenant)
            if not self._waiting:
                return None
            pin = heapq.heappop(self._waiting)[2]
            return lambda: self._try(pin)

    def _end(self, tokens: TokenArray, start: int, tenant: str) -> None:
        self._store.unpin(tokens, start, tenant=tenant)

    def _try(self, pin: _Pin) -> None:
        seconds = 0.0 if pin.ended else pin.end - self._clock()
        if seconds <= 0:
            return
        pinned = self._store.pin(pin.tokens, seconds, tenant=pin.handle)
        with self._lock:
            pin.tries += 1
            if pin.ended:  # meanwhile: what is to be unpinned waits in the queue
                return
            if pin.tries < len(self._after_s):
                self._try_later(pin)
            else:
                self.lost_tokens += len(pin.tokens) - pinned
